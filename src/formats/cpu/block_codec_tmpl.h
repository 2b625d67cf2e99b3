/* block_codec_tmpl.h - the block conversions on vectors: the loops and the rounding, once for all
 * rungs. A rung's file brings base's vocabulary, formats_simd.h and, for integers:
 *
 *   v_i32, v_mask                      V_LANES 32-bit integers; one truth value a lane
 *   i_set1 i_and i_or i_add i_sub      i_min and i_max are signed
 *   i_srl(a, constant)                 a macro: the count is an immediate
 *   i_gt(a, b) -> v_mask, signed       i_select(mask, yes, no), i_count(mask)
 *   i_bits(v_f32), i_float(v_i32)      reinterpret
 *   i_round(v_f32)                     to nearest, ties to even
 *   i_f16(v_f32)                       f16 codes in the lanes, as IEEE 754 (overflow to infinity)
 *   i_store_u8, i_store_u16, i_store_u32 (void *, v_i32)  low bytes of V_LANES lanes
 *   i_reduce_max(v_i32)
 *   mxfp4_block_widen(bytes, scale, values_out)  one block
 *
 * Unused lanes of a tail hold 0, which encodes as 0 and counts nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "../block_codec.h"
#include "../scalar_codec.h"

/* --- widen --- */

#define WIDEN(name, size)                                                                  \
    static void widen_##name(const void *codes, size_t n, float *values_out) {             \
        const uint8_t *const bytes = codes;                                                \
        size_t i = 0;                                                                      \
        for (; i + V_LANES <= n; i += V_LANES)                                             \
            v_store(values_out + i, v_widen_##name(bytes + i * (size)));                   \
        if (i < n) {                                                                       \
            const int left = (int)(n - i);                                                 \
            v_store_n(values_out + i, v_widen_##name##_n(bytes + i * (size), left), left); \
        }                                                                                  \
    }
WIDEN(f32, 4)
WIDEN(bf16, 2)
WIDEN(f16, 2)
#define FLOAT8_WIDEN(words, rule, name, dtype, mantissa, bias, max) WIDEN(name, 1)
KV8_FLOAT8_FORMATS(FLOAT8_WIDEN)
#undef FLOAT8_WIDEN
WIDEN(int8, 1)

static void mxfp4_widen(const uint8_t *blocks, const kv8_e8m0 *scales, size_t num_blocks,
                        float *values_out) {
    for (size_t block = 0; block < num_blocks; block++)
        mxfp4_block_widen(blocks + block * KV8_MXFP4_BLOCK_BYTES,
                          kv8_e8m0_decode(scales[block].bits),
                          values_out + block * KV8_MXFP4_BLOCK);
}

/* --- narrow: quotients to codes --- */

/* A quotient taken apart: `magnitude` is the bits without sign, clamped to the format's max. */
typedef struct quotient {
    v_i32 bits, magnitude;
    v_mask is_nan;
} quotient;

static inline quotient quotient_split(v_f32 value, uint32_t max, kv8_narrow_counts *counts) {
    quotient q;
    q.bits = i_bits(value);
    const v_i32 magnitude = i_and(q.bits, i_set1(KV8_F32_ABS));
    const v_mask over = i_gt(magnitude, i_set1(max)); /* NaN too */
    q.is_nan = i_gt(magnitude, i_set1(KV8_F32_INF));
    q.magnitude = i_min(magnitude, i_set1(max));
    const unsigned num_over = i_count(over);
    if (num_over > 0) {
        const unsigned num_nan = i_count(q.is_nan);
        counts->clips += num_over - num_nan;
        counts->nans += num_nan;
    }
    return q;
}

/* kv8_magnitude_encode of scalar_codec.h, lane by lane. */
#define MAGNITUDE_ENCODE(name, mantissa, bias)                                                 \
    static inline v_i32 magnitude_encode_##name(v_i32 magnitude) {                             \
        const uint32_t rebias = 127u - (bias), magic = (rebias + 1u + 23u - (mantissa)) << 23; \
        const v_i32 count =                                                                    \
            i_sub(i_bits(v_add(i_float(magnitude), i_float(i_set1(magic)))), i_set1(magic));   \
        const v_i32 odd = i_and(i_srl(magnitude, 23 - (mantissa)), i_set1(1));                 \
        const v_i32 up = i_add(magnitude, i_add(odd, i_set1((1u << (22 - (mantissa))) - 1u))); \
        const v_i32 normal = i_sub(i_srl(up, 23 - (mantissa)), i_set1(rebias << (mantissa)));  \
        const v_i32 smallest_normal = i_set1((rebias + 1u) << 23);                             \
        return i_select(i_gt(smallest_normal, magnitude), count, normal);                      \
    }

