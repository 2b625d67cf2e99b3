// token_dense.cuh - rows of bf16 weights in the ring by one row of f32 activations.
//
// An MMA's sixteen rows are four rows of weights by four blocks of 32 columns, its eight columns
// the activations of those four blocks, each as two bf16 whose sum keeps 16 bits. What a row and a
// column of different blocks give is left alone. So weights go from shared memory straight into the
// tensor cores. Block b of a row belongs to warp b / 4 % 8. Sums of a row are kept by warp, and
// added up when all rows of the block are done.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "token_ring.cuh"

namespace kv8 {

__device__ __forceinline__ float low_bf16(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_bf16(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float widen_bf16(uint16_t code) {
    return __uint_as_float(static_cast<uint32_t>(code) << 16);
}

template <int COLS>
struct Dense {
    static constexpr int BLOCKS = COLS / 32;
    static constexpr int STEPS = (BLOCKS + 4 * KV8_TOKEN_WARPS - 1) / (4 * KV8_TOKEN_WARPS);
    static constexpr int STAGE_ROWS = KV8_TOKEN_STAGE_BYTES / (2 * COLS);
    static_assert(COLS % 32 == 0 && STAGE_ROWS <= 4, "four rows at once");

    // The j-th step's first block of the warp.
    __device__ static int first(int j) { return 4 * (threadIdx.x / 32 + KV8_TOKEN_WARPS * j); }
    // Of the lane, as it supplies activations: its eight columns; there are none past the end.
    __device__ static int column(int j) {
        return 32 * (first(j) + threadIdx.x % 32 / 8) + threadIdx.x % 4 * 8;
    }
    __device__ static bool has(int j) { return column(j) < COLS; }
};

// The lane's activations as B fragments: of even lanes g their upper halves, of odd the lower.
template <int COLS>
struct DenseInput {
    uint32_t pairs[Dense<COLS>::STEPS][4];

    // The eight of step j.
    __device__ void set(int j, const float (&x)[8]) {
        const bool is_upper = threadIdx.x / 4 % 2 == 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t upper = pack_bf16(x[2 * i], x[2 * i + 1]);
            pairs[j][i] =
                is_upper ? upper
                         : pack_bf16(x[2 * i] - low_bf16(upper), x[2 * i + 1] - high_bf16(upper));
        }
    }
};

// The next stage, `rows` of it, whose sums go to sums[row][warp].
template <int COLS>
__device__ __forceinline__ void dense_stage(RingReader &ring, const DenseInput<COLS> &x,
                                            float *sums, int rows) {
    using D = Dense<COLS>;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t stage = ring.wait() + g / 4 * 2 * COLS + 64 * (g % 4) + 16 * c;
    Words<16> w[D::STEPS][2];  // of rows g / 4 and g / 4 + 2
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            w[j][half] = {};
            const bool is_there = (D::BLOCKS % (4 * KV8_TOKEN_WARPS) == 0 || j < D::STEPS - 1 ||
                                   D::first(j) + g % 4 < D::BLOCKS) &&
                                  (g / 4 + 2 * half < D::STAGE_ROWS);
            if (is_there) w[j][half] = load_shared<16>(stage + half * 4 * COLS + 64 * D::first(j));
        }
    float d[2][4] = {};
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t a[4] = {w[j][0].w[2 * i], w[j][1].w[2 * i], w[j][0].w[2 * i + 1],
                                   w[j][1].w[2 * i + 1]};
            mma<true>(d[i], a, {x.pairs[j][2 * i], x.pairs[j][2 * i + 1]});
        }
    ring.release();
    // Lane (g, c) has columns 2c and 2c + 1, block c's: its rows' are block g % 4's.
    float low = c == g % 4 ? (d[0][0] + d[1][0]) + (d[0][1] + d[1][1]) : 0;
    float high = c == g % 4 ? (d[0][2] + d[1][2]) + (d[0][3] + d[1][3]) : 0;
#pragma unroll
    for (int step = 5; step <= 10; step += 5) {
        low += __shfl_xor_sync(~0u, low, step);
        high += __shfl_xor_sync(~0u, high, step);
    }
    // Lanes 0 and 16 have rows 0 and 1, and 2 and 3.
    if (lane % 16 == 0) {
        const int row = lane / 16;
        if (row < rows) sums[row * KV8_TOKEN_WARPS + threadIdx.x / 32] = low;
        if (row + 2 < rows) sums[(row + 2) * KV8_TOKEN_WARPS + threadIdx.x / 32] = high;
    }
}

template <int COLS>
__device__ __forceinline__ void dense_rows(RingReader &ring, const DenseInput<COLS> &x, float *sums,
                                           int rows) {
    constexpr int ROWS = Dense<COLS>::STAGE_ROWS;
#pragma unroll 2
    for (int r = 0; r < rows; r += ROWS)
        dense_stage<COLS>(ring, x, sums + r * KV8_TOKEN_WARPS, min(ROWS, rows - r));
}
__device__ __forceinline__ float add_warps(const float *sums) {
    const float4 a = reinterpret_cast<const float4 *>(sums)[0];
    const float4 b = reinterpret_cast<const float4 *>(sums)[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

template <int COLS>
__device__ void copy_rows(RingWriter &ring, const uint16_t *weights, const Share &rows) {
    constexpr int ROWS = Dense<COLS>::STAGE_ROWS;
    const uint16_t *from = weights + static_cast<int64_t>(rows.begin) * COLS;
#pragma unroll 1
    for (int r = 0; r < rows.count(); r += ROWS, from += ROWS * COLS)
        ring.put(from, min(ROWS, rows.count() - r) * COLS * 2);
}

// --- norm ---

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
// The sum over the computing warps, the same bits in all threads; `scratch`: one float a warp.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    meet_warps();
    return add_warps(scratch);
}

}  // namespace kv8
