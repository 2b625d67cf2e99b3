// rowwise.cu - what a step does to each token's row between the products: embedding, RMSNorm, the
// angles of rotary positions and the rotation of queries, the rows that go on; and dense weights
// made f16 as they load.
//
// Grid: one block a row, but the angles, which are one thread each, and weights, eight a thread.
// Block: 256 threads. Shared memory: 32 bytes. Bytes: each input and output once. Bound by: the
// launch for few rows, memory for many.
//
// SPDX-License-Identifier: Apache-2.0
#include "rowwise.cuh"
#include "take_turn.cuh"

namespace kv8 {

// y = the pair's rotation by (cosine, sine), as kv8_rope_rotate rounds it.
template <typename SOURCE>
static __device__ __forceinline__ void rotate_heads(const kv8_rope_args &a) {
    const int64_t row = blockIdx.x;
    const float *const cosines = a.cos_sin + row * 2 * a.half_dim;
    const SOURCE *const x = static_cast<const SOURCE *>(a.x) + row * a.x_stride_row;
    uint16_t *const y = static_cast<uint16_t *>(a.y) + row * a.y_stride_row;
    for (int32_t i = threadIdx.x; i < a.num_heads * a.half_dim; i += blockDim.x) {
        const int32_t head = i / a.half_dim, pair = i - head * a.half_dim;
        const int32_t at = head * 2 * a.half_dim + pair;
        const float cosine = cosines[pair], sine = cosines[a.half_dim + pair];
        const float first = widen(x[at]), second = widen(x[at + a.half_dim]);
        const float low = __fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine));
        const float high = __fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine));
        const uint32_t both = a.y_is_f16 ? pack_f16(low, high) : pack_bf16(low, high);
        y[at] = static_cast<uint16_t>(both);
        y[at + a.half_dim] = static_cast<uint16_t>(both >> 16);
    }
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_embed_bf16__sm80(const __grid_constant__ kv8_embed_args a) {
    kv8::take_turn();
    const auto *const from =
        static_cast<const kv8_bf16 *>(a.table) + int64_t{a.ids[blockIdx.x]} * a.hidden;
    float *const to = a.residual + int64_t{blockIdx.x} * a.hidden;
    for (int32_t at = 8 * threadIdx.x; at < a.hidden; at += 8 * KV8_ROWWISE_THREADS) {
        float x[8];
        kv8::widen8(kv8::load8(from + at), x);
        *reinterpret_cast<float4 *>(to + at) = {x[0], x[1], x[2], x[3]};
        *reinterpret_cast<float4 *>(to + at + 4) = {x[4], x[5], x[6], x[7]};
    }
}

extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_gather_rows__sm80(const __grid_constant__ kv8_gather_args a) {
    kv8::take_turn();
    const auto *const from =
        static_cast<const uint4 *>(a.x) + int64_t{a.row_ids[blockIdx.x]} * a.row_words;
    auto *const to = static_cast<uint4 *>(a.out) + int64_t{blockIdx.x} * a.row_words;
    for (int64_t at = threadIdx.x; at < a.row_words; at += KV8_ROWWISE_THREADS) to[at] = from[at];
}

extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_rmsnorm_f32__sm80(const __grid_constant__ kv8_rmsnorm_args a) {
    kv8::RowNorm norm(a.gain, a.hidden);
    kv8::take_turn();
    const int64_t row = a.row_ids == nullptr ? blockIdx.x : a.row_ids[blockIdx.x];
    const float *const from = a.x + row * a.hidden;
    const auto read = [&](int32_t at, float(&x)[8]) { kv8::widen8(kv8::load8(from + at), x); };
    norm.run(a.eps, a.out, read, read);
}

// Weights, in place. Exact but for what is nearer to 0 than 2^-14, which keeps multiples of 2^-24.
extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_to_f16_bf16__sm80(const __grid_constant__ kv8_to_f16_args a) {
    constexpr float MOST = 65504;
    const int64_t step = int64_t{8} * KV8_ROWWISE_THREADS * gridDim.x;
    for (int64_t at = 8 * (int64_t{KV8_ROWWISE_THREADS} * blockIdx.x + threadIdx.x); at < a.n;
         at += step) {
        float x[8];
        kv8::widen8(kv8::load8(static_cast<const kv8_bf16 *>(a.codes) + at), x);
#pragma unroll
        for (int i = 7; i >= 0; i--)
            if (!(fabsf(x[i]) <= MOST))
                atomicMin(reinterpret_cast<unsigned long long *>(a.first_bad),
                          static_cast<unsigned long long>(a.tensor << KV8_TO_F16_ELEMENT_BITS |
                                                          (at + i)));
        kv8::store8(a.codes, at, x);
    }
}

// As kv8_rope_angles: the angle is an f32 product, its cosine and sine are exact.
extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_rope_angles__sm80(const __grid_constant__ kv8_rope_angles_args a) {
    kv8::take_turn();
    const int64_t i = int64_t{blockIdx.x} * KV8_ROWWISE_THREADS + threadIdx.x;
    if (i >= int64_t{a.n} * a.half_dim) return;
    const int64_t row = i / a.half_dim, pair = i % a.half_dim;
    const float angle = __fmul_rn(static_cast<float>(a.positions[row]), a.inv_freq[pair]);
    double sine, cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    float *const to = a.cos_sin + row * 2 * a.half_dim + pair;
    to[0] = static_cast<float>(cosine) * a.factor;
    to[a.half_dim] = static_cast<float>(sine) * a.factor;
}

extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_rope_bf16__sm80(const __grid_constant__ kv8_rope_args a) {
    kv8::take_turn();
    kv8::rotate_heads<kv8_bf16>(a);
}
extern "C" __global__ void __launch_bounds__(KV8_ROWWISE_THREADS)
    kv8_rope_f32__sm80(const __grid_constant__ kv8_rope_args a) {
    kv8::take_turn();
    kv8::rotate_heads<float>(a);
}
