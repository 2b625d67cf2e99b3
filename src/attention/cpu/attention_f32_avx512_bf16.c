/* attention_f32_avx512_bf16.c - the attention kernel in f32 math on AVX-512 with VBMI: that of
 * attention_avx512.c, with e4m3 widened by byte lookups, which there takes as long as the products.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>

#include "simd/avx512.h"

#include "formats_simd.h"
#include "simd/unroll.h"

/* 64 codes of a row; false: the template's way is as good. */
#define T_WIDEN_64_LOOKUP(D)                                             \
    V_INLINE bool t_widen64_##D(const uint8_t *row, float *out) {        \
        v_f32 wide[4];                                                   \
        v_widen64_f32_##D(row, wide);                                    \
        V_UNROLL                                                         \
        for (int i = 0; i < 4; i++) v_store(out + i * V_LANES, wide[i]); \
        return true;                                                     \
    }
#define T_WIDEN_64_VECTOR(D)                                      \
    V_INLINE bool t_widen64_##D(const uint8_t *row, float *out) { \
        (void)row;                                                \
        (void)out;                                                \
        return false;                                             \
    }
#define T_WIDEN_64_CODE                                         T_WIDEN_64_VECTOR
#define T_FLOAT8(words, rule, name, dtype, mantissa, bias, max) T_WIDEN_64_##words(name)
KV8_FLOAT8_FORMATS(T_FLOAT8)
T_WIDEN_64_VECTOR(f32)
T_WIDEN_64_VECTOR(f16)
T_WIDEN_64_VECTOR(bf16)
T_WIDEN_64_VECTOR(int8)
#define T_LOAD_64(D, row, dim, out, d)                                                \
    for (; (d) + 64 <= (dim) && t_widen64_##D((row) + (d), (out) + (d)); (d) += 64) { \
    }

#define T_NAME   kv8_attention_f32_any_dany_pany__avx512_bf16
#define T_PAIRS  0
#define T_KEYS   16
#define T_KEYS_2 8
#define T_ROWS   6
#define T_VECS   4
#include "attention_tmpl.h"
