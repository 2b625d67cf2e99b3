/* attention_args.h - what a CUDA launch of attention is told: one plain struct by value for every
 * kernel, with a tail for decode and one for prefill.
 *
 * Read by C and CUDA. All pointers are device memory. Strides of K and V are in bytes, all others
 * in elements. A pointer marked "may be 0" is an option that is off. dtypes are numbered as
 * kv8_dtype.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_ARGS_H
#define KV8_ATTENTION_ARGS_H

#include <stddef.h>
#include <stdint.h>

/* Pages of K or of V. */
typedef struct kv8_kernel_pages {
    const uint8_t *data;
    int64_t stride_page, stride_slot, stride_head; /* bytes */
    const uint16_t *row_scale;                     /* f16, int8 alone; may be 0 */
    int64_t scale_stride_page, scale_stride_slot, scale_stride_head;
} kv8_kernel_pages;

/* n / d for 0 <= n < 2^31: the high half of n * factor, shifted; factor 0 is d = 1. */
typedef struct kv8_divisor {
    uint32_t factor, shift;
} kv8_divisor;

/* What decode kernels read beside the common part. */
typedef struct kv8_decode_tail {
    /* Workspace of a launch: partial results of split streams and their arrival counters, which
     * are 0 before and after every launch. Slots: max_slots + 2 * grid. */
    float *partials;     /* [slots][fragments of the heads of a block][128] */
    float *partial_sums; /* [slots][fragments][4][4]: maxima and sums of two rows */
    uint32_t *arrivals;  /* [2 * grid + streams][warps]; of pieces [2 * max_slots][warps] */
    /* by_heads: heads_per_block over the heads of a warp. */
    kv8_divisor by_min_units, by_heads, by_head_blocks, by_slices;
    int32_t
        heads_per_block; /* KV heads that one block computes at once: 1, 2, 4.. up to its warps */
    /* Granules that a block computes at once; num_kv_heads / heads_per_block. */
    int32_t num_slices, head_blocks;
    int32_t min_units;   /* granules below which no block is put to work */
    int32_t split_units; /* granules whose time a block spends between two splits; below 16 */
    /* batch_invariant: keys are cut to pieces at multiples of so many granules, and so many slots
     * are for results of several blocks. Else 0. */
    int32_t piece_units, max_slots;
} kv8_decode_tail;

struct kv8_prefill_queue;
struct kv8_prefill_item;
struct kv8_prefill_block;
struct kv8_prefill_broken;

/* What prefill kernels read beside the common part. */
typedef struct kv8_prefill_tail {
    /* Workspace: the work list, written by the scheduling kernel. */
    struct kv8_prefill_queue *queue;
    struct kv8_prefill_item *items;    /* [max_items] */
    struct kv8_prefill_block *blocks;  /* [max_blocks], longest first */
    int32_t *block_indptr;             /* [batch + 1] */
    struct kv8_prefill_broken *broken; /* [max_items] */
    uint32_t *arrivals;                /* [max_slots][block_rows / 64] */
    float *partial_sums;          /* [max_slots][block_rows / 64][2][128][2]: max (log2), sum */
    float *partials;              /* [max_slots][block_rows / 64][head_dim / 2][128] */
    int32_t q_aligned, o_aligned; /* rows of Q to 16 bytes; pairs of O (fours where Q is e4m3) to
                                   * their size */
    int32_t block_rows; /* packed rows of an item, as the kernel is built: a multiple of 64 */
    int32_t num_blocks; /* of threads that take items: what the work is spread over */
    int32_t max_tiles;  /* of a request */
    int32_t max_slots;  /* 0 = rows are never split */
} kv8_prefill_tail;

