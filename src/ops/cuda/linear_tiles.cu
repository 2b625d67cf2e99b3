// linear_tiles.cu - a dense product for many tokens: tiles of weights and tokens pass through
// shared memory, and mma.sync multiplies them.
//
// A tile is ROWS rows of w times TOKENS tokens. A stage of the ring holds DEPTH columns of both, in
// pieces of 64 columns: rows of 128 bytes, chunk j of row r at j ^ r % 8, so that ldmatrix meets no
// bank twice. Warps share a tile along rows, tokens and columns (DEEP): few tokens make few tiles,
// and then it is warps side by side over the columns that keep a multiprocessor busy. Their sums
// meet in shared memory, in the order of the warps.
//
// Grid: the tiles, KV8_LINEAR_GROUP tiles of rows at a time over all tokens, so that blocks which
// run together read few rows of both. Block: 8 warps. Shared memory: the ring. Bytes: w once a tile
// of tokens and x once a tile of rows, mostly from the L2. Bound by: memory for up to about 200
// tokens, products for more.
//
// SPDX-License-Identifier: Apache-2.0
#include "linear_store.cuh"
#include "ptx_sm80.cuh"
#include "take_turn.cuh"

namespace kv8 {

static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

template <int ROWS_, int TOKENS_, int DEPTH_, int STAGES_, int ALONG_ROWS_, int ALONG_TOKENS_>
struct TileShape {
    static constexpr int ROWS = ROWS_, TOKENS = TOKENS_, DEPTH = DEPTH_, STAGES = STAGES_;
    static constexpr int ALONG_ROWS = ALONG_ROWS_, ALONG_TOKENS = ALONG_TOKENS_;
    static constexpr int WARPS = KV8_LINEAR_TILE_THREADS / 32;
    static constexpr int DEEP = WARPS / (ALONG_ROWS * ALONG_TOKENS);
    static constexpr int PIECES = DEPTH / 64;
    static constexpr int MMA_ROWS = ROWS / ALONG_ROWS / 16;       // of a warp
    static constexpr int MMA_TOKENS = TOKENS / ALONG_TOKENS / 8;  // of a warp
    static constexpr int STEPS = DEPTH / 16 / DEEP;               // of a stage and warp
    static constexpr int W_BYTES = ROWS * DEPTH * 2, X_BYTES = TOKENS * DEPTH * 2;
    static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
    static constexpr int PITCH = ROWS + 4;  // of sums: tokens two apart lie in other banks
    static constexpr int SUM_BYTES = DEEP * TOKENS * PITCH * 4;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int BYTES = SUM_BYTES > RING_BYTES ? SUM_BYTES : RING_BYTES;
    static_assert(MMA_TOKENS % 2 == 0 && STEPS >= 1, "whole ldmatrix, work for every warp");
};

// LINES rows of a matrix of num_lines, DEPTH columns from `column`, into the stage; zeros past the
// matrix' ends.
template <int LINES, int DEPTH>
static __device__ __forceinline__ void load_stage(uint32_t to, const void *from, int32_t first,
                                                  int32_t num_lines, int32_t column, int32_t cols) {
    constexpr int CHUNKS = LINES * DEPTH / 8;
#pragma unroll
    for (int i = 0; i < (CHUNKS + KV8_LINEAR_TILE_THREADS - 1) / KV8_LINEAR_TILE_THREADS; i++) {
        const int idx = threadIdx.x + i * KV8_LINEAR_TILE_THREADS;
        if (CHUNKS % KV8_LINEAR_TILE_THREADS != 0 && idx >= CHUNKS) break;
        const int line = idx / (DEPTH / 8), wide = idx % (DEPTH / 8), piece = wide / 8;
        const int32_t at = column + 8 * wide;
        const bool inside = first + line < num_lines && at < cols;
        const auto *const source =
            static_cast<const uint16_t *>(from) + (inside ? int64_t{first + line} * cols + at : 0);
        copy16_or_zero(to + piece * (LINES * 128) + line * 128 + ((wide % 8) ^ (line % 8)) * 16,
                       source, inside);
    }
}

template <typename SHAPE>
struct Sums {
    float at[SHAPE::MMA_ROWS][SHAPE::MMA_TOKENS][4];
};

// 16 columns of a stage: chunks 2 * step and 2 * step + 1 of its rows.
template <typename SHAPE>
static __device__ __forceinline__ void multiply16(Sums<SHAPE> &sums, uint32_t stage, int step,
                                                  int warp_row, int warp_token) {
    const int lane = threadIdx.x % 32, piece = step / 4, chunk = step % 4 * 2;
    const uint32_t w = stage + piece * (SHAPE::ROWS * 128);
    const uint32_t x = stage + SHAPE::W_BYTES + piece * (SHAPE::TOKENS * 128);
    uint32_t token[SHAPE::MMA_TOKENS][2];
#pragma unroll
    for (int j = 0; j < SHAPE::MMA_TOKENS; j += 2) {
        const int line = warp_token + 8 * j + lane / 16 * 8 + lane % 8;
        uint32_t two[4];
        load_matrices(two, x + line * 128 + ((chunk + lane / 8 % 2) ^ (line % 8)) * 16);
        token[j][0] = two[0];
        token[j][1] = two[1];
        token[j + 1][0] = two[2];
        token[j + 1][1] = two[3];
    }
#pragma unroll
    for (int i = 0; i < SHAPE::MMA_ROWS; i++) {
        const int line = warp_row + 16 * i + lane % 16;
        uint32_t row[4];
        load_matrices(row, w + line * 128 + ((chunk + lane / 16) ^ (line % 8)) * 16);
#pragma unroll
        for (int j = 0; j < SHAPE::MMA_TOKENS; j++) mma<false>(sums.at[i][j], row, token[j]);
    }
}

// The warps' sums to shared memory, [DEEP][TOKENS][PITCH].
template <typename SHAPE>
static __device__ __forceinline__ void gather(const Sums<SHAPE> &sums, float *part, int warp_row,
                                              int warp_token) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < SHAPE::MMA_ROWS; i++) {
#pragma unroll
        for (int j = 0; j < SHAPE::MMA_TOKENS; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++)
                part[(warp_token + 8 * j + 2 * c + k % 2) * SHAPE::PITCH + warp_row + 16 * i + g +
                     k / 2 * 8] = sums.at[i][j][k];
        }
    }
}

