/* formats_impl.h - what formats shows the rooms above: the public conversions, the bytes of a
 * row (row_format.h), and for SIMD kernels formats_simd.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_IMPL_H
#define KV8_FORMATS_IMPL_H

#include "float8.h"
#include "row_format.h"

#include <kv8/formats.h>

/* The dtype is one of float8.h's. */
static inline bool kv8_is_float8(kv8_dtype dtype) {
#define KV8_IS(words, rule, name, which, mantissa, bias, max) || dtype == which
    return false KV8_FLOAT8_FORMATS(KV8_IS);
#undef KV8_IS
}

/* As kv8_bf16_from_f32, n values. */
void kv8_bf16_from_f32_row(const float *values, size_t n, kv8_bf16 *out);

#endif
