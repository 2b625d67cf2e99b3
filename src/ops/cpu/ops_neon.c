/* ops_neon.c - the kernel set on arm64 Advanced SIMD.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../../base/simd/neon.h"
#include "../../formats/formats_simd.h"
#include "../e8m0_table.h"
#include "../ops_kernels.h"

enum { W_ROWS = 8 }; /* 8 x 3 accumulators, 3 activations, a weight or two: of 32 registers */

/* Twice the e2m1 values are small integers: a table lookup gives them as bytes, and half the scale
 * times the widened integer is exact. */
static inline void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    static const int8_t twice_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(twice_e2m1);
    const uint8x16_t bytes = vld1q_u8(block);
    const int8x16_t even = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
    const int8x16_t odd = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
    const int8x16_t ordered[2] = {vzip1q_s8(even, odd), vzip2q_s8(even, odd)};
    const float half_scale = 0.5f * kv8_e8m0_load(scale);
    for (int h = 0; h < 2; h++) {
        const int16x8_t low = vmovl_s8(vget_low_s8(ordered[h]));
        const int16x8_t high = vmovl_high_s8(ordered[h]);
        out[4 * h] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), half_scale);
        out[4 * h + 1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(low)), half_scale);
        out[4 * h + 2] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), half_scale);
        out[4 * h + 3] = vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(high)), half_scale);
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

#include "matmul_tmpl.h"
#include "rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_neon = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
