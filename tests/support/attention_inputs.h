/* attention_inputs.h - one attention problem: described in a few fields, made into inputs whose
 * every unseen byte is NaN and whose every buffer ends at a guard page.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_INPUTS_H
#define KV8_ATTENTION_INPUTS_H

#include <kv8/attention.h>

#include "testing.h"

#ifndef CASE_MAX_BATCH /* a test may have more requests */
#define CASE_MAX_BATCH 40
#endif

typedef enum sink_kind { SINK_NONE = 0, SINK_FINITE, SINK_WITH_INFINITIES, SINK_KINDS } sink_kind;
typedef enum scale_kind {
    SCALE_NONE = 0,
    SCALE_TENSOR,
    SCALE_HEAD,
    SCALE_REQUEST_HEAD,
    SCALE_KINDS
} scale_kind;
typedef enum layout_kind { LAYOUT_NHD = 0, LAYOUT_HND, LAYOUT_INTERLEAVED, LAYOUTS } layout_kind;
typedef enum mask_kind { MASK_NONE = 0, MASK_RANDOM, MASK_TREE, MASK_KINDS } mask_kind;

typedef struct attention_case {
    int32_t group_size, num_kv_heads, head_dim, v_head_dim; /* v_head_dim 0 = head_dim */
    kv8_dtype q_dtype, k_dtype, v_dtype, o_dtype;
    int32_t page_size, window_left, causal;
    float soft_cap, sm_scale;
    sink_kind sink;
    scale_kind scale;
    layout_kind layout;
    mask_kind mask;
    bool dense_table, batch_invariant;
    int32_t right;    /* window_right + 1; 0 = none */
    bool key_ranges;  /* every row has its own, some of them empty */
    bool ragged;      /* no pages (page_size is 1 here, 0 in the spec); dense_table: seq_lens too */
    bool unused_rows; /* the last third of a request's rows is not in use */
    bool lse_transposed; /* [num_qo_heads, total_q], to base 2 */
    bool extremes;       /* some elements of K and V at their formats' largest values */
    bool infinities;     /* some elements of K and V, where the format has them */
    float score_shift;   /* with head_dim 1: whole scores within 3 of this one */
    bool wide_q;         /* elements of Q of very different sizes */
    bool nonfinite_q;    /* one head of Q in four has a NaN or, but in e4m3, an infinity */
    int32_t sick_v;      /* of V's rows one in so many has a NaN or an infinity; 0 = none */
    int32_t zero_v;      /* V is 0 of so many first keys, int8's by its scale */
    bool nan_newest;     /* K (even requests) or V of each newest token is NaN, in even heads */
    int32_t batch;
    int32_t qo_len[CASE_MAX_BATCH], kv_len[CASE_MAX_BATCH];
    /* Forks: the first shared_pages[b] pages of request b are those of request parent[b] < b. */
    int32_t parent[CASE_MAX_BATCH], shared_pages[CASE_MAX_BATCH];
    uint64_t seed;
} attention_case;

/* The inputs, the oracle's answer, and room for ours. */
typedef struct attention_inputs {
    const attention_case *c;
    kv8_attention_spec spec; /* without isa */
    kv8_attention_args args; /* points to the next three and to sinks */
    kv8_paged k, v;
    kv8_page_table pages;
    int32_t total_q, num_qo_heads, v_head_dim;
    int32_t num_pages; /* of the pool; 0 without pages */
    guarded buffers[24];
    int num_buffers;
    float *sinks; /* NULL or a buffer */
    double *ref_o, *ref_lse;
} attention_inputs;

static inline void *case_buffer(attention_inputs *in, size_t bytes) {
    assert_true(in->num_buffers < 24);
    in->buffers[in->num_buffers] = guarded_alloc(bytes);
    return in->buffers[in->num_buffers++].data;
}

