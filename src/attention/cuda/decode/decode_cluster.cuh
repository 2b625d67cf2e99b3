// decode_cluster.cuh - a launch for one request, whose time is that of its longest chain of
// instructions and not of its bytes: nothing is planned, and nothing is joined through memory.
//
// A cluster of blocks has one KV head; its keys are cut evenly among the blocks and their warps.
// Each block joins its warps' results and hands every other block of the cluster that one's part of
// the output, in shared memory; each then joins what it got and writes it.
//
// Grid: (blocks of a cluster: 8 or 16, num_kv_heads, tiles of ROWS packed rows that run beside one
// another). Block: WARPS * 32.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_combine.cuh"

namespace kv8 {

// What a block got: by the block it is from, then by item, a float4 of a head's fragments.
template <class C>
struct ClusterExchange {
    static constexpr int MOST_RANKS = 16, LEAST_RANKS = 8;
    float4 o[MOST_RANKS][C::FRAGMENTS * 32 / LEAST_RANKS];
    float4 sums[MOST_RANKS][C::FRAGMENTS * 32 / LEAST_RANKS];  // maxima and sums of two rows
    RowEnd ends[C::ROWS];
    Lengths lengths;
    uint64_t barrier;
};

// The block's own in its cluster, and how many items are its own: powers of two, by their bits.
template <class C>
struct ClusterRank {
    static constexpr int HEAD_BITS = (C::DIM == 64 ? 7 : 8) + (C::NT == 2);
    static_assert(C::FRAGMENTS * 32 == 1 << HEAD_BITS);
    int rank, rank_bits, item_bits;

    __device__ ClusterRank() {
        rank = cluster_rank();
        rank_bits = cluster_size() == 16 ? 4 : 3;
        item_bits = HEAD_BITS - rank_bits;
    }
};

// A launch's argument comes to a multiprocessor line by line, each when it is first read. Asks for
// all lines at once, by a warp that would wait.
__device__ inline void touch_args(const kv8_kernel_args &a) {
    constexpr int LINE = 64, LINES = (sizeof a + LINE - 1) / LINE;
    const int lane = threadIdx.x % 32;
    uint32_t x = 0;
    if (lane < LINES) x = reinterpret_cast<const uint32_t *>(&a)[lane * (LINE / 4)];
    // Some use of it, or it would not be read.
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9e3779b9; @p nanosleep.u32 0; }" ::"r"(x));
}

// Rows row_begin and on of the request, keys of this block.
template <class C>
__device__ Split make_split(const kv8_kernel_args &a, const Request &r, const int32_t *pages,
                            int row_begin, const ClusterRank<C> &own) {
    Split p;
    p.request = r, p.pages = pages, p.stream = blockIdx.y;
    p.row_begin = row_begin;
    p.num_rows = min(C::ROWS, r.qo_len * a.group_size - row_begin);
    const KeyRange top = visible_keys(a, r, divide(row_begin, a.by_group));
    const KeyRange low = visible_keys(a, r, divide(row_begin + p.num_rows - 1, a.by_group));
    p.has_gaps = false;
    p.any = {min(top.begin, low.begin), low.end};
    p.all = {low.begin, top.end};
    p.head_begin = blockIdx.y;
    const int granules = granules_of(p.any), begin = p.any.begin / TOKENS;
    const int each = (granules + (1 << own.rank_bits) - 1) >> own.rank_bits;
    p.granule_begin = begin + min(own.rank * each, granules);
    p.granule_end = begin + min((own.rank + 1) * each, granules);
    return p;
}

// This block's result to all blocks of the cluster, to each its part.
template <class C>
__device__ void hand_out(const uint8_t *rings, int busy_warps, const ClusterExchange<C> &exchange,
                         const ClusterRank<C> &own) {
    const int lane = threadIdx.x % 32, f = threadIdx.x / 32;
    static_assert(C::FRAGMENTS <= C::WARPS && C::WARPS % 8 == 0);
    if (f >= C::FRAGMENTS) return;
    const auto pair = [&](int warp, int at) {
        return *reinterpret_cast<const float2 *>(rings + warp * C::RING_BYTES + C::FRAGMENTS * 512 +
                                                 (f % C::NT * 8 + at) * 4 + lane % 4 * 8);
    };
    Partial part = no_partial();
    combine_many<C::WARPS / 8>(
        part, busy_warps,
        [&](int warp) {
            const float2 max = pair(warp, 0), sum = pair(warp, C::ROWS);
            return make_float4(max.x, max.y, sum.x, sum.y);
        },
        [&](int warp) {
            return *reinterpret_cast<const float4 *>(rings + warp * C::RING_BYTES +
                                                     (f * 32 + lane) * 16);
        });
    const int index = f * 32 + lane, item = index & ((1 << own.item_bits) - 1);
    const uint32_t to = index >> own.item_bits;
    const uint32_t barrier = cluster_address(smem_address(&exchange.barrier), to);
    store_cluster(cluster_address(smem_address(&exchange.o[own.rank][item]), to), barrier, part.o);
    store_cluster(cluster_address(smem_address(&exchange.sums[own.rank][item]), to), barrier,
                  make_float4(part.max.x, part.max.y, part.sum.x, part.sum.y));
}

