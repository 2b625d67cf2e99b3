/* formats_simd_probe.c - see the header; built with the bf16 rung's flags.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "formats_simd_probe.h"

#include <string.h>

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#include "simd/avx512.h"

#include "formats_simd.h"
#define LANES              32
#define WORD(name)         v_widen32_bf16_##name
#define STORE(p, a)        _mm512_storeu_si512(p, a)
#define kv8_by_code_decode kv8_e4m3_decode
KV8_WORDS_CODE(by_code)
KV8_BF16_WORDS_CODE(by_code)
KV8_WIDEN64(by_code)
#elif defined(__aarch64__)
#include "simd/neon.h"

#include "formats_simd.h"
#define LANES              8
#define WORD(name)         v_widen8_bf16_##name
#define STORE(p, a)        vst1q_u16(p, a)
#define kv8_by_code_decode kv8_e4m3_decode
KV8_WORDS_CODE(by_code)
KV8_WIDEN8(by_code)
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
void probe_bf16(int dtype, const void *codes, int n, uint16_t *bf16_out) {
    switch (dtype) {
        case KV8_BF16: PROBE(bf16);
        case KV8_E4M3: PROBE(e4m3);
        case KV8_E4M3FNUZ: PROBE(e4m3fnuz);
        case KV8_E5M2: PROBE(e5m2);
        case PROBE_CODE: PROBE(by_code);
        default: PROBE(int8);
    }
}
#else
void probe_bf16(int dtype, const void *codes, int n, uint16_t *bf16_out) {
    (void)dtype, (void)codes, (void)n, (void)bf16_out;
}
#endif

#if LANES == 32
#define PROBE_64(name)                                              \
    for (int row = 0; row < 2; row++) {                             \
        const void *const codes = row == 0 ? even : odd;            \
        v_widen64_bf16_##name(codes, in_order[row]);                \
        v_widen64_bf16_quarters_##name(codes, quarters[row]);       \
    }                                                               \
    v_widen64_pairs_bf16_##name(even, odd, pairs);                  \
    v_widen64_pairs_bf16_quarters_##name(even, odd, pair_quarters); \
    break
bool probe_bf16_64(int dtype, const void *even, const void *odd, probe_64 *out) {
    __m512i in_order[2][2], quarters[2][2], pairs[4], pair_quarters[4];
    switch (dtype) {
        case KV8_E4M3: PROBE_64(e4m3);
        case KV8_E4M3FNUZ: PROBE_64(e4m3fnuz);
        case KV8_E5M2: PROBE_64(e5m2);
        case KV8_INT8: PROBE_64(int8);
        case PROBE_CODE: PROBE_64(by_code);
        default: return false;
    }
    memcpy(out->in_order, in_order, sizeof in_order);
    memcpy(out->quarters, quarters, sizeof quarters);
    memcpy(out->pairs, pairs, sizeof pairs);
    memcpy(out->pair_quarters, pair_quarters, sizeof pair_quarters);
    return true;
}
#else
bool probe_bf16_64(int dtype, const void *even, const void *odd, probe_64 *out) {
    (void)dtype, (void)even, (void)odd, (void)out;
    return false;
}
#endif
