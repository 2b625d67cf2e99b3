// experts_strip.cuh - what the streaming kernels do with a strip of an expert: their rows in shared
// memory, a tile's products, and a strip's end.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_args.h"
#include "experts_gate.cuh"
#include "experts_stream_items.cuh"
#include "mxfp4_strip.cuh"
#include "ptx_sm80.cuh"

namespace kv8 {

constexpr int TEAM_WARPS = KV8_EXPERTS_TEAM_WARPS, TEAM_THREADS = KV8_EXPERTS_TEAM_THREADS;

// One item's rows, and zeros behind them up to whole tiles. Not waited for.
template <bool DOWN>
__device__ __forceinline__ void copy_rows(const kv8_experts_matmul_args &a, const Item &item,
                                          uint32_t to) {
    const int pieces = a.w.cols / 8, padded = a.w.num_tiles * (KV8_TILE_COLS / 8);
    for (int row = threadIdx.x / 32; row < item.count; row += blockDim.x / 32) {
        const int place = item.first + row;
        const int64_t x_row = DOWN ? place : a.routing.sorted[place] / a.top_k;
        for (int piece = threadIdx.x % 32; piece < padded; piece += 32) {
            const bool inside = piece < pieces;
            copy16_or_zero(to + row * a.x_row_bytes + piece * 16,
                           a.x + x_row * a.w.cols + (inside ? piece * 8 : 0), inside);
        }
    }
}

// what(i) for the tiles of a chunk, `left` of them at most; whole chunks without a question.
template <int CHUNK, typename WHAT>
__device__ __forceinline__ void for_chunk(int left, const WHAT &what) {
    if (left >= CHUNK) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) what(i);
    } else {
#pragma unroll 1
        for (int i = 0; i < left; i++) what(i);
    }
}

// A warp's quarter of a strip's tiles.
struct Quarter {
    int first, last;
    __device__ __forceinline__ Quarter(int num_tiles, int which) {
        const int each = (num_tiles + TEAM_WARPS - 1) / TEAM_WARPS;
        first = min(which * each, num_tiles);
        last = min(first + each, num_tiles);
    }
};

template <int TILES_N>
struct Sums {
    float s[TILES_N][4];
};

// A tile's products with the rows at x_at, this lane's address of ldmatrix; scaled and added. This
// lane's codes and scales lie at codes_at and scales_at.
template <int TILES_N>
__device__ __forceinline__ void add_tile(Sums<TILES_N> &sums, uint32_t codes_at, uint32_t scales_at,
                                         uint32_t x_at, int x_row_bytes) {
    const Words<16> codes = load_shared<16>(codes_at);
    const uint32_t scales = load_shared<4>(scales_at).w[0];
#pragma unroll
    for (int b = 0; b < 2; b++) {
        uint32_t low[4], high[4];  // of rows g and g + 8
        widen_codes(codes.w[b], low);
        widen_codes(codes.w[2 + b], high);
        const float scale[2] = {scale_of(scales, b), scale_of(scales, 2 + b)};
        const uint32_t a0[4] = {low[0], high[0], low[1], high[1]};
        const uint32_t a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
        for (int n = 0; n < TILES_N; n++) {
            uint32_t x[4];
            load_matrices(x, x_at + n * 8 * x_row_bytes + b * 64);
            float d[4] = {0, 0, 0, 0};
            mma<false>(d, a0, {x[0], x[1]});
            mma<false>(d, a1, {x[2], x[3]});
#pragma unroll
            for (int i = 0; i < 4; i++) sums.s[n][i] += d[i] * scale[i / 2];
        }
    }
}

// --- a strip's end ---

// What ends a lane's rows g and g + 8, of gate_up a gate and its up: loaded as the strip begins.
struct Ends {
    float factor[2], bias[2];
    __device__ __forceinline__ Ends(const kv8_experts_matmul_args &a, const uint8_t *strip) {
        const uint8_t *const end =
            strip + a.w.num_tiles * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES);
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[i] = __ldg(reinterpret_cast<const float *>(end) + row + 8 * i);
            const uint32_t bits = __ldg(reinterpret_cast<const uint16_t *>(end + 64) + row + 8 * i);
            bias[i] = __uint_as_float(bits << 16);
        }
    }
    __device__ __forceinline__ float value(float sum, int i) const {
        return sum * CODE_FACTOR * factor[i] + bias[i];
    }
};

// Where the warps of a team exchange sums: [from][to][32 lanes] of two rows' sums of a column. Who
// has quarter `to` ends column to % 2 of each lane's two in eight to / 2.
constexpr int EXCHANGED = TEAM_WARPS * 2 * KV8_EXPERTS_ITEM_TILES * 32;
template <int TILES_N>
__device__ __forceinline__ void exchange_sums(float2 *exchange, const Sums<TILES_N> &sums,
                                              int quarter, int barrier) {
    float2 *const mine = exchange + quarter * (2 * TILES_N * 32) + threadIdx.x % 32;
    named_barrier_sync(barrier, TEAM_THREADS);  // those of the strip before have been read
#pragma unroll
    for (int to = 0; to < 2 * TILES_N; to++)
        mine[to * 32] = {sums.s[to / 2][to % 2], sums.s[to / 2][to % 2 + 2]};
    named_barrier_sync(barrier, TEAM_THREADS);
}
template <int TILES_N, bool DOWN>
__device__ __forceinline__ void end_strip(const kv8_experts_matmul_args &a, const Ends &ends,
                                          const float2 *exchange, int quarter, const Item &item,
                                          int strip) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int column = quarter / 2 * 8 + lane % 4 * 2 + quarter % 2;
    if (quarter >= 2 * TILES_N || column >= item.count) return;
    const float2 *const from = exchange + quarter * 32 + lane;
    float sum[2] = {0, 0};
#pragma unroll
    for (int w = 0; w < TEAM_WARPS; w++) {
        const float2 part = from[w * (2 * TILES_N * 32)];
        sum[0] += part.x;
        sum[1] += part.y;
    }
    const int place = item.first + column;
    if constexpr (DOWN) {
        float *const to = static_cast<float *>(a.y) +
                          static_cast<int64_t>(a.routing.sorted[place]) * a.w.num_strips * 16 +
                          strip * 16 + g;
        to[0] = ends.value(sum[0], 0);
        to[8] = ends.value(sum[1], 1);
    } else {
        const float y = gate(ends.value(sum[0], 0), ends.value(sum[1], 1), a.alpha, a.limit);
        static_cast<__half *>(
            a.y)[static_cast<int64_t>(place) * a.w.num_strips * 8 + strip * 8 + g] =
            __float2half_rn(y);
    }
}

}  // namespace kv8
