/* ceiling_neon_bf16.c - the rate of bfdot: pairs of bf16 products summed in f32.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <arm_neon.h>
#include <stddef.h>

#include "ceiling.h"

/* As kv8_ceiling_fma; 12 * 8 products per round. */
float kv8_ceiling_bf16__neon_bf16(size_t rounds) {
    enum { CHAINS = 12 };
    float32x4_t sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) sum[c] = vdupq_n_f32((float)c);
    const bfloat16x8_t a = vreinterpretq_bf16_u16(vdupq_n_u16(0x3c00)); /* 2^-7 */
    for (size_t i = 0; i < rounds; i++) {
        for (int c = 0; c < CHAINS; c++) sum[c] = vbfdotq_f32(sum[c], a, a);
    }
    for (int c = 1; c < CHAINS; c++) sum[0] = vaddq_f32(sum[0], sum[c]);
    return vaddvq_f32(sum[0]);
}
