// experts_items.cuh - an expert and some of the rows that chose it: the unit of work.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_args.h"

namespace kv8 {

struct Item {
    int expert, first, count;  // rows: places of sorted
    int packed;                // its first row where rows are packed: experts_args.h
};

// In shared memory: how many items come before those of every expert, and its first row.
struct ItemList {
    int first_item[KV8_EXPERTS_MAX + 1], first_row[KV8_EXPERTS_MAX + 1];
};

// By a warp: before[i] is the sum of the values before entry i, of `count`, and the last that of
// all.
template <typename VALUE>
__device__ __forceinline__ void sum_before(int (&before)[KV8_EXPERTS_MAX + 1], int count,
                                           const VALUE &value) {
    const int lane = threadIdx.x % 32;
    int all = 0;
    for (int first = 0; first < count; first += 32) {
        const int i = first + lane, mine = i < count ? value(i) : 0;
        int sum = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (i < count) before[i] = all + sum - mine;
        all += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) before[count] = all;
}
__device__ __forceinline__ int items_of(const ItemList &list, int expert, int item_rows) {
    return (list.first_row[expert + 1] - list.first_row[expert] + item_rows - 1) / item_rows;
}
// By the whole block.
template <class ARGS>
__device__ __forceinline__ void load_first_rows(const ARGS &a, ItemList &list) {
    for (int e = threadIdx.x; e <= a.num_experts; e += blockDim.x)
        list.first_row[e] = __ldcg(&a.routing.offsets[e]);
    __syncthreads();
}
// By the whole block. An expert's rows are cut into as few items of at most item_rows as there are.
template <class ARGS>
__device__ __forceinline__ void count_items(const ARGS &a, ItemList &list, int item_rows) {
    load_first_rows(a, list);
    if (threadIdx.x < 32)
        sum_before(list.first_item, a.num_experts,
                   [&](int e) { return items_of(list, e, item_rows); });
    __syncthreads();
}

// Item `index` of an expert's, which are of about one size: rows in multiples of ROUND.
template <int ROUND>
__device__ __forceinline__ Item cut_item(const ItemList &list, int expert, int index, int items) {
    const int rows = list.first_row[expert + 1] - list.first_row[expert];
    const int each = (rows + items * ROUND - 1) / (items * ROUND) * ROUND;
    const int begin = index * each;
    return {expert, list.first_row[expert] + begin, min(each, rows - begin),
            KV8_EXPERTS_PACKED_ROW(list.first_row[expert], expert) + begin};
}

// The last of `count` whose first item is not past this one.
__device__ __forceinline__ int find_item(const ItemList &list, int count, int item) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (list.first_item[mid] <= item)
            low = mid;
        else
            high = mid - 1;
    }
    return low;
}

template <int ROUND, class ARGS>
__device__ __forceinline__ Item item_of(const ARGS &a, const ItemList &list, int item) {
    const int expert = find_item(list, a.num_experts, item);
    return cut_item<ROUND>(list, expert, item - list.first_item[expert],
                           list.first_item[expert + 1] - list.first_item[expert]);
}

}  // namespace kv8
