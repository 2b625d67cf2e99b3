// decode_pages.cuh - decode where the tokens of a page lie one after another, each with all its KV
// heads: whole granules are copied at once, by one warp for all others.
//
// A block walks all KV heads. Its last warp, the producer, lays the line, takes the block's pieces
// and copies granule after granule into a ring that all warps share: 16 tokens of K and of V, a
// bulk copy each, whose bytes a barrier in shared memory counts. The other warps compute: one KV
// head each, every SLICES-th granule. The producer runs on into the next piece while one is closed.
//
// Shared memory holds rows as pages do, unswizzled: a warp's loads meet in twos (K) and fours (V)
// at a bank, which fills less than two thirds of the time that a granule takes to come.
//
// Grid: any number of blocks, as many as fit the machine. Block: (WARPS + 1) * 32.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode_ahead.cuh"
#include "decode_kernel.cuh"
#include "hopper.cuh"

namespace kv8 {

template <Format F_, int DIM_, int KV_HEADS_, int WARPS_, int STAGES_>
struct PagesConfig : DecodeConfig<F_, DIM_, 1, WARPS_, STAGES_, true> {
    using Base = DecodeConfig<F_, DIM_, 1, WARPS_, STAGES_, true>;
    static constexpr int KV_HEADS = KV_HEADS_, SLICES = WARPS_ / KV_HEADS_, PIECES = 4;
    static_assert(STAGES_ % SLICES == 0, "a warp meets every turn of a stage or none");
    static_assert(F_ != INT8, "scales of rows would need copies of their own");
    static constexpr int MOST_HELD = 4;  // the producer has the registers
    using R = PlainRow<KV_HEADS_ * Base::HEAD_BYTES>;
    using K = KeyTile<F_, DIM_, R>;
    using V = ValueTile<F_, DIM_, R>;
    static constexpr int STAGE_BYTES = 2 * R::TILE_BYTES;
    // The ring of all warps, then the result of each.
    static constexpr int ALL_STAGES = STAGES_ * STAGE_BYTES;
    static constexpr int RING_BYTES = Base::RESULT_BYTES + 127 & ~127;
    static constexpr int FIXED_BYTES = ALL_STAGES + WARPS_ * RING_BYTES;
};

template <class C>
struct PagesBlock {
    Piece guess;              // the first piece, as long as it is not sure
    Piece pieces[C::PIECES];  // a ring too
    RowEnd ends[2][C::KV_HEADS * C::ROWS];
    Line line;
    bool any_empty;
    uint32_t fed[C::PIECES];  // granules of all pieces before
    // A granule is here, may be overwritten; a piece is known, is done.
    uint64_t full[C::STAGES], empty[C::STAGES], known[C::PIECES], done[C::PIECES];
};

// The granules of a piece that some row may see.
struct Granules {
    int begin, count;

    __device__ explicit Granules(const Piece &p) {
        begin = max(p.granule_begin, p.any.begin / TOKENS);
        count = max(min(p.granule_end, (p.any.end + TOKENS - 1) / TOKENS) - begin, 0);
    }
};

// The n-th use of a ring: its place, and the parity of its barriers.
template <int SIZE>
struct Turn {
    uint32_t index, parity;

    __device__ explicit Turn(uint32_t n) : index(n % SIZE), parity(n / SIZE & 1) {}
    __device__ void advance(uint32_t by) {
        index += by;
        if (index >= SIZE) index -= SIZE, parity ^= 1;
    }
};

// The producer's copies of one piece.
template <class C>
class PageFeed {
   public:
    __device__ PageFeed(const kv8_decode_args &args, const Piece &piece_in)
        : a(args), piece(piece_in), granules(piece_in) {}

