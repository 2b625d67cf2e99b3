/* simd/avx2.h - the vector vocabulary on AVX2 + FMA; words as in simd/scalar.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_AVX2_H
#define KV8_SIMD_AVX2_H
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif

#include <immintrin.h>
#include <stdint.h>

#define V_LANES 8
typedef __m256 v_f32;

static inline __m256i v_tail_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline v_f32 v_load(const float *p) {
    return _mm256_loadu_ps(p);
}
static inline v_f32 v_load_n(const float *p, int n) {
    return _mm256_maskload_ps(p, v_tail_mask(n));
}
static inline void v_store(float *p, v_f32 a) {
    _mm256_storeu_ps(p, a);
}
static inline void v_store_n(float *p, v_f32 a, int n) {
    _mm256_maskstore_ps(p, v_tail_mask(n), a);
}
static inline v_f32 v_set1(float a) {
    return _mm256_set1_ps(a);
}
static inline v_f32 v_add(v_f32 a, v_f32 b) {
    return _mm256_add_ps(a, b);
}
static inline v_f32 v_sub(v_f32 a, v_f32 b) {
    return _mm256_sub_ps(a, b);
}
static inline v_f32 v_mul(v_f32 a, v_f32 b) {
    return _mm256_mul_ps(a, b);
}
static inline v_f32 v_div(v_f32 a, v_f32 b) {
    return _mm256_div_ps(a, b);
}
static inline v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) {
    return _mm256_fmadd_ps(a, b, c);
}
static inline v_f32 v_max(v_f32 a, v_f32 b) {
    return _mm256_max_ps(a, b);
}
static inline v_f32 v_min(v_f32 a, v_f32 b) {
    return _mm256_min_ps(a, b);
}
static inline v_f32 v_round(v_f32 a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline v_f32 v_scale2(v_f32 a, v_f32 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
static inline v_f32 v_select_lt(v_f32 a, v_f32 b, v_f32 yes, v_f32 no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static inline float v_reduce_add(v_f32 a) {
    const __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 t = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
static inline float v_reduce_max(v_f32 a) {
    const __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 t = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

/* v_fold, v_swap, v_load_fold: as in simd/scalar.h. */
static inline v_f32 v_swap(v_f32 a, const int step) {
    switch (step) {
        case 1: return _mm256_permute_ps(a, 0xb1);
        case 2: return _mm256_permute_ps(a, 0x4e);
        default: return _mm256_permute2f128_ps(a, a, 1);
    }
}
static inline v_f32 v_fold(v_f32 a, v_f32 b, const int step) {
    const v_f32 c = v_swap(a, step), d = v_swap(b, step);
    switch (step) {
        case 1: return v_add(_mm256_blend_ps(a, b, 0xaa), _mm256_blend_ps(c, d, 0xaa));
        case 2: return v_add(_mm256_blend_ps(a, b, 0xcc), _mm256_blend_ps(c, d, 0xcc));
        default: return v_add(_mm256_blend_ps(a, b, 0xf0), _mm256_blend_ps(c, d, 0xf0));
    }
}
static inline v_f32 v_load_fold(const float *p, const int n) {
    switch (n) {
        case 1: return _mm256_set1_ps(*p);
        case 2: return _mm256_castpd_ps(_mm256_broadcast_sd((const double *)p));
        case 4: return _mm256_broadcast_ps((const __m128 *)p);
        default: return _mm256_loadu_ps(p);
    }
}

#define V_OWN_EXP2 1
static inline v_f32 v_exp2_part(v_f32 f, int degree);
/* v_exp2 of math_tmpl.h. The floor is added to the exponent; at -127 and below that leaves no bit,
 * above it, up to -126, a subnormal that is less than the true value. */
static inline v_f32 v_exp2(v_f32 a, const int degree) {
    const v_f32 clamped = v_max(v_set1(-127.0f), a);
    const v_f32 n = _mm256_floor_ps(clamped);
    const __m256i part = _mm256_castps_si256(v_exp2_part(v_sub(clamped, n), degree));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(part, exponent));
}

#include "math_tmpl.h"
#endif
