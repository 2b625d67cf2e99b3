// sampler_numbers.cuh - logits as whole numbers of their order, and weights as kv8/engine.h defines
// them, bit by bit.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

namespace kv8 {

using u64 = unsigned long long;

// Whole numbers in the order of the floats; both zeros are one.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float(order >> 31 != 0 ? order & 0x7fffffffu : ~order);
}
// Larger for a larger logit, then for a lower id; never 0.
__device__ __forceinline__ u64 key_of(float logit, int32_t id) {
    return u64{order_of(logit)} << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int32_t id_of(u64 key) {
    return static_cast<int32_t>(~static_cast<uint32_t>(key));
}
__device__ __forceinline__ float logit_of(u64 key) {
    return value_of(static_cast<uint32_t>(key >> 32));
}

// A weight over 2^13, and the rest, each rounded down to a whole number: the bits of its sum with
// 2^23, whose own are ONE.
struct WeightParts {
    static constexpr uint32_t ONE = 0x4b000000u;
    uint32_t upper, lower;
};

// v_exp of math_tmpl.h for -25 <= x <= 0, operation by operation, times 2^36, rounded down; 0 for
// all below. Its high and low bits are rounded down by what a sum with 2^23 keeps.
__device__ __forceinline__ WeightParts weight_parts(float logit, float high, float factor) {
    constexpr float ROUND = 12582912.0f, WHOLE = 8388608.0f;  // 1.5 * 2^23, 2^23
    const float x = fmaxf(__fmul_rn(__fsub_rn(logit, high), factor), -25.0f);
    const float rounded = __fadd_rn(__fmul_rn(x, 1.44269504f), ROUND);
    const float n = __fsub_rn(rounded, ROUND);
    float r = __fadd_rn(__fmul_rn(n, -0.693359375f), x);
    r = __fadd_rn(__fmul_rn(n, 2.12194440e-4f), r);
    float p = 1.0f / 5040;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    const float y =
        __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23) + (36u << 23));
    const float upper = __fmaf_rz(y, 0x1p-13f, WHOLE);
    const float rest = __fmaf_rn(__fsub_rn(upper, WHOLE), -0x1p13f, y);  // exact
    return {__float_as_uint(upper), __float_as_uint(__fadd_rz(rest, WHOLE))};
}
__device__ __forceinline__ u64 weight_of(float logit, float high, float factor) {
    const WeightParts w = weight_parts(logit, high, factor);
    return u64{w.upper - WeightParts::ONE} * 8192 + (w.lower - WeightParts::ONE);
}
// Of NUM logits, at most 256.
template <int NUM>
__device__ __forceinline__ u64 weight_of_all(const float (&logits)[NUM], float high, float factor) {
    uint32_t upper = 0, lower = 0;
#pragma unroll
    for (int i = 0; i < NUM; i++) {
        const WeightParts w = weight_parts(logits[i], high, factor);
        upper += w.upper - WeightParts::ONE;
        lower += w.lower - WeightParts::ONE;
    }
    return u64{upper} * 8192 + lower;
}

}  // namespace kv8
