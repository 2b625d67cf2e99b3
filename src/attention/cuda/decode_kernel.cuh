// decode_kernel.cuh - the launch around the walkers.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode_close.cuh"
#include "decode_line.cuh"

namespace kv8 {

// Requests with rows but no visible key: o = 0, lse = -inf.
__device__ inline void finish_empty(const kv8_decode_args &a, const int *starts) {
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
    Piece pieces[2];  // the one at work and the next
    RowEnd ends[C::WARPS * C::HEADS * C::ROWS];
    Line line;
    bool any_empty;

    __device__ Piece *other(const Piece *piece) { return pieces + (piece == pieces); }
};

// The next piece of the block into `into`, by one warp.
template <class C, class BLOCK, class LENGTHS>
__device__ void take_piece(const kv8_decode_args &a, const int *starts, Line line, BLOCK &block,
                           Piece &into, LENGTHS &&lengths_of) {
    next_piece<C>(a, starts, line, into, lengths_of);
    __syncwarp();  // all lanes have read what changes now
    if (threadIdx.x % 32 == 0) block.line.unit = line.unit;
    __syncwarp();
}

// The line and the block's first piece, by one warp. own_lengths(b, n): of request b, the lane's
// n-th; lengths_of(b): of request b, by all lanes.
template <class C, class BLOCK, class OWN, class LENGTHS>
__device__ void lay(const kv8_decode_args &a, int *starts, BLOCK &block, Piece &into,
                    OWN &&own_lengths, LENGTHS &&lengths_of) {
    const Totals sum = lay_line<C>(a, starts, own_lengths);
    const Line line = cut_line(a, sum);
    if (threadIdx.x % 32 == 0) block.any_empty = sum.any_empty, block.line = line;
    take_piece<C>(a, starts, line, block, into, lengths_of);
}
// From what lies in memory, and from what is held of it.
template <class C, class BLOCK>
__device__ void lay_loaded(const kv8_decode_args &a, int *starts, BLOCK &block, Piece &into) {
    lay<C>(
        a, starts, block, into, [&](int b, int) { return load_lengths(a, b); },
        [&](int b) { return load_lengths(a, b); });
}
template <class C, class BLOCK>
__device__ void lay_held(const kv8_decode_args &a, int *starts, BLOCK &block, Piece &into,
                         const Held<C::MOST_HELD> &held) {
    lay<C>(
        a, starts, block, into, [&](int, int n) { return held.nth(n); },
        [&](int b) { return held_lengths(a, held, b); });
}

__device__ inline void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The line and the block's first piece, by its first warp. Laid before the kernel ahead in the
// stream has ended, from the lengths that lie there; and once more if they are others after it.
template <class C>
__device__ void lay_first(const kv8_decode_args &a, int *starts, Block<C> &block) {
    if (!holds_all<C>(a)) {
        wait_for_previous();
        lay_loaded<C>(a, starts, block, block.pieces[0]);
        return;
    }
    bool waited = false;
    for (;;) {
        Held<C::MOST_HELD> held;
        load_held(a, held);
        lay_held<C>(a, starts, block, block.pieces[0], held);
        if (waited) return;
        prefetch_pages(a, block.pieces[0]);
        wait_for_previous(), waited = true;
        if (holds_still(a, held)) return;
    }
}

template <class C>
__device__ __forceinline__ void decode_body(const kv8_decode_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ Block<C> block;
    // The next kernel in the stream may be made ready. Whether it is a decode kernel or another:
    // it waits for all of this one before it believes more than hints.
    asm volatile("griddepcontrol.launch_dependents;");
    int *const starts = reinterpret_cast<int *>(rings + C::FIXED_BYTES);
    const int warp = threadIdx.x / 32;
    if (warp == 0)
        lay_first<C>(a, starts, block);
    else
        wait_for_previous();
    __syncthreads();
    // A granule is walked by as many warps as its heads take: a slice of the block.
    const int slice = divide(warp, a.by_heads);
    const int in_block = warp * C::HEADS - slice * a.heads_per_block;  // the warp's first head
#pragma unroll 1
    for (Piece *at = block.pieces; at->stream >= 0; at = block.other(at)) {
        const Piece &piece = *at;
        const int first = piece.granule_begin + slice, left = piece.granule_end - first;
        const int count = left > 0 ? divide(left + a.num_slices - 1, a.by_slices) : 0;
        const int head = piece.head_begin + in_block;
        walk_piece<C>(
            a, piece, head, first, a.num_slices, count, rings + warp * C::RING_BYTES, [&] {
                for (int h = 0; slice == 0 && h < C::HEADS; h++)
                    copy_row_ends(a, piece, head + h, block.ends + (in_block + h) * C::ROWS);
                if (warp == 0)
                    take_piece<C>(a, starts, block.line, block, *block.other(at),
                                  [&](int b) { return load_lengths(a, b); });
            });
        __syncthreads();
        close_piece<C>(a, piece, rings, block.ends);
        __syncthreads();  // shared memory is free again
    }
    if (block.any_empty) finish_empty(a, starts);
}

}  // namespace kv8

#define KV8_DECODE_DEFINE(name, format, head_dim, warps, stages, whole, heads, fixed_bytes)        \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                    \
        name(const __grid_constant__ kv8_decode_args a) {                                          \
        using config = kv8::DecodeConfig<format, head_dim, 1, warps, stages, whole, false, heads>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                         \
        kv8::decode_body<config>(a);                                                               \
    }
