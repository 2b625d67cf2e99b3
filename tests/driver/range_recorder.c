/* range_recorder.c - the tool's side of NVTX: asks for the calls that open the domain, and push and
 * pop its ranges, and writes them down. For one thread.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "range_recorder.h"

#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <string.h>

static recorder_range ranges[RECORDER_MAX_RANGES];
static int num_ranges, num_open, num_extra;
static char kv8_domain; /* its address is the handle */

void recorder_reset(void) {
    num_ranges = 0;
}
int recorder_num_ranges(void) {
    return num_ranges;
}
const recorder_range *recorder_get_range(int range_idx) {
    return &ranges[range_idx];
}
int recorder_num_open(void) {
    return num_open;
}
int recorder_num_extra(void) {
    return num_extra;
}

static nvtxDomainHandle_t create_domain(const char *name) {
    return strcmp(name, "kv8") == 0 ? (nvtxDomainHandle_t)(void *)&kv8_domain : NULL;
}

static int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *range) {
    if ((void *)domain != &kv8_domain || range->messageType != NVTX_MESSAGE_TYPE_ASCII) return -1;
    if (num_ranges < RECORDER_MAX_RANGES) {
        recorder_range *const r = &ranges[num_ranges++];
        snprintf(r->words, sizeof r->words, "%s", range->message.ascii);
        r->depth = num_open;
    }
    return num_open++;
}

static int pop(nvtxDomainHandle_t domain) {
    num_extra += (void *)domain != &kv8_domain || num_open == 0;
    return num_open > 0 ? --num_open : -1;
}

/* What NVTX looks for in the library. */
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *const callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table = NULL;
    unsigned size = 0;
    if (callbacks == NULL ||
        callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0 ||
        size <= NVTX_CBID_CORE2_DomainCreateA)
        return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create_domain;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
