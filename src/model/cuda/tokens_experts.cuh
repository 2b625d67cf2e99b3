// tokens_experts.cuh - the experts of several tokens: each that any of them chose once, its strips
// in the ring by the rows of those.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_products.cuh"
#include "token_router.cuh"
#include "token_strips.cuh"

namespace kv8 {

constexpr int TEAMS = KV8_TOKEN_WARPS / TEAM_WARPS;
// Rows of activations in shared memory, padded so that eight of them lie in different banks.
constexpr int X_ROWS = 8, X_ROW_BYTES = KV8_TOKEN_HIDDEN * 2 + 16;
static_assert(KV8_TOKENS_MAX <= X_ROWS, "columns of a product");
constexpr int MAX_PAIRS = KV8_TOKENS_MAX * TOP_K;
static_assert(MAX_PAIRS <= 32, "a lane each");

// The experts of a layer, in the order of the first token that chose each. A *pair* is a token and
// one of its choices: token * TOP_K + the choice.
struct ChosenExperts {
    int count;
    int expert[MAX_PAIRS];
    uint32_t pairs[MAX_PAIRS];  // of each, a bit each

    // By a warp; chosen[pair].
    __device__ void list(const int *chosen, int num_pairs) {
        const int lane = threadIdx.x % 32;
        const bool lives = lane < num_pairs;
        const int mine = lives ? chosen[lane] : -1 - lane;
        const uint32_t same = __match_any_sync(~0u, mine), before = (1u << lane) - 1;
        const bool is_first = lives && (same & before) == 0;
        const uint32_t firsts = __ballot_sync(~0u, is_first);
        if (is_first) {
            const int idx = __popc(firsts & before);
            expert[idx] = mine, pairs[idx] = same;
        }
        if (lane == 0) count = __popc(firsts);
    }
};

// The one bit that is set and has `rank` set bits below it.
__device__ __forceinline__ int set_bit(uint32_t bits, int rank) {
    for (int i = 0; i < rank; i++) bits &= bits - 1;
    return __ffs(static_cast<int>(bits)) - 1;
}

// As load_matrices(), of rows that stand: other accesses may pass it.
__device__ __forceinline__ void load_matrices_ahead(uint32_t (&x)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at));
}

// What a chunk of tiles needs in registers.
constexpr int CHUNK_TILES = 3;
struct StripChunk {
    Words<16> codes[CHUNK_TILES];
    uint32_t scales[CHUNK_TILES], x[CHUNK_TILES][2][4];

    // Tiles from `tile` on; x_at: this lane's address of ldmatrix.
    __device__ __forceinline__ void load(uint32_t stage, uint32_t x_at, int tile) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++) {
            codes[i] = load_shared<16>(stage + (tile + i) * KV8_TILE_CODE_BYTES + lane * 16);
            scales[i] = load_shared<4>(stage + STRIP_CODES + (tile + i) * KV8_TILE_SCALE_BYTES +
                                       lane / 4 * 4)
                            .w[0];
#pragma unroll
            for (int b = 0; b < 2; b++)
                load_matrices_ahead(x[i][b], x_at + (tile + i) * (KV8_TILE_COLS * 2) + b * 64);
        }
    }
    __device__ __forceinline__ void multiply(Sums<1> &sums) const {
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i++)
#pragma unroll
            for (int b = 0; b < 2; b++) {
                uint32_t low[4], high[4];
                widen_codes(codes[i].w[b], low);
                widen_codes(codes[i].w[2 + b], high);
                float d[4] = {0, 0, 0, 0};
                mma<false>(d, {low[0], high[0], low[1], high[1]}, {x[i][b][0], x[i][b][1]});
                mma<false>(d, {low[2], high[2], low[3], high[3]}, {x[i][b][2], x[i][b][3]});
                const float scale[2] = {scale_of(scales[i], b), scale_of(scales[i], 2 + b)};
#pragma unroll
                for (int n = 0; n < 4; n++) sums.s[0][n] = fmaf(d[n], scale[n / 2], sums.s[0][n]);
            }
    }
};

// What ends this lane's rows g and g + 8 of a strip in the ring.
struct StripEnds {
    float factor[2], bias[2];

