/* block_codec_avx2.c - the block conversions on AVX2 + F16C.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#if defined(__AVX2__)
#include <kv8/formats.h>

#include "simd/avx2.h"

#include "../formats_simd.h"

typedef __m256i v_i32, v_mask;

static inline v_i32 i_set1(uint32_t a) {
    return _mm256_set1_epi32((int)a);
}
static inline v_i32 i_and(v_i32 a, v_i32 b) {
    return _mm256_and_si256(a, b);
}
static inline v_i32 i_or(v_i32 a, v_i32 b) {
    return _mm256_or_si256(a, b);
}
static inline v_i32 i_add(v_i32 a, v_i32 b) {
    return _mm256_add_epi32(a, b);
}
static inline v_i32 i_sub(v_i32 a, v_i32 b) {
    return _mm256_sub_epi32(a, b);
}
static inline v_i32 i_min(v_i32 a, v_i32 b) {
    return _mm256_min_epi32(a, b);
}
static inline v_i32 i_max(v_i32 a, v_i32 b) {
    return _mm256_max_epi32(a, b);
}
#define i_srl(a, count) _mm256_srli_epi32(a, count)
static inline v_mask i_gt(v_i32 a, v_i32 b) {
    return _mm256_cmpgt_epi32(a, b);
}
static inline v_i32 i_select(v_mask mask, v_i32 yes, v_i32 no) {
    return _mm256_blendv_epi8(no, yes, mask);
}
static inline unsigned i_count(v_mask mask) {
    return (unsigned)_mm_popcnt_u32((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}
static inline v_i32 i_bits(v_f32 a) {
    return _mm256_castps_si256(a);
}
static inline v_f32 i_float(v_i32 a) {
    return _mm256_castsi256_ps(a);
}
static inline v_i32 i_round(v_f32 a) {
    return _mm256_cvtps_epi32(_mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline v_i32 i_f16(v_f32 a) {
    return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
static inline void i_store_u32(void *p, v_i32 a) {
    _mm256_storeu_si256((__m256i *)p, a);
}
/* Lanes hold at most 16 significant bits here, so that packing does not saturate. */
static inline void i_store_u16(void *p, v_i32 a) {
    const __m128i low = _mm256_castsi256_si128(a), high = _mm256_extracti128_si256(a, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}
static inline void i_store_u8(void *p, v_i32 a) {
    /* Byte 0 of each lane to the front of its 128-bit half. */
    const __m256i pick =
        _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12,
                         -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i halves = _mm256_shuffle_epi8(a, pick);
    const __m128i bytes =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storel_epi64((__m128i *)p, bytes);
}
static inline uint32_t i_reduce_max(v_i32 a) {
    const __m128i s = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i t = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}

/* Eight codes, one a byte: the magnitude from a register of eight, the sign from bit 3. */
static inline v_f32 e2m1_widen(__m128i codes) {
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i lanes = _mm256_cvtepu8_epi32(codes); /* the permute reads bits 0..2 */
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(lanes, 3), 31);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, lanes), _mm256_castsi256_ps(sign));
}
static inline void mxfp4_block_widen(const uint8_t *bytes, float scale, float *values_out) {
    const __m128i packed = _mm_loadu_si128((const __m128i *)bytes), nibble = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(packed, nibble);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
    const __m128i codes[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    const v_f32 factor = v_set1(scale);
    for (int half = 0; half < 2; half++) {
        float *const values = values_out + 16 * half;
        v_store(values, v_mul(e2m1_widen(codes[half]), factor));
        v_store(values + 8, v_mul(e2m1_widen(_mm_srli_si128(codes[half], 8)), factor));
    }
}

#include "block_codec_tmpl.h"

KV8_FORMATS_KERNELS_TABLE(avx2);
#endif
