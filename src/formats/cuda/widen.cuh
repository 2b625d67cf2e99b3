// widen.cuh - 8-bit codes to f16 in pairs, exactly, as the tensor cores take them.
//
// Formats are numbered as in kv8_dtype. One value at a time, by definition: codec.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <kv8/formats.h>

namespace kv8 {

// Formats of K and V, as template arguments.
enum Format : int {
    BF16 = KV8_BF16,
    F16 = KV8_F16,
    E4M3 = KV8_E4M3,
    E4M3FNUZ = KV8_E4M3FNUZ,
    E5M2 = KV8_E5M2,
    INT8 = KV8_INT8
};

__host__ __device__ constexpr int size_of(Format f) {
    return f == BF16 || f == F16 ? 2 : 1;
}

__device__ inline uint32_t e4m3_pair(uint32_t codes) {  // low two bytes -> f16x2
    uint32_t r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }"
        : "=r"(r)
        : "r"(codes));
    return r;
}
__device__ inline uint32_t e4m3_pair_high(uint32_t codes) {
    uint32_t r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }"
        : "=r"(r)
        : "r"(codes));
    return r;
}
__device__ inline uint32_t e5m2_pair(uint32_t codes) {
    uint32_t r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e5m2x2 %0, l; }"
        : "=r"(r)
        : "r"(codes));
    return r;
}
__device__ inline uint32_t e5m2_pair_high(uint32_t codes) {
    uint32_t r;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e5m2x2 %0, h; }"
        : "=r"(r)
        : "r"(codes));
    return r;
}
// Two codes, sign bits turned, beside 0x64 each: the f16 numbers 1024 + 128 + code. Exact, and so
// is the rest.
__device__ inline uint32_t int8_pair(uint32_t raised) {
    const __half2 r = __hsub2(*reinterpret_cast<const __half2 *>(&raised),
                              __half2half2(__ushort_as_half(0x6480)));
    return *reinterpret_cast<const uint32_t *>(&r);
}

// Four codes of one word, widened: {0, 1} to lo, {2, 3} to hi.
template <Format F>
__device__ inline void widen4(uint32_t codes, uint32_t &lo, uint32_t &hi) {
    if constexpr (F == E4M3) {
        lo = e4m3_pair(codes), hi = e4m3_pair_high(codes);
    } else if constexpr (F == E5M2) {
        lo = e5m2_pair(codes), hi = e5m2_pair_high(codes);
    } else {
        static_assert(F == INT8);
        codes ^= 0x80808080u;
        lo = int8_pair(__byte_perm(codes, 0x64646464u, 0x4140)),
        hi = int8_pair(__byte_perm(codes, 0x64646464u, 0x4342));
    }
}

// The same for K: int8 as 2^-24 * (code + 128), denormal numbers of f16, which are their own codes.
template <Format F>
__device__ inline void widen4_key(uint32_t codes, uint32_t &lo, uint32_t &hi) {
    if constexpr (F == INT8) {
        codes ^= 0x80808080u;
        lo = __byte_perm(codes, 0, 0x4140), hi = __byte_perm(codes, 0, 0x4342);
    } else {
        widen4<F>(codes, lo, hi);
    }
}

// One stored element.
template <Format F>
__device__ inline float widen_one(const uint8_t *row, int d) {
    if constexpr (F == BF16)
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(row)[d]);
    else if constexpr (F == F16)
        return __half2float(reinterpret_cast<const __half *>(row)[d]);
    else if constexpr (F == E5M2)
        return __half2float(__ushort_as_half(static_cast<unsigned short>(row[d] << 8)));
    else if constexpr (F == INT8)
        return static_cast<float>(static_cast<int8_t>(row[d]));
    else
        return __half2float(__ushort_as_half(static_cast<unsigned short>(e4m3_pair(row[d]))));
}

}  // namespace kv8