    __device__ explicit StripEnds(uint32_t stage) {
        const uint32_t end = stage + STRIP_CODES + STRIP_SCALES, row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[i] = __uint_as_float(load_shared<4>(end + 4 * (row + 8 * i)).w[0]) * CODE_FACTOR;
            bias[i] = low_bf16(load_shared<2>(end + 4 * KV8_STRIP_ROWS + 2 * (row + 8 * i)).w[0]);
        }
    }
};

// Sums on their way from the warps of a team to those that end a strip, of two strips in turn.
struct StripExchange {
    float2 sums[TEAMS][2][TEAM_WARPS][2][32];
};

// The strips of a share by turns of the teams, by the rows at `x`: what(strip, column, row g, row
// g + 8) of every column. A strip ends while the next one is multiplied: nobody waits for a warp
// that is behind, and the first tiles of a strip are read ahead.
template <class WHAT>
__device__ __forceinline__ void multiply_strips(RingReader &ring, const Share &strips, uint32_t x,
                                                StripExchange &exchange, WHAT &&what) {
    const int lane = threadIdx.x % 32, team = threadIdx.x / (32 * TEAM_WARPS);
    // The last quarter is the shortest, three chunks for four: each scheduler has a warp of each.
    const int which = (threadIdx.x / 32 + team) % TEAM_WARPS;
    constexpr int QUARTER = (STRIP_TILES + TEAM_WARPS - 1) / TEAM_WARPS, CHUNKS = 4;
    static_assert(QUARTER == CHUNKS * CHUNK_TILES && STRIP_TILES % CHUNK_TILES == 0 &&
                      STRIP_TILES == TEAM_WARPS * QUARTER - CHUNK_TILES,
                  "chunks of a quarter");
    const bool is_whole = which < TEAM_WARPS - 1;
    const int first = which * QUARTER;
    const uint32_t x_at = x + lane % 8 * X_ROW_BYTES + lane / 8 * 16;
    auto &sums_of = exchange.sums[team];
    const uint32_t begin = ring.n;
    StripChunk chunks[2];
    float factor[2] = {}, bias[2] = {};  // of the strip before, as its sums wait
    bool waits = false;
    const auto end_strip = [&](int i) {
        named_barrier_sync(3 + team, TEAM_THREADS);
        if (which >= 2) return;
        float sum[2] = {0, 0};
#pragma unroll
        for (int w = 0; w < TEAM_WARPS; w++) {
            const float2 part = sums_of[i / TEAMS % 2][w][which][lane];
            sum[0] += part.x, sum[1] += part.y;
        }
        what(strips.begin + i, lane % 4 * 2 + which, fmaf(sum[0], factor[0], bias[0]),
             fmaf(sum[1], factor[1], bias[1]));
    };
    uint32_t stage = 0;
    if (team < strips.count()) {
        ring.n = begin + team;
        stage = ring.wait();
        chunks[0].load(stage, x_at, first);
    }
    int i = team;
#pragma unroll 1
    for (; i < strips.count(); i += TEAMS) {
        Sums<1> sums = {};
        ring.n = begin + i;
        chunks[1].load(stage, x_at, first + CHUNK_TILES);
        chunks[0].multiply(sums);
        if (waits) end_strip(i - TEAMS);
        const StripEnds ends(stage);
#pragma unroll
        for (int n = 0; n < 2; n++) factor[n] = ends.factor[n], bias[n] = ends.bias[n];
        chunks[0].load(stage, x_at, first + 2 * CHUNK_TILES);
        chunks[1].multiply(sums);
        if (is_whole) chunks[1].load(stage, x_at, first + 3 * CHUNK_TILES);
        ring.release<TEAMS>();
        chunks[0].multiply(sums);
        if (i + TEAMS < strips.count()) {
            ring.n = begin + i + TEAMS;
            stage = ring.wait();
            chunks[0].load(stage, x_at, first);
        }
        if (is_whole) chunks[1].multiply(sums);
        auto &mine = sums_of[i / TEAMS % 2][which];
        mine[0][lane] = {sums.s[0][0], sums.s[0][2]};
        mine[1][lane] = {sums.s[0][1], sums.s[0][3]};
        waits = true;
    }
    if (waits) end_strip(i - TEAMS);
    ring.n = begin + strips.count();
}

}  // namespace kv8
