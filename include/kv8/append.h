/* kv8/append.h - rows of K and V into a paged pool: quantised, K rotated on the way where that is
 * asked for. A pool is any memory, of the host or of a GPU; a plan for one shape, then runs that
 * allocate nothing. No plan knows a kv8_cache, and kv8_cache_append stores the same bytes.
 *
 * Where a row goes is said by a page table, to the last positions of its request, or by a slot
 * mapping, row by row. Either way rows may be left out: those from max_rows on, those whose page is
 * KV8_NO_PAGE and those whose slot is negative. Two rows for one slot: either wins.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_APPEND_H
#define KV8_APPEND_H

#include <kv8/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_append_spec {
    size_t struct_size;
    int32_t num_kv_heads;
    int32_t k_head_dim; /* 1..576 */
    int32_t v_head_dim; /* 0 = k_head_dim */
    int32_t page_size;
    kv8_dtype src_dtype; /* F32, BF16 or F16 */
    kv8_dtype k_dtype, v_dtype;
    kv8_isa isa; /* a host's; KV8_ISA_BEST on a GPU */
} kv8_append_spec;
#define KV8_APPEND_SPEC_INIT KV8_SIZED(kv8_append_spec)

/* The structs are the host's; every array in them lies where the pool does. On a GPU what the
 * arrays hold may change between replays of a graph. */
typedef struct kv8_append_args {
    size_t struct_size;
    int32_t batch;         /* requests */
    int32_t max_rows;      /* >= indptr[batch]: on a GPU it sizes the grid */
    int32_t interleaved;   /* cos_sin rotates pairs (2i, 2i + 1), not (i, i + k_head_dim / 2) */
    const int32_t *indptr; /* [batch + 1], the first is 0: request b owns rows indptr[b].. */
    /* One of the two. By `pages`, request b's rows go to the last positions of its kv_len, so its
     * table has room for them already. By slot_mapping [max_rows], row i goes to slot
     * slot_mapping[i] % page_size of page slot_mapping[i] / page_size; indptr then says whose
     * scales a row has, and may be NULL: max_rows rows of request 0. */
    const kv8_page_table *pages;
    const int64_t *slot_mapping;
    const void *k; /* [rows, num_kv_heads, k_head_dim] of src_dtype, last dimension contiguous */
    int64_t k_stride_row, k_stride_head;
    const void *v;
    int64_t v_stride_row, v_stride_head;
    /* Written through. Ids from num_pages on, where it is known, are KV8_ERR_INVALID on the host;
     * on a GPU such rows are left out and counted. */
    const kv8_paged *k_pages, *v_pages;
    const float *k_scale, *v_scale; /* [batch, num_kv_heads], finite and > 0; NULL = 1 */
    int64_t scale_stride_request, scale_stride_head; /* of both; 0 broadcasts */
    const float *cos_sin; /* [rows, k_head_dim] by kv8_rope_angles; NULL = K comes rotated */
    uint64_t *counters; /* [2 (K, V), num_kv_heads, 2 (clips, NaN)], added to; NULL = not counted */
    uint32_t *bad_pages; /* GPU: added to for every row left out for num_pages; NULL = not */
} kv8_append_args;
#define KV8_APPEND_ARGS_INIT KV8_SIZED(kv8_append_args)

/* --- on the host --- */

typedef struct kv8_append_plan kv8_append_plan;

/* *out is NULL on failure. `threads` are borrowed; NULL = the calling thread. */
KV8_API KV8_NODISCARD kv8_status kv8_append_plan_create(kv8_append_plan **out,
                                                        const kv8_append_spec *spec,
                                                        kv8_threads *threads,
                                                        const kv8_allocator *allocator);
KV8_API void kv8_append_plan_destroy(kv8_append_plan *plan);
/* On failure nothing is written. */
KV8_API KV8_NODISCARD kv8_status kv8_append_run(const kv8_append_plan *plan,
                                                const kv8_append_args *args);

/* --- on a GPU --- */

typedef struct kv8_append_device_plan kv8_append_device_plan;

/* *out is NULL on failure. KV8_ERR_UNSUPPORTED in a build without kernels for this GPU. */
KV8_API KV8_NODISCARD kv8_status kv8_append_device_plan_create(kv8_append_device_plan **out,
                                                               kv8_device *device,
                                                               const kv8_append_spec *spec);
KV8_API void kv8_append_device_plan_destroy(kv8_append_device_plan *plan);
/* Waits for nothing and can be captured into a graph. Rows 16-byte aligned and head_dim a multiple
 * of 16 up to 512 run at the memory's speed; others are stored one element at a time. */
KV8_API KV8_NODISCARD kv8_status kv8_append_device_run(const kv8_append_device_plan *plan,
                                                       kv8_stream *stream,
                                                       const kv8_append_args *args);

#ifdef __cplusplus
}
#endif
#endif
