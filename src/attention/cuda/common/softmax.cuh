// softmax.cuh - constants and arithmetic of softmax in base 2, for every kernel of attention.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

namespace kv8 {

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float NO_KEY = -1e30f;  // maximum of no key: below every score, and finite

__device__ inline float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// tanh x = 1 - 2 / (1 + e^2x): absolute error of a few 1e-7, where tanh.approx has 5e-4. From
// y = 2 x log2(e).
__device__ inline float tanh_of_exponent(float y) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(y));
}
// Over the four lanes that share a row of an MMA's result.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace kv8
