// experts_route.cu - from the router's logits to rows sorted by expert, and the sum of what the
// experts made.
//
// choose: the best experts of every row, the lowest id first on ties, NaN as -inf, and the softmax
// over them. Grid: ceil(n / 8) blocks of 8 warps, a warp a row.
// route_few: both for few rows. Grid: one block of 1024 threads.
// sort: places of ids by expert, in order. Grid: one block of 1024 threads for every expert; each
// reads all ids, 16 a load, counting those of smaller experts and its own. Fixed order, no atomics.
// combine: residual += weights * y, best expert first. Grid: 4 values a thread.
// combine_norm: the same, and the norm of what comes out. Grid: a block a row.
// Bound by: latency; combine by memory, n * (top_k + 2) * hidden * 4 bytes.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_args.h"
#include "rowwise.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr uint32_t ALL = 0xffffffffu;
constexpr int NONE = 255;

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

__device__ __forceinline__ Best best_of(const float *logits, int num_experts, int top_k) {
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

}  // namespace kv8

namespace kv8 {

// One row's experts and weights, by a warp; NONE for padding. Lane i returns its ith id.
__device__ __forceinline__ int choose_row(const kv8_experts_route_args &a, int row, int live) {
    const int lane = threadIdx.x % 32;
    const int64_t to = static_cast<int64_t>(row) * a.top_k + lane;
    int id = NONE;
    if (row < live) {
        const Best kept =
            best_of(a.logits + static_cast<int64_t>(row) * a.num_experts, a.num_experts, a.top_k);
        const float weight = softmax_of(kept, a.top_k);
        if (lane < a.top_k) a.routing.weights[to] = weight;
        id = kept.id;
    }
    if (lane < a.top_k) a.routing.ids[to] = static_cast<uint8_t>(id);
    return id;
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_CHOOSE_THREADS)
    kv8_experts_choose__sm80(const __grid_constant__ kv8_experts_route_args a) {
    using namespace kv8;
    take_turn();
    const int row = (blockIdx.x * KV8_EXPERTS_CHOOSE_THREADS + threadIdx.x) / 32;
    if (row < a.n) choose_row(a, row, live_rows(a.live_rows, a.n));
}

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_SORT_THREADS)
    kv8_experts_sort__sm80(const __grid_constant__ kv8_experts_route_args a) {
    using namespace kv8;
    take_turn();
    constexpr int STEP = KV8_EXPERTS_SORT_THREADS * 16;
    const uint32_t expert = blockIdx.x;
    const int places = a.n * a.top_k;
    int smaller = 0;
    for (int at = threadIdx.x * 16; at < places; at += STEP) {
        const uint4 word = ids_at(a.routing.ids, at, places);
#pragma unroll
        for (int i = 0; i < 16; i++) smaller += id_of(word, i) < expert;
    }
    int first;
    sum_before(smaller, &first);
    if (threadIdx.x == 0) a.routing.offsets[expert] = first;
    for (int begin = 0; begin < places; begin += STEP) {
        const int at = begin + threadIdx.x * 16;
        const uint4 word = ids_at(a.routing.ids, at, places);
        uint32_t mine = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) mine |= static_cast<uint32_t>(id_of(word, i) == expert) << i;
        int all;
        int to = first + sum_before(__popc(mine), &all);
        for (; mine != 0; mine &= mine - 1) a.routing.sorted[to++] = at + __ffs(mine) - 1;
        first += all;
    }
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) a.routing.offsets[expert + 1] = first;
}

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_SORT_THREADS)
    kv8_experts_route_few__sm80(const __grid_constant__ kv8_experts_route_args a) {
    using namespace kv8;
    take_turn();
    constexpr int PLACES = KV8_EXPERTS_FEW_PLACES;
    __shared__ uint8_t ids[PLACES], counts[PLACES / 32][KV8_EXPERTS_MAX + 1];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    for (int i = thread; i < static_cast<int>(sizeof counts); i += KV8_EXPERTS_SORT_THREADS)
        counts[i / (KV8_EXPERTS_MAX + 1)][i % (KV8_EXPERTS_MAX + 1)] = 0;
    const int live = live_rows(a.live_rows, a.n), places = a.n * a.top_k;
    for (int row = warp; row < a.n; row += KV8_EXPERTS_SORT_THREADS / 32) {
        const int id = choose_row(a, row, live);
        if (lane < a.top_k) ids[row * a.top_k + lane] = static_cast<uint8_t>(id);
    }
    __syncthreads();
    // A place's rank among the warp's places of the same expert, and how many those are.
    const int id = thread < places ? ids[thread] : NONE;
    int rank = 0;
    if (warp < PLACES / 32) {
        const uint32_t same = __match_any_sync(ALL, id);
        rank = __popc(same & ((1u << lane) - 1));
        if (rank == 0) counts[warp][id] = static_cast<uint8_t>(__popc(same));
    }
    __syncthreads();
    int all = 0;  // of thread's expert
    if (thread < a.num_experts)
        for (int w = 0; w < PLACES / 32; w++) all += counts[w][thread];
    __shared__ int offsets[KV8_EXPERTS_MAX + 1];
    int sum;
    const int before = sum_before(all, &sum);
    if (thread <= a.num_experts) a.routing.offsets[thread] = offsets[thread] = before;
    __syncthreads();
    if (id == NONE) return;
    for (int w = 0; w < warp; w++) rank += counts[w][id];
    a.routing.sorted[offsets[id] + rank] = thread;
}

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_COMBINE_THREADS)
    kv8_experts_combine__sm80(const __grid_constant__ kv8_experts_combine_args a) {
    kv8::take_turn();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * KV8_EXPERTS_COMBINE_THREADS + threadIdx.x;
    const int quads = a.hidden / 4;
    const int64_t row = i / quads, quad = i % quads;
    if (row >= (a.live_rows == nullptr ? a.n : min(a.n, *a.live_rows))) return;
    float4 *const to = reinterpret_cast<float4 *>(a.residual) + i;
    const float4 *const from = reinterpret_cast<const float4 *>(a.y) + row * a.top_k * quads + quad;
    float4 sum = *to;
    for (int k = 0; k < a.top_k; k++) {
        const float4 y = from[static_cast<int64_t>(k) * quads];
        const float w = a.weights[row * a.top_k + k];
        sum.x += w * y.x;
        sum.y += w * y.y;
        sum.z += w * y.z;
        sum.w += w * y.w;
    }
    *to = sum;
}

