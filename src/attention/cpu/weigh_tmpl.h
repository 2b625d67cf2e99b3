/* weigh_tmpl.h - scores to weights: scale, cap, mask, running maximum, exp, sum.
 *
 * Part of attention_tmpl.h. A vector holds one score of each of its rows, or, when the rows are
 * few, `fold` keys of each row: then lane row * row_step + f * key_step of vector i is key
 * i * fold + f. Nothing is summed across lanes here but the maximum of a row's fold lanes.
 * Maxima are kept in log2 units.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* How the rows of one step lie in vectors. */
typedef struct t_lanes {
    int32_t row_begin, num_rows; /* within the head's rows of the item */
    int32_t fold, shift, vecs;   /* fold = 1 << shift; vecs is 1 when it is above 1 */
    int32_t row_step, key_step;  /* in lanes */
    int32_t num_quartered;       /* units of Q that a rung lays out in its own order */
} t_lanes;

/* Where key i of the step's row `row` lies among the scores. */
static inline int64_t t_score_at(const t_lanes *at, int32_t row, int32_t i) {
    return (int64_t)(i >> at->shift) * at->vecs * V_LANES + row * at->row_step +
           (i & (at->fold - 1)) * at->key_step;
}

/* tanh: an odd polynomial near 0 (relative error 1e-7 up to 0.625; coefficients fitted by Cephes,
 * Moshier 1989), 1 - 2/(exp(2x)+1) beyond. */
static inline v_f32 t_tanh(v_f32 x) {
    const v_f32 size = v_max(x, v_sub(v_set1(0.0f), x));
    const v_f32 square = v_mul(x, x);
    v_f32 p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, square, v_set1(2.06390887954e-2f));
    p = v_fma(p, square, v_set1(-5.37397155531e-2f));
    p = v_fma(p, square, v_set1(1.33314422036e-1f));
    p = v_fma(p, square, v_set1(-3.33332819422e-1f));
    const v_f32 small = v_fma(v_mul(p, square), x, x);
    const v_f32 e = v_exp(v_add(size, size));
    const v_f32 large = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
    const v_f32 sign = v_select_lt(x, v_set1(0.0f), v_set1(-1.0f), v_set1(1.0f));
    return v_select_lt(size, v_set1(0.625f), small, v_mul(sign, large));
}

/* per_key[i * fold + f] in the lanes of f. */
V_INLINE v_f32 t_key_lanes(const t_lanes *at, const float *per_key, int32_t i) {
    if (at->fold == 1) return v_set1(per_key[i]);
#ifdef T_KEY_LANES
    return T_KEY_LANES(at->fold, per_key + i * at->fold);
#else
    switch (at->fold) {
        case 2: return v_load_fold(per_key + i * 2, 2);
        case 4: return v_load_fold(per_key + i * 4, 4);
        case 8: return v_load_fold(per_key + i * 8, 8);
        default: return v_load_fold(per_key + i * 16, 16);
    }
#endif
}

static const float t_log2e = 1.44269504f, t_ln2 = 0.693147181f;

/* In f32 math the rows of Q are multiplied with their scale once, which leaves scores in log2 units
 * as they come. (bf16 could not hold the products, and a cap stands between the two factors.) */
static inline bool t_scales_q(const kv8_attention_job *job) {
    return !T_PAIRS && !(job->args->logits_soft_cap > 0);
}

/* Vector `vec` of the scores: times scale, int8 K's row scales (or NULL), capped, in log2 units. */
static void t_finish_scores(const kv8_attention_job *job, const t_lanes *at, int32_t vec,
                            int32_t count, v_f32 scale, const float *k_scale) {
    const float cap = job->args->logits_soft_cap;
    const bool scaled = t_scales_q(job);
    for (int32_t i = 0; i < count; i++) {
        float *const s = job->s + ((int64_t)i * at->vecs + vec) * V_LANES;
        v_f32 x = v_load(s);
        if (!scaled) x = v_mul(x, scale);
        if (k_scale != NULL) x = v_mul(x, t_key_lanes(at, k_scale, i));
        if (cap > 0) x = v_mul(v_set1(cap), t_tanh(v_div(x, v_set1(cap))));
        v_store(s, scaled ? x : v_mul(x, v_set1(t_log2e)));
    }
}

