// linear_store.cuh - how a dense kernel's sums leave: bias, addition to what is there, rounding.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_bf16.h>

#include "linear_args.h"
#include "ptx_sm80.cuh"

namespace kv8 {

// Tile idx of them all: KV8_LINEAR_GROUP tiles of rows at a time take their turns over the
// tokens.
struct Tile {
    int32_t first_row, first_token;
};
static __device__ __forceinline__ Tile find_tile(const kv8_linear_args &a, int rows, int tokens,
                                                 int32_t idx) {
    const int32_t row_tiles = (a.rows + rows - 1) / rows, token_tiles = (a.n + tokens - 1) / tokens;
    const int32_t group = idx / (KV8_LINEAR_GROUP * token_tiles);
    const int32_t begin = group * KV8_LINEAR_GROUP;
    const int32_t wide = min(KV8_LINEAR_GROUP, row_tiles - begin);
    const int32_t within = idx - begin * token_tiles;
    return {(begin + within % wide) * rows, within / wide * tokens};
}

static __device__ __forceinline__ float bias_of(const kv8_linear_args &a, int32_t row) {
    if (a.bias == nullptr) return 0;
    return __uint_as_float(uint32_t{__ldg(static_cast<const uint16_t *>(a.bias) + row)} << 16);
}
static __device__ __forceinline__ void store_value(const kv8_linear_args &a, int32_t token,
                                                   int32_t row, float y) {
    const int64_t at = int64_t{token} * a.rows + row;
    if (a.is_f32) {
        float *const to = static_cast<float *>(a.y) + at;
        *to = a.accumulate ? *to + y : y;
    } else {
        static_cast<__nv_bfloat16 *>(a.y)[at] = __float2bfloat16_rn(y);
    }
}

static __device__ __forceinline__ void store_one(const kv8_linear_args &a, int32_t token,
                                                 int32_t row, float sum) {
    store_value(a, token, row, sum + bias_of(a, row));
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

// A pair of a head by its angle, as kv8_rope_f32 rounds it.
static __device__ __forceinline__ void turn(float &low, float &high, float cosine, float sine) {
    const float first = low, second = high;
    low = __fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine));
    high = __fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine));
}
static __device__ __forceinline__ uint32_t pack_rotated(const kv8_linear_args &a, float x,
                                                        float y) {
    return a.rotated_is_f16 ? pack_f16(x, y) : pack_bf16(x, y);
}

}  // namespace kv8
