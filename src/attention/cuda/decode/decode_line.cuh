// decode_line.cuh - the line of many requests, laid by all threads of a block, which each look at a
// request: a warp would load the lengths of several a lane, one after another.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_kernel.cuh"

namespace kv8 {

// Whether the line is laid before the kernel ahead in the stream has ended: a thread keeps the
// lengths of its one request.
__device__ inline bool is_block_early(const kv8_kernel_args &a) {
    return a.batch <= int(blockDim.x);
}
__device__ inline Lengths own_lengths(const kv8_kernel_args &a) {
    const int b = threadIdx.x;
    return b < a.batch ? load_lengths(a, b) : Lengths{0, 0, 0, 0, 0};
}

// Each request's units to starts[b], and of each warp's requests the totals, but for units; by all
// threads. own: as own_lengths().
template <class C>
__device__ void count_by_block(const kv8_kernel_args &a, int *starts, Totals *of_warps,
                               const Lengths &own) {
    Totals sum = {0, 0, 0, false};
#pragma unroll 1
    for (int b = threadIdx.x; b < a.batch; b += blockDim.x)
        count_request<C>(
            a, starts, b, b < int(blockDim.x) ? own : load_lengths(a, b),
            [&](KeyRange keys) { return units_of(a, keys); }, sum);
    sum.streams = __reduce_add_sync(~0u, sum.streams);
    sum.longest = __reduce_max_sync(~0u, sum.longest);
    sum.any_empty = __any_sync(~0u, sum.any_empty);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
}
// Behind it, by one warp: as sum_units().
__device__ inline Totals sum_of_block(const kv8_kernel_args &a, int *starts,
                                      const Totals *of_warps) {
    const int lane = threadIdx.x % 32, each = lengths_per_lane(a);
    const int first = min(lane * each, a.batch), last = min(first + each, a.batch);
    int own = 0;
#pragma unroll 4
    for (int b = first; b < last; b++) own += starts[b];
    int units = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int more = __shfl_up_sync(~0u, units, d);
        if (lane >= d) units += more;
    }
    int start = units - own;
#pragma unroll 1
    for (int b = first; b < last; b++) {
        const int more = starts[b];
        starts[b] = start;
        start += more;
    }
    if (lane == 31) starts[a.batch] = units;
    __syncwarp();
    Totals sum = {0, 0, 0, false};
    if (lane < int(blockDim.x) / 32) sum = of_warps[lane];
    return {__shfl_sync(~0u, units, 31), int(__reduce_add_sync(~0u, sum.streams)),
            __reduce_max_sync(~0u, sum.longest), __any_sync(~0u, sum.any_empty) != 0};
}
// The block's range of the line, and its first split.
template <class C, class BLOCK>
__device__ void take_range(const kv8_kernel_args &a, int *starts, BLOCK &block, Split &into) {
    const Totals sum = sum_of_block(a, starts, block.totals);
    const Partition partition = cut_partition(a, sum);
    if (threadIdx.x % 32 == 0) block.any_empty = sum.any_empty, block.partition = partition;
    take_split<C>(a, starts, partition, block, into, [&](int b) { return load_lengths(a, b); });
}

}  // namespace kv8
