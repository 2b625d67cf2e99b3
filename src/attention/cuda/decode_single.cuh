// decode_single.cuh - a launch for one request, whose time is that of its longest chain of
// instructions and not of its bytes: nothing is planned, and nothing is joined through memory.
//
// A cluster of blocks has one KV head; its keys are cut evenly among the blocks and their warps.
// Each block joins its warps' results and hands every other block of the cluster that one's part of
// the output, in shared memory; each then joins what it got and writes it.
//
// Grid: (blocks of a cluster: 8 or 16, num_kv_heads). Block: WARPS * 32.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode_close.cuh"

namespace kv8 {

__device__ inline uint32_t cluster_rank() {
    uint32_t r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ inline uint32_t cluster_size() {
    uint32_t r;
    asm("mov.u32 %0, %cluster_nctarank;" : "=r"(r));
    return r;
}
// All threads of all blocks. Between both: what was written before the one is seen after the other.
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores to another block's shared memory, at the address that the same variable has here.
__device__ inline void store_cluster(uint32_t at, uint32_t rank, const float4 &x) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }" ::"r"(at),
        "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
        : "memory");
}

// What a block got: by the block it is from, then by item, a float4 of a head's fragments.
template <class C>
struct Single {
    static constexpr int MOST_RANKS = 16, LEAST_RANKS = 8;
    float4 o[MOST_RANKS][C::FRAGMENTS * 32 / LEAST_RANKS];
    float4 sums[MOST_RANKS][C::FRAGMENTS * 32 / LEAST_RANKS];  // maxima and sums of two rows
};

// The block's place in its cluster, and how many items are its own: powers of two, by their bits.
template <class C>
struct Place {
    static constexpr int HEAD_BITS = C::DIM == 64 ? 7 : 8;
    static_assert(C::FRAGMENTS * 32 == 1 << HEAD_BITS);
    int rank, rank_bits, item_bits;

    __device__ Place() {
        rank = cluster_rank();
        rank_bits = cluster_size() == 16 ? 4 : 3;
        item_bits = HEAD_BITS - rank_bits;
    }
};

// Rows row_begin and on of the request, keys of this block.
template <class C>
__device__ Piece make_piece(const kv8_decode_args &a, const Request &r, const int32_t *pages,
                            int row_begin, const Place<C> &place) {
    Piece p;
    p.request = r, p.pages = pages;
    p.row_begin = row_begin;
    p.num_rows = min(int(KV8_DECODE_ROWS), r.qo_len * a.group_size - row_begin);
    const KeyRange top = visible_keys(a, r, divide(row_begin, a.by_group));
    const KeyRange low = visible_keys(a, r, divide(row_begin + p.num_rows - 1, a.by_group));
    p.any = {min(top.begin, low.begin), low.end};
    p.all = {low.begin, top.end};
    p.head_begin = blockIdx.y;
    const int granules = granules_of(p.any), begin = p.any.begin / TOKENS;
    const int each = (granules + (1 << place.rank_bits) - 1) >> place.rank_bits;
    p.granule_begin = begin + min(place.rank * each, granules);
    p.granule_end = begin + min((place.rank + 1) * each, granules);
    return p;
}

// This block's result to all blocks of the cluster, to each its part.
template <class C>
__device__ void hand_out(const uint8_t *rings, int busy_warps, const Single<C> &single,
                         const Place<C> &place) {
    const int lane = threadIdx.x % 32, f = threadIdx.x / 32;
    static_assert(C::FRAGMENTS <= C::WARPS);
    if (f >= C::FRAGMENTS) return;
    const Part part = join_slices<C>(rings, C::RING_BYTES, rings + busy_warps * C::RING_BYTES,
                                     f % C::NT * 8 + lane % 4 * 2, f);
    const int index = f * 32 + lane, item = index & ((1 << place.item_bits) - 1);
    store_cluster(smem_address(&single.o[place.rank][item]), index >> place.item_bits, part.o);
    store_cluster(smem_address(&single.sums[place.rank][item]), index >> place.item_bits,
                  make_float4(part.max.x, part.max.y, part.sum.x, part.sum.y));
}

