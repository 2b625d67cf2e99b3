// experts_tiles.cu - gate and up with their gate, and down, of many rows an expert, on wgmma.
//
// Grid: one block a multiprocessor. Block: two warpgroups of consumers, one of producers. Shared
// memory: KV8_EXPERTS_TILES_BYTES. Bytes: the strips of every chosen expert once, and again from L2
// for every 96 rows. Bound by: the tensor cores, below about 60 rows an expert by memory.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_tiles.cuh"

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_TILES_THREADS, 1)
    kv8_experts_gate_up_x96__sm90a(const __grid_constant__ kv8_experts_matmul_args a) {
    kv8::multiply_works<false>(a);
}
extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_TILES_THREADS, 1)
    kv8_experts_down_x96__sm90a(const __grid_constant__ kv8_experts_matmul_args a) {
    kv8::multiply_works<true>(a);
}
