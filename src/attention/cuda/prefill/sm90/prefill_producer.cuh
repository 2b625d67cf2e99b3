// prefill_producer.cuh - a producer warp: fetches the tiles of an item, widens or copies them into
// the stages, and says when they are there. The bytes of a tile are prefill_widen.cuh's.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_pages.cuh"
#include "prefill_shape.cuh"

namespace kv8 {

template <class SHAPE>
struct Producer : KeyLoader<SHAPE::OPTIONS, SHAPE::TILE_STEP> {
    using loader = KeyLoader<SHAPE::OPTIONS, SHAPE::TILE_STEP>;
    using loader::a, loader::shared, loader::warp, loader::lane;
    using loader::has_twin_pools, loader::pools_apart, loader::publish;
    using loader::is_plain, loader::has_page, loader::page_of, loader::key_of, loader::slot_of;
    using loader::tile, loader::tile_end, loader::kv_head, loader::page;
    enum {
        K_WIDE = is_wide(SHAPE::FK),
        V_WIDE = is_wide(SHAPE::FV),
        V_PIECES = K_WIDE ? 0 : SHAPE::COLUMNS,  // where V's begin in a raw tile
        NUM_AHEAD = SHAPE::NUM_AHEAD,
        IS_ALONE = SHAPE::NUM_CONSUMERS == 1,
        LOADS = SHAPE::LOADS,  // of 16 bytes at a time
        HAS_SCALES = SHAPE::FK == INT8 || SHAPE::FV == INT8
    };
    Ring<SHAPE::NUM_STAGES> stored;
    const bool together;            // K and V are copied at one walk over the keys
    __half2 scales[NUM_AHEAD + 1];  // int8: K's and V's scale of this lane's key, oldest first
    // Of two formats, one not widened: its row of this lane's key of the tile whose codes were
    // asked for last, and which lanes' keys somebody sees.
    const uint8_t *wide_row;
    uint32_t wide_seen;

    __device__ Producer(const kv8_kernel_args &args, uint32_t base)
        : loader(args, base), together(LOADS == 4 && !K_WIDE && !V_WIDE && has_twin_pools()) {}

    // Into the L2 the item's Q as well: the consumers read it between two tiles. A thread a row.
    __device__ __forceinline__ void open_item(const kv8_prefill_item &item, uint32_t at) {
        loader::open_item(item, at);
        const ItemView v = view_item(a, item);
        for (int row = 32 * warp + lane; row < min(64 * SHAPE::NUM_CONSUMERS, v.num_rows);
             row += 128) {
            const int packed = v.row_begin + row, query = query_of(a, packed);
            const int head = v.kv_head * a.group_size + packed - query * a.group_size;
            const int64_t at = (v.q_begin + query) * a.q_stride_row + head * a.q_stride_head;
            if (a.prefill.q_aligned) prefetch_bulk((const uint16_t *)a.q + at, 2 * SHAPE::HEAD_DIM);
        }
    }
    // SHAPE::barrier(), written out: the compiler makes other addresses for 16-bit copies of a
    // call.
    __device__ __forceinline__ uint32_t barrier(StageBarrier kind, int stage) const {
        return shared + SHAPE::BARRIERS_AT + 8 * (kind * SHAPE::NUM_STAGES + stage);
    }
    __device__ __forceinline__ __half scale_of(const kv8_kernel_pages &p, int slot) const {
        return !has_page() ? __ushort_as_half(0) : key_scale(p, page, slot, kv_head);
    }
    __device__ __forceinline__ uint32_t tile_address(int at, int stage, int column) const {
        return shared + at + (stage * SHAPE::COLUMNS + column) * SHAPE::TILE_BYTES +
               warp * 32 * 128;
    }
    // K, with what int8's lanes stored for the consumers' lanes to read.
    __device__ __forceinline__ void publish_k(uint32_t full) const {
        if (SHAPE::K_ARRIVALS == 1) {
            publish(full);
        } else {
            fence_stores_before_wgmma();
            barrier_arrive(full);
        }
    }
    __device__ __forceinline__ uint32_t raw_address(uint32_t n, int piece) const {
        return shared + SHAPE::RAW_AT + (n % (NUM_AHEAD + 1) * 4 + warp) * SHAPE::RAW_TILE_BYTES +
               piece * RAW_CHUNK_BYTES;
    }

