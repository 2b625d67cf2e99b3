// prefill_pages.cuh - a producer warp's walk over an item's keys: one key of each tile a lane,
// where it lies, and whether anybody may see it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/ptx_sm90.cuh"
#include "prefill/prefill_item.cuh"

namespace kv8 {

struct KeyLoader {
    enum { KEYS = KV8_PREFILL_TILE_KEYS };
    const kv8_prefill_args &a;
    uint32_t shared;
    int warp, lane;
    // The tile to fetch next, and the page of this lane's key there.
    int tile, tile_end, kv_head, page;
    const int32_t *pages;
    int seen_from, seen_to;  // keys that some row of the item may see

    __device__ KeyLoader(const kv8_prefill_args &args, uint32_t base)
        : a(args),
          shared(base),
          warp(__shfl_sync(~0u, threadIdx.x % 128 / 32, 0)),  // uniform
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void open_item(const kv8_prefill_item &item) {
        seen_from = item.seen_from;
        seen_to = item.seen_to;
        pages = (a.page_indptr != nullptr ? a.page_indices : a.block_table) + item.pages_at;
        kv_head = item.kv_head;
        tile = item.tile_begin;
        tile_end = item.tile_end;
        page = page_of(tile);
    }
    // The page of this lane's key of the tile; -1 where nobody looks.
    __device__ __forceinline__ int page_of(int of_tile) const {
        const int key = of_tile * KEYS + 32 * warp + lane;
        if (of_tile >= tile_end || key < seen_from || key >= seen_to) return -1;
        return pages[divide(key, a.page_magic, a.page_shift)];
    }
    // Where this lane's key lies; somewhere readable when nobody may see it.
    __device__ __forceinline__ const uint8_t *key_of(const kv8_prefill_pages &p, int slot) const {
        const uint64_t offset = (uint64_t)(uint32_t)max(page, 0) * p.stride_page +
                                (uint64_t)(uint32_t)slot * p.stride_slot +
                                (uint64_t)(uint32_t)kv_head * p.stride_head;
        return p.data + 16 * offset;
    }
    __device__ __forceinline__ int slot_of(int of_tile) const {
        const int key = of_tile * KEYS + 32 * warp + lane;
        return key - (int)divide(key, a.page_magic, a.page_shift) * a.page_size;
    }
    __device__ __forceinline__ void publish(uint32_t full) const {
        fence_stores_before_wgmma();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    }
};

}  // namespace kv8
