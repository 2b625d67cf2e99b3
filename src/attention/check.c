/* check.c - every way a spec or a run's arguments can be wrong, each with its one line.
 *
 * Nothing is read here but options, index arrays and mask bits: no query, key or value.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "problem.h"

static kv8_status check_range(const char *name, int32_t value, int32_t low, int32_t high) {
    if (value >= low && value <= high) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s is %d, must be %d to %d", name, value, low, high);
}

static bool is_dtype(kv8_dtype dtype) {
    return (int)dtype > KV8_DTYPE_NONE && dtype < KV8_DTYPE_COUNT;
}

static kv8_status check_dtypes(const kv8_attention_spec *spec) {
    if (!is_dtype(spec->q_dtype) || !is_dtype(spec->k_dtype) || !is_dtype(spec->v_dtype))
        return kv8_fail(
            KV8_ERR_INVALID, "q_dtype, k_dtype, v_dtype are %d, %d, %d, must be 1 to %d",
            (int)spec->q_dtype, (int)spec->k_dtype, (int)spec->v_dtype, (int)KV8_DTYPE_COUNT - 1);
    const kv8_dtype q = spec->q_dtype;
    if (q != KV8_F32 && q != KV8_BF16 && q != KV8_F16 && q != KV8_E4M3)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "q_dtype is %s; supported: f32, bf16, f16, e4m3",
                        kv8_dtype_name(q));
    const kv8_dtype o = spec->o_dtype;
    if (o != KV8_DTYPE_NONE && !is_dtype(o))
        return kv8_fail(KV8_ERR_INVALID, "o_dtype is %d, must be 0 to %d", (int)o,
                        (int)KV8_DTYPE_COUNT - 1);
    if (o == KV8_INT8)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "o_dtype is int8; supported: f32, bf16, f16 and the floats of 8 bits");
    return KV8_OK;
}

static kv8_status check_head_dim(const char *name, int32_t value, int32_t low) {
    if (value > KV8_MAX_HEAD_DIM)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s is %d; supported: up to %d", name, value,
                        (int)KV8_MAX_HEAD_DIM);
    return check_range(name, value, low, KV8_MAX_HEAD_DIM);
}

static kv8_status check_heads(const kv8_attention_spec *spec) {
    enum { MAX_HEADS = 65536 }; /* keeps head arithmetic in int32 */
    KV8_TRY(check_range("num_qo_heads", spec->num_qo_heads, 1, MAX_HEADS));
    KV8_TRY(check_range("num_kv_heads", spec->num_kv_heads, 1, MAX_HEADS));
    if (spec->num_qo_heads % spec->num_kv_heads != 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "num_qo_heads is %d, must be a multiple of num_kv_heads %d",
                        spec->num_qo_heads, spec->num_kv_heads);
    KV8_TRY(check_head_dim("head_dim", spec->head_dim, 1));
    return check_head_dim("v_head_dim", spec->v_head_dim, 0);
}

static kv8_status check_windows(const kv8_attention_spec *spec) {
    KV8_TRY(check_range("causal", spec->causal, 0, 1));
    KV8_TRY(check_range("window_left", spec->window_left, -1, INT32_MAX));
    KV8_TRY(check_range("window_right", spec->window_right, -1, INT32_MAX));
    if (spec->causal && spec->window_right > 0)
        return kv8_fail(KV8_ERR_INVALID, "window_right is %d and causal 1, which allows -1 and 0",
                        spec->window_right);
    return KV8_OK;
}

