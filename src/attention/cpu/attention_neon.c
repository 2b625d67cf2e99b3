/* attention_neon.c - the attention kernel in f32 math on arm64 Advanced SIMD.
 *
 * Scores: 16 x 1 or 8 x 2 accumulators. P V: 6 x 4 accumulators, 4 columns, 1 broadcast: 29 of 32
 * registers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "simd/neon.h"

#define T_NAME   kv8_attention_f32_any_dany_pany__neon
#define T_PAIRS  0
#define T_KEYS   16
#define T_KEYS_2 8
#define T_ROWS   6
#define T_VECS   4
#include "attention_tmpl.h"
