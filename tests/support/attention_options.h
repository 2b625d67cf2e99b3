/* attention_options.h - the walk over all options of attention, as cases: K's and V's format x Q's
 * x sink x window x cap x causal x mask x batch_invariant; output dtype, layout, table form and
 * scales turn with the count. Whoever walks it asserts one of: right, or refused.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_OPTIONS_H
#define KV8_ATTENTION_OPTIONS_H

#include "attention_case.h"

enum { OPTION_PAIRS = 49, OPTION_BITS = 64 };

static inline bool option_q_is_supported(int q) {
    return q != KV8_E4M3FNUZ && q != KV8_E5M2 && q != KV8_INT8;
}

/* The n-th case of a walk: small, with Q in f32 where q is none that attention takes. */
static inline attention_case option_case(uint64_t n, int pair, int q, unsigned bits) {
    static const kv8_dtype o_dtypes[] = {KV8_F32, KV8_F32, KV8_BF16, KV8_F16};
    return (attention_case){
        .seed = n,
        .group_size = 1 + (int32_t)(n % 3),
        .num_kv_heads = 1,
        .head_dim = 5 + (int32_t)(n % 14),
        .q_dtype = option_q_is_supported(q) ? (kv8_dtype)q : KV8_F32,
        .k_dtype = (kv8_dtype)(KV8_F32 + pair % 7),
        .v_dtype = (kv8_dtype)(KV8_F32 + pair / 7),
        .o_dtype = o_dtypes[n / 3 % 4],
        .page_size = 1 + (int32_t)(n % 4),
        .sink = bits & 1 ? SINK_FINITE : SINK_NONE,
        .window_left = bits & 2 ? 2 : -1,
        .soft_cap = bits & 4 ? 3.0f : 0.0f,
        .causal = bits & 8 ? 1 : 0,
        .mask = bits & 16 ? MASK_RANDOM : MASK_NONE,
        .batch_invariant = bits & 32,
        .scale = (scale_kind)(n / 5 % SCALE_KINDS),
        .layout = (layout_kind)(n / 7 % LAYOUTS),
        .dense_table = n / 11 % 2,
        .batch = 1,
        .qo_len = {1 + (int32_t)(n % 2)},
        .kv_len = {3 + (int32_t)(n % 8)},
    };
}

#endif
