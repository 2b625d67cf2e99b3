// decode_bulk.cuh - decode where the tokens of a page lie one after another, each with all its KV
// heads: whole granules are copied at once, by one warp for all others.
//
// A block computes all KV heads. Its last warp, the producer, partitions the work, takes the
// block's splits and copies granule after granule into a ring that all warps share: 16 tokens of K
// and of V, a bulk copy each, whose bytes a barrier in shared memory counts. The other warps
// compute: one KV head each, every SLICES-th granule. The producer runs on into the next split
// while one is combined.
//
// Shared memory holds rows as pages do, unswizzled: a warp's loads meet in twos (K) and fours (V)
// at a bank, which fills less than two thirds of the time that a granule takes to come.
//
// Grid: any number of blocks, as many as fit the machine. Block: (WARPS + 1) * 32.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_line.cuh"
#include "decode/decode_prefetch.cuh"

namespace kv8 {

// MANY: of more requests than the producer keeps the lengths of, and not in pieces.
template <Format F_, int DIM_, int NT_, int KV_HEADS_, int WARPS_, int STAGES_, bool MANY_>
struct BulkConfig : DecodeConfig<F_, F_, DIM_, NT_, WARPS_, STAGES_, true> {
    using Base = DecodeConfig<F_, F_, DIM_, NT_, WARPS_, STAGES_, true>;
    static constexpr int KV_HEADS = KV_HEADS_, SLICES = WARPS_ / KV_HEADS_, SPLITS = 4;
    static_assert(STAGES_ % SLICES == 0, "a warp meets every turn of a stage or none");
    static_assert(F_ != INT8, "scales of rows would need copies of their own");
    static constexpr bool HAS_PRODUCER = true, MANY = MANY_, HAS_PIECES = !MANY_;
    static constexpr int MOST_CACHED = 4;  // the producer has the registers
    using RK = PlainRow<KV_HEADS_ * Base::K::BYTES>;
    using RV = RK;
    using K = KeyTile<F_, DIM_, RK>;
    using V = ValueTile<F_, DIM_, RV>;
    static constexpr int STAGE_BYTES = 2 * RK::TILE_BYTES;
    // The ring of all warps, then the result of each.
    static constexpr int ALL_STAGES = STAGES_ * STAGE_BYTES;
    static constexpr int RING_BYTES = Base::RESULT_BYTES + 127 & ~127;
    static constexpr int FIXED_BYTES = ALL_STAGES + WARPS_ * RING_BYTES;
};

template <class C>
struct BulkBlock {
    Split guess;              // the first split, guessed, from lengths that may change
    Split splits[C::SPLITS];  // a ring too
    RowEnd ends[2][C::KV_HEADS * C::ROWS];
    Partition partition;
    Pieces pieces;
    Totals totals[C::WARPS + 1];  // of each warp's requests
    bool any_empty;
    uint32_t fed[C::SPLITS];  // granules of all splits before
    // A granule is here, may be overwritten; a split is known, is done.
    uint64_t full[C::STAGES], empty[C::STAGES], known[C::SPLITS], done[C::SPLITS];
};

// State of the n-th use of a ring: the stage, and the parity of its barriers.
template <int SIZE>
struct RingState {
    uint32_t index, parity;

    __device__ explicit RingState(uint32_t n) : index(n % SIZE), parity(n / SIZE & 1) {}
    __device__ void advance(uint32_t by) {
        index += by;
        if (index >= SIZE) index -= SIZE, parity ^= 1;
    }
};

// The producer's copies of one split.
template <class C>
class BulkLoader {
   public:
    __device__ BulkLoader(const kv8_kernel_args &args, Split &split_in)
        : a(args), split(split_in), count(split_in.granule_end - split_in.granule_begin) {}

    // All of them, each when its stage is free. Returns how many.
    __device__ int run(uint32_t ring, uint32_t full, uint32_t empty,
                       RingState<C::STAGES> to) const {
        const uint64_t policy = leave_first_policy();
        PageSlot now, next = look_up(0);
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            if (i % 32 == 0) {
                now = next, next = look_up(i + 32);
                if (__builtin_expect(a.num_pages != KV8_ANY_PAGES, 0)) find_gaps(now.page);
            }
            const int page = __shfl_sync(~0u, now.page, i % 32);
            const int slot = __shfl_sync(~0u, now.slot, i % 32);
            barrier_wait(empty + to.index * 8, to.parity ^ 1);
            if (threadIdx.x % 32 == 0)
                copy(page, slot, ring + to.index * C::STAGE_BYTES, full + to.index * 8, policy);
            to.advance(1);
        }
        return count;
    }

