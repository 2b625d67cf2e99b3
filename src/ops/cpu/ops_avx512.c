/* ops_avx512.c - the kernel set on AVX-512 F+BW+DQ+VL.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../../base/simd/avx512.h"
#include "../../formats/formats_simd.h"
#include "../e8m0_table.h"
#include "../ops_kernels.h"
#include "ops_avx512_words.h"

/* Lane i of vector j takes nibble 16j + i of the block: its four bytes copied to the lane, shifted
 * right by 4(i % 8). vpermps looks at the low four bits only. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i low = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i high = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m512 table = w_e2m1_table(scale);
    const __m512i bytes =
        _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)block));
    out[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(low, bytes), shift),
                                   table);
    out[1] = _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(high, bytes), shift),
                                   table);
}

#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_avx512 = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
