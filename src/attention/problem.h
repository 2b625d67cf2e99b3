/* problem.h - what plan, run and the oracle share: validated inputs and the place of a key.
 *
 * Private to attention. Holds no arithmetic on values: masks are here as plain statements about
 * positions, softmax is not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_PROBLEM_H
#define KV8_ATTENTION_PROBLEM_H

#include <math.h>

#include "formats_impl.h"

#include <kv8/attention.h>

enum { KV8_MAX_HEAD_DIM = KV8_MAX_ROW_VALUES };

/* A caller's args and the structs they point to, as copies of today's size: args.k, v and pages
 * point here, or are NULL as the caller's. It must not move. */
typedef struct kv8_attention_inputs {
    kv8_attention_args args;
    kv8_paged k, v;
    kv8_page_table pages;
} kv8_attention_inputs;
kv8_status kv8_attention_read_args(kv8_attention_inputs *out, const kv8_attention_args *given);

/* Every option of a spec of today's size, each refusal naming value and limit. */
kv8_status kv8_attention_check_spec(const kv8_attention_spec *spec);
/* The largest page id that a query sees, and where: table entry `entry` of `request`. -1 = none. */
typedef struct kv8_last_page {
    int32_t page, request, entry;
} kv8_last_page;

/* Lengths, page tables and visible page ids against the spec. Reads only index arrays, key
 * ranges and mask bits. */
kv8_status kv8_attention_check_batch(const kv8_attention_spec *spec, const kv8_attention_args *args,
                                     kv8_last_page *last_out);
/* What may change from run to run of a checked batch that has rows: data pointers, numbers, sinks,
 * the pools' sizes. */
kv8_status kv8_attention_check_values(const kv8_attention_spec *spec,
                                      const kv8_attention_args *args, const kv8_last_page *last);

/* Which data pointers are set, and no others: part of check_values. */
kv8_status kv8_attention_check_data(const kv8_attention_spec *spec, const kv8_attention_args *args);
/* sm_scale and logits_soft_cap, and which form the tables have: the same. Reads no array. */
kv8_status kv8_attention_check_scalars(const kv8_attention_args *args);
kv8_status kv8_attention_check_form(const kv8_attention_spec *spec, const kv8_page_table *table);

static inline int32_t kv8_spec_v_head_dim(const kv8_attention_spec *spec) {
    return spec->v_head_dim == 0 ? spec->head_dim : spec->v_head_dim;
}
static inline kv8_dtype kv8_spec_o_dtype(const kv8_attention_spec *spec) {
    if (spec->o_dtype != KV8_DTYPE_NONE) return spec->o_dtype;
    return spec->q_dtype == KV8_E4M3 ? KV8_F32 : spec->q_dtype;
}

/* Keys of request b; tables have been checked. */
static inline int32_t kv8_request_kv_len(const kv8_page_table *table, int32_t page_size,
                                         int32_t b) {
    if (table->kv_indptr != NULL && table->seq_lens == NULL)
        return table->kv_indptr[b + 1] - table->kv_indptr[b];
    if (table->page_indptr == NULL) return table->seq_lens[b];
    const int32_t num_pages = table->page_indptr[b + 1] - table->page_indptr[b];
    return num_pages == 0 ? 0 : (num_pages - 1) * page_size + table->last_page_len[b];
}
/* NULL where there are no pages. */
static inline const int32_t *kv8_request_pages(const kv8_page_table *table, int32_t b) {
    if (table->block_table != NULL) return table->block_table + b * table->block_table_stride;
    /* An empty batch of pages may come without an index array. */
    return table->page_indices == NULL ? NULL : table->page_indices + table->page_indptr[b];
}

/* One request of a checked batch. */
typedef struct kv8_request {
    int32_t idx;
    int32_t q_begin; /* its first row of q */
    int32_t qo_len;  /* rows in use */
    int32_t kv_len;
} kv8_request;
static inline kv8_request kv8_request_of(const kv8_attention_spec *spec,
                                         const kv8_attention_args *args, int32_t b) {
    const int32_t rows = args->qo_indptr[b + 1] - args->qo_indptr[b];
    return (kv8_request){.idx = b,
                         .q_begin = args->qo_indptr[b],
                         .qo_len = args->qo_lens == NULL ? rows : args->qo_lens[b],
                         .kv_len = kv8_request_kv_len(args->pages, spec->page_size, b)};
}