   private:
    struct PageSlot {
        int page, slot;  // page UNSEEN: nobody sees it
    };
    const kv8_kernel_args &a;
    Split &split;
    const int count;

    // Where 32 granules lie, one per lane. A page that no row of the tile may see is never read.
    __device__ PageSlot look_up(int first) const {
        const int i = first + threadIdx.x % 32, token = (split.granule_begin + i) * TOKENS;
        if (i >= count || token + TOKENS <= split.any.begin) return {UNSEEN, 0};
        if (may_hide(a, split, token, TOKENS) && !mask_shows(a, split, token, TOKENS))
            return {UNSEEN, 0};
        const int index = divide(token, a.by_page);
        return {__ldg(split.pages + index), token - index * a.page_size};
    }
    // Marks the split before the lane that copies says that a stage is full.
    __device__ void find_gaps(int page) const {
        const uint32_t lanes = __ballot_sync(~0u, page != UNSEEN && !page_exists(a, page));
        if (lanes != 0) mark_gaps(a, split, lanes);
    }
    __device__ void copy(int page, int slot, uint32_t stage, uint32_t barrier,
                         uint64_t policy) const {
        if (!page_exists(a, page)) {  // whatever lies in the stage is masked
            barrier_arrive(barrier);
            return;
        }
        const auto from = [&](const kv8_kernel_pages &p) {
            return p.data + uint64_t(uint32_t(page)) * uint32_t(p.stride_page) +
                   uint32_t(slot) * C::RK::BYTES;
        };
        expect_bytes(barrier, C::STAGE_BYTES);
        copy_bulk(stage, from(a.k), C::RK::TILE_BYTES, barrier, policy);
        copy_bulk(stage + C::RK::TILE_BYTES, from(a.v), C::RK::TILE_BYTES, barrier, policy);
    }
};

// The block's first split, by the producer: guessed before the kernel ahead in the stream has
// ended, from the lengths that lie there, so that the others can prefetch what it leads to.
template <class C>
__device__ void guess_first(const kv8_kernel_args &a, int *starts, BulkBlock<C> &block,
                            CachedLengths<C::MOST_CACHED> &cached) {
    if (is_laid_early<C>(a)) {
        load_cached(a, cached);
        partition_cached<C>(a, starts, block, block.guess, cached);
    } else if (threadIdx.x % 32 == 0) {
        block.guess.stream = -1;
    }
}
// After that kernel: it stays, if the lengths have.
template <class C>
__device__ void partition_first(const kv8_kernel_args &a, int *starts, BulkBlock<C> &block,
                                const CachedLengths<C::MOST_CACHED> &cached) {
    wait_for_previous();
    if (!is_laid_early<C>(a) || !unchanged(a, cached)) {
        partition_loaded<C>(a, starts, block, block.splits[0]);
        return;
    }
    if (threadIdx.x % 32 == 0) block.splits[0] = block.guess;
    __syncwarp();
}

// Both of many requests: the line is all threads' work, the split the producer's.
template <class C>
__device__ __forceinline__ Lengths guess_by_block(const kv8_kernel_args &a, int *starts,
                                                  BulkBlock<C> &block, bool is_producer) {
    Lengths own = {0, 0, 0, 0, 0};
    if (is_block_early(a)) {
        own = own_lengths(a);
        count_by_block<C>(a, starts, block.totals, own);
        if (is_producer) take_range<C>(a, starts, block, block.guess);
    } else if (threadIdx.x == 0) {
        block.guess.stream = -1;
    }
    __syncthreads();
    return own;
}
template <class C>
__device__ __forceinline__ void partition_by_block(const kv8_kernel_args &a, int *starts,
                                                   BulkBlock<C> &block, bool is_producer,
                                                   const Lengths &guessed) {
    const Lengths own = own_lengths(a);
    const bool stays = !__syncthreads_or(!is_block_early(a) || own != guessed);
    if (!stays) count_by_block<C>(a, starts, block.totals, own);
    if (is_producer && !stays) take_range<C>(a, starts, block, block.splits[0]);
    if (is_producer && stays && threadIdx.x % 32 == 0) block.splits[0] = block.guess;
    __syncwarp();
}

// The producer, behind the first split.
template <class C>
__device__ __forceinline__ void load_splits(const kv8_kernel_args &a, int *starts,
                                            BulkBlock<C> &block, uint32_t ring) {
    const uint32_t full = smem_address(block.full), empty = smem_address(block.empty);
    uint32_t fed = 0;
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const RingState<C::SPLITS> at(n);
        Split &split = block.splits[at.index];
        if (n > 0) {
            barrier_wait(smem_address(block.done + at.index), at.parity ^ 1);
            take_split<C>(a, starts, block.partition, block, split,
                          [&](int b) { return load_lengths(a, b); });
        }
        find_unmasked(a, split);
        if (threadIdx.x % 32 == 0) {
            block.fed[at.index] = fed;
            barrier_arrive(smem_address(block.known + at.index));
        }
        if (split.stream < 0) return;
        fed += BulkLoader<C>(a, split).run(ring, full, empty, RingState<C::STAGES>(fed));
    }
}

