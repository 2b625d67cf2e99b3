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

// By the whole block. An expert's rows are cut into as few items of at most ITEM_ROWS as there are.
template <int ITEM_ROWS, class ARGS>
__device__ __forceinline__ void count_items(const ARGS &a, ItemList &list) {
    for (int e = threadIdx.x; e <= a.num_experts; e += blockDim.x)
        list.first_row[e] = __ldcg(&a.routing.offsets[e]);
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        for (int e = threadIdx.x; e - static_cast<int>(threadIdx.x) < a.num_experts; e += 32) {
            int items = 0;
            if (e < a.num_experts)
                items = (list.first_row[e + 1] - list.first_row[e] + ITEM_ROWS - 1) / ITEM_ROWS;
            int sum = items;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, d);
                if (threadIdx.x >= d) sum += other;
            }
            if (e < a.num_experts) list.first_item[e] = before + sum - items;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (threadIdx.x == 0) list.first_item[a.num_experts] = before;
    }
    __syncthreads();
}

// Items of one expert are of about one size: rows in multiples of ROUND.
template <int ITEM_ROWS, int ROUND, class ARGS>
__device__ __forceinline__ Item item_of(const ARGS &a, const ItemList &list, int item) {
    int low = 0, high = a.num_experts - 1;  // the last expert whose first item is not past it
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (list.first_item[mid] <= item)
            low = mid;
        else
            high = mid - 1;
    }
    const int rows = list.first_row[low + 1] - list.first_row[low];
    const int items = list.first_item[low + 1] - list.first_item[low];
    const int each = (rows + items * ROUND - 1) / (items * ROUND) * ROUND;
    const int begin = (item - list.first_item[low]) * each;
    const int packed = KV8_EXPERTS_PACKED_ROW(list.first_row[low], low) + begin;
    return {low, list.first_row[low] + begin, min(each, rows - begin), packed};
}

}  // namespace kv8
