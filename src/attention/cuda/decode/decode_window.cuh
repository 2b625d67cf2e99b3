// decode_window.cuh - a launch over few keys, of a window or in all, whose time is that of its
// longest chain of loads and instructions: nothing is planned, and no stream is split. A block has
// one request and some of its KV heads.
//
// Grid: (batch * blocks of heads). Block: WARPS * 32, two a multiprocessor, so that the next
// launch's come while these end. Bound by: latency.
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
    __shared__ Lengths shared_lengths;
    const int b = divide(int(blockIdx.x), a.decode.by_head_blocks);
    if (b >= a.batch) return;
    const int warp = threadIdx.x / 32, slice = divide(warp, a.decode.by_heads);
    const int in_block = warp - slice * a.decode.heads_per_block;
    const int head_begin = (int(blockIdx.x) - b * a.decode.head_blocks) * a.decode.heads_per_block;
    const int head = head_begin + in_block;
    uint8_t *const own_ring = rings + warp * C::RING_BYTES;
    const uint32_t ring = keep(smem_address(own_ring));
    // As in decode_cluster.cuh.
    Lengths lengths = load_lengths_once(a, b, shared_lengths);
    bool waited = false;
    int row = 0;
#pragma unroll 1
    for (;;) {
        const Request r = make_request(a, b, lengths);
        Split split = window_split<C>(a, r, request_pages(a, b, lengths), row, head_begin);
        const int first = split.granule_begin + slice, left = split.granule_end - first;
        const int count = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
        WarpAttention<C> attention(a, split, head);
        Loader<C> loader(a, split, ring, head, first, a.decode.num_slices, count);
        attention.find_queries(), loader.find_first();
        if (!waited) wait_for_previous();
        loader.load_first();
        if (!waited) {
            waited = true;
            if (lengths_changed(a, b, lengths)) {
                lengths = load_lengths_once(a, b, shared_lengths);
                continue;
            }
        }
        const int num_rows = r.qo_len * a.group_size;
        if (row >= num_rows) return;
        attention.load_queries(), loader.load_others();
        run_granules<C>(attention, loader, first, a.decode.num_slices, count, ring, own_ring, [&] {
            if (slice == 0) copy_row_ends(a, split, head, ends + in_block * C::ROWS);
        });
        // The next launch's blocks come once the keys are read: sooner, a multiprocessor that is
        // free may take two of them.
        launch_dependents();
        __syncthreads();
        combine_splits<C>(a, split, rings, ends);
        row += C::ROWS;
        if (row >= num_rows) return;
        __syncthreads();  // shared memory is free again
    }
}

}  // namespace kv8

#define KV8_DECODE_WINDOW_DEFINE(name, format, head_dim, warps, stages, fixed_bytes)              \
    extern "C" __global__ void __launch_bounds__(warps * 32, 2)                                   \
        name(const __grid_constant__ kv8_kernel_args a) {                                         \
        using config = kv8::DecodeConfig<format, format, head_dim, 1, warps, stages, true, true>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                        \
        kv8::window_body<config>(a);                                                              \
    }
