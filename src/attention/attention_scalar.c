/* attention_scalar.c - the attention kernel at vector width 1: every machine has it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "simd/scalar.h"

#define T_NAME   kv8_attention_f32_any_dany_pany__scalar
#define T_PAIRS  0
#define T_KEYS   4
#define T_KEYS_2 4
#define T_ROWS   4
#define T_VECS   2
#include "cpu/attention_tmpl.h"
