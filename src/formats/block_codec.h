/* block_codec.h - the kernels behind the block conversions: one constant table per rung. Private
 * to formats; arguments are checked by block_codec.c and mxfp4.c before a kernel sees them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BLOCK_CODEC_H
#define KV8_BLOCK_CODEC_H

#include <stddef.h>

#include "formats_impl.h"

#include <kv8/formats.h>

typedef void (*kv8_widen_kernel)(const void *codes, size_t n, float *values_out);
/* codes_out[i] = sat_rne(values[i] / scale); adds to *counts. */
typedef void (*kv8_narrow_kernel)(const float *values, size_t n, float scale, void *codes_out,
                                  kv8_narrow_counts *counts);
/* Largest finite magnitude (0 when there is none) and how many values are not finite. */
typedef struct kv8_row_range {
    float absmax;
    uint64_t infs, nans;
} kv8_row_range;
typedef void (*kv8_row_range_kernel)(const float *values, size_t n, kv8_row_range *range_out);
typedef void (*kv8_mxfp4_widen_kernel)(const uint8_t *blocks, const kv8_e8m0 *scales,
                                       size_t num_blocks, float *values_out);

struct kv8_formats_kernels {
    kv8_widen_kernel widen[KV8_DTYPE_COUNT];
    kv8_narrow_kernel narrow[KV8_DTYPE_COUNT]; /* INT8: clamped to +-127; no NaN comes */
    kv8_row_range_kernel row_range;
    kv8_mxfp4_widen_kernel mxfp4_widen;
};

/* kv8_narrow_int8 of checked arguments; adds to *counts. */
void kv8_narrow_int8_by(const kv8_formats_kernels *kernels, const float *values, size_t n,
                        int8_t *codes_out, kv8_f16 *scale_out, kv8_narrow_counts *counts);

#define KV8_FORMATS_KERNELS(isa, rung) extern const kv8_formats_kernels kv8_formats_kernels_##rung;
#include "formats_kernels.inc"
#undef KV8_FORMATS_KERNELS

#endif