    // All of them, each when its stage is free. Returns how many.
    __device__ int run(uint32_t ring, uint32_t full, uint32_t empty, Turn<C::STAGES> to) const {
        const uint64_t policy = leave_first_policy();
        Place now, next = look_up(0);
#pragma unroll 1
        for (int i = 0; i < granules.count; i++) {
            if (i % 32 == 0) now = next, next = look_up(i + 32);
            const int page = __shfl_sync(~0u, now.page, i % 32);
            const int slot = __shfl_sync(~0u, now.slot, i % 32);
            barrier_wait(empty + to.index * 8, to.parity ^ 1);
            if (threadIdx.x % 32 == 0)
                copy(page, slot, ring + to.index * C::STAGE_BYTES, full + to.index * 8, policy);
            to.advance(1);
        }
        return granules.count;
    }

   private:
    struct Place {
        int page, slot;  // page -1: nobody sees it
    };
    const kv8_decode_args &a;
    const Piece &piece;
    const Granules granules;

    // Where 32 granules lie, one per lane. A page that no row of the tile may see is never read.
    __device__ Place look_up(int first) const {
        const int i = first + threadIdx.x % 32, token = (granules.begin + i) * TOKENS;
        if (i >= granules.count) return {-1, 0};
        if (a.mask_bits != nullptr && !mask_shows(a, piece, token, TOKENS)) return {-1, 0};
        const int index = divide(token, a.by_page);
        return {__ldg(piece.pages + index), token - index * a.page_size};
    }
    __device__ void copy(int page, int slot, uint32_t stage, uint32_t barrier,
                         uint64_t policy) const {
        if (page < 0) {  // whatever lies in the stage is masked
            barrier_arrive(barrier);
            return;
        }
        const auto from = [&](const kv8_decode_pages &p) {
            return p.data + uint64_t(uint32_t(page)) * uint32_t(p.stride_page) +
                   uint32_t(slot) * C::R::BYTES;
        };
        expect_bytes(barrier, C::STAGE_BYTES);
        copy_bulk(stage, from(a.k), C::R::TILE_BYTES, barrier, policy);
        copy_bulk(stage + C::R::TILE_BYTES, from(a.v), C::R::TILE_BYTES, barrier, policy);
    }
};

// The block's first piece, by the producer: guessed before the kernel ahead in the stream has
// ended, from the lengths that lie there, so that the others can ask for what it leads to.
template <class C>
__device__ void guess_first(const kv8_decode_args &a, int *starts, PagesBlock<C> &block,
                            Held<C::MOST_HELD> &held) {
    if (holds_all<C>(a)) {
        load_held(a, held);
        lay_held<C>(a, starts, block, block.guess, held);
    } else if (threadIdx.x % 32 == 0) {
        block.guess.stream = -1;
    }
}
// After that kernel: it stays, if the lengths have.
template <class C>
__device__ void lay_first(const kv8_decode_args &a, int *starts, PagesBlock<C> &block,
                          const Held<C::MOST_HELD> &held) {
    wait_for_previous();
    if (!holds_all<C>(a) || !holds_still(a, held)) {
        lay_loaded<C>(a, starts, block, block.pieces[0]);
        return;
    }
    if (threadIdx.x % 32 == 0) block.pieces[0] = block.guess;
    __syncwarp();
}

// The producer.
template <class C>
__device__ __forceinline__ void feed_pieces(const kv8_decode_args &a, int *starts,
                                            PagesBlock<C> &block, uint32_t ring,
                                            const Held<C::MOST_HELD> &held) {
    const uint32_t full = smem_address(block.full), empty = smem_address(block.empty);
    lay_first<C>(a, starts, block, held);
    uint32_t fed = 0;
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const Turn<C::PIECES> at(n);
        Piece &piece = block.pieces[at.index];
        if (n > 0) {
            barrier_wait(smem_address(block.done + at.index), at.parity ^ 1);
            take_piece<C>(a, starts, block.line, block, piece,
                          [&](int b) { return load_lengths(a, b); });
        }
        if (threadIdx.x % 32 == 0) {
            block.fed[at.index] = fed;
            barrier_arrive(smem_address(block.known + at.index));
        }
        if (piece.stream < 0) return;
        fed += PageFeed<C>(a, piece).run(ring, full, empty, Turn<C::STAGES>(fed));
    }
}