/* -INFINITY wherever a row sees nothing, padding included. */
static void t_mask(const kv8_attention_job *job, const t_lanes *at, const kv8_tile *tile,
                   int32_t padded) {
    const int32_t n = tile->end - tile->begin;
    float from[KV8_TILE_ROWS], to[KV8_TILE_ROWS], key[KV8_TILE_ROWS];
    for (int32_t lane = 0; lane < at->vecs * V_LANES; lane++) from[lane] = to[lane] = key[lane] = 0;
    for (int32_t row = 0; row < at->num_rows; row++) {
        const int64_t first = (int64_t)job->seen_from[at->row_begin + row] - tile->begin;
        const int64_t last = (int64_t)job->seen_to[at->row_begin + row] - tile->begin;
        for (int32_t f = 0; f < at->fold; f++) {
            const int64_t lane = t_score_at(at, row, f);
            from[lane] = (float)kv8_min_i64(kv8_max_i64(first, 0), n);
            to[lane] = (float)kv8_min_i64(kv8_max_i64(last, 0), n);
            key[lane] = (float)f;
        }
    }
    const v_f32 hidden = v_set1(-INFINITY);
    for (int32_t v = 0; v < at->vecs; v++) {
        const v_f32 begin = v_load(from + v * V_LANES), end = v_load(to + v * V_LANES);
        v_f32 now = v_load(key + v * V_LANES);
        for (int32_t i = 0; i < padded / at->fold; i++) {
            float *const s = job->s + ((int64_t)i * at->vecs + v) * V_LANES;
            const v_f32 x = v_select_lt(now, end, v_load(s), hidden);
            v_store(s, v_select_lt(now, begin, hidden, x));
            now = v_add(now, v_set1((float)at->fold));
        }
    }
    if (!job->spec->has_mask) return;
    for (int32_t row = 0; row < at->num_rows; row++) {
        for (int32_t i = 0; i < n; i++) {
            if (!kv8_job_sees(job, at->row_begin + row, tile->begin + i))
                job->s[t_score_at(at, row, i)] = -INFINITY;
        }
    }
}

/* The largest of a row's fold lanes, in all of them. */
static inline v_f32 t_max_of_row(const t_lanes *at, v_f32 top) {
    for (int32_t step = at->key_step; step < at->fold * at->key_step; step *= 2) {
        switch (step) {
            case 1: top = v_max(v_swap(top, 1), top); break;
            case 2: top = v_max(v_swap(top, 2), top); break;
            case 4: top = v_max(v_swap(top, 4), top); break;
            default: top = v_max(v_swap(top, 8), top); break;
        }
    }
    return top;
}

#ifndef T_OWN_WEIGH
V_INLINE v_f32 t_score(const float *s, v_f32 scale) {
    return T_PAIRS ? v_mul(v_load(s), scale) : v_load(s);
}

/* The largest of `count` vectors `next` floats apart; an even number. NaN does not count. */
V_INLINE v_f32 t_max_of_keys(const float *s, int64_t next, int32_t count, v_f32 scale) {
    v_f32 top[4]; /* a chain of maxima alone would wait for each of them */
    for (int c = 0; c < 4; c++) top[c] = v_set1(-INFINITY);
    int32_t i = 0;
    for (; i + 4 <= count; i += 4) {
        V_UNROLL
        for (int c = 0; c < 4; c++) top[c] = v_max(t_score(s + (i + c) * next, scale), top[c]);
    }
    for (; i < count; i++) top[0] = v_max(t_score(s + i * next, scale), top[0]);
    return v_max(v_max(top[0], top[1]), v_max(top[2], top[3]));
}

/* Scores of vector `vec` (in bf16 math times scale) become weights 2^(s - max), in bf16 math
 * rounded and two keys to a unit. The running maximum and sum of the lanes move on; keep = what the
 * older sums are to be multiplied with. v_scale: int8 V's row scales, which go into P, else NULL. A
 * NaN score leaves the maximum alone and makes the sum NaN, as a score of +inf does. */
