// experts_products.cuh - products of strips' tiles with up to 16 rows: a tile's, and how the four
// warps of a team, which have a quarter of the tiles each, add up.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_args.h"
#include "experts_gate.cuh"
#include "experts_scaled.cuh"

namespace kv8 {

constexpr int TEAM_WARPS = KV8_EXPERTS_TEAM_WARPS, TEAM_THREADS = KV8_EXPERTS_TEAM_THREADS;

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

// A tile's products, of STRIPS strips, with the rows at x_at, this lane's address of ldmatrix;
// scaled and added. This lane's codes and scales lie at codes_at and scales_at, of the next strip
// `apart` further.
template <int TILES_N, int STRIPS>
__device__ __forceinline__ void add_tile(Sums<TILES_N> (&sums)[STRIPS], uint32_t codes_at,
                                         uint32_t scales_at, uint32_t apart, uint32_t x_at,
                                         int x_row_bytes) {
    Words<16> codes[STRIPS];
    uint32_t scales[STRIPS];
#pragma unroll
    for (int h = 0; h < STRIPS; h++) {
        codes[h] = load_shared<16>(codes_at + h * apart);
        scales[h] = load_shared<4>(scales_at + h * apart).w[0];
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
        uint32_t x[TILES_N][4];
#pragma unroll
        for (int n = 0; n < TILES_N; n++) load_matrices(x[n], x_at + n * 8 * x_row_bytes + b * 64);
#pragma unroll
        for (int h = 0; h < STRIPS; h++) {
            uint32_t low[4], high[4];  // of rows g and g + 8
            widen_codes(codes[h].w[b], low);
            widen_codes(codes[h].w[2 + b], high);
            const float scale[2] = {scale_of(scales[h], b), scale_of(scales[h], 2 + b)};
            const uint32_t a0[4] = {low[0], high[0], low[1], high[1]};
            const uint32_t a1[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
            for (int n = 0; n < TILES_N; n++) {
                float d[4] = {0, 0, 0, 0};
                mma<false>(d, a0, {x[n][0], x[n][1]});
                mma<false>(d, a1, {x[n][2], x[n][3]});
#pragma unroll
                for (int i = 0; i < 4; i++) sums[h].s[n][i] += d[i] * scale[i / 2];
            }
        }
    }
}

// Half a tile of scaled weights, 32 inputs.
template <int HALF, int TILES_N, int STRIPS>
__device__ __forceinline__ void add_scaled_half(Sums<TILES_N> (&sums)[STRIPS],
                                                const TileCodes (&codes)[STRIPS], uint32_t x_at,
                                                int x_row_bytes) {
    uint32_t x[TILES_N][4];
#pragma unroll
    for (int n = 0; n < TILES_N; n++) load_matrices(x[n], x_at + n * 8 * x_row_bytes + HALF * 64);
#pragma unroll
    for (int h = 0; h < STRIPS; h++) {
        uint32_t w[2][4];
        codes[h].template widen<2 * HALF>(w[0]);
        codes[h].template widen<2 * HALF + 1>(w[1]);
#pragma unroll
        for (int n = 0; n < TILES_N; n++) {
            mma<false>(sums[h].s[n], w[0], {x[n][0], x[n][1]});
            mma<false>(sums[h].s[n], w[1], {x[n][2], x[n][3]});
        }
    }
}
// As add_tile(), of scaled weights: a sum goes on from 16 inputs to the next, as it does in
// experts_tiles.cuh.
template <int TILES_N, int STRIPS>
__device__ __forceinline__ void add_scaled_tile(Sums<TILES_N> (&sums)[STRIPS], uint32_t codes_at,
                                                uint32_t scales_at, uint32_t apart, uint32_t x_at,
                                                int x_row_bytes) {
    TileCodes codes[STRIPS];
#pragma unroll
    for (int h = 0; h < STRIPS; h++) codes[h].load(codes_at + h * apart, scales_at + h * apart);
    add_scaled_half<0>(sums, codes, x_at, x_row_bytes);
    add_scaled_half<1>(sums, codes, x_at, x_row_bytes);
}

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

}  // namespace kv8
