// logit_rows.cu - what rows of logits say, in f64: ln sum exp, loss, divergence from a reference,
// the largest.
//
// Grid: a block a row. Block: 512 threads. Bytes: the logits three times, the reference's once; the
// second and third time from the L2 where rows are few. Sums in a fixed order. Bound by: f64
// exponentials.
//
// SPDX-License-Identifier: Apache-2.0
#include "logit_rows_args.h"

namespace kv8 {

constexpr int THREADS = KV8_LOGIT_ROWS_THREADS, WARPS = THREADS / 32;

// The sum of all threads' x, in every thread.
static __device__ __forceinline__ double sum_of_block(double x, double *shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w];
    return sum;
}

struct Largest {
    float logit;
    int32_t id;
};
static __device__ __forceinline__ Largest larger(Largest a, Largest b) {
    return b.logit > a.logit || (b.logit == a.logit && b.id < a.id) ? b : a;
}
static __device__ __forceinline__ Largest largest_of_block(Largest x, Largest *shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        x = larger(x, {__shfl_xor_sync(~0u, x.logit, step), __shfl_xor_sync(~0u, x.id, step)});
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) x = larger(x, shared[w]);
    return x;
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_LOGIT_ROWS_THREADS)
    kv8_logit_rows_f32__sm80(const __grid_constant__ kv8_logit_rows_args a) {
    using namespace kv8;
    __shared__ double sums[WARPS];
    __shared__ Largest maxima[WARPS];
    const int64_t row = blockIdx.x;
    const float *const logits = a.logits + row * a.vocab_size;
    Largest mine = {-INFINITY, INT32_MAX};
    for (int32_t i = threadIdx.x; i < a.vocab_size; i += THREADS)
        mine = larger(mine, {logits[i], i});
    const Largest best = largest_of_block(mine, maxima);
    double part = 0;
    for (int32_t i = threadIdx.x; i < a.vocab_size; i += THREADS)
        part += exp(static_cast<double>(logits[i]) - static_cast<double>(best.logit));
    const double lse = static_cast<double>(best.logit) + log(sum_of_block(part, sums));
    double kl = 0;
    if (a.ref_logits != nullptr) {
        const float *const ref = a.ref_logits + row * a.vocab_size;
        const double ref_lse = a.ref[row].lse;
        part = 0;
        for (int32_t i = threadIdx.x; i < a.vocab_size; i += THREADS) {
            const double log_p = static_cast<double>(ref[i]) - ref_lse;
            part += exp(log_p) * (log_p - (static_cast<double>(logits[i]) - lse));
        }
        kl = sum_of_block(part, sums);
    }
    if (threadIdx.x != 0) return;
    const bool has_next = row < a.num_next;
    const double loss = has_next ? lse - static_cast<double>(logits[a.next_ids[row]]) : 0;
    a.out[row] = {lse, loss, kl, best.id == INT32_MAX ? 0 : best.id, 0};
}
