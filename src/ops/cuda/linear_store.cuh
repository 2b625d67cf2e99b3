// linear_store.cuh - how a dense kernel's sums leave: bias, addition to what is there, rounding.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_bf16.h>

#include "linear_args.h"
#include "ptx_sm80.cuh"

namespace kv8 {

static __device__ __forceinline__ float bias_of(const kv8_linear_args &a, int32_t row) {
    if (a.bias == nullptr) return 0;
    return __uint_as_float(uint32_t{__ldg(static_cast<const uint16_t *>(a.bias) + row)} << 16);
}
static __device__ __forceinline__ void store_one(const kv8_linear_args &a, int32_t token,
                                                 int32_t row, float sum) {
    const int64_t at = int64_t{token} * a.rows + row;
    const float y = sum + bias_of(a, row);
    if (a.is_f32) {
        float *const to = static_cast<float *>(a.y) + at;
        *to = a.accumulate ? *to + y : y;
    } else {
        static_cast<__nv_bfloat16 *>(a.y)[at] = __float2bfloat16_rn(y);
    }
}

// Rows row to row + 3 of what is inside.
static __device__ __forceinline__ void store_four(const kv8_linear_args &a, int32_t token,
                                                  int32_t row, const float4 &sum) {
    if (a.rows % 4 == 0 && row < a.rows) {
        const int64_t at = int64_t{token} * a.rows + row;
        float4 y = {sum.x + bias_of(a, row), sum.y + bias_of(a, row + 1),
                    sum.z + bias_of(a, row + 2), sum.w + bias_of(a, row + 3)};
        if (a.is_f32) {
            float4 *const to = reinterpret_cast<float4 *>(static_cast<float *>(a.y) + at);
            if (a.accumulate) y = {to->x + y.x, to->y + y.y, to->z + y.z, to->w + y.w};
            *to = y;
        } else {
            *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(a.y) + at) = {pack_bf16(y.x, y.y),
                                                                             pack_bf16(y.z, y.w)};
        }
        return;
    }
    if (row < a.rows) store_one(a, token, row, sum.x);
    if (row + 1 < a.rows) store_one(a, token, row + 1, sum.y);
    if (row + 2 < a.rows) store_one(a, token, row + 2, sum.z);
    if (row + 3 < a.rows) store_one(a, token, row + 3, sum.w);
}

}  // namespace kv8
