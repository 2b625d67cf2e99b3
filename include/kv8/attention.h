/* kv8/attention.h - attention over a paged KV cache: plan, describe, run, merge; the oracle.
 *
 *   s_j = cap(sm_scale * sum_d q_d * k_jd * k_scale)        visible keys j only
 *   m   = max(max_j s_j, sink)
 *   o   = sum_j exp(s_j - m) * v_j * v_scale / (sum_j exp(s_j - m) + exp(sink - m))
 *   lse = ln sum_j exp(s_j)                                 natural log, without the sink
 *
 * Query row r of a request sits at position kv_len - qo_len + r. With `causal` it sees keys up to
 * its own position; with window_left = w >= 0 none before position - w, with window_right = w >= 0
 * none after position + w. No visible key: o = 0 and lse = -inf. A combination that no kernel
 * computes is refused with KV8_ERR_UNSUPPORTED; nothing is ever dropped or replaced. Bytes in slots
 * nobody may see never reach a result. On x86-64 subnormal floats (below 2^-126) count as 0.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_H
#define KV8_ATTENTION_H

#include <kv8/cache.h>
#include <kv8/rope.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the two products multiply. bf16 holds bf16, int8 and floats of 8 bits exactly, so with
 * Q of bf16 or e4m3 and K and V of these only P is rounded. */
typedef enum kv8_attention_math {
    KV8_MATH_AUTO = 0, /* bf16 where Q, K and V enter exactly and it is the faster, else f32 */
    KV8_MATH_F32,      /* f32 x f32, fused multiply-add */
    KV8_MATH_BF16      /* pairs of bf16, products summed in f32; P is rounded to bf16 */
} kv8_attention_math;

/* What stays the same from run to run. One plan serves all layers of a shape: what is a layer's own
 * (scales, sinks, pages) comes with the run. */
typedef struct kv8_attention_spec {
    size_t struct_size;
    int32_t num_qo_heads, num_kv_heads; /* the first a multiple of the second */
    int32_t head_dim;                   /* of Q and K, 1..576 */
    int32_t v_head_dim;                 /* 0 = head_dim */
    kv8_dtype q_dtype;                  /* F32, BF16, F16, or E4M3 with args.q_scale */
    kv8_dtype k_dtype, v_dtype;         /* any; they choose apart */
    kv8_dtype o_dtype;                  /* F32, BF16, F16, a float of 8 bits; NONE = q_dtype, or
                                         * F32 for E4M3 Q */
    int32_t page_size;                  /* 0 = no pages: kv8_page_table.kv_indptr */
    int32_t causal;                     /* 0 or 1 */
    int32_t window_left, window_right;  /* -1 = all; causal allows no window_right > 0 */
    int32_t has_mask;                   /* args.mask_bits is given to every run */
    int32_t has_key_range;              /* args.key_begin and key_end are */
    /* A row's output bits depend on its query and its keys alone: not on the batch, on threads, nor
     * on which rows of its request a run has. Runs compared have one spec. On the host last bits
     * may still differ where a row of V has an element that is not finite. Keys that requests share
     * are read by each of them. */
    int32_t batch_invariant;
    kv8_isa isa;
    kv8_attention_math math; /* asked for and not possible here: KV8_ERR_UNSUPPORTED */
    /* Bounds of every run. */
    int32_t max_batch;
    int32_t max_total_q;
    int32_t max_kv_len;
} kv8_attention_spec;
#ifdef __cplusplus
static inline kv8_attention_spec kv8_attention_spec_init() {
    kv8_attention_spec spec = KV8_SIZED(kv8_attention_spec);
    spec.window_left = spec.window_right = -1;
    return spec;
}
#define KV8_ATTENTION_SPEC_INIT kv8_attention_spec_init()
#else
#define KV8_ATTENTION_SPEC_INIT \
    { .struct_size = sizeof(kv8_attention_spec), .window_left = -1, .window_right = -1 }
#endif