namespace kv8 {

// What kernels write, so not by way of the read-only path.
__device__ __forceinline__ void read8(const float *from, float (&x)[8]) {
    const auto *const words = reinterpret_cast<const float4 *>(from);
    const float4 low = words[0], high = words[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS, 2)
    kv8_experts_combine_norm__sm80(const __grid_constant__ kv8_experts_combine_args a) {
    using namespace kv8;
    RowNorm norm(a.gain, a.hidden);
    take_turn();
    const int64_t row = blockIdx.x;
    const bool is_live = row < live_rows(a.live_rows, a.n);
    const float *const weights = a.weights + row * a.top_k;
    const float *const y = a.y + row * a.top_k * a.hidden;
    float *const residual = a.residual + row * a.hidden;
    const auto read = [&](int32_t at, float(&x)[8]) { read8(residual + at, x); };
    const auto add = [&](int32_t at, float(&x)[8]) {
        read(at, x);
        if (!is_live) return;
        for (int k = 0; k < a.top_k; k++) {
            float more[8];
            read8(y + int64_t{k} * a.hidden + at, more);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] += weights[k] * more[i];
        }
        auto *const to = reinterpret_cast<float4 *>(residual + at);
        to[0] = {x[0], x[1], x[2], x[3]};
        to[1] = {x[4], x[5], x[6], x[7]};
    };
    norm.run(a.eps, a.normed, add, read);
}
