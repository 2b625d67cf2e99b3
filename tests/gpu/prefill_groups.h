/* prefill_groups.h - the two groups of prefill tests, wgmma's kernels and those of mma.sync: which
 * kernels run, the formats that a group takes, a plain case of each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_GROUPS_H
#define KV8_PREFILL_GROUPS_H

#include "attention_device_case.h"
#include "device_plan.h"

static const char on_wgmma[] = "kv8_prefill_*__sm90", on_mma[] = "kv8_prefill_*__sm80";
/* The kernels of the group of tests that runs. */
static const char *kernels;

/* Of Q, K and V. */
static const kv8_dtype prefill_formats[][3] = {
    {KV8_BF16, KV8_E4M3, KV8_E4M3}, {KV8_BF16, KV8_E5M2, KV8_E5M2}, {KV8_BF16, KV8_INT8, KV8_INT8},
    {KV8_BF16, KV8_F16, KV8_F16},   {KV8_BF16, KV8_BF16, KV8_BF16}, {KV8_BF16, KV8_INT8, KV8_E4M3},
    {KV8_BF16, KV8_INT8, KV8_BF16}, {KV8_BF16, KV8_E4M3, KV8_INT8}, {KV8_BF16, KV8_E4M3, KV8_BF16},
    {KV8_BF16, KV8_BF16, KV8_INT8}, {KV8_BF16, KV8_BF16, KV8_E4M3}, {KV8_E4M3, KV8_E4M3, KV8_E4M3},
    {KV8_E4M3, KV8_E5M2, KV8_E5M2}};
enum { E4M3_PAGES = 0, MIXED = 5, FP8 = 11, NUM_FORMATS = 13 };
/* e4m3 Q is the wgmma kernels' alone; mixes are on mma.sync in a test of their own. */
static inline int num_formats(void) {
    return kernels == on_wgmma ? NUM_FORMATS : MIXED;
}

static inline attention_case prefill_case(int format, int32_t head_dim) {
    return (attention_case){.group_size = 8,
                            .num_kv_heads = 2,
                            .head_dim = head_dim,
                            .q_dtype = prefill_formats[format][0],
                            .k_dtype = prefill_formats[format][1],
                            .v_dtype = prefill_formats[format][2],
                            .o_dtype = KV8_F32,
                            .page_size = 16,
                            .window_left = -1,
                            .causal = 1,
                            .sink = SINK_FINITE,
                            .scale = SCALE_REQUEST_HEAD,
                            .batch = 1,
                            .qo_len = {40},
                            .kv_len = {200}};
}

/* Kernels on sm_90 alone. */
static inline int open_wgmma(void **state) {
    kernels = on_wgmma;
    gpu_open(state);
    gpu *const g = *state;
    if (g->device == NULL || kv8_device_get_info(g->device)->sm_version == 90) return 0;
    printf("SKIPPED: these prefill kernels are for sm_90, this is sm_%d\n",
           kv8_device_get_info(g->device)->sm_version);
    kv8_stream_destroy(g->stream);
    kv8_device_close(g->device);
    *g = (gpu){0};
    return 0;
}
static inline int open_mma(void **state) {
    kernels = on_mma;
    return gpu_open(state);
}

#endif
