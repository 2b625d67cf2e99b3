// prefill_reference.cuh - what the weights P of a row are relative to: its maximum, in log2 units.
// Exponentials of most tiles take it as one number; a maximum so large that its rounding counts is
// two, and has no such number.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/softmax.cuh"

namespace kv8 {

// Maxima beyond this are so far apart that their differences must be exact.
constexpr float LARGE_SCORE = 0x1p24f;
// In place of a maximum that is large, or of no key yet: any score makes P infinite, and the row is
// looked at.
constexpr float NO_MAXIMUM = -0x1.fffffep127f;

struct Reference {
    float units, rest;  // rest: what rounding left, where that counts
};
__device__ __forceinline__ bool is_large(float units) {
    return fabsf(units) >= LARGE_SCORE;
}
// top: the maximum as S has it; factor: to log2 units.
__device__ __forceinline__ Reference reference_of(float top, float factor) {
    const float units = top == -INFINITY ? 0.0f : top * factor;
    return {units, is_large(units) ? fmaf(top, factor, -units) : 0.0f};
}
// As one number.
__device__ __forceinline__ float maximum_of(float top, float factor) {
    const float units = top * factor;
    return top == -INFINITY || is_large(units) ? NO_MAXIMUM : units;
}
__device__ __forceinline__ float weight_of(float score, float factor, const Reference &to) {
    return exp2_fast(fmaf(score, factor, -to.units) - to.rest);
}
// What sums relative to one maximum are to be multiplied by for another.
__device__ __forceinline__ float rescaling(float before, float top, float factor) {
    const Reference from = reference_of(before, factor), to = reference_of(top, factor);
    return before == -INFINITY ? 0.0f : exp2_fast((from.units - to.units) + (from.rest - to.rest));
}

}  // namespace kv8
