// experts_bulk.cuh - what the streaming kernels have in common where the copy engine brings the
// strips: a block's strips in their order, their tiles' way into rings, and items' rows.
//
// A strip, or two neighbouring strips of an expert, are a *unit*: what a team of warps, or a warp,
// multiplies at a time.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_strip.cuh"
#include "ptx_sm90.cuh"
#include "take_turn.cuh"

namespace kv8 {

// Of an item, which has an even number of strips.
template <int STRIPS>
__device__ __forceinline__ int units_of(const kv8_experts_matmul_args &a) {
    return a.w.num_strips / STRIPS;
}

// Units of the block's, one in so many.
template <int STRIPS>
struct UnitWalk {
    int left;        // units of the block from this one on; 0 or less: none
    int item, unit;  // within it
    const uint8_t *at;

    // From the block's unit `which` on.
    __device__ __forceinline__ UnitWalk(const kv8_experts_matmul_args &a, const ItemList &list,
                                        const Share &share, int which)
        : left(share.end - share.begin - which),
          item(share.begin / units_of<STRIPS>(a)),
          unit(share.begin % units_of<STRIPS>(a) + which),
          at(nullptr) {
        enter_item(a, list);
    }
    __device__ __forceinline__ void next(const kv8_experts_matmul_args &a, const ItemList &list,
                                         int step) {
        left -= step;
        unit += step;
        at += static_cast<int64_t>(step * STRIPS) * a.w.strip_bytes;
        if (unit >= units_of<STRIPS>(a)) enter_item(a, list);
    }
    __device__ __forceinline__ int strip() const { return unit * STRIPS; }

   private:
    __device__ __forceinline__ void enter_item(const kv8_experts_matmul_args &a,
                                               const ItemList &list) {
        for (; unit >= units_of<STRIPS>(a); unit -= units_of<STRIPS>(a)) item++;
        if (left > 0)
            at = a.w.data + stream_item_of(a, list, item).expert * a.w.expert_bytes +
                 static_cast<int64_t>(strip()) * a.w.strip_bytes;
    }
};

// Tiles of a strip to a chunk of up to MOST: codes, then scales. By one lane. A chunk begins at a
// multiple of 128 bytes: copies to other places take longer.
template <int MOST>
__device__ __forceinline__ void copy_tiles(uint32_t to, const uint8_t *codes, const uint8_t *scales,
                                           int tiles, uint32_t full, uint64_t policy) {
    copy_bulk(to, codes, tiles * KV8_TILE_CODE_BYTES, full, policy);
    copy_bulk(to + MOST * KV8_TILE_CODE_BYTES, scales, tiles * KV8_TILE_SCALE_BYTES, full, policy);
}
constexpr int TILE_BYTES = KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES;

// use(held) of the block's items, whose rows lie in shared memory, by the whole block.
template <int STRIPS, bool DOWN, typename USE>
__device__ __forceinline__ void for_held_items(const kv8_experts_matmul_args &a,
                                               const ItemList &list, const Share &share,
                                               uint32_t rows, const USE &use) {
    const int units = units_of<STRIPS>(a), end = (share.end + units - 1) / units;
    for (int first = share.begin / units; first < end;) {
        const Held held(a, list, first, end);
        __syncthreads();  // the rows before have been read
        for (int i = 0; i < held.count; i++)
            copy_rows<DOWN>(a, held.item(i), rows + i * (TILE_ROWS * a.x_row_bytes));
        copy_wait_all();
        __syncthreads();
        use(held);
        first += held.count;
    }
}

}  // namespace kv8
