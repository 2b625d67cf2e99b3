/* decode_mixed.cu - decode attention over K and V of two formats. Grid: one block per
 * multiprocessor; block, shared memory and bytes moved: decode_kernel.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_MIXED(k, v, name, head_dim, warps, stages, whole, heads, fixed_bytes) \
    KV8_DECODE_DEFINE(name, kv8::k, kv8::v, head_dim, warps, stages, whole, heads, fixed_bytes)
#include "decode/decode_kernels.inc"
