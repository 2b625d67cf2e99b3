// decode_prefetch.cuh - what a block prefetches into L2 before it may rely on where it lies.
//
// A launch overlaps the end of the kernel ahead in the stream. Lengths and page ids that lie in
// memory then are most likely those that will hold, so the first granules of K and V that they lead
// to are asked for, and the queries. Nothing here carries a value: the main loop reads lengths and
// page ids again once they hold, and a prefetch of what is not needed, or not there, does nothing
// else.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode.cuh"

namespace kv8 {

constexpr int LINE = 128;  // bytes, of L2
__device__ inline void prefetch_line(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// The page of a granule, read past caches. -1: the split has no such granule, or its place in the
// page table is none, since lengths are not what they will be.
__device__ inline int page_if_there(const kv8_kernel_args &a, const Split &p, int granule) {
    const int token = granule * TOKENS;
    if (granule >= p.granule_end || token + TOKENS <= p.any.begin || token >= p.any.end) return -1;
    const int64_t entry = p.pages - a.table + divide(token, a.by_page);
    if (uint64_t(entry) >= uint64_t(a.table_entries)) return -1;
    return load_fresh(a.table + entry);
}

// The rows of Q of a split's heads, by one warp.
template <int ROWS>
__device__ inline void prefetch_queries(const kv8_kernel_args &a, const Split &p, int num_heads) {
    const int row = p.row_begin + int(threadIdx.x % ROWS);
    const int token = divide(row, a.by_group);
    if (row - p.row_begin >= p.num_rows) return;
    for (int h = threadIdx.x % 32 / ROWS; h < num_heads; h += 32 / ROWS) {
        const int head = (p.head_begin + h) * a.group_size + row - token * a.group_size;
        const int64_t at = (p.request.qo_begin + token) * a.q_stride_row + head * a.q_stride_head;
        for (int d = 0; d < a.head_dim; d += LINE / 2)
            prefetch_line(static_cast<const uint16_t *>(a.q) + at + d);
    }
}

// The first granules of a split in whole pages, as many as the ring takes, its page table and its
// queries; by all computing warps in turn.
template <class C>
__device__ void prefetch_split(const kv8_kernel_args &a, const Split &p) {
    const int warp = threadIdx.x / 32, granule = p.granule_begin + warp;
    static_assert(C::STAGES < C::WARPS);
    if (p.stream < 0) return;
    if (warp == C::WARPS - 1) prefetch_pages(a, p), prefetch_queries<C::ROWS>(a, p, C::KV_HEADS);
    const int page = warp < C::STAGES ? page_if_there(a, p, granule) : -1;
    if (page < 0) return;
    const int token = granule * TOKENS, slot = token - divide(token, a.by_page) * a.page_size;
    const auto prefetch = [&](const kv8_kernel_pages &of) {
        const uint8_t *const from =
            of.data + uint32_t(page) * uint64_t(of.stride_page) + slot * C::RK::BYTES;
        for (int at = threadIdx.x % 32 * LINE; at < C::RK::TILE_BYTES; at += 32 * LINE)
            prefetch_line(from + at);
    };
    prefetch(a.k), prefetch(a.v);
}

}  // namespace kv8
