/* scalar_codec.h - what each bit pattern means, one number at a time: the definition that every
 * vector rung is held to. Private to formats and static inline, so that files of every rung, and of
 * CUDA, may include it.
 *
 * Decoders are exact. Encoders take the largest magnitude they may give as an argument, so that
 * one function serves the saturating and the IEEE (overflow to infinity) rule.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SCALAR_CODEC_H
#define KV8_SCALAR_CODEC_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* the same definition on the GPU: see cuda/codec.cuh */
#define KV8_CODEC static __device__ __forceinline__
#else
#define KV8_CODEC static inline
#endif

KV8_CODEC uint32_t kv8_f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
KV8_CODEC float kv8_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define KV8_F32_ABS   0x7fffffffu /* all but the sign */
#define KV8_F32_INF   0x7f800000u /* larger magnitudes are NaN */
#define KV8_F32_QUIET 0x400000u   /* top mantissa bit: a quiet NaN */
#define KV8_BF16_MAX  0x7f7f0000u /* 255 * 2^120 as f32 bits */

/* --- decode --- */

/* NaN becomes quiet and keeps sign and payload, as the processors' own instructions do. */
KV8_CODEC float kv8_f16_decode(uint16_t code) {
    const uint32_t sign = (uint32_t)(code & 0x8000u) << 16, magnitude = code & 0x7fffu;
    if (magnitude > 0x7c00u)
        return kv8_f32_from_bits(sign | KV8_F32_INF | KV8_F32_QUIET | (magnitude & 0x3ffu) << 13);
    if (magnitude == 0x7c00u) return kv8_f32_from_bits(sign | KV8_F32_INF);
    if (magnitude < 0x400u) { /* subnormal: counts 2^-24 */
        const float value = (float)magnitude * 0x1p-24f;
        return kv8_f32_from_bits(sign | kv8_f32_bits(value));
    }
    return kv8_f32_from_bits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

KV8_CODEC float kv8_bf16_decode(uint16_t code) {
    return kv8_f32_from_bits((uint32_t)code << 16);
}

/* The three below lay the code's fields over f16's: the exponent biases differ by 8, 7 and 0. NaN
 * keeps the code's sign and mantissa. */
KV8_CODEC float kv8_e4m3_decode(uint8_t code) {
    if ((code & 0x7fu) == 0x7fu)
        return kv8_f32_from_bits((uint32_t)(code & 0x80u) << 24 | 0x7ff00000u);
    return kv8_f16_decode((uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7)) * 256.0f;
}
KV8_CODEC float kv8_e4m3fnuz_decode(uint8_t code) {
    if (code == 0x80u) return kv8_f32_from_bits(0xffc00000u);
    return kv8_f16_decode((uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7)) * 128.0f;
}
KV8_CODEC float kv8_e5m2_decode(uint8_t code) {
    return kv8_f16_decode((uint16_t)(code << 8));
}

KV8_CODEC float kv8_e2m1_decode(uint8_t code) {
    static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    const float magnitude = magnitudes[code & 7u];
    return (code & 8u) != 0 ? -magnitude : magnitude;
}

/* 2^-127 is an f32 subnormal: half of the smallest normal. */
KV8_CODEC float kv8_e8m0_decode(uint8_t code) {
    if (code == 0xffu) return kv8_f32_from_bits(KV8_F32_INF | KV8_F32_QUIET);
    return kv8_f32_from_bits(code == 0 ? 0x400000u : (uint32_t)code << 23);
}

/* --- encode --- */

/* A magnitude (f32 bits without sign, not NaN) as exponent and `mantissa` bits of a format whose
 * exponent bias is `bias`: min(magnitude, max), rounded to nearest, ties to even. */
KV8_CODEC uint32_t kv8_magnitude_encode(uint32_t magnitude, uint32_t max, uint32_t mantissa,
                                        uint32_t bias) {
    const uint32_t shift = 23u - mantissa, rebias = 127u - bias;
    if (magnitude > max) magnitude = max;
    if (magnitude < (rebias + 1u) << 23) {
        /* Subnormal: multiples of 2^(1 - bias - mantissa). Adding 2^23 of them leaves exactly
         * their count in the sum's mantissa, rounded as every f32 addition is. */
        const uint32_t magic = (rebias + 1u + shift) << 23;
        return kv8_f32_bits(kv8_f32_from_bits(magnitude) + kv8_f32_from_bits(magic)) - magic;
    }
    const uint32_t odd = (magnitude >> shift) & 1u;
    return ((magnitude + (1u << (shift - 1u)) - 1u + odd) >> shift) - (rebias << mantissa);
}

KV8_CODEC uint8_t kv8_e4m3_encode(float value) {
    const uint32_t bits = kv8_f32_bits(value), magnitude = bits & KV8_F32_ABS;
    const uint32_t sign = bits >> 31 << 7;
    if (magnitude > KV8_F32_INF) return (uint8_t)(sign | 0x7fu);
    return (uint8_t)(sign | kv8_magnitude_encode(magnitude, kv8_f32_bits(448.0f), 3, 7));
}

/* Zero has one code: what rounds to it loses its sign. */
KV8_CODEC uint8_t kv8_e4m3fnuz_encode(float value) {
    const uint32_t bits = kv8_f32_bits(value), magnitude = bits & KV8_F32_ABS;
    if (magnitude > KV8_F32_INF) return 0x80u;
    const uint32_t code = kv8_magnitude_encode(magnitude, kv8_f32_bits(240.0f), 3, 8);
    return (uint8_t)(code == 0 ? 0 : bits >> 31 << 7 | code);
}

KV8_CODEC uint8_t kv8_e5m2_encode(float value) {
    const uint32_t bits = kv8_f32_bits(value), magnitude = bits & KV8_F32_ABS;
    const uint32_t sign = bits >> 31 << 7;
    if (magnitude > KV8_F32_INF) return (uint8_t)(sign | 0x7fu);
    return (uint8_t)(sign | kv8_magnitude_encode(magnitude, kv8_f32_bits(57344.0f), 2, 15));
}

KV8_CODEC uint8_t kv8_e2m1_encode(float value) {
    const uint32_t bits = kv8_f32_bits(value), magnitude = bits & KV8_F32_ABS;
    if (magnitude > KV8_F32_INF) return 0;
    return (uint8_t)(bits >> 31 << 3 | kv8_magnitude_encode(magnitude, kv8_f32_bits(6.0f), 1, 1));
}

/* max = 65504 saturates; max = 65536, where infinity's code lies, gives IEEE overflow. */
KV8_CODEC uint16_t kv8_f16_encode(float value, float max) {
    const uint32_t bits = kv8_f32_bits(value), magnitude = bits & KV8_F32_ABS;
    const uint32_t sign = bits >> 31 << 15;
    if (magnitude > KV8_F32_INF) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    return (uint16_t)(sign | kv8_magnitude_encode(magnitude, kv8_f32_bits(max), 10, 15));
}

/* max = KV8_BF16_MAX saturates, KV8_F32_INF gives IEEE overflow. */
KV8_CODEC uint16_t kv8_bf16_encode(float value, uint32_t max) {
    const uint32_t bits = kv8_f32_bits(value), sign = bits >> 31 << 15;
    uint32_t magnitude = bits & KV8_F32_ABS;
    if (magnitude > KV8_F32_INF) return (uint16_t)(bits >> 16 | 0x40u);
    if (magnitude > max) magnitude = max;
    return (uint16_t)(sign | (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16);
}

#endif
