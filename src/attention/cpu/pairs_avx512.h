/* pairs_avx512.h - the words of pairs that attention_tmpl.h asks for, on AVX512_BF16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PAIRS_AVX512_H
#define KV8_PAIRS_AVX512_H

#include <math.h>
#include <string.h>

#include "simd/avx512.h"

#include "formats_simd.h"
#include "simd/unroll.h"
#include "tile.h"

#define T_PAIRS 1

#define T_PAIRS_OF(D, codes)      _mm512_castsi512_ps(v_widen32_bf16_##D(codes))
#define T_PAIRS_OF_N(D, codes, n) _mm512_castsi512_ps(v_widen32_bf16_##D##_n(codes, n))

static inline v_f32 t_dot(v_f32 a, v_f32 b, v_f32 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
static inline v_f32 t_round(v_f32 a, v_f32 b) {
    return (v_f32)_mm512_cvtne2ps_pbh(b, a);
}
/* 16-bit lanes first, first + 32, first + 1, first + 33, ...: a_i beside b_i. */
static inline v_f32 t_zip(v_f32 a, v_f32 b, int first) {
    const __m512i pairs = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = _mm512_add_epi32(pairs, _mm512_set1_epi32(first));
    const __m512i both =
        _mm512_or_si512(from, _mm512_slli_epi32(_mm512_add_epi32(from, _mm512_set1_epi32(32)), 16));
    return _mm512_castsi512_ps(
        _mm512_permutex2var_epi16(_mm512_castps_si512(a), both, _mm512_castps_si512(b)));
}
static inline v_f32 t_zip_lo(v_f32 a, v_f32 b) {
    return t_zip(a, b, 0);
}
static inline v_f32 t_zip_hi(v_f32 a, v_f32 b) {
    return t_zip(a, b, 16);
}

#endif
