/* decode_e5m2.cu - decode attention over e5m2 pages. Grid: one block per multiprocessor; block,
 * shared memory and bytes moved: decode_kernel.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_E5M2(name, head_dim, warps, stages, whole, heads, fixed_bytes)        \
    KV8_DECODE_DEFINE(name, kv8::E5M2, kv8::E5M2, head_dim, warps, stages, whole, heads, \
                      fixed_bytes)
#include "decode/decode_kernels.inc"
