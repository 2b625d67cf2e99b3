// decode_window.cuh - a launch over few keys, of a window or in all, whose time is that of its
// longest chain of loads and instructions: nothing is planned, and no stream is split. A block has
// one request and some of its KV heads. It does nothing before the kernel ahead in the stream is
// done: it finds room when that one ends, and a load made sooner is one more to wait for.
//
// Grid: (max_batch * blocks of heads). Block: WARPS * 32. Bound by: latency.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_combine.cuh"

namespace kv8 {

// Rows row_begin and on of the request, all keys they see.
template <class C>
__device__ Split window_split(const kv8_kernel_args &a, const Request &r, const int32_t *pages,
                              int row_begin, int head_begin) {
    Split p;
    p.request = r, p.pages = pages, p.head_begin = head_begin;
    p.row_begin = row_begin;
    p.num_rows = min(C::ROWS, r.qo_len * a.group_size - row_begin);
    const KeyRange top = visible_keys(a, r, divide(row_begin, a.by_group));
    const KeyRange low = visible_keys(a, r, divide(row_begin + p.num_rows - 1, a.by_group));
    p.any = {min(top.begin, low.begin), low.end};
    p.all = {low.begin, top.end}, p.has_gaps = false;
    p.granule_begin = p.any.begin / TOKENS;
    p.granule_end = p.granule_begin + granules_of(p.any);
    p.stream = 0, p.num_splits = 1;
    return p;
}

template <class C>
__device__ __forceinline__ void window_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ RowEnd ends[C::WARPS * C::ROWS];
    launch_dependents();
    const int b = divide(int(blockIdx.x), a.decode.by_head_blocks);
    if (b >= a.batch) return;
    const int warp = threadIdx.x / 32, slice = divide(warp, a.decode.by_heads);
    const int in_block = warp - slice * a.decode.heads_per_block;
    const int head_begin = (int(blockIdx.x) - b * a.decode.head_blocks) * a.decode.heads_per_block;
    const int head = head_begin + in_block;
    wait_for_previous();
    const Lengths lengths = load_lengths(a, b);
    const Request r = make_request(a, b, lengths);
    const int32_t *const pages = request_pages(a, b, lengths);
    const int num_rows = r.qo_len * a.group_size;
#pragma unroll 1
    for (int row = 0; row < num_rows; row += C::ROWS) {
        if (row > 0) __syncthreads();  // shared memory is free again
        Split split = window_split<C>(a, r, pages, row, head_begin);
        const int first = split.granule_begin + slice, left = split.granule_end - first;
        const int count = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
        run_mainloop<C>(a, split, head, first, a.decode.num_slices, count,
                        rings + warp * C::RING_BYTES, [&] {
                            if (slice == 0)
                                copy_row_ends(a, split, head, ends + in_block * C::ROWS);
                        });
        __syncthreads();
        combine_splits<C>(a, split, rings, ends);
    }
}

}  // namespace kv8

#define KV8_DECODE_WINDOW_DEFINE(name, format, head_dim, warps, stages, fixed_bytes)              \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                   \
        name(const __grid_constant__ kv8_kernel_args a) {                                         \
        using config = kv8::DecodeConfig<format, format, head_dim, 1, warps, stages, true, true>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                        \
        kv8::window_body<config>(a);                                                              \
    }
