// decode_warpgroup.cu - decode attention of 17 to 32 packed query rows. Grid,
// block, shared memory and bytes moved: decode_warpgroup.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_warpgroup.cuh"

#define KV8_DECODE_WARPGROUP(k, v, name, head_dim, rows, stages, has_mask, fixed_bytes) \
    KV8_DECODE_WARPGROUP_DEFINE(name, k, v, head_dim, rows, stages, has_mask, fixed_bytes)
#include "decode/decode_warpgroup_kernels.inc"
