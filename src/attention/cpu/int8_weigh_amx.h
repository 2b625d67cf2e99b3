/* int8_weigh_amx.h - attention_int8_amx.c's softmax: scores joined from the sums of Q's limbs,
 * their weights, the maxima and sums that move on, and P cut into limbs.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* --- softmax --- */

/* What the weights of a lane's keys of one tile may add up to before the maximum moves on: as in
 * the kernel in bf16 math. */
static const float t_most = 0x1p40f;

static inline float t_weight(const kv8_attention_job *job, const t_lanes *at, int32_t row,
                             int32_t i) {
    return t_weights(job)[t_score_at(at, row, i)];
}

/* Vector i of the scores. */
V_INLINE v_f32 t_join(const t_joining *j, const int32_t *sums, int32_t i, const bool fold_2) {
    __m512i x[T_Q_LIMBS];
    if (fold_2) { /* two keys' first and second limbs, and both their third */
        const __m512i a = _mm512_loadu_si512(sums + 2 * i * V_LANES);
        const __m512i b = _mm512_loadu_si512(sums + (2 * i + 1) * V_LANES);
        x[0] = _mm512_shuffle_i64x2(a, b, 0x44);
        x[1] = _mm512_shuffle_i64x2(a, b, 0xee);
        x[2] = _mm512_loadu_si512(sums + T_SECOND_SUMS + i * V_LANES);
    } else {
        const int32_t *const at = sums + i * T_Q_LIMBS * V_LANES;
        const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + V_LANES);
        const __m512i c = _mm512_loadu_si512(at + 2 * V_LANES);
        V_UNROLL
        for (int l = 0; l < T_Q_LIMBS; l++)
            x[l] = _mm512_mask_permutexvar_epi32(_mm512_permutex2var_epi32(a, j->from[l], b),
                                                 j->third[l], j->from[l], c);
    }
    const __m512i high =
        _mm512_add_epi32(_mm512_shuffle_epi8(x[0], j->by_16), _mm512_shuffle_epi8(x[1], j->by_8));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(high, x[2]));
}

/* One head's rows: where their limbs or finished scores are, what these are multiplied with, and
 * int8's row scales; of `fold` of them each lane takes its own. */
typedef struct t_pass {
    const int32_t *limbs; /* NULL: the scores are finished */
    const float *s;
    float *w;
    int32_t count, fold;
    const uint8_t *const *ahead; /* what to ask for meanwhile, or NULL */
    int32_t ahead_bytes;
    v_f32 scale;
    const float *k_scale, *v_scale;
    __m512i from;
    const t_joining *joining;
} t_pass;

V_INLINE v_f32 t_pass_scale(const t_pass *p, const float *per_key, int32_t i, const bool fold_2) {
    if (fold_2)
        return _mm512_mask_broadcastss_ps(v_set1(per_key[2 * i]), 0xff00,
                                          _mm_load_ss(per_key + 2 * i + 1));
    return _mm512_permutexvar_ps(p->from, v_load_n(per_key + i * p->fold, p->fold));
}

V_INLINE v_f32 t_pass_score(const t_pass *p, int32_t i, const bool plain, const bool fold_2) {
    if (!plain) return v_load(p->s + i * V_LANES);
    const v_f32 x = t_join(p->joining, p->limbs, i, fold_2);
    return v_mul(x, v_mul(p->scale, t_pass_scale(p, p->k_scale, i, fold_2)));
}

/* The sums of the lanes' weights w = 2^(scaled scores - shift), which are left times V's row scale,
 * and the largest magnitude of what is left. */
typedef struct t_weighed {
    v_f32 sum, top;
} t_weighed;

