/* ceiling.h - the measuring loops of every rung; private to base.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CEILING_H
#define KV8_CEILING_H

#include <stddef.h>

#define KV8_CEILING_LOOPS(rung)                                  \
    float kv8_ceiling_read__##rung(const float *data, size_t n); \
    float kv8_ceiling_fma__##rung(size_t rounds);
KV8_CEILING_LOOPS(scalar)
KV8_CEILING_LOOPS(avx2)
KV8_CEILING_LOOPS(avx512)
KV8_CEILING_LOOPS(neon)
float kv8_ceiling_bf16__avx512_bf16(size_t rounds);
float kv8_ceiling_bf16__amx(size_t rounds);
float kv8_ceiling_bf16__neon_bf16(size_t rounds);

#endif
