// prefill_window_consumer.cuh - a consumer warpgroup of a window kernel: all keys that its rows see
// are one tile, so that its softmax is of whole rows and nothing is rescaled.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_consumer.cuh"
#include "prefill_window_shape.cuh"
#include "ptx_matrices_sm90.cuh"

namespace kv8 {

// d (64 x 144) = or += A (64 x 16, shared) * B (16 x 144, shared, rows are columns of d).
#define KV8_NAMES_72               KV8_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define KV8_D72                    KV8_D64, KV8_D4(d, 64), KV8_D4(d, 68)
#define KV8_WGMMA_N144(TYPES, ...) KV8_WGMMA("n144" TYPES, KV8_NAMES_72, KV8_D72, __VA_ARGS__)
template <bool IS_BF16>
__device__ __forceinline__ void wgmma_shared(float (&d)[72], uint64_t a, uint64_t b,
                                             int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N144("k16.f32.bf16.bf16", "%72, %73", "%74", "1, 1, 0, 0", KV8_A_SHARED);
    else
        KV8_WGMMA_N144("k16.f32.f16.f16", "%72, %73", "%74", "1, 1, 0, 0", KV8_A_SHARED);
}

template <class SHAPE>
struct WindowConsumer : Consumer<SHAPE> {
    using consumer = Consumer<SHAPE>;
    using consumer::a, consumer::shared, consumer::index, consumer::D, consumer::lane;
    using consumer::K_BF16, consumer::V_BF16, consumer::items, consumer::tiles;
    using consumer::max_, consumer::o, consumer::sum, consumer::factor, consumer::small;
    using consumer::row_of, consumer::row_address, consumer::busy_warpgroups;
    enum { SEEN = SHAPE::SEEN };
    uint32_t q;    // descriptor of its Q
    int column;    // of the tile: where its SEEN keys begin
    bool none[2];  // rows that see no key

    __device__ WindowConsumer(const kv8_kernel_args &args, uint32_t base)
        : consumer(args, base), q(matrix_descriptor(this->q_address(), 16)) {}

