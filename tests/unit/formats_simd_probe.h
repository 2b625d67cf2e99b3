/* formats_simd_probe.h - lets a test reach the bf16 words of formats_simd.h, which only a file
 * with the rung's compiler flags can use.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_SIMD_PROBE_H
#define KV8_FORMATS_SIMD_PROBE_H

#include <stdbool.h>

#include <kv8/formats.h>

#if defined(__aarch64__)
#define PROBE_BF16_ISA KV8_ISA_NEON_BF16
#else
#define PROBE_BF16_ISA KV8_ISA_AVX512_BF16
#endif

/* e4m3 by the words of a format without its own, in the calls below. */
enum { PROBE_CODE = KV8_DTYPE_COUNT };

/* 32, 8, or 0 where the probe was built without a bf16 rung. */
int probe_bf16_lanes(void);
/* All lanes of v_widenL_bf16_D(codes) for n = L, of v_widenL_bf16_D_n(codes, n) below. */
void probe_bf16(int dtype, const void *codes, int n, uint16_t *bf16_out);

/* Of one byte a code, two rows of 64: even, odd. Both widened in order [2][64], as pairs [64][2],
 * and the same as unpacking leaves them (where: see v_widen64_bf16_quarters). False: no words. */
typedef struct probe_64 {
    uint16_t in_order[2][64], pairs[128], quarters[2][64], pair_quarters[128];
} probe_64;
bool probe_bf16_64(int dtype, const void *even, const void *odd, probe_64 *out);

#endif
