/* decode_rows16.cu - decode attention of 16 packed query rows: of groups above 8, of a few rows a
 * request. Grid, block, shared memory and bytes moved: decode_kernel.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_ROWS16(format, name, head_dim, warps, stages, fixed_bytes)                 \
    KV8_DECODE_DEFINE_ROWS(name, kv8::format, kv8::format, head_dim, 16, warps, stages, 1, 1, \
                           fixed_bytes)
#include "decode/decode_kernels.inc"
