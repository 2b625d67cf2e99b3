/* simd/subnormals.h - subnormal f32 as 0 for a while. x86-64 takes a hundred cycles for one, so
 * that time would depend on values; other processors take them as they come.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMD_SUBNORMALS_H
#define KV8_SIMD_SUBNORMALS_H

#if defined(__x86_64__)
#include <xmmintrin.h>
enum { KV8_SUBNORMALS_ARE_0 = 0x8040 /* of results, and of operands */ };

/* Returns the thread's state before. */
static inline unsigned kv8_subnormals_off(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | KV8_SUBNORMALS_ARE_0);
    return before;
}
static inline void kv8_subnormals_restore(unsigned before) {
    const unsigned mask = KV8_SUBNORMALS_ARE_0;
    _mm_setcsr((_mm_getcsr() & ~mask) | (before & mask));
}
#else
static inline unsigned kv8_subnormals_off(void) {
    return 0;
}
static inline void kv8_subnormals_restore(unsigned before) {
    (void)before;
}
#endif

#endif
