// experts_tiles.cu - gate and up with their gate, and down, of many rows an expert, on wgmma.
//
// Grid: one block a multiprocessor, clusters of two. Block: two or three warpgroups of consumers,
// one of producers. Shared memory: KV8_EXPERTS_TILES_BYTES. Bytes: the strips of every chosen
// expert once, and again from L2 for every ROWS rows. Bound by: the tensor cores, of few rows the
// issue of what widens (docs/kernels/gpu_experts.md).
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_tiles.cuh"

#define KV8_EXPERTS_TILES(NAME, DOWN, ROWS)                                          \
    extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_TILES_THREADS(ROWS), 1) \
        NAME(const __grid_constant__ kv8_experts_tiles_args a) {                     \
        kv8::multiply_works<kv8::WorkShape<DOWN, ROWS>>(a);                          \
    }
KV8_EXPERTS_TILES(kv8_experts_gate_up_x48__sm90a, false, 48)
KV8_EXPERTS_TILES(kv8_experts_down_x48__sm90a, true, 48)
KV8_EXPERTS_TILES(kv8_experts_gate_up_x96__sm90a, false, 96)
KV8_EXPERTS_TILES(kv8_experts_down_x96__sm90a, true, 96)
KV8_EXPERTS_TILES(kv8_experts_gate_up_x192__sm90a, false, 192)
KV8_EXPERTS_TILES(kv8_experts_down_x192__sm90a, true, 192)
