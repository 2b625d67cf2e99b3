/* mxfp4.c - blocks of 32 four-bit numbers under one power of two (OCP Microscaling, MXFP4).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "block_codec.h"
#include "formats_impl.h"
#include "scalar_codec.h"

kv8_status kv8_mxfp4_widen(kv8_isa isa, const uint8_t *blocks, const kv8_e8m0 *scales,
                           size_t num_blocks, float *values_out) {
    if (num_blocks > 0) KV8_REQUIRE(blocks, scales, values_out);
    KV8_TRY(kv8_machine_resolve_isa(isa, &isa));
    kv8_formats_kernels_get(isa)->mxfp4_widen(blocks, scales, num_blocks, values_out);
    return KV8_OK;
}

/* The smallest power of two with 6 * power >= absmax; exact in double, where absmax / 6 would
 * have rounded in f32. */
static kv8_e8m0 block_scale(float absmax) {
    kv8_e8m0 scale = kv8_e8m0_from_f32_up(absmax / 6.0f);
    if (6.0 * (double)kv8_e8m0_to_f32(scale) < (double)absmax) scale.bits++;
    return scale;
}

kv8_status kv8_mxfp4_narrow(const float *values, size_t num_blocks, uint8_t *blocks_out,
                            kv8_e8m0 *scales_out) {
    if (num_blocks > 0) KV8_REQUIRE(values, blocks_out, scales_out);
    for (size_t block = 0; block < num_blocks; block++) {
        const float *const v = values + block * KV8_MXFP4_BLOCK;
        float absmax = 0;
        for (size_t i = 0; i < KV8_MXFP4_BLOCK; i++) {
            if (!isfinite(v[i]))
                return kv8_fail(KV8_ERR_INVALID,
                                "kv8_mxfp4_narrow: element %zu of block %zu is %g, must be finite",
                                i, block, (double)v[i]);
            absmax = fmaxf(absmax, fabsf(v[i]));
        }
        scales_out[block] = block_scale(absmax);
        const float scale = kv8_e8m0_to_f32(scales_out[block]);
        uint8_t *const bytes = blocks_out + block * KV8_MXFP4_BLOCK_BYTES;
        for (size_t b = 0; b < KV8_MXFP4_BLOCK_BYTES; b++) {
            const unsigned low = kv8_e2m1_encode(v[2 * b] / scale);
            const unsigned high = kv8_e2m1_encode(v[2 * b + 1] / scale);
            bytes[b] = (uint8_t)(high << 4 | low);
        }
    }
    return KV8_OK;
}