static inline void case_store(kv8_dtype dtype, void *data, int64_t at, float x) {
    switch (dtype) {
        case KV8_F32: ((float *)data)[at] = x; break;
        case KV8_BF16: ((kv8_bf16 *)data)[at] = kv8_bf16_from_f32(x); break;
        case KV8_F16: ((kv8_f16 *)data)[at] = kv8_f16_from_f32(x); break;
        case KV8_E4M3: ((kv8_e4m3 *)data)[at] = kv8_e4m3_from_f32(x); break;
        case KV8_E4M3FNUZ: ((kv8_e4m3fnuz *)data)[at] = kv8_e4m3fnuz_from_f32(x); break;
        case KV8_E5M2: ((kv8_e5m2 *)data)[at] = kv8_e5m2_from_f32(x); break;
        case KV8_INT8:
            ((int8_t *)data)[at] = (int8_t)lrintf(fminf(fmaxf(x * 40, -127), 127));
            break;
        default: abort();
    }
}

static inline void case_store_infinity(kv8_dtype dtype, void *data, int64_t at, bool negative) {
    const float infinity = negative ? -INFINITY : INFINITY;
    if (dtype == KV8_F32 || dtype == KV8_BF16 || dtype == KV8_F16)
        case_store(dtype, data, at, infinity);
    if (dtype == KV8_E5M2) /* which from_f32 saturates */
        ((kv8_e5m2 *)data)[at] = (kv8_e5m2){negative ? 0xfc : 0x7c};
}

/* Rows of a request that are in use. */
static inline int32_t case_rows(const attention_case *c, int32_t b) {
    return c->unused_rows ? (2 * c->qo_len[b] + 2) / 3 : c->qo_len[b];
}

/* Written independently of src/attention: straight from the definition. */
static inline bool case_sees(const attention_inputs *in, int32_t b, int32_t row, int32_t key) {
    const attention_case *const c = in->c;
    if (row >= case_rows(c, b)) return false;
    const int64_t position = (int64_t)c->kv_len[b] - case_rows(c, b) + row;
    if (c->right > 0 && key >= position + c->right) return false;
    if (c->key_ranges) {
        const int32_t q_row = in->args.qo_indptr[b] + row;
        if (key < in->args.key_begin[q_row] || key >= in->args.key_end[q_row]) return false;
    }
    if (c->causal && key > position) return false;
    if (c->window_left >= 0 && key < position - c->window_left) return false;
    if (c->mask == MASK_NONE) return true;
    const int64_t bit = (int64_t)row * c->kv_len[b] + key;
    return (in->args.mask_bits[in->args.mask_indptr[b] + bit / 8] >> (bit % 8)) & 1;
}

/* MASK_TREE: the newest qo_len tokens are drafts, a binary heap of continuations: node r sees the
 * history, itself and its ancestors. */
static inline bool case_mask_wants(const attention_case *c, test_rng *rng, int32_t b, int32_t row,
                                   int32_t key) {
    if (c->mask == MASK_RANDOM) return rng_range(rng, 0, 2) != 0;
    const int32_t node = key - (c->kv_len[b] - case_rows(c, b));
    if (node < 0) return true;
    for (int32_t at = row; at >= 0; at = at == 0 ? -1 : (at - 1) / 2) {
        if (at == node) return true;
    }
    return false;
}

static inline void case_make_mask(attention_inputs *in, test_rng *rng) {
    const attention_case *const c = in->c;
    int64_t *const indptr = case_buffer(in, (size_t)(c->batch + 1) * sizeof *indptr);
    indptr[0] = 0;
    for (int32_t b = 0; b < c->batch; b++)
        indptr[b + 1] = indptr[b] + ((int64_t)c->qo_len[b] * c->kv_len[b] + 7) / 8;
    uint8_t *const bits = case_buffer(in, (size_t)indptr[c->batch]);
    for (int32_t b = 0; b < c->batch; b++) {
        for (int32_t row = 0; row < c->qo_len[b]; row++) {
            for (int32_t key = 0; key < c->kv_len[b]; key++) {
                const int64_t bit = (int64_t)row * c->kv_len[b] + key;
                uint8_t *const byte = bits + indptr[b] + bit / 8;
                const uint8_t one = (uint8_t)(1u << (bit % 8));
                if (case_mask_wants(c, rng, b, row, key))
                    *byte |= one;
                else
                    *byte &= (uint8_t)~one;
            }
        }
    }
    in->args.mask_bits = bits;
    in->args.mask_indptr = indptr;
}

