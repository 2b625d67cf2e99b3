// experts_scaled.cuh - MXFP4 weights in registers as f16 that their scale is multiplied into.
//
// Exact for scales down to 2^-24 of the row's largest; what is smaller rounds to a multiple of
// 2^-24 of the largest scale, as f32 sums would. Products of them need no scale of their own: a
// row's sum goes on through all its inputs, from 16 to the next 16, on mma.sync and on wgmma alike,
// which add 16 products in one way (test_experts_device compares the bits).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_fp16.h>

#include "experts_args.h"
#include "mxfp4_strip.cuh"
#include "ptx_sm80.cuh"

namespace kv8 {

// The f16 exponents, in bits 10 to 14 of both halves of a word, that bring the codes of a tile's
// four blocks to twice their value over the row's factor; 0 for what is too small for an f16.
constexpr float TILE_FACTOR = 0.5f;
__device__ __forceinline__ void scale_exponents(uint32_t scales, uint32_t (&exponents)[4]) {
    constexpr uint32_t TOPS = 0x80808080u, LOWEST = (KV8_TOP_SCALE - 30) * 0x01010101u;
    const uint32_t above = (scales | TOPS) - LOWEST;  // a byte's top bit: not below the lowest
    const uint32_t tops = above & TOPS;
    const uint32_t shifted = (above & (tops - (tops >> 7))) << 2;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        exponents[i] = __byte_perm(shifted, 0, 0x0404 | i << 4 | i << 12);
}

// A lane's part of a tile of a strip.
struct TileCodes {
    Words<16> codes;
    uint32_t exponents[4];

    __device__ __forceinline__ void load(uint32_t codes_at, uint32_t scales_at) {
        codes = load_shared<16>(codes_at);
        scale_exponents(load_shared<4>(scales_at).w[0], exponents);
    }
    // 16 inputs of the tile, scaled: an A operand.
    template <int OPERAND>
    __device__ __forceinline__ void widen(uint32_t (&wide)[4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {  // rows g and g + 8
            const int word = half * 2 + OPERAND / 2;
            uint32_t pairs[4];
            widen_codes(codes.w[word], pairs);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const __half2 scaled =
                    __hmul2(*reinterpret_cast<const __half2 *>(&pairs[OPERAND % 2 * 2 + p]),
                            *reinterpret_cast<const __half2 *>(&exponents[word]));
                wide[p * 2 + half] = *reinterpret_cast<const uint32_t *>(&scaled);
            }
        }
    }
};

}  // namespace kv8
