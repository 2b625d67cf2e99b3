// rowwise.cuh - one block's row of the residual stream: its mean square, and the row normed.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "codec.cuh"
#include "ptx_sm80.cuh"
#include "rowwise_args.h"

namespace kv8 {

constexpr int ROW_STEP = 8 * KV8_ROWWISE_THREADS;  // values that a block's threads take at once

// The sum over the block, the same bits in every thread and every run.
static __device__ __forceinline__ float block_sum(float x) {
    constexpr int NUM_WARPS = KV8_ROWWISE_THREADS / 32;
    __shared__ float part[NUM_WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NUM_WARPS; i++) sum += part[i];
    return sum;
}

static __device__ __forceinline__ void store8(void *row, int64_t at, const float x[8]) {
    const uint4 word = {pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]),
                        pack_f16(x[6], x[7])};
    *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(row) + at) = word;
}

// The norm of the block's row. A thread's values are the eights from 8 * threadIdx.x on in steps of
// ROW_STEP: the first HELD stay in registers, more are read again by read(at, x).
struct RowNorm {
    static constexpr int HELD = 2;
    float x[HELD][8], gain[HELD][8];
    const kv8_bf16 *gains;
    int32_t hidden;

    // Reads the gains, which no kernel writes.
    __device__ __forceinline__ RowNorm(const void *gains, int32_t hidden)
        : gains(static_cast<const kv8_bf16 *>(gains)), hidden(hidden) {
        for_held([&](int i, int32_t at) { widen8(load8(this->gains + at), gain[i]); });
    }
    template <class USE>
    __device__ __forceinline__ void for_held(USE &&use) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int32_t at = 8 * threadIdx.x + i * ROW_STEP;
            if (at < hidden) use(i, at);
        }
    }
    template <class USE>
    __device__ __forceinline__ void for_more(USE &&use) {
        for (int32_t at = 8 * threadIdx.x + HELD * ROW_STEP; at < hidden; at += ROW_STEP) use(at);
    }
    // first(at, x) gives the row's values, read(at, x) gives them again.
    template <class FIRST, class READ>
    __device__ __forceinline__ void run(float eps, void *out, FIRST &&first, READ &&read) {
        float squares = 0;
        const auto add = [&](const float(&row)[8]) {
#pragma unroll
            for (int j = 0; j < 8; j++) squares += row[j] * row[j];
        };
        for_held([&](int i, int32_t at) { first(at, x[i]); });
        for_held([&](int i, int32_t) { add(x[i]); });
        for_more([&](int32_t at) {
            float more[8];
            first(at, more);
            add(more);
        });
        const float mean = block_sum(squares) / static_cast<float>(hidden);
        const float scale = 1.0f / sqrtf(mean + eps);
        const auto store = [&](int32_t at, float(&row)[8], const float(&by)[8]) {
            const int64_t to = int64_t{blockIdx.x} * hidden + at;
#pragma unroll
            for (int j = 0; j < 8; j++) row[j] *= scale * by[j];
            store8(out, to, row);
        };
        for_held([&](int i, int32_t at) { store(at, x[i], gain[i]); });
        for_more([&](int32_t at) {
            float more[8], by[8];
            read(at, more);
            widen8(load8(gains + at), by);
            store(at, more, by);
        });
    }
};

}  // namespace kv8
