/* decode_e4m3.cu - decode attention over e4m3 pages. Grid: one block per multiprocessor; block,
 * shared memory and bytes moved: decode_kernel.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_E4M3(name, head_dim, warps, stages, whole, heads, fixed_bytes)        \
    KV8_DECODE_DEFINE(name, kv8::E4M3, kv8::E4M3, head_dim, warps, stages, whole, heads, \
                      fixed_bytes)
#include "decode/decode_kernels.inc"
