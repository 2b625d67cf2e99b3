// tokens_dense.cuh - rows of f16 weights in the ring by several rows of f16 activations.
//
// Products are those of token_dense.cuh, where a column pair is two halves of one activation: here
// it is two tokens, rounded to f16, and each pair of tokens has products of its own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "token_dense.cuh"

namespace kv8 {

// A pair's activations as B fragments, from rows of f16 in shared memory, PITCH bytes apart.
template <int COLS, int PITCH>
__device__ __forceinline__ void load_pair(DenseInput<COLS> &x, uint32_t rows, int pair) {
    const int lane = threadIdx.x % 32;
    const uint32_t from = rows + (2 * pair + lane / 4 % 2) * PITCH + lane % 4 * 16;
    const bool is_second = lane / 8 % 2 != 0;  // half of a block
#pragma unroll
    for (int j = 0; j < Dense<COLS>::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int block = Dense<COLS>::first(j) + 2 * i + lane / 16;
            const Words<16> w = load_shared<16>(from + 64 * Dense<COLS>::inside(j, block));
            const bool is_inside = block < Dense<COLS>::BLOCKS;
            x.pairs[j][i].x = !is_inside ? 0 : is_second ? w.w[1] : w.w[0];
            x.pairs[j][i].y = !is_inside ? 0 : is_second ? w.w[3] : w.w[2];
        }
}

// A stage's `rows` rows by the pairs: to sums[row][token][warp].
template <int COLS, int PAIRS>
__device__ __forceinline__ void multiply_pairs(const DenseStage<COLS> &stage,
                                               const DenseInput<COLS> (&x)[PAIRS], float *sums,
                                               int rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        float d[2][4] = {};
#pragma unroll
        for (int j = 0; j < Dense<COLS>::STEPS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                mma<false>(d[i], stage.w[j][i].w, {x[p].pairs[j][i].x, x[p].pairs[j][i].y});
#pragma unroll
        for (int token = 0; token < 2; token++) {
            const float low = d[0][token] + d[1][token], high = d[0][2 + token] + d[1][2 + token];
            float sum = c / 2 != g % 2 ? 0 : c % 2 == 0 ? low : high;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 6);
            if (lane % 8 == 0 && lane / 8 < rows)
                sums[(lane / 8 * 2 * PAIRS + 2 * p + token) * KV8_TOKEN_WARPS + threadIdx.x / 32] =
                    sum;
        }
    }
}

// As DenseRows.
template <int COLS, int PAIRS>
struct PairedRows {
    static constexpr int ROWS = Dense<COLS>::STAGE_ROWS;
    DenseStage<COLS> first, second;

    __device__ explicit PairedRows(RingReader &ring) {
        first.load(ring);
        second.load(ring);
    }
    __device__ void multiply(RingReader &ring, const DenseInput<COLS> (&x)[PAIRS], float *sums,
                             int rows, int ahead) {
        const auto step = [&](DenseStage<COLS> &stage, int r) {
            multiply_pairs(stage, x, sums + r * 2 * PAIRS * KV8_TOKEN_WARPS, min(ROWS, rows - r));
            if (r + 2 * ROWS < rows + ahead) stage.load(ring);
        };
#pragma unroll 1
        for (int r = 0; r < rows; r += 2 * ROWS) {
            step(first, r);
            if (r + ROWS < rows) step(second, r + ROWS);
        }
    }
};

}  // namespace kv8
