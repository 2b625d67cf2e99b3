/* kv8/attention_device.h - attention over a paged KV cache on a CUDA GPU: plan, describe, run.
 *
 * What is computed is what kv8/attention.h says, of the same kv8_attention_spec and with the same
 * refusals; every pointer of kv8_attention_args is the device's here, and what they point to
 * (lengths, page tables, Q, pages) may change between replays of a captured graph. Nothing reads
 * them on the host, so these are the caller's to keep: lengths within the plan's bounds, indptr
 * from 0 and rising, page ids of visible keys within the pool. Codes are widened exactly to f16 or
 * bf16, Q and P are never rounded to FP8, sums are f32; but with Q in e4m3 the prefill kernels of
 * Hopper multiply the codes themselves and round P to e4m3: o within 5e-2, lse within 0.065.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_DEVICE_H
#define KV8_ATTENTION_DEVICE_H

#include <kv8/attention.h>
#include <kv8/device.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_attention_device_plan kv8_attention_device_plan;

/* Picks the kernel by spec and GPU, and loads it. spec->isa must be KV8_ISA_BEST: it names a CPU's.
 * Allocates nothing on the device; the device must outlive the plan. *out is NULL on failure.
 *
 * A plan whose bounds allow 64 or more packed rows a request (max_total_q * group_size / max_batch)
 * takes a prefill kernel, but on Hopper of one request with up to 128 and few keys, e4m3 at
 * head_dim 64, a decode kernel; rows of decode may be in its calls. On Hopper those on wgmma take K
 * and V of one format out of e4m3, e5m2, int8, bf16, f16, or any two of e4m3, int8 and bf16, at
 * head_dim 64 and 128; those on mma.sync, since sm_80, K and V of any two formats but f32 at any
 * two head_dims that are multiples of 16 up to 256. Q is bf16, or f16 where K is not bf16, on
 * mma.sync nor V; f16 and bf16 pages are not mixed. Q of e4m3 over e4m3 or e5m2 pages takes wgmma
 * alone; over others, and on other GPUs, the general kernel, which is exact. Where such a plan is
 * for 16 or more requests, those of a row or two go to a decode kernel in a second launch of the
 * run; lengths decide on the device, at replay too.
 *
 * With fewer rows a decode kernel is taken, or a prefill kernel where that is faster
 * (kv8_attention_device_describe() names which), on sm_90 and sm_100: formats as with wgmma (two of
 * them where page_size is a multiple of 16), head_dim 64 and 128, e4m3 in such pages also at 80, 96
 * and 256. What it does not take goes to a prefill kernel, and what neither takes to a general
 * kernel: as right, and about a hundred times slower.
 *
 * With batch_invariant all rows take a decode kernel, those of prefill too, if there is one: a row
 * has the same bits in every batch, every chunk and every plan over pages of one layout, and decode
 * after prefill goes on where a longer prefill would be. Prefill is then several times slower.
 *
 * Decode and prefill kernels take windows to the right, masks, ragged K and V, and runs with
 * qo_lens, num_pages, lse in any strides and base, and O of e4m3 or e5m2; key ranges are prefill
 * kernels', and O of e4m3fnuz the general kernel's. Visible pages at or beyond num_pages are
 * skipped and counted in bad_pages, each at least once; a NaN among the sinks is a NaN in o.
 */
KV8_API KV8_NODISCARD kv8_status kv8_attention_device_plan_create(kv8_attention_device_plan **out,
                                                                  kv8_device *device,
                                                                  const kv8_attention_spec *spec,
                                                                  const kv8_allocator *allocator);
KV8_API void kv8_attention_device_plan_destroy(kv8_attention_device_plan *plan);
/* Bytes of device memory that prepare and run need, aligned to 256. One workspace serves one run at
 * a time. */
KV8_API size_t kv8_attention_device_workspace_size(const kv8_attention_device_plan *plan);
/* Once per workspace, before its first prepare: counters to zero, on the stream. Waits for nothing;
 * can be captured. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_device_workspace_init(
    const kv8_attention_device_plan *plan, kv8_stream *stream, void *workspace);
/* Kernel name, blocks, how its work is cut, workspace: one line, of a run with these args, of which
 * batch, k and v are looked at; NULL: of as many requests as the plan takes, in pages as kv8_cache
 * lays them out. Writes at most size bytes with the terminating 0. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_device_describe(
    const kv8_attention_device_plan *plan, const kv8_attention_args *args, char *text, size_t size);
/* Once for all runs over one batch (the layers of a group, in one step), with the args of one of
 * them: checks what can be checked here, and has prefill's work cut on the device, from the lengths
 * that lie there when it gets there. Can be captured, alone or with its runs. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_device_prepare(const kv8_attention_device_plan *plan,
                                                              kv8_stream *stream,
                                                              const kv8_attention_args *args,
                                                              void *workspace);
/* Computes, any number of times after one prepare, with whatever data, scales, sinks and outputs
 * args have; index arrays and masks are those that were prepared, and K, V, q and o are aligned as
 * theirs were. That the workspace was prepared is the caller's to see to: it lies on the device.
 * Allocates nothing, synchronises nothing, can be captured. The tensor core kernels read 16 bytes
 * at a time: where K's or V's data or byte strides are not multiples of 16, the general kernel
 * runs. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_device_run(const kv8_attention_device_plan *plan,
                                                          kv8_stream *stream,
                                                          const kv8_attention_args *args,
                                                          void *workspace);

/* --- Q in e4m3 --- */

typedef struct kv8_quantize_q_device_plan kv8_quantize_q_device_plan;

/* *out is NULL on failure. KV8_ERR_UNSUPPORTED in a build without kernels for this GPU. */
KV8_API KV8_NODISCARD kv8_status kv8_quantize_q_device_plan_create(kv8_quantize_q_device_plan **out,
                                                                   kv8_device *device,
                                                                   kv8_dtype src_dtype);
KV8_API void kv8_quantize_q_device_plan_destroy(kv8_quantize_q_device_plan *plan);
/* kv8_quantize_q's codes and scales. Every pointer is the device's; allocates nothing, synchronises
 * nothing, can be captured. */
KV8_API KV8_NODISCARD kv8_status kv8_quantize_q_device_run(const kv8_quantize_q_device_plan *plan,
                                                           kv8_stream *stream,
                                                           const kv8_quantize_q_args *args);

#ifdef __cplusplus
}
#endif
#endif
