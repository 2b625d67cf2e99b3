// decode_window.cu - decode attention over few keys. Grid, block, shared memory and
// bytes moved: decode_window.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#include "decode/decode_window.cuh"

#define KV8_DECODE_WINDOW(format, name, head_dim, warps, stages, fixed_bytes) \
    KV8_DECODE_WINDOW_DEFINE(name, kv8::format, head_dim, warps, stages, fixed_bytes)
#include "decode/decode_window_kernels.inc"
