// prefill_fp8_producer.cuh - a producer warp of the kernels that multiply codes: Q, K and V as they
// lie in pages, straight to where wgmma reads them, but for V, which is turned.
//
// wgmma wants the k index of 8-bit operands contiguous: dimensions in Q and K, keys in V. A warp
// turns its 32 keys of V by ldmatrix, which turns pairs of bytes, two permutes for four keys of two
// dimensions, and stmatrix. Within every 16 keys they stand as keys 2c, 2c+1, 8+2c, 8+2c+1 of
// c = 0..3: where the sums of S leave P's values of a lane, so that P goes from accumulators to
// operands without a shuffle. Row 16m + 8e + r of the turned tile is dimension 16m + 2r + e.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_fp8_shape.cuh"
#include "prefill_pages.cuh"
#include "prefill_queue.cuh"

namespace kv8 {

template <class SHAPE>
struct Fp8Producer : KeyLoader<SHAPE::OPTIONS> {
    using loader = KeyLoader<SHAPE::OPTIONS>;
    using loader::a, loader::shared, loader::warp, loader::lane;
    using loader::has_twin_pools, loader::pools_apart, loader::publish;
    using loader::is_plain, loader::has_page, loader::page_of, loader::key_of, loader::slot_of;
    using loader::tile, loader::tile_end, loader::kv_head, loader::page;
    enum {
        D = SHAPE::HEAD_DIM,
        CHUNKS = D / 16,    // of a row
        ROWS = 32 / CHUNKS  // that a warp copies at once
    };
    StageRing<SHAPE::K_STAGES> fetched;  // K
    StageRing<SHAPE::K_STAGES> landed;
    StageRing<SHAPE::V_STAGES> turned;
    uint32_t num_queries;  // items whose Q came
    ItemView item;
    ItemWalk<SHAPE> walk;

    __device__ Fp8Producer(const kv8_kernel_args &args, uint32_t base)
        : loader(args, base), num_queries(0) {}

    __device__ __forceinline__ void open_item(const kv8_prefill_item &next, uint32_t at) {
        loader::open_item(next, at);
        item = view_item(a, next);
    }
    __device__ __forceinline__ uint32_t raw_address() const {
        return shared + SHAPE::RAW_AT + warp * SHAPE::RAW_BYTES;
    }

    // For addresses that are to be made anew for each tile: registers are scarce.
    __device__ __forceinline__ int lane_anew() const {
        int i = lane;
        asm volatile("" : "+r"(i));
        return i;
    }
    // Copies of K, of V, or of both where they lie at the same distances from their pools.
    template <bool K, bool V>
    __device__ __forceinline__ void fetch_rows_of(const uint8_t *mine, uint32_t k, uint32_t v,
                                                  uint32_t seen) const {
        const int thread = lane_anew(), chunk = thread % CHUNKS, row = thread / CHUNKS;
        const uint32_t mine_seen = seen >> row;
        const int even = row * D + 16 * SHAPE::swizzled(chunk, row);  // keys ROWS * i + row
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const uint8_t *const from = pointer_of(mine, ROWS * i + row) + 16 * chunk;
            const uint32_t size = (mine_seen >> ROWS * i & 1) * 16;
            const int place = (even ^ 16 * SHAPE::swizzled(0, ROWS * i)) + ROWS * i * D;
            if (K) copy_async(k + place, from, size);
            if (V) copy_async(v + place, from + pools_apart(), size);
        }
    }
    // Starts the copies of the next tile: K into its stage, V into the warp's own place.
    __device__ __forceinline__ void fetch_tile() {
        const int slot = slot_of(tile);
        const uint32_t seen = __ballot_sync(~0u, has_page());
        const uint8_t *const my_k = key_of(a.k, slot);
        const uint32_t k = shared + SHAPE::K_AT + fetched.stage * SHAPE::K_BYTES + 32 * warp * D;
        const uint32_t v = raw_address();
        barrier_wait(SHAPE::barrier(shared, K_EMPTY, fetched.stage), fetched.parity ^ 1);
        if (has_twin_pools()) {
            fetch_rows_of<true, true>(my_k, k, v, seen);
        } else {
            fetch_rows_of<true, false>(my_k, k, v, seen);
            fetch_rows_of<false, true>(key_of(a.v, slot) - pools_apart(), k, v, seen);
        }
        fetched.next();
        page = page_of(++tile);
    }

