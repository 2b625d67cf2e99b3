/* scalar_codec.c - the public conversions of one number; the meaning is in scalar_codec.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "scalar_codec.h"

#include <string.h>

#include "formats_impl.h"

#define FLOAT8(words, rule, name, dtype, mantissa, bias, max) \
    float kv8_##name##_to_f32(kv8_##name code) {              \
        return kv8_##name##_decode(code.bits);                \
    }                                                         \
    kv8_##name kv8_##name##_from_f32(float value) {           \
        return (kv8_##name){kv8_##name##_encode(value)};      \
    }
KV8_FLOAT8_FORMATS(FLOAT8)

float kv8_e8m0_to_f32(kv8_e8m0 code) {
    return kv8_e8m0_decode(code.bits);
}
float kv8_e2m1_to_f32(kv8_e2m1 code) {
    return kv8_e2m1_decode(code.bits);
}
float kv8_bf16_to_f32(kv8_bf16 code) {
    return kv8_bf16_decode(code.bits);
}
float kv8_f16_to_f32(kv8_f16 code) {
    return kv8_f16_decode(code.bits);
}

kv8_e2m1 kv8_e2m1_from_f32(float value) {
    return (kv8_e2m1){kv8_e2m1_encode(value)};
}
kv8_bf16 kv8_bf16_from_f32(float value) {
    return (kv8_bf16){kv8_bf16_encode(value, KV8_F32_INF)};
}
kv8_f16 kv8_f16_from_f32(float value) {
    return (kv8_f16){kv8_f16_encode(value, 65536.0f)};
}

/* Sixteen at a time without branches, which compilers make vectors of. */
void kv8_bf16_from_f32_row(const float *values, size_t n, kv8_bf16 *out) {
    enum { STEP = 16 };
    size_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        uint32_t bits[STEP];
        uint16_t codes[STEP];
        memcpy(bits, values + i, sizeof bits);
        for (int j = 0; j < STEP; j++) {
            const uint32_t rounded = bits[j] + 0x7fffu + ((bits[j] >> 16) & 1u);
            const int32_t over = (int32_t)KV8_F32_INF - (int32_t)(bits[j] & KV8_F32_ABS);
            const uint32_t is_nan = (uint32_t)(over >> 31);
            codes[j] = (uint16_t)(((rounded & ~is_nan) | ((bits[j] | 0x400000u) & is_nan)) >> 16);
        }
        memcpy(out + i, codes, sizeof codes);
    }
    for (; i < n; i++) out[i] = kv8_bf16_from_f32(values[i]);
}

kv8_e8m0 kv8_e8m0_from_f32_up(float value) {
    const uint32_t magnitude = kv8_f32_bits(value) & KV8_F32_ABS;
    if (magnitude >= KV8_F32_INF) return (kv8_e8m0){0xffu};
    if (magnitude <= 0x400000u) return (kv8_e8m0){0}; /* up to 2^-127 */
    /* Any mantissa bit carries into the exponent; 2^-126 and what lies below it is code 1. */
    const uint32_t code = (magnitude + 0x7fffffu) >> 23;
    return (kv8_e8m0){(uint8_t)(code > 0xfeu ? 0xfeu : code)};
}
