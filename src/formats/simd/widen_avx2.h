/* simd/widen_avx2.h - formats_simd.h on AVX2 + F16C: 8 lanes.
 *
 * The 8-bit floats are laid over f16's fields, converted by the F16C instruction (which knows
 * subnormals, without a penalty) and scaled by the power of two between the exponent biases.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_WIDEN_AVX2_H
#define KV8_WIDEN_AVX2_H

#include <string.h>

/* --- loads: 8 codes, or the first n and zeroes --- */

static inline __m128i kv8_load8_u8(const void *codes) {
    return _mm_loadl_epi64((const __m128i *)codes);
}
static inline __m128i kv8_load8_u8_n(const void *codes, int n) {
    uint64_t lanes = 0;
    memcpy(&lanes, codes, (size_t)n);
    return _mm_cvtsi64_si128((long long)lanes);
}
static inline __m128i kv8_load8_u16(const void *codes) {
    return _mm_loadu_si128((const __m128i *)codes);
}
static inline __m128i kv8_load8_u16_n(const void *codes, int n) {
    uint16_t lanes[8] = {0};
    memcpy(lanes, codes, (size_t)n * 2);
    return _mm_loadu_si128((const __m128i *)lanes);
}

/* --- codes in a register to f32 --- */

static inline v_f32 kv8_f32x8_from_bf16(__m128i codes) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(codes), 16));
}
static inline v_f32 kv8_f32x8_from_f16(__m128i codes) {
    return _mm256_cvtph_ps(codes);
}
/* Sign extension puts the sign at bits 15..7; shifted by 7, the sign lies at 15 and the seven
 * magnitude bits below f16's top exponent bit (14), which the mask clears. */
static inline __m128i kv8_f16_fields(__m128i codes) {
    return _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7),
                         _mm_set1_epi16((short)0xbf80));
}
static inline v_f32 kv8_f32x8_from_e4m3(__m128i codes) {
    const __m128i fields = kv8_f16_fields(codes), all = _mm_set1_epi16(0x3f80);
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(fields, all), all);
    const __m128i f16 = _mm_or_si128(fields, _mm_and_si128(is_nan, _mm_set1_epi16(0x4000)));
    return _mm256_mul_ps(_mm256_cvtph_ps(f16), _mm256_set1_ps(256.0f)); /* 2^(15 - 7) */
}
static inline v_f32 kv8_f32x8_from_e4m3fnuz(__m128i codes) {
    const __m128i fields = kv8_f16_fields(codes);
    const __m128i is_nan = _mm_cmpeq_epi16(fields, _mm_set1_epi16((short)0x8000));
    const __m128i f16 = _mm_or_si128(fields, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(f16), _mm256_set1_ps(128.0f)); /* 2^(15 - 8) */
}
static inline v_f32 kv8_f32x8_from_e5m2(__m128i codes) {
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
}
static inline v_f32 kv8_f32x8_from_int8(__m128i codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
}

/* --- the words --- */

static inline v_f32 v_widen_f32(const void *codes) {
    return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)codes));
}
static inline v_f32 v_widen_f32_n(const void *codes, int n) {
    return _mm256_castsi256_ps(_mm256_maskload_epi32((const int *)codes, v_tail_mask(n)));
}

#define KV8_WIDEN(name, bits)                                          \
    static inline v_f32 v_widen_##name(const void *codes) {            \
        return kv8_f32x8_from_##name(kv8_load8_u##bits(codes));        \
    }                                                                  \
    static inline v_f32 v_widen_##name##_n(const void *codes, int n) { \
        return kv8_f32x8_from_##name(kv8_load8_u##bits##_n(codes, n)); \
    }
KV8_WIDEN(bf16, 16)
KV8_WIDEN(f16, 16)
KV8_WIDEN(e4m3, 8)
KV8_WIDEN(e4m3fnuz, 8)
KV8_WIDEN(e5m2, 8)
KV8_WIDEN(int8, 8)
#undef KV8_WIDEN

#endif
