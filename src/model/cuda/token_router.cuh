// token_router.cuh - which experts a token takes: sums over all blocks, and the best of them.
//
// A sum is a whole number, so that it has no order. Its last bits count the blocks that have added,
// and it runs over all layers: a layer's is what it grows by until all have.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "token_dense.cuh"

namespace kv8 {

constexpr int HIDDEN = KV8_TOKEN_HIDDEN, TOP_K = KV8_TOKEN_TOP_K;
// Rows of O of a block: pairs, which the router's weights are read in.
__device__ __forceinline__ Share rows_of_o() {
    Share s(HIDDEN / 2, blockIdx.x, gridDim.x);
    s.begin *= 2, s.end *= 2;
    return s;
}

constexpr int ROUTER_COUNT_BITS = 8;
static_assert(KV8_TOKEN_MAX_BLOCKS < 1 << ROUTER_COUNT_BITS, "counts");
constexpr float ROUTER_STEP = 0x1p-26f, ROUTER_LIMIT = 0x1p20f;  // of a block's part

// Adds a block's part; false when it is beyond the limit, and then nothing.
__device__ __forceinline__ bool add_to_router(int64_t *sum, float part) {
    const bool holds = fabsf(part) <= ROUTER_LIMIT;
    const int64_t steps = holds ? __float2ll_rn(part * (1 / ROUTER_STEP)) : 0;
    atomicAdd(reinterpret_cast<unsigned long long *>(sum),
              static_cast<unsigned long long>((steps << ROUTER_COUNT_BITS) + 1));
    return holds;
}

__device__ __forceinline__ int64_t load_relaxed(const int64_t *from) {
    int64_t x;
    asm volatile("ld.relaxed.gpu.global.s64 %0, [%1];" : "=l"(x) : "l"(from));
    return x;
}

struct Routing {
    int experts[TOP_K];
    float weights[TOP_K];
};

// Squares of the residual after attention, of which a lane has some.
using Squares = Handed<1>[KV8_TOKEN_MAX_BLOCKS / 32];
__device__ __forceinline__ const float *squares_at(const float *squares, int i) {
    const int block = threadIdx.x % 32 + 32 * i;
    return block < static_cast<int>(gridDim.x) ? squares + block : nullptr;
}
__device__ __forceinline__ float norm_scale(float eps, const Squares &squares) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < KV8_TOKEN_MAX_BLOCKS / 32; i++) sum += squares[i].value(0);
    return rsqrtf(warp_sum(sum) / HIDDEN + eps);
}

// What a row is routed by.
struct RouterSums {
    const int64_t *sums;  // [num_experts]
    const float *squares;
    int num_experts;
    float eps;
};

// The best experts of the router's sums, ties to the lower id, NaN last; and their softmax. By a
// warp.
__device__ __forceinline__ Routing route(const RouterSums &a, const float (&bias)[4],
                                         int64_t *before, uint32_t turn) {
    const int lane = threadIdx.x % 32;
    const auto square_at = [&](int i) { return squares_at(a.squares, i); };
    Squares squares;
    ask(squares, turn, square_at);
    int64_t sums[4], from[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[i] = lane + 32 * i < a.num_experts ? load_relaxed(a.sums + lane + 32 * i) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int expert = lane + 32 * i;
        if (expert >= a.num_experts) continue;
        from[i] = before[expert];
    }
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int expert = lane + 32 * i;
            if (expert >= a.num_experts ||
                ((sums[i] - from[i]) & ((1 << ROUTER_COUNT_BITS) - 1)) == gridDim.x)
                continue;
            sums[i] = load_relaxed(a.sums + expert);
            all = false;
        }
    } while (!all);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (lane + 32 * i >= a.num_experts) continue;
        before[lane + 32 * i] = sums[i];
        sums[i] = (sums[i] - from[i]) >> ROUTER_COUNT_BITS;
    }
    get(squares, turn, square_at);
    const float scale = norm_scale(a.eps, squares);
    uint32_t keys[4];  // grow with the logit; 1: NaN, 0: none
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float logit = static_cast<float>(sums[i]) * ROUTER_STEP * scale + bias[i] + 0.0f;
        const uint32_t bits = __float_as_uint(logit);
        keys[i] = isnan(logit) ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
        if (lane + 32 * i >= a.num_experts) keys[i] = 0;
    }
    Routing r;
    float best = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
        const uint32_t top =
            __reduce_max_sync(~0u, max(max(keys[0], keys[1]), max(keys[2], keys[3])));
        uint32_t id = ~0u;
#pragma unroll
        for (int i = 3; i >= 0; i--)
            if (keys[i] == top) id = lane + 32 * i;
        id = __reduce_min_sync(~0u, id);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (id == static_cast<uint32_t>(lane + 32 * i)) keys[i] = 0;
        const float logit = top == 1 ? NAN : __uint_as_float(top >> 31 ? top & 0x7fffffffu : ~top);
        if (k == 0) best = logit;
        r.experts[k] = id;
        r.weights[k] = __expf(logit - best);
        sum += r.weights[k];
    }
#pragma unroll
    for (int k = 0; k < TOP_K; k++) r.weights[k] = __fdividef(r.weights[k], sum);
    return r;
}

__device__ __forceinline__ int expert_of(const Routing &r, int k) {
    return k == 0 ? r.experts[0] : k == 1 ? r.experts[1] : k == 2 ? r.experts[2] : r.experts[3];
}

}  // namespace kv8