kv8_status kv8_attention_check_spec(const kv8_attention_spec *spec) {
    KV8_TRY(check_heads(spec));
    KV8_TRY(check_dtypes(spec));
    KV8_TRY(check_range("page_size", spec->page_size, 0, INT32_MAX));
    KV8_TRY(check_windows(spec));
    KV8_TRY(check_range("has_mask", spec->has_mask, 0, 1));
    KV8_TRY(check_range("has_key_range", spec->has_key_range, 0, 1));
    KV8_TRY(check_range("batch_invariant", spec->batch_invariant, 0, 1));
    KV8_TRY(check_range("math", (int32_t)spec->math, KV8_MATH_AUTO, KV8_MATH_BF16));
    KV8_TRY(check_range("max_batch", spec->max_batch, 1, INT32_MAX - 1));
    KV8_TRY(check_range("max_total_q", spec->max_total_q, 1, INT32_MAX - 1));
    KV8_TRY(check_range("max_kv_len", spec->max_kv_len, 1, INT32_MAX - 1));
    if ((int64_t)spec->max_total_q * spec->num_qo_heads > INT32_MAX)
        return kv8_fail(KV8_ERR_INVALID,
                        "max_total_q %d times num_qo_heads %d is %lld, must be at most %d",
                        spec->max_total_q, spec->num_qo_heads,
                        (long long)spec->max_total_q * spec->num_qo_heads, INT32_MAX);
    return KV8_OK;
}

/* --- args --- */

kv8_status kv8_attention_read_args(kv8_attention_inputs *out, const kv8_attention_args *given) {
    KV8_READ_STRUCT(kv8_attention_args, &out->args, given);
    if (out->args.k != NULL) {
        KV8_READ_STRUCT(kv8_paged, &out->k, out->args.k);
        out->args.k = &out->k;
    }
    if (out->args.v != NULL) {
        KV8_READ_STRUCT(kv8_paged, &out->v, out->args.v);
        out->args.v = &out->v;
    }
    if (out->args.pages != NULL) {
        KV8_READ_STRUCT(kv8_page_table, &out->pages, out->args.pages);
        out->args.pages = &out->pages;
    }
    return KV8_OK;
}

kv8_status kv8_attention_check_scalars(const kv8_attention_args *args) {
    if (!isfinite(args->sm_scale))
        return kv8_fail(KV8_ERR_INVALID, "sm_scale is %g, must be finite", (double)args->sm_scale);
    if (!(args->logits_soft_cap >= 0) || isinf(args->logits_soft_cap))
        return kv8_fail(KV8_ERR_INVALID, "logits_soft_cap is %g, must be 0 (off) or finite and > 0",
                        (double)args->logits_soft_cap);
    return check_range("lse_base2", args->lse_base2, 0, 1);
}

static kv8_status check_sinks(const kv8_attention_spec *spec, const float *sink_logit) {
    for (int32_t h = 0; sink_logit != NULL && h < spec->num_qo_heads; h++) {
        if (isnan(sink_logit[h]))
            return kv8_fail(KV8_ERR_INVALID, "sink_logit[%d] is NaN, must be a number or infinite",
                            h);
    }
    return KV8_OK;
}

static kv8_status check_queries(const kv8_attention_spec *spec, const kv8_attention_args *args) {
    KV8_TRY(check_range("batch", args->batch, 0, spec->max_batch));
    if (args->batch == 0) return KV8_OK;
    const int32_t *const indptr = args->qo_indptr;
    if (indptr == NULL) return kv8_fail(KV8_ERR_INVALID, "qo_indptr is NULL");
    if (indptr[0] != 0)
        return kv8_fail(KV8_ERR_INVALID, "qo_indptr[0] is %d, must be 0", indptr[0]);
    for (int32_t b = 0; b < args->batch; b++) {
        if (indptr[b + 1] < indptr[b])
            return kv8_fail(KV8_ERR_INVALID, "qo_indptr[%d] is %d, must be at least %d", b + 1,
                            indptr[b + 1], indptr[b]);
    }
    if (indptr[args->batch] > spec->max_total_q)
        return kv8_fail(KV8_ERR_INVALID, "qo_indptr[%d] is %d, max_total_q is %d", args->batch,
                        indptr[args->batch], spec->max_total_q);
    for (int32_t b = 0; args->qo_lens != NULL && b < args->batch; b++) {
        if (args->qo_lens[b] < 0 || args->qo_lens[b] > indptr[b + 1] - indptr[b])
            return kv8_fail(KV8_ERR_INVALID, "qo_lens[%d] is %d, must be 0 to %d", b,
                            args->qo_lens[b], indptr[b + 1] - indptr[b]);
    }
    return KV8_OK;
}

