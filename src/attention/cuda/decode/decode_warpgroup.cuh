// decode_warpgroup.cuh - a block of a decode launch for 17 to 32 packed rows of a request: rows to
// verify. As decode_kernel.cuh, but four warps are a team.
//
// A warpgroup has one KV head and four granules of keys a step, one a warp: each warp copies its
// own granule's K and V into a ring, widens its K in registers and multiplies it with Q (M of a
// wgmma; packed rows are N). Weights meet in shared memory, and behind a barrier each warp
// multiplies 16 of every 64 dims of all four granules' V, widened in registers (M of the second
// wgmma), with all of them. So codes are widened once for all rows, and O of a warp is a quarter
// of what it is where each warp has its own keys.
//
// Grid: any number of blocks, one a multiprocessor. Block: 512. Bound by: latency of a step, close
// to memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_warpgroup_attention.cuh"
#include "decode/decode_warpgroup_loader.cuh"

namespace kv8 {

// find_unmasked() by all warps, which share out the rows and keys of a split.
template <int WARPS>
__device__ inline void find_unmasked_by_block(const kv8_kernel_args &a, Split &p) {
    __shared__ int hidden[WARPS];
    const int warp = threadIdx.x / 32, first_row = divide(p.row_begin, a.by_group);
    const int last_row = divide(p.row_begin + p.num_rows - 1, a.by_group);
    const int rows = last_row - first_row + 1, parts = max(WARPS / rows, 1);
    const KeyRange top = visible_keys(a, p.request, first_row);
    const KeyRange low = visible_keys(a, p.request, last_row);
    const int begin = p.granule_begin * TOKENS, end = min(p.granule_end * TOKENS, top.end);
    const int each = (max(end - begin, 0) / parts + 8) / 8 * 8;
    const uint8_t *const bits = a.mask_bits + a.mask_indptr[p.request.index];
    int first = top.end;
    for (int i = warp; i < rows * parts; i += WARPS) {
        const int part = begin + i / rows * each, part_end = min(part + each, end);
        const int64_t row = int64_t(first_row + i % rows) * p.request.kv_len;
        const int key = first_hidden<1>(bits, row, part, part_end);
        if (key < part_end) first = min(first, key);
    }
    if (threadIdx.x % 32 == 0) hidden[warp] = first;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) first = min(first, hidden[i]);
    if (threadIdx.x == 0) p.all = {low.begin, first};
    __syncthreads();
}

// A warpgroup's steps of a split. `meanwhile` runs while the first copies are on their way.
template <class C, class MEANWHILE>
__device__ __forceinline__ void run_warpgroup(const kv8_kernel_args &a, Split &split, int head,
                                              int first, int count, uint8_t *bytes,
                                              WarpgroupMemory<C> &memory, MEANWHILE &&meanwhile) {
    const uint32_t base = keep(smem_address(bytes));
    const int warp = threadIdx.x / 32 % 4, left = split.granule_end - first - warp;
    const int own = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
    WarpgroupAttention<C> attention(a, split, head, base, memory);
    attention.load_queries();
    WarpgroupLoader<C> loader(a, split, base + warp * C::STAGES_BYTES, head, first + warp,
                              a.decode.num_slices, own);
#pragma unroll 1
    for (int i = 0; i < C::AHEAD; i++)
        loader.issue(i, i * C::STAGE_BYTES, (i - 1) * C::STAGE_BYTES);
    loader.find_gaps();
    meanwhile();
    attention.store_queries();
    __syncthreads();  // Q is there, and what find_gaps() says of the split
    attention.start();
    uint32_t stage = 0, before = (C::STAGES - 1) * C::STAGE_BYTES;  // of the last step
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        attention.step(i, (first + i * a.decode.num_slices) * TOKENS, stage,
                       [&] { loader.issue(i + C::AHEAD, C::KEYS_AHEAD ? stage : before, before); });
        before = stage;
        stage = stage + C::STAGE_BYTES == C::STAGES_BYTES ? 0 : stage + C::STAGE_BYTES;
    }
    copy_wait_all();
    attention.store_result(bytes);
}

template <class C>
__device__ __forceinline__ void warpgroup_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t fixed[];
    __shared__ Block<C> block;
    __shared__ WarpgroupMemory<C> memory[C::WARPGROUPS];
    launch_dependents();
    int *const starts = reinterpret_cast<int *>(fixed + C::FIXED_BYTES);
    const int warp = threadIdx.x / 32, warpgroup = warp / 4;
    if (warp == 0)
        partition_first<C>(a, starts, block);
    else
        wait_for_previous();
    __syncthreads();
    const int slice = divide(warpgroup, a.decode.by_heads);
    const int in_block = warpgroup - slice * a.decode.heads_per_block;
#pragma unroll 1
    for (Split *at = block.splits; at->stream >= 0; at = block.other(at)) {
        Split &split = *at;
        if constexpr (C::HAS_MASK) find_unmasked_by_block<C::WARPS>(a, split);
        const int first = split.granule_begin + 4 * slice, left = split.granule_end - first;
        const int count = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
        const int head = split.head_begin + in_block;
        run_warpgroup<C>(a, split, head, first, count, fixed + warpgroup * 4 * C::RING_BYTES,
                         memory[warpgroup], [&] {
                             if (slice == 0 && warp % 4 == 0)
                                 copy_row_ends(a, split, head, block.ends + in_block * C::ROWS);
                             if (warp == 0)
                                 take_split<C>(a, starts, block.partition, block, *block.other(at),
                                               [&](int b) { return load_lengths(a, b); });
                         });
        __syncthreads();
        combine_splits<C>(a, split, fixed, block.ends);
        __syncthreads();  // shared memory is free again
    }
    if (block.any_empty) finish_empty(a, starts);
}

}  // namespace kv8

#define KV8_DECODE_WARPGROUP_DEFINE(name, k, v, head_dim, rows, stages, has_mask, fixed_bytes) \
    extern "C" __global__ void __launch_bounds__(512, 1)                                       \
        name(const __grid_constant__ kv8_kernel_args a) {                                      \
        using config = kv8::WarpgroupConfig<kv8::k, kv8::v, head_dim, rows, stages, has_mask>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                                     \
        kv8::warpgroup_body<config>(a);                                                        \
    }