// A computing warp.
template <class C>
__device__ __forceinline__ void compute_splits(const kv8_kernel_args &a, BulkBlock<C> &block,
                                               uint32_t ring, uint8_t *results) {
    const int warp = threadIdx.x / 32, slice = warp / C::KV_HEADS, head = warp % C::KV_HEADS;
    const bool is_first_lane = threadIdx.x % 32 == 0;
    const uint32_t full = smem_address(block.full), empty = smem_address(block.empty);
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const RingState<C::SPLITS> at(n);
        barrier_wait(smem_address(block.known + at.index), at.parity);
        const Split &split = block.splits[at.index];
        if (split.stream < 0) return;
        RowEnd *const ends = block.ends[n % 2];
        WarpAttention<C> attention(a, split, head);
        attention.load_queries();
        if (slice == 0) copy_row_ends(a, split, head, ends + head * C::ROWS);
        attention.convert_queries();
        State<C> state[1];
        state[0].clear();
        RingState<C::STAGES> from(block.fed[at.index] + slice);
        int key = (split.granule_begin + slice) * TOKENS;
        const int end = split.granule_end * TOKENS;
#pragma unroll 1
        for (; key < end; key += C::SLICES * TOKENS) {
            barrier_wait(full + from.index * 8, from.parity);
            attention.compute(key, ring + from.index * C::STAGE_BYTES + head * C::K::BYTES, state);
            __syncwarp();
            if (is_first_lane) barrier_arrive(empty + from.index * 8);
            from.advance(C::SLICES);
        }
        copy_wait_all();
        named_barrier_sync(1, C::WARPS * 32);  // the results of the split before are joined
        store_result<C>(results + warp * C::RING_BYTES, state[0]);
        named_barrier_sync(1, C::WARPS * 32);
        if (C::HAS_PIECES && a.decode.piece_units > 0)
            combine_pieces<C>(a, split, results, ends);
        else
            combine_splits<C>(a, split, results, ends);
        __syncwarp();
        if (is_first_lane) barrier_arrive(smem_address(block.done + at.index));
    }
}

template <class C>
__device__ __forceinline__ void bulk_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ BulkBlock<C> block;
    launch_dependents();
    int *const starts = reinterpret_cast<int *>(rings + C::FIXED_BYTES);
    const uint32_t ring = smem_address(rings);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::STAGES; i++) {
            barrier_init(smem_address(block.full + i), 1);
            barrier_init(smem_address(block.empty + i), C::KV_HEADS);
        }
        for (int i = 0; i < C::SPLITS; i++) {
            barrier_init(smem_address(block.known + i), 1);
            barrier_init(smem_address(block.done + i), C::WARPS);
        }
        barrier_init_fence();
    }
    const bool is_producer = threadIdx.x / 32 == C::WARPS;
    if constexpr (C::MANY) {
        const Lengths guessed = guess_by_block<C>(a, starts, block, is_producer);
        if (!is_producer) prefetch_split<C>(a, block.guess);
        wait_for_previous();
        partition_by_block<C>(a, starts, block, is_producer, guessed);
        if (is_producer)
            load_splits<C>(a, starts, block, ring);
        else
            compute_splits<C>(a, block, ring, rings + C::ALL_STAGES);
    } else {
        CachedLengths<C::MOST_CACHED> cached;
        if (is_producer) guess_first<C>(a, starts, block, cached);
        __syncthreads();
        if (is_producer) {
            partition_first<C>(a, starts, block, cached);
            load_splits<C>(a, starts, block, ring);
        } else {
            prefetch_split<C>(a, block.guess);
            wait_for_previous();
            compute_splits<C>(a, block, ring, rings + C::ALL_STAGES);
        }
    }
    if (block.any_empty) finish_empty(a, starts);
}

}  // namespace kv8

#define KV8_DECODE_BULK_DEFINE(name, format, head_dim, rows, kv_heads, warps, stages, many,        \
                               fixed_bytes)                                                        \
    extern "C" __global__ void __launch_bounds__((warps + 1) * 32, 1)                              \
        name(const __grid_constant__ kv8_kernel_args a) {                                          \
        using config = kv8::BulkConfig<format, head_dim, rows / 8, kv_heads, warps, stages, many>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                         \
        kv8::bulk_body<config>(a);                                                                 \
    }
