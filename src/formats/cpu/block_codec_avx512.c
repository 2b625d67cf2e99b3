/* block_codec_avx512.c - the block conversions on AVX-512 F+BW+DQ+VL.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#if defined(__AVX512BW__)
#include <kv8/formats.h>

#include "simd/avx512.h"

#include "../formats_simd.h"

typedef __m512i v_i32;
typedef __mmask16 v_mask;

static inline v_i32 i_set1(uint32_t a) {
    return _mm512_set1_epi32((int)a);
}
static inline v_i32 i_and(v_i32 a, v_i32 b) {
    return _mm512_and_si512(a, b);
}
static inline v_i32 i_or(v_i32 a, v_i32 b) {
    return _mm512_or_si512(a, b);
}
static inline v_i32 i_add(v_i32 a, v_i32 b) {
    return _mm512_add_epi32(a, b);
}
static inline v_i32 i_sub(v_i32 a, v_i32 b) {
    return _mm512_sub_epi32(a, b);
}
static inline v_i32 i_min(v_i32 a, v_i32 b) {
    return _mm512_min_epi32(a, b);
}
static inline v_i32 i_max(v_i32 a, v_i32 b) {
    return _mm512_max_epi32(a, b);
}
#define i_srl(a, count) _mm512_srli_epi32(a, count)
static inline v_mask i_gt(v_i32 a, v_i32 b) {
    return _mm512_cmpgt_epi32_mask(a, b);
}
static inline v_i32 i_select(v_mask mask, v_i32 yes, v_i32 no) {
    return _mm512_mask_blend_epi32(mask, no, yes);
}
static inline unsigned i_count(v_mask mask) {
    return (unsigned)_mm_popcnt_u32(mask);
}
static inline v_i32 i_bits(v_f32 a) {
    return _mm512_castps_si512(a);
}
static inline v_f32 i_float(v_i32 a) {
    return _mm512_castsi512_ps(a);
}
static inline v_i32 i_round(v_f32 a) {
    return _mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline v_i32 i_f16(v_f32 a) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void i_store_u32(void *p, v_i32 a) {
    _mm512_storeu_si512(p, a);
}
static inline void i_store_u16(void *p, v_i32 a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(a));
}
static inline void i_store_u8(void *p, v_i32 a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a));
}
static inline uint32_t i_reduce_max(v_i32 a) {
    return (uint32_t)_mm512_reduce_max_epi32(a);
}

/* All sixteen codes of e2m1 in one register. */
static inline v_f32 e2m1_widen(__m128i codes) {
    const __m512 values =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), values);
}
static inline void mxfp4_block_widen(const uint8_t *bytes, float scale, float *values_out) {
    const __m128i packed = _mm_loadu_si128((const __m128i *)bytes), nibble = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(packed, nibble);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    const v_f32 factor = v_set1(scale);
    v_store(values_out, v_mul(e2m1_widen(_mm_unpacklo_epi8(even, odd)), factor));
    v_store(values_out + 16, v_mul(e2m1_widen(_mm_unpackhi_epi8(even, odd)), factor));
}

#include "block_codec_tmpl.h"

KV8_FORMATS_KERNELS_TABLE(avx512);
#endif
