// token_draw.cuh - the draw of the next token from all ids, greedy or by weight, behind the head:
// every block has the logits that it has just written, and what draw() of sampler.cuh gives without
// cuts, changes and a mask comes to the bit, since all that is summed is a whole number.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "sampler_numbers.cuh"
#include "token_ring.cuh"

namespace kv8 {

struct DrawScratch {
    u64 warps[5][KV8_TOKEN_WARPS];  // of each joining
};

// Of all threads' parts the joined one, in every thread.
template <class JOIN>
__device__ __forceinline__ u64 join_warps(u64 x, u64 (&scratch)[KV8_TOKEN_WARPS], JOIN &&join) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    meet_warps();
    x = scratch[threadIdx.x % KV8_TOKEN_WARPS];
#pragma unroll
    for (int step = KV8_TOKEN_WARPS / 2; step > 0; step /= 2)
        x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ u64 largest_of(u64 x, u64 (&scratch)[KV8_TOKEN_WARPS]) {
    return join_warps(x, scratch, [](u64 p, u64 q) { return p > q ? p : q; });
}
__device__ __forceinline__ u64 sum_of(u64 x, u64 (&scratch)[KV8_TOKEN_WARPS]) {
    return join_warps(x, scratch, [](u64 p, u64 q) { return p + q; });
}

__device__ __forceinline__ void tell_drawn(const kv8_token_args &a, int32_t token, int32_t bad_id) {
    a.drawn[0] = token;
    a.drawn[1] = bad_id;
    a.drawn[2] = bad_id < 0 ? 0 : __float_as_int(__ldcg(a.logits + bad_id));
}

// By the computing warps of all blocks, after each wrote the logits of its share.
__device__ __forceinline__ void draw_token(const kv8_token_args &a, const Meeting &best_known,
                                           const Meeting &summed, DrawScratch &scratch) {
    const int t = threadIdx.x, blocks = gridDim.x, block = blockIdx.x;
    const Share share(a.vocab_size, block, blocks);
    const Share own(share.count(), t, COMPUTE_THREADS);  // ids of a thread follow one another
    const float *const logits = a.logits + share.begin;
    u64 *const best = a.draw_parts, *const sums = a.draw_parts + 2 * blocks;
    meet_warps();
    u64 key = 0, bad = 0;  // the larger, the lower the id
#pragma unroll 8
    for (int i = own.begin; i < own.end; i++) {
        const float l = __ldcg(logits + i);
        const int32_t id = share.begin + i;
        if (isfinite(l))
            key = max(key, key_of(l, id));
        else
            bad = max(bad, u64{~static_cast<uint32_t>(id)});
    }
    key = largest_of(key, scratch.warps[0]);
    bad = largest_of(bad, scratch.warps[1]);
    if (t == 0) best[2 * block] = key, best[2 * block + 1] = bad;
    best_known.arrive();
    best_known.wait();
    key = largest_of(t < blocks ? __ldcg(best + 2 * t) : 0, scratch.warps[0]);
    bad = largest_of(t < blocks ? __ldcg(best + 2 * t + 1) : 0, scratch.warps[1]);
    if (bad != 0 || a.draw_factor == 0) {
        if (block == 0 && t == 0) tell_drawn(a, id_of(key), bad == 0 ? -1 : id_of(bad));
        return;
    }
    const float high = logit_of(key);
    u64 mine = 0;
#pragma unroll 8
    for (int i = own.begin; i < own.end; i++)
        mine += weight_of(__ldcg(logits + i), high, a.draw_factor);
    u64 up_to = mine;  // of the block's threads up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(~0u, up_to, step);
        if (t % 32 >= step) up_to += other;
    }
    if (t % 32 == 31) scratch.warps[2][t / 32] = up_to;
    meet_warps();
    u64 sum = 0;
#pragma unroll
    for (int w = 0; w < KV8_TOKEN_WARPS; w++) {
        if (w == t / 32) up_to += sum;
        sum += scratch.warps[2][w];
    }
    if (t == 0) sums[block] = sum;
    summed.arrive();
    summed.wait();
    const u64 part = t < blocks ? __ldcg(sums + t) : 0;
    const u64 all = sum_of(part, scratch.warps[3]);
    const u64 before = sum_of(t < block ? part : 0, scratch.warps[4]) + up_to - mine;
    u64 target = __umul64hi(all, a.draw_random);
    if (target < before || target - before >= mine) return;
    target -= before;
    int i = own.begin;
    for (;; i++) {
        const u64 weight = weight_of(__ldcg(logits + i), high, a.draw_factor);
        if (target < weight) break;
        target -= weight;
    }
    tell_drawn(a, share.begin + i, -1);
}

}  // namespace kv8