/* One request's length, in whichever form. */
static kv8_status paged_length(const kv8_attention_spec *spec, const kv8_page_table *table,
                               int32_t b, int64_t *kv_len_out) {
    const int64_t num_pages = (int64_t)table->page_indptr[b + 1] - table->page_indptr[b];
    if (num_pages < 0 || table->page_indptr[b] < 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "page_indptr[%d] is %d after %d, must not fall or be negative", b + 1,
                        table->page_indptr[b + 1], table->page_indptr[b]);
    *kv_len_out = 0;
    if (num_pages == 0) return KV8_OK;
    const int32_t last = table->last_page_len[b];
    if (last < 1 || last > spec->page_size)
        return kv8_fail(KV8_ERR_INVALID, "last_page_len[%d] is %d, must be 1 to %d", b, last,
                        spec->page_size);
    *kv_len_out = (num_pages - 1) * spec->page_size + last;
    return KV8_OK;
}

static kv8_status dense_length(const kv8_attention_spec *spec, const kv8_page_table *table,
                               int32_t b, int64_t *kv_len_out) {
    *kv_len_out = table->seq_lens[b];
    if (*kv_len_out < 0)
        return kv8_fail(KV8_ERR_INVALID, "seq_lens[%d] is %d, must be 0 or more", b,
                        table->seq_lens[b]);
    if (kv8_ceil_div(*kv_len_out, spec->page_size) > table->block_table_stride)
        return kv8_fail(KV8_ERR_INVALID, "seq_lens[%d] is %d, block_table_stride %lld holds %lld",
                        b, table->seq_lens[b], (long long)table->block_table_stride,
                        (long long)table->block_table_stride * spec->page_size);
    return KV8_OK;
}

static kv8_status ragged_length(const kv8_page_table *table, int32_t b, int64_t *kv_len_out) {
    const int64_t room = (int64_t)table->kv_indptr[b + 1] - table->kv_indptr[b];
    if (room < 0 || table->kv_indptr[b] < 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "kv_indptr[%d] is %d after %d, must not fall or be negative", b + 1,
                        table->kv_indptr[b + 1], table->kv_indptr[b]);
    *kv_len_out = table->seq_lens == NULL ? room : table->seq_lens[b];
    if (*kv_len_out < 0 || *kv_len_out > room)
        return kv8_fail(KV8_ERR_INVALID, "seq_lens[%d] is %d, must be 0 to the %lld of kv_indptr",
                        b, table->seq_lens[b], (long long)room);
    return KV8_OK;
}

static kv8_status check_length(const kv8_attention_spec *spec, const kv8_page_table *table,
                               int32_t b) {
    int64_t kv_len = 0;
    KV8_TRY(table->page_indptr != NULL   ? paged_length(spec, table, b, &kv_len)
            : table->block_table != NULL ? dense_length(spec, table, b, &kv_len)
                                         : ragged_length(table, b, &kv_len));
    if (kv_len > spec->max_kv_len)
        return kv8_fail(KV8_ERR_INVALID, "request %d has %lld keys, max_kv_len is %d", b,
                        (long long)kv_len, spec->max_kv_len);
    return KV8_OK;
}

