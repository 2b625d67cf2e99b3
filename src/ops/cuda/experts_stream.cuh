// experts_stream.cuh - strips of experts times few rows each, the body of the streaming kernels:
// every chosen expert's weights are read once.
//
// An *item* is an expert and up to 8 or 16 of the rows that chose it; its rows lie whole in shared
// memory, as the columns of the products. All strips of all items, in order, are cut among the
// blocks (experts_stream_items.cuh). In a block, teams of four warps take strips in turn; a warp
// has a quarter of its team's strips, as one stream: each lane copies what it alone reads into a
// ring of its warp's, STAGES chunks of tiles deep, so that nobody waits for anybody but at a
// strip's end, where the team adds up four partial sums in order. Scales follow the products (f32,
// exact for every byte).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_strip.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int STAGES = KV8_EXPERTS_STAGES, CHUNK = KV8_EXPERTS_CHUNK_TILES;
constexpr int STAGE_BYTES = KV8_EXPERTS_STAGE_BYTES, CHUNK_BYTES = CHUNK * STAGE_BYTES;

// A team's strips: one in num_teams from `strip` of all on.
struct StripWalk {
    int left;        // strips to `stop`, this one among them; 0 or less: none
    int strip, idx;  // within its item; of those held
    const uint8_t *at;

    __device__ __forceinline__ void find(const kv8_experts_matmul_args &a, const Held &held) {
        if (left > 0)
            at = a.w.data + held.item(idx).expert * a.w.expert_bytes +
                 static_cast<int64_t>(strip) * a.w.strip_bytes;
    }
    __device__ __forceinline__ void next(const kv8_experts_matmul_args &a, const Held &held,
                                         int num_teams) {
        left -= num_teams;
        strip += num_teams;
        at += static_cast<int64_t>(num_teams) * a.w.strip_bytes;
        if (strip < a.w.num_strips) return;
        for (; strip >= a.w.num_strips; strip -= a.w.num_strips) idx++;
        find(a, held);
    }
};

template <int MOST, bool DOWN>
__device__ __forceinline__ void stream(const kv8_experts_matmul_args &a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamList<MOST> list;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = warp / TEAM_WARPS, num_teams = blockDim.x / TEAM_THREADS;
    const int which = warp % TEAM_WARPS;
    const Quarter quarter(a.w.num_tiles, which);
    // Shared memory: sums to exchange; rings; rows.
    float2 *const exchange = reinterpret_cast<float2 *>(shared) + team * EXCHANGED;
    const uint32_t rings = smem_address(shared) + num_teams * (EXCHANGED * 8);
    const uint32_t ring = rings + warp * (STAGES * CHUNK_BYTES);
    const uint32_t rows = rings + num_teams * (TEAM_WARPS * STAGES * CHUNK_BYTES);
    const uint32_t tile_bytes = TILE_ROWS * a.x_row_bytes;
    const uint32_t lane_x = lane % 8 * a.x_row_bytes + lane / 8 * 16;
    const EndsAt ends_at(a);
    if (!DOWN) take_turn();  // down knows its weights earlier than its rows
    count_stream_items<MOST>(a, list);
    const Share share = share_of<MOST>(a, list, a.w.num_strips);
    const int end_item = (share.end + a.w.num_strips - 1) / a.w.num_strips;
    for (int at = share.begin; at < share.end;) {
        const Held held(a, list, at / a.w.num_strips, end_item);
        const int stop = min(share.end, (held.first + held.count) * a.w.num_strips);
        StripWalk now = {stop - at - team, at - held.first * a.w.num_strips + team, 0, nullptr};
        for (; now.strip >= a.w.num_strips; now.strip -= a.w.num_strips) now.idx++;
        now.find(a, held);
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
                for_chunk<CHUNK>(quarter.last - ahead_tile, copy_tile);
                ahead_tile += CHUNK;
                if (ahead_tile >= quarter.last) {
                    ahead_tile = quarter.first;
                    ahead.next(a, held, num_teams);
                }
            }
            copy_commit();
            ahead_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
        };
        for (int i = 0; i < STAGES - 1; i++) copy_next();
        if (DOWN) take_turn();
        __syncthreads();  // the rows before have been read
        for (int i = 0; i < held.count; i++)
            copy_rows<DOWN>(a, held.item(i), rows + i * tile_bytes);
        copy_wait_all();
        __syncthreads();  // the rows have come

        int stage = 0;
        for (; now.left > 0; now.next(a, held, num_teams)) {
            const Ends ends(ends_at, now.at);
            const Item item = held.item(now.idx);
            uint8_t *const outputs = outputs_at<DOWN>(a, item, which);
            const uint32_t x_at = rows + now.idx * tile_bytes + lane_x;
            const auto multiply = [&](auto tiles) {
                constexpr int TILES_N = decltype(tiles)::value;
                Sums<TILES_N> sums[1] = {};
                for (int tile = quarter.first; tile < quarter.last; tile += CHUNK) {
                    copy_next();
                    copy_wait<STAGES - 1>();
                    const uint32_t x_tile = x_at + tile * (KV8_TILE_COLS * 2);
                    const uint32_t chunk = ring + stage * CHUNK_BYTES;
                    for_chunk<CHUNK>(quarter.last - tile, [&](int i) {
                        const uint32_t from = chunk + i * STAGE_BYTES;
                        add_tile<TILES_N>(sums, from + lane * 16,
                                          from + KV8_TILE_CODE_BYTES + lane * 4, 0,
                                          x_tile + i * (KV8_TILE_COLS * 2), a.x_row_bytes);
                    });
                    stage = stage + 1 == STAGES ? 0 : stage + 1;
                }
                exchange_sums<TILES_N>(exchange, sums[0], which, 1 + team);
                end_strip<TILES_N, DOWN>(a, ends, exchange, which, outputs, now.strip);
            };
            for_tiles<MOST>(item, multiply);
        }
        copy_wait_all();
        at = stop;
    }
    if (DOWN) take_turn();  // also without work
}

}  // namespace kv8
