// decode_wide.cu - decode attention of 17 to 128 packed query rows of one request. Grid, block,
// shared memory and bytes moved: decode_wide.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_wide.cuh"

#define KV8_DECODE_WIDE(format, name, head_dim, rows, keys, mask_bytes, fixed_bytes) \
    KV8_DECODE_WIDE_DEFINE(name, format, rows, keys, mask_bytes, fixed_bytes)
#include "decode/decode_wide_kernels.inc"