    // Copies of K or V, or of both.
    template <bool BOTH>
    __device__ __forceinline__ void fetch_half(uint32_t raw, const uint8_t *mine,
                                               uint32_t seen) const {
        const int row = lane / 4;  // of eight: keys 8i + row
        const uint32_t mine_seen = seen >> row;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint8_t *const from = pointer_of(mine, 8 * i + row) + 16 * (lane % 4);
            const uint32_t size = (mine_seen >> 8 * i & 1) * 16;
#pragma unroll
            for (int c = 0; c < SHAPE::COLUMNS; c++) {
                copy_async<IS_ALONE>(raw + c * RAW_CHUNK_BYTES + 512 * i, from + 64 * c, size);
                if (BOTH)
                    copy_async<IS_ALONE>(raw + (SHAPE::COLUMNS + c) * RAW_CHUNK_BYTES + 512 * i,
                                         from + pools_apart() + 64 * c, size);
            }
        }
    }
    // Starts the copies of the next tile's codes, the block's n-th.
    __device__ __forceinline__ void fetch_tile(uint32_t n) {
        const int slot = slot_of(tile);
        const uint32_t seen = __ballot_sync(~0u, has_page());
        const uint32_t raw = raw_address(n, 0) + 16 * lane;
        if (together) {
            fetch_half<true>(raw, key_of(a.k, slot), seen);
        } else {
            if (!K_WIDE) fetch_half<false>(raw, key_of(a.k, slot), seen);
            if (!V_WIDE)
                fetch_half<false>(raw + V_PIECES * RAW_CHUNK_BYTES, key_of(a.v, slot), seen);
        }
        if (K_WIDE || V_WIDE) wide_row = key_of(K_WIDE ? a.k : a.v, slot), wide_seen = seen;
        if (HAS_SCALES)
            scales[NUM_AHEAD] =
                __halves2half2(SHAPE::FK == INT8 ? scale_of(a.k, slot) : __ushort_as_half(0),
                               SHAPE::FV == INT8 ? scale_of(a.v, slot) : __ushort_as_half(0));
        page = page_of(tile + 1);
    }
    // Widens K or V of the oldest tile; published when the next codes are on their way into
    // registers, so that nobody waits for the stores.
    template <bool IS_V>
    __device__ __forceinline__ void widen_half(RawChunk<LOADS> p, int of_tile) {
        constexpr Format CODE = IS_V ? SHAPE::FV : SHAPE::FK;
        const int stage = stored.stage();
        const __half2 scale = IS_V ? __high2half2(scales[0]) : __low2half2(scales[0]);
        const int at = IS_V ? SHAPE::V_AT : SHAPE::K_AT;
        barrier_wait(barrier(IS_V ? V_EMPTY : K_EMPTY, stage), stored.parity() ^ 1);
        if (CODE == INT8 && !IS_V)
            asm volatile(
                "st.shared.u16 [%0], %1;" ::"r"(shared + SHAPE::K_SCALES_AT +
                                                (stage * SHAPE::KEYS + 32 * warp + lane) * 2),
                "h"(finite_or_nan(__half_as_ushort(__low2half(scale))))
                : "memory");
        const bool small = CODE == INT8 && IS_V && publish_small(scale, stage);
#pragma unroll
        for (int i = 0; i < SHAPE::COLUMNS * 4; i += LOADS) {
            if (i > 0)
                load_chunk(p, raw_address(stored.steps, IS_V * V_PIECES + i / 4), i % 4, lane);
            widen_chunk<CODE, IS_V>(p, tile_address(at, stage, i / 4), i % 4, scale, small, lane);
        }
        if (IS_V) clear_tile(of_tile, stage);
    }
    // The warp's rows of a stage's V.
    __device__ __forceinline__ void clear_tile(int of_tile, int stage) const {
        if (is_plain(of_tile)) return;
#pragma unroll
        for (int c = 0; c < SHAPE::COLUMNS; c++)
            this->template clear_values<SHAPE::FV == BF16 ? BF16 : F16, 8>(
                of_tile, tile_address(SHAPE::V_AT, stage, c), 128);
    }
    // int8: a product of a key's code and such a scale would leave f16. A scale that is not finite
    // makes the key's scores NaN.
    static constexpr unsigned short LARGE_SCALE = 0x6000;  // 512
    static __device__ __forceinline__ unsigned short finite_or_nan(unsigned short scale) {
        return (scale & 0x7fff) == 0x7c00 ? 0x7fff : scale;
    }
    __device__ __forceinline__ bool publish_small(__half2 scale, int stage) const {
        const bool small =
            __any_sync(~0u, (__half_as_ushort(__low2half(scale)) & 0x7fff) >= LARGE_SCALE);
        if (lane == 0)
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(shared + SHAPE::SMALL_AT +
                                                        SHAPE::SMALL_BYTES * stage + warp),
                         "r"((uint32_t)small)
                         : "memory");
        return small;
    }
    // 8-bit codes: while one tile is widened, the next NUM_AHEAD are under way. An item's tiles are
    // all stored before the next item is asked for: the consumers that frees its slot waits for
    // them.
    __device__ __forceinline__ void narrow_item() {
        if (tile >= tile_end) return;
#pragma unroll
        for (int i = 0; i < NUM_AHEAD; i++) {
            fetch_next(stored.steps + i);
            shift_scales();
        }
        bool behind = false;  // a tile whose V is to be published
        do {
            copy_wait<SHAPE::NUM_AHEAD - 1>();
            RawChunk<LOADS> p;
            load_chunk(p, raw_address(stored.steps, 0), 0, lane);
            if (behind) publish(barrier(V_FULL, last_stage()));
            widen_half<false>(p, 0);
            fetch_next(stored.steps + NUM_AHEAD);
            load_chunk(p, raw_address(stored.steps, SHAPE::COLUMNS), 0, lane);
            publish_k(barrier(K_FULL, stored.stage()));
            widen_half<true>(p, tile - NUM_AHEAD - 1);
            stored.next();
            shift_scales();
            behind = true;
        } while (tile - NUM_AHEAD < tile_end);
        publish(barrier(V_FULL, last_stage()));
    }
    // Copies of the item's next tile, the block's n-th, if there is one.
    __device__ __forceinline__ void fetch_next(uint32_t n) {
        if (tile < tile_end) fetch_tile(n);
        copy_commit();
        tile++;
    }
    __device__ __forceinline__ int last_stage() const {
        return (stored.steps - 1) % SHAPE::NUM_STAGES;
    }
    __device__ __forceinline__ void shift_scales() {
        if constexpr (HAS_SCALES) {
#pragma unroll
            for (int j = 0; j < NUM_AHEAD; j++) scales[j] = scales[j + 1];
        }
    }

    // 16-bit values land where wgmma reads them; the last tile's K or V is published before this
    // one's waits for its stage.
    template <bool IS_V>
    __device__ __forceinline__ void copy_half(const uint8_t *mine, bool behind) {
        const uint32_t seen = __ballot_sync(~0u, has_page());
        if (behind) {
            copy_wait<1>();
            if (IS_V) clear_tile(tile - 1, last_stage());
            publish(barrier(IS_V ? V_FULL : K_FULL, last_stage()));
        }
        copy_wide<IS_V>(mine, seen);
    }
    // Rows of the warp's keys into the stage, once it is free.
    template <bool IS_V>
    __device__ __forceinline__ void copy_wide(const uint8_t *mine, uint32_t seen) const {
        const int stage = stored.stage();
        barrier_wait(barrier(IS_V ? V_EMPTY : K_EMPTY, stage), stored.parity() ^ 1);
        const int row = lane / 8, chunk = lane % 8;  // keys 4i + row; the swizzle's bit 2 is i's
        const uint32_t even = tile_address(IS_V ? SHAPE::V_AT : SHAPE::K_AT, stage, 0) + 128 * row +
                              16 * (chunk ^ row);
        const uint32_t odd = even ^ 64, mine_seen = seen >> row;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint8_t *const from = pointer_of(mine, 4 * i + row) + 16 * chunk;
#pragma unroll
            for (int c = 0; c < SHAPE::COLUMNS; c++)
                copy_async((i % 2 == 0 ? even : odd) + c * SHAPE::TILE_BYTES + 512 * i,
                           from + 128 * c, (mine_seen >> 4 * i & 1) * 16);
        }
        copy_commit();
    }
    __device__ __forceinline__ void wide_item() {
        bool behind = false;
        for (; tile < tile_end; tile++) {
            const int slot = slot_of(tile);
            const int next_page = page_of(tile + 1);
            const uint8_t *const my_v = key_of(a.v, slot);
            copy_half<false>(key_of(a.k, slot), behind);
            copy_half<true>(my_v, behind);
            stored.next();
            page = next_page;
            behind = true;
        }
        if (!behind) return;
        copy_wait<0>();
        publish(barrier(K_FULL, last_stage()));
        clear_tile(tile - 1, last_stage());
        publish(barrier(V_FULL, last_stage()));
    }

    // One of K and V is widened, the other lands in its stages. V's copies of a tile are under way
    // while K of the next is widened, K's while V of the tile is.
    __device__ __forceinline__ void mixed_item() {
        static_assert(NUM_AHEAD == 1, "codes of the next tile alone are under way");
        if (tile >= tile_end) return;
        fetch_next(stored.steps);
        shift_scales();
        if (V_WIDE) copy_commit();  // of V of a tile before
        bool behind = false;
        do {
            RawChunk<LOADS> p;
            if constexpr (V_WIDE) {
                copy_wait<1>();
                load_chunk(p, raw_address(stored.steps, 0), 0, lane);
                widen_half<false>(p, 0);
                const uint8_t *const row = wide_row;
                const uint32_t seen = wide_seen;
                fetch_next(stored.steps + 1);
                publish_k(barrier(K_FULL, stored.stage()));
                if (behind) publish_wide_v<1>(tile - 3);
                copy_wide<true>(row, seen);
            } else {
                copy_wide<false>(wide_row, wide_seen);
                fetch_next(stored.steps + 1);
                copy_wait<2>();
                load_chunk(p, raw_address(stored.steps, 0), 0, lane);
                widen_half<true>(p, tile - 2);
                copy_wait<1>();
                publish(barrier(K_FULL, stored.stage()));
                publish(barrier(V_FULL, stored.stage()));
            }
            stored.next();
            shift_scales();
            behind = true;
        } while (tile - 1 < tile_end);
        if (V_WIDE) publish_wide_v<0>(tile - 2);
    }
    // V of the tile before, whose copies have come when PENDING groups follow them.
    template <int PENDING>
    __device__ __forceinline__ void publish_wide_v(int of_tile) const {
        copy_wait<PENDING>();
        clear_tile(of_tile, last_stage());
        publish(barrier(V_FULL, last_stage()));
    }

    __device__ __forceinline__ void run() {
        if constexpr (K_WIDE && V_WIDE)
            wide_item();
        else if constexpr (K_WIDE || V_WIDE)
            mixed_item();
        else
            narrow_item();
    }
};

}  // namespace kv8