__device__ inline void join_part(Part &into, const Part &from) {
    const float2 top = {fmaxf(into.max.x, from.max.x), fmaxf(into.max.y, from.max.y)};
    const float2 keep = {exp2_fast(into.max.x - top.x), exp2_fast(into.max.y - top.y)};
    const float2 add = {exp2_fast(from.max.x - top.x), exp2_fast(from.max.y - top.y)};
    into.max = top;
    into.sum = {into.sum.x * keep.x + from.sum.x * add.x, into.sum.y * keep.y + from.sum.y * add.y};
    const float4 before = into.o;
    into.o = {0, 0, 0, 0};
    add_weighted(into.o, before, keep);
    add_weighted(into.o, from.o, add);
}

// Joins what this block got: each lane some blocks', in the order of keys, then lanes in pairs. By
// one warp; lane % items has the item.
template <class C>
__device__ Part join_ranks(const Single<C> &single, const Place<C> &place) {
    const int lane = threadIdx.x % 32, item = lane & ((1 << place.item_bits) - 1);
    const int bits = place.rank_bits + place.item_bits - 5;  // blocks of a lane
    const int first = lane >> place.item_bits << bits;
    Part all = no_part();
#pragma unroll 4
    for (int rank = first; rank < first + (1 << bits); rank++) {
        const float4 sums = single.sums[rank][item];
        join_part(all, {single.o[rank][item], {sums.x, sums.y}, {sums.z, sums.w}});
    }
#pragma unroll 1
    for (int lanes = 1 << place.item_bits; lanes < 32; lanes *= 2) {
        const auto other = [&](float x) { return __shfl_xor_sync(~0u, x, lanes); };
        const Part from = {{other(all.o.x), other(all.o.y), other(all.o.z), other(all.o.w)},
                           {other(all.max.x), other(all.max.y)},
                           {other(all.sum.x), other(all.sum.y)}};
        join_part(all, from);
    }
    return all;
}

template <class C>
__device__ __forceinline__ void single_body(const kv8_decode_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ Single<C> single;
    asm volatile("griddepcontrol.launch_dependents;");
    cluster_arrive();  // once all have come, all run, and their shared memory may be written
    const Place<C> place;
    const int warp = threadIdx.x / 32, mine = threadIdx.x & ((1 << place.item_bits) - 1);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const Request r = load_request(a, 0);
    const int32_t *const pages = request_pages(a, 0);
#pragma unroll 1
    for (int row = 0; row < r.qo_len * a.group_size; row += C::ROWS) {
        const Piece piece = make_piece(a, r, pages, row, place);
        const Item<C> item((place.rank << place.item_bits) + mine);
        const int granules = piece.granule_end - piece.granule_begin;
        const int busy_warps = min(max(granules, 1), C::WARPS);
        RowEnd ends[2];
        if (warp < busy_warps)
            walk_piece<C>(a, piece, piece.head_begin, piece.granule_begin + warp, C::WARPS,
                          max(granules - warp + C::WARPS - 1, 0) / C::WARPS,
                          rings + warp * C::RING_BYTES, [&] {
#pragma unroll
                              for (int n = 0; n < 2; n++)
                                  ends[n] =
                                      load_row_end(a, piece, min(item.row + n, piece.num_rows - 1));
                          });
        __syncthreads();
        cluster_wait();
        hand_out<C>(rings, busy_warps, single, place);
        cluster_arrive();
        cluster_wait();
        if (threadIdx.x < 32) {
            const Part part = join_ranks<C>(single, place);
            if (threadIdx.x >> place.item_bits == 0) finish_item(a, piece, item, ends, part);
        }
        cluster_arrive();  // all is read, and the next rows may come
    }
    cluster_wait();
}

}  // namespace kv8

#define KV8_DECODE_SINGLE_DEFINE(name, format, head_dim, warps, stages, fixed_bytes)      \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                           \
        name(const __grid_constant__ kv8_decode_args a) {                                 \
        using config = kv8::DecodeConfig<format, head_dim, 1, warps, stages, true, true>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                \
        kv8::single_body<config>(a);                                                      \
    }