    __device__ __forceinline__ uint32_t rows_of(int at, int stage) const {
        return matrix_descriptor(shared + at + stage * SHAPE::TILE_BYTES + column * 128, 16);
    }
    __device__ __forceinline__ void place_columns(const kv8_prefill_item &item, const ItemView &v) {
        const int query = query_of(a, v.row_begin + 64 * index);
        const int ahead = row_begin<false>(a, v, query) - item.seen_from;
        column = min(max(ahead, 0) / 8 * 8, SHAPE::KEYS - SEEN);
    }
    // What rows do not see. Of the columns between EDGE from either end whole windows see all.
    __device__ __forceinline__ void hide(float (&s)[SEEN / 2], int first) {
        enum { EDGE = 24 };
        int begin[2], end[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(begin[slot]), "=r"(end[slot])
                         : "r"(row_address(row_of(slot), offsetof(RowRecord, begin))));
            none[slot] = begin[slot] >= end[slot];
            begin[slot] -= first;
            end[slot] -= first;
        }
        const bool whole = max(begin[0], begin[1]) <= EDGE && min(end[0], end[1]) >= SEEN - EDGE;
        if (__all_sync(~0u, whole))
            hide_columns<EDGE>(s, begin, end);
        else
            hide_columns<SEEN / 2>(s, begin, end);
    }
    // Of EDGE columns at either end.
    template <int EDGE>
    __device__ __forceinline__ void hide_columns(float (&s)[SEEN / 2], const int (&begin)[2],
                                                 const int (&end)[2]) const {
        const int mine = lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < SEEN / 2; i++) {
            const int key = i / 4 * 8 + i % 2, slot = i / 2 % 2;
            const bool before = (key < EDGE || 2 * EDGE == SEEN) && key + mine < begin[slot];
            const bool behind = (key >= SEEN - EDGE || 2 * EDGE == SEEN) && key + mine >= end[slot];
            if (before || behind) s[i] = -INFINITY;
        }
    }
    // P and the rows' maxima and sums.
    __device__ __forceinline__ void softmax_of(float (&s)[SEEN / 2], uint32_t (&p)[SEEN / 4]) {
        float top[2] = {s[0], s[2]};
#pragma unroll
        for (int i = 0; i < SEEN / 2; i++) top[i / 2 % 2] = max_nan(top[i / 2 % 2], s[i]);
        Reference to[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            top[slot] = quad_max_nan(top[slot]);
            if (top[slot] == INFINITY) top[slot] = NAN;
            max_[slot] = top[slot] * factor[slot];
            to[slot] = {top[slot] == -INFINITY ? 0.0f : max_[slot], 0.0f};
        }
        // Differences from large maxima are exact, their products are not.
        if (__any_sync(~0u, is_large(to[0].units) || is_large(to[1].units))) {
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                if (top[slot] == -INFINITY) top[slot] = 0;
                to[slot].units = 0;
            }
#pragma unroll
            for (int i = 0; i < SEEN / 2; i++) s[i] -= top[i / 2 % 2];
        }
        this->exponentials(s, p, to, sum);
    }
    // int8: V of parts whose scales are large is 2^-7 as large as it is; so are O and all other P.
    __device__ __forceinline__ void shrink(uint32_t (&p)[SEEN / 4], int stage) {
        const uint32_t at = shared + SHAPE::SMALL_AT + SHAPE::SMALL_BYTES * stage;
        small = (load_word(at) | load_word(at + 4)) != 0;
        if (!small) return;
        const __half2 power = __half2half2(__ushort_as_half(0x2000));  // 2^-7
#pragma unroll
        for (int i = 0; i < SEEN / 4; i++) {
            const int part = (column + i / 2 * 8) / 32;
            if (load_word(at + part / 4 * 4) >> (8 * (part % 4)) & 1) continue;
            const __half2 x = __hmul2(*(const __half2 *)&p[i], power);
            p[i] = *(const uint32_t *)&x;
        }
    }
    __device__ __forceinline__ void load_factors() {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(factor[slot])
                         : "r"(row_address(row_of(slot))));
            if (a.soft_cap > 0) factor[slot] = 1.0f;  // the cap leaves log2 units
        }
    }
    // Rows of O in 16 bits pass shared memory, so that eight lanes store a row's line.
    __device__ __forceinline__ bool has_whole_lines() const {
        const int64_t strides = a.o_stride_row | a.o_stride_head;
        return a.o_dtype != KV8_F32 && (((uintptr_t)a.o | (uintptr_t)(2 * strides)) & 15) == 0;
    }
    __device__ __forceinline__ void store_lines(const float (&weight)[2], const int64_t (&at)[2],
                                                const bool (&here)[2]) const {
        const int i = lane();
        const uint32_t rows =
            this->q_address() + SHAPE::O_AT - SHAPE::Q_AT + this->thread() / 32 * (16 * 128);
        const bool bf16 = a.o_dtype == BF16;
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            uint32_t w[D / 8];
#pragma unroll
            for (int c = 0; c < D / 8; c++) {
                const float x = o[4 * c + 2 * slot] * weight[slot];
                const float y = o[4 * c + 2 * slot + 1] * weight[slot];
                w[c] = bf16 ? pack<true>(x, y) : pack<false>(x, y);
            }
#pragma unroll
            for (int c = 0; c < D / 8; c += 4)
                store_matrices(rows + 1024 * slot + i % 8 * 128 + ((c + i / 8) ^ (i % 8)) * 16,
                               w[c], w[c + 1], w[c + 2], w[c + 3]);
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = 4 * j + i / 8, owner = row % 8 * 4;
            const int64_t to = __shfl_sync(~0u, at[j / 2], owner);
            const bool is_row = __shfl_sync(~0u, (int)here[j / 2], owner);
            const uint4 x = load_shared(rows + 128 * row + ((i % 8) ^ (row % 8)) * 16);
            if (is_row) *(uint4 *)((uint16_t *)a.o + to + 8 * (i % 8)) = x;
        }
        __syncwarp();  // all have read
    }
    // What is written of the rows. Returns bits of the warp's rows for note_broken().
    __device__ __forceinline__ uint32_t write(const ItemView &v, const float (&sinks)[2],
                                              float v_scale, bool cleared) {
        const bool lines = has_whole_lines();
        bool finite[2], here[2], broken = cleared;
        float weight[2];
        int64_t at[2];
        if (SHAPE::FV == INT8 && small) v_scale *= 0x1p7f;
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = 64 * index + row_of(slot);
            float total = quad_sum(sum[slot]);
            sum[slot] = total;
            if (a.sink_logit != nullptr) total += exp2_fast(sinks[slot] * LOG2E - max_[slot]);
            const bool empty = none[slot] || sinks[slot] == INFINITY;
            const RowPlace place = place_of(a, v, row);
            here[slot] = row < v.num_rows;
            at[slot] = place.o;
            weight[slot] = empty ? 0.0f : v_scale / total;
            if (empty) this->clear_row(slot);
            if (here[slot]) {
                if (!lines) this->store_row(slot, place.o, weight[slot]);
                if (a.lse != nullptr && lane() % 4 == 0)
                    a.lse[place.lse] =
                        none[slot] ? -INFINITY : (max_[slot] + __log2f(sum[slot])) * a.lse_scale;
            }
            finite[slot] = here[slot] && !empty && !isnan(total);
            if (has_infinities(SHAPE::FV) || SHAPE::FV == INT8)
                broken = broken || (finite[slot] && this->holds_nan(slot));
        }
        if (lines) store_lines(weight, at, here);
        if (!__any_sync(~0u, broken)) return 0;
        uint32_t bits = 0;