V_INLINE v_f32 t_weigh_vector(const kv8_attention_job *job, const t_lanes *at, int32_t vec,
                              int32_t count, v_f32 scale, const float *v_scale, float *lane_max,
                              float *lane_sum) {
    const int64_t next = (int64_t)at->vecs * V_LANES;
    float *const s = job->s + (int64_t)vec * V_LANES;
    const v_f32 old = v_load(lane_max);
    const v_f32 max = v_max(t_max_of_row(at, t_max_of_keys(s, next, count, scale)), old);
    /* While all scores are -inf any finite shift does: their weights are 0. */
    const v_f32 shift = v_select_lt(max, v_set1(-FLT_MAX), v_set1(0.0f), max);
    const v_f32 keep = v_exp2(v_sub(old, shift), 5);
    v_f32 sum = v_set1(0.0f), sum2 = sum;
    for (int32_t i = 0; i < count; i += 2) {
        /* Not one fused step: equal scores must differ by exactly 0. */
        const v_f32 x = v_sub(t_score(s + i * next, scale), shift);
        const v_f32 y = v_sub(t_score(s + (i + 1) * next, scale), shift);
        v_f32 a = v_exp2(x, T_EXP_DEGREE), b = v_exp2(y, T_EXP_DEGREE);
        sum = v_add(sum, a);
        sum2 = v_add(sum2, b);
        if (v_scale != NULL) {
            a = v_mul(a, t_key_lanes(at, v_scale, i));
            b = v_mul(b, t_key_lanes(at, v_scale, i + 1));
        }
#if T_PAIRS
        v_store(s + i / 2 * next, t_round_zip(a, b)); /* never ahead of what is still to be read */
#else
        v_store(s + i * next, a);
        v_store(s + (i + 1) * next, b);
#endif
    }
    v_store(lane_max, max);
    v_store(lane_sum, v_fma(v_load(lane_sum), keep, v_add(sum, sum2)));
    return keep;
}

/* All vectors of the step. job->keep gets a factor for each row. */
static void t_weigh(const kv8_attention_job *job, const t_lanes *at, const kv8_tile *tile,
                    const t_rows *rows, int32_t head, int32_t padded) {
    const kv8_attention_spec *const spec = job->spec;
    const int64_t lanes = (int64_t)head * t_lanes_per_head(job) + at->row_begin;
    const bool k_int8 = spec->k_dtype == KV8_INT8;
    const bool masked = tile->mixed || padded != tile->end - tile->begin;
    const bool plain = !k_int8 && !masked && !(job->args->logits_soft_cap > 0);
    const float *const v_scale = spec->v_dtype == KV8_INT8 ? rows->v_scale : NULL;
    const int32_t count = padded / at->fold;
    if (!plain) {
        const bool finished = t_scales_q(job) && !k_int8;
        for (int32_t v = 0; !finished && v < at->vecs; v++)
            t_finish_scores(job, at, v, count, v_load(job->lane_scale + lanes + v * V_LANES),
                            k_int8 ? rows->k_scale : NULL);
        if (masked) t_mask(job, at, tile, padded);
    }
    float keep[KV8_TILE_ROWS];
    for (int32_t v = 0; v < at->vecs; v++) {
        const int64_t lane = lanes + v * V_LANES;
        const v_f32 scale =
            plain ? v_mul(v_load(job->lane_scale + lane), v_set1(t_log2e)) : v_set1(1.0f);
        v_store(keep + v * V_LANES, t_weigh_vector(job, at, v, count, scale, v_scale,
                                                   job->lane_max + lane, job->lane_sum + lane));
    }
    for (int32_t row = 0; row < at->num_rows; row++) job->keep[row] = keep[row * at->row_step];
}
#define T_WEIGHTS(job) ((job)->s)
#endif

#ifndef T_CODES
/* The weight of key i as it enters P V. */
static inline float t_weight(const kv8_attention_job *job, const t_lanes *at, int32_t row,
                             int32_t i) {
#if T_PAIRS
    const int32_t fold = at->fold, pair = i / (2 * fold) * fold + i % fold;
    uint32_t bits;
    memcpy(&bits, T_WEIGHTS(job) + t_score_at(at, row, pair), sizeof bits);
    bits = i / fold % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
#else
    return T_WEIGHTS(job)[t_score_at(at, row, i)];
#endif
}
#endif
