/* decode_bulk.cu - decode attention by copies of whole pages. Grid: one block per multiprocessor;
 * block, shared memory and bytes moved: decode_bulk.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_bulk.cuh"

#define KV8_DECODE_BULK(format, name, head_dim, rows, kv_heads, warps, stages, many, fixed_bytes) \
    KV8_DECODE_BULK_DEFINE(name, kv8::format, head_dim, rows, kv_heads, warps, stages, many,      \
                           fixed_bytes)
#include "decode/decode_kernels.inc"
