/* formats_simd.h - codes to vectors, for the kernels of other rooms. Include after exactly one of
 * base's simd/{scalar,avx2,avx512,neon}.h (a blank line between keeps the formatter from sorting
 * them); the words are those of that rung.
 *
 *   v_f32 v_widen_D(const void *codes)           V_LANES elements
 *   v_f32 v_widen_D_n(const void *codes, int n)  the first n (0..V_LANES), the other lanes 0
 *
 * D = f32, bf16, f16, int8 and the formats of float8.h. Any alignment; no byte beyond the last
 * element is touched; the same bits on every rung and in kv8_widen, NaN payloads included.
 *
 * Where bf16 products exist, the formats whose every value bf16 holds exactly (all but f32 and f16)
 * also widen to bf16:
 *
 *   avx512_bf16: __m512i v_widen32_bf16_D(const void *codes), and _n with 0 <= n <= 32
 *   neon_bf16:   uint16x8_t v_widen8_bf16_D(const void *codes), and _n with 0 <= n <= 8
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_SIMD_H
#define KV8_FORMATS_SIMD_H

#include "float8.h"
#include "scalar_codec.h"

/* The words of a format without its own: one code after another. */
#define KV8_WORDS_CODE(name)                                                                     \
    static inline v_f32 v_widen_##name##_n(const void *codes, int n) {                           \
        _Alignas(64) float lanes[V_LANES] = {0};                                                 \
        for (int i = 0; i < n; i++) lanes[i] = kv8_##name##_decode(((const uint8_t *)codes)[i]); \
        return v_load(lanes);                                                                    \
    }                                                                                            \
    static inline v_f32 v_widen_##name(const void *codes) {                                      \
        return v_widen_##name##_n(codes, V_LANES);                                               \
    }
#define KV8_WORDS_VECTOR(name)
#define KV8_WORDS_LOOKUP(name)
#define KV8_WORDS(words, rule, name, dtype, mantissa, bias, max) KV8_WORDS_##words(name)
#if !defined(KV8_SIMD_SCALAR_H)
KV8_FLOAT8_FORMATS(KV8_WORDS)
#endif
#undef KV8_WORDS

#if defined(KV8_SIMD_AVX512_H)
#include "simd/widen_avx512.h"
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#include "simd/widen_avx512_bf16.h"
#endif
#elif defined(KV8_SIMD_AVX2_H)
#include "simd/widen_avx2.h"
#elif defined(KV8_SIMD_NEON_H)
#include "simd/widen_neon.h"
#elif defined(KV8_SIMD_SCALAR_H)
#include "simd/widen_scalar.h"
#else
#error "include one of base/simd/{scalar,avx2,avx512,neon}.h first"
#endif

#endif
