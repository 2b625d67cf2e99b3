// decode_kernel.cuh - a block of a decode launch: its splits one after another.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_pieces.cuh"

namespace kv8 {

// Requests with rows but no visible key: o = 0, lse = -inf.
__device__ inline void finish_empty(const kv8_kernel_args &a, const int *starts) {
    for (int b = blockIdx.x; b < a.batch; b += gridDim.x) {
        if (starts[b + 1] != starts[b]) continue;
        const Request r = make_request(a, b, load_lengths(a, b));
        const int pairs = a.v_head_dim / 2;
        for (int64_t i = threadIdx.x; i < int64_t(r.qo_len) * a.num_qo_heads * pairs;
             i += blockDim.x) {
            const int dim = int(i % pairs) * 2, head = int(i / pairs % a.num_kv_heads);
            const int row = int(i / pairs / a.num_kv_heads);
            finish(a, r, head, row, dim, {0, 1}, 0, 0, NO_KEY, 0);
        }
    }
}

template <class C>
struct Block {
    Split splits[2];  // the one at work and the next
    RowEnd ends[C::WARPS / C::RING_WARPS * C::HEADS * C::ROWS];
    Partition partition;
    Pieces pieces;
    bool any_empty;

    __device__ Split *other(const Split *split) { return splits + (split == splits); }
};

// The next split of the block into `into`, by one warp.
template <class C, class BLOCK, class LENGTHS>
__device__ void take_split(const kv8_kernel_args &a, const int *starts, Partition partition,
                           BLOCK &block, Split &into, LENGTHS &&lengths_of) {
    if (C::HAS_PIECES && a.decode.piece_units > 0) {
        next_piece<C>(a, starts, block.pieces, into);
        return;
    }
    next_split<C>(a, starts, partition, into, lengths_of);
    __syncwarp();  // all lanes have read what changes now
    if (threadIdx.x % 32 == 0) block.partition.unit = partition.unit;
    __syncwarp();
}

// Partitions the work and takes the block's first split, by one warp. own_lengths: as
// sum_units(); lengths_of(b): of request b, by all lanes.
template <class C, class BLOCK, class OWN, class LENGTHS>
__device__ void partition_work(const kv8_kernel_args &a, int *starts, BLOCK &block, Split &into,
                               OWN &&own_lengths, LENGTHS &&lengths_of) {
    const Totals sum =
        sum_units<C>(a, starts, own_lengths, [&](KeyRange keys) { return units_of(a, keys); });
    const Partition partition = cut_partition(a, sum);
    if (threadIdx.x % 32 == 0) block.any_empty = sum.any_empty, block.partition = partition;
    take_split<C>(a, starts, partition, block, into, lengths_of);
}
// From what lies in memory, and from what is cached of it.
template <class C, class BLOCK>
__device__ void partition_loaded(const kv8_kernel_args &a, int *starts, BLOCK &block, Split &into) {
    if (a.decode.piece_units > 0) {
        block.any_empty = cut_pieces<C>(a, starts, block.pieces);
        next_piece<C>(a, starts, block.pieces, into);
        return;
    }
    partition_work<C>(a, starts, block, into, own_loaded(a),
                      [&](int b) { return load_lengths(a, b); });
}
template <class C, class BLOCK>
__device__ void partition_cached(const kv8_kernel_args &a, int *starts, BLOCK &block, Split &into,
                                 const CachedLengths<C::MOST_CACHED> &cached) {
    if (C::HAS_PRODUCER && a.decode.piece_units > 0) {
        const auto lengths_of = [&](int b) { return cached_lengths(a, cached, b); };
        block.any_empty = cut_pieces<C>(a, starts, block.pieces, own_cached(cached));
        next_piece<C>(a, starts, block.pieces, into, lengths_of);
        return;
    }
    partition_work<C>(a, starts, block, into, own_cached(cached),
                      [&](int b) { return cached_lengths(a, cached, b); });
}

// Partitions the work and takes the block's first split, by its first warp: before the kernel ahead
// in the stream has ended, from the lengths that lie there, and once more if that kernel changed
// them.
template <class C>
__device__ void partition_first(const kv8_kernel_args &a, int *starts, Block<C> &block) {
    if (!is_laid_early<C>(a)) {
        wait_for_previous();
        partition_loaded<C>(a, starts, block, block.splits[0]);
        return;
    }
    bool waited = false;
    for (;;) {
        CachedLengths<C::MOST_CACHED> cached;
        load_cached(a, cached);
        partition_cached<C>(a, starts, block, block.splits[0], cached);
        if (waited) return;
        prefetch_pages(a, block.splits[0]);
        wait_for_previous(), waited = true;
        if (unchanged(a, cached)) return;
    }
}

template <class C>
__device__ __forceinline__ void decode_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ Block<C> block;
    // Whatever the next kernel is, it waits for all of this one before it reads more than hints.
    launch_dependents();
    int *const starts = reinterpret_cast<int *>(rings + C::FIXED_BYTES);
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
        partition_first<C>(a, starts, block);
        find_unmasked(a, block.splits[0]);
    } else {
        wait_for_previous();
    }
    __syncthreads();
    // A granule takes as many warps as it has heads: a slice of the block.
    const int slice = divide(warp, a.decode.by_heads);
    const int in_block =
        warp * C::HEADS - slice * a.decode.heads_per_block;  // the warp's first head
#pragma unroll 1
    for (Split *at = block.splits; at->stream >= 0; at = block.other(at)) {
        Split &split = *at;
        const int first = split.granule_begin + slice, left = split.granule_end - first;
        const int count = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
        const int head = split.head_begin + in_block;
        run_mainloop<C>(
            a, split, head, first, a.decode.num_slices, count, rings + warp * C::RING_BYTES, [&] {
                for (int h = 0; slice == 0 && h < C::HEADS; h++)
                    copy_row_ends(a, split, head + h, block.ends + (in_block + h) * C::ROWS);
                if (warp == 0) {
                    take_split<C>(a, starts, block.partition, block, *block.other(at),
                                  [&](int b) { return load_lengths(a, b); });
                    find_unmasked(a, *block.other(at));
                }
            });
        __syncthreads();
        if (a.decode.piece_units > 0)
            combine_pieces<C>(a, split, rings, block.ends);
        else
            combine_splits<C>(a, split, rings, block.ends);
        __syncthreads();  // shared memory is free again
    }
    if (block.any_empty) finish_empty(a, starts);
}

}  // namespace kv8

#define KV8_DECODE_DEFINE(name, k, v, head_dim, warps, stages, whole, heads, fixed_bytes) \
    KV8_DECODE_DEFINE_ROWS(name, k, v, head_dim, 8, warps, stages, whole, heads, fixed_bytes)
#define KV8_DECODE_DEFINE_ROWS(name, k, v, head_dim, rows, warps, stages, whole, heads,      \
                               fixed_bytes)                                                  \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                              \
        name(const __grid_constant__ kv8_kernel_args a) {                                    \
        using config =                                                                       \
            kv8::DecodeConfig<k, v, head_dim, rows / 8, warps, stages, whole, false, heads>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                   \
        kv8::decode_body<config>(a);                                                         \
    }
