/* append_args.h - the argument of the append kernels, for C and CUDA. Every pointer is the
 * device's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_APPEND_ARGS_H
#define KV8_APPEND_ARGS_H

#include <stdint.h>

/* K or V: where it comes from and where it goes. Strides count elements. */
typedef struct kv8_append_plane {
    const void *source; /* [rows, num_kv_heads, head_dim] */
    int64_t source_stride_row, source_stride_head;
    void *codes; /* [page, slot, kv_head, head_dim] */
    int64_t stride_page, stride_slot, stride_head;
    void *row_scale; /* f16 [page, slot, kv_head]; NULL unless int8 */
    int64_t row_scale_stride_page, row_scale_stride_slot, row_scale_stride_head;
    const float *scale; /* [batch, num_kv_heads]; NULL = 1 */
    int64_t scale_stride_request, scale_stride_head;
    uint64_t *counters; /* [num_kv_heads, 2]: clips, NaN; may be NULL */
    int32_t head_dim;
    int32_t dtype;      /* a kv8_dtype */
    int32_t lanes_log2; /* threads for one head of one row: 1 to 32 */
    int32_t num_passes; /* of a block's threads over its rows */
    /* From one pass to the next: rows and heads further, where a head past the last one is the next
     * row's; the same in elements of the source. */
    int32_t step_rows, step_heads;
    int64_t step_source, wrap_source;
} kv8_append_plane;

typedef struct kv8_append_kernel_args {
    kv8_append_plane plane[2]; /* K, V */
    const int32_t *indptr;     /* [batch + 1]: rows of each request; NULL: max_rows of one */
    /* Where rows go: page * page_size + slot of each, or the page table, CSR or dense; the first of
     * slot_mapping, page_indptr and block_table that is not NULL. */
    const int64_t *slot_mapping; /* [max_rows] */
    const int32_t *page_indptr, *page_indices, *last_page_len;
    const int32_t *block_table, *seq_lens;
    int64_t block_table_stride;
    int64_t num_pages;    /* rows of this page and those after it are left out and counted */
    uint32_t *bad_pages;  /* added to; NULL = not counted */
    const float *cos_sin; /* [rows, k head_dim]: cosines, then sines; NULL = K is not rotated */
    int32_t batch, max_rows, num_kv_heads, page_size;
    int32_t rows_per_block; /* 1 to 256 */
    int32_t padding;
} kv8_append_kernel_args;

enum { KV8_APPEND_THREADS = 256, KV8_APPEND_VECTOR = 8, KV8_APPEND_MAX_ROWS = 256 };

#ifdef __cplusplus
static_assert(sizeof(kv8_append_plane) == 160 && sizeof(kv8_append_kernel_args) == 432, "layout");
#else
_Static_assert(sizeof(kv8_append_plane) == 160 && sizeof(kv8_append_kernel_args) == 432, "layout");
#endif

#endif
