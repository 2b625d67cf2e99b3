/* kernel_records.c - a library that the CUDA driver loads into a program (CUDA_INJECTION64_PATH): a
 * line for each kernel and copy that CUPTI records, begin and end in nanoseconds, name and grid,
 * into the file that KV8_KERNEL_RECORDS names. Kernels of graphs are told apart and overlap as
 * ever. bench/kernel_times runs a command with it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <cupti.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { BUFFER_BYTES = 8 << 20, ALIGNMENT = 8 };

static FILE *out;

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *max_records) {
    *buffer = aligned_alloc(ALIGNMENT, BUFFER_BYTES);
    *bytes = *buffer == NULL ? 0 : BUFFER_BYTES;
    *max_records = 0; /* as many as fit */
}

static void write_record(const CUpti_Activity *record) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel9 *const k = (const void *)record;
        fprintf(out, "%" PRIu64 " %" PRIu64 " %s %dx%dx%d\n", k->start, k->end, k->name, k->gridX,
                k->gridY, k->gridZ);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy5 *const c = (const void *)record;
        fprintf(out, "%" PRIu64 " %" PRIu64 " copy %" PRIu64 "B\n", c->start, c->end, c->bytes);
    }
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size,
                                 size_t valid) {
    (void)context, (void)stream, (void)size;
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
        write_record(record);
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    if (fclose(out) != 0) perror("kernel_records");
}

/* Called by the driver; 1: loaded. */
int InitializeInjection(void);
__attribute__((visibility("default"))) int InitializeInjection(void) {
    const char *const path = getenv("KV8_KERNEL_RECORDS");
    out = path == NULL ? NULL : fopen(path, "w");
    if (out == NULL) {
        fprintf(stderr, "kernel_records: KV8_KERNEL_RECORDS names no file to write\n");
        return 0;
    }
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS ||
        cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS ||
        cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY) != CUPTI_SUCCESS) {
        fprintf(stderr, "kernel_records: CUPTI refuses\n");
        return 0;
    }
    return atexit(finish) == 0;
}
