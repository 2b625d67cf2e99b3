// prefill_queue.cuh - how a block's items pass from the first producer warp, which takes the
// block's own and then from the queue, to everybody: a few slots in shared memory, so that
// producers may be an item ahead of the consumers, which see the next item before they end one.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_shape.cuh"
#include "take_turn.cuh"

namespace kv8 {

using ItemRing = Ring<KV8_PREFILL_ITEM_SLOTS>;

template <class SHAPE>
__device__ __forceinline__ uint32_t item_barrier(uint32_t shared, ItemBarrier kind, int slot) {
    return shared + SHAPE::ITEM_BARRIERS_AT + 8 * KV8_PREFILL_ITEM_SLOTS * kind + 8 * slot;
}
template <class SHAPE>
__device__ __forceinline__ uint32_t item_address(uint32_t shared, int slot) {
    return shared + SHAPE::ITEMS_AT + KV8_PREFILL_ITEM_SLOT_BYTES * slot;
}
template <class SHAPE>
__device__ __forceinline__ bool item_cleared(uint32_t shared, int slot) {
    return load_word(item_address<SHAPE>(shared, slot) + offsetof(ItemSlot, cleared)) != 0;
}
template <class SHAPE>
__device__ __forceinline__ bool item_missing(uint32_t shared, int slot) {
    return load_word(item_address<SHAPE>(shared, slot) + offsetof(ItemSlot, missing)) != 0;
}
// The next item's place in the queue, by the first lane of a warp: asked for before it is fetched,
// so that nobody waits for it.
__device__ __forceinline__ int ask_queue(const kv8_kernel_args &a) {
    return threadIdx.x % 32 == 0 ? take_from_queue(a) : 0;
}
// The place behind n, or LATER.
constexpr int LATER = -1;
template <bool ASKS_AHEAD>
__device__ __forceinline__ int place_behind(const kv8_kernel_args &a, int n, int own_end) {
    return n + 1 < own_end ? n + 1 : ASKS_AHEAD ? ask_queue(a) : LATER;
}
// Item n into its slot, by one warp; n becomes the place behind it.
template <class SHAPE, bool ASKS_AHEAD>
__device__ __forceinline__ void fetch_item(const kv8_kernel_args &a, uint32_t shared,
                                           const ItemRing &r, int &n) {
    barrier_wait(item_barrier<SHAPE>(shared, ITEM_EMPTY, r.stage()), r.parity() ^ 1);
    if (threadIdx.x % 32 == 0) {
        kv8_prefill_queue *const queue = a.prefill.queue;
        const int left = n - queue->num_items, own_end = queue->own[blockIdx.x + 1];
        // Every block asks once in vain; the last of them leaves the queue as it was.
        if (left == (int)gridDim.x - 1) queue->next = queue->own[gridDim.x];
        const uint32_t at = item_address<SHAPE>(shared, r.stage());
        const uint32_t full = item_barrier<SHAPE>(shared, ITEM_FULL, r.stage());
        store_shared(at + offsetof(ItemSlot, cleared), 0, (uint32_t)n, 0, 0);
        if (left < 0) {
            expect_bytes(full, KV8_PREFILL_ITEM_BYTES);
            copy_bulk(at, a.prefill.items + n, KV8_PREFILL_ITEM_BYTES, full, leave_first_policy());
            n = place_behind<ASKS_AHEAD>(a, n, own_end);
        } else {
            store_shared(at, ~0u, 0, 0, 0);  // request -1: no more
            barrier_arrive(full);
        }
    }
    __syncwarp();
}
// The block's first item into its slot, by a warp; returns the place behind it. One trip brings the
// block's places and the item of its own number, which is its first one as a rule.
template <class SHAPE, bool ASKS_AHEAD>
__device__ __forceinline__ int fetch_first(const kv8_kernel_args &a, uint32_t shared,
                                           const ItemRing &r) {
    enum { CHUNKS = KV8_PREFILL_ITEM_BYTES / 16 };
    const kv8_prefill_queue *const queue = a.prefill.queue;
    const int lane = threadIdx.x % 32;
    const int place = *(lane < 2 ? queue->own + blockIdx.x + lane : &queue->num_items);
    uint4 item[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        if (lane == 0) item[i] = __ldcg((const uint4 *)(a.prefill.items + blockIdx.x) + i);
    const int own = __shfl_sync(~0u, place, 0), own_end = __shfl_sync(~0u, place, 1);
    int n = own < own_end ? own : lane == 0 ? take_from_queue(a) : 0;
    if (own >= own_end || own != (int)blockIdx.x) {
        fetch_item<SHAPE, ASKS_AHEAD>(a, shared, r, n);
        return n;
    }
    if (lane == 0) {
        const uint32_t at = item_address<SHAPE>(shared, r.stage());
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            store_shared(at + 16 * i, item[i].x, item[i].y, item[i].z, item[i].w);
        store_shared(at + offsetof(ItemSlot, cleared), 0, (uint32_t)n, 0, 0);
        barrier_arrive(item_barrier<SHAPE>(shared, ITEM_FULL, r.stage()));
    }
    __syncwarp();
    return place_behind<ASKS_AHEAD>(a, n, own_end);
}
// The item of the slot, 0 when there is no more.
template <class SHAPE>
__device__ __forceinline__ const kv8_prefill_item *take_item(uint32_t shared, const ItemRing &r) {
    barrier_wait(item_barrier<SHAPE>(shared, ITEM_FULL, r.stage()), r.parity());
    const kv8_prefill_item *const item = item_slot<SHAPE>(r.stage());
    return item->request < 0 ? 0 : item;
}
template <class SHAPE>
__device__ __forceinline__ void leave_item(uint32_t shared, ItemRing &r) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(item_barrier<SHAPE>(shared, ITEM_EMPTY, r.stage()));
    r.next();
}

// The items of a producer warp, in turn. The first of the warps takes the next one from the queue:
// when an item begins, or of a long one where two tiles are left, for what a block has taken no
// other computes. The loops that widen have no room for it in the instruction cache.
template <class SHAPE>
struct ItemWalk {
    enum { LONG = 4 };  // tiles
    ItemRing items;     // the one under way
    int asked;          // the next one's place in the queue, or LATER

