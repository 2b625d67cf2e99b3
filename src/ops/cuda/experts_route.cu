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
#include "experts_route.cuh"
#include "rowwise.cuh"
#include "take_turn.cuh"

namespace kv8 {

__device__ __forceinline__ const float *logits_of(const kv8_experts_route_args &a, int row) {
    return a.logits + static_cast<int64_t>(row) * a.num_experts;
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_CHOOSE_THREADS)
    kv8_experts_choose__sm80(const __grid_constant__ kv8_experts_route_args a) {
    using namespace kv8;
    take_turn();
    const int row = (blockIdx.x * KV8_EXPERTS_CHOOSE_THREADS + threadIdx.x) / 32;
    if (row < a.n) choose_row(a, logits_of(a, row), row, live_rows(a.live_rows, a.n));
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
    __shared__ FewPlaces few;
    few.clear();
    const int live = live_rows(a.live_rows, a.n), lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < a.n; row += KV8_EXPERTS_SORT_THREADS / 32) {
        const int id = choose_row(a, logits_of(a, row), row, live);
        if (lane < a.top_k) few.ids[row * a.top_k + lane] = static_cast<uint8_t>(id);
    }
    sort_few(a, few);
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
