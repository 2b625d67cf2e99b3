// argmax.cu - the id of the largest of each row of logits, the lowest of equals; -1 where a logit
// is not finite, as the engine ends such a request.
//
// Grid: 32 parts x rows; the last part of a row to arrive ends it. Block: 512 threads. Shared
// memory: 128 bytes. Bytes: the logits, once. Bound by: memory for many rows, latency for one.
//
// SPDX-License-Identifier: Apache-2.0
#include "rowwise_args.h"

namespace kv8 {

constexpr uint64_t NOT_FINITE = ~uint64_t{0};

// Larger for a larger logit, then for a lower id; both zeros are one.
static __device__ __forceinline__ uint64_t key_of(float logit, int32_t id) {
    if (!isfinite(logit)) return NOT_FINITE;
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    const uint32_t order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
    return uint64_t{order} << 32 | static_cast<uint32_t>(INT32_MAX - id);
}
static __device__ __forceinline__ uint64_t larger(uint64_t x, uint64_t y) {
    return x > y ? x : y;
}
static __device__ __forceinline__ uint64_t warp_max(uint64_t key) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) key = larger(key, __shfl_xor_sync(~0u, key, step));
    return key;
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_ARGMAX_THREADS)
    kv8_argmax_f32__sm80(const __grid_constant__ kv8_argmax_args a) {
    __shared__ uint64_t part[KV8_ARGMAX_THREADS / 32];
    const int64_t row = blockIdx.y;
    const float *const logits = a.logits + row * a.vocab_size;
    uint64_t key = 0;
#pragma unroll 4
    for (int32_t id = blockIdx.x * KV8_ARGMAX_THREADS + threadIdx.x; id < a.vocab_size;
         id += KV8_ARGMAX_SPLITS * KV8_ARGMAX_THREADS)
        key = kv8::larger(key, kv8::key_of(__ldcs(logits + id), id));
    key = kv8::warp_max(key);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    key = threadIdx.x < KV8_ARGMAX_THREADS / 32 ? part[threadIdx.x] : 0;
    key = kv8::warp_max(key);
    bool last = false;
    uint64_t *const partial = a.partial + row * KV8_ARGMAX_SPLITS;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = key;
        __threadfence();
        last = atomicAdd(a.arrived + row, 1) == KV8_ARGMAX_SPLITS - 1;
        __threadfence();
    }
    if (!__shfl_sync(~0u, last, 0)) return;
    static_assert(KV8_ARGMAX_SPLITS == 32, "one lane a part");
    key = kv8::warp_max(__ldcg(partial + threadIdx.x));
    if (threadIdx.x != 0) return;
    const auto id = INT32_MAX - static_cast<int32_t>(key & 0x7fffffff);
    a.ids_out[row] = key == kv8::NOT_FINITE ? -1 : id;
    a.arrived[row] = 0;
}
