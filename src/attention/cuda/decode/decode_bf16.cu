/* decode_bf16.cu - decode attention over bf16 pages. Grid: one block per multiprocessor; block,
 * shared memory and bytes moved: decode_kernel.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_BF16(name, head_dim, warps, stages, whole, heads, fixed_bytes)        \
    KV8_DECODE_DEFINE(name, kv8::BF16, kv8::BF16, head_dim, warps, stages, whole, heads, \
                      fixed_bytes)
#include "decode/decode_kernels.inc"
