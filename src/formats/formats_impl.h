/* formats_impl.h - what formats shows the rooms above: the public conversions, the bytes of a
 * row (row_format.h), and for SIMD kernels formats_simd.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_IMPL_H
#define KV8_FORMATS_IMPL_H

#include "row_format.h"

#include <kv8/formats.h>

/* As kv8_bf16_from_f32, n values. */
void kv8_bf16_from_f32_row(const float *values, size_t n, kv8_bf16 *out);

#endif
