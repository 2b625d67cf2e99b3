/* formats_simd_probe.c - see the header; built with the bf16 rung's flags.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "formats_simd_probe.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#include "simd/avx512.h"

#include "formats_simd.h"
#define LANES       32
#define WORD(name)  v_widen32_bf16_##name
#define STORE(p, a) _mm512_storeu_si512(p, a)
#elif defined(__aarch64__)
#include "simd/neon.h"

#include "formats_simd.h"
#define LANES       8
#define WORD(name)  v_widen8_bf16_##name
#define STORE(p, a) vst1q_u16(p, a)
#else
#define LANES 0
#endif

int probe_bf16_lanes(void) {
    return LANES;
}

#if LANES > 0
#define PROBE(name)                                \
    if (n == LANES) {                              \
        STORE(bf16_out, WORD(name)(codes));        \
    } else {                                       \
        STORE(bf16_out, WORD(name##_n)(codes, n)); \
    }                                              \
    break
void probe_bf16(kv8_dtype dtype, const void *codes, int n, uint16_t *bf16_out) {
    switch (dtype) {
        case KV8_BF16: PROBE(bf16);
        case KV8_E4M3: PROBE(e4m3);
        case KV8_E4M3FNUZ: PROBE(e4m3fnuz);
        case KV8_E5M2: PROBE(e5m2);
        default: PROBE(int8);
    }
}
#else
void probe_bf16(kv8_dtype dtype, const void *codes, int n, uint16_t *bf16_out) {
    (void)dtype, (void)codes, (void)n, (void)bf16_out;
}
#endif
