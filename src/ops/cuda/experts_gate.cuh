// experts_gate.cuh - gpt-oss' clamped gate, and what the experts' kernels share beside it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace kv8 {

// g sigmoid(alpha g) (l + 1), g = min(gate, limit), l = up between -limit and limit; NaN stays.
__device__ __forceinline__ float gate(float gate, float up, float alpha, float limit) {
    const float g = gate > limit ? limit : gate;
    const float l = up > limit ? limit : up < -limit ? -limit : up;
    return __fdividef(g, 1.0f + __expf(-alpha * g)) * (l + 1.0f);
}

// gate() by approximations of one instruction each, which keep within f32's rounding of it: 2^x and
// 1 / x flush what is subnormal to 0. NaN stays.
__device__ __forceinline__ float gate_soon(float gate, float up, float alpha, float limit) {
    float g, l, power, share;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(g) : "f"(gate), "f"(limit));
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(l) : "f"(up), "f"(limit));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(l) : "f"(-limit));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(g * (-1.44269504f * alpha)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return g * share * (l + 1.0f);
}

// Four 8 x 8 matrices of 16-bit values: the rows of matrix i at the addresses of lanes 8i to 8i
// + 7.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

}  // namespace kv8