#pragma unroll
        for (int slot = 0; slot < 2; slot++) bits |= this->row_bits(finite[slot], slot);
        return bits;
    }
    // Items of which the warpgroup has rows, one behind the other; Q of the next is fetched in the
    // softmax of this one, and stored when S is there. The first item's is there.
    __device__ __forceinline__ void run_items() {
        for (bool more = true; more;) {
            const kv8_prefill_item &item = this->item_at(0);
            const ItemView v = view_item(a, item);
            const int stage = tiles.stage();
            float s[SEEN / 2];
            uint32_t p[SEEN / 4];
            place_columns(item, v);
            const uint32_t k = rows_of(SHAPE::K_AT, stage);
            barrier_wait(SHAPE::barrier(shared, K_FULL, stage), tiles.parity());
            registers_pin(s);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < D / 16; i++)
                wgmma_shared<K_BF16>(s, descriptor_at(q, 32 * i), descriptor_at(k, 32 * i), i != 0);
            wgmma_commit();
            load_factors();
            const kv8_prefill_item *const next = next_item();
            more = next != nullptr;
            uint4 raw[D / 16];
            if (more) this->fetch_q(view_item(a, *next), raw);
            const float v_scale = v_scale_of<false>(a, v),
                        sinks[2] = {this->sink_of(v, 0), this->sink_of(v, 1)};
            wgmma_wait<0>();
            registers_pin(s);
            if (SHAPE::FK == INT8) this->scale_scores(s, stage * SHAPE::KEYS + column);
            this->release_k(stage);
            if (a.soft_cap > 0) this->cap_scores(s);
            hide(s, item.seen_from + column);
            softmax_of(s, p);
            if (more) {
                named_barrier_sync(WARPGROUP_BARRIER + index, 128);  // all have S
                this->store_q(view_item(a, *next), raw);
                named_barrier_sync(WARPGROUP_BARRIER + index, 128);
            }
            const uint32_t values = rows_of(SHAPE::V_AT, stage);
            barrier_wait(SHAPE::barrier(shared, V_FULL, stage), tiles.parity());
            if (SHAPE::FV == INT8) shrink(p, stage);
            registers_pin(o);
            registers_pin(p);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < SEEN / 16; i++)
                wgmma_registers<V_BF16>(o, p + 4 * i, descriptor_at(values, i * 2048), i != 0);
            wgmma_commit();
            wgmma_wait<0>();
            registers_pin(o);
            registers_pin(p);
            this->release_v(stage);
            tiles.next();
            const bool cleared = item_cleared<SHAPE>(shared, items.stage());
            note_broken<SHAPE>(a, shared, items.stage(), write(v, sinks, v_scale, cleared));
            leave_item<SHAPE>(shared, items);
        }
    }
    // 0: there is none, or none of its rows is the warpgroup's.
    __device__ __forceinline__ const kv8_prefill_item *next_item() const {
        ItemRing next = items;
        next.next();
        const kv8_prefill_item *const item = take_item<SHAPE>(shared, next);
        if (item == nullptr || index >= busy_warpgroups(view_item(a, *item))) return nullptr;
        return item;
    }
    __device__ __forceinline__ void skip() {
        const int stage = tiles.stage();
        barrier_wait(SHAPE::barrier(shared, K_FULL, stage), tiles.parity());
        this->release_k(stage);
        barrier_wait(SHAPE::barrier(shared, V_FULL, stage), tiles.parity());
        this->release_v(stage);
        tiles.next();
        note_broken<SHAPE>(a, shared, items.stage(), 0);
        leave_item<SHAPE>(shared, items);
    }
    __device__ __forceinline__ void run() {
        for (;;) {
            const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
            if (item == nullptr) break;
            const ItemView v = view_item(a, *item);
            if (index >= busy_warpgroups(v)) {
                skip();
                continue;
            }
            uint4 raw[D / 16];
            this->fetch_q(v, raw);
            named_barrier_sync(WARPGROUP_BARRIER + index, 128);  // all have S of what was before
            this->store_q(v, raw);
            named_barrier_sync(WARPGROUP_BARRIER + index, 128);
            run_items();
        }
        resolve_broken<SHAPE>(a, shared);
    }
};

}  // namespace kv8