/* Anywhere, beyond the keys too, and some of them empty. */
static inline void case_make_key_ranges(attention_inputs *in, test_rng *rng) {
    const attention_case *const c = in->c;
    int32_t *const begin = case_buffer(in, (size_t)in->total_q * sizeof *begin);
    int32_t *const end = case_buffer(in, (size_t)in->total_q * sizeof *end);
    for (int32_t b = 0; b < c->batch; b++) {
        for (int32_t q = in->args.qo_indptr[b]; q < in->args.qo_indptr[b + 1]; q++) {
            begin[q] = rng_range(rng, -3, c->kv_len[b]);
            end[q] = begin[q] + rng_range(rng, -1, c->kv_len[b]);
            if (rng_range(rng, 0, 3) == 0) begin[q] = INT32_MIN, end[q] = INT32_MAX;
        }
    }
    in->args.key_begin = begin;
    in->args.key_end = end;
}

/* Strides of one tensor of the pool; INTERLEAVED has both K and V in every page, heads padded. */
static inline int64_t case_strides(const attention_case *c, int32_t dim, kv8_paged *paged) {
    const int64_t heads = c->num_kv_heads, slots = c->page_size;
    switch (c->layout) {
        case LAYOUT_HND:
            paged->stride_slot = dim;
            paged->stride_head = slots * dim;
            paged->row_scale_stride_slot = 1;
            paged->row_scale_stride_head = slots;
            break;
        case LAYOUT_NHD:
            paged->stride_head = dim;
            paged->stride_slot = heads * dim;
            paged->row_scale_stride_head = 1;
            paged->row_scale_stride_slot = heads;
            break;
        default:
            paged->stride_head = dim + 3;
            paged->stride_slot = heads * (dim + 3);
            paged->row_scale_stride_head = 1;
            paged->row_scale_stride_slot = heads + 1;
            break;
    }
    const bool padded = c->layout == LAYOUT_INTERLEAVED;
    const int64_t page = padded ? 2 * slots * paged->stride_slot + 1 : heads * slots * dim;
    paged->stride_page = page;
    paged->row_scale_stride_page = slots * (heads + (padded ? 1 : 0));
    return page;
}

static inline void case_fill_row(const attention_case *c, test_rng *rng, kv8_dtype dtype,
                                 const kv8_paged *paged, int32_t page, int32_t slot, int32_t head,
                                 int32_t dim, bool nan, float mean, float deviation) {
    union {
        const void *in;
        uint8_t *out;
    } data = {.in = paged->data};
    const int64_t at =
        page * paged->stride_page + slot * paged->stride_slot + head * paged->stride_head;
    const size_t size = kv8_dtype_size(dtype);
    for (int32_t d = 0; d < dim; d++) {
        float x = mean + deviation * rng_normal(rng);
        if (c->extremes && rng_range(rng, 0, 15) == 0)
            x = (rng_range(rng, 0, 1) ? 1.0f : -1.0f) * fminf(kv8_dtype_max(dtype), 57344.0f);
        if (c->extremes && rng_range(rng, 0, 15) == 0) x = rng_range(rng, 0, 1) ? 0.0f : 1e-6f;
        case_store(dtype, data.out, at + d, x);
        if (c->infinities && rng_range(rng, 0, 99) == 0)
            case_store_infinity(dtype, data.out, at + d, rng_range(rng, 0, 1));
    }
    if (nan) memset(data.out + at * (int64_t)size, dtype == KV8_E4M3FNUZ ? 0x80 : 0xff, size);
    if (dtype != KV8_INT8) return;
    union {
        const kv8_f16 *in;
        kv8_f16 *out;
    } scale = {.in = paged->row_scale};
    const float value = (0.5f + (float)rng_unit(rng)) / 40;
    scale.out[page * paged->row_scale_stride_page + slot * paged->row_scale_stride_slot +
              head * paged->row_scale_stride_head] =
        nan ? (kv8_f16){0x7e00} : kv8_f16_from_f32(value);
}