// Joins what this block got: each lane some blocks', then lanes in pairs. By one warp; lane % items
// has the item.
template <class C>
__device__ Partial combine_ranks(const ClusterExchange<C> &exchange, const ClusterRank<C> &own) {
    constexpr int EACH = 1 << (ClusterRank<C>::HEAD_BITS - 5);  // blocks of a lane
    const int lane = threadIdx.x % 32, item = lane & ((1 << own.item_bits) - 1);
    const int first = (lane >> own.item_bits) * EACH;
    float4 sums[EACH];
    Partial all = no_partial();
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        sums[n] = exchange.sums[first + n][item];
        all.max = {fmaxf(all.max.x, sums[n].x), fmaxf(all.max.y, sums[n].y)};
    }
#pragma unroll 1
    for (int lanes = 1 << own.item_bits; lanes < 32; lanes *= 2) {
        all.max.x = fmaxf(all.max.x, __shfl_xor_sync(~0u, all.max.x, lanes));
        all.max.y = fmaxf(all.max.y, __shfl_xor_sync(~0u, all.max.y, lanes));
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        const float2 w = {exp2_fast(sums[n].x - all.max.x), exp2_fast(sums[n].y - all.max.y)};
        all.sum.x += sums[n].z * w.x, all.sum.y += sums[n].w * w.y;
        add_weighted(all.o, exchange.o[first + n][item], w);
    }
#pragma unroll 1
    for (int lanes = 1 << own.item_bits; lanes < 32; lanes *= 2) {
        const auto add = [&](float &x) { x += __shfl_xor_sync(~0u, x, lanes); };
        add(all.sum.x), add(all.sum.y);
        add(all.o.x), add(all.o.y), add(all.o.z), add(all.o.w);
    }
    return all;
}

template <class C>
__device__ __forceinline__ void cluster_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ ClusterExchange<C> exchange;
    launch_dependents();
    const ClusterRank<C> own;
    const int warp = threadIdx.x / 32, mine = threadIdx.x & ((1 << own.item_bits) - 1);
    const uint32_t barrier = smem_address(&exchange.barrier);
    const uint32_t bytes = 2 * sizeof(float4) << (own.rank_bits + own.item_bits);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_first();  // once all have come, their shared memory may be written
    uint8_t *const own_ring = rings + warp * C::RING_BYTES;
    const uint32_t ring = keep(smem_address(own_ring));
    const Item<C> item((own.rank << own.item_bits) + mine);
    // All that reads nothing the kernel ahead writes is done before that one has ended, by the
    // lengths that lie there, the same for all warps; and once more if it changed them.
    Lengths lengths = load_lengths_once(a, 0, exchange.lengths);
    bool waited = false;
    uint32_t parity = 0;
    int row = blockIdx.z * C::ROWS;
#pragma unroll 1
    for (;;) {
        const Request r = make_request(a, 0, lengths);
        Split split = make_split(a, r, request_pages(a, 0, lengths), row, own);
        const int granules = split.granule_end - split.granule_begin;
        const int busy_warps = min(max(granules, 1), C::WARPS);
        const int first = split.granule_begin + warp;
        const int count = max(granules - warp + C::WARPS - 1, 0) / C::WARPS;
        WarpAttention<C> attention(a, split, split.head_begin);
        Loader<C> loader(a, split, ring, split.head_begin, first, C::WARPS, count);
        attention.find_queries(), loader.find_first();
        if (!waited) {
            if (warp == 0) prefetch_pages(a, split);
            if (C::ROWS == 8 && warp == 1) touch_args(a);  // more rows would spill more for it
            wait_for_previous();
        }
        loader.load_first();
        if (!waited) {
            waited = true;
            if (lengths_changed(a, 0, lengths)) {
                lengths = load_lengths_once(a, 0, exchange.lengths);
                continue;
            }
        }
        const int num_rows = r.qo_len * a.group_size;
        if (row >= num_rows) break;
        if (warp < busy_warps) {
            attention.load_queries(), loader.load_others();
            run_granules<C>(attention, loader, first, C::WARPS, count, ring, own_ring, [&] {
                if (warp == 0) copy_row_ends(a, split, split.head_begin, exchange.ends);
            });
        }
        cluster_wait();
        __syncthreads();
        if (threadIdx.x == 0) expect_bytes(barrier, bytes);
        hand_out<C>(rings, busy_warps, exchange, own);
        if (threadIdx.x < 32) {
            wait_for_bytes(barrier, parity);
            const Partial part = combine_ranks<C>(exchange, own);
            if (threadIdx.x >> own.item_bits == 0)
                finish_item(a, split, item, RowPair<C>(a, split, item.row),
                            exchange.ends + item.row, part);
        }
        row += int(gridDim.z) * C::ROWS;
        if (row >= num_rows) return;
        // All is read, and the next rows may come.
        parity ^= 1;
        __syncthreads();
        cluster_arrive();
    }
    cluster_wait();  // nothing was computed
}

}  // namespace kv8

// Two blocks of a multiprocessor where the registers allow: the next launch's come while these end.
#define KV8_DECODE_CLUSTER_DEFINE(name, format, head_dim, rows, warps, stages, fixed_bytes)     \
    extern "C" __global__ void __launch_bounds__(warps * 32,                                    \
                                                 head_dim * kv8::size_of(format) == 64 ? 2 : 1) \
        name(const __grid_constant__ kv8_kernel_args a) {                                       \
        using config =                                                                          \
            kv8::DecodeConfig<format, format, head_dim, rows / 8, warps, stages, true, true>;   \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                      \
        kv8::cluster_body<config>(a);                                                           \
    }
