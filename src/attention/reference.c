/* reference.c - the oracle: the definition in kv8/attention.h, in f64, one step after another.
 *
 * What every kernel is judged by, so it shares with them only the check of its arguments. Slow and
 * obvious: dequantise what somebody may see, then per row score, maximum, weights, sum. No tile, no
 * running maximum, no thread, no rung.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "problem.h"

/* Element `index` of an array of dtype. */
static double element(kv8_dtype dtype, const void *data, int64_t index) {
    switch (dtype) {
        case KV8_F32: return (double)((const float *)data)[index];
        case KV8_BF16: return (double)kv8_bf16_to_f32(((const kv8_bf16 *)data)[index]);
        case KV8_F16: return (double)kv8_f16_to_f32(((const kv8_f16 *)data)[index]);
#define FLOAT8(words, rule, name, which, mantissa, bias, max) \
    case which: return (double)kv8_##name##_to_f32(((const kv8_##name *)data)[index]);
            KV8_FLOAT8_FORMATS(FLOAT8)
#undef FLOAT8
        case KV8_INT8: return (double)((const int8_t *)data)[index];
        default: return (double)NAN;
    }
}

/* One request and kv head, dequantised, and scratch for one row. */
typedef struct scene {
    const kv8_attention_spec *spec;
    const kv8_attention_args *args;
    int32_t b, kv_head, qo_len, kv_len, v_head_dim;
    double *k, *v, *weight; /* [kv_len, head_dim], [kv_len, v_head_dim], [kv_len] */
} scene;

static bool sees(const scene *s, int32_t row, int32_t key) {
    const int64_t position = (int64_t)s->kv_len - s->qo_len + row;
    if (s->spec->causal && key > position) return false;
    if (s->spec->window_left >= 0 && key < position - s->spec->window_left) return false;
    if (s->spec->window_right >= 0 && key > position + s->spec->window_right) return false;
    if (s->spec->has_key_range) {
        const int32_t q_row = s->args->qo_indptr[s->b] + row;
        if (key < s->args->key_begin[q_row] || key >= s->args->key_end[q_row]) return false;
    }
    if (!s->spec->has_mask) return true;
    const int64_t bit = (int64_t)row * s->kv_len + key;
    const uint8_t *const field = s->args->mask_bits + s->args->mask_indptr[s->b];
    return (field[bit >> 3] & (1u << (bit & 7))) != 0;
}

static void dequantise(const scene *s, const kv8_paged *paged, kv8_dtype dtype, float scale,
                       int32_t page, int32_t slot, int32_t dim, double *out) {
    const int64_t at =
        page * paged->stride_page + slot * paged->stride_slot + s->kv_head * paged->stride_head;
    double factor = (double)scale;
    if (dtype == KV8_INT8) {
        const int64_t scale_at = page * paged->row_scale_stride_page +
                                 slot * paged->row_scale_stride_slot +
                                 s->kv_head * paged->row_scale_stride_head;
        factor *= (double)kv8_f16_to_f32(paged->row_scale[scale_at]);
    }
    for (int32_t d = 0; d < dim; d++) out[d] = element(dtype, paged->data, at + d) * factor;
}

/* Where key `key` lies. */
static void find_key(const scene *s, int32_t key, int32_t *page, int32_t *slot) {
    const kv8_page_table *const t = s->args->pages;
    if (t->kv_indptr != NULL) {
        *page = 0;
        *slot = t->kv_indptr[s->b] + key;
        return;
    }
    const int32_t entry = key / s->spec->page_size;
    *page = t->page_indptr != NULL ? t->page_indices[t->page_indptr[s->b] + entry]
                                   : t->block_table[s->b * t->block_table_stride + entry];
    *slot = key % s->spec->page_size;
}

/* Keys of request b. */
static int32_t count_keys(const kv8_attention_spec *spec, const kv8_page_table *t, int32_t b) {
    if (t->kv_indptr != NULL)
        return t->seq_lens != NULL ? t->seq_lens[b] : t->kv_indptr[b + 1] - t->kv_indptr[b];
    if (t->block_table != NULL) return t->seq_lens[b];
    const int32_t num_pages = t->page_indptr[b + 1] - t->page_indptr[b];
    return num_pages == 0 ? 0 : (num_pages - 1) * spec->page_size + t->last_page_len[b];
}

/* Rows of keys that nobody sees stay untouched, in the cache and here. */
static void load_keys(const scene *s) {
    const kv8_attention_args *const args = s->args;
    const float k_scale = args->k_scale == NULL
                              ? 1.0f
                              : args->k_scale[s->b * args->k_scale_stride_batch +
                                              s->kv_head * args->k_scale_stride_head];
    const float v_scale = args->v_scale == NULL
                              ? 1.0f
                              : args->v_scale[s->b * args->v_scale_stride_batch +
                                              s->kv_head * args->v_scale_stride_head];
    for (int32_t key = 0; key < s->kv_len; key++) {
        bool seen = false;
        for (int32_t row = 0; row < s->qo_len && !seen; row++) seen = sees(s, row, key);
        if (!seen) continue;
        int32_t page = 0, slot = 0;
        find_key(s, key, &page, &slot);
        dequantise(s, args->k, s->spec->k_dtype, k_scale, page, slot, s->spec->head_dim,
                   s->k + (int64_t)key * s->spec->head_dim);
        dequantise(s, args->v, s->spec->v_dtype, v_scale, page, slot, s->v_head_dim,
                   s->v + (int64_t)key * s->v_head_dim);
    }
}

