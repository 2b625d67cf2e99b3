// mxfp4_strip.cuh - eight MXFP4 codes of a word as f16, and back.
//
// A code of e2m1 is an f16 that has its sign at bit 15 and its other three bits at 11 to 9, times
// 2^14: that holds for 0.5 too, which becomes a subnormal. The word is coded so that each pair of
// f16 is a shift, of two pairs joined with the word itself, and one mask away. The lower half of
// the word holds the pairs' first codes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

namespace kv8 {

constexpr uint32_t CODE_BITS = 0x8e008e00u;
constexpr float CODE_FACTOR = 16384.0f;  // of what widen_codes gives

__device__ __forceinline__ void widen_codes(uint32_t word, uint32_t (&pairs)[4]) {
    pairs[0] = (word ^ word >> 3) & CODE_BITS;
    pairs[1] = (word ^ word << 2) & CODE_BITS;
    pairs[2] = word << 6 & CODE_BITS;
    pairs[3] = word << 9 & CODE_BITS;
}

// A half of a word from its four codes: what widen_codes undoes. above: bit 2 of the half above it,
// which has none itself.
__device__ __forceinline__ uint32_t code_half(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                              uint32_t above) {
    const auto at = [](uint32_t x, int from, int to) { return (x >> from & 1u) << to; };
    const auto three = [](uint32_t c, int to) { return (c & 7u) << to; };
    uint32_t h = at(c2, 3, 9) | three(c2, 3) | at(c3, 3, 6) | three(c3, 0);
    h |= at(c0, 3, 15) ^ above << 15;
    h |= at(c1, 3, 13) ^ at(h, 15, 13);  // bits 15 and 13 together
    h |= (at(c1, 2, 11) ^ at(h, 9, 11)) | (at(c1, 0, 7) ^ at(h, 9, 7));
    h |= (at(c0, 1, 10) ^ at(h, 13, 10)) | (at(c0, 0, 12) ^ at(h, 9, 12));
    h |= (at(c0, 2, 14) ^ at(h, 11, 14)) | (at(c1, 1, 8) ^ at(h, 10, 8));
    return h;
}

// The f32 of scale byte `i` of a tile's word; 0 stands for what is 2^128 times smaller than the
// largest of its row.
__device__ __forceinline__ float scale_of(uint32_t scales, int i) {
    const uint32_t bits = i == 0   ? scales << 23
                          : i == 1 ? scales << 15
                          : i == 2 ? scales << 7
                                   : scales >> 1;
    return __uint_as_float(bits & 0x7f800000u);
}

}  // namespace kv8
