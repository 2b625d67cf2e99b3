// experts_stream.cuh - strips of experts times few rows each, the body of the streaming kernels:
// every chosen expert's weights are read once.
//
// An *item* is an expert and up to 8 * TILES_N of the rows that chose it; its rows lie whole in
// shared memory, as the columns of the products. All strips of all items, in order, are cut evenly
// among the blocks. In a block, teams of four warps take strips in turn; a warp has a quarter of
// its team's strips, as one stream: each lane copies what it alone reads into a ring of its warp's,
// STAGES chunks of tiles deep, so that nobody waits for anybody but at a strip's end, where the
// team adds up four partial sums in order. Scales follow the products (f32, exact for every byte).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_args.h"
#include "experts_gate.cuh"
#include "experts_items.cuh"
#include "mxfp4_strip.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int TEAM_WARPS = KV8_EXPERTS_TEAM_WARPS, TEAM_THREADS = KV8_EXPERTS_TEAM_THREADS;
constexpr int STAGES = KV8_EXPERTS_STAGES, CHUNK = KV8_EXPERTS_CHUNK_TILES;
constexpr int STAGE_BYTES = KV8_EXPERTS_STAGE_BYTES, CHUNK_BYTES = CHUNK * STAGE_BYTES;

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

// A team's strips: one in num_teams from `strip` of all on.
struct StripWalk {
    int left;         // strips to `stop`, this one among them; 0 or less: none
    int strip, item;  // within its item; of those held
    const uint8_t *at;

    __device__ __forceinline__ void find(const kv8_experts_matmul_args &a, const Item *items) {
        if (left > 0)
            at = a.w.data + items[item].expert * a.w.expert_bytes +
                 static_cast<int64_t>(strip) * a.w.strip_bytes;
    }
    __device__ __forceinline__ void next(const kv8_experts_matmul_args &a, const Item *items,
                                         int num_teams) {
        left -= num_teams;
        strip += num_teams;
        at += static_cast<int64_t>(num_teams) * a.w.strip_bytes;
        if (strip < a.w.num_strips) return;
        for (; strip >= a.w.num_strips; strip -= a.w.num_strips) item++;
        find(a, items);
    }
};

// what(i) for the tiles of a chunk, `left` of them at most; whole chunks without a question.
template <typename WHAT>
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

// A tile's products with the rows at x_at, this lane's address of ldmatrix; scaled and added.
template <int TILES_N>
__device__ __forceinline__ void add_tile(Sums<TILES_N> &sums, uint32_t stage, uint32_t x_at,
                                         int x_row_bytes) {
    const int lane = threadIdx.x % 32;
    const Words<16> codes = load_shared<16>(stage + lane * 16);
    const uint32_t scales = load_shared<4>(stage + KV8_TILE_CODE_BYTES + lane * 4).w[0];
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

// What ends a strip, for one thread's row (and its up, of gate_up): loaded as the strip begins.
template <bool DOWN>
struct RowEnd {
    float factor[DOWN ? 1 : 2], bias[DOWN ? 1 : 2];
    __device__ __forceinline__ RowEnd(const kv8_experts_matmul_args &a, const uint8_t *strip) {
        const uint8_t *const end =
            strip + a.w.num_tiles * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES);
        const int row = threadIdx.x % (DOWN ? 16 : 8);
#pragma unroll
        for (int i = 0; i < (DOWN ? 1 : 2); i++) {
            factor[i] = reinterpret_cast<const float *>(end)[row + 8 * i];
            const uint32_t bits = reinterpret_cast<const uint16_t *>(end + 64)[row + 8 * i];
            bias[i] = __uint_as_float(bits << 16);
        }
    }
    __device__ __forceinline__ float value(float sum, int i) const {
        return sum * CODE_FACTOR * factor[i] + bias[i];
    }
};

// partial: [TEAM_WARPS][TILES_N][16 rows][8 columns]. A thread keeps its row, of RowEnd.
template <int TILES_N, bool DOWN>
__device__ __forceinline__ void end_strip(const kv8_experts_matmul_args &a, const RowEnd<DOWN> &end,
                                          const float *partial, const Item &item, int strip) {
    constexpr int ROWS = DOWN ? 16 : 8;
    const int thread = threadIdx.x % TEAM_THREADS, row = thread % ROWS;
    for (int column = thread / ROWS; column < item.count; column += TEAM_THREADS / ROWS) {
        const float *const from = partial + column / 8 * 128 + row * 8 + column % 8;
        float sum[2] = {0, 0};
#pragma unroll
        for (int w = 0; w < TEAM_WARPS; w++) {
            sum[0] += from[w * TILES_N * 128];
            if constexpr (!DOWN) sum[1] += from[w * TILES_N * 128 + 64];
        }
        const int place = item.first + column;
        if constexpr (DOWN) {
            const int64_t to = static_cast<int64_t>(a.routing.sorted[place]) * a.w.num_strips * 16;
            static_cast<float *>(a.y)[to + strip * 16 + row] = end.value(sum[0], 0);
        } else {
            const float y = gate(end.value(sum[0], 0), end.value(sum[1], 1), a.alpha, a.limit);
            const int64_t to = static_cast<int64_t>(place) * a.w.num_strips * 8;
            static_cast<__half *>(a.y)[to + strip * 8 + row] = __float2half_rn(y);
        }
    }
}