V_INLINE t_weighed t_weigh_pass(const t_pass *pass, v_f32 shift, const bool plain,
                                const bool fold_2, const int32_t ask_bytes) {
    const t_pass p = *pass;
    const int32_t asks = p.ahead == NULL ? 0 : fold_2 ? 5 : 5 * p.fold / 2;
    v_f32 sum[2] = {v_set1(0.0f), v_set1(0.0f)}, top[2] = {v_set1(0.0f), v_set1(0.0f)};
    for (int32_t i = 0; i < p.count; i += 2) {
        if (i % 8 == 0) t_keep_awake();
        V_UNROLL
        for (int j = 0; j < 2; j++) {
            /* Not fused with the product: equal scores must differ by exactly 0. */
            const v_f32 x = v_sub(t_pass_score(&p, i + j, plain, fold_2), shift);
            const v_f32 weight = v_exp2(x, T_EXP_DEGREE);
            const v_f32 w = v_mul(weight, t_pass_scale(&p, p.v_scale, i + j, fold_2));
            sum[j] = v_add(sum[j], weight);
            top[j] = v_max(_mm512_abs_ps(w), top[j]);
            v_store(p.w + (i + j) * V_LANES, w);
        }
        for (int32_t j = 0; j < asks; j++) kv8_ask_row(p.ahead[i / 2 * asks + j], ask_bytes);
    }
    return (t_weighed){v_add(sum[0], sum[1]), v_max(top[0], top[1])};
}
static V_NOINLINE t_weighed t_weigh_pass_of(const t_pass *pass, v_f32 shift) {
    const int32_t bytes = pass->ahead_bytes;
    if (pass->limbs == NULL) return t_weigh_pass(pass, shift, false, false, bytes);
    if (pass->fold == 2 && bytes == 64) return t_weigh_pass(pass, shift, true, true, 64);
    if (pass->fold == 2) return t_weigh_pass(pass, shift, true, true, bytes);
    return t_weigh_pass(pass, shift, true, false, bytes);
}

/* The rows' older sums times keep[]. */
static void t_rescale(const kv8_attention_job *job, const t_lanes *at, float *o) {
    for (int32_t row = 0; row < at->num_rows; row++) {
        float *const sums = o + (int64_t)row * job->v_row;
        for (int32_t d = 0; d < job->v_row; d += V_LANES)
            v_store(sums + d, v_mul(v_set1(job->keep[row]), v_load(sums + d)));
    }
}

/* The maxima and sums of the head's rows, and what is in o, move on. Returns the largest magnitude
 * of each lane's weights. A NaN score leaves the maximum alone and makes the sum NaN, as a score
 * of +inf does. */
static v_f32 t_weigh_rows(const kv8_attention_job *job, t_pass *pass, const t_lanes *at,
                          int64_t lane, float *o, t_queue *queue) {
    float *const lane_max = job->lane_max + lane, *const lane_sum = job->lane_sum + lane;
    const v_f32 old = v_load(lane_max), old_sum = v_load(lane_sum), one = v_set1(1.0f);
    __mmask16 over = _mm512_cmp_ps_mask(old, v_set1(-FLT_MAX), _CMP_LT_OQ);
    t_weighed now = {one, one};
    if (over != 0xffff) { /* some row has a maximum */
        now = t_weigh_pass_of(pass, t_finite(old));
        /* A sum that is NaN stays so, whatever scores of +inf would add. */
        const __mmask16 numbers = _mm512_cmp_ps_mask(old_sum, old_sum, _CMP_ORD_Q);
        over |= _mm512_mask_cmp_ps_mask(numbers, now.sum, v_set1(t_most), _CMP_GT_OQ);
        if (over == 0) {
            v_store(lane_sum, v_add(old_sum, now.sum));
            return now.top;
        }
        pass->ahead = NULL;
    }
    v_f32 top = v_set1(-INFINITY);
    for (int32_t i = 0; i < pass->count; i++)
        top = v_max(t_pass_score(pass, i, pass->limbs != NULL, pass->fold == 2), top);
    top = v_max(t_max_of_row(at, top), old);
    /* Only rows that are over move on: no row's bits may depend on its neighbours. */
    const v_f32 moved = t_max_of_row(at, _mm512_maskz_mov_ps(over, one));
    const v_f32 max = v_select_lt(moved, one, old, top), shift = t_finite(max);
    const v_f32 factor = v_select_lt(moved, one, one, v_exp2(v_sub(old, shift), 5));
    now = t_weigh_pass_of(pass, shift);
    const v_f32 sum = v_fma(old_sum, factor, now.sum);
    v_store(lane_max, t_kept_max(max, sum));
    v_store(lane_sum, sum);
    v_store(job->keep, factor);
    t_settle(job, queue); /* the head before may be this one, a tile ago */
    t_rescale(job, at, o);
    return now.top;
}