#define ENCODE_SIGNED(name, max)                                                                   \
    static inline v_i32 encode_##name(v_f32 value, kv8_narrow_counts *counts) {                    \
        const quotient q = quotient_split(value, kv8_f32_bits(max), counts);                       \
        const v_i32 code = i_select(q.is_nan, i_set1(0x7f), magnitude_encode_##name(q.magnitude)); \
        return i_or(code, i_and(i_srl(q.bits, 24), i_set1(0x80)));                                 \
    }
#define ENCODE_UNSIGNED(name, max)                                                              \
    static inline v_i32 encode_##name(v_f32 value, kv8_narrow_counts *counts) {                 \
        const quotient q = quotient_split(value, kv8_f32_bits(max), counts);                    \
        const v_i32 magnitude = magnitude_encode_##name(q.magnitude);                           \
        const v_i32 code = i_or(magnitude, i_and(i_srl(q.bits, 24), i_set1(0x80)));             \
        const v_i32 number = i_select(i_gt(magnitude, i_set1(0)), code, i_set1(0)); /* no -0 */ \
        return i_select(q.is_nan, i_set1(0x80), number);                                        \
    }
#define FLOAT8(words, rule, name, dtype, mantissa, bias, max) \
    MAGNITUDE_ENCODE(name, mantissa, bias)                    \
    ENCODE_##rule(name, max)
KV8_FLOAT8_FORMATS(FLOAT8)
#undef FLOAT8

static inline v_i32 encode_f16(v_f32 value, kv8_narrow_counts *counts) {
    const quotient q = quotient_split(value, kv8_f32_bits(65504), counts);
    const v_i32 sign = i_and(q.bits, i_set1(~KV8_F32_ABS));
    return i_f16(i_float(i_select(q.is_nan, q.bits, i_or(q.magnitude, sign))));
}
static inline v_i32 encode_bf16(v_f32 value, kv8_narrow_counts *counts) {
    const quotient q = quotient_split(value, KV8_BF16_MAX, counts);
    const v_i32 odd = i_and(i_srl(q.magnitude, 16), i_set1(1));
    const v_i32 up = i_add(q.magnitude, i_add(odd, i_set1(0x7fff)));
    const v_i32 sign = i_and(q.bits, i_set1(~KV8_F32_ABS));
    const v_i32 nan = i_or(q.bits, i_set1(KV8_F32_QUIET));
    return i_srl(i_select(q.is_nan, nan, i_or(up, sign)), 16);
}
static inline v_i32 encode_f32(v_f32 value, kv8_narrow_counts *counts) {
    const quotient q = quotient_split(value, KV8_F32_INF - 1u, counts);
    const v_i32 sign = i_and(q.bits, i_set1(~KV8_F32_ABS));
    const v_i32 nan = i_or(q.bits, i_set1(KV8_F32_QUIET));
    return i_select(q.is_nan, nan, i_or(q.magnitude, sign));
}
static inline v_i32 encode_int8(v_f32 value, kv8_narrow_counts *counts) {
    (void)quotient_split(value, 0x42fe0000, counts); /* 127 */
    return i_round(v_min(v_max(value, v_set1(-127.0f)), v_set1(127.0f)));
}

