// sampler_cluster.cu - the draw of tokens where blocks can share a row: a cluster holds it in
// shared memory, each block an eighth.
//
// Grid: eight blocks a row, a cluster. Block: 512 threads. Shared memory: an eighth of the row and
// 12 KB: for 200,000 ids a multiprocessor holds two blocks. Bytes: the logits once. Bound by:
// latency for few rows, exponentials and memory for many.
//
// SPDX-License-Identifier: Apache-2.0
#include "sampler.cuh"

extern "C" __global__ void __launch_bounds__(KV8_DRAW_THREADS, 2)
    kv8_draw_cluster_f32__sm90(const __grid_constant__ kv8_draw_args a) {
    kv8::draw_row<true>(a);
}