// A computing warp.
template <class C>
__device__ __forceinline__ void walk_pieces(const kv8_decode_args &a, PagesBlock<C> &block,
                                            uint32_t ring, uint8_t *results) {
    const int warp = threadIdx.x / 32, slice = warp / C::KV_HEADS, head = warp % C::KV_HEADS;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const uint32_t full = smem_address(block.full), empty = smem_address(block.empty);
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const Turn<C::PIECES> at(n);
        barrier_wait(smem_address(block.known + at.index), at.parity);
        const Piece &piece = block.pieces[at.index];
        if (piece.stream < 0) return;
        RowEnd *const ends = block.ends[n % 2];
        Walker<C> walker(a, piece, head);
        walker.ask();
        if (slice == 0) copy_row_ends(a, piece, head, ends + head * C::ROWS);
        const Granules granules(piece);
        walker.ready();
        State<C> state[1];
        state[0].clear();
        Turn<C::STAGES> from(block.fed[at.index] + slice);
        int key = (granules.begin + slice) * TOKENS;
        const int end = (granules.begin + granules.count) * TOKENS;
#pragma unroll 1
        for (; key < end; key += C::SLICES * TOKENS) {
            barrier_wait(full + from.index * 8, from.parity);
            walker.compute(key, ring + from.index * C::STAGE_BYTES + head * C::HEAD_BYTES, state);
            __syncwarp();
            if (is_first_lane) barrier_arrive(empty + from.index * 8);
            from.advance(C::SLICES);
        }
        copy_wait_all();
        named_barrier_sync(1, C::WARPS * 32);  // the results of the piece before are joined
        leave_result<C>(results + warp * C::RING_BYTES, state[0]);
        named_barrier_sync(1, C::WARPS * 32);
        close_piece<C>(a, piece, results, ends);
        __syncwarp();
        if (is_first_lane) barrier_arrive(smem_address(block.done + at.index));
    }
}

template <class C>
__device__ __forceinline__ void pages_body(const kv8_decode_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ PagesBlock<C> block;
    asm volatile("griddepcontrol.launch_dependents;");
    int *const starts = reinterpret_cast<int *>(rings + C::FIXED_BYTES);
    const uint32_t ring = smem_address(rings);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::STAGES; i++) {
            barrier_init(smem_address(block.full + i), 1);
            barrier_init(smem_address(block.empty + i), C::KV_HEADS);
        }
        for (int i = 0; i < C::PIECES; i++) {
            barrier_init(smem_address(block.known + i), 1);
            barrier_init(smem_address(block.done + i), C::WARPS);
        }
        barrier_init_fence();
    }
    const bool feeds = threadIdx.x / 32 == C::WARPS;
    Held<C::MOST_HELD> held;
    if (feeds) guess_first<C>(a, starts, block, held);
    __syncthreads();
    if (feeds) {
        feed_pieces<C>(a, starts, block, ring, held);
    } else {
        ask_ahead<C>(a, block.guess);
        wait_for_previous();
        walk_pieces<C>(a, block, ring, rings + C::ALL_STAGES);
    }
    if (block.any_empty) finish_empty(a, starts);
}

}  // namespace kv8

#define KV8_DECODE_PAGES_DEFINE(name, format, head_dim, kv_heads, warps, stages, fixed_bytes) \
    extern "C" __global__ void __launch_bounds__((warps + 1) * 32, 1)                         \
        name(const __grid_constant__ kv8_decode_args a) {                                     \
        using config = kv8::PagesConfig<format, head_dim, kv_heads, warps, stages>;           \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                    \
        kv8::pages_body<config>(a);                                                           \
    }
