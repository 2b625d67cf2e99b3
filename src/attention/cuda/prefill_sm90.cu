/* prefill_sm90.cu - the prefill kernels for Hopper: one per row of prefill_kernels.inc. What they
 * do and what bounds them stands at the head of prefill_sm90.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_sm90.cuh"

#define KV8_PREFILL(CODE, NAME, HEAD_DIM, NUM_MATH, ...)                                       \
    extern "C" __global__ void __launch_bounds__(128 * (NUM_MATH + 1), 1)                      \
        kv8_prefill_##NAME##_d##HEAD_DIM##__sm90(const __grid_constant__ kv8_prefill_args a) { \
        prefill_block<prefill_shape<CODE_##CODE, HEAD_DIM, NUM_MATH, __VA_ARGS__>>(a);         \
    }
#include "prefill_kernels.inc"
