/* block_codec_scalar.c - the block conversions, one number at a time: what every other rung is
 * compared with.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "block_codec.h"
#include "scalar_codec.h"

/* Codes may lie at any address: read and written through memcpy. */
#define WIDEN(name, type, decode)                                              \
    static void widen_##name(const void *codes, size_t n, float *values_out) { \
        const char *const bytes = codes;                                       \
        for (size_t i = 0; i < n; i++) {                                       \
            type code;                                                         \
            memcpy(&code, bytes + i * sizeof code, sizeof code);               \
            values_out[i] = decode(code);                                      \
        }                                                                      \
    }

static float int8_decode(int8_t code) {
    return (float)code;
}

static void widen_f32(const void *codes, size_t n, float *values_out) {
    if (n > 0) memcpy(values_out, codes, n * sizeof *values_out);
}
WIDEN(bf16, uint16_t, kv8_bf16_decode)
WIDEN(f16, uint16_t, kv8_f16_decode)
#define FLOAT8(words, rule, name, dtype, mantissa, bias, max) \
    WIDEN(name, uint8_t, kv8_##name##_decode)
KV8_FLOAT8_FORMATS(FLOAT8)
#undef FLOAT8
WIDEN(int8, int8_t, int8_decode)

#define NARROW(name, dtype, type, encode)                                                  \
    static void narrow_##name(const float *values, size_t n, float scale, void *codes_out, \
                              kv8_narrow_counts *counts) {                                 \
        char *const bytes = codes_out;                                                     \
        const float max = kv8_dtype_max(dtype);                                            \
        for (size_t i = 0; i < n; i++) {                                                   \
            const float quotient = values[i] / scale;                                      \
            const type code = encode(quotient);                                            \
            memcpy(bytes + i * sizeof code, &code, sizeof code);                           \
            counts->clips += fabsf(quotient) > max;                                        \
            counts->nans += isnan(quotient) != 0;                                          \
        }                                                                                  \
    }

static uint32_t f32_encode_saturating(float value) {
    const uint32_t bits = kv8_f32_bits(value);
    return (bits & KV8_F32_ABS) == KV8_F32_INF ? bits - 1u : bits; /* infinity: to FLT_MAX */
}
static uint16_t bf16_encode_saturating(float value) {
    return kv8_bf16_encode(value, KV8_BF16_MAX);
}
static uint16_t f16_encode_saturating(float value) {
    return kv8_f16_encode(value, 65504.0f);
}
static int8_t int8_encode(float value) {
    const float clamped = value > 127 ? 127 : value < -127 ? -127 : value;
    return (int8_t)lrintf(clamped); /* ties to even */
}

NARROW(f32, KV8_F32, uint32_t, f32_encode_saturating)
NARROW(bf16, KV8_BF16, uint16_t, bf16_encode_saturating)
NARROW(f16, KV8_F16, uint16_t, f16_encode_saturating)
#define FLOAT8(words, rule, name, dtype, mantissa, bias, max) \
    NARROW(name, dtype, uint8_t, kv8_##name##_encode)
KV8_FLOAT8_FORMATS(FLOAT8)
#undef FLOAT8
NARROW(int8, KV8_INT8, int8_t, int8_encode)

static void row_range(const float *values, size_t n, kv8_row_range *range_out) {
    kv8_row_range range = {0};
    for (size_t i = 0; i < n; i++) {
        const float magnitude = fabsf(values[i]);
        if (isnan(magnitude)) {
            range.nans++;
        } else if (isinf(magnitude)) {
            range.infs++;
        } else if (magnitude > range.absmax) {
            range.absmax = magnitude;
        }
    }
    *range_out = range;
}

static void mxfp4_widen(const uint8_t *blocks, const kv8_e8m0 *scales, size_t num_blocks,
                        float *values_out) {
    for (size_t block = 0; block < num_blocks; block++) {
        const float scale = kv8_e8m0_decode(scales[block].bits);
        const uint8_t *const bytes = blocks + block * KV8_MXFP4_BLOCK_BYTES;
        float *const values = values_out + block * KV8_MXFP4_BLOCK;
        for (size_t b = 0; b < KV8_MXFP4_BLOCK_BYTES; b++) {
            values[2 * b] = kv8_e2m1_decode(bytes[b] & 15u) * scale;
            values[2 * b + 1] = kv8_e2m1_decode(bytes[b] >> 4) * scale;
        }
    }
}

#define FLOAT8_WIDEN(words, rule, name, dtype, mantissa, bias, max)  [dtype] = widen_##name,
#define FLOAT8_NARROW(words, rule, name, dtype, mantissa, bias, max) [dtype] = narrow_##name,
const kv8_formats_kernels kv8_formats_kernels_scalar = {
    .widen = {[KV8_F32] = widen_f32,
              [KV8_BF16] = widen_bf16,
              [KV8_F16] = widen_f16,
              KV8_FLOAT8_FORMATS(FLOAT8_WIDEN)[KV8_INT8] = widen_int8},
    .narrow = {[KV8_F32] = narrow_f32,
               [KV8_BF16] = narrow_bf16,
               [KV8_F16] = narrow_f16,
               KV8_FLOAT8_FORMATS(FLOAT8_NARROW)[KV8_INT8] = narrow_int8},
    .row_range = row_range,
    .mxfp4_widen = mxfp4_widen,
};
