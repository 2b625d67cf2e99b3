/* attention_avx512_bf16.c - the attention kernel in bf16 math on AVX512_BF16.
 *
 * vdpbf16ps adds two products to each f32 lane, at half the rate of a vfmadd: as many products per
 * second, from tiles of half the size. Q, K and V enter exactly; P is rounded to bf16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pairs_avx512.h"

#define T_NAME   kv8_attention_bf16_any_dany_pany__avx512_bf16
#define T_KEYS   16
#define T_KEYS_2 8
#define T_ROWS   6
#define T_VECS   4
#include "attention_tmpl.h"
