/* block_codec_neon.c - the block conversions on arm64 Advanced SIMD.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#if defined(__aarch64__)
#include <kv8/formats.h>

#include "simd/neon.h"

#include "../formats_simd.h"

typedef uint32x4_t v_i32, v_mask;

static inline v_i32 i_set1(uint32_t a) {
    return vdupq_n_u32(a);
}
static inline v_i32 i_and(v_i32 a, v_i32 b) {
    return vandq_u32(a, b);
}
static inline v_i32 i_or(v_i32 a, v_i32 b) {
    return vorrq_u32(a, b);
}
static inline v_i32 i_add(v_i32 a, v_i32 b) {
    return vaddq_u32(a, b);
}
static inline v_i32 i_sub(v_i32 a, v_i32 b) {
    return vsubq_u32(a, b);
}
static inline v_i32 i_min(v_i32 a, v_i32 b) {
    return vreinterpretq_u32_s32(vminq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
}
static inline v_i32 i_max(v_i32 a, v_i32 b) {
    return vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
}
#define i_srl(a, count) vshrq_n_u32(a, count)
static inline v_mask i_gt(v_i32 a, v_i32 b) {
    return vcgtq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b));
}
static inline v_i32 i_select(v_mask mask, v_i32 yes, v_i32 no) {
    return vbslq_u32(mask, yes, no);
}
static inline unsigned i_count(v_mask mask) {
    return vaddvq_u32(vshrq_n_u32(mask, 31));
}
static inline v_i32 i_bits(v_f32 a) {
    return vreinterpretq_u32_f32(a);
}
static inline v_f32 i_float(v_i32 a) {
    return vreinterpretq_f32_u32(a);
}
static inline v_i32 i_round(v_f32 a) {
    return vreinterpretq_u32_s32(vcvtnq_s32_f32(a));
}
static inline v_i32 i_f16(v_f32 a) {
    return vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
static inline void i_store_u32(void *p, v_i32 a) {
    vst1q_u8(p, vreinterpretq_u8_u32(a));
}
static inline void i_store_u16(void *p, v_i32 a) {
    vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(a)));
}
static inline void i_store_u8(void *p, v_i32 a) {
    const uint16x4_t words = vmovn_u32(a);
    const uint32_t bytes =
        vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    memcpy(p, &bytes, sizeof bytes);
}
static inline uint32_t i_reduce_max(v_i32 a) {
    return vmaxvq_u32(a);
}

/* e2m1 as f16 has an empty low byte: the high bytes come from a table of sixteen. */
static inline void e2m1x8_widen(uint8x8_t codes, float scale, float *values_out) {
    static const uint8_t high_bytes[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                           0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};
    const uint16x8_t f16 = vshll_n_u8(vqtbl1_u8(vld1q_u8(high_bytes), codes), 8);
    v_store(values_out, vmulq_n_f32(kv8_f32x4_from_f16(vget_low_u16(f16)), scale));
    v_store(values_out + 4, vmulq_n_f32(kv8_f32x4_from_f16(vget_high_u16(f16)), scale));
}
static inline void mxfp4_block_widen(const uint8_t *bytes, float scale, float *values_out) {
    const uint8x16_t packed = vld1q_u8(bytes);
    const uint8x16_t even = vandq_u8(packed, vdupq_n_u8(15)), odd = vshrq_n_u8(packed, 4);
    const uint8x16_t codes[2] = {vzip1q_u8(even, odd), vzip2q_u8(even, odd)};
    for (int half = 0; half < 2; half++) {
        e2m1x8_widen(vget_low_u8(codes[half]), scale, values_out + 16 * half);
        e2m1x8_widen(vget_high_u8(codes[half]), scale, values_out + 16 * half + 8);
    }
}

#include "block_codec_tmpl.h"

KV8_FORMATS_KERNELS_TABLE(neon);
#endif
