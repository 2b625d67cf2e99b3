/* scores_tmpl.h - scores as they lie in lanes: scale, cap, mask, the maximum of a row.
 *
 * Part of attention_tmpl.h and of the AMX kernels. A vector holds one score of each of its rows,
 * or, when the rows are few, `fold` keys of each row: then lane row * row_step + f * key_step of
 * vector i is key i * fold + f. Nothing is summed across lanes here but the maximum of a row's fold
 * lanes. Maxima are kept in log2 units.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* How the rows of one step lie in vectors. */
typedef struct t_lanes {
    int32_t row_begin, num_rows; /* within the head's rows of the item */
    int32_t fold, shift, vecs;   /* fold = 1 << shift; vecs is 1 when it is above 1 */
    int32_t row_step, key_step;  /* in lanes */
    /* Sums of a row's weights, of every sums-th key each: in its fold lanes or, where an item has
     * more rows than fold, in so many vectors. */
    int32_t sums;
    int32_t num_quartered; /* units of Q that a rung lays out in its own order */
} t_lanes;

/* Rows from row_begin on: at most two vectors. */
static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin);

/* Lanes of sums that the rows of one head take, and the step's first. */
static inline int32_t t_lanes_per_head(const kv8_attention_job *job, const t_lanes *at) {
    const size_t rows = kv8_round_up((size_t)job->item->num_rows, (size_t)(V_LANES / at->fold));
    return (int32_t)rows * at->sums;
}
static inline int64_t t_first_lane(const kv8_attention_job *job, const t_lanes *at, int32_t head) {
    return (int64_t)head * t_lanes_per_head(job, at) + at->row_begin * at->sums;
}

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

/* Vector `vec` of the scores: times scale, int8 K's row scales (or NULL), capped, in log2 units.
 * Without a cap, factors in the order in which tiles without a mask have theirs. */
static void t_finish_scores(const kv8_attention_job *job, const t_lanes *at, int32_t vec,
                            int32_t count, v_f32 scale, const float *k_scale) {
    const float cap = job->args->logits_soft_cap;
    const bool scaled = t_scales_q(job);
    for (int32_t i = 0; i < count; i++) {
        float *const s = job->s + ((int64_t)i * at->vecs + vec) * V_LANES;
        v_f32 x = v_load(s);
        if (!scaled) x = v_mul(x, cap > 0 ? scale : v_mul(scale, v_set1(t_log2e)));
        if (k_scale != NULL) x = v_mul(x, t_key_lanes(at, k_scale, i));
        if (cap > 0) x = v_mul(v_mul(v_set1(cap), t_tanh(v_div(x, v_set1(cap)))), v_set1(t_log2e));
        v_store(s, x);
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
    uint64_t seen = 0; /* by all heads of a query row */
    for (int32_t row = 0; row < at->num_rows; row++) {
        const int32_t of_item = at->row_begin + row;
        if (row == 0 || (job->item->row_begin + of_item) % job->group_size == 0)
            seen = kv8_job_seen_keys(job, of_item, tile->begin, tile->end);
        for (uint64_t left = ~seen & kv8_first_bits(n); left != 0; left &= left - 1)
            job->s[t_score_at(at, row, __builtin_ctzll(left))] = -INFINITY;
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
