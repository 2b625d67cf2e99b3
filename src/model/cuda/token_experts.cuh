// token_experts.cuh - strips of MXFP4 weights (experts_args.h) in the ring by one vector of f16.
//
// A team of four warps takes a strip, two teams take turns. The eight columns of an MMA carry eight
// different blocks of 32 of the one vector: block k of the j-th of four tiles stands in column
// 2j + k. What a tile and the block of another give is left alone; the lane that has the row and
// the tile picks its own, and multiplies it by its scale. Every block of every tile has sums of its
// own: no product waits for another's, but the second half of a block for the first.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "mxfp4_strip.cuh"
#include "token_dense.cuh"
#include "token_strips.cuh"

namespace kv8 {

constexpr int MOST_STRIPS =
    (KV8_TOKEN_TOP_K * GATE_UP_STRIPS + KV8_TOKEN_MIN_BLOCKS - 1) / KV8_TOKEN_MIN_BLOCKS;

constexpr int TEAMS = 2, TEAM_WARPS = KV8_TOKEN_WARPS / TEAMS;
constexpr int FOURS = (STRIP_TILES + 4 * TEAM_WARPS - 1) / (4 * TEAM_WARPS);  // of tiles, a warp

// What is left of the strips of a block when all are multiplied.
struct StripSums {
    float sums[MOST_STRIPS][KV8_STRIP_ROWS][TEAM_WARPS];
    float factors[MOST_STRIPS][KV8_STRIP_ROWS];
    float biases[MOST_STRIPS][KV8_STRIP_ROWS];
    alignas(16) uint16_t x[KV8_TOKEN_HIDDEN];  // f16, of gate and up

    __device__ float row(int strip, int r) const {
        const float4 a = *reinterpret_cast<const float4 *>(sums[strip][r]);
        return ((a.x + a.y) + (a.z + a.w)) * factors[strip][r] + biases[strip][r];
    }
};

// The lane's part of a vector: of every four tiles the eight inputs of the block that it supplies
// and of the words that it multiplies, in pairs as they stand in those.
struct StripInput {
    uint32_t pairs[FOURS][4];

    __device__ static int team() { return threadIdx.x / (32 * TEAM_WARPS); }
    __device__ static int warp() { return threadIdx.x / 32 % TEAM_WARPS; }
    // Of the i-th four: the first input of the block that this lane supplies; past the last input
    // it supplies zeros.
    __device__ static int block(int i) {
        const int tile = warp() + TEAM_WARPS * (4 * i + threadIdx.x % 32 / 8);
        return tile * KV8_TILE_COLS + threadIdx.x / 4 % 2 * 32;
    }
    // Where pair p begins in the vector; and, in a vector that is kept in this order, input n.
    __device__ static int pair(int i, int p) { return block(i) + 8 * p + threadIdx.x % 4 * 2; }
    __device__ static int place(int n) {
        return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
    }
};

// a * b of m16n8k16 on f16.
__device__ __forceinline__ void mma_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
// The c-th of four.
__device__ __forceinline__ float pick(int c, float x0, float x1, float x2, float x3) {
    const float low = c & 1 ? x1 : x0, high = c & 1 ? x3 : x2;
    return c & 2 ? high : low;
}

// The strip in the ring's next stage; its sums to `to`, as the block's `idx`-th.
__device__ __forceinline__ void multiply_strip(RingReader &ring, const StripInput &x, StripSums &to,
                                               int idx) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp = StripInput::warp();
    const uint32_t stage = ring.wait();
    Words<16> codes[FOURS][4];
    uint32_t scales[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const int first = warp + TEAM_WARPS * 4 * i, mine = first + TEAM_WARPS * c;
#pragma unroll
        for (int j = 0; j < 4; j++)  // behind the last tile lie scales: times 0
            codes[i][j] =
                load_shared<16>(stage + (first + TEAM_WARPS * j) * KV8_TILE_CODE_BYTES + lane * 16);
        scales[i] = 0;
        if (mine < STRIP_TILES)
            scales[i] =
                load_shared<4>(stage + STRIP_CODES + mine * KV8_TILE_SCALE_BYTES + g * 4).w[0];
    }
    if (warp == 0 && lane < KV8_STRIP_ROWS) {
        const uint32_t end = stage + STRIP_CODES + STRIP_SCALES;
        to.factors[idx][lane] = __uint_as_float(load_shared<4>(end + 4 * lane).w[0]) * CODE_FACTOR;
        to.biases[idx][lane] = low_bf16(load_shared<2>(end + 4 * KV8_STRIP_ROWS + 2 * lane).w[0]);
    }
    ring.release<TEAMS>();
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        float d[4][2][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t low[4], high[4];
                widen_codes(codes[i][j].w[k], low);
                widen_codes(codes[i][j].w[2 + k], high);
                mma_first(d[j][k], {low[0], high[0], low[1], high[1]}, x.pairs[i][0],
                          x.pairs[i][1]);
                mma<false>(d[j][k], {low[2], high[2], low[3], high[3]},
                           {x.pairs[i][2], x.pairs[i][3]});
            }
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int at = 2 * half + k;
                sum[half] = fmaf(pick(c, d[0][k][at], d[1][k][at], d[2][k][at], d[3][k][at]),
                                 scale_of(scales[i], at), sum[half]);
            }
    }
    // Odd lanes keep row g + 8.
    float kept = (c & 1 ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, c & 1 ? sum[0] : sum[1], 1);
    kept += __shfl_xor_sync(~0u, kept, 2);
    if (c < 2) to.sums[idx][g + 8 * c][warp] = kept;
}

}  // namespace kv8
