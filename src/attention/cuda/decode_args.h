/* decode_args.h - what a CUDA decode launch is told: one plain struct by value.
 *
 * Read by C and CUDA. All pointers are device memory. Strides of K and V in bytes, of everything
 * else in elements. A pointer marked "may be 0" is an option that is off.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DECODE_ARGS_H
#define KV8_DECODE_ARGS_H

#include <stdint.h>

typedef struct kv8_decode_pages {
    const uint8_t *data;
    int64_t stride_page, stride_slot, stride_head; /* bytes */
    const uint16_t *row_scale;                     /* f16, int8 alone; may be 0 */
    int64_t scale_stride_page, scale_stride_slot, scale_stride_head;
} kv8_decode_pages;

/* n / d for 0 <= n < 2^31: the high half of n * factor, shifted; factor 0 is d = 1. */
typedef struct kv8_decode_divisor {
    uint32_t factor, shift;
} kv8_decode_divisor;

typedef struct kv8_decode_args {
    const void *q;
    int64_t q_stride_row, q_stride_head;
    void *o;
    int64_t o_stride_row, o_stride_head;
    float *lse; /* [total_q, num_qo_heads]; may be 0 */
    const int32_t *qo_indptr;
    kv8_decode_pages k, v;
    /* Page table: CSR when page_indptr is set, else dense. */
    const int32_t *page_indptr, *page_indices, *last_page_len;
    const int32_t *block_table;
    int64_t block_table_stride;
    const int32_t *seq_lens;
    int64_t
        table_entries; /* of page_indices or block_table, that memory is there for; 0: unknown */
    const float *k_scale, *v_scale; /* may be 0 */
    int64_t k_scale_stride_batch, k_scale_stride_head;
    int64_t v_scale_stride_batch, v_scale_stride_head;
    const float *sink_logit;  /* [num_qo_heads]; may be 0 */
    const uint8_t *mask_bits; /* may be 0 */
    const int64_t *mask_indptr;
    const float *q_scale; /* general kernel and E4M3 Q alone; may be 0 */
    int64_t q_scale_stride_batch, q_scale_stride_row, q_scale_stride_kv_head, q_scale_stride_group;
    /* Workspace of a launch: partial results of cut streams and their arrival counters. */
    float *partials;     /* [2 * grid][fragments of the heads of a block][128] */
    float *partial_sums; /* [2 * grid][fragments][4][4]: maxima and sums of two rows */
    uint32_t *arrivals;  /* [2 * grid + streams][warps]; 0 before and after every launch */
    int32_t batch, num_qo_heads, num_kv_heads, group_size;
    int32_t head_dim, v_head_dim, page_size;
    int32_t q_dtype, k_dtype, v_dtype, o_dtype; /* kv8_dtype */
    int32_t causal, window_left;
    int32_t heads_per_block; /* KV heads that one block walks at once: 1, 2, 4.. up to its warps */
    /* Granules that a block walks at once; num_kv_heads / heads_per_block. */
    int32_t num_slices, head_blocks;
    /* by_heads: heads_per_block over the heads of a warp. */
    kv8_decode_divisor by_group, by_page, by_min_units, by_heads, by_head_blocks, by_slices;
    int32_t min_units;   /* granules below which no block is put to work */
    float score_scale;   /* sm_scale * log2(e) */
    float soft_cap;      /* logits_soft_cap * log2(e); 0 = off */
    int32_t piece_units; /* granules whose time a block spends between two pieces; below 16 */
} kv8_decode_args;

enum {
    KV8_DECODE_ROWS = 8,       /* packed query rows of a tile */
    KV8_DECODE_TOKENS = 16,    /* of a granule */
    KV8_DECODE_START_BYTES = 4 /* of shared memory for each request and one more */
};

#ifdef __cplusplus
static_assert(sizeof(kv8_decode_args) == 512, "layout");
#else
_Static_assert(sizeof(kv8_decode_args) == 512, "layout");
#endif

#endif
