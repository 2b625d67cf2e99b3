/* ceiling_avx512_bf16.c - the rate of vdpbf16ps: pairs of bf16 products summed in f32.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>
#include <stddef.h>

#include "ceiling.h"

/* As kv8_ceiling_fma; 12 * 32 products per round. */
float kv8_ceiling_bf16__avx512_bf16(size_t rounds) {
    enum { CHAINS = 12 };
    __m512 sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) sum[c] = _mm512_set1_ps((float)c);
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00); /* 2^-7 */
    for (size_t i = 0; i < rounds; i++) {
        for (int c = 0; c < CHAINS; c++) sum[c] = _mm512_dpbf16_ps(sum[c], a, a);
    }
    for (int c = 1; c < CHAINS; c++) sum[0] = _mm512_add_ps(sum[0], sum[c]);
    return _mm512_reduce_add_ps(sum[0]);
}