/* One element of a V row, or the scale of an int8 row, is NaN or infinite. */
static inline void case_spoil_row(const attention_inputs *in, test_rng *rng, int32_t page,
                                  int32_t slot, int32_t head) {
    const kv8_dtype dtype = in->c->v_dtype;
    const kv8_paged *const v = &in->v;
    const size_t size = kv8_dtype_size(dtype);
    union {
        const void *in;
        uint8_t *out;
    } data = {.in = dtype == KV8_INT8 ? (const void *)v->row_scale : v->data};
    const int kind = rng_range(rng, 0, 2);
    if (dtype == KV8_INT8) {
        ((kv8_f16 *)(void *)
             data.out)[page * v->row_scale_stride_page + slot * v->row_scale_stride_slot +
                       head * v->row_scale_stride_head]
            .bits = kind == 0 ? 0x7e00 : 0x7c00;
        return;
    }
    const int64_t at = page * v->stride_page + slot * v->stride_slot + head * v->stride_head +
                       rng_range(rng, 0, in->v_head_dim - 1);
    memset(data.out + at * (int64_t)size, dtype == KV8_E4M3FNUZ ? 0x80 : 0xff, size);
    if (kind != 0) case_store_infinity(dtype, data.out, at, kind == 1);
}

/* A V row becomes zeros; of int8 the codes stay. */
static inline void case_clear_row(const attention_inputs *in, int32_t page, int32_t slot,
                                  int32_t head) {
    const kv8_dtype dtype = in->c->v_dtype;
    const kv8_paged *const v = &in->v;
    union {
        const void *in;
        uint8_t *out;
    } data = {.in = dtype == KV8_INT8 ? (const void *)v->row_scale : v->data};
    if (dtype == KV8_INT8) {
        case_store(KV8_F16, data.out,
                   page * v->row_scale_stride_page + slot * v->row_scale_stride_slot +
                       head * v->row_scale_stride_head,
                   0);
        return;
    }
    for (int32_t d = 0; d < in->v_head_dim; d++)
        case_store(dtype, data.out,
                   page * v->stride_page + slot * v->stride_slot + head * v->stride_head + d, 0);
}

static inline void case_make_pool(attention_inputs *in, int32_t num_pages) {
    const attention_case *const c = in->c;
    kv8_paged *const k = &in->k, *const v = &in->v;
    const int64_t k_page = case_strides(c, c->head_dim, k);
    const int64_t v_page = case_strides(c, in->v_head_dim, v);
    const size_t k_size = kv8_dtype_size(c->k_dtype), v_size = kv8_dtype_size(c->v_dtype);
    const bool one_pool = c->layout == LAYOUT_INTERLEAVED && k_size == v_size && k_page == v_page;
    /* 0xff is NaN everywhere but in e4m3fnuz, whose NaN is 0x80 (and in int8, whose scale it is).
     */
    uint8_t *const k_data = case_buffer(in, (size_t)(num_pages * k_page) * k_size);
    if (c->k_dtype == KV8_E4M3FNUZ) memset(k_data, 0x80, (size_t)(num_pages * k_page));
    k->data = k_data;
    if (one_pool) {
        v->data = k_data + (size_t)(c->page_size * k->stride_slot) * k_size;
    } else {
        uint8_t *const v_data = case_buffer(in, (size_t)(num_pages * v_page) * v_size);
        if (c->v_dtype == KV8_E4M3FNUZ) memset(v_data, 0x80, (size_t)(num_pages * v_page));
        v->data = v_data;
    }
    if (c->k_dtype == KV8_INT8)
        k->row_scale = case_buffer(in, (size_t)(num_pages * k->row_scale_stride_page) * 2);
    if (c->v_dtype == KV8_INT8)
        v->row_scale = case_buffer(in, (size_t)(num_pages * v->row_scale_stride_page) * 2);
}

static inline kv8_page_table case_csr_table(const int32_t *indptr, const int32_t *indices,
                                            const int32_t *last_page_len) {
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    table.page_indptr = indptr;
    table.page_indices = indices;
    table.last_page_len = last_page_len;
    return table;
}
static inline kv8_page_table case_dense_table(const int32_t *block_table, int64_t stride,
                                              const int32_t *seq_lens) {
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    table.block_table = block_table;
    table.block_table_stride = stride;
    table.seq_lens = seq_lens;
    return table;
}

/* Tables in random page order; pages that nobody sees are named by nonsense. Then the rows that
 * somebody sees. */