    __device__ __forceinline__ void start(const kv8_kernel_args &a, uint32_t shared) {
        asked = fetch_first<SHAPE, false>(a, shared, items);
    }
    template <bool ASKS_AHEAD, class LOADER>
    __device__ __forceinline__ void fetch_next(const LOADER &l) {
        ItemRing next = items;
        next.next();
        fetch_item<SHAPE, ASKS_AHEAD>(l.a, l.shared, next, asked);
    }
    // An item begins.
    template <class LOADER>
    __device__ __forceinline__ void open(const LOADER &l) {
        if (l.warp != 0 || l.num_tiles() >= LONG) return;
        if (asked == LATER) asked = ask_queue(l.a);
        fetch_next<true>(l);
    }
    // Before a tile is fetched; of an item's first ones nobody need ask.
    template <class LOADER>
    __device__ __forceinline__ void look(const LOADER &l) {
        const int left = l.tile_end - l.tile;
        if (left > 2 || left < 1 || l.warp != 0 || l.num_tiles() < LONG) return;
        if (left == 1)
            fetch_next<false>(l);
        else if (asked == LATER)
            asked = ask_queue(l.a);
    }
};

template <class SHAPE>
__device__ __forceinline__ void init_items(uint32_t shared) {
    store_shared(shared + SHAPE::BROKEN_AT, 0);
    for (int i = 0; i < KV8_PREFILL_ITEM_SLOTS; i++) {
        barrier_init(item_barrier<SHAPE>(shared, ITEM_FULL, i), 1);
        barrier_init(item_barrier<SHAPE>(shared, ITEM_EMPTY, i), 4 * (SHAPE::NUM_CONSUMERS + 1));
    }
}

}  // namespace kv8
