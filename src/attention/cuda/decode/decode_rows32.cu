// decode_rows32.cu - decode attention of 17 to 32 packed query rows: of three or four rows of many
// requests. Grid, block, shared memory and bytes moved: decode_kernel.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_kernel.cuh"

#define KV8_DECODE_ROWS32(format, name, head_dim, rows, warps, stages, fixed_bytes)             \
    KV8_DECODE_DEFINE_ROWS(name, kv8::format, kv8::format, head_dim, rows, warps, stages, 1, 1, \
                           fixed_bytes)
#include "decode/decode_rows32_kernels.inc"