/* Formats that hold subnormals are not divided by 1: x86-64 takes a hundred cycles for each. */
#define DIVIDE(value)     v_div(value, divisor)
#define DIVIDE_ANY(value) (scale == 1.0f ? (value) : v_div(value, divisor))

#define NARROW(name, size, divide, store)                                                  \
    static void narrow_##name(const float *values, size_t n, float scale, void *codes_out, \
                              kv8_narrow_counts *counts) {                                 \
        uint8_t *const bytes = codes_out;                                                  \
        const v_f32 divisor = v_set1(scale);                                               \
        size_t i = 0;                                                                      \
        for (; i + V_LANES <= n; i += V_LANES)                                             \
            store(bytes + i * (size), encode_##name(divide(v_load(values + i)), counts));  \
        if (i < n) {                                                                       \
            const int left = (int)(n - i);                                                 \
            uint8_t tail[V_LANES * (size)];                                                \
            store(tail, encode_##name(divide(v_load_n(values + i, left)), counts));        \
            memcpy(bytes + i * (size), tail, (size_t)left * (size));                       \
        }                                                                                  \
    }
NARROW(f32, 4, DIVIDE_ANY, i_store_u32)
NARROW(bf16, 2, DIVIDE_ANY, i_store_u16)
NARROW(f16, 2, DIVIDE_ANY, i_store_u16)
#define FLOAT8_NARROW(words, rule, name, dtype, mantissa, bias, max) \
    NARROW(name, 1, DIVIDE, i_store_u8)
KV8_FLOAT8_FORMATS(FLOAT8_NARROW)
#undef FLOAT8_NARROW
NARROW(int8, 1, DIVIDE, i_store_u8)

/* --- the range of an int8 row --- */

static inline v_i32 range_step(v_f32 value, v_i32 largest, kv8_row_range *range) {
    const v_i32 magnitude = i_and(i_bits(value), i_set1(KV8_F32_ABS));
    const v_mask not_finite = i_gt(magnitude, i_set1(KV8_F32_INF - 1u));
    const unsigned num_not_finite = i_count(not_finite);
    if (num_not_finite > 0) {
        const unsigned num_nan = i_count(i_gt(magnitude, i_set1(KV8_F32_INF)));
        range->nans += num_nan;
        range->infs += num_not_finite - num_nan;
    }
    return i_max(largest, i_select(not_finite, i_set1(0), magnitude));
}

static void row_range(const float *values, size_t n, kv8_row_range *range_out) {
    kv8_row_range range = {0};
    v_i32 largest = i_set1(0);
    size_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES)
        largest = range_step(v_load(values + i), largest, &range);
    if (i < n) largest = range_step(v_load_n(values + i, (int)(n - i)), largest, &range);
    range.absmax = kv8_f32_from_bits(i_reduce_max(largest)); /* bits order as magnitudes do */
    *range_out = range;
}

#define FLOAT8_WIDEN(words, rule, name, dtype, mantissa, bias, max)  [dtype] = widen_##name,
#define FLOAT8_NARROW(words, rule, name, dtype, mantissa, bias, max) [dtype] = narrow_##name,
#define KV8_FORMATS_KERNELS_TABLE(rung)                                        \
    const kv8_formats_kernels kv8_formats_kernels_##rung = {                   \
        .widen = {[KV8_F32] = widen_f32,                                       \
                  [KV8_BF16] = widen_bf16,                                     \
                  [KV8_F16] = widen_f16,                                       \
                  KV8_FLOAT8_FORMATS(FLOAT8_WIDEN)[KV8_INT8] = widen_int8},    \
        .narrow = {[KV8_F32] = narrow_f32,                                     \
                   [KV8_BF16] = narrow_bf16,                                   \
                   [KV8_F16] = narrow_f16,                                     \
                   KV8_FLOAT8_FORMATS(FLOAT8_NARROW)[KV8_INT8] = narrow_int8}, \
        .row_range = row_range,                                                \
        .mxfp4_widen = mxfp4_widen,                                            \
    }
