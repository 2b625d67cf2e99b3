/* decode_f16.cu - decode attention over f16 pages. Grid: one block per multiprocessor; block,
 * shared memory and bytes moved: decode_kernel.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_F16(name, head_dim, warps, stages, whole, heads, fixed_bytes) \
    KV8_DECODE_DEFINE(name, kv8::F16, kv8::F16, head_dim, warps, stages, whole, heads, fixed_bytes)
#include "decode/decode_kernels.inc"
