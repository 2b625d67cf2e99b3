/* kv8/formats.h - number formats: what a bit pattern means, scalar and block conversions.
 *
 * Each 8- and 16-bit code is its own one-member struct, so that mixing formats does not compile.
 * Narrowing rounds to nearest, ties to even. f16 and bf16 overflow to infinity as IEEE 754 does;
 * e4m3, e4m3fnuz, e5m2 and e2m1 saturate at their largest finite value (infinities too), as the
 * OCP OFP8 and MX specifications' saturating mode does. NaN stays NaN wherever the format has one:
 * 0x7f with its sign in e4m3 and e5m2, quiet with sign and payload in f16 and bf16. Widening is
 * exact; a NaN of an 8-bit format or f16 becomes a quiet NaN with the code's sign and mantissa.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_H
#define KV8_FORMATS_H

#include <kv8/machine.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_e4m3 {
    uint8_t bits;
} kv8_e4m3; /* OCP "fn": max 448, NaN 0x7f/0xff */
typedef struct kv8_e4m3fnuz {
    uint8_t bits;
} kv8_e4m3fnuz; /* max 240, NaN 0x80, no -0 */
typedef struct kv8_e5m2 {
    uint8_t bits;
} kv8_e5m2; /* max 57344, inf 0x7c, NaN 0x7d.. */
typedef struct kv8_e8m0 {
    uint8_t bits;
} kv8_e8m0; /* 2^(bits-127), NaN 0xff */
typedef struct kv8_e2m1 {
    uint8_t bits;
} kv8_e2m1; /* low 4 bits: 0 .5 1 1.5 2 3 4 6 */
typedef struct kv8_bf16 {
    uint16_t bits;
} kv8_bf16;
typedef struct kv8_f16 {
    uint16_t bits;
} kv8_f16;

/* Element types of queries, caches and tensors. KV8_INT8 in a cache has one f16 scale per (token,
 * kv head); see kv8/cache.h. */
typedef enum kv8_dtype {
    KV8_DTYPE_NONE = 0,
    KV8_F32,
    KV8_BF16,
    KV8_F16,
    KV8_E4M3,
    KV8_E4M3FNUZ,
    KV8_E5M2,
    KV8_INT8,
    KV8_DTYPE_COUNT
} kv8_dtype;

/* "f32", "bf16", "f16", "e4m3", "e4m3fnuz", "e5m2", "int8"; "none" for anything else. */
KV8_API const char *kv8_dtype_name(kv8_dtype dtype);
/* The dtype of that name; KV8_ERR_INVALID names the known ones. */
KV8_API KV8_NODISCARD kv8_status kv8_dtype_from_name(const char *name, kv8_dtype *dtype_out);
/* Bytes per element: 4, 2 or 1; 0 for NONE. */
KV8_API size_t kv8_dtype_size(kv8_dtype dtype);
/* Largest finite value: 3.40e38, 3.39e38, 65504, 448, 240, 57344, 127; 0 for NONE. */
KV8_API float kv8_dtype_max(kv8_dtype dtype);

KV8_API float kv8_e4m3_to_f32(kv8_e4m3 code);
KV8_API float kv8_e4m3fnuz_to_f32(kv8_e4m3fnuz code);
KV8_API float kv8_e5m2_to_f32(kv8_e5m2 code);
KV8_API float kv8_e8m0_to_f32(kv8_e8m0 code);
KV8_API float kv8_e2m1_to_f32(kv8_e2m1 code);
KV8_API float kv8_bf16_to_f32(kv8_bf16 code);
KV8_API float kv8_f16_to_f32(kv8_f16 code);

KV8_API kv8_e4m3 kv8_e4m3_from_f32(float value);
KV8_API kv8_e4m3fnuz kv8_e4m3fnuz_from_f32(float value);
KV8_API kv8_e5m2 kv8_e5m2_from_f32(float value);
KV8_API kv8_e2m1 kv8_e2m1_from_f32(float value); /* NaN has no code: becomes +0 */
KV8_API kv8_bf16 kv8_bf16_from_f32(float value);
KV8_API kv8_f16 kv8_f16_from_f32(float value);
/* Smallest power of two >= |value| (so that no element divided by it clips), saturating at both
 * ends; NaN for NaN and infinity. */
KV8_API kv8_e8m0 kv8_e8m0_from_f32_up(float value);

/* Block conversions. `codes` is an array of dtype's elements without alignment beyond the
 * element's; n >= 0 elements; source and destination must not overlap. KV8_INT8 converts codes as
 * plain integers. `isa` picks the rung; every rung gives the same bits. KV8_ERR_INVALID for a bad
 * dtype. */
KV8_API KV8_NODISCARD kv8_status kv8_widen(kv8_isa isa, kv8_dtype dtype, const void *codes,
                                           size_t n, float *values_out);

typedef struct kv8_narrow_counts {
    uint64_t clips; /* |value / scale| > max: saturated (infinities included) */
    uint64_t nans;
} kv8_narrow_counts;

/* codes_out[i] = sat_rne(values[i] / scale), for every dtype but INT8: f16 and bf16 saturate here
 * too. scale must be finite and > 0; the quotient is rounded to f32 first, on every rung. Adds to
 * *counts when that is not NULL. */
KV8_API KV8_NODISCARD kv8_status kv8_narrow(kv8_isa isa, kv8_dtype dtype, const float *values,
                                            size_t n, float scale, void *codes_out,
                                            kv8_narrow_counts *counts);

/* int8 with its own scale: scale = absmax / 127 over the finite values, rounded up to f16 (at
 * least f16's smallest subnormal, 0 when every value is 0), code = rne(value / scale). Infinities
 * and values that the largest f16 scale cannot hold saturate at +-127 and count as clips; a NaN
 * makes the scale NaN, and with it the whole row (codes 0), and alone counts. */
KV8_API KV8_NODISCARD kv8_status kv8_narrow_int8(kv8_isa isa, const float *values, size_t n,
                                                 int8_t *codes_out, kv8_f16 *scale_out,
                                                 kv8_narrow_counts *counts);

/* MXFP4: blocks of 32 e2m1 values in 16 bytes, element 2b in the low nibble of byte b, 2b+1 in the
 * high one, and one e8m0 scale per block. value = e2m1 * 2^(scale - 127). */
enum { KV8_MXFP4_BLOCK = 32, KV8_MXFP4_BLOCK_BYTES = 16 };
KV8_API KV8_NODISCARD kv8_status kv8_mxfp4_widen(kv8_isa isa, const uint8_t *blocks,
                                                 const kv8_e8m0 *scales, size_t num_blocks,
                                                 float *values_out);
/* scale = smallest power of two >= absmax / 6 (no clipping); an all-zero block gets scale byte 0.
 * A block holding NaN or infinity is KV8_ERR_INVALID naming its index. */
KV8_API KV8_NODISCARD kv8_status kv8_mxfp4_narrow(const float *values, size_t num_blocks,
                                                  uint8_t *blocks_out, kv8_e8m0 *scales_out);

#ifdef __cplusplus
}
#endif
#endif
