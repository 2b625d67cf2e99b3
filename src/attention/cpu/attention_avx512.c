/* attention_avx512.c - the attention kernel in f32 math on AVX-512.
 *
 * Scores: 16 x 1 or 8 x 2 accumulators. P V: 6 x 4, 4 columns, 1 broadcast: 29 of 32 registers; 24
 * chains hide the latency of 4 at two products a cycle.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "simd/avx512.h"

#define T_NAME   kv8_attention_f32_any_dany_pany__avx512
#define T_PAIRS  0
#define T_KEYS   16
#define T_KEYS_2 8
#define T_ROWS   6
#define T_VECS   4
#include "attention_tmpl.h"
