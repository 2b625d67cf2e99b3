/* simd/widen_scalar.h - formats_simd.h at width 1.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_WIDEN_SCALAR_H
#define KV8_WIDEN_SCALAR_H

static inline float kv8_f32_decode(uint32_t code) {
    return kv8_f32_from_bits(code);
}
static inline float kv8_int8_decode(int8_t code) {
    return (float)code;
}

#define KV8_WIDEN(name, type)                                          \
    static inline v_f32 v_widen_##name(const void *codes) {            \
        type code;                                                     \
        memcpy(&code, codes, sizeof code);                             \
        return kv8_##name##_decode(code);                              \
    }                                                                  \
    static inline v_f32 v_widen_##name##_n(const void *codes, int n) { \
        return n > 0 ? v_widen_##name(codes) : 0.0f;                   \
    }
KV8_WIDEN(f32, uint32_t)
KV8_WIDEN(bf16, uint16_t)
KV8_WIDEN(f16, uint16_t)
#define KV8_FLOAT8(words, rule, name, dtype, mantissa, bias, max) KV8_WIDEN(name, uint8_t)
KV8_FLOAT8_FORMATS(KV8_FLOAT8)
#undef KV8_FLOAT8
KV8_WIDEN(int8, int8_t)
#undef KV8_WIDEN

#endif
