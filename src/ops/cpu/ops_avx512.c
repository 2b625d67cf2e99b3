/* ops_avx512.c - the kernel set on AVX-512 F+BW+DQ+VL.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../../base/simd/avx512.h"
#include "../../formats/formats_simd.h"
#include "../mxfp4_table.h"
#include "../ops_kernels.h"

enum { W_ROWS = 8 }; /* 8 x 3 accumulators, 3 activations, a weight or two: of 32 registers */

/* Eight bytes in every 64-bit lane, shifted right by 4q in lane q: the low four bits of its lower
 * half are nibble q, of its upper half nibble 8 + q, and vpermps looks at no others. The table is
 * the sixteen values times the scale. So a vector costs one shift and one lookup, on two ports, and
 * its lanes stand 0 8 1 9 2 10 .. 7 15. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    const __m512i shift = _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28);
    const __m512 table = _mm512_castsi512_ps(_mm512_load_si512(kv8_mxfp4_bits[scale]));
    for (int j = 0; j < 2; j++) {
        int64_t eight;
        memcpy(&eight, block + 8 * j, sizeof eight);
        const __m512i nibbles = _mm512_srlv_epi64(_mm512_set1_epi64(eight), shift);
        out[j] = _mm512_permutexvar_ps(nibbles, table);
    }
}

#define W_OWN_ORDER 1
static inline v_f32 w_to_own_order(v_f32 a) {
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), a);
}
static inline v_f32 w_from_own_order(v_f32 a) {
    return _mm512_permutexvar_ps(
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), a);
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

#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_avx512 = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