kv8_status kv8_attention_check_form(const kv8_attention_spec *spec, const kv8_page_table *table) {
    if (table == NULL) return kv8_fail(KV8_ERR_INVALID, "pages is NULL");
    const int forms =
        (table->page_indptr != NULL) + (table->block_table != NULL) + (table->kv_indptr != NULL);
    if (forms != 1)
        return kv8_fail(KV8_ERR_INVALID,
                        "%d of page_indptr, block_table and kv_indptr are set, must be one", forms);
    if ((table->kv_indptr != NULL) != (spec->page_size == 0))
        return kv8_fail(KV8_ERR_INVALID, "kv_indptr is %s and page_size %d; 0 alone has one",
                        table->kv_indptr == NULL ? "NULL" : "set", spec->page_size);
    if (table->page_indptr != NULL && table->last_page_len == NULL)
        return kv8_fail(KV8_ERR_INVALID, "page_indptr is set and last_page_len is NULL");
    if (table->block_table != NULL && table->seq_lens == NULL)
        return kv8_fail(KV8_ERR_INVALID, "block_table is set and seq_lens is NULL");
    return KV8_OK;
}

static kv8_status check_table(const kv8_attention_spec *spec, const kv8_attention_args *args) {
    const kv8_page_table *const table = args->pages;
    KV8_TRY(kv8_attention_check_form(spec, table));
    for (int32_t b = 0; b < args->batch; b++) KV8_TRY(check_length(spec, table, b));
    if (table->page_indptr != NULL && table->page_indices == NULL &&
        table->page_indptr[args->batch] > table->page_indptr[0])
        return kv8_fail(KV8_ERR_INVALID, "page_indices is NULL");
    return KV8_OK;
}

/* Do rows see any key of [begin, end), where a mask or ranges may leave holes? */
static bool any_sees(const kv8_attention_spec *spec, const kv8_attention_args *args,
                     const kv8_request *request, int32_t begin, int32_t end) {
    for (int32_t row = 0; row < request->qo_len; row++) {
        const kv8_key_range keys = kv8_row_keys(spec, args, request, row);
        const int32_t from = keys.begin > begin ? keys.begin : begin;
        const int32_t to = keys.end < end ? keys.end : end;
        if (!spec->has_mask && from < to) return true;
        for (int32_t key = from; key < to; key++) {
            if (kv8_mask_bit(args, request->idx, request->kv_len, row, key)) return true;
        }
    }
    return false;
}

/* Every page that a query can see must exist; the others' entries are not looked at. */
static kv8_status check_pages(const kv8_attention_spec *spec, const kv8_attention_args *args,
                              int32_t b, kv8_last_page *last) {
    const kv8_request request = kv8_request_of(spec, args, b);
    const int32_t *const pages = kv8_request_pages(args->pages, b);
    if (request.qo_len == 0 || spec->page_size == 0) return KV8_OK;
    const kv8_key_range seen = kv8_rows_keys(spec, args, &request, 0, request.qo_len - 1);
    if (seen.begin >= seen.end) return KV8_OK;
    const bool holes = spec->has_mask || spec->has_key_range;
    const int32_t size = spec->page_size;
    for (int32_t i = seen.begin / size; i <= (seen.end - 1) / size; i++) {
        if (pages[i] >= 0 && pages[i] <= last->page) continue;
        const int32_t begin = (int32_t)kv8_max_i64((int64_t)i * size, seen.begin);
        const int32_t end = (int32_t)kv8_min_i64((int64_t)(i + 1) * size, seen.end);
        if (holes && !any_sees(spec, args, &request, begin, end)) continue;
        if (pages[i] < 0)
            return kv8_fail(KV8_ERR_INVALID,
                            "request %d: table entry %d is %d, but a query sees keys of that page",
                            b, i, pages[i]);
        *last = (kv8_last_page){.page = pages[i], .request = b, .entry = i};
    }
    return KV8_OK;
}

