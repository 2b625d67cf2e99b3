/* prefill_device.h - prefill and chunked prefill on a GPU: which kernel, how much workspace,
 * launch.
 *
 * Private to attention. Many query rows share each widened tile of keys; what the kernels do is in
 * cuda/prefill/sm90/prefill_sm90.cuh, how work is cut in cuda/prefill/prefill_schedule.cu. Rows of
 * decode may be in the same call; a call of nothing else is better off with a decode kernel.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_DEVICE_H
#define KV8_PREFILL_DEVICE_H

#include "device_impl.h"
#include "prefill_args.h"
#include "problem.h"

/* Which kernels: those on wgmma, for sm_90a; those on mma.sync, for all and more formats; or the
 * first of these that does what is asked. */
typedef enum kv8_prefill_path {
    KV8_PREFILL_BEST = 0,
    KV8_PREFILL_WGMMA,
    KV8_PREFILL_MMA
} kv8_prefill_path;

/* A kernel as the host needs to know it. */
typedef struct kv8_prefill_kernel {
    const char *name;
    int32_t head_dim; /* that it has room for */
    int32_t block_rows, num_threads;
    size_t shared_bytes;
} kv8_prefill_kernel;

/* KV8_ERR_UNSUPPORTED where no kernel on mma.sync does what a checked spec asks. */
kv8_status kv8_prefill_mma_choose(const kv8_attention_spec *spec, kv8_prefill_kernel *kernel_out);

/* Plain data: nothing to release; valid until the device is closed. */
typedef struct kv8_prefill_plan {
    kv8_kernel schedule, main;
    kv8_launch schedule_launch, main_launch;
    kv8_prefill_args args; /* all that does not change from run to run */
    int64_t max_items, max_blocks;
    /* Byte offsets into the workspace. */
    size_t items_at, blocks_at, indptr_at, arrivals_at, sums_at, partials_at, workspace_size;
    int32_t max_batch;
    bool has_mask;
} kv8_prefill_plan;

/* Whether kv8_prefill_plan_make would find a kernel for a checked spec on this device. */
bool kv8_prefill_takes(const kv8_device *device, const kv8_attention_spec *spec,
                       kv8_prefill_path path);
/* KV8_ERR_UNSUPPORTED, naming what is supported, where no prefill kernel does what the spec asks or
 * this GPU has none of them. */
kv8_status kv8_prefill_plan_make(kv8_prefill_plan *plan_out, kv8_device *device,
                                 const kv8_attention_spec *spec, kv8_prefill_path path);

/* As kv8_attention_run, but every pointer of args (index arrays and table too) is device memory,
 * and nothing of it is read here: lengths may differ between replays of a captured graph, within
 * the spec's bounds. workspace:
 * workspace_size bytes of device memory aligned to 256, no contents expected or kept. Two kernels
 * on the stream. */
kv8_status kv8_prefill_run(const kv8_prefill_plan *plan, kv8_stream *stream,
                           const kv8_attention_args *args, void *workspace);

#endif
