/* ops_neon.c - the kernel set on arm64 Advanced SIMD.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../../base/simd/neon.h"
#include "../../formats/formats_simd.h"
#include "../mxfp4_table.h"
#include "../ops_kernels.h"

enum { W_ROWS = 8 }; /* 8 x 3 accumulators, 3 activations, a weight or two: of 32 registers */

/* A weight has no bits below its upper sixteen, whatever the scale: two lookups give those bytes,
 * from the planes into which a load by fours takes the table apart. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    const uint8x16x4_t table = vld4q_u8((const uint8_t *)kv8_mxfp4_bits[scale]);
    const uint8x16_t bytes = vld1q_u8(block);
    const uint8x16_t even = vandq_u8(bytes, vdupq_n_u8(15)), odd = vshrq_n_u8(bytes, 4);
    const uint8x16_t order[2] = {vzip1q_u8(even, odd), vzip2q_u8(even, odd)};
    for (int h = 0; h < 2; h++) {
        const uint8x16_t low = vqtbl1q_u8(table.val[2], order[h]);
        const uint8x16_t high = vqtbl1q_u8(table.val[3], order[h]);
        const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(low, high));
        const uint16x8_t b = vreinterpretq_u16_u8(vzip2q_u8(low, high));
        out[4 * h] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16));
        out[4 * h + 1] = vreinterpretq_f32_u32(vshll_high_n_u16(a, 16));
        out[4 * h + 2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16));
        out[4 * h + 3] = vreinterpretq_f32_u32(vshll_high_n_u16(b, 16));
    }
}

static inline void w_reduce(const v_f32 acc[W_ROWS], float *sums) {
    for (int r = 0; r < W_ROWS; r += 4) {
        const float32x4_t pairs_low = vpaddq_f32(acc[r], acc[r + 1]);
        const float32x4_t pairs_high = vpaddq_f32(acc[r + 2], acc[r + 3]);
        vst1q_f32(sums + r, vpaddq_f32(pairs_low, pairs_high));
    }
}

static inline void w_even_odd(v_f32 a, v_f32 b, v_f32 *even, v_f32 *odd) {
    *even = vuzp1q_f32(a, b);
    *odd = vuzp2q_f32(a, b);
}

#define W_OWN_ORDER         0
#define w_to_own_order(x)   (x)
#define w_from_own_order(x) (x)
#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_neon = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