kv8_status kv8_attention_check_data(const kv8_attention_spec *spec,
                                    const kv8_attention_args *args) {
    if (args->q == NULL) return kv8_fail(KV8_ERR_INVALID, "q is NULL");
    if (args->k == NULL || args->v == NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s is NULL", args->k == NULL ? "k" : "v");
    if (args->k->data == NULL || args->v->data == NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s.data is NULL", args->k->data == NULL ? "k" : "v");
    if ((spec->q_dtype == KV8_E4M3) != (args->q_scale != NULL))
        return kv8_fail(KV8_ERR_INVALID, "q_dtype is %s and q_scale is %s; e4m3 alone has one",
                        kv8_dtype_name(spec->q_dtype), args->q_scale == NULL ? "NULL" : "set");
    if (args->o_scale != NULL && !kv8_is_float8(kv8_spec_o_dtype(spec)))
        return kv8_fail(KV8_ERR_INVALID,
                        "o_scale is set and o_dtype %s; 8-bit floats alone have one",
                        kv8_dtype_name(kv8_spec_o_dtype(spec)));
    if ((spec->k_dtype == KV8_INT8) != (args->k->row_scale != NULL))
        return kv8_fail(KV8_ERR_INVALID, "k_dtype is %s and k.row_scale is %s; int8 alone has one",
                        kv8_dtype_name(spec->k_dtype), args->k->row_scale == NULL ? "NULL" : "set");
    if ((spec->v_dtype == KV8_INT8) != (args->v->row_scale != NULL))
        return kv8_fail(KV8_ERR_INVALID, "v_dtype is %s and v.row_scale is %s; int8 alone has one",
                        kv8_dtype_name(spec->v_dtype), args->v->row_scale == NULL ? "NULL" : "set");
    return KV8_OK;
}

static kv8_status check_pool(const char *name, const kv8_paged *pool, const kv8_last_page *last) {
    if (pool->num_pages < 0)
        return kv8_fail(KV8_ERR_INVALID, "%s.num_pages is %lld, must be 0 (not known) or more",
                        name, (long long)pool->num_pages);
    if (pool->num_pages == 0 || last->page < pool->num_pages) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "request %d: table entry %d is %d, %s.num_pages is %lld",
                    last->request, last->entry, last->page, name, (long long)pool->num_pages);
}

kv8_status kv8_attention_check_values(const kv8_attention_spec *spec,
                                      const kv8_attention_args *args, const kv8_last_page *last) {
    KV8_TRY(kv8_attention_check_scalars(args));
    KV8_TRY(check_sinks(spec, args->sink_logit));
    KV8_TRY(kv8_attention_check_data(spec, args));
    if (args->o_scale != NULL && !(*args->o_scale > 0 && isfinite(*args->o_scale)))
        return kv8_fail(KV8_ERR_INVALID, "o_scale is %g, must be finite and > 0",
                        (double)*args->o_scale);
    KV8_TRY(check_pool("k", args->k, last));
    return check_pool("v", args->v, last);
}

kv8_status kv8_attention_check_batch(const kv8_attention_spec *spec, const kv8_attention_args *args,
                                     kv8_last_page *last_out) {
    *last_out = (kv8_last_page){.page = -1};
    KV8_TRY(check_queries(spec, args));
    if (args->batch == 0) return KV8_OK;
    KV8_TRY(check_table(spec, args));
    const bool masked = args->mask_bits != NULL && args->mask_indptr != NULL;
    if (spec->has_mask && !masked)
        return kv8_fail(KV8_ERR_INVALID, "the plan has a mask and %s is NULL",
                        args->mask_bits == NULL ? "mask_bits" : "mask_indptr");
    if (!spec->has_mask && (args->mask_bits != NULL || args->mask_indptr != NULL))
        return kv8_fail(KV8_ERR_INVALID, "mask_bits are given and the plan's has_mask is 0");
    const bool ranged = args->key_begin != NULL && args->key_end != NULL;
    if (spec->has_key_range && !ranged)
        return kv8_fail(KV8_ERR_INVALID, "the plan has key ranges and %s is NULL",
                        args->key_begin == NULL ? "key_begin" : "key_end");
    if (!spec->has_key_range && (args->key_begin != NULL || args->key_end != NULL))
        return kv8_fail(KV8_ERR_INVALID, "key ranges are given and the plan's has_key_range is 0");
    for (int32_t b = 0; b < args->batch; b++) KV8_TRY(check_pages(spec, args, b, last_out));
    return KV8_OK;
}
