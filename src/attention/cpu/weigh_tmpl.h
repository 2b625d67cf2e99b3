/* weigh_tmpl.h - scores to weights in place: running maximum, exp, sum.
 *
 * Part of attention_tmpl.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */

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
    const int64_t lanes = t_first_lane(job, at, head);
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
