// append.cu - quantise rows of K and V and store them in their pages.
//
// Grid: x = ceil(max_rows / rows_per_block), y = 2: K, V. Block: 256 threads. Shared memory: 8 KB,
// the places of the block's rows. Bytes: head_dim * (source + code) of every row and head, and page
// tables. Bound by: memory. x8: eight elements a load, for head_dim a multiple of 16 up to 512 and
// aligned rows; x1: any other. Bits: those of kv8_cache_append.
//
// SPDX-License-Identifier: Apache-2.0
#include "append_body.cuh"

#define KV8_APPEND_KERNEL(name, SOURCE, EIGHTS)                                       \
    extern "C" __global__ void __launch_bounds__(KV8_APPEND_THREADS)                  \
        kv8_append_##name##__sm80(const __grid_constant__ kv8_append_kernel_args a) { \
        kv8::append_rows<SOURCE, EIGHTS, kv8::Unrotated>(a);                          \
    }
KV8_APPEND_KERNEL(f32_x8, float, true)
KV8_APPEND_KERNEL(f32_x1, float, false)
KV8_APPEND_KERNEL(bf16_x8, kv8_bf16, true)
KV8_APPEND_KERNEL(bf16_x1, kv8_bf16, false)
KV8_APPEND_KERNEL(f16_x8, kv8_f16, true)
KV8_APPEND_KERNEL(f16_x1, kv8_f16, false)
