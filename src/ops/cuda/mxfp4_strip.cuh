// mxfp4_strip.cuh - eight MXFP4 codes of a word as f16, and back.
//
// A code of e2m1 is an f16 that has its sign at bit 15 and its other three bits at 11 to 9, times
// 2^14: that holds for 0.5 too, which becomes a subnormal. The word is coded so that each pair of
// f16 is a shift or two and one mask away; both halves of the word are coded alike, the lower one
// holding the pairs' first codes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

namespace kv8 {

constexpr uint32_t CODE_BITS = 0x8e008e00u;
constexpr float CODE_FACTOR = 16384.0f;  // of what widen_codes gives

__device__ __forceinline__ void widen_codes(uint32_t word, uint32_t (&pairs)[4]) {
    pairs[0] = word & CODE_BITS;
    pairs[1] = (word << 3) & CODE_BITS;
    pairs[2] = ((word << 6) ^ (word << 1)) & CODE_BITS;
    pairs[3] = ((word << 9) ^ (word << 2)) & CODE_BITS;
}

// A half of a word from its four codes: what widen_codes undoes, bit by bit from the top.
__device__ __forceinline__ uint32_t code_half(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    const auto at = [](uint32_t x, int from, int to) { return (x >> from & 1u) << to; };
    uint32_t h = at(c0, 3, 15) | at(c0, 2, 11) | at(c0, 1, 10) | at(c0, 0, 9);
    h |= at(c1, 3, 12) | at(c1, 2, 8) | at(c1, 1, 7) | at(c1, 0, 6);
    // Bit i of c2 comes from i - 6 and i - 1 together, of c3 from i - 9 and i - 2.
    h |= (at(c2, 3, 14) ^ at(h, 9, 14)) | (at(c2, 2, 5) ^ at(h, 10, 5));
    h |= (at(c2, 1, 4) ^ at(h, 9, 4)) | (at(c2, 0, 3) ^ at(h, 8, 3));
    h |= (at(c3, 3, 13) ^ at(h, 6, 13)) | (at(c3, 2, 2) ^ at(h, 9, 2));
    h |= (at(c3, 1, 1) ^ at(h, 8, 1)) | (at(c3, 0, 0) ^ at(h, 7, 0));
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
