// experts_bulk.cuh - the products of experts_stream.cuh where the copy engine brings the strips.
//
// A block's strips follow one another over all its items. A warp's ring holds its quarter of one
// strip, a chunk of the next strip taking the place of the one that it has multiplied: a chunk's
// place in the ring is its place in the quarter.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_strip.cuh"
#include "ptx_sm90.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int CHUNK = KV8_EXPERTS_BULK_TILES, BULK_CHUNK_BYTES = KV8_EXPERTS_BULK_CHUNK_BYTES;

// A team's strips of the block's: one in num_teams.
struct BulkWalk {
    int left;         // strips of the block from this one on; 0 or less: none
    int item, strip;  // within it
    const uint8_t *at;

    __device__ __forceinline__ void find(const kv8_experts_matmul_args &a, const ItemList &list) {
        if (left > 0)
            at = a.w.data + stream_item_of(a, list, item).expert * a.w.expert_bytes +
                 static_cast<int64_t>(strip) * a.w.strip_bytes;
    }
    __device__ __forceinline__ void next(const kv8_experts_matmul_args &a, const ItemList &list,
                                         int num_teams) {
        left -= num_teams;
        strip += num_teams;
        at += static_cast<int64_t>(num_teams) * a.w.strip_bytes;
        if (strip < a.w.num_strips) return;
        for (; strip >= a.w.num_strips; strip -= a.w.num_strips) item++;
        find(a, list);
    }
};

// A warp's; barriers behind the chunks.
struct BulkRing {
    uint32_t at, barriers;
    uint64_t policy;
    int num_chunks, scales_from;  // of a quarter; in a strip
    uint32_t parity = 0;          // of the strip that is multiplied

    // By all lanes, once they have read the chunk that lay here.
    __device__ __forceinline__ void fill(int chunk, const uint8_t *strip, const Quarter &quarter) {
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        const uint32_t to = at + chunk * BULK_CHUNK_BYTES, full = barriers + 8 * chunk;
        const int tile = quarter.first + chunk * CHUNK, tiles = min(CHUNK, quarter.last - tile);
        expect_bytes(full, tiles * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES));
        copy_bulk(to, strip + tile * KV8_TILE_CODE_BYTES, tiles * KV8_TILE_CODE_BYTES, full,
                  policy);
        copy_bulk(to + CHUNK * KV8_TILE_CODE_BYTES,
                  strip + (scales_from + tile * KV8_TILE_SCALE_BYTES), tiles * KV8_TILE_SCALE_BYTES,
                  full, policy);
    }
};

template <int MOST, bool DOWN>
__device__ __forceinline__ void stream_bulk(const kv8_experts_matmul_args &a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamList<MOST> list;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = warp / TEAM_WARPS, num_teams = blockDim.x / TEAM_THREADS;
    // The last quarter is the shortest: each scheduler has a warp of each.
    const int which = (warp + team) % TEAM_WARPS;
    const Quarter quarter(a.w.num_tiles, which);
    // Shared memory: sums to exchange; rings; rows.
    const int ring_chunks = KV8_EXPERTS_BULK_CHUNKS(a.w.num_tiles);
    float2 *const exchange = reinterpret_cast<float2 *>(shared) + team * EXCHANGED;
    const uint32_t rings = smem_address(shared) + num_teams * (EXCHANGED * 8);
    const uint32_t ring_bytes = KV8_EXPERTS_BULK_RING_BYTES(ring_chunks);
    const uint32_t rows = rings + num_teams * TEAM_WARPS * ring_bytes;
    BulkRing ring = {rings + warp * ring_bytes,
                     rings + warp * ring_bytes + ring_chunks * BULK_CHUNK_BYTES,
                     leave_first_policy(), (quarter.last - quarter.first + CHUNK - 1) / CHUNK,
                     a.w.num_tiles * KV8_TILE_CODE_BYTES};
    if (lane == 0) {
        for (int i = 0; i < ring.num_chunks; i++) barrier_init(ring.barriers + 8 * i, 1);
        barrier_init_fence();
    }
    const uint32_t tile_bytes = TILE_ROWS * a.x_row_bytes;
    const uint32_t lane_x = lane % 8 * a.x_row_bytes + lane / 8 * 16;

    if (!DOWN) take_turn();  // down knows its weights earlier than its rows
    count_stream_items<MOST>(a, list);
    const Share share = share_of<MOST>(a, list);
    BulkWalk now = {share.end - share.begin - team, share.begin / a.w.num_strips,
                    share.begin % a.w.num_strips + team, nullptr};
    for (; now.strip >= a.w.num_strips; now.strip -= a.w.num_strips) now.item++;
    now.find(a, list);
    for (int i = 0; i < ring.num_chunks && now.left > 0; i++) ring.fill(i, now.at, quarter);
    if (DOWN) take_turn();  // also without work
    const int end_item = (share.end + a.w.num_strips - 1) / a.w.num_strips;
    const EndsAt ends_at(a);
    for (int first = share.begin / a.w.num_strips; first < end_item;) {
        const Held held(a, list, first, end_item);
        __syncthreads();  // the rows before have been read
        for (int i = 0; i < held.count; i++)
            copy_rows<DOWN>(a, held.item(i), rows + i * tile_bytes);
        copy_wait_all();
        __syncthreads();
        first += held.count;
        int item_of_outputs = -1;
        uint8_t *outputs = nullptr;
        while (now.left > 0 && now.item < first) {
            const int idx = now.item - held.first;
            const Item item = held.item(idx);
            const Ends ends(ends_at, now.at);
            if (now.item != item_of_outputs) {
                item_of_outputs = now.item;
                outputs = outputs_at<DOWN>(a, item, which);
            }
            BulkWalk next = now;
            next.next(a, list, num_teams);
            const auto multiply = [&](auto tiles) {
                constexpr int TILES_N = decltype(tiles)::value;
                Sums<TILES_N> sums = {};
                uint32_t x_at =
                    rows + idx * tile_bytes + lane_x + quarter.first * (KV8_TILE_COLS * 2);
                for (int chunk = 0; chunk < ring.num_chunks; chunk++) {
                    const uint32_t codes = ring.at + chunk * BULK_CHUNK_BYTES + lane * 16;
                    const uint32_t scales = ring.at + chunk * BULK_CHUNK_BYTES +
                                            CHUNK * KV8_TILE_CODE_BYTES + lane / 4 * 4;
                    barrier_wait(ring.barriers + 8 * chunk, ring.parity);
                    for_chunk<CHUNK>(quarter.last - quarter.first - chunk * CHUNK, [&](int i) {
                        add_tile<TILES_N>(sums, codes + i * KV8_TILE_CODE_BYTES,
                                          scales + i * KV8_TILE_SCALE_BYTES,
                                          x_at + i * (KV8_TILE_COLS * 2), a.x_row_bytes);
                    });
                    x_at += CHUNK * KV8_TILE_COLS * 2;
                    if (next.left > 0) ring.fill(chunk, next.at, quarter);
                }
                ring.parity ^= 1;
                exchange_sums<TILES_N>(exchange, sums, which, 1 + team);
                end_strip<TILES_N, DOWN>(a, ends, exchange, which, outputs, now.strip);
            };
            for_tiles<MOST>(item, multiply);
            now = next;
        }
    }
}

}  // namespace kv8
