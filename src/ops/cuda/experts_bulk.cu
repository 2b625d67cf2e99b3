// experts_bulk.cu - gate and up with their gate, and down, of few rows an expert, by the copy
// engine.
//
// Grid: as many blocks as the GPU holds. Block: 1 to 4 teams of 128 threads. Shared memory: sums,
// a quarter of a strip for each warp, and the rows of one or two items. Bytes: the strips of every
// chosen expert once. Bound by: memory, and the issue of instructions, which widening takes.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_quarters.cuh"

#define KV8_EXPERTS_BULK(name, MOST, DOWN)                                              \
    extern "C" __global__ void __launch_bounds__(512, 1)                                \
        kv8_experts_##name##__sm90(const __grid_constant__ kv8_experts_matmul_args a) { \
        kv8::stream_quarters<MOST, DOWN>(a);                                            \
    }
KV8_EXPERTS_BULK(gate_up_x8, 1, false)
KV8_EXPERTS_BULK(gate_up_x16, 2, false)
KV8_EXPERTS_BULK(down_x8, 1, true)
KV8_EXPERTS_BULK(down_x16, 2, true)