/* One run. Pointers are host memory; strides in elements. */
typedef struct kv8_attention_args {
    size_t struct_size;
    const int32_t *qo_indptr; /* [batch+1], from 0; qo_len may be 0 */
    const int32_t *qo_lens;   /* [batch] rows in use, the request's first; NULL = all. The others'
                               * o and lse are left alone. */
    int32_t batch;
    int32_t lse_base2; /* 1 = lse to base 2 */
    const void *q;     /* [total_q, num_qo_heads, head_dim], last dimension contiguous */
    int64_t q_stride_row, q_stride_head;
    const float *q_scale; /* E4M3 Q only: real q = code * scale, scale at
                           * q_scale[b*stride_batch + row*stride_row + kv_head*stride_kv_head +
                           * (qo_head % group_size)*stride_group]; unused strides 0 */
    int64_t q_scale_stride_batch, q_scale_stride_row, q_scale_stride_kv_head, q_scale_stride_group;
    const kv8_paged *k, *v;
    const kv8_page_table *pages;
    const float *k_scale; /* k_scale[b*stride_batch + kv_head*stride_head]; NULL = 1 */
    int64_t k_scale_stride_batch, k_scale_stride_head;
    const float *v_scale;
    int64_t v_scale_stride_batch, v_scale_stride_head;
    float sm_scale;             /* 0 = 1/sqrt(head_dim) */
    float logits_soft_cap;      /* 0 = off; s := cap * tanh(s / cap), before masking */
    const float *sink_logit;    /* [num_qo_heads], natural-log space; NULL = none. -inf = absent for
                                 * that head, +inf = output 0; a NaN is KV8_ERR_INVALID. */
    const uint8_t *mask_bits;   /* bit r*kv_len + j of request b's field: 1 = row r may see key j,
                                 * besides causal and window; least significant bit first */
    const int64_t *mask_indptr; /* [batch+1] byte offset of each request's field */
    const int32_t *key_begin, *key_end; /* [total_q]: a row may see keys [begin, end) alone, besides
                                         * causal, window and mask; beyond kv_len there are none */
    void *o; /* [total_q, num_qo_heads, v_head_dim], last dim contiguous */
    int64_t o_stride_row, o_stride_head;
    const float *o_scale; /* one; o of 8 bits only: real o = code * scale; NULL = 1 */
    float *lse;           /* NULL = not wanted */
    int64_t lse_stride_row, lse_stride_head; /* both 0 = [total_q, num_qo_heads] contiguous */
    uint32_t *bad_pages; /* GPU: visible pages at or beyond num_pages are added to it */
} kv8_attention_args;
#define KV8_ATTENTION_ARGS_INIT KV8_SIZED(kv8_attention_args)

typedef struct kv8_attention_plan kv8_attention_plan;

/* Picks one kernel from spec and machine. `threads` (NULL = the calling thread) is borrowed and
 * must outlive the plan. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_plan_create(kv8_attention_plan **out,
                                                           const kv8_attention_spec *spec,
                                                           kv8_threads *threads,
                                                           const kv8_allocator *allocator);
KV8_API void kv8_attention_plan_destroy(kv8_attention_plan *plan);
/* Bytes of memory that prepare and run need, aligned to 64. One workspace serves one run at a time.
 */
