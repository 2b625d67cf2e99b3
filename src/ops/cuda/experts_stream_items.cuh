// experts_stream_items.cuh - the items of the streaming kernels, and how their strips are cut among
// the blocks.
//
// An item has up to MOST tiles of 8 rows, the columns of a product: one, of few rows an expert, or
// two. A strip costs more where its item has two; then blocks are given strips of about the same
// cost, not as many strips. Kernels of one tile alone are faster than the others are with such
// items (docs/kernels/gpu_experts.md).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_items.cuh"

namespace kv8 {

constexpr int TILE_ROWS = 8;
constexpr int STRIP_COST = KV8_EXPERTS_STRIP_COST, TILE_COST = KV8_EXPERTS_TILE_COST;

template <int MOST>
struct StreamList;
template <>
struct StreamList<1> : ItemList {};
template <>
struct StreamList<2> : ItemList {
    int first_cost[KV8_EXPERTS_MAX + 1];  // of a strip of each item before an expert's
};

__device__ __forceinline__ int tiles_of(int rows) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS;
}

// By the whole block, of two warps or more.
template <int MOST>
__device__ __forceinline__ void count_stream_items(const kv8_experts_matmul_args &a,
                                                   StreamList<MOST> &list) {
    load_first_rows(a, list);
    const auto items = [&](int e) { return items_of(list, e, MOST * TILE_ROWS); };
    if (threadIdx.x < 32) sum_before(list.first_item, a.num_experts, items);
    if constexpr (MOST == 2)
        if (threadIdx.x / 32 == 1)
            sum_before(list.first_cost, a.num_experts, [&](int e) {
                const int rows = list.first_row[e + 1] - list.first_row[e];
                return STRIP_COST * items(e) + TILE_COST * tiles_of(rows);
            });
    __syncthreads();
}

__device__ __forceinline__ Item stream_item_of(const kv8_experts_matmul_args &a,
                                               const ItemList &list, int item) {
    return item_of<TILE_ROWS>(a, list, item);
}

// The first strip, of all items' one after another, at `cost` or behind it. An item has num_strips.
__device__ __forceinline__ int strip_at(const kv8_experts_matmul_args &a, const StreamList<2> &list,
                                        uint32_t cost, uint32_t num_strips) {
    const int of_each = static_cast<int>(cost / num_strips);
    if (of_each >= list.first_cost[a.num_experts])
        return list.first_item[a.num_experts] * num_strips;
    int low = 0, high = a.num_experts - 1;  // the last expert whose items begin at it or before
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (list.first_cost[mid] <= of_each)
            low = mid;
        else
            high = mid - 1;
    }
    const int rows = list.first_row[low + 1] - list.first_row[low];
    const int items = list.first_item[low + 1] - list.first_item[low];
    const int tiles = tiles_of((rows + items - 1) / items);  // of an item but the last
    const uint32_t item_cost = (STRIP_COST + TILE_COST * tiles) * num_strips;
    uint32_t within = cost - list.first_cost[low] * num_strips;
    const int idx = min(static_cast<int>(within / item_cost), items - 1);
    within -= idx * item_cost;
    const int last = tiles_of(rows) - (items - 1) * tiles;
    const uint32_t strip_cost = STRIP_COST + TILE_COST * (idx + 1 < items ? tiles : last);
    const int strip = static_cast<int>((within + strip_cost - 1) / strip_cost);
    return (list.first_item[low] + idx) * num_strips + strip;
}

// A block's strips, or what else an item has so many of: those from `begin` to `end`.
struct Share {
    int begin, end;
    // Its part of `all`, of which it begins and ends at find(part).
    template <typename FIND>
    __device__ __forceinline__ Share(uint32_t all, const FIND &find) {
        const uint32_t each = all / gridDim.x, rest = all % gridDim.x, idx = blockIdx.x;
        begin = find(each * idx + rest * idx / gridDim.x);
        end = find(each * (idx + 1) + rest * (idx + 1) / gridDim.x);
    }
};
template <int MOST>
__device__ __forceinline__ Share share_of(const kv8_experts_matmul_args &a,
                                          const StreamList<MOST> &list, int num_strips) {
    if constexpr (MOST == 1)
        return Share(list.first_item[a.num_experts] * num_strips,
                     [](uint32_t strip) { return static_cast<int>(strip); });
    else
        return Share(list.first_cost[a.num_experts] * num_strips,
                     [&](uint32_t cost) { return strip_at(a, list, cost, num_strips); });
}

// Items whose rows lie in shared memory at once, from `first` on: one, or two of one tile. `end`:
// behind the last that there may be.
struct Held {
    int first, count;
    Item here, next;
    __device__ __forceinline__ Held(const kv8_experts_matmul_args &a, const ItemList &list,
                                    int first, int end)
        : first(first), count(1), here(stream_item_of(a, list, first)), next(here) {
        if (first + 1 == end || a.x_tiles < 2 || here.count > TILE_ROWS) return;
        next = stream_item_of(a, list, first + 1);
        if (next.count <= TILE_ROWS) count = 2;
    }
    __device__ __forceinline__ Item item(int idx) const { return idx == 0 ? here : next; }
};

// what(its number of tiles), a constant.
template <int N>
struct Tiles {
    static constexpr int value = N;
};
template <int MOST, typename WHAT>
__device__ __forceinline__ void for_tiles(const Item &item, const WHAT &what) {
    if (MOST == 1 || item.count <= TILE_ROWS)
        what(Tiles<1>{});
    else if constexpr (MOST == 2)
        what(Tiles<2>{});
}

}  // namespace kv8
