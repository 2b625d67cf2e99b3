// experts_router.cuh - what kernels share that norm rows, multiply them by the router's weights and
// choose: eight values at a time, in the layout of mma's operands.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "codec.cuh"
#include "experts_route.cuh"
#include "take_turn.cuh"

namespace kv8 {

// To another block's shared memory.
__device__ __forceinline__ void store_cluster(uint32_t at, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

// Eight values of a row normed, and stored where the row is one.
__device__ __forceinline__ uint4 norm8(float (&x)[8], const float (&gain)[8], float scale, void *to,
                                       bool stores) {
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] *= scale * gain[j];
    const uint4 word = {pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]),
                        pack_f16(x[6], x[7])};
    if (stores) *static_cast<uint4 *>(to) = word;
    return word;
}

// Eight weights of an expert, the last one's where there are not so many.
__device__ __forceinline__ uint4 router_weights(const kv8_experts_router_args &a, int expert,
                                                int at) {
    const int64_t row = min(expert, a.route.num_experts - 1);
    return __ldg(
        reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(a.w) + row * a.hidden + at));
}

// sum += rows g and g + 8 times 8 experts over 32 columns, of which lane (g, c) has the eight from
// 8c on: of p and q a row's, of w an expert's.
__device__ __forceinline__ void multiply_32(float (&sum)[4], const uint4 &p, const uint4 &q,
                                            const uint4 &w) {
    mma<false>(sum, {p.x, q.x, p.y, q.y}, {w.x, w.y});
    mma<false>(sum, {p.z, q.z, p.w, q.w}, {w.z, w.w});
}

// By a warp: the logits of a row are the sum of PARTS in shared memory, `pitch` apart, and the
// biases; written in the first's place.
template <int EXPERTS, int PARTS>
__device__ __forceinline__ void choose_by_parts(const kv8_experts_router_args &a, float *logits,
                                                int pitch, int row) {
    for (int expert = threadIdx.x % 32; expert < a.route.num_experts; expert += 32) {
        float sum = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) sum += logits[part * pitch + expert];
        const uint32_t bias = __ldg(static_cast<const uint16_t *>(a.bias) + expert);
        logits[expert] = sum + __uint_as_float(bias << 16);
    }
    __syncwarp();
    choose_row<EXPERTS / 32>(a.route, logits, row, live_rows(a.route.live_rows, a.route.n));
}

}  // namespace kv8
