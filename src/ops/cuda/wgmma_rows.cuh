// wgmma_rows.cuh - wgmma with weights in registers times rows in shared memory, f16 with f32 sums,
// for 16, 32, .. 96, 128, 160, 192 rows.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm90.cuh"

namespace kv8 {

#define KV8_R16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                             \
    "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h ", %" #i ", %" #j \
    ", %" #k ", %" #l ", %" #m ", %" #n ", %" #o ", %" #p
#define KV8_R8(a, b, c, d, e, f, g, h) \
    "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define KV8_R0_7  KV8_R8(0, 1, 2, 3, 4, 5, 6, 7)
#define KV8_R0_15 KV8_R16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define KV8_R0_31 \
    KV8_R0_15 ", " KV8_R16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
#define KV8_R0_47 \
    KV8_R0_31 ", " KV8_R16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47)
#define KV8_R0_23 KV8_R0_15 ", " KV8_R8(16, 17, 18, 19, 20, 21, 22, 23)
#define KV8_R0_39 KV8_R0_31 ", " KV8_R8(32, 33, 34, 35, 36, 37, 38, 39)
#define KV8_R0_63 \
    KV8_R0_47 ", " KV8_R16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)
#define KV8_R0_79 \
    KV8_R0_63 ", " KV8_R16(64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79)
#define KV8_R0_95 \
    KV8_R0_79 ", " KV8_R16(80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95)
#define KV8_S8(d, i)                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define KV8_S0_8(d) KV8_S8(d, 0)
#define KV8_S16(d)  KV8_S8(d, 0), KV8_S8(d, 8)
#define KV8_S24(d)  KV8_S16(d), KV8_S8(d, 16)
#define KV8_S32(d)  KV8_S24(d), KV8_S8(d, 24)
#define KV8_S40(d)  KV8_S32(d), KV8_S8(d, 32)
#define KV8_S48(d)  KV8_S40(d), KV8_S8(d, 40)
#define KV8_S64(d)  KV8_S48(d), KV8_S8(d, 48), KV8_S8(d, 56)
#define KV8_S80(d)  KV8_S64(d), KV8_S8(d, 64), KV8_S8(d, 72)
#define KV8_S96(d)  KV8_S80(d), KV8_S8(d, 80), KV8_S8(d, 88)

// d (64 x N) += A (64 x 16, registers) * B (16 x N, shared, k along the rows).
template <int N>
__device__ __forceinline__ void wgmma_rows(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);
#define KV8_WGMMA_ROWS(N, REGS, D, A0, A1, A2, A3, B)                                            \
    template <>                                                                                  \
    __device__ __forceinline__ void wgmma_rows<N>(float(&d)[N / 2], const uint32_t(&a)[4],       \
                                                  uint64_t b) {                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGS "}, {%" #A0 \
                     ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;\n"                   \
                     : D(d)                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
    }
KV8_WGMMA_ROWS(16, KV8_R0_7, KV8_S0_8, 8, 9, 10, 11, 12)
KV8_WGMMA_ROWS(32, KV8_R0_15, KV8_S16, 16, 17, 18, 19, 20)
KV8_WGMMA_ROWS(48, KV8_R0_23, KV8_S24, 24, 25, 26, 27, 28)
KV8_WGMMA_ROWS(64, KV8_R0_31, KV8_S32, 32, 33, 34, 35, 36)
KV8_WGMMA_ROWS(80, KV8_R0_39, KV8_S40, 40, 41, 42, 43, 44)
KV8_WGMMA_ROWS(96, KV8_R0_47, KV8_S48, 48, 49, 50, 51, 52)
KV8_WGMMA_ROWS(128, KV8_R0_63, KV8_S64, 64, 65, 66, 67, 68)
KV8_WGMMA_ROWS(160, KV8_R0_79, KV8_S80, 80, 81, 82, 83, 84)
KV8_WGMMA_ROWS(192, KV8_R0_95, KV8_S96, 96, 97, 98, 99, 100)

}  // namespace kv8
