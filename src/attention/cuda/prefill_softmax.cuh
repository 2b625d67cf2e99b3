/* prefill_softmax.cuh - the arithmetic of every prefill kernel's softmax, whatever multiplies:
 * exp2, tanh, pairs of 16 bits, maxima and sums over the four lanes that share a row.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_SOFTMAX_CUH
#define KV8_PREFILL_SOFTMAX_CUH

#include <stdint.h>

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <bool BF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
/* 1 - 2 / (1 + e^2x): absolute error of a few 1e-7, where tanh.approx has 5e-4. */
__device__ __forceinline__ float tanh_exact(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * 2.885390082f));
}

#endif