KV8_API size_t kv8_attention_workspace_size(const kv8_attention_plan *plan);
/* Once for all runs over one batch (the layers of a group, in one step): checks the lengths, page
 * tables and masks of args, finds the keys that requests share and cuts the work, all into
 * `workspace`. Data pointers are not looked at and may be NULL. Requests whose page tables begin
 * with the same pages (forks) are computed together over them where that pays, anywhere in the
 * batch; describe says so. Not with batch_invariant, a mask or key ranges. Lengths beyond the
 * plan's bounds, a table entry of KV8_NO_PAGE that a query can see and inconsistent arguments are
 * KV8_ERR_INVALID; the workspace is then as unprepared as a fresh one. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_prepare(const kv8_attention_plan *plan,
                                                       const kv8_attention_args *args,
                                                       void *workspace);
/* Computes, any number of times after one prepare, with whatever data, scales, sinks and outputs
 * args have; the index arrays and masks are those that were prepared, unchanged. A workspace that
 * was not prepared for this batch by this plan, or one of the same spec and number of threads, is
 * KV8_ERR_INVALID, as is a visible page at or beyond k's or v's num_pages. Allocates nothing;
 * nothing is written on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_run(const kv8_attention_plan *plan,
                                                   const kv8_attention_args *args, void *workspace);
/* One line of text about the runs of a prepared workspace: kernel name, items, splits, shared keys,
 * bytes to move (with lse where args have one), products. Measures nothing. Writes at most size
 * bytes with the terminating 0. */
KV8_API KV8_NODISCARD kv8_status kv8_attention_describe(const kv8_attention_plan *plan,
                                                        const kv8_attention_args *args,
                                                        const void *workspace, char *text,
                                                        size_t size);

/* Oracle: the same inputs in f64, slow and obvious. o_out [total_q, num_qo_heads, v_head_dim] is
 * not rounded to o_dtype; lse_out [total_q, num_qo_heads] (may be NULL), to base 2 with lse_base2.
 */
KV8_API KV8_NODISCARD kv8_status kv8_attention_reference(const kv8_attention_spec *spec,
                                                         const kv8_attention_args *args,
                                                         double *o_out, double *lse_out);

/* --- Q in e4m3 --- */

/* Q after rope as spec.q_dtype E4M3 takes it: code = e4m3(q / scale), saturating. A scale is found
 * for each request and KV head, the absmax over its rows and the heads of the group over 448 (of
 * finite values; 1 where that is no normal number), or given for each query head. */
typedef struct kv8_quantize_q_args {
    size_t struct_size;
    int32_t batch;
    int32_t max_rows; /* >= qo_indptr[batch]; on a GPU it sizes the grid */
    int32_t num_qo_heads, num_kv_heads, head_dim;
    kv8_dtype src_dtype;      /* F32, BF16 or F16 */
    const int32_t *qo_indptr; /* [batch+1], from 0 */
    const void *q;            /* [rows, num_qo_heads, head_dim], last dimension contiguous */
    int64_t q_stride_row, q_stride_head;
    void *codes_out; /* the same shape; rows of no request are left alone */
    int64_t codes_stride_row, codes_stride_head;
    /* One of the two. Found scales are attention's q_scale with q_scale_stride_batch num_kv_heads
     * and q_scale_stride_kv_head 1, given ones with q_scale_stride_kv_head the group's size and
     * q_scale_stride_group 1. */
    float *q_scale_out;      /* [batch, num_kv_heads] */
    const float *head_scale; /* [num_qo_heads], finite and > 0 */
    void *workspace;         /* GPU, with q_scale_out: batch * num_kv_heads words */
} kv8_quantize_q_args;
#define KV8_QUANTIZE_Q_ARGS_INIT KV8_SIZED(kv8_quantize_q_args)
/* `threads` NULL = the calling thread. */
KV8_API KV8_NODISCARD kv8_status kv8_quantize_q(const kv8_quantize_q_args *args,
                                                kv8_threads *threads);

/* --- partial results --- */

/* Exact merge of two partial results over disjoint keys, neither carrying a sink; n rows of dim
 * values. The result replaces a. An lse of -inf, or of +inf as some libraries have it, says that
 * there were no keys. */
KV8_API void kv8_attention_merge(float *o_a, float *lse_a, const float *o_b, const float *lse_b,
                                 size_t n, size_t dim);
/* Lets the sink join the denominator, once, after the last merge: o *= 1/(1 + exp(sink - lse)).
 * sink_logit[n], one per row. */
KV8_API void kv8_attention_apply_sink(float *o, const float *lse, const float *sink_logit, size_t n,
                                      size_t dim);

#ifdef __cplusplus
}
#endif
#endif
