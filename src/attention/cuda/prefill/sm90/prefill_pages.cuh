// prefill_pages.cuh - a producer warp's walk over an item's keys: one key of each tile a lane,
// where it lies, and whether anybody may see it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_nonfinite.cuh"
#include "ptx_sm90.cuh"

namespace kv8 {

// OPTIONS: rows may have ranges of their own or a mask, and pages may be missing. KEYS: from one
// tile to the next; 1 where a tile begins at any key and is named by it.
template <bool OPTIONS, int KEYS = KV8_PREFILL_TILE_KEYS>
struct KeyLoader {
    const kv8_kernel_args &a;
    uint32_t shared;
    int warp, lane;
    // The tile to fetch next, and the page of this lane's key there.
    int tile, tile_end, kv_head, page;
    int plain_from, plain_to;  // tiles of which every row sees every key
    const int32_t *pages;
    uint32_t item_at;  // the item in shared memory

    __device__ KeyLoader(const kv8_kernel_args &args, uint32_t base)
        : a(args),
          shared(base),
          warp(__shfl_sync(~0u, threadIdx.x % 128 / 32, 0)),  // uniform
          lane(threadIdx.x % 32) {}

    // The keys of a tile that begins where the item's do.
    __device__ __forceinline__ void open_keys(const kv8_prefill_item &item, uint32_t at) {
        item_at = at;
        pages = a.table + item.pages_at;
        kv_head = item.kv_head;
        tile = item.seen_from;
        tile_end = tile + 1;
    }
    __device__ __forceinline__ void open_item(const kv8_prefill_item &item, uint32_t at) {
        item_at = at;
        pages = a.table + item.pages_at;
        kv_head = item.kv_head;
        tile = item.tile_begin;
        tile_end = item.tile_end;
        plain_from = (item.shared_from + KEYS - 1) / KEYS;
        plain_to = min(item.shared_to / KEYS, tile_end);
        page = page_of(tile);
        if (OPTIONS && a.num_pages != KV8_ANY_PAGES) find_missing();
    }
    __device__ __forceinline__ bool is_plain(int of_tile) const {
        return KEYS > 1 && of_tile >= plain_from && of_tile < plain_to;
    }
    // A range of keys that the item holds.
    __device__ __forceinline__ KeyRange item_keys(uint32_t offset) const {
        KeyRange keys;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(keys.begin) : "r"(item_at + offset));
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(keys.end) : "r"(item_at + offset + 4));
        return keys;
    }
    __device__ __forceinline__ int item_field(uint32_t offset) const {
        int x;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(item_at + offset));
        return x;
    }
    __device__ __forceinline__ int num_tiles() const {
        return tile_end - item_field(offsetof(kv8_prefill_item, tile_begin));
    }
    // Whether keys that no row sees may lie between those that some do.
    __device__ __forceinline__ bool has_gaps() const {
        short gaps;
        asm volatile("ld.shared.s8 %0, [%1];"
                     : "=h"(gaps)
                     : "r"(item_at + (uint32_t)offsetof(kv8_prefill_item, has_gaps)));
        return gaps != 0;
    }
    __device__ __forceinline__ ItemView view() const {
        ItemView v;
        v.row_begin = item_field(offsetof(kv8_prefill_item, row_begin));
        v.q_begin = item_field(offsetof(kv8_prefill_item, q_begin));
        v.qo_len = item_field(offsetof(kv8_prefill_item, qo_len));
        v.kv_len = item_field(offsetof(kv8_prefill_item, kv_len));
        v.num_rows = v.qo_len * a.group_size - v.row_begin;
        return v;
    }
    __device__ __forceinline__ RequestKeys request_keys() const {
        RequestKeys keys;
        keys.pages = pages;
        keys.kv_len = item_field(offsetof(kv8_prefill_item, kv_len)), keys.mask = nullptr;
        if (a.mask_bits != nullptr)
            keys.mask =
                a.mask_bits + a.mask_indptr[item_field(offsetof(kv8_prefill_item, request))];
        return keys;
    }
    // Counts pages that the item sees and that are not there, each warp a share of them.
    __device__ __forceinline__ void find_missing() const {
        const int from = max(tile * KEYS, item_field(offsetof(kv8_prefill_item, seen_from)));
        const int to = min(tile_end * KEYS, item_field(offsetof(kv8_prefill_item, seen_to)));
        const int count = request_keys().count_missing(a, view(), has_gaps(), from, to, warp, 4);
        if (count == 0 || lane != 0) return;
        if (a.bad_pages != nullptr) atomicAdd(a.bad_pages, count);
        store_shared(item_at + offsetof(ItemSlot, missing), 1);
    }
    // Whether this lane's key of the next tile is somewhere.
    __device__ __forceinline__ bool has_page() const {
        return OPTIONS ? page_exists(a, page) : page >= 0;
    }
    // The page of this lane's key of the tile; UNSEEN where nobody looks.
    __device__ __forceinline__ int page_of(int of_tile) const {
        const int first = of_tile * KEYS + 32 * warp, key = first + lane;
        if (is_plain(of_tile)) return pages[divide(key, a.by_page)];
        const KeyRange by_some = item_keys(offsetof(kv8_prefill_item, seen_from));
        const bool inside = of_tile < tile_end && key >= by_some.begin && key < by_some.end;
        const int of_key = inside ? pages[divide(key, a.by_page)] : UNSEEN;
        if (!OPTIONS || of_tile >= tile_end || !has_gaps()) return of_key;
        const KeyRange by_all = item_keys(offsetof(kv8_prefill_item, shared_from));
        if (first >= by_all.begin && first + 32 <= by_all.end) return of_key;
        return request_keys().seen_keys(a, view(), first) >> lane & 1 ? of_key : UNSEEN;
    }
    // Whether V's rows lie where K's do, at one distance.
    __device__ __forceinline__ bool has_twin_pools() const {
        return a.k.stride_page == a.v.stride_page && a.k.stride_slot == a.v.stride_slot &&
               a.k.stride_head == a.v.stride_head;
    }
    __device__ __forceinline__ int64_t pools_apart() const {
        int64_t bytes = a.v.data - a.k.data;
        asm("" : "+l"(bytes));  // one sum, not two
        return bytes;
    }
    // Where this lane's key lies; somewhere readable when nobody may see it.
    __device__ __forceinline__ const uint8_t *key_of(const kv8_kernel_pages &p, int slot) const {
        if (!OPTIONS) return key_row(p, max(page, 0), slot, kv_head);
        return key_row(p, has_page() ? page : 0, slot, kv_head);
    }
    __device__ __forceinline__ int slot_of(int of_tile) const {
        const int key = of_tile * KEYS + 32 * warp + lane;
        return key - divide(key, a.by_page) * a.page_size;
    }
    // Clears what is not finite in the warp's rows of a tile of V that is not plain, of keys that
    // only some rows see.
    template <int FORMAT, int CHUNKS>
    __device__ __forceinline__ void clear_values(int of_tile, uint32_t at, uint32_t pitch) const {
        const KeyRange shared_keys = item_keys(offsetof(kv8_prefill_item, shared_from));
        const uint32_t rows =
            ~keys_within(of_tile * KEYS + 32 * warp, shared_keys.begin, shared_keys.end);
        if (rows == 0) return;
        __syncwarp();  // rows that other lanes stored
        if (clear_nonfinite<FORMAT, CHUNKS>(at, pitch, rows))
            store_shared(item_at + offsetof(ItemSlot, cleared), 1);
    }
    __device__ __forceinline__ void publish(uint32_t full) const {
        fence_stores_before_wgmma();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    }
};

}  // namespace kv8