/* The spec with its defaults written out. */
static inline kv8_attention_spec kv8_attention_resolve_spec(const kv8_attention_spec *spec) {
    kv8_attention_spec resolved = *spec;
    resolved.v_head_dim = kv8_spec_v_head_dim(spec);
    resolved.o_dtype = kv8_spec_o_dtype(spec);
    if (spec->causal) resolved.window_right = -1; /* it says nothing more */
    return resolved;
}
static inline double kv8_args_sm_scale(const kv8_attention_spec *spec,
                                       const kv8_attention_args *args) {
    return args->sm_scale != 0 ? (double)args->sm_scale : 1 / sqrt((double)spec->head_dim);
}

/* The keys that a query row sees, masks apart: [begin, end), empty as begin == end. */
typedef struct kv8_key_range {
    int32_t begin, end;
} kv8_key_range;
static inline kv8_key_range kv8_row_keys(const kv8_attention_spec *spec,
                                         const kv8_attention_args *args, const kv8_request *request,
                                         int32_t row) {
    const int64_t position = (int64_t)request->kv_len - request->qo_len + row;
    int64_t begin = 0, end = request->kv_len;
    if (spec->causal) end = kv8_min_i64(end, position + 1);
    if (spec->window_right >= 0) end = kv8_min_i64(end, position + spec->window_right + 1);
    if (spec->window_left >= 0) begin = kv8_max_i64(position - spec->window_left, 0);
    if (spec->has_key_range) {
        begin = kv8_max_i64(begin, args->key_begin[request->q_begin + row]);
        end = kv8_min_i64(end, args->key_end[request->q_begin + row]);
    }
    end = kv8_max_i64(end, 0);
    return (kv8_key_range){(int32_t)kv8_min_i64(begin, end), (int32_t)end};
}
/* The least range with all that rows [first, last] see. */
static inline kv8_key_range kv8_rows_keys(const kv8_attention_spec *spec,
                                          const kv8_attention_args *args,
                                          const kv8_request *request, int32_t first, int32_t last) {
    const kv8_key_range a = kv8_row_keys(spec, args, request, first);
    const kv8_key_range b = kv8_row_keys(spec, args, request, last);
    if (!spec->has_key_range) /* they move right with the row */
        return (kv8_key_range){a.begin < b.begin ? a.begin : b.begin, b.end};
    kv8_key_range all = {INT32_MAX, 0};
    for (int32_t row = first; row <= last; row++) {
        const kv8_key_range keys = kv8_row_keys(spec, args, request, row);
        if (keys.begin == keys.end) continue;
        if (keys.begin < all.begin) all.begin = keys.begin;
        if (keys.end > all.end) all.end = keys.end;
    }
    if (all.end == 0) all.begin = 0;
    return all;
}
/* Bit of (row, key) in request b's mask field. */
static inline bool kv8_mask_bit(const kv8_attention_args *args, int32_t b, int32_t kv_len,
                                int32_t row, int32_t key) {
    const int64_t bit = (int64_t)row * kv_len + key;
    return (args->mask_bits[args->mask_indptr[b] + bit / 8] >> (bit % 8)) & 1;
}
/* The first n bits, of 64. */
static inline uint64_t kv8_first_bits(int32_t n) {
    return n < 64 ? (UINT64_C(1) << n) - 1 : UINT64_MAX;
}
/* Bits of (row, keys [begin, end)), at most 64, in request b's mask field. */
static inline uint64_t kv8_mask_word(const kv8_attention_args *args, int32_t b, int32_t kv_len,
                                     int32_t row, int32_t begin, int32_t end) {
    const int64_t first = (int64_t)row * kv_len + begin, last = first + (end - begin) - 1;
    const uint8_t *const at = args->mask_bits + args->mask_indptr[b] + first / 8;
    const int32_t more = (int32_t)(last / 8 - first / 8), shift = (int32_t)(first % 8);
    uint64_t bits = 0;
    for (int32_t i = 0; i <= more && i < 8; i++) bits |= (uint64_t)at[i] << (8 * i);
    bits >>= shift;
    if (more == 8) bits |= (uint64_t)at[8] << (64 - shift);
    return bits & kv8_first_bits(end - begin);
}

#endif
