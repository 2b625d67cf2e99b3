/* attention_avx2.c - the attention kernel in f32 math on AVX2 + FMA.
 *
 * Scores: 8 x 1 or 5 x 2 accumulators. P V: 6 x 2, 2 columns, 1 broadcast: 15 of 16 registers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "simd/avx2.h"

#define T_NAME   kv8_attention_f32_any_dany_pany__avx2
#define T_PAIRS  0
#define T_KEYS   8
#define T_KEYS_2 5
#define T_ROWS   6
#define T_VECS   2
#include "attention_tmpl.h"
