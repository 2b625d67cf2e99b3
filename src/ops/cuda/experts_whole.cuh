// experts_whole.cuh - the products of experts_stream.cuh where the copy engine brings the strips
// and a warp has two neighbouring strips, whole: no warp waits for another but where the rows
// change, a strip ends once and not in four parts, and rows that are read from shared memory meet
// both strips. For so many strips that all warps of all blocks have several.
//
// Sums are in the order of the inputs, not by quarters: not the bits of experts_quarters.cuh.
// SCALED: for a fixed order, any number of strips, one a warp; the sums are those of
// experts_tiles.cuh, to the bit.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_bulk.cuh"

namespace kv8 {

// Chunks of a warp's one strip, or of two.
template <int STRIPS>
struct WholeChunk {
    static constexpr int TILES = STRIPS == 1 ? KV8_EXPERTS_SINGLE_TILES : KV8_EXPERTS_PAIR_TILES;
    static constexpr int BARRIER_AT = TILES * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES);
    static constexpr int PART_BYTES = (BARRIER_AT + 8 + 127) / 128 * 128;  // a strip's
    static constexpr int BYTES = STRIPS * PART_BYTES;
    static_assert(BYTES <= KV8_EXPERTS_WHOLE_CHUNK_BYTES);
};

// A warp's ring of chunks of its strips, a barrier behind each, and what comes into it next. What
// addresses are found by stays in registers: between two chunks every instruction counts.
template <int STRIPS>
struct WholeRing {
    using CHUNK = WholeChunk<STRIPS>;
    uint32_t begin, end;
    uint32_t chunk;  // that is multiplied
    uint32_t parity = 0;
    uint64_t policy;
    UnitWalk<STRIPS> ahead;
    const uint8_t *codes, *scales;  // of the next chunk of that unit's first strip
    int left;                       // its tiles from there on

    __device__ __forceinline__ WholeRing(const kv8_experts_matmul_args &a, uint32_t at,
                                         const UnitWalk<STRIPS> &first)
        : begin(at),
          end(at + KV8_EXPERTS_WHOLE_CHUNKS * CHUNK::BYTES),
          chunk(at),
          policy(leave_first_policy()),
          ahead(first) {
        asm volatile("" : "+r"(begin), "+r"(end));
        if (threadIdx.x % 32 == 0) {
            for (uint32_t to = begin; to < end; to += CHUNK::BYTES) barrier_init(full(to), 1);
            barrier_init_fence();
        }
        enter_unit(a);
    }
    static __device__ __forceinline__ uint32_t full(uint32_t chunk) {
        return chunk + CHUNK::BARRIER_AT;
    }
    // The next chunk comes to `to`. By all lanes, once they have read what lay there.
    __device__ __forceinline__ void fill(const kv8_experts_matmul_args &a, const ItemList &list,
                                         uint32_t to) {
        if (ahead.left <= 0) return;
        const auto copy = [&](int tiles) {
            expect_bytes(full(to), STRIPS * tiles * TILE_BYTES);
#pragma unroll
            for (int h = 0; h < STRIPS; h++)
                copy_tiles<CHUNK::TILES>(to + h * CHUNK::PART_BYTES, codes + h * a.w.strip_bytes,
                                         scales + h * a.w.strip_bytes, tiles, full(to), policy);
        };
        __syncwarp();
        if (elected()) {
            if (left >= CHUNK::TILES)
                copy(CHUNK::TILES);
            else
                copy(left);
        }
        codes += CHUNK::TILES * KV8_TILE_CODE_BYTES;
        scales += CHUNK::TILES * KV8_TILE_SCALE_BYTES;
        left -= CHUNK::TILES;
        if (left > 0) return;
        ahead.next(a, list, blockDim.x / 32);
        enter_unit(a);
    }
    __device__ __forceinline__ void step() {
        chunk += CHUNK::BYTES;
        if (chunk != end) return;
        chunk = begin;
        parity ^= 1;
    }