template <int TILES_N, bool DOWN>
__device__ __forceinline__ void stream(const kv8_experts_matmul_args &a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ItemList list;
    __shared__ Item items[KV8_EXPERTS_MAX_X];
    constexpr int ITEM_ROWS = 8 * TILES_N;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = warp / TEAM_WARPS, num_teams = blockDim.x / TEAM_THREADS;
    const Quarter quarter(a.w.num_tiles, warp % TEAM_WARPS);
    // Shared memory: partial sums, twice for each team; rings; rows.
    float *const partial =
        reinterpret_cast<float *>(shared) + team * (2 * TEAM_WARPS * TILES_N * 128);
    const uint32_t rings = smem_address(shared) + num_teams * (2 * TEAM_WARPS * TILES_N * 512);
    const uint32_t ring = rings + warp * (STAGES * CHUNK_BYTES);
    const uint32_t rows = rings + num_teams * (TEAM_WARPS * STAGES * CHUNK_BYTES);
    const uint32_t item_bytes = ITEM_ROWS * a.x_row_bytes;
    const uint32_t lane_x = lane % 8 * a.x_row_bytes + lane / 8 * 16;

    if (!DOWN) take_turn();  // down knows its weights earlier than its rows
    count_items<ITEM_ROWS>(a, list);
    const int64_t total = static_cast<int64_t>(list.first_item[a.num_experts]) * a.w.num_strips;
    int at = static_cast<int>(total * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
    int half = 0;  // of the partial sums
    while (at < end) {
        const int item0 = at / a.w.num_strips;
        const int stop = min(end, (item0 + a.num_x) * a.w.num_strips);
        const int num_items = (stop - 1) / a.w.num_strips - item0 + 1;
        __syncthreads();
        if (threadIdx.x < num_items)
            items[threadIdx.x] = item_of<ITEM_ROWS, 8>(a, list, item0 + threadIdx.x);
        __syncthreads();
        StripWalk now = {stop - at - team, at - item0 * a.w.num_strips + team, 0, nullptr};
        for (; now.strip >= a.w.num_strips; now.strip -= a.w.num_strips) now.item++;
        now.find(a, items);
        StripWalk ahead = now;
        if (quarter.first == quarter.last) ahead.left = 0;
        int ahead_tile = quarter.first, ahead_stage = 0;
        const auto copy_next = [&]() {
            if (ahead.left > 0) {
                const uint32_t to = ring + ahead_stage * CHUNK_BYTES;
                const uint8_t *const codes =
                    ahead.at + (ahead_tile * KV8_TILE_CODE_BYTES + lane * 16);
                const uint8_t *const scales =
                    ahead.at + (a.w.num_tiles * KV8_TILE_CODE_BYTES +
                                ahead_tile * KV8_TILE_SCALE_BYTES + lane / 4 * 4);
                const auto copy_tile = [&](int i) {
                    copy16_once<true>(to + i * STAGE_BYTES + lane * 16,
                                      codes + i * KV8_TILE_CODE_BYTES);
                    copy4(to + i * STAGE_BYTES + KV8_TILE_CODE_BYTES + lane * 4,
                          scales + i * KV8_TILE_SCALE_BYTES);
                };
                for_chunk(quarter.last - ahead_tile, copy_tile);
                ahead_tile += CHUNK;
                if (ahead_tile >= quarter.last) {
                    ahead_tile = quarter.first;
                    ahead.next(a, items, num_teams);
                }
            }
            copy_commit();
            ahead_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
        };
        for (int i = 0; i < STAGES - 1; i++) copy_next();
        if (DOWN) take_turn();
        for (int i = 0; i < num_items; i++) copy_rows<DOWN>(a, items[i], rows + i * item_bytes);
        copy_wait_all();
        __syncthreads();  // the rows have come

        int stage = 0;
        for (; now.left > 0; now.next(a, items, num_teams)) {
            const RowEnd<DOWN> row_end(a, now.at);
            const Item item = items[now.item];
            const int strip = now.strip;
            Sums<TILES_N> sums = {};
            const uint32_t x_at = rows + now.item * item_bytes + lane_x;
            for (int tile = quarter.first; tile < quarter.last; tile += CHUNK) {
                copy_next();
                copy_wait<STAGES - 1>();
                const uint32_t x_tile = x_at + tile * (KV8_TILE_COLS * 2);
                const uint32_t chunk = ring + stage * CHUNK_BYTES;
                for_chunk(quarter.last - tile, [&](int i) {
                    add_tile<TILES_N>(sums, chunk + i * STAGE_BYTES,
                                      x_tile + i * (KV8_TILE_COLS * 2), a.x_row_bytes);
                });
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            float *const to = partial + half * (TEAM_WARPS * TILES_N * 128);
            float *const mine =
                to + warp % TEAM_WARPS * (TILES_N * 128) + lane / 4 * 8 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < TILES_N; n++) {
                *reinterpret_cast<float2 *>(mine + n * 128) = {sums.s[n][0], sums.s[n][1]};
                *reinterpret_cast<float2 *>(mine + n * 128 + 64) = {sums.s[n][2], sums.s[n][3]};
            }
            named_barrier_sync(1 + team, TEAM_THREADS);
            end_strip<TILES_N, DOWN>(a, row_end, to, item, strip);
            half ^= 1;
        }
        copy_wait_all();
        at = stop;
    }
    if (DOWN) take_turn();  // also without work
}

}  // namespace kv8