template <typename SHAPE>
static __device__ __forceinline__ void store_tile(const kv8_linear_args &a, const Tile &tile,
                                                  const float *part) {
    for (int idx = threadIdx.x; idx < SHAPE::TOKENS * SHAPE::ROWS / 4;
         idx += KV8_LINEAR_TILE_THREADS) {
        const int token = idx / (SHAPE::ROWS / 4), row = idx % (SHAPE::ROWS / 4) * 4;
        float4 y = {0, 0, 0, 0};
#pragma unroll
        for (int deep = 0; deep < SHAPE::DEEP; deep++) {
            const float4 more = *reinterpret_cast<const float4 *>(
                part + (deep * SHAPE::TOKENS + token) * SHAPE::PITCH + row);
            y = {y.x + more.x, y.y + more.y, y.z + more.z, y.w + more.w};
        }
        if (tile.first_token + token < a.n)
            store_four(a, tile.first_token + token, tile.first_row + row, y);
    }
}

template <typename SHAPE>
static __device__ __forceinline__ void multiply_tile(const kv8_linear_args &a) {
    extern __shared__ __align__(128) uint8_t ring[];
    const uint32_t base = smem_address(ring);
    const int warp = threadIdx.x / 32, deep = warp / (SHAPE::ALONG_ROWS * SHAPE::ALONG_TOKENS);
    const int warp_row = warp % SHAPE::ALONG_ROWS * (SHAPE::ROWS / SHAPE::ALONG_ROWS);
    const int warp_token =
        warp / SHAPE::ALONG_ROWS % SHAPE::ALONG_TOKENS * (SHAPE::TOKENS / SHAPE::ALONG_TOKENS);
    const Tile tile = find_tile(a, SHAPE::ROWS, SHAPE::TOKENS, blockIdx.x);
    const int32_t num_stages = (a.cols + SHAPE::DEPTH - 1) / SHAPE::DEPTH;
    const auto load = [&](int32_t i) {
        const uint32_t to = base + i % SHAPE::STAGES * SHAPE::STAGE_BYTES;
        if (i < num_stages) {
            load_stage<SHAPE::ROWS, SHAPE::DEPTH>(to, a.w, tile.first_row, a.rows, i * SHAPE::DEPTH,
                                                  a.cols);
            load_stage<SHAPE::TOKENS, SHAPE::DEPTH>(to + SHAPE::W_BYTES, a.x, tile.first_token, a.n,
                                                    i * SHAPE::DEPTH, a.cols);
        }
        copy_commit();
    };
    Sums<SHAPE> sums = {};
    take_turn();
#pragma unroll
    for (int i = 0; i < SHAPE::STAGES - 1; i++) load(i);
    for (int32_t i = 0; i < num_stages; i++) {
        copy_wait<SHAPE::STAGES - 2>();
        __syncthreads();  // stage i has come, and all have left stage i - 1
        load(i + SHAPE::STAGES - 1);
        const uint32_t stage = base + i % SHAPE::STAGES * SHAPE::STAGE_BYTES;
#pragma unroll
        for (int step = 0; step < SHAPE::STEPS; step++)
            multiply16(sums, stage, deep * SHAPE::STEPS + step, warp_row, warp_token);
    }
    copy_wait<0>();
    __syncthreads();
    float *const part = reinterpret_cast<float *>(ring);
    gather(sums, part + deep * SHAPE::TOKENS * SHAPE::PITCH, warp_row, warp_token);
    __syncthreads();
    store_tile<SHAPE>(a, tile, part);
}

}  // namespace kv8

#define KV8_LINEAR_TILE(NAME, ROWS, TOKENS, DEPTH, STAGES, ALONG_ROWS, ALONG_TOKENS)         \
    extern "C" __global__ void __launch_bounds__(KV8_LINEAR_TILE_THREADS)                    \
        NAME(const __grid_constant__ kv8_linear_args a) {                                    \
        using shape = kv8::TileShape<ROWS, TOKENS, DEPTH, STAGES, ALONG_ROWS, ALONG_TOKENS>; \
        static_assert(shape::BYTES == KV8_LINEAR_TILE_BYTES(ROWS, TOKENS, DEPTH, STAGES,     \
                                                            ALONG_ROWS, ALONG_TOKENS),       \
                      "what the host asks for");                                             \
        kv8::multiply_tile<shape>(a);                                                        \
    }
#include "linear_kernels.inc"
