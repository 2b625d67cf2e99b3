// experts_stream.cu - gate and up with their gate, and down, of few rows an expert.
//
// Grid: as many blocks as the GPU holds. Block: 1 to 4 teams of 128 threads. Shared memory: partial
// sums, rings of tiles, and the rows of one or two items. Bytes: the
// strips of every chosen expert once; those of an expert that more rows than an item's chose again,
// from L2. Bound by: memory up to 8 rows an expert, above that by the products.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_stream.cuh"

#define KV8_EXPERTS_STREAM(name, MOST, DOWN)                                            \
    extern "C" __global__ void __launch_bounds__(512, 1)                                \
        kv8_experts_##name##__sm80(const __grid_constant__ kv8_experts_matmul_args a) { \
        kv8::stream<MOST, DOWN>(a);                                                     \
    }
KV8_EXPERTS_STREAM(gate_up_x8, 1, false)
KV8_EXPERTS_STREAM(gate_up_x16, 2, false)
KV8_EXPERTS_STREAM(down_x8, 1, true)
KV8_EXPERTS_STREAM(down_x16, 2, true)
