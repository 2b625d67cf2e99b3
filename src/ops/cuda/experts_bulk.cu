// experts_bulk.cu - gate and up with their gate, and down, of few rows an expert, by the copy
// engine.
//
// Grid: as many blocks as the GPU holds. Block: 1 to 4 teams of 128 threads, or 384 where a warp
// has whole strips. Shared memory: sums to exchange and a quarter of a strip for each warp, or two
// chunks of two strips; and the rows of one or two items. Bytes: the strips of every chosen expert
// once. Bound by: memory, and the issue of instructions, which widening takes.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_quarters.cuh"
#include "experts_whole.cuh"

#define KV8_EXPERTS_BULK(name, THREADS, STREAM, MOST, DOWN)                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                            \
        kv8_experts_##name##__sm90(const __grid_constant__ kv8_experts_matmul_args a) { \
        kv8::STREAM<MOST, DOWN>(a);                                                     \
    }
KV8_EXPERTS_BULK(gate_up_x8, 512, stream_quarters, 1, false)
KV8_EXPERTS_BULK(gate_up_x16, 512, stream_quarters, 2, false)
KV8_EXPERTS_BULK(down_x8, 512, stream_quarters, 1, true)
KV8_EXPERTS_BULK(down_x16, 512, stream_quarters, 2, true)

#define KV8_EXPERTS_WHOLE(name, MOST, DOWN) \
    KV8_EXPERTS_BULK(name, KV8_EXPERTS_WHOLE_WARPS * 32, stream_whole, MOST, DOWN)
KV8_EXPERTS_WHOLE(gate_up_x8_whole, 1, false)
KV8_EXPERTS_WHOLE(gate_up_x16_whole, 2, false)
KV8_EXPERTS_WHOLE(down_x8_whole, 1, true)
KV8_EXPERTS_WHOLE(down_x16_whole, 2, true)