    // Sixteen dimensions of all keys at a time.
    __device__ __forceinline__ void turn_tile() const {
        enum { AT_ONCE = 4 };
        const int i = lane_anew();
        const uint32_t from = raw_address() + i * D + 16 * SHAPE::swizzled(0, i);
        const int row = i / 16 * 8 + i % 8, half = i / 8 % 2;
        const uint32_t to = shared + SHAPE::V_AT + turned.stage * SHAPE::V_BYTES + TILE_KEYS * row +
                            16 * ((2 * warp + half) ^ (row % 8));
#pragma unroll
        for (int first = 0; first < D / 16; first += AT_ONCE) {
            uint32_t x[AT_ONCE][4];  // of eight keys each: two keys' bytes of two dimensions
#pragma unroll
            for (int m = 0; m < AT_ONCE; m++) load_turned(from ^ 16 * (first + m), x[m]);
#pragma unroll
            for (int m = 0; m < AT_ONCE; m++)
                store_matrices(
                    to + 16 * (first + m) * TILE_KEYS, __byte_perm(x[m][0], x[m][1], 0x6420),
                    __byte_perm(x[m][2], x[m][3], 0x6420), __byte_perm(x[m][0], x[m][1], 0x7531),
                    __byte_perm(x[m][2], x[m][3], 0x7531));
        }
    }

    // Q's codes and what is known of each row: its factor from S to log2 units, its keys. Rows that
    // are not there are the last one again.
    __device__ __forceinline__ void fetch_rows() {
        barrier_wait(shared + SHAPE::Q_BARRIER_AT, num_queries % 2 ^ 1);
        const uint32_t records =
            shared + SHAPE::ROWS_AT +
            num_queries % 2 * (SHAPE::NUM_CONSUMERS * 64 * KV8_PREFILL_ROW_BYTES);
        num_queries++;
        const float scale = a.score_scale * k_scale_of(a, item);
#pragma unroll 1
        for (int first = 32 * warp; first < 64 * SHAPE::NUM_CONSUMERS; first += 128) {
            const int packed = item.row_begin + min(first + lane, item.num_rows - 1);
            const int query = query_of(a, packed);
            const int head = item.kv_head * a.group_size + packed - query * a.group_size;
            const uint8_t *const mine = (const uint8_t *)a.q +
                                        (int64_t)(item.q_begin + query) * a.q_stride_row +
                                        head * a.q_stride_head;
            float factor = scale * q_scale_of(a, item, query, head);
            if (factor == 0) factor = 1e-37f;  // or hidden keys would be NaN
            store_shared(records + KV8_PREFILL_ROW_BYTES * (first + lane), __float_as_uint(factor),
                         0, row_begin<SHAPE::OPTIONS>(a, item, query),
                         row_end<SHAPE::OPTIONS>(a, item, query));
#pragma unroll 1
            for (int i = 0; i < CHUNKS; i++) {
                const int row = ROWS * i + lane / CHUNKS, chunk = lane % CHUNKS;
                const uint8_t *const from = pointer_of(mine, row) + 16 * chunk;
                const uint32_t place =
                    shared + SHAPE::Q_AT + (first + row) * D + 16 * SHAPE::swizzled(chunk, row);
                if (a.prefill.q_aligned)
                    copy_async(place, from, 16);
                else
                    store_shared(place, word_of(from), word_of(from + 4), word_of(from + 8),
                                 word_of(from + 12));
            }
        }
        barrier_arrive(shared + SHAPE::ROWS_BARRIER_AT);
    }
    static __device__ __forceinline__ uint32_t word_of(const uint8_t *from) {
        return from[0] | from[1] << 8 | from[2] << 16 | (uint32_t)from[3] << 24;
    }

    // A tile is asked for when the one before is turned: stages that the consumers has not come to
    // yet cover its way. Q comes behind the first one, whose places are free before the last item's
    // Q is.
    __device__ __forceinline__ void run() {
        if (tile == tile_end) return;
        fetch_tile();
        fetch_rows();
        copy_commit();
        for (bool more = true; more;) {
            copy_wait<0>();
            publish(SHAPE::barrier(shared, K_FULL, landed.stage));
            landed.next();
            barrier_wait(SHAPE::barrier(shared, V_EMPTY, turned.stage), turned.parity ^ 1);
            if (!is_plain(tile - 1)) {
                this->template clear_values<SHAPE::CODE, D / 16>(tile - 1, raw_address(), D);
                __syncwarp();
            }
            turn_tile();
            publish(SHAPE::barrier(shared, V_FULL, turned.stage));
            turned.next();
            more = tile < tile_end;
            walk.look(*this);
            if (more) fetch_tile();
            copy_commit();
        }
    }
};

}  // namespace kv8
