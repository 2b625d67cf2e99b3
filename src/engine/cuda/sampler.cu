// sampler.cu - the draw of tokens on any GPU: a block has a row, whose logits it changes in place
// and puts back.
//
// Grid: one block a row. Block: 512 threads, two a multiprocessor. Shared memory: 12 KB. Bytes: the
// logits once for each stage, from the L2 for few rows. Bound by: the exponentials of one row's ids
// on one multiprocessor; of many rows, which wait for nobody, by memory too.
//
// SPDX-License-Identifier: Apache-2.0
#include "sampler.cuh"

extern "C" __global__ void __launch_bounds__(KV8_DRAW_THREADS, 2)
    kv8_draw_f32__sm80(const __grid_constant__ kv8_draw_args a) {
    kv8::draw_row<false>(a);
}