/* What a launch reads first stands first, what few runs ask for stands last. */
typedef struct kv8_kernel_args {
    const int32_t *qo_indptr;
    const int32_t *qo_lens; /* [batch] rows of each request that are used; may be 0 */
    /* Page ids: those of request b begin at table + page_indptr[b], or without page_indptr at
     * table + b * table_stride. Lengths: page_indptr and last_page_len, else seq_lens, else
     * kv_indptr. Ragged rows are a page of KV8_RAGGED_PAGE tokens a request: the table is
     * kv_indptr, stride_page is stride_slot. */
    const int32_t *page_indptr, *last_page_len, *seq_lens, *kv_indptr;
    const int32_t *table;
    int64_t table_stride;
    kv8_divisor by_group, by_page;
    int32_t batch, num_qo_heads, num_kv_heads, group_size;
    int32_t head_dim, v_head_dim, page_size;
    uint32_t num_pages;                         /* keys of pages from here on are skipped */
    int32_t q_dtype, k_dtype, v_dtype, o_dtype; /* kv8_dtype */
    int32_t window_left, window_right;          /* -1 = all; causal is window_right 0 */
    float score_scale;                          /* sm_scale * log2(e) */
    float soft_cap;                             /* logits_soft_cap * log2(e); 0 = off */
    const void *q;
    int64_t q_stride_row, q_stride_head;
    kv8_kernel_pages k, v;
    const float *k_scale, *v_scale; /* may be 0 */
    int64_t k_scale_stride_batch, k_scale_stride_head;
    int64_t v_scale_stride_batch, v_scale_stride_head;
    const float *sink_logit; /* [num_qo_heads]; may be 0 */
    void *o;
    int64_t o_stride_row, o_stride_head;
    float *lse; /* may be 0 */
    int64_t lse_stride_row, lse_stride_head;
    float lse_scale;       /* ln 2; 1 where lse is to base 2 */
    int32_t is_beside;     /* prefill: decode of the same run is ahead, and may be under way */
    const float *o_scale;  /* O of 8 bits alone; may be 0 */
    int64_t table_entries; /* that memory is there for; 0: unknown */
    const float *q_scale;  /* e4m3 Q alone; may be 0 */
    int64_t q_scale_stride_batch, q_scale_stride_row, q_scale_stride_kv_head, q_scale_stride_group;
    const uint8_t *mask_bits; /* may be 0 */
    const int64_t *mask_indptr;
    const int32_t *key_begin, *key_end; /* [total_q]; may be 0 */
    uint32_t *bad_pages;                /* counts ids from num_pages on; may be 0 */
    union {
        kv8_decode_tail decode;
        kv8_prefill_tail prefill;
    };
} kv8_kernel_args;

enum {
    KV8_ANY_PAGES = 0x7fffffff, /* num_pages where it is unknown */
    KV8_RAGGED_PAGE = 1 << 30,
    KV8_DECODE_ROWS = 8,       /* packed query rows of a tile */
    KV8_DECODE_TOKENS = 16,    /* of a granule */
    KV8_DECODE_START_BYTES = 4 /* of shared memory for each request and one more */
};

#ifdef __cplusplus
#define KV8_SAME_LAYOUT(condition) static_assert(condition, "layout of the kernels' argument")
#else
#define KV8_SAME_LAYOUT(condition) _Static_assert(condition, "layout of the kernels' argument")
#endif
KV8_SAME_LAYOUT(sizeof(kv8_kernel_pages) == 64 && sizeof(kv8_divisor) == 8);
KV8_SAME_LAYOUT(sizeof(kv8_decode_tail) == 88 && sizeof(kv8_prefill_tail) == 88);
KV8_SAME_LAYOUT(offsetof(kv8_kernel_args, by_group) == 64 && offsetof(kv8_kernel_args, q) == 144);
KV8_SAME_LAYOUT(offsetof(kv8_kernel_args, k) == 168 && offsetof(kv8_kernel_args, o) == 352);
KV8_SAME_LAYOUT(offsetof(kv8_kernel_args, decode) == 504);
KV8_SAME_LAYOUT(sizeof(kv8_kernel_args) == 592);
#undef KV8_SAME_LAYOUT

#endif
