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
static inline v_f32 t_round_zip(v_f32 a, v_f32 b) {
    const __m512i pairs = _mm512_setr_epi32(
        0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
        0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(pairs, rounded));
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

/* 64 codes of K, 64 codes of two rows of V, in order or, with T_QUARTERS, as unpacking leaves them;
 * bf16 itself goes the template's way. */
#ifdef T_QUARTERS
#define T_WIDEN_ROW(D)  v_widen64_bf16_quarters_##D
#define T_WIDEN_ROWS(D) v_widen64_pairs_bf16_quarters_##D
#else
#define T_WIDEN_ROW(D)  v_widen64_bf16_##D
#define T_WIDEN_ROWS(D) v_widen64_pairs_bf16_##D
#endif
#define T_WIDEN_64(D)                                                                          \
    V_INLINE bool t_widen64_##D(const uint8_t *row, float *out) {                              \
        __m512i pairs[2];                                                                      \
        T_WIDEN_ROW(D)(row, pairs);                                                            \
        v_store(out, _mm512_castsi512_ps(pairs[0]));                                           \
        v_store(out + V_LANES, _mm512_castsi512_ps(pairs[1]));                                 \
        return true;                                                                           \
    }                                                                                          \
    V_INLINE bool t_widen64_pairs_##D(const uint8_t *even, const uint8_t *odd, int32_t at,     \
                                      float *out) {                                            \
        __m512i pairs[4];                                                                      \
        T_WIDEN_ROWS(D)(even + at, odd + at, pairs);                                           \
        V_UNROLL                                                                               \
        for (int i = 0; i < 4; i++) v_store(out + i * V_LANES, _mm512_castsi512_ps(pairs[i])); \
        return true;                                                                           \
    }
#define T_FLOAT8(words, rule, name, dtype, mantissa, bias, max) T_WIDEN_64(name)
KV8_FLOAT8_FORMATS(T_FLOAT8)
#undef T_FLOAT8
T_WIDEN_64(int8)
#undef T_WIDEN_64
V_INLINE bool t_widen64_bf16(const uint8_t *row, float *out) {
    (void)row;
    (void)out;
    return false;
}
V_INLINE bool t_widen64_pairs_bf16(const uint8_t *even, const uint8_t *odd, int32_t at,
                                   float *out) {
    (void)even;
    (void)odd;
    (void)at;
    (void)out;
    return false;
}
#define T_LOAD_64(D, row, dim, out, d)                                                    \
    for (; (d) + 64 <= (dim) && t_widen64_##D((row) + (d), (out) + (d) / 2); (d) += 64) { \
    }
#define T_LOAD_V_64(D, even, odd, dim, out, d)                                               \
    for (; (d) + 64 <= (dim) && t_widen64_pairs_##D(even, odd, d, (out) + (d)); (d) += 64) { \
    }

#endif
