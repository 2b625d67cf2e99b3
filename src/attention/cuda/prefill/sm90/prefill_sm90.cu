// prefill_sm90.cu - the prefill kernels for Hopper: one per row of prefill_kernels.inc. What they
// do and what bounds them stands at the head of prefill_sm90.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#include "prefill_sm90.cuh"

#define KV8_PREFILL(K, V, NAME, HEAD_DIM, NUM_CONSUMERS, ...)                                \
    extern "C" __global__ void __launch_bounds__(128 * (NUM_CONSUMERS + 1),                  \
                                                 NUM_CONSUMERS == 1 ? 2 : 1)                 \
        kv8_prefill_##NAME##__sm90(const __grid_constant__ kv8_kernel_args a) {              \
        kv8::prefill_block<                                                                  \
            kv8::Sm90Shape<false, kv8::K, kv8::V, HEAD_DIM, NUM_CONSUMERS, __VA_ARGS__>>(a); \
    }
#include "prefill_kernels.inc"
