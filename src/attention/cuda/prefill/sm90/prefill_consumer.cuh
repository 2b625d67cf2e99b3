// prefill_consumer.cuh - a consumer warpgroup: 64 packed query rows of an item through both
// products, in 16 bits, and the softmax.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_reference.cuh"
#include "prefill_broken.cuh"
#include "prefill_row_state.cuh"

namespace kv8 {

template <class SHAPE>
struct Consumer : RowState<SHAPE> {
    using rows = RowState<SHAPE>;
    using rows::a, rows::shared, rows::index, rows::D, rows::NUM_O, rows::OPTIONS, rows::lane;
    using rows::busy_warpgroups, rows::thread_of_block;
    using rows::factor, rows::max_, rows::o, rows::sum;
    using rows::row_address, rows::row_of, rows::pass_turn, rows::wait_turn, rows::turn;
    // Of the first product and of the second.
    static constexpr bool K_BF16 = SHAPE::FK == BF16, V_BF16 = SHAPE::FV == BF16;
    Ring<SHAPE::NUM_STAGES> tiles;  // of K; V's are one behind while S(t + 1) is computed
    ItemRing items;
    int tile, special;  // of the item: S is this tile's, and the next one that prepare() sees
    int busy;           // warpgroups that have rows of the chain's items
    bool small;         // int8: O is 2^-7 as large

    __device__ Consumer(const kv8_kernel_args &args, uint32_t base) : rows(args, base) {}

    __device__ __forceinline__ uint32_t q_address() const {
        return shared + SHAPE::Q_AT + index * SHAPE::COLUMNS * Q_BYTES;
    }

    // --- Q ---

