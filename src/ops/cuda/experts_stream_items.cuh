// experts_stream_items.cuh - the items of the streaming kernels, and how their strips are cut among
// the blocks.
//
// An item has one or two tiles of 8 rows, the columns of a product. A strip costs more where its
// item has two; blocks are given strips of about the same cost, not as many strips.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_items.cuh"

namespace kv8 {

constexpr int TILE_ROWS = 8;
constexpr int STRIP_COST = KV8_EXPERTS_STRIP_COST, TILE_COST = KV8_EXPERTS_TILE_COST;

struct StreamList : ItemList {
    int first_cost[KV8_EXPERTS_MAX + 1];  // of a strip of each item before an expert's
};

__device__ __forceinline__ int tiles_of(int rows) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS;
}

// By the whole block, of two warps or more.
__device__ __forceinline__ void count_stream_items(const kv8_experts_matmul_args &a,
                                                   StreamList &list) {
    load_first_rows(a, list);
    const auto items = [&](int e) {
        return a.x_tiles == 1 ? items_of(list, e, TILE_ROWS) : items_of(list, e, 2 * TILE_ROWS);
    };
    if (threadIdx.x < 32)
        sum_before(list.first_item, a.num_experts, items);
    else if (threadIdx.x < 64)
        sum_before(list.first_cost, a.num_experts, [&](int e) {
            const int rows = list.first_row[e + 1] - list.first_row[e];
            return STRIP_COST * items(e) + TILE_COST * tiles_of(rows);
        });
    __syncthreads();
}

__device__ __forceinline__ Item stream_item_of(const kv8_experts_matmul_args &a,
                                               const StreamList &list, int item) {
    return item_of<TILE_ROWS>(a, list, item);
}

// The first strip, of all items' one after another, at `cost` or behind it.
__device__ __forceinline__ int strip_at(const kv8_experts_matmul_args &a, const StreamList &list,
                                        uint32_t cost) {
    const uint32_t num_strips = a.w.num_strips;
    const int of_each = static_cast<int>(cost / num_strips);
    if (of_each >= list.first_cost[a.num_experts])
        return list.first_item[a.num_experts] * a.w.num_strips;
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
    return (list.first_item[low] + idx) * a.w.num_strips + strip;
}

// A block's strips: those from `begin` to `end`.
struct Share {
    int begin, end;
    __device__ __forceinline__ Share(const kv8_experts_matmul_args &a, const StreamList &list) {
        const uint32_t costs = list.first_cost[a.num_experts], idx = blockIdx.x;
        const uint32_t items = list.first_item[a.num_experts];
        const bool are_alike = costs == (STRIP_COST + TILE_COST) * items;  // all of one tile
        const uint32_t all = (are_alike ? items : costs) * a.w.num_strips;
        const uint32_t each = all / gridDim.x, rest = all % gridDim.x;
        const uint32_t from = each * idx + rest * idx / gridDim.x;
        const uint32_t to = each * (idx + 1) + rest * (idx + 1) / gridDim.x;
        begin = are_alike ? static_cast<int>(from) : strip_at(a, list, from);
        end = are_alike ? static_cast<int>(to) : strip_at(a, list, to);
    }
};

// Items whose rows lie in shared memory at once, from `first` on: one, or two of one tile. `end`:
// behind the last that there may be.
struct Held {
    int first, count;
    Item here, next;
    __device__ __forceinline__ Held(const kv8_experts_matmul_args &a, const StreamList &list,
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
template <typename WHAT>
__device__ __forceinline__ void for_tiles(const Item &item, const WHAT &what) {
    if (item.count <= TILE_ROWS)
        what(Tiles<1>{});
    else
        what(Tiles<2>{});
}

}  // namespace kv8
