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

/* Lane i of vector j takes nibble 8j + i of the block: four bytes broadcast, shifted right by 4i.
 * vpermps looks at the low three bits only; the nibble moved to the top brings its sign, and under
 * it three bits that the table holds already, so that the xor leaves none. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    const __m256i to_index = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i index_at_top =
        _mm256_setr_epi32(0, 1 << 28, 2 << 28, 3 << 28, 4 << 28, 5 << 28, 6 << 28, 7 << 28);
    const __m256i values = _mm256_load_si256((const __m256i *)(const void *)kv8_mxfp4_bits[scale]);
    const __m256 table = _mm256_castsi256_ps(_mm256_xor_si256(values, index_at_top));
    for (int j = 0; j < KV8_MXFP4_BLOCK / 8; j++) {
        int32_t four;
        memcpy(&four, block + 4 * j, sizeof four);
        const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(four), to_index);
        const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        out[j] = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, index), top);
    }
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

#define W_OWN_ORDER         0
#define w_to_own_order(x)   (x)
#define w_from_own_order(x) (x)
#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_avx2 = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
