/* simd/unroll.h - how a kernel template says "this function is inlined with its constant
 * arguments", "this loop of constant length is unrolled", so that arrays of vectors become
 * registers, and "this vector is loaded once". Compiler words, hence here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_UNROLL_H
#define KV8_SIMD_UNROLL_H

#define V_INLINE static inline __attribute__((always_inline))

/* A function of its own: its loop gets all registers. */
#define V_NOINLINE __attribute__((noinline))

/* Before a `for` of constant length <= 32. A sanitizer's build may have defined it as nothing. */
#if defined(V_UNROLL)
#elif defined(__clang__)
#define V_UNROLL _Pragma("clang loop unroll(full)")
#else
#define V_UNROLL _Pragma("GCC unroll 32")
#endif

/* The vector v stays in a register: gcc otherwise repeats its load inside every FMA that uses it,
 * and the loads become the limit. */
#if defined(__x86_64__)
#define V_KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define V_KEEP(v) __asm__("" : "+w"(v))
#else
#define V_KEEP(v) ((void)(v))
#endif

/* The line at this address will be read soon; any address is allowed. */
#define V_PREFETCH(address) __builtin_prefetch(address)
/* It will be read later: into the second level of cache. */
#define V_PREFETCH_L2(address) __builtin_prefetch(address, 0, 2)

#endif