    // Two threads a row of the block's; rows that are not there are the last one again.
    __device__ __forceinline__ int packed_row(const ItemView &v, int of_thread) const {
        return v.row_begin + min(of_thread / 2, v.num_rows - 1);
    }
    // This thread's half of its row, as it lies in memory.
    __device__ __forceinline__ void fetch_q(const ItemView &v, uint4 (&raw)[D / 16]) const {
        const int i = thread_of_block(), packed = packed_row(v, i), query = query_of(a, packed);
        const int head = v.kv_head * a.group_size + packed - query * a.group_size;
        const uint16_t *const q = (const uint16_t *)a.q +
                                  (int64_t)(v.q_begin + query) * a.q_stride_row +
                                  head * a.q_stride_head + i % 2 * (D / 2);
        if (a.prefill.q_aligned) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) raw[i] = *(const uint4 *)(q + 8 * i);
        } else {
#pragma unroll
            for (int i = 0; i < D / 16; i++)
                raw[i] = make_uint4(
                    q[8 * i] | q[8 * i + 1] << 16, q[8 * i + 2] | q[8 * i + 3] << 16,
                    q[8 * i + 4] | q[8 * i + 5] << 16, q[8 * i + 6] | q[8 * i + 7] << 16);
        }
    }
    // A power of two that takes the row's largest value to [2^13, 2^14): bf16 meets f16 codes as
    // f16 times that, exact but for values 2^27 below the largest.
    __device__ __forceinline__ float power_of(const uint4 (&raw)[D / 16]) const {
        uint32_t largest = 0;  // of the magnitudes' bits, which sort as the values do
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                largest = max(largest, max(w[j] & 0x7FFF, (w[j] >> 16) & 0x7FFF));
        }
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        const int exponent = (int)(largest >> 7) - 127;
        if (exponent == 128) return 0x1p-100f;  // beside an infinity nothing else counts
        if (exponent == -127) return 1.0f;
        return __int_as_float((127 + max(min(13 - exponent, 100), -100)) << 23);
    }
    // Q into shared memory, with the row's record. A negative or zero factor from S to log2 units
    // goes into Q, so that maxima stay maxima.
    __device__ __forceinline__ void store_q(const ItemView &v, const uint4 (&raw)[D / 16]) const {
        const int i = thread_of_block(), row = i % 128 / 2, half = i % 2;
        const bool q_bf16 = a.q_dtype == BF16;
        const float scale = a.score_scale * k_scale_of(a, v);
        const float sign = scale < 0 ? -1.0f : scale == 0 ? 0.0f : 1.0f;
        float power = q_bf16 && !K_BF16 ? power_of(raw) : 1.0f;
        if (half == 0) {
            const int query = query_of(a, packed_row(v, i));
            const float f = !isfinite(scale) ? NAN : sign == 0 ? 1.0f : fabsf(scale) / power;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(row_address(row)), "f"(f) : "memory");
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(
                             row_address(row, offsetof(RowRecord, begin))),
                         "r"(row_begin<OPTIONS>(a, v, query)), "r"(row_end<OPTIONS>(a, v, query))
                         : "memory");
        }
        power *= sign;
        const uint32_t to = q_address() + 128 * row;
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t w[4] = {raw[c].x, raw[c].y, raw[c].z, raw[c].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float low, high;
                if (q_bf16) {
                    low = __uint_as_float(w[j] << 16);
                    high = __uint_as_float(w[j] & 0xFFFF0000);
                } else {
                    const float2 both = __half22float2(*(const __half2 *)&w[j]);
                    low = both.x;
                    high = both.y;
                }
                w[j] = pack<K_BF16>(low * power, high * power);
            }
            const int from = half * (D / 16);  // chunks of 16 bytes, 8 in a row of 64 columns
            store_shared(to + (from + c) / 8 * Q_BYTES + (((from + c) % 8) ^ (row % 8)) * 16, w[0],
                         w[1], w[2], w[3]);
        }
        fence_stores_before_wgmma();
    }

    // Keys that every row of the warpgroup may see, or of the warp; none where pages are missing.
    __device__ __forceinline__ KeyRange full_keys(const kv8_prefill_item &item, const ItemView &v,
                                                  bool missing) const {
        if (OPTIONS && missing) return {0, 0};
        if (OPTIONS && a.mask_bits != nullptr) return {item.shared_from, item.shared_to};
        if (OPTIONS && a.key_begin != nullptr) return this->keys_of_all_rows();
        const int first = query_of(a, v.row_begin + min(64 * index, v.num_rows - 1));
        const int last = query_of(a, v.row_begin + min(64 * index + 63, v.num_rows - 1));
        return {row_begin<false>(a, v, last), row_end<false>(a, v, first)};
    }
    // Sums of nothing yet; Q's records are there.
    __device__ __forceinline__ void start_rows(const kv8_prefill_item &item) {
        const ItemView v = view_item(a, item);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(factor[slot])
                         : "r"(row_address(row_of(slot))));
            if (a.soft_cap > 0) factor[slot] = 1.0f;  // the cap leaves log2 units
            max_[slot] = NO_MAXIMUM;
            store_top(slot, -INFINITY);
            sum[slot] = 0;
        }
        small = false;
        tile = special = item.tile_begin;
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] = 0;
    }

    // --- products ---

    __device__ __forceinline__ void start_scores(float (&s)[64], uint32_t q, uint32_t k) {
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            wgmma_shared<K_BF16>(s, descriptor_at(q, i / 4 * Q_BYTES + i % 4 * 32),
                                 descriptor_at(k, i / 4 * TILE_BYTES + i % 4 * 32), i != 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_output(const uint32_t (&p)[32], uint32_t v) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            wgmma_registers<V_BF16>(o, p + 4 * i, descriptor_at(v, i * 2048), 1);
        wgmma_commit();
    }
    __device__ __forceinline__ uint32_t k_descriptor(uint32_t stage) const {
        return matrix_descriptor(shared + SHAPE::K_AT + stage * (SHAPE::COLUMNS * TILE_BYTES), 16);
    }
    __device__ __forceinline__ uint32_t v_descriptor(uint32_t stage) const {
        return matrix_descriptor(shared + SHAPE::V_AT + stage * (SHAPE::COLUMNS * TILE_BYTES),
                                 TILE_BYTES);
    }
    // For a tile that was not there before. Its barrier's address is made anew: no register is kept
    // for it over the softmax.
    __device__ __forceinline__ void wait_for(StageBarrier kind, Ring<SHAPE::NUM_STAGES> of) const {
        asm volatile("" : "+r"(of.steps));
        barrier_wait(SHAPE::barrier(shared, kind, of.stage()), of.parity());
    }
    __device__ __forceinline__ void release_k(uint32_t stage) {
        if (SHAPE::K_ARRIVALS == 32 || elected())
            barrier_arrive(SHAPE::barrier(shared, K_EMPTY, stage));
    }
    __device__ __forceinline__ void release_v(uint32_t stage) {
        if (elected()) barrier_arrive(SHAPE::barrier(shared, V_EMPTY, stage));
    }

    // int8: a key's scale is its column's. first: of the keys of all stages.
    template <int N>
    __device__ __forceinline__ void scale_scores(float (&s)[N], uint32_t first) const {
        const uint32_t at = shared + SHAPE::K_SCALES_AT + first * 2 + lane() % 4 * 4;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            uint32_t pair;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(at + 16 * i) : "memory");
            const float2 scale = __half22float2(*(const __half2 *)&pair);
            s[4 * i] *= scale.x;
            s[4 * i + 1] *= scale.y;
            s[4 * i + 2] *= scale.x;
            s[4 * i + 3] *= scale.y;
        }
    }
    // A row's maximum as S has it, in its record: few tiles ask.
    __device__ __forceinline__ uint32_t top_address(int slot) const {
        return row_address(row_of(slot), offsetof(RowRecord, top));
    }
    __device__ __forceinline__ float load_top(int slot) const {
        return __uint_as_float(load_word(top_address(slot)));
    }
    __device__ __forceinline__ void store_top(int slot, float top) const {
        store_shared(top_address(slot), __float_as_uint(top));
    }
    // The rows' maxima over this tile too; O and the sums follow. NaN stays, and an infinity, whose
    // row is NaN, becomes it.
    __device__ __forceinline__ void raise_maxima(const float (&s)[64]) {
        float found[2] = {s[0], s[2]}, alpha[2];
        __syncwarp();  // maxima that other lanes stored
#pragma unroll
        for (int i = 0; i < 64; i++) found[i / 2 % 2] = max_nan(found[i / 2 % 2], s[i]);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const float before = load_top(slot);
            float top = max_nan(quad_max_nan(found[slot]), before);
            if (top == INFINITY) top = NAN;
            alpha[slot] = rescaling(before, top, factor[slot]);
            __syncwarp();
            store_top(slot, top);
            max_[slot] = maximum_of(top, factor[slot]);
            sum[slot] *= alpha[slot];
        }
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] *= alpha[i / 2 % 2];
    }
    // P in 16 bits, relative to `to`; a lane's sums of it.
    template <int N>
    __device__ __forceinline__ void exponentials(const float (&s)[N], uint32_t (&p)[N / 2],
                                                 const Reference (&to)[2], float (&add)[2]) const {
        float part[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const int slot = i % 2;
            const float low = weight_of(s[2 * i], factor[slot], to[slot]);
            const float high = weight_of(s[2 * i + 1], factor[slot], to[slot]);
            part[slot][0] += low;
            part[slot][1] += high;
            p[i] = pack<V_BF16>(low, high);
        }
        add[0] = part[0][0] + part[0][1];
        add[1] = part[1][0] + part[1][1];
    }
    // S to P. A row's maximum is found in the first tile it sees and then only where a lane's sum
    // of a tile reaches 2^15, near f16's end: P may be as large, the final division takes it back,
    // and the tiles between cost no comparisons, shuffles or rescaling. NaN, whose row is NaN, is
    // no reason to find it anew.
    __device__ __forceinline__ void softmax(float (&s)[64], uint32_t (&p)[32]) {
        const Reference as_is[2] = {{max_[0], 0.0f}, {max_[1], 0.0f}};
        float add[2];
        exponentials(s, p, as_is, add);
        if (__any_sync(~0u, add[0] >= 32768.0f || add[1] >= 32768.0f)) {
            raise_maxima(s);
            const Reference to[2] = {reference_of(load_top(0), factor[0]),
                                     reference_of(load_top(1), factor[1])};
            exponentials(s, p, to, add);
        }
        sum[0] += add[0];
        sum[1] += add[1];
    }
    // int8: V of 32 keys whose scales are large is 2^-7 as large as it is, and O from the first
    // such keys of an item on. P of all other keys follows.
    __device__ __forceinline__ void shrink_weights(uint32_t (&p)[32], uint32_t stage) {
        uint32_t small_keys;  // a byte for 32 keys
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(small_keys)
                     : "r"(shared + SHAPE::SMALL_AT + 4 * stage)
                     : "memory");
        __syncwarp();  // one lane releases the stage
        if (small_keys == 0 && !small) return;
        if (!small) {
            small = true;
#pragma unroll
            for (int i = 0; i < NUM_O; i++) o[i] *= 0x1p-7f;
        }
        const __half2 power = __half2half2(__ushort_as_half(0x2000));  // 2^-7
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (small_keys >> (8 * (i / 8)) & 1) continue;
            const __half2 x = __hmul2(*(const __half2 *)&p[i], power);
            p[i] = *(const uint32_t *)&x;
        }
    }

    // --- items ---

    __device__ __forceinline__ const kv8_prefill_item &item_at(int ahead) const {
        return *item_slot<SHAPE>((items.steps + ahead) % KV8_PREFILL_ITEM_SLOTS);
    }
    // Whether there is a next item that has tiles, and rows for as many warpgroups; waits until
    // that is known.
    __device__ __forceinline__ bool next_is_there() const {
        ItemRing next = items;
        next.next();
        const kv8_prefill_item *const item = take_item<SHAPE>(shared, next);
        return item != nullptr && item->tile_begin < item->tile_end &&
               busy_warpgroups(view_item(a, *item)) == busy;
    }
    // What finish() wants: maxima in log2 units, O as large as it is.
    template <bool TOGETHER>
    __device__ __forceinline__ uint32_t finish_item(const kv8_prefill_item &item) {
        __syncwarp();  // maxima that other lanes stored
#pragma unroll
        for (int slot = 0; slot < 2; slot++) max_[slot] = load_top(slot) * factor[slot];
        if (SHAPE::FV == INT8 && small) {
#pragma unroll
            for (int i = 0; i < NUM_O; i++) o[i] *= 0x1p7f;
        }
        const bool cleared = item_cleared<SHAPE>(shared, items.stage());
        if (TOGETHER) return this->finish_together(item, view_item(a, item), cleared);
        return this->finish(item, view_item(a, item), cleared);
    }
    enum { FIRST = 1, LAST = 2, NEXT = 4 };  // tile of its item; another item's S follows it
    // What few tiles want before their softmax, behind one branch: caps, masks, maxima, and the
    // next item's Q in the place of this one's, whose last S is there. The next special tile is the
    // next one, the first that not every row sees wholly, or the last.
    __device__ __forceinline__ int prepare(float (&s)[64]) {
        const kv8_prefill_item &item = item_at(0);
        const ItemView v = view_item(a, item);
        int kind = (tile == item.tile_begin ? FIRST : 0) | (tile + 1 == item.tile_end ? LAST : 0);
        if (kind & LAST && next_is_there()) kind |= NEXT;
        uint4 raw[D / 16];
        if (kind & NEXT) fetch_q(view_item(a, item_at(1)), raw);
        const bool missing = OPTIONS && item_missing<SHAPE>(shared, items.stage());
        const KeyRange full = full_keys(item, v, missing);
        if (a.soft_cap > 0) this->cap_scores(s);
        if ((tile + 1) * TILE_KEYS > full.end || tile * TILE_KEYS < full.begin)
            this->mask_scores(s, tile * TILE_KEYS);
        if (OPTIONS && a.mask_bits != nullptr && (tile + 1) * TILE_KEYS > item.shared_to)
            this->hide_by_mask(s, item, tile * TILE_KEYS);
        if (OPTIONS && missing) this->hide_missing(s, item, tile * TILE_KEYS);
        if (kind & NEXT) {
            named_barrier_sync(WARPGROUP_BARRIER + index, 128);
            store_q(view_item(a, item_at(1)), raw);
        }
        if (kind & FIRST) raise_maxima(s);
        special = tile + 1;
        if (a.soft_cap <= 0 && special * TILE_KEYS >= full.begin)
            special = max(special, min(item.tile_end - 1, full.end / TILE_KEYS));
        return kind;
    }

    // Items that have tiles, one behind the other: S of an item's first tile is started with
    // O += P V of the last tile before, and is under way while that item's rows are finished.
    // Behind a chain's last tile S is started too, of whatever lies there, and nobody reads it: a
    // branch around wgmma would have the compiler wait for each.
    __device__ __forceinline__ void run_chain() {
        float s[64];
        uint32_t p[32];
        const uint32_t q = matrix_descriptor(q_address(), 16);
        busy = busy_warpgroups(view_item(a, item_at(0)));
        {
            uint4 raw[D / 16];
            fetch_q(view_item(a, item_at(0)), raw);
            store_q(view_item(a, item_at(0)), raw);
        }
        barrier_wait(SHAPE::barrier(shared, K_FULL, tiles.stage()), tiles.parity());
        wait_turn(turn());
        registers_pin(s);
        wgmma_fence();
        start_scores(s, q, k_descriptor(tiles.stage()));
        pass_turn(turn(), busy);
        start_rows(item_at(0));
        bool end = false;
        wgmma_wait<0>();
        registers_pin(s);
        for (;;) {
            if (SHAPE::FK == INT8) scale_scores(s, tiles.stage() * TILE_KEYS);
            release_k(tiles.stage());
            const Ring<SHAPE::NUM_STAGES> v_tiles = tiles;
            tiles.next();
            const bool v_here =
                barrier_test(SHAPE::barrier(shared, V_FULL, v_tiles.stage()), v_tiles.parity());
            const bool k_here =
                barrier_test(SHAPE::barrier(shared, K_FULL, tiles.stage()), tiles.parity());
            const int kind = tile == special ? prepare(s) : 0;
            softmax(s, p);
            const int mine = turn();
            const uint32_t v = v_descriptor(v_tiles.stage());
            const uint32_t k = k_descriptor(tiles.stage());
            if (!v_here) wait_for(V_FULL, v_tiles);
            if (!k_here && (kind & (LAST | NEXT)) != LAST) wait_for(K_FULL, tiles);
            if (SHAPE::FV == INT8) shrink_weights(p, v_tiles.stage());
            wait_turn(mine);
            registers_pin(s);
            registers_pin(o);
            registers_pin(p);
            wgmma_fence();
            start_output(p, v);
            start_scores(s, q, k);
            pass_turn(mine, busy);
            wgmma_wait<1>();
            registers_pin(o);
            registers_pin(p);
            release_v(v_tiles.stage());
            tile++;
            bool together = false;
            if (kind & LAST) {
                end = !(kind & NEXT);
                together = item_at(0).is_together;
                if (!together) {
                    note_broken<SHAPE>(a, shared, items.stage(), finish_item<false>(item_at(0)));
                    leave_item<SHAPE>(shared, items);
                }
                if (!end) start_rows(item_at(0));
            }
            wgmma_wait<0>();
            registers_pin(s);
            if (!end) continue;
            if (together) {  // a block's only item: nothing is under way
                note_broken<SHAPE>(a, shared, items.stage(), finish_item<true>(item_at(0)));
                leave_item<SHAPE>(shared, items);
            }
            break;
        }
    }
    // Tiles of an item of which the warpgroup has no rows go by.
    __device__ __forceinline__ void skip_item(const kv8_prefill_item &item) {
        for (int left = item.tile_end - item.tile_begin; left > 0; left--) {
            const int stage = tiles.stage();
            barrier_wait(SHAPE::barrier(shared, K_FULL, stage), tiles.parity());
            release_k(stage);
            barrier_wait(SHAPE::barrier(shared, V_FULL, stage), tiles.parity());
            release_v(stage);
            tiles.next();
        }
        note_broken<SHAPE>(a, shared, items.stage(), 0);
        leave_item<SHAPE>(shared, items);
    }
    __device__ __forceinline__ void run() {
        if (index == SHAPE::NUM_CONSUMERS - 1) pass_turn(turn(), SHAPE::NUM_CONSUMERS);
        for (;;) {
            const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
            if (item == nullptr) break;
            if (index >= busy_warpgroups(view_item(a, *item))) {
                skip_item(*item);
                continue;
            }
            if (item->tile_begin < item->tile_end) {
                run_chain();
                continue;
            }
            this->write_empty(view_item(a, *item));
            leave_item<SHAPE>(shared, items);
        }
        resolve_broken<SHAPE>(a, shared);
    }
};

}  // namespace kv8
