/* simd/unroll.h - how a kernel template says "this function is inlined with its constant
 * arguments" and "this loop of constant length is unrolled", so that arrays of vectors become
 * registers. Compiler words, hence here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_UNROLL_H
#define KV8_SIMD_UNROLL_H

#define V_INLINE static inline __attribute__((always_inline))

/* Before a `for` of constant length <= 32. */
#if defined(__clang__)
#define V_UNROLL _Pragma("clang loop unroll(full)")
#else
#define V_UNROLL _Pragma("GCC unroll 32")
#endif

#endif
