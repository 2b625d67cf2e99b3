/* simd/widen_avx512.h - formats_simd.h on AVX-512 F+BW+DQ+VL: 16 lanes, the same way as
 * widen_avx2.h, with masked loads.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_WIDEN_AVX512_H
#define KV8_WIDEN_AVX512_H

static inline __m128i kv8_load16_u8(const void *codes) {
    return _mm_loadu_si128((const __m128i *)codes);
}
static inline __m128i kv8_load16_u8_n(const void *codes, int n) {
    return _mm_maskz_loadu_epi8(v_tail_mask(n), codes);
}
static inline __m256i kv8_load16_u16(const void *codes) {
    return _mm256_loadu_si256((const __m256i *)codes);
}
static inline __m256i kv8_load16_u16_n(const void *codes, int n) {
    return _mm256_maskz_loadu_epi16(v_tail_mask(n), codes);
}

static inline v_f32 kv8_f32x16_from_bf16(__m256i codes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
}
static inline v_f32 kv8_f32x16_from_f16(__m256i codes) {
    return _mm512_cvtph_ps(codes);
}
/* f16's sign and the seven magnitude bits below f16's top exponent bit. */
static inline __m256i kv8_f16_fields(__m128i codes) {
    return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                            _mm256_set1_epi16((short)0xbf80));
}
static inline v_f32 kv8_f32x16_from_e4m3(__m128i codes) {
    const __m256i fields = kv8_f16_fields(codes), top = _mm256_set1_epi16(0x4000);
    /* All seven magnitude bits set: adding the lowest one carries into the top exponent bit. */
    const __mmask16 is_nan =
        _mm256_test_epi16_mask(_mm256_add_epi16(fields, _mm256_set1_epi16(0x80)), top);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_mask_add_epi16(fields, is_nan, fields, top)),
                         _mm512_set1_ps(256.0f)); /* 2^(15 - 7) */
}
static inline v_f32 kv8_f32x16_from_e4m3fnuz(__m128i codes) {
    const __m256i fields = kv8_f16_fields(codes), nan = _mm256_set1_epi16((short)0xfe00);
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(fields, _mm256_set1_epi16((short)0x8000));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_mask_mov_epi16(fields, is_nan, nan)),
                         _mm512_set1_ps(128.0f)); /* 2^(15 - 8) */
}
static inline v_f32 kv8_f32x16_from_e5m2(__m128i codes) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
}
static inline v_f32 kv8_f32x16_from_int8(__m128i codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}

static inline v_f32 v_widen_f32(const void *codes) {
    return _mm512_loadu_ps(codes);
}
static inline v_f32 v_widen_f32_n(const void *codes, int n) {
    return _mm512_maskz_loadu_ps(v_tail_mask(n), codes);
}

#define KV8_WIDEN(name, bits)                                            \
    static inline v_f32 v_widen_##name(const void *codes) {              \
        return kv8_f32x16_from_##name(kv8_load16_u##bits(codes));        \
    }                                                                    \
    static inline v_f32 v_widen_##name##_n(const void *codes, int n) {   \
        return kv8_f32x16_from_##name(kv8_load16_u##bits##_n(codes, n)); \
    }
KV8_WIDEN(bf16, 16)
KV8_WIDEN(f16, 16)
KV8_WIDEN(e4m3, 8)
KV8_WIDEN(e4m3fnuz, 8)
KV8_WIDEN(e5m2, 8)
KV8_WIDEN(int8, 8)
#undef KV8_WIDEN

#endif
