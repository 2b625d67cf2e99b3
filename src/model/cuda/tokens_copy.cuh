// tokens_copy.cuh - the warps of tokens.cu that do not compute: one copies what the tokens' layers
// read, in its order, and four route.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "tokens_shared.cuh"

namespace kv8 {

__device__ __forceinline__ Share strips_of(int count, int strips) {
    return Share(count * strips, blockIdx.x, gridDim.x);
}

__device__ __forceinline__ void copy_experts(RingWriter &ring, const kv8_token_layer &l,
                                             const ChosenExperts &experts) {
    const auto copy = [&](const uint8_t *weights, int num_strips, bool is_last) {
        const Share strips = strips_of(experts.count, num_strips);
#pragma unroll 1
        for (int u = strips.begin; u < strips.end; u++) {
            ring.in_flight = is_last && u == strips.end - 1 ? 2 : 3;
            const int64_t strip =
                int64_t{experts.expert[u / num_strips]} * num_strips + u % num_strips;
            ring.put(weights + strip * STRIP_BYTES, STRIP_BYTES);
        }
    };
    copy(l.gate_up, GATE_UP_STRIPS, false);
    copy(l.down, DOWN_STRIPS, true);
}

template <int X>
__device__ __forceinline__ void route_tokens(const kv8_tokens_args &a, const kv8_token_layer &l,
                                             int layer, Shared<X> &shared) {
    constexpr int WARPS = KV8_TOKEN_THREADS / 32 - KV8_TOKEN_WARPS;
    const int lane = threadIdx.x % 32;
    float bias[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        bias[k] =
            lane + 32 * k < a.num_experts ? widen_bf16(__ldg(l.router_bias + lane + 32 * k)) : 0;
    barrier_wait(smem_address(&shared.routable), layer & 1);
#pragma unroll 1
    for (int t = threadIdx.x / 32 - KV8_TOKEN_WARPS; t < a.num_tokens; t += WARPS) {
        const RouterSums from = {a.router + t * KV8_TOKEN_MAX_EXPERTS,
                                 a.squares + t * KV8_TOKEN_MAX_BLOCKS, a.num_experts, a.eps};
        const Routing r = route(from, bias, shared.router_before[t], turn_of(layer));
        if (lane != 0) continue;
#pragma unroll
        for (int k = 0; k < TOP_K; k++) {
            shared.chosen[t * TOP_K + k] = r.experts[k];
            shared.expert_weights[t * TOP_K + k] = r.weights[k];
        }
    }
    named_barrier_sync(2, 32 * WARPS);
    if (threadIdx.x / 32 != KV8_TOKEN_WARPS) return;
    shared.experts.list(shared.chosen, a.num_tokens * TOP_K);
    __syncwarp();
    if (lane == 0) barrier_arrive(smem_address(&shared.listed));
}

template <Format F>
__device__ __forceinline__ void copy_layer_keys(const kv8_tokens_args &a, const kv8_token_layer &l,
                                                const Attending &at, RingWriter &ring) {
    if (at.token < 0) return;
    const TokensRow row(a, at.token, at.first);
    const KeySplits keys(l.window_left, a.positions[at.token], at.count);
    if (keys.are_few() && at.idx < KV_HEADS)
        copy_few<Keys<F, 1>>(ring, l, row.pages_of(l), keys, at.idx, a.page_size);
    if (!keys.are_few() && at.idx < keys.splits)
        copy_keys<Keys<F, KV_HEADS>>(ring, l, row.pages_of(l), keys.of(at.idx), a.page_size);
}

template <Format F, int X>
__device__ __forceinline__ void copy_tokens(const kv8_tokens_args &a, Shared<X> &shared,
                                            uint32_t rings) {
    const bool copies = threadIdx.x / 32 == KV8_TOKEN_WARPS, leads = threadIdx.x % 32 == 0;
    RingWriter ring;
    ring.ring = rings, ring.full = smem_address(shared.full);
    ring.empty = smem_address(shared.empty);
    ring.policy = leave_first_policy(), ring.in_flight = 2;
    const Share qkv(QKV_WIDTH, blockIdx.x, gridDim.x), o = rows_of_o();
#pragma unroll 1
    for (int i = 0; i < a.num_layers; i++) {
        const kv8_token_layer &l = shared.layers[i];
        if (copies) {
            if (leads) copy_rows<HIDDEN>(ring, l.qkv, qkv);
            __syncwarp();
            copy_layer_keys<F>(a, l, shared.attending[l.window], ring);
            if (leads) copy_rows<Q_WIDTH>(ring, l.o, o);
            __syncwarp();
        }
        route_tokens(a, l, i, shared);
        if (copies && leads) copy_experts(ring, l, shared.experts);
        __syncwarp();
    }
    if (copies && leads)
        copy_rows<HIDDEN>(ring, a.head, Share(a.vocab_size, blockIdx.x, gridDim.x));
}

}  // namespace kv8
