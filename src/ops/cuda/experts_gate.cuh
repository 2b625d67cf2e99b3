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

// Four 8 x 8 matrices of 16-bit values: the rows of matrix i at the addresses of lanes 8i to 8i
// + 7.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

}  // namespace kv8
