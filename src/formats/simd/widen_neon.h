/* simd/widen_neon.h - formats_simd.h on arm64 Advanced SIMD: 4 lanes; to bf16, 8.
 *
 * The 8-bit floats are laid over f16's fields, converted by the base instruction set's f16 to f32
 * and scaled by the power of two between the exponent biases.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_WIDEN_NEON_H
#define KV8_WIDEN_NEON_H

#include <string.h>

/* --- loads: 4 codes, or the first n and zeroes --- */

static inline uint8x8_t kv8_load4_u8_n(const void *codes, int n) {
    uint32_t lanes = 0;
    memcpy(&lanes, codes, (size_t)n);
    return vcreate_u8(lanes);
}
static inline uint8x8_t kv8_load4_u8(const void *codes) {
    return kv8_load4_u8_n(codes, 4);
}
static inline uint16x4_t kv8_load4_u16_n(const void *codes, int n) {
    uint64_t lanes = 0;
    memcpy(&lanes, codes, (size_t)n * 2);
    return vcreate_u16(lanes);
}
static inline uint16x4_t kv8_load4_u16(const void *codes) {
    return kv8_load4_u16_n(codes, 4);
}

/* --- codes in a register to f32 --- */

static inline v_f32 kv8_f32x4_from_bf16(uint16x4_t codes) {
    return vreinterpretq_f32_u32(vshll_n_u16(codes, 16));
}
static inline v_f32 kv8_f32x4_from_f16(uint16x4_t codes) {
    return vcvt_f32_f16(vreinterpret_f16_u16(codes));
}
/* Sign extension puts the sign at bits 15..7; shifted by 7, the sign lies at 15 and the seven
 * magnitude bits below f16's top exponent bit (14), which the mask clears. */
static inline uint16x4_t kv8_f16_fields(uint8x8_t codes) {
    const int16x4_t extended = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(codes)));
    return vand_u16(vreinterpret_u16_s16(vshl_n_s16(extended, 7)), vdup_n_u16(0xbf80));
}
static inline v_f32 kv8_f32x4_from_e4m3(uint8x8_t codes) {
    const uint16x4_t fields = kv8_f16_fields(codes), all = vdup_n_u16(0x3f80);
    const uint16x4_t is_nan = vceq_u16(vand_u16(fields, all), all);
    const uint16x4_t f16 = vorr_u16(fields, vand_u16(is_nan, vdup_n_u16(0x4000)));
    return vmulq_n_f32(kv8_f32x4_from_f16(f16), 256.0f); /* 2^(15 - 7) */
}
static inline v_f32 kv8_f32x4_from_e4m3fnuz(uint8x8_t codes) {
    const uint16x4_t fields = kv8_f16_fields(codes);
    const uint16x4_t is_nan = vceq_u16(fields, vdup_n_u16(0x8000));
    const uint16x4_t f16 = vorr_u16(fields, vand_u16(is_nan, vdup_n_u16(0x7e00)));
    return vmulq_n_f32(kv8_f32x4_from_f16(f16), 128.0f); /* 2^(15 - 8) */
}
static inline v_f32 kv8_f32x4_from_e5m2(uint8x8_t codes) {
    return kv8_f32x4_from_f16(vget_low_u16(vshll_n_u8(codes, 8)));
}
static inline v_f32 kv8_f32x4_from_int8(uint8x8_t codes) {
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(codes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}

/* --- the words --- */

static inline v_f32 v_widen_f32(const void *codes) {
    return vreinterpretq_f32_u8(vld1q_u8(codes));
}
static inline v_f32 v_widen_f32_n(const void *codes, int n) {
    uint8_t lanes[16] = {0};
    memcpy(lanes, codes, (size_t)n * 4);
    return v_widen_f32(lanes);
}

#define KV8_WIDEN(name, bits)                                          \
    static inline v_f32 v_widen_##name(const void *codes) {            \
        return kv8_f32x4_from_##name(kv8_load4_u##bits(codes));        \
    }                                                                  \
    static inline v_f32 v_widen_##name##_n(const void *codes, int n) { \
        return kv8_f32x4_from_##name(kv8_load4_u##bits##_n(codes, n)); \
    }
KV8_WIDEN(bf16, 16)
KV8_WIDEN(f16, 16)
KV8_WIDEN(e4m3, 8)
KV8_WIDEN(e4m3fnuz, 8)
KV8_WIDEN(e5m2, 8)
KV8_WIDEN(int8, 8)
#undef KV8_WIDEN

/* --- to bf16: the upper halves of f32, exact because the lower halves are zero --- */

static inline uint16x8_t kv8_upper_halves(v_f32 first, v_f32 second) {
    return vuzp2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second));
}
#define KV8_WIDEN8(name)                                                          \
    static inline uint16x8_t v_widen8_bf16_##name(const void *codes) {            \
        return kv8_upper_halves(v_widen_##name(codes),                            \
                                v_widen_##name((const uint8_t *)codes + 4));      \
    }                                                                             \
    static inline uint16x8_t v_widen8_bf16_##name##_n(const void *codes, int n) { \
        uint8_t lanes[8] = {0};                                                   \
        memcpy(lanes, codes, (size_t)n);                                          \
        return v_widen8_bf16_##name(lanes);                                       \
    }
#define KV8_FLOAT8(words, rule, name, dtype, mantissa, bias, max) KV8_WIDEN8(name)
KV8_FLOAT8_FORMATS(KV8_FLOAT8)
#undef KV8_FLOAT8
KV8_WIDEN8(int8)

static inline uint16x8_t v_widen8_bf16_bf16(const void *codes) {
    return vreinterpretq_u16_u8(vld1q_u8(codes));
}
static inline uint16x8_t v_widen8_bf16_bf16_n(const void *codes, int n) {
    uint8_t lanes[16] = {0};
    memcpy(lanes, codes, (size_t)n * 2);
    return v_widen8_bf16_bf16(lanes);
}

#endif
