// prefill_window_producer.cuh - a producer warp of a window kernel: parts of 32 keys of the items'
// tiles, handed out to the four warps in turn, one on its way while the one before is widened.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_producer.cuh"
#include "prefill_queue.cuh"
#include "prefill_window_shape.cuh"

namespace kv8 {

template <class SHAPE>
struct WindowProducer : Producer<SHAPE> {
    using producer = Producer<SHAPE>;
    using producer::a, producer::shared, producer::lane, producer::page, producer::tile;
    using producer::barrier, producer::publish, producer::stored, producer::scales;
    using producer::K_WIDE, producer::V_WIDE, producer::V_PIECES, producer::HAS_SCALES;
    using producer::warp;                                     // here the part of the tile
    enum { GROUPS = K_WIDE + V_WIDE + !(K_WIDE && V_WIDE) };  // of copies, of a part
    const int own;                                            // the warp's index
    uint32_t fetched;                                         // parts that it has asked for

    // A part under way: of which item, and where it goes.
    struct Part {
        uint32_t item_at, nth;  // of the item: its slot, and how many were before it
        int tile, part;
    };

    __device__ WindowProducer(const kv8_kernel_args &args, uint32_t base)
        : producer(args, base), own(warp), fetched(0) {}

    __device__ __forceinline__ uint32_t raw(uint32_t n, int piece) const {
        return shared + SHAPE::RAW_AT + (n % 2 * 4 + own) * SHAPE::RAW_TILE_BYTES +
               piece * RAW_CHUNK_BYTES;
    }
    __device__ __forceinline__ void fetch(int part, uint32_t nth) {
        warp = part;
        stored.steps = nth;
        page = this->page_of(tile);
        const int slot = this->slot_of(tile);
        const uint32_t seen = __ballot_sync(~0u, this->has_page());
        const uint8_t *const k = this->key_of(a.k, slot), *const v = this->key_of(a.v, slot);
        const uint32_t to = raw(fetched, 0) + 16 * lane;
        if (!K_WIDE) this->template fetch_half<false>(to, k, seen);
        if (!V_WIDE) this->template fetch_half<false>(to + V_PIECES * RAW_CHUNK_BYTES, v, seen);
        if (!(K_WIDE && V_WIDE)) copy_commit();
        if (HAS_SCALES)
            scales[1] =
                __halves2half2(SHAPE::FK == INT8 ? this->scale_of(a.k, slot) : __ushort_as_half(0),
                               SHAPE::FV == INT8 ? this->scale_of(a.v, slot) : __ushort_as_half(0));
        if (K_WIDE) this->template copy_wide<false>(k, seen);
        if (V_WIDE) this->template copy_wide<true>(v, seen);
        fetched++;
    }
    // Widens and publishes a part when its copies have come, which PENDING groups follow; n: how
    // many parts of the warp's were before it.
    template <int PENDING>
    __device__ __forceinline__ void finish(const Part &p, uint32_t n) {
        const uint32_t item_at = this->item_at;
        const int of_tile = tile;
        this->item_at = p.item_at;
        tile = p.tile;
        warp = p.part;
        stored.steps = p.nth;
        copy_wait<PENDING>();
        RawChunk<4> codes;
        if (!K_WIDE) {
            load_chunk(codes, raw(n, 0), 0, lane);
            this->template widen_half<false>(codes, tile);
        }
        this->publish_k(barrier(K_FULL, stored.stage()));
        if (!V_WIDE) {
            load_chunk(codes, raw(n, V_PIECES), 0, lane);
            this->template widen_half<true>(codes, tile);
        } else {
            this->clear_tile(tile, stored.stage());
        }
        publish(barrier(V_FULL, stored.stage()));
        this->item_at = item_at;
        tile = of_tile;
    }
    __device__ __forceinline__ void run() {
        ItemRing items, left, asked_for;
        int asked = own == 0 ? fetch_first<SHAPE, true>(a, shared, asked_for) : 0;
        Part last = {};
        bool behind = false;
        for (;; items.next()) {
            const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
            if (item == nullptr) break;
            asked_for.next();
            if (own == 0) fetch_item<SHAPE, true>(a, shared, asked_for, asked);
            const uint32_t at = item_address<SHAPE>(shared, items.stage());
            this->open_keys(*item, at);
            // Part p of item n is the (PARTS n + p)-th of all.
            for (int part = (own + (4 - SHAPE::PARTS % 4) * items.steps) % 4; part < SHAPE::PARTS;
                 part += 4) {
                fetch(part, items.steps);
                if (behind) {
                    finish<GROUPS>(last, fetched);
                    if (last.nth != items.steps) leave_item<SHAPE>(shared, left);
                }
                last = {at, items.steps, item->seen_from, part};
                this->shift_scales();
                behind = true;
            }
        }
        if (!behind) return;
        finish<0>(last, fetched - 1);
        leave_item<SHAPE>(shared, left);
    }
};

}  // namespace kv8
