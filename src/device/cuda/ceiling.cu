/* ceiling.cu - a plain streaming read: what no kernel that reads its bytes once can beat.
 *
 * Grid: any; each block takes 512 * 8 words of 16 bytes, then the next such piece a grid further.
 * Block: 512 threads, 8 independent loads each in flight. Shared memory: none. Bytes: 16 *
 * num_words read, none written. Bound by: memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_args.h"

extern "C" __global__ void __launch_bounds__(KV8_READ_CEILING_THREADS)
    kv8_read_ceiling__sm80(const __grid_constant__ kv8_read_ceiling_args a) {
    constexpr uint64_t piece = KV8_READ_CEILING_THREADS * KV8_READ_CEILING_UNROLL;
    const uint4 *const words = static_cast<const uint4 *>(a.data);
    uint32_t all = 0;
    for (uint64_t begin = blockIdx.x * piece; begin < a.num_words; begin += gridDim.x * piece) {
        uint4 word[KV8_READ_CEILING_UNROLL];
#pragma unroll
        for (int i = 0; i < KV8_READ_CEILING_UNROLL; i++) {
            const uint64_t at = begin + i * KV8_READ_CEILING_THREADS + threadIdx.x;
            word[i] = at < a.num_words ? __ldcs(words + at) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < KV8_READ_CEILING_UNROLL; i++)
            all ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
    }
    if (all == a.unlikely) *a.result_out = all;
}
