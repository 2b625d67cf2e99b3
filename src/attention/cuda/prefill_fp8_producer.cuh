/* prefill_fp8_producer.cuh - a producer warp of the kernels that multiply codes: Q, K and V as they
 * lie in pages, straight to where wgmma reads them, but for V, which is turned.
 *
 * wgmma wants the k index of 8-bit operands contiguous: dimensions in Q and K, keys in V. A warp
 * turns its 32 keys of V in registers, four by four bytes at a time. Within every 16 keys they
 * stand as keys 2c, 2c+1, 8+2c, 8+2c+1 of c = 0..3: where the sums of S leave P's values of a lane,
 * so that P goes from accumulators to operands without a shuffle. Row D/4 * i + q of the turned
 * tile is dimension 4q + i: eight lanes that store 16 bytes each meet all banks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_FP8_PRODUCER_CUH
#define KV8_PREFILL_FP8_PRODUCER_CUH

#include "prefill_fp8_shape.cuh"
#include "prefill_pages.cuh"

template <class SHAPE>
struct fp8_producer : page_walk {
    enum {
        D = SHAPE::HEAD_DIM,
        NUM_AHEAD = SHAPE::NUM_AHEAD,
        CHUNKS = D / 16,   /* of a row */
        ROWS = 32 / CHUNKS /* that a warp copies at once */
    };
    stage_ring<SHAPE::K_STAGES> fetched; /* K */
    stage_ring<SHAPE::K_STAGES> landed;
    stage_ring<SHAPE::V_STAGES> turned;
    stage_ring<NUM_AHEAD> raw_fetched, raw_landed; /* V's codes */
    uint32_t num_queries;                          /* items whose Q came */
    item_view item;
    bool together;

    __device__ fp8_producer(const kv8_prefill_args &args, uint32_t base)
        : page_walk(args, base),
          num_queries(0),
          together(args.k.stride_page == args.v.stride_page &&
                   args.k.stride_slot == args.v.stride_slot &&
                   args.k.stride_head == args.v.stride_head) {}

    __device__ __forceinline__ void open_item(const kv8_prefill_item &next) {
        page_walk::open_item(next);
        item = view_item(a, next);
    }
    __device__ __forceinline__ uint32_t raw_address(uint32_t stage) const {
        return shared + SHAPE::RAW_AT + (4 * stage + warp) * SHAPE::RAW_BYTES;
    }

    /* Copies of K, of V, or of both where they lie at the same distances from their pools. */
    template <bool K, bool V>
    __device__ __forceinline__ void fetch_rows_of(const uint8_t *mine, uint32_t k, uint32_t v,
                                                  uint32_t seen) const {
        const int chunk = lane % CHUNKS;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int key = ROWS * i + lane / CHUNKS;
            const uint8_t *const from = pointer_of(mine, key) + 16 * chunk;
            const uint32_t size = (seen >> key & 1) * 16;
            /* Of rows of 64 bytes, the second sixteen's pairs change places: banks, in turn_tile.
             */
            const int place = D == 128 ? key : key ^ (key / 16);
            if (K) copy_async(k + key * D + 16 * SHAPE::swizzled(chunk, key), from, size);
            if (V) copy_async(v + place * D + 16 * chunk, from + (a.v.data - a.k.data), size);
        }
    }
    /* Starts the copies of the next tile: K into its stage, V into the warp's own place. */
    __device__ __forceinline__ void fetch_tile() {
        const int slot = slot_of(tile);
        const uint32_t seen = __ballot_sync(~0u, page >= 0);
        const uint8_t *const my_k = key_of(a.k, slot);
        const uint32_t k = shared + SHAPE::K_AT + fetched.stage * SHAPE::K_BYTES + 32 * warp * D;
        const uint32_t v = raw_address(raw_fetched.stage);
        barrier_wait(k_barrier<SHAPE>(shared, 1, fetched.stage), fetched.parity ^ 1);
        if (together) {
            fetch_rows_of<true, true>(my_k, k, v, seen);
        } else {
            fetch_rows_of<true, false>(my_k, k, v, seen);
            fetch_rows_of<false, true>(key_of(a.v, slot) - (a.v.data - a.k.data), k, v, seen);
        }
        fetched.next();
        raw_fetched.next();
        page = page_of(++tile);
    }

    /* Four rows' bytes of four columns each to four columns of four rows. */
    static __device__ __forceinline__ void turn(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
        const uint32_t ab = __byte_perm(rows[0], rows[1], 0x5140);
        const uint32_t cd = __byte_perm(rows[2], rows[3], 0x5140);
        const uint32_t ab_high = __byte_perm(rows[0], rows[1], 0x7362);
        const uint32_t cd_high = __byte_perm(rows[2], rows[3], 0x7362);
        columns[0] = __byte_perm(ab, cd, 0x5410);
        columns[1] = __byte_perm(ab, cd, 0x7632);
        columns[2] = __byte_perm(ab_high, cd_high, 0x5410);
        columns[3] = __byte_perm(ab_high, cd_high, 0x7632);
    }
    /* A lane has four dimensions of 16 keys at a time; at head_dim 64, half the lanes have the
     * other 16. */
    __device__ __forceinline__ void turn_tile() const {
        const int quad = lane % (D / 4);
        const uint32_t raw = raw_address(raw_landed.stage) + 4 * quad;
        const uint32_t to = shared + SHAPE::V_AT + turned.stage * SHAPE::V_BYTES + TILE_KEYS * quad;
#pragma unroll
        for (int pass = 0; pass < D / 64; pass++) {
            const int half = D == 128 ? pass : lane / (D / 4);
            const uint32_t chunk = to + 16 * ((2 * warp + half) ^ (quad % 8));
            /* Even keys of the half, odd ones: at 64 bytes a row the second half has them
             * exchanged, so that its lanes read the other banks. */
            const uint32_t even = raw + 16 * half * D + (D == 64 ? D * half : 0);
            const uint32_t odd = raw + 16 * half * D + D - (D == 64 ? D * half : 0);
            uint32_t words[4][4]; /* of dimension i, keys of c */
#pragma unroll
            for (int c = 0; c < 4; c++) {
                uint32_t keys[4], columns[4];
                keys[0] = load_shared_word(even + 2 * c * D);
                keys[1] = load_shared_word(odd + 2 * c * D);
                keys[2] = load_shared_word(even + (8 + 2 * c) * D);
                keys[3] = load_shared_word(odd + (8 + 2 * c) * D);
                turn(keys, columns);
#pragma unroll
                for (int i = 0; i < 4; i++) words[i][c] = columns[i];
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                store_shared(chunk + i * (D / 4) * TILE_KEYS, words[i][0], words[i][1], words[i][2],
                             words[i][3]);
        }
    }

    /* Q's codes and what is known of each row: its factor from S to log2 units, its keys. Rows that
     * are not there are the last one again. */
    __device__ __forceinline__ void fetch_rows() {
        barrier_wait(shared + SHAPE::Q_BARRIER_AT, num_queries % 2 ^ 1);
        const uint32_t records =
            shared + SHAPE::ROWS_AT + num_queries % 2 * (SHAPE::NUM_MATH * 64 * 16);
        num_queries++;
        const float scale = a.score_scale * k_scale_of(a, item);
#pragma unroll 1
        for (int first = 32 * warp; first < 64 * SHAPE::NUM_MATH; first += 128) {
            const int packed = item.row_begin + min(first + lane, item.num_rows - 1);
            const int query = query_of(a, packed);
            const int head = item.kv_head * a.group_size + packed - query * a.group_size;
            const uint8_t *const mine = (const uint8_t *)a.q +
                                        (int64_t)(item.q_begin + query) * a.q_stride_row +
                                        head * a.q_stride_head;
            float factor = scale * q_scale_of(a, item, query, head);
            if (factor == 0) factor = 1e-37f; /* or hidden keys would be NaN */
            store_shared(records + 16 * (first + lane), __float_as_uint(factor), 0,
                         row_begin(a, item, query), row_end(a, item, query));
#pragma unroll 1
            for (int i = 0; i < CHUNKS; i++) {
                const int row = ROWS * i + lane / CHUNKS, chunk = lane % CHUNKS;
                const uint8_t *const from = pointer_of(mine, row) + 16 * chunk;
                const uint32_t place =
                    shared + SHAPE::Q_AT + (first + row) * D + 16 * SHAPE::swizzled(chunk, row);
                if (a.q_aligned)
                    copy_async(place, from, 16);
                else
                    store_shared(place, word_of(from), word_of(from + 4), word_of(from + 8),
                                 word_of(from + 12));
            }
        }
    }
    static __device__ __forceinline__ uint32_t word_of(const uint8_t *from) {
        return from[0] | from[1] << 8 | from[2] << 16 | (uint32_t)from[3] << 24;
    }

    /* While a tile is turned the next are under way, NUM_AHEAD with it; then another is asked for.
     * Q comes behind the first ones, whose places are free before the last item's Q is. */
    __device__ __forceinline__ void run() {
        int left = tile_end - tile;
        if (left == 0) return;
#pragma unroll 1
        for (int i = 0; i < NUM_AHEAD; i++) {
            if (tile < tile_end) fetch_tile();
            copies_commit();
        }
        fetch_rows();
        copies_commit();
        for (bool first = true; left > 0; left--, first = false) {
            if (first)
                copies_wait<0>();
            else
                copies_wait<NUM_AHEAD - 1>();
            publish(k_barrier<SHAPE>(shared, 0, landed.stage));
            landed.next();
            barrier_wait(v_barrier<SHAPE>(shared, 1, turned.stage), turned.parity ^ 1);
            turn_tile();
            publish(v_barrier<SHAPE>(shared, 0, turned.stage));
            turned.next();
            raw_landed.next();
            if (tile < tile_end) fetch_tile();
            copies_commit();
        }
    }
};

#endif