static double q_scale_of(const scene *s, int32_t q_row, int32_t head_in_group) {
    const kv8_attention_args *const a = s->args;
    if (a->q_scale == NULL) return 1;
    return (double)a
        ->q_scale[s->b * a->q_scale_stride_batch + q_row * a->q_scale_stride_row +
                  s->kv_head * a->q_scale_stride_kv_head + head_in_group * a->q_scale_stride_group];
}

/* o[v_head_dim] and the row's lse. */
static double attend_row(const scene *s, int32_t row, int32_t qo_head, double *o) {
    const kv8_attention_spec *const spec = s->spec;
    const int32_t q_row = s->args->qo_indptr[s->b] + row;
    const int64_t q_at = q_row * s->args->q_stride_row + qo_head * s->args->q_stride_head;
    const double scale =
        (s->args->sm_scale == 0 ? 1 / sqrt((double)spec->head_dim) : (double)s->args->sm_scale) *
        q_scale_of(s, q_row, qo_head % (spec->num_qo_heads / spec->num_kv_heads));
    const double cap = (double)s->args->logits_soft_cap;
    const double sink =
        s->args->sink_logit == NULL ? (double)-INFINITY : (double)s->args->sink_logit[qo_head];

    double q[KV8_MAX_HEAD_DIM];
    for (int32_t d = 0; d < spec->head_dim; d++)
        q[d] = element(spec->q_dtype, s->args->q, q_at + d);
    double top = (double)-INFINITY;
    for (int32_t key = 0; key < s->kv_len; key++) {
        if (!sees(s, row, key)) continue;
        double score = 0;
        for (int32_t d = 0; d < spec->head_dim; d++)
            score += q[d] * s->k[(int64_t)key * spec->head_dim + d];
        score *= scale;
        if (cap > 0) score = cap * tanh(score / cap);
        s->weight[key] = score;
        if (score > top) top = score;
    }
    /* All visible scores -inf: any finite shift gives the sum of zeros that they mean. */
    const double shift = top == (double)-INFINITY ? 0 : top;
    double sum = 0;
    for (int32_t d = 0; d < s->v_head_dim; d++) o[d] = 0;
    for (int32_t key = 0; key < s->kv_len; key++) {
        if (!sees(s, row, key)) continue;
        const double weight = exp(s->weight[key] - shift);
        sum += weight;
        for (int32_t d = 0; d < s->v_head_dim; d++)
            o[d] += weight * s->v[(int64_t)key * s->v_head_dim + d];
    }
    const double lse = sum == 0 ? (double)-INFINITY : shift + log(sum);
    const double with_sink = fmax(shift, sink); /* keeps both exponentials at most 1 */
    const double denominator = sum * exp(shift - with_sink) + exp(sink - with_sink);
    for (int32_t d = 0; d < s->v_head_dim; d++) {
        if (sum == 0 || sink == (double)INFINITY)
            o[d] = 0;
        else
            o[d] = o[d] * exp(shift - with_sink) / denominator;
    }
    return lse;
}

static void attend_head(const scene *s, double *o_out, double *lse_out) {
    load_keys(s);
    const int32_t group_size = s->spec->num_qo_heads / s->spec->num_kv_heads;
    for (int32_t row = 0; row < s->qo_len; row++) {
        for (int32_t g = 0; g < group_size; g++) {
            const int32_t qo_head = s->kv_head * group_size + g;
            const int64_t at =
                ((int64_t)s->args->qo_indptr[s->b] + row) * s->spec->num_qo_heads + qo_head;
            const double lse = attend_row(s, row, qo_head, o_out + at * s->v_head_dim);
            if (lse_out != NULL) lse_out[at] = s->args->lse_base2 ? lse / log(2) : lse;
        }
    }
}

kv8_status kv8_attention_reference(const kv8_attention_spec *spec, const kv8_attention_args *given,
                                   double *o_out, double *lse_out) {
    KV8_REQUIRE(spec, given, o_out);
    KV8_TAKE_STRUCT(kv8_attention_spec, spec);
    KV8_TRY(kv8_attention_check_spec(spec));
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    kv8_last_page last_page;
    KV8_TRY(kv8_attention_check_batch(spec, args, &last_page));
    if (args->batch == 0 || args->qo_indptr[args->batch] == 0) return KV8_OK;
    KV8_TRY(kv8_attention_check_values(spec, args, &last_page));
    const int32_t v_head_dim = kv8_spec_v_head_dim(spec);
    int32_t longest = 1;
    for (int32_t b = 0; b < args->batch; b++)
        longest = (int32_t)kv8_max_i64(longest, count_keys(spec, args->pages, b));
    const size_t row_size = (size_t)(spec->head_dim + v_head_dim + 1) * sizeof(double);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)longest, row_size, "the oracle's keys and values", &memory));
    double *const k = memory;
    double *const v = k + (size_t)longest * (size_t)spec->head_dim;
    double *const weight = v + (size_t)longest * (size_t)v_head_dim;
    for (int32_t b = 0; b < args->batch; b++) {
        for (int32_t kv_head = 0; kv_head < spec->num_kv_heads; kv_head++) {
            const scene s = {.spec = spec,
                             .args = args,
                             .b = b,
                             .kv_head = kv_head,
                             .qo_len = args->qo_lens != NULL
                                           ? args->qo_lens[b]
                                           : args->qo_indptr[b + 1] - args->qo_indptr[b],
                             .kv_len = count_keys(spec, args->pages, b),
                             .v_head_dim = v_head_dim,
                             .k = k,
                             .v = v,
                             .weight = weight};
            attend_head(&s, o_out, lse_out);
        }
    }
    kv8_release(NULL, memory, (size_t)longest, row_size);
    return KV8_OK;
}
