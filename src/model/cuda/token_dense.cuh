// token_dense.cuh - rows of f16 weights in the ring by one row of f32 activations.
//
// A lane has 16 bytes of a row of weights: eight of a block of 32 columns. They are its four words
// of an MMA's A operand as they lie in memory: four rows of weights by two blocks by two halves of
// them, words 0 and 2 and words 1 and 3, are the sixteen rows. The eight columns are the
// activations of those blocks and halves, each as two f16 whose sum keeps 22 bits. What a row and
// a column of different ones give is left alone. Block b of a row belongs to warp b / 4 % 8. Sums
// of a row are kept by warp, and added up when all rows of the block are done.
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
__device__ __forceinline__ float2 widen_f16(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

template <int COLS>
struct Dense {
    static constexpr int BLOCKS = COLS / 32;
    static constexpr int STEPS = (BLOCKS + 4 * KV8_TOKEN_WARPS - 1) / (4 * KV8_TOKEN_WARPS);
    static constexpr int STAGE_ROWS = KV8_TOKEN_STAGE_BYTES / (2 * COLS);
    static_assert(COLS % 32 == 0 && STAGE_ROWS <= 4, "four rows at once");

    // A block of step j, or the last one.
    __device__ static int inside(int j, int block) {
        const bool may_end = j == STEPS - 1 && BLOCKS % (4 * KV8_TOKEN_WARPS) != 0;
        return may_end ? min(block, BLOCKS - 1) : block;
    }

    // The j-th step's first block of the warp.
    __device__ static int first(int j) { return 4 * (threadIdx.x / 32 + KV8_TOKEN_WARPS * j); }
};

// A row of activations for all warps: each as two f16, whose sum keeps 22 bits. Of every eight
// columns the pairs stand as lanes need them: 0 and 4, 2 and 6.
template <int COLS>
struct SplitRow {
    uint32_t upper[COLS / 2 + 2], lower[COLS / 2];  // in other banks

    // Columns 4 n to 4 n + 3.
    __device__ void put(int n, const float (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int at = n / 2 * 4 + n % 2 + 2 * k;
            const uint32_t pair = pack_f16(x[2 * k], x[2 * k + 1]);
            const float2 taken = widen_f16(pair);
            upper[at] = pair;
            lower[at] = pack_f16(x[2 * k] - taken.x, x[2 * k + 1] - taken.y);
        }
    }
};

// The lane's activations as B fragments: of even lanes g their upper halves, of odd the lower.
template <int COLS>
struct DenseInput {
    uint2 pairs[Dense<COLS>::STEPS][2];

    __device__ void load(const SplitRow<COLS> &row) {
        const int lane = threadIdx.x % 32;
        const uint32_t *const from =
            (lane / 4 % 2 == 0 ? row.upper : row.lower) + lane % 4 * 4 + lane / 8 % 2 * 2;
#pragma unroll
        for (int j = 0; j < Dense<COLS>::STEPS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int block = Dense<COLS>::first(j) + 2 * i + lane / 16;
                pairs[j][i] = make_uint2(0, 0);
                if (block < Dense<COLS>::BLOCKS)
                    pairs[j][i] = *reinterpret_cast<const uint2 *>(from + 16 * block);
            }
    }
};

// The warp's part of a stage as A fragments, of two blocks each.
template <int COLS>
struct DenseStage {
    Words<16> w[Dense<COLS>::STEPS][2];

    // The ring's next, which has its stage back.
    __device__ void load(RingReader &ring) {
        using D = Dense<COLS>;
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        // Past the last row or block stands the last once more: its sum is nobody's, or times 0.
        const uint32_t stage = ring.wait() + min(g / 2, D::STAGE_ROWS - 1) * 2 * COLS + 16 * c;
#pragma unroll
        for (int j = 0; j < D::STEPS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                w[j][i] = load_shared<16>(stage + 64 * D::inside(j, D::first(j) + 2 * i + g % 2));
        ring.release();
    }
    // Its `rows` rows by x: to sums[row][warp].
    __device__ void multiply(const DenseInput<COLS> &x, float *sums, int rows) const {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        float d[2][4] = {};
#pragma unroll
        for (int j = 0; j < Dense<COLS>::STEPS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                mma<false>(d[i], w[j][i].w, {x.pairs[j][i].x, x.pairs[j][i].y});
        // Lane (g, c) has columns 2c and 2c + 1, half c % 2 of block c / 2; its rows g and g + 8
        // are the halves of block g % 2.
        const float low = (d[0][0] + d[1][0]) + (d[0][1] + d[1][1]);
        const float high = (d[0][2] + d[1][2]) + (d[0][3] + d[1][3]);
        float sum = c / 2 != g % 2 ? 0 : c % 2 == 0 ? low : high;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 6);
        if (lane % 8 == 0 && lane / 8 < rows)
            sums[lane / 8 * KV8_TOKEN_WARPS + threadIdx.x / 32] = sum;
    }
};

// The rows of a block, two stages of which stand in registers: there they wait for the activations,
// and are read while the stage before is multiplied.
template <int COLS>
struct DenseRows {
    static constexpr int ROWS = Dense<COLS>::STAGE_ROWS;
    DenseStage<COLS> first, second;

    __device__ explicit DenseRows(RingReader &ring) {
        first.load(ring);
        second.load(ring);
    }
    // Sums of `rows` of them to sums[row][warp]; `ahead` follow, of which up to two stages are
    // loaded.
    __device__ void multiply(RingReader &ring, const DenseInput<COLS> &x, float *sums, int rows,
                             int ahead) {
        const auto step = [&](DenseStage<COLS> &stage, int r) {
            stage.multiply(x, sums + r * KV8_TOKEN_WARPS, min(ROWS, rows - r));
            if (r + 2 * ROWS < rows + ahead) stage.load(ring);
        };
#pragma unroll 1
        for (int r = 0; r < rows; r += 2 * ROWS) {
            step(first, r);
            if (r + ROWS < rows) step(second, r + ROWS);
        }
    }
};
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

// Fourths of a row that a thread has: the i-th of them, or NULL.
constexpr int FOURTHS = (KV8_TOKEN_HIDDEN / 4 + COMPUTE_THREADS - 1) / COMPUTE_THREADS;
__device__ __forceinline__ int fourth(int i) {
    return threadIdx.x + i * COMPUTE_THREADS;
}
template <class T>
__device__ __forceinline__ const T *fourth_of(const T *row, int i) {
    return fourth(i) < KV8_TOKEN_HIDDEN / 4 ? row + 4 * fourth(i) : nullptr;
}
struct Gains {
    uint2 x[FOURTHS];

    __device__ explicit Gains(const uint16_t *norm) {
#pragma unroll
        for (int i = 0; i < FOURTHS; i++) {
            x[i] = make_uint2(0, 0);
            if (const uint16_t *const from = fourth_of(norm, i))
                x[i] = __ldg(reinterpret_cast<const uint2 *>(from));
        }
    }
    __device__ void scale(int i, float by, float (&y)[4]) const {
        y[0] *= by * low_bf16(x[i].x), y[1] *= by * high_bf16(x[i].x);
        y[2] *= by * low_bf16(x[i].y), y[3] *= by * high_bf16(x[i].y);
    }
};

}  // namespace kv8
