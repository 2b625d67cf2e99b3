/* ops_avx2.c - the kernel set on AVX2 + FMA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../../base/simd/avx2.h"
#include "../../formats/formats_simd.h"
#include "../mxfp4_table.h"
#include "../ops_kernels.h"

enum { W_ROWS = 4 }; /* 4 x 3 accumulators, 3 activations, 1 weight: the 16 registers */

/* Byte lookups: of a weight only the upper two bytes are not 0, and both come from the nibble. The
 * bytes of the block are picked so that each 32-bit lane of the interleaved bytes holds the weights
 * of columns c (its lower half) and c + 8 (its upper): a shift and a mask make finished vectors of
 * columns in the order 0 2 1 3 4 6 5 7. Per 32 weights: five shuffles, three shifts, three masks
 * and four FMAs, on three ports. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    const __m256i pick = _mm256_setr_epi8(0, 4, 1, 5, 0, 4, 1, 5, 8, 12, 9, 13, 8, 12, 9, 13, 2, 6,
                                          3, 7, 2, 6, 3, 7, 10, 14, 11, 15, 10, 14, 11, 15);
    const __m256i shift = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
    const __m256i upper = _mm256_set1_epi32((int32_t)0xffff0000u);
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)block));
    const __m128i *const table = (const __m128i *)(const void *)kv8_mxfp4_bytes[scale];
    const __m256i picked = _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, pick), shift);
    const __m256i codes = _mm256_and_si256(picked, _mm256_set1_epi8(15));
    const __m256i top =
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(table)), codes);
    const __m256i next =
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(table + 1)), codes);
    const __m256i halves[2] = {_mm256_unpacklo_epi8(next, top), _mm256_unpackhi_epi8(next, top)};
    for (int h = 0; h < 2; h++) {
        out[2 * h] = _mm256_castsi256_ps(_mm256_slli_epi32(halves[h], 16));
        out[2 * h + 1] = _mm256_castsi256_ps(_mm256_and_si256(halves[h], upper));
    }
}

#define W_OWN_ORDER 1
static inline v_f32 w_to_own_order(v_f32 a) {
    return _mm256_permute_ps(a, _MM_SHUFFLE(3, 1, 2, 0));
}
static inline v_f32 w_from_own_order(v_f32 a) {
    return w_to_own_order(a); /* its own inverse */
}

/* Two rounds of pairwise adds, then the halves. */
static inline void w_reduce(const v_f32 acc[W_ROWS], float *sums) {
    const __m256 pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

static inline void w_even_odd(v_f32 a, v_f32 b, v_f32 *even, v_f32 *odd) {
    const __m256 low = _mm256_permute2f128_ps(a, b, 0x20),
                 high = _mm256_permute2f128_ps(a, b, 0x31);
    *even = _mm256_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0));
    *odd = _mm256_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
    /* a = a0..a7: low = a0-3 b0-3, high = a4-7 b4-7; each half of the results is one source. */
}

#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_avx2 = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
