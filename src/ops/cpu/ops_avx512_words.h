/* ops_avx512_words.h - what both AVX-512 rungs of ops share: the tree that adds up accumulators,
 * and gate and up apart.
 *
 * SPDX-License-Identifier: Apache-2.0 */

enum { W_ROWS = 8 }; /* 8 x 3 accumulators, 3 activations, a weight or two: of 32 registers */

static inline __m512 w_e2m1_table(uint8_t scale) {
    const __m512 e2m1 =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_mul_ps(e2m1, _mm512_set1_ps(kv8_e8m0_load(scale)));
}

/* Sums of quarters: lane quarter q of the result holds in turn a, b (even q, odd q) with half as
 * many partial sums as before. */
static inline __m512 w_fold_halves(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 1, 0)),
                         _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 2, 3, 2)));
}
static inline __m512 w_fold_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}

/* After the folds one register holds, per quarter, the four partial sums of one accumulator; two
 * such registers fold into eight sums. */
static inline void w_reduce(const v_f32 acc[W_ROWS], float *sums) {
    const __m512 low =
        w_fold_quarters(w_fold_halves(acc[0], acc[1]), w_fold_halves(acc[2], acc[3]));
    const __m512 high =
        w_fold_quarters(w_fold_halves(acc[4], acc[5]), w_fold_halves(acc[6], acc[7]));
    const __m512 pairs = _mm512_add_ps(_mm512_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)),
                                       _mm512_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
    const __m512 all = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, _MM_SHUFFLE(2, 3, 0, 1)));
    /* Quarter q: sums of q, q, 4+q, 4+q. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
}

static inline void w_even_odd(v_f32 a, v_f32 b, v_f32 *even, v_f32 *odd) {
    const __m512i evens =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    *even = _mm512_permutex2var_ps(a, evens, b);
    *odd = _mm512_permutex2var_ps(a, odds, b);
}
