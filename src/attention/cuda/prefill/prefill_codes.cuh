// prefill_codes.cuh - codes of any format to f16, exactly and on every GPU, one stored value at a
// time, and O in 8 bits: for kernels that know their formats at run time alone.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "codec.cuh"
#include "ptx_sm80.cuh"
#include "widen.cuh"

namespace kv8 {

__host__ __device__ constexpr bool is_wide(int dtype) {
    return dtype == BF16 || dtype == F16;
}
__device__ __forceinline__ uint32_t multiply_f16(uint32_t a, uint32_t b) {
    const __half2 r = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&r;
}
// Two codes of sign, four bits of exponent, three of mantissa, at bytes 1 and 3, as f16 numbers:
// 2^(15 - bias) too small, subnormal ones included.
__device__ __forceinline__ uint32_t f8_bits(uint32_t codes) {
    return (codes >> 1 & 0x3f803f80u) | (codes & 0x80008000u);
}
// NaN is the code of 480, the first number that 144 (a factor of nine times 2^4, so exact) takes
// beyond f16; infinity times 0 is NaN.
__device__ __forceinline__ uint32_t e4m3_by_bits(uint32_t codes) {
    const uint32_t small = f8_bits(codes);
    const uint32_t real = multiply_f16(small, 0x5c005c00u);    // 2^8
    const uint32_t beyond = multiply_f16(small, 0x78807880u);  // 2^8 * 144
    const __half2 r = __hfma2(*(const __half2 *)&beyond, __half2half2(__ushort_as_half(0)),
                              *(const __half2 *)&real);
    return *(const uint32_t *)&r;
}
// NaN is the code of -0.
__device__ __forceinline__ uint32_t e4m3fnuz_by_bits(uint32_t codes) {
    const uint32_t real = multiply_f16(f8_bits(codes), 0x58005800u);  // 2^7
    const uint32_t zeros = __heq2_mask(*(const __half2 *)&real, __half2half2(__ushort_as_half(0)));
    const uint32_t minus = real & zeros & 0x80008000u;
    return real | (minus - (minus >> 6));
}
// Four codes to two pairs of f16, exactly.
template <int FORMAT>
__device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t &low, uint32_t &high) {
    const uint32_t first = __byte_perm(codes, 0, 0x1404), last = __byte_perm(codes, 0, 0x3424);
    if constexpr (FORMAT == E5M2) {  // the upper half of an f16
        low = first, high = last;
    } else if constexpr (FORMAT == E4M3FNUZ) {
        low = e4m3fnuz_by_bits(first), high = e4m3fnuz_by_bits(last);
    } else if constexpr (FORMAT == INT8) {
        widen4<INT8>(codes, low, high);
    } else {
#if __CUDA_ARCH__ >= 890 && !defined(KV8_E4M3_BY_BITS)
        widen4<E4M3>(codes, low, high);
#else
        low = e4m3_by_bits(first), high = e4m3_by_bits(last);
#endif
    }
}
// O of 8 bits: two codes of e4m3 or e5m2.
#if __CUDA_ARCH__ >= 890 && !defined(KV8_E4M3_BY_BITS)
__device__ __forceinline__ uint32_t pack_codes(int dtype, float x, float y) {
    return dtype == E4M3 ? pack_e4m3(x, y) : pack_e5m2(x, y);
}
#else
static __device__ __noinline__ uint32_t pack_codes(int dtype, float x, float y) {
    return dtype == E4M3 ? kv8_e4m3_encode(x) | kv8_e4m3_encode(y) << 8
                         : kv8_e5m2_encode(x) | kv8_e5m2_encode(y) << 8;
}
#endif
// One value of a row of any format.
__device__ __forceinline__ float value_of(int dtype, const uint8_t *row, int at) {
    uint32_t low = 0, high;
    switch (dtype) {
        case BF16: return __uint_as_float((uint32_t)((const uint16_t *)row)[at] << 16);
        case F16: return __half2float(((const __half *)row)[at]);
        case INT8: return (float)((const int8_t *)row)[at];
        case E4M3: widen_codes<E4M3>(row[at], low, high); break;
        case E4M3FNUZ: widen_codes<E4M3FNUZ>(row[at], low, high); break;
        case E5M2: widen_codes<E5M2>(row[at], low, high); break;
    }
    return __half2float(__ushort_as_half((uint16_t)low));
}

}  // namespace kv8
