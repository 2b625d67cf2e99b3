/* attention_neon_bf16.c - the attention kernel in bf16 math on arm64's BFDOT.
 *
 * bfdot adds two products to each f32 lane. Q, K and V enter exactly; P is rounded to bf16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "simd/neon.h"

#define T_NAME   kv8_attention_bf16_any_dany_pany__neon_bf16
#define T_PAIRS  1
#define T_KEYS   16
#define T_KEYS_2 8
#define T_ROWS   6
#define T_VECS   4

#define T_PAIRS_OF(D, codes)      vreinterpretq_f32_u16(v_widen8_bf16_##D(codes))
#define T_PAIRS_OF_N(D, codes, n) vreinterpretq_f32_u16(v_widen8_bf16_##D##_n(codes, n))

static inline v_f32 t_dot(v_f32 a, v_f32 b, v_f32 sum) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}
static inline v_f32 t_round_zip(v_f32 a, v_f32 b) {
    const uint16x8_t both = vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b));
    return vreinterpretq_f32_u16(vzip1q_u16(both, vextq_u16(both, both, 4)));
}
static inline v_f32 t_zip_lo(v_f32 a, v_f32 b) {
    return vreinterpretq_f32_u16(vzip1q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
}
static inline v_f32 t_zip_hi(v_f32 a, v_f32 b) {
    return vreinterpretq_f32_u16(vzip2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
}
#include "attention_tmpl.h"
