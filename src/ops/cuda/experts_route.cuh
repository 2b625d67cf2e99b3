// experts_route.cuh - a row's best experts and their weights, and the places of few rows in the
// order of their experts.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_args.h"
#include "ptx_sm80.cuh"

namespace kv8 {

constexpr uint32_t ALL = 0xffffffffu;
constexpr int NONE = 255;

// What kernels write, so not by way of the read-only path.
__device__ __forceinline__ void read8(const float *from, float (&x)[8]) {
    const auto *const words = reinterpret_cast<const float4 *>(from);
    const float4 low = words[0], high = words[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ int live_rows(const int32_t *live, int n) {
    return live == nullptr ? n : min(n, *live);
}

// Orders as the floats do, NaN with -inf, both zeros alike; above 0 for every float.
__device__ __forceinline__ uint32_t order_of(float x) {
    const uint32_t bits = __float_as_uint(x != x ? -INFINITY : x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Of one row, by a warp: lane i returns the order and id of the ith best.
struct Best {
    uint32_t order;
    int id;
};
template <int PER_LANE>
__device__ __forceinline__ Best best_of(const float *logits, int num_experts, int top_k) {
    const int lane = threadIdx.x % 32;
    uint32_t mine[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int e = i * 32 + lane;
        mine[i] = e < num_experts ? order_of(logits[e]) : 0;
    }
    Best kept = {0, NONE};
    for (int k = 0; k < top_k; k++) {
        uint32_t top = 0;
        int at = NONE;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; i--) {
            if (mine[i] >= top && mine[i] > 0) {
                top = mine[i];
                at = i * 32 + lane;
            }
        }
        const uint32_t best = __reduce_max_sync(ALL, top);
        const uint32_t id = __reduce_min_sync(ALL, top == best ? static_cast<uint32_t>(at) : NONE);
        if (lane == k) kept = {best, static_cast<int>(id)};
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i * 32 + lane == static_cast<int>(id)) mine[i] = 0;
    }
    return kept;
}

template <>
__device__ __forceinline__ Best best_of<0>(const float *logits, int num_experts, int top_k) {
    if (num_experts <= 32) return best_of<1>(logits, num_experts, top_k);
    if (num_experts <= 128) return best_of<4>(logits, num_experts, top_k);
    return best_of<(KV8_EXPERTS_MAX + 31) / 32>(logits, num_experts, top_k);
}

// The weight of lane i's, i < top_k. Where the best is infinite those equal to it share all.
__device__ __forceinline__ float softmax_of(const Best &kept, int top_k) {
    const float value = value_of(kept.order);
    const float most = __shfl_sync(ALL, value, 0);
    const float part = value == most ? 1.0f : expf(value - most);
    float sum = 0;
    for (int k = 0; k < top_k; k++) sum += __shfl_sync(ALL, part, k);
    return part / sum;
}

// 16 ids from place `at` on, NONE from `end` on.
__device__ __forceinline__ uint4 ids_at(const uint8_t *ids, int at, int end) {
    uint4 word = {ALL, ALL, ALL, ALL};
    if (at + 16 <= end) {
        word = *reinterpret_cast<const uint4 *>(ids + at);
    } else {
        uint8_t *const bytes = reinterpret_cast<uint8_t *>(&word);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (at + i < end) bytes[i] = ids[at + i];
    }
    return word;
}
__device__ __forceinline__ uint32_t id_of(const uint4 &word, int i) {
    const uint32_t part = i < 4 ? word.x : i < 8 ? word.y : i < 12 ? word.z : word.w;
    return part >> i % 4 * 8 & 255;
}

// Sum of x over the block's threads before this one, and over all of them.
__device__ __forceinline__ int sum_before(int x, int *all_out) {
    __shared__ int of_warp[KV8_EXPERTS_SORT_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
    }
    __syncthreads();
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    const int of_lane = of_warp[lane];
    *all_out = __reduce_add_sync(ALL, of_lane);
    return sum - x + __reduce_add_sync(ALL, lane < warp ? of_lane : 0);
}

// One row's experts and weights by its logits, by a warp; NONE for padding. Lane i returns its ith
// id. PER_LANE: of up to 32 times as many experts; 0: of any number.
template <int PER_LANE = 0>
__device__ __forceinline__ int choose_row(const kv8_experts_route_args &a, const float *logits,
                                          int row, int live) {
    const int lane = threadIdx.x % 32;
    const int64_t to = static_cast<int64_t>(row) * a.top_k + lane;
    int id = NONE;
    if (row < live) {
        const Best kept = best_of<PER_LANE>(logits, a.num_experts, a.top_k);
        const float weight = softmax_of(kept, a.top_k);
        if (lane < a.top_k) a.routing.weights[to] = weight;
        id = kept.id;
    }
    if (lane < a.top_k) a.routing.ids[to] = static_cast<uint8_t>(id);
    return id;
}

// Places of few rows, which one block sorts: their experts, and by 32 of them those of each expert.
struct FewPlaces {
    static constexpr int MOST = KV8_EXPERTS_FEW_PLACES;
    uint8_t ids[MOST], counts[MOST / 32][KV8_EXPERTS_MAX + 1];
    int offsets[KV8_EXPERTS_MAX + 1];
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < static_cast<int>(sizeof counts);
             i += KV8_EXPERTS_SORT_THREADS)
            counts[i / (KV8_EXPERTS_MAX + 1)][i % (KV8_EXPERTS_MAX + 1)] = 0;
    }
};

// By the block's KV8_EXPERTS_SORT_THREADS threads, which have written their ids.
__device__ __forceinline__ void sort_few(const kv8_experts_route_args &a, FewPlaces &few) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int places = a.n * a.top_k;
    __syncthreads();
    // A place's rank among the warp's places of the same expert, and how many those are.
    const int id = thread < places ? few.ids[thread] : NONE;
    int rank = 0;
    if (warp < FewPlaces::MOST / 32) {
        const uint32_t same = __match_any_sync(ALL, id);
        rank = __popc(same & ((1u << lane) - 1));
        if (rank == 0) few.counts[warp][id] = static_cast<uint8_t>(__popc(same));
    }
    __syncthreads();
    int all = 0;  // of thread's expert
    if (thread < a.num_experts)
        for (int w = 0; w < FewPlaces::MOST / 32; w++) all += few.counts[w][thread];
    int sum;
    const int before = sum_before(all, &sum);
    if (thread <= a.num_experts) a.routing.offsets[thread] = few.offsets[thread] = before;
    __syncthreads();
    if (id == NONE) return;
    for (int w = 0; w < warp; w++) rank += few.counts[w][id];
    a.routing.sorted[few.offsets[id] + rank] = thread;
}

}  // namespace kv8
