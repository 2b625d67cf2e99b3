// experts_whole.cuh - the products of experts_stream.cuh where the copy engine brings the strips
// and a warp has two neighbouring strips, whole: no warp waits for another but where the rows
// change, a strip ends once and not in four parts, and rows that are read from shared memory meet
// both strips. For so many strips that all warps of all blocks have several.
//
// Sums are in the order of the inputs, not by quarters: not the bits of experts_quarters.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_bulk.cuh"

namespace kv8 {

constexpr int WHOLE_STRIPS = KV8_EXPERTS_WHOLE_STRIPS, WHOLE_TILES = KV8_EXPERTS_WHOLE_TILES;
constexpr int PART_BYTES = KV8_EXPERTS_WHOLE_PART_BYTES;  // of a chunk, a strip's
constexpr int WHOLE_BYTES = WHOLE_STRIPS * PART_BYTES;
static_assert(WHOLE_STRIPS == 2);

// A warp's ring of chunks of its strips, a barrier behind each, and what comes into it next. What
// addresses are found by stays in registers: between two chunks every instruction counts.
struct WholeRing {
    uint32_t begin, end;
    uint32_t chunk;  // that is multiplied
    uint32_t parity = 0;
    uint64_t policy;
    UnitWalk<WHOLE_STRIPS> ahead;
    const uint8_t *codes, *scales;  // of the next chunk of that pair's first strip
    int left;                       // its tiles from there on

    __device__ __forceinline__ WholeRing(const kv8_experts_matmul_args &a, uint32_t at,
                                         const UnitWalk<WHOLE_STRIPS> &first)
        : begin(at),
          end(at + KV8_EXPERTS_WHOLE_CHUNKS * WHOLE_BYTES),
          chunk(at),
          policy(leave_first_policy()),
          ahead(first) {
        asm volatile("" : "+r"(begin), "+r"(end));
        if (threadIdx.x % 32 == 0) {
            for (uint32_t to = begin; to < end; to += WHOLE_BYTES) barrier_init(full(to), 1);
            barrier_init_fence();
        }
        enter_pair(a);
    }
    static __device__ __forceinline__ uint32_t full(uint32_t chunk) {
        return chunk + KV8_EXPERTS_WHOLE_BARRIER_AT;
    }
    // The next chunk comes to `to`. By all lanes, once they have read what lay there.
    __device__ __forceinline__ void fill(const kv8_experts_matmul_args &a, const ItemList &list,
                                         uint32_t to) {
        if (ahead.left <= 0) return;
        const auto copy = [&](int tiles) {
            expect_bytes(full(to), WHOLE_STRIPS * tiles * TILE_BYTES);
            copy_tiles<WHOLE_TILES>(to, codes, scales, tiles, full(to), policy);
            copy_tiles<WHOLE_TILES>(to + PART_BYTES, codes + a.w.strip_bytes,
                                    scales + a.w.strip_bytes, tiles, full(to), policy);
        };
        __syncwarp();
        if (elected()) {
            if (left >= WHOLE_TILES)
                copy(WHOLE_TILES);
            else
                copy(left);
        }
        codes += WHOLE_TILES * KV8_TILE_CODE_BYTES;
        scales += WHOLE_TILES * KV8_TILE_SCALE_BYTES;
        left -= WHOLE_TILES;
        if (left > 0) return;
        ahead.next(a, list, blockDim.x / 32);
        enter_pair(a);
    }
    __device__ __forceinline__ void step() {
        chunk += WHOLE_BYTES;
        if (chunk != end) return;
        chunk = begin;
        parity ^= 1;
    }

   private:
    __device__ __forceinline__ void enter_pair(const kv8_experts_matmul_args &a) {
        codes = ahead.at;
        scales = codes + a.w.num_tiles * KV8_TILE_CODE_BYTES;
        left = a.w.num_tiles;
    }
};

template <int MOST, bool DOWN>
__device__ __forceinline__ void stream_whole(const kv8_experts_matmul_args &a) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamList<MOST> list;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    // Shared memory: rings; rows.
    constexpr uint32_t RING_BYTES = KV8_EXPERTS_WHOLE_CHUNKS * WHOLE_BYTES;
    const uint32_t rings = smem_address(shared), rows = rings + num_warps * RING_BYTES;
    const uint32_t tile_bytes = TILE_ROWS * a.x_row_bytes;
    const uint32_t lane_x = lane % 8 * a.x_row_bytes + lane / 8 * 16;

    if (!DOWN) take_turn();  // down knows its weights earlier than its rows
    count_stream_items<MOST>(a, list);
    const Share share = share_of<MOST>(a, list, units_of<WHOLE_STRIPS>(a));
    UnitWalk<WHOLE_STRIPS> now(a, list, share, warp);
    WholeRing ring(a, rings + warp * RING_BYTES, now);
    for (uint32_t to = ring.begin; to < ring.end; to += WHOLE_BYTES) ring.fill(a, list, to);
    if (DOWN) take_turn();  // also without work
    const EndsAt ends_at(a);
    for_held_items<WHOLE_STRIPS, DOWN>(a, list, share, rows, [&](const Held &held) {
        int item_of_outputs = -1;
        uint8_t *outputs[2 * MOST];  // of this lane's columns
        for (; now.left > 0 && now.item < held.first + held.count; now.next(a, list, num_warps)) {
            const Item item = held.item(now.item - held.first);
            const Ends ends[WHOLE_STRIPS] = {Ends(ends_at, now.at),
                                             Ends(ends_at, now.at + a.w.strip_bytes)};
            if (now.item != item_of_outputs) {
                item_of_outputs = now.item;
#pragma unroll
                for (int i = 0; i < 2 * MOST; i++) outputs[i] = outputs_at<DOWN>(a, item, i);
            }
            for_tiles<MOST>(item, [&](auto tiles) {
                constexpr int TILES_N = decltype(tiles)::value;
                Sums<TILES_N> sums[WHOLE_STRIPS] = {};
                uint32_t x_at = rows + (now.item - held.first) * tile_bytes + lane_x;
#pragma unroll 1
                for (int left = a.w.num_tiles; left > 0; left -= WHOLE_TILES) {
                    const uint32_t codes = ring.chunk + lane * 16;
                    const uint32_t scales =
                        ring.chunk + WHOLE_TILES * KV8_TILE_CODE_BYTES + lane / 4 * 4;
                    barrier_wait(ring.full(ring.chunk), ring.parity);
                    for_chunk<WHOLE_TILES>(left, [&](int i) {
                        add_tile<TILES_N>(sums, codes + i * KV8_TILE_CODE_BYTES,
                                          scales + i * KV8_TILE_SCALE_BYTES, PART_BYTES,
                                          x_at + i * (KV8_TILE_COLS * 2), a.x_row_bytes);
                    });
                    x_at += WHOLE_TILES * KV8_TILE_COLS * 2;
                    ring.fill(a, list, ring.chunk);
                    ring.step();
                }
#pragma unroll
                for (int h = 0; h < WHOLE_STRIPS; h++)
#pragma unroll
                    for (int i = 0; i < 2 * TILES_N; i++)
                        end_column<DOWN>(a, ends[h], sums[h].s[i / 2][i % 2],
                                         sums[h].s[i / 2][i % 2 + 2], outputs[i], now.strip() + h);
            });
        }
    });
}

}  // namespace kv8
