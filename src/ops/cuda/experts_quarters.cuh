// experts_quarters.cuh - the products of experts_stream.cuh where the copy engine brings the
// strips: a team of four warps has a strip, each a quarter of its tiles.
//
// A block's strips follow one another over all its items. A warp's ring holds its quarter of one
// strip, a chunk of the next strip taking the place of the one that it has multiplied: a chunk's
// place in the ring is its place in the quarter.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_bulk.cuh"

namespace kv8 {

constexpr int QUARTER_CHUNK = KV8_EXPERTS_BULK_TILES;
constexpr int QUARTER_CHUNK_BYTES = KV8_EXPERTS_BULK_CHUNK_BYTES;

// A warp's.
struct QuarterRing {
    uint32_t at;
    uint64_t policy;
    int scales_from;      // in a strip
    uint32_t parity = 0;  // of the strip that is multiplied

    __device__ __forceinline__ uint32_t chunk_at(int chunk) const {
        return at + chunk * QUARTER_CHUNK_BYTES;
    }
    __device__ __forceinline__ uint32_t full(int chunk) const {
        return chunk_at(chunk) + KV8_EXPERTS_BULK_BARRIER_AT;
    }
    // By all lanes, once they have read the chunk that lay here.
    __device__ __forceinline__ void fill(int chunk, const uint8_t *strip, const Quarter &quarter) {
        __syncwarp();
        if (!elected()) return;
        const int tile = quarter.first + chunk * QUARTER_CHUNK;
        const int tiles = min(QUARTER_CHUNK, quarter.last - tile);
        expect_bytes(full(chunk), tiles * TILE_BYTES);
        copy_tiles<QUARTER_CHUNK>(chunk_at(chunk), strip + tile * KV8_TILE_CODE_BYTES,
                                  strip + (scales_from + tile * KV8_TILE_SCALE_BYTES), tiles,
                                  full(chunk), policy);
    }
};

template <int MOST, bool DOWN>
__device__ __forceinline__ void stream_quarters(const kv8_experts_matmul_args &a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamList<MOST> list;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = warp / TEAM_WARPS, num_teams = blockDim.x / TEAM_THREADS;
    // The last quarter is the shortest: each scheduler has a warp of each.
    const int which = (warp + team) % TEAM_WARPS;
    const Quarter quarter(a.w.num_tiles, which);
    // Shared memory: sums to exchange; rings; rows.
    const uint32_t ring_bytes = KV8_EXPERTS_BULK_RING_BYTES(a.w.num_tiles);
    float2 *const exchange = reinterpret_cast<float2 *>(shared) + team * EXCHANGED;
    const uint32_t rings = smem_address(shared) + num_teams * (EXCHANGED * 8);
    const uint32_t rows = rings + num_teams * TEAM_WARPS * ring_bytes;
    QuarterRing ring = {rings + warp * ring_bytes, leave_first_policy(),
                        a.w.num_tiles * KV8_TILE_CODE_BYTES};
    const int num_chunks = (quarter.last - quarter.first + QUARTER_CHUNK - 1) / QUARTER_CHUNK;
    if (lane == 0) {
        for (int i = 0; i < num_chunks; i++) barrier_init(ring.full(i), 1);
        barrier_init_fence();
    }
    const uint32_t tile_bytes = TILE_ROWS * a.x_row_bytes;
    const uint32_t lane_x = lane % 8 * a.x_row_bytes + lane / 8 * 16;

    if (!DOWN) take_turn();  // down knows its weights earlier than its rows
    count_stream_items<MOST>(a, list);
    const Share share = share_of<MOST>(a, list, a.w.num_strips);
    UnitWalk<1> now(a, list, share, team);
    for (int i = 0; i < num_chunks && now.left > 0; i++) ring.fill(i, now.at, quarter);
    if (DOWN) take_turn();  // also without work
    const EndsAt ends_at(a);
    for_held_items<1, DOWN>(a, list, share, rows, [&](const Held &held) {
        int item_of_outputs = -1;
        uint8_t *outputs = nullptr;
        while (now.left > 0 && now.item < held.first + held.count) {
            const int idx = now.item - held.first;
            const Item item = held.item(idx);
            const Ends ends(ends_at, now.at);
            if (now.item != item_of_outputs) {
                item_of_outputs = now.item;
                outputs = outputs_at<DOWN>(a, item, which);
            }
            UnitWalk<1> next = now;
            next.next(a, list, num_teams);
            for_tiles<MOST>(item, [&](auto tiles) {
                constexpr int TILES_N = decltype(tiles)::value;
                Sums<TILES_N> sums[1] = {};
                uint32_t x_at =
                    rows + idx * tile_bytes + lane_x + quarter.first * (KV8_TILE_COLS * 2);
                for (int chunk = 0; chunk < num_chunks; chunk++) {
                    const uint32_t codes = ring.chunk_at(chunk) + lane * 16;
                    const uint32_t scales =
                        ring.chunk_at(chunk) + QUARTER_CHUNK * KV8_TILE_CODE_BYTES + lane / 4 * 4;
                    barrier_wait(ring.full(chunk), ring.parity);
                    for_chunk<QUARTER_CHUNK>(
                        quarter.last - quarter.first - chunk * QUARTER_CHUNK, [&](int i) {
                            add_tile<TILES_N>(sums, codes + i * KV8_TILE_CODE_BYTES,
                                              scales + i * KV8_TILE_SCALE_BYTES, 0,
                                              x_at + i * (KV8_TILE_COLS * 2), a.x_row_bytes);
                        });
                    x_at += QUARTER_CHUNK * KV8_TILE_COLS * 2;
                    if (next.left > 0) ring.fill(chunk, next.at, quarter);
                }
                ring.parity ^= 1;
                exchange_sums<TILES_N>(exchange, sums[0], which, 1 + team);
                end_strip<TILES_N, DOWN>(a, ends, exchange, which, outputs, now.strip());
            });
            now = next;
        }
    });
}

}  // namespace kv8
