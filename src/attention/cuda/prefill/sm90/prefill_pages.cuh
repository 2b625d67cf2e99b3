// prefill_pages.cuh - a producer warp's walk over an item's keys: one key of each tile a lane,
// where it lies, and whether anybody may see it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/ptx_sm90.cuh"
#include "prefill/prefill_nonfinite.cuh"

namespace kv8 {

struct KeyLoader {
    enum { KEYS = KV8_PREFILL_TILE_KEYS };
    const kv8_kernel_args &a;
    uint32_t shared;
    int warp, lane;
    // The tile to fetch next, and the page of this lane's key there.
    int tile, tile_end, kv_head, page;
    const int32_t *pages;
    uint32_t item_at;  // the item in shared memory

    __device__ KeyLoader(const kv8_kernel_args &args, uint32_t base)
        : a(args),
          shared(base),
          warp(__shfl_sync(~0u, threadIdx.x % 128 / 32, 0)),  // uniform
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void open_item(const kv8_prefill_item &item, uint32_t at) {
        item_at = at;
        pages = a.table + item.pages_at;
        kv_head = item.kv_head;
        tile = item.tile_begin;
        tile_end = item.tile_end;
        page = page_of(tile);
    }
    // A range of keys that the item holds.
    __device__ __forceinline__ KeyRange item_keys(uint32_t offset) const {
        KeyRange keys;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(keys.begin) : "r"(item_at + offset));
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(keys.end) : "r"(item_at + offset + 4));
        return keys;
    }
    // The page of this lane's key of the tile; -1 where nobody looks.
    __device__ __forceinline__ int page_of(int of_tile) const {
        const int key = of_tile * KEYS + 32 * warp + lane;
        const KeyRange seen = item_keys(offsetof(kv8_prefill_item, seen_from));
        if (of_tile >= tile_end || key < seen.begin || key >= seen.end) return -1;
        return pages[divide(key, a.by_page)];
    }
    // Where this lane's key lies; somewhere readable when nobody may see it.
    __device__ __forceinline__ const uint8_t *key_of(const kv8_kernel_pages &p, int slot) const {
        return key_row(p, max(page, 0), slot, kv_head);
    }
    __device__ __forceinline__ int slot_of(int of_tile) const {
        const int key = of_tile * KEYS + 32 * warp + lane;
        return key - divide(key, a.by_page) * a.page_size;
    }
    // Clears what is not finite in the warp's rows of a tile of V, of keys that only some rows see.
    template <int FORMAT, int CHUNKS>
    __device__ __forceinline__ void clear_values(int of_tile, uint32_t at, uint32_t pitch) const {
        const KeyRange shared_keys = item_keys(offsetof(kv8_prefill_item, shared_from));
        const uint32_t rows =
            ~keys_within(of_tile * KEYS + 32 * warp, shared_keys.begin, shared_keys.end);
        if (rows == 0) return;
        __syncwarp();  // rows that other lanes stored
        if (clear_nonfinite<FORMAT, CHUNKS>(at, pitch, rows))
            store_shared(item_at + KV8_PREFILL_ITEM_BYTES, 1);
    }
    __device__ __forceinline__ void publish(uint32_t full) const {
        fence_stores_before_wgmma();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    }
};

}  // namespace kv8