/* What is added to a weight so that its lowest 16 bits are its number of units, and 128 more. */
static v_f32 t_rounder(const t_lanes *at, v_f32 top, float *unit) {
    const __m512i lowest = _mm512_set1_epi32(15), highest = _mm512_set1_epi32(230);
    /* 1.00396: as two signed bytes, 127 first, 16 bits end at 32639. */
    const v_f32 size = v_mul(t_max_of_row(at, top), v_set1(1.00396f));
    __m512i e = _mm512_srli_epi32(_mm512_castps_si512(size), 23);
    e = _mm512_max_epi32(_mm512_min_epi32(e, highest), lowest);
    const v_f32 one =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(14)), 23));
    v_store(unit, one);
    return v_mul(one, v_set1(12582912.0f + 128.0f)); /* 1.5 * 2^23 */
}

/* Four vectors of weights to one of their high and one of their low bytes, as t_order_units says;
 * rows of limbs of P from them. fold is a constant. */
V_INLINE void t_pack_of(const float *w, v_f32 rounder, float *p, const int fold) {
    const int fours = T_SIDE / fold, columns = T_SIDE / fold;
    const __m512i byte = _mm512_set4_epi32(0x0f0e0d0c, 0x0b0a0908, 0x07060504, 0x03020100);
    const __m512i up_2 = _mm512_sub_epi8(byte, _mm512_set1_epi8(2));
    const __m512i up_1 = _mm512_sub_epi8(byte, _mm512_set1_epi8(1));
    const __m512i down_1 = _mm512_add_epi8(byte, _mm512_set1_epi8(1));
    v_f32 block[T_SIDE];
    V_UNROLL
    for (int i = 0; i < T_SIDE; i++) block[i] = v_set1(0.0f);
    V_UNROLL
    for (int i = 0; i < fours; i++) {
        __m512i x[4];
        V_UNROLL
        for (int j = 0; j < 4; j++)
            x[j] = _mm512_castps_si512(v_add(v_load(w + (4 * i + j) * V_LANES), rounder));
        const __m512i a = _mm512_mask_shuffle_epi8(x[0], 0xcccccccccccccccc, x[1], up_2);
        const __m512i b = _mm512_mask_shuffle_epi8(x[2], 0xcccccccccccccccc, x[3], up_2);
        const __m512i high = _mm512_mask_shuffle_epi8(b, 0x5555555555555555, a, down_1);
        const __m512i low = _mm512_mask_shuffle_epi8(a, 0xaaaaaaaaaaaaaaaa, b, up_1);
        block[i] = _mm512_castsi512_ps(high);
        block[fours + i] = _mm512_castsi512_ps(_mm512_xor_si512(low, _mm512_set1_epi8((char)0x80)));
    }
    v_transpose(block);
    float *const p_low = p + columns * T_SIDE;
    V_UNROLL
    for (int lane = 0; fold == 2 && lane < columns; lane++) {
        const v_f32 x = block[lane], y = block[columns + lane];
        v_store(p + lane * T_SIDE, _mm512_shuffle_f32x4(x, y, 0x44));
        v_store(p_low + lane * T_SIDE, _mm512_shuffle_f32x4(x, y, 0xee));
    }
    V_UNROLL
    for (int lane = 0; fold > 2 && lane < T_SIDE; lane++) {
        const int row = lane % columns, at = lane / columns * fours;
        const __mmask16 some = (__mmask16)((1u << fours) - 1);
        _mm512_mask_storeu_ps(p + row * T_SIDE + at, some, block[lane]);
        _mm512_mask_storeu_ps(p_low + row * T_SIDE + at - fours, (__mmask16)(some << fours),
                              block[lane]);
    }
}
static V_NOINLINE void t_pack(const kv8_attention_job *job, const t_lanes *at, v_f32 rounder) {
    switch (at->fold) {
        case 2: t_pack_of(t_weights(job), rounder, job->p, 2); break;
        case 4: t_pack_of(t_weights(job), rounder, job->p, 4); break;
        case 8: t_pack_of(t_weights(job), rounder, job->p, 8); break;
        default: t_pack_of(t_weights(job), rounder, job->p, 16); break;
    }
}
