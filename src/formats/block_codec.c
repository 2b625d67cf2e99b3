/* block_codec.c - checks the arguments of the block conversions, picks the rung's kernel, and
 * finds the scale of int8 rows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "block_codec.h"

#include <math.h>

#include "formats_impl.h"
#include "scalar_codec.h"

const kv8_formats_kernels *kv8_formats_kernels_get(kv8_isa isa) {
    /* Rungs ascend within an architecture, so the last own table at or below isa is the best. */
    const kv8_formats_kernels *best = &kv8_formats_kernels_scalar;
#define KV8_FORMATS_KERNELS(rung_isa, rung) \
    if ((rung_isa) <= isa) best = &kv8_formats_kernels_##rung;
#include "formats_kernels.inc"
#undef KV8_FORMATS_KERNELS
    return best;
}

static kv8_status check_dtype(const char *call, kv8_dtype dtype) {
    if (kv8_dtype_size(dtype) > 0) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s: dtype is %d, must be 1 to %d", call, (int)dtype,
                    (int)KV8_DTYPE_COUNT - 1);
}

kv8_status kv8_widen(kv8_isa isa, kv8_dtype dtype, const void *codes, size_t n, float *values_out) {
    if (n > 0) KV8_REQUIRE(codes, values_out);
    KV8_TRY(check_dtype("kv8_widen", dtype));
    KV8_TRY(kv8_machine_resolve_isa(isa, &isa));
    kv8_formats_kernels_get(isa)->widen[dtype](codes, n, values_out);
    return KV8_OK;
}

kv8_status kv8_narrow(kv8_isa isa, kv8_dtype dtype, const float *values, size_t n, float scale,
                      void *codes_out, kv8_narrow_counts *counts) {
    if (n > 0) KV8_REQUIRE(values, codes_out);
    KV8_TRY(check_dtype("kv8_narrow", dtype));
    if (dtype == KV8_INT8)
        return kv8_fail(KV8_ERR_INVALID, "kv8_narrow: int8 has its own scale: kv8_narrow_int8");
    if (!(scale > 0) || isinf(scale))
        return kv8_fail(KV8_ERR_INVALID, "kv8_narrow: scale is %g, must be finite and > 0",
                        (double)scale);
    KV8_TRY(kv8_machine_resolve_isa(isa, &isa));
    kv8_narrow_counts ignored = {0};
    kv8_formats_kernels_get(isa)->narrow[dtype](values, n, scale, codes_out,
                                                counts == NULL ? &ignored : counts);
    return KV8_OK;
}

/* The smallest f16 s with 127 * s >= absmax > 0; the largest finite one when there is none. The
 * products are exact: 7 bits times f16's 11 fit f32's 24. */
static uint16_t row_scale_code(float absmax) {
    uint16_t code = kv8_f16_encode(absmax / 127.0f, 65504.0f);
    while (code < 0x7bffu && 127.0f * kv8_f16_decode(code) < absmax) code++;
    return code;
}

void kv8_narrow_int8_by(const kv8_formats_kernels *kernels, const float *values, size_t n,
                        int8_t *codes_out, kv8_f16 *scale_out, kv8_narrow_counts *counts) {
    kv8_row_range range;
    kernels->row_range(values, n, &range);
    if (range.nans > 0 || (kv8_f32_bits(range.absmax) == 0 && range.infs == 0)) {
        *scale_out = (kv8_f16){range.nans > 0 ? 0x7e00u : 0};
        if (n > 0) memset(codes_out, 0, n);
        counts->nans += range.nans;
        return;
    }
    uint16_t code = row_scale_code(range.absmax);
    if (code == 0) code = 1; /* only infinities and zeros: 2^-24, f16's smallest */
    *scale_out = (kv8_f16){code};
    kernels->narrow[KV8_INT8](values, n, kv8_f16_decode(code), codes_out, counts);
}

kv8_status kv8_narrow_int8(kv8_isa isa, const float *values, size_t n, int8_t *codes_out,
                           kv8_f16 *scale_out, kv8_narrow_counts *counts) {
    if (n > 0) KV8_REQUIRE(values, codes_out, scale_out);
    KV8_TRY(kv8_machine_resolve_isa(isa, &isa));
    kv8_narrow_counts ignored = {0};
    kv8_narrow_int8_by(kv8_formats_kernels_get(isa), values, n, codes_out, scale_out,
                       counts == NULL ? &ignored : counts);
    return KV8_OK;
}
