/* simd/avx512.h - the vector vocabulary on AVX-512 F+BW+DQ+VL; words as in simd/scalar.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_AVX512_H
#define KV8_SIMD_AVX512_H
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif

#include <immintrin.h>
#include <stdint.h>

#define V_LANES 16
typedef __m512 v_f32;

static inline __mmask16 v_tail_mask(int n) {
    return (__mmask16)((1u << n) - 1u);
}
static inline v_f32 v_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static inline v_f32 v_load_n(const float *p, int n) {
    return _mm512_maskz_loadu_ps(v_tail_mask(n), p);
}
static inline void v_store(float *p, v_f32 a) {
    _mm512_storeu_ps(p, a);
}
static inline void v_store_n(float *p, v_f32 a, int n) {
    _mm512_mask_storeu_ps(p, v_tail_mask(n), a);
}
static inline v_f32 v_set1(float a) {
    return _mm512_set1_ps(a);
}
static inline v_f32 v_add(v_f32 a, v_f32 b) {
    return _mm512_add_ps(a, b);
}
static inline v_f32 v_sub(v_f32 a, v_f32 b) {
    return _mm512_sub_ps(a, b);
}
static inline v_f32 v_mul(v_f32 a, v_f32 b) {
    return _mm512_mul_ps(a, b);
}
static inline v_f32 v_div(v_f32 a, v_f32 b) {
    return _mm512_div_ps(a, b);
}
static inline v_f32 v_fma(v_f32 a, v_f32 b, v_f32 c) {
    return _mm512_fmadd_ps(a, b, c);
}
static inline v_f32 v_max(v_f32 a, v_f32 b) {
    return _mm512_max_ps(a, b);
}
static inline v_f32 v_min(v_f32 a, v_f32 b) {
    return _mm512_min_ps(a, b);
}
static inline v_f32 v_round(v_f32 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline v_f32 v_scale2(v_f32 a, v_f32 n) {
    return _mm512_scalef_ps(a, n);
}
static inline v_f32 v_select_lt(v_f32 a, v_f32 b, v_f32 yes, v_f32 no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static inline float v_reduce_add(v_f32 a) {
    return _mm512_reduce_add_ps(a);
}
static inline float v_reduce_max(v_f32 a) {
    return _mm512_reduce_max_ps(a);
}

static inline void v_transpose(v_f32 *rows) {
    v_f32 a[16], b[16];
    for (int i = 0; i < 16; i += 2) { /* pairs of rows, within 128-bit quarters */
        a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* fours of rows: b[i + c] has column c of each quarter */
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(a[i + j]);
            const __m512d high = _mm512_castps_pd(a[i + j + 2]);
            b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    for (int c = 0; c < 4; c++) { /* quarters: a 4x4 transpose of 128-bit pieces */
        const v_f32 p = _mm512_shuffle_f32x4(b[c], b[c + 4], 0x88);
        const v_f32 q = _mm512_shuffle_f32x4(b[c], b[c + 4], 0xdd);
        const v_f32 r = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0x88);
        const v_f32 s = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0xdd);
        rows[c] = _mm512_shuffle_f32x4(p, r, 0x88);
        rows[c + 4] = _mm512_shuffle_f32x4(q, s, 0x88);
        rows[c + 8] = _mm512_shuffle_f32x4(p, r, 0xdd);
        rows[c + 12] = _mm512_shuffle_f32x4(q, s, 0xdd);
    }
}

/* v_fold, v_swap, v_load_fold: as in simd/scalar.h. */
static inline v_f32 v_swap(v_f32 a, const int step) {
    switch (step) {
        case 1: return _mm512_permute_ps(a, 0xb1);
        case 2: return _mm512_permute_ps(a, 0x4e);
        case 4: return _mm512_shuffle_f32x4(a, a, 0xb1);
        default: return _mm512_shuffle_f32x4(a, a, 0x4e);
    }
}
static inline v_f32 v_fold(v_f32 a, v_f32 b, const int step) {
    const __mmask16 high = step == 1 ? 0xaaaa : step == 2 ? 0xcccc : step == 4 ? 0xf0f0 : 0xff00;
    return v_add(_mm512_mask_blend_ps(high, a, b),
                 _mm512_mask_blend_ps(high, v_swap(a, step), v_swap(b, step)));
}
static inline v_f32 v_load_fold(const float *p, const int n) {
    switch (n) {
        case 1: return _mm512_set1_ps(*p);
        case 2: return _mm512_castpd_ps(_mm512_broadcastsd_pd(_mm_load_sd((const double *)p)));
        case 4: return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
        case 8: return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
        default: return _mm512_loadu_ps(p);
    }
}

#define V_OWN_EXP2 1
static inline v_f32 v_exp2_part(v_f32 f, int degree);
/* v_exp2 of math_tmpl.h: the fraction above floor(a), 0 at infinities; scalef floors a itself. */
static inline v_f32 v_exp2(v_f32 a, const int degree) {
    const v_f32 f = _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(v_exp2_part(f, degree), a);
}

#include "math_tmpl.h"
#endif