   private:
    __device__ __forceinline__ void enter_unit(const kv8_experts_matmul_args &a) {
        codes = ahead.at;
        scales = codes + a.w.num_tiles * KV8_TILE_CODE_BYTES;
        left = a.w.num_tiles;
    }
};

template <int MOST, bool DOWN, bool SCALED>
__device__ __forceinline__ void stream_whole(const kv8_experts_matmul_args &a) {
    constexpr int STRIPS = SCALED ? 1 : 2;
    using CHUNK = WholeChunk<STRIPS>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamList<MOST> list;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    // Shared memory: rings; rows.
    constexpr uint32_t RING_BYTES = KV8_EXPERTS_WHOLE_CHUNKS * CHUNK::BYTES;
    const uint32_t rings = smem_address(shared), rows = rings + num_warps * RING_BYTES;
    const uint32_t tile_bytes = TILE_ROWS * a.x_row_bytes;
    const uint32_t lane_x = lane % 8 * a.x_row_bytes + lane / 8 * 16;

    if (!DOWN) take_turn();  // down knows its weights earlier than its rows
    count_stream_items<MOST>(a, list);
    const Share share = share_of<MOST>(a, list, units_of<STRIPS>(a));
    UnitWalk<STRIPS> now(a, list, share, warp);
    WholeRing<STRIPS> ring(a, rings + warp * RING_BYTES, now);
    for (uint32_t to = ring.begin; to < ring.end; to += CHUNK::BYTES) ring.fill(a, list, to);
    if (DOWN) take_turn();  // also without work
    const EndsAt ends_at(a);
    for_held_items<STRIPS, DOWN>(a, list, share, rows, [&](const Held &held) {
        int item_of_outputs = -1;
        uint8_t *outputs[2 * MOST];  // of this lane's columns
        for (; now.left > 0 && now.item < held.first + held.count; now.next(a, list, num_warps)) {
            const Item item = held.item(now.item - held.first);
            Ends ends[STRIPS];
#pragma unroll
            for (int h = 0; h < STRIPS; h++) ends[h] = Ends(ends_at, now.at + h * a.w.strip_bytes);
            if (now.item != item_of_outputs) {
                item_of_outputs = now.item;
#pragma unroll
                for (int i = 0; i < 2 * MOST; i++) outputs[i] = outputs_at<DOWN>(a, item, i);
            }
            for_tiles<MOST>(item, [&](auto tiles) {
                constexpr int TILES_N = decltype(tiles)::value;
                Sums<TILES_N> sums[STRIPS] = {};
                uint32_t x_at = rows + (now.item - held.first) * tile_bytes + lane_x;
#pragma unroll 1
                for (int left = a.w.num_tiles; left > 0; left -= CHUNK::TILES) {
                    const uint32_t codes = ring.chunk + lane * 16;
                    const uint32_t scales =
                        ring.chunk + CHUNK::TILES * KV8_TILE_CODE_BYTES + lane / 4 * 4;
                    barrier_wait(ring.full(ring.chunk), ring.parity);
                    for_chunk<CHUNK::TILES>(left, [&](int i) {
                        const uint32_t code = codes + i * KV8_TILE_CODE_BYTES;
                        const uint32_t scale = scales + i * KV8_TILE_SCALE_BYTES;
                        const uint32_t x = x_at + i * (KV8_TILE_COLS * 2);
                        if constexpr (SCALED)
                            add_scaled_tile(sums, code, scale, CHUNK::PART_BYTES, x, a.x_row_bytes);
                        else
                            add_tile(sums, code, scale, CHUNK::PART_BYTES, x, a.x_row_bytes);
                    });
                    x_at += CHUNK::TILES * KV8_TILE_COLS * 2;
                    ring.fill(a, list, ring.chunk);
                    ring.step();
                }
#pragma unroll
                for (int h = 0; h < STRIPS; h++)
#pragma unroll
                    for (int i = 0; i < 2 * TILES_N; i++)
                        end_column<DOWN, SCALED>(a, ends[h], sums[h].s[i / 2][i % 2],
                                                 sums[h].s[i / 2][i % 2 + 2], outputs[i],
                                                 now.strip() + h);
            });
        }
    });
}

}  // namespace kv8
