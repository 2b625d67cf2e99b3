/* ops_avx512_bf16.c - the kernel set where AVX512_VBMI takes nibbles apart in one instruction. The
 * bf16 products of this rung are not used: activations stay f32.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../../base/simd/avx512.h"
#include "../../formats/formats_simd.h"
#include "../e8m0_table.h"
#include "../ops_kernels.h"
#include "ops_avx512_words.h"

/* vpmultishiftqb: byte k of each 64-bit lane becomes eight bits of that lane from any bit on. Lane
 * pair q wants nibbles 2q and 2q+1 in its two lowest bytes of four: bits from 8q and 8q+4 on; the
 * other bytes are ignored by vpermps, as are bits 4..7. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    const __m512i from_bit =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    const __m512 table = w_e2m1_table(scale);
    for (int j = 0; j < 2; j++) {
        int64_t eight;
        memcpy(&eight, block + 8 * j, sizeof eight);
        const __m512i nibbles = _mm512_multishift_epi64_epi8(from_bit, _mm512_set1_epi64(eight));
        out[j] = _mm512_permutexvar_ps(nibbles, table);
    }
}

#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_avx512_bf16 = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