static inline void case_make_cache(attention_inputs *in, test_rng *rng) {
    const attention_case *const c = in->c;
    int32_t num_pages = 0, most_pages = 0;
    for (int32_t b = 0; b < c->batch; b++) {
        const int32_t pages = (c->kv_len[b] + c->page_size - 1) / c->page_size;
        num_pages += pages;
        most_pages = pages > most_pages ? pages : most_pages;
    }
    const int32_t spare = 2 + (c->ragged ? c->batch : 0);
    case_make_pool(in, num_pages + spare);
    int32_t *const order = malloc((size_t)(num_pages + spare) * sizeof *order);
    int32_t *const real = malloc((size_t)(num_pages + spare) * sizeof *real); /* CSR, all of them */
    for (int32_t i = 0; i < num_pages + spare; i++) order[i] = i;
    for (int32_t i = num_pages + spare - 1; i > 0 && !c->ragged; i--) {
        const int32_t j = rng_range(rng, 0, i), swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    kv8_page_table *const table = &in->pages;
    int32_t *const indptr = case_buffer(in, (size_t)(c->batch + 1) * 4);
    int32_t *const last = case_buffer(in, (size_t)c->batch * 4);
    int32_t *const lens = case_buffer(in, (size_t)c->batch * 4);
    const size_t entries =
        c->dense_table ? (size_t)c->batch * (size_t)most_pages : (size_t)num_pages;
    int32_t *const indices = case_buffer(in, entries * 4);
    int32_t *const slots = case_buffer(in, (size_t)(c->batch + 1) * 4); /* of ragged keys */
    indptr[0] = 0;
    int32_t used = 0;
    for (int32_t b = 0; b < c->batch; b++) {
        const int32_t pages = (c->kv_len[b] + c->page_size - 1) / c->page_size;
        int32_t *const entry = indices + (c->dense_table ? b * most_pages : indptr[b]);
        indptr[b + 1] = indptr[b] + pages;
        last[b] = pages == 0 ? 0 : c->kv_len[b] - (pages - 1) * c->page_size;
        lens[b] = c->kv_len[b];
        if (c->ragged && c->dense_table) used++; /* a slot that is nobody's */
        slots[b] = used;
        for (int32_t i = 0; i < pages; i++) {
            const bool forked = i < c->shared_pages[b];
            const int32_t page = forked ? real[indptr[c->parent[b]] + i] : order[used++];
            real[indptr[b] + i] = page;
            bool page_seen = false;
            for (int32_t slot = 0; slot < c->page_size; slot++) {
                const int32_t key = i * c->page_size + slot;
                if (key >= c->kv_len[b]) break;
                bool seen = false;
                for (int32_t row = c->qo_len[b] - 1; row >= 0 && !seen; row--)
                    seen = case_sees(in, b, row, key);
                if (!seen) continue;
                page_seen = true;
                const bool newest = c->nan_newest && key == c->kv_len[b] - 1;
                for (int32_t head = 0; head < c->num_kv_heads; head++) {
                    const bool nan = newest && head % 2 == 0;
                    const float score = c->score_shift + (float)rng_range(rng, -3, 3);
                    case_fill_row(c, rng, c->k_dtype, &in->k, page, slot, head, c->head_dim,
                                  nan && b % 2 == 0, c->score_shift != 0 ? score : 0,
                                  c->score_shift != 0 ? 0 : 1);
                    case_fill_row(c, rng, c->v_dtype, &in->v, page, slot, head, in->v_head_dim,
                                  nan && b % 2 == 1, 0.5f, 1);
                    if (c->sick_v > 0 && rng_range(rng, 0, c->sick_v - 1) == 0)
                        case_spoil_row(in, rng, page, slot, head);
                    if (key < c->zero_v) case_clear_row(in, page, slot, head);
                }
            }
            entry[i] = page_seen ? page : rng_range(rng, 0, 1) ? KV8_NO_PAGE : INT32_MAX;
        }
    }
    free(real);
    free(order);
    slots[c->batch] = used;
    in->num_pages = c->ragged ? 0 : num_pages + spare;
    if (c->ragged) {
        in->k.stride_slot = in->k.stride_page;
        in->v.stride_slot = in->v.stride_page;
        in->k.row_scale_stride_slot = in->k.row_scale_stride_page;
        in->v.row_scale_stride_slot = in->v.row_scale_stride_page;
        in->pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
        in->pages.kv_indptr = slots;
        in->pages.seq_lens = c->dense_table ? lens : NULL;
    } else if (c->dense_table)
        *table = case_dense_table(indices, most_pages, lens);
    else
        *table = case_csr_table(indptr, indices, last);
}

/* Scales that keep scores and values within a few units whatever the codes' range. */
static inline float *case_make_scales(attention_inputs *in, test_rng *rng, kv8_dtype dtype,
                                      int64_t *stride_batch, int64_t *stride_head) {
    const attention_case *const c = in->c;
    float base = dtype == KV8_INT8 ? 1.0f : 0.7f;
    if (c->extremes) base = 8 / fminf(kv8_dtype_max(dtype), 57344.0f);
    if (c->scale == SCALE_NONE && !c->extremes) return NULL;
    const int64_t heads = c->num_kv_heads;
    *stride_head = c->scale >= SCALE_HEAD ? 1 : 0;
    *stride_batch = c->scale == SCALE_REQUEST_HEAD ? heads : 0;
    const int64_t n = c->scale == SCALE_REQUEST_HEAD ? heads * c->batch
                      : c->scale == SCALE_HEAD       ? heads
                                                     : 1;
    float *const scale = case_buffer(in, (size_t)n * sizeof *scale);
    for (int64_t i = 0; i < n; i++) scale[i] = base * (0.5f + (float)rng_unit(rng));
    return scale;
}

static inline void case_make_queries(attention_inputs *in, test_rng *rng) {
    const attention_case *const c = in->c;
    kv8_attention_args *const a = &in->args;
    const size_t size = kv8_dtype_size(c->q_dtype);
    int32_t *const indptr = case_buffer(in, (size_t)(c->batch + 1) * 4);
    indptr[0] = 0;
    for (int32_t b = 0; b < c->batch; b++) indptr[b + 1] = indptr[b] + c->qo_len[b];
    in->total_q = indptr[c->batch];
    a->qo_indptr = indptr;
    if (c->unused_rows) {
        int32_t *const rows = case_buffer(in, (size_t)c->batch * 4);
        for (int32_t b = 0; b < c->batch; b++) rows[b] = case_rows(c, b);
        a->qo_lens = rows;
    }
    a->q_stride_head = c->head_dim + 1; /* the gap stays NaN */
    a->q_stride_row = in->num_qo_heads * a->q_stride_head + 2;
    const size_t elements = (size_t)(in->total_q * a->q_stride_row);
    uint8_t *const q = case_buffer(in, elements * size);
    for (int64_t row = 0; row < in->total_q; row++) {
        for (int32_t h = 0; h < in->num_qo_heads; h++) {
            for (int32_t d = 0; d < c->head_dim; d++) {
                float x = c->score_shift != 0 ? 1.0f : rng_normal(rng);
                if (c->wide_q) x *= ldexpf(1, rng_range(rng, -14, 1));
                case_store(c->q_dtype, q, row * a->q_stride_row + h * a->q_stride_head + d, x);
            }
            if (!c->nonfinite_q || rng_range(rng, 0, 3) != 0) continue;
            static const float sick[] = {NAN, INFINITY, -INFINITY};
            const int64_t at = row * a->q_stride_row + h * a->q_stride_head;
            case_store(c->q_dtype, q, at, sick[c->q_dtype == KV8_E4M3 ? 0 : rng_range(rng, 0, 2)]);
            if (h % 3 == 2) /* of several infinities, too */
                case_store(c->q_dtype, q, at + c->head_dim - 1,
                           sick[c->q_dtype == KV8_E4M3 ? 0 : 1 + h % 2]);
        }
    }
    a->q = q;
    if (c->q_dtype != KV8_E4M3) return;
    float *const scale = case_buffer(in, (size_t)(in->total_q * in->num_qo_heads) * 4);
    for (int32_t i = 0; i < in->total_q * in->num_qo_heads; i++)
        scale[i] = 0.5f + (float)rng_unit(rng);
    a->q_scale = scale; /* [row, kv head, head in group]: the finest */
    a->q_scale_stride_row = in->num_qo_heads;
    a->q_scale_stride_kv_head = c->group_size;
    a->q_scale_stride_group = 1;
}

static inline void case_make_sinks(attention_inputs *in, test_rng *rng) {
    if (in->c->sink == SINK_NONE) return;
    in->sinks = case_buffer(in, (size_t)in->num_qo_heads * sizeof *in->sinks);
    for (int32_t h = 0; h < in->num_qo_heads; h++) {
        in->sinks[h] = in->c->score_shift + 2 * rng_normal(rng);
        if (in->c->sink == SINK_WITH_INFINITIES && h % 3 == 1) in->sinks[h] = INFINITY;
        if (in->c->sink == SINK_WITH_INFINITIES && h % 3 == 2) in->sinks[h] = -INFINITY;
        if (in->c->sink == SINK_WITH_INFINITIES && h % 5 == 3) in->sinks[h] += 60;
    }
    in->args.sink_logit = in->sinks;
}

static inline bool case_o_is_fp8(const attention_case *c) {
    return c->o_dtype == KV8_E4M3 || c->o_dtype == KV8_E4M3FNUZ || c->o_dtype == KV8_E5M2;
}

static inline void case_make(attention_inputs *in, const attention_case *c) {
    memset(in, 0, sizeof *in);
    test_rng rng = {c->seed * 7919 + 1};
    int32_t longest = 1;
    in->c = c;
    in->num_qo_heads = c->num_kv_heads * c->group_size;
    assert_true(in->num_qo_heads <= 1024 && c->batch <= CASE_MAX_BATCH);
    in->v_head_dim = c->v_head_dim == 0 ? c->head_dim : c->v_head_dim;
    in->args = (kv8_attention_args)KV8_ATTENTION_ARGS_INIT;
    in->args.batch = c->batch;
    in->args.sm_scale = c->sm_scale;
    in->args.logits_soft_cap = c->soft_cap;
    in->args.lse_base2 = c->lse_transposed;
    in->k = in->v = (kv8_paged)KV8_PAGED_INIT;
    in->args.k = &in->k;
    in->args.v = &in->v;
    in->args.pages = &in->pages;
    in->spec = (kv8_attention_spec)KV8_ATTENTION_SPEC_INIT;
    case_make_queries(in, &rng);
    if (c->mask != MASK_NONE) case_make_mask(in, &rng);
    if (c->key_ranges) case_make_key_ranges(in, &rng);
    case_make_cache(in, &rng);
    kv8_attention_args *const a = &in->args;
    a->k_scale =
        case_make_scales(in, &rng, c->k_dtype, &a->k_scale_stride_batch, &a->k_scale_stride_head);
    a->v_scale =
        case_make_scales(in, &rng, c->v_dtype, &a->v_scale_stride_batch, &a->v_scale_stride_head);
    for (int32_t b = 0; b < c->batch; b++)
        longest = c->kv_len[b] > longest ? c->kv_len[b] : longest;
    in->spec.num_qo_heads = in->num_qo_heads;
    in->spec.num_kv_heads = c->num_kv_heads;
    in->spec.head_dim = c->head_dim;
    in->spec.v_head_dim = c->v_head_dim;
    in->spec.q_dtype = c->q_dtype;
    in->spec.k_dtype = c->k_dtype;
    in->spec.v_dtype = c->v_dtype;
    in->spec.o_dtype = c->o_dtype == KV8_DTYPE_NONE ? KV8_F32 : c->o_dtype;
    in->spec.page_size = c->ragged ? 0 : c->page_size;
    in->spec.window_left = c->window_left;
    in->spec.window_right = c->right - 1;
    in->spec.has_key_range = c->key_ranges;
    if (case_o_is_fp8(c)) {
        float *const scale = case_buffer(in, sizeof *scale);
        *scale = 0.0625f;
        in->args.o_scale = scale;
    }
    in->spec.causal = c->causal;
    in->spec.has_mask = c->mask != MASK_NONE;
    in->spec.batch_invariant = c->batch_invariant;
    in->spec.max_batch = c->batch;
    in->spec.max_total_q = in->total_q > 0 ? in->total_q : 1;
    in->spec.max_kv_len = longest;
    case_make_sinks(in, &rng);
    const size_t rows = (size_t)(in->total_q * in->num_qo_heads);
    in->ref_o = calloc(rows * (size_t)in->v_head_dim + 1, sizeof *in->ref_o);
    in->ref_lse = calloc(rows + 1, sizeof *in->ref_lse);
}

static inline void case_free(attention_inputs *in) {
    for (int i = 0; i < in->num_buffers; i++) guarded_free(in->buffers[i]);
    free(in->ref_o);
    free(in->ref_lse);
}

#endif
