// prefill_fp8_consumer.cuh - a consumer warpgroup of the kernels that multiply codes: 64 packed
// query rows of an item through both products, in e4m3, and the softmax.
//
// P is rounded to e4m3, so its place in that format's range matters: a row's largest P so far is
// 2^6 when it is found, may grow to 448 before it is found again, and P keeps all its bits down to
// 2^-12 of the largest. The row's sum is that of the rounded values, by a column of ones beside V.
//
// The tensor cores keep about 14 bits of a sum: after FLUSH_TILES tiles O moves to f32 sums of a
// second level in shared memory, each thread's own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_reference.cuh"
#include "prefill_broken.cuh"
#include "prefill_fp8_shape.cuh"
#include "prefill_row_state.cuh"

namespace kv8 {

// Four values to e4m3; beyond 448 they become 448, NaN stays.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint32_t codes;
    asm("{\n.reg .b16 l, h;\n"
        "cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
        "mov.b32 %0, {l, h};\n}\n"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

template <class SHAPE>
struct Fp8Consumer : RowState<SHAPE> {
    using rows = RowState<SHAPE>;
    using rows::a, rows::shared, rows::index, rows::D, rows::NUM_O, rows::OPTIONS, rows::thread;
    using rows::factor, rows::max_, rows::o, rows::sum;
    using rows::row_address, rows::row_of;
    static constexpr bool IS_E5M2 = SHAPE::CODE == E5M2;
    enum { FLUSH_TILES = 8 };
    static constexpr float LARGEST = 6;  // log2 of P where a maximum is found
    KeyRange full;  // keys that every row of the warpgroup may see, or of the warp
    ItemRing items;
    float ones[4];  // lane 0 of four: the rows' sums since the last flush; others: 0
    int held;       // tiles since then
    bool flushed;   // whether the second level holds anything
    StageRing<SHAPE::K_STAGES> k_tiles;
    StageRing<SHAPE::V_STAGES> v_tiles;
    uint32_t num_queries;

    __device__ Fp8Consumer(const kv8_kernel_args &args, uint32_t base)
        : rows(args, base), num_queries(0) {}

    // The rows' records; Q's codes come with the first tile of K.
    __device__ __forceinline__ void start_rows() {
        barrier_wait(shared + SHAPE::ROWS_BARRIER_AT, num_queries % 2);
        this->rows_slot = num_queries % 2;
        num_queries++;
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(factor[slot])
                         : "r"(row_address(row_of(slot))));
            if (a.soft_cap > 0) factor[slot] = 1.0f;  // the cap leaves log2 units
        }
        if (OPTIONS) {
            full = this->keys_of_all_rows();
        } else {
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(full.end)
                         : "r"(row_address(0, offsetof(RowRecord, end))));
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(full.begin)
                         : "r"(row_address(63, offsetof(RowRecord, begin))));
        }
        held = 0;
        flushed = false;
    }

    // Of 64 keys: half 0 or 1 of a tile.
    __device__ __forceinline__ void start_scores(float (&s)[32], uint32_t q, uint32_t k, int half) {
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            wgmma8_shared<IS_E5M2>(s, row_descriptor_at<D>(q, 32 * i),
                                   row_descriptor_at<D>(k, half * 64 * D + 32 * i), i != 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_output(const uint32_t (&p)[8], uint32_t v, int half) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            wgmma8_registers<IS_E5M2>(o, ones, p + 4 * i,
                                      row_descriptor_at<128>(v, 64 * half + 32 * i),
                                      half > 0 || i > 0 || held > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void pin_output() {
        registers_pin(o);
        registers_pin(ones);
    }
    __device__ __forceinline__ uint32_t k_descriptor() const {
        return matrix_descriptor(shared + SHAPE::K_AT + k_tiles.stage * SHAPE::K_BYTES, 16);
    }
    __device__ __forceinline__ uint32_t v_descriptor() const {
        return matrix_descriptor(shared + SHAPE::V_AT + v_tiles.stage * SHAPE::V_BYTES, 16);
    }
    __device__ __forceinline__ void wait_k() const {
        barrier_wait(SHAPE::barrier(shared, K_FULL, k_tiles.stage), k_tiles.parity);
    }
    __device__ __forceinline__ void wait_v() const {
        barrier_wait(SHAPE::barrier(shared, V_FULL, v_tiles.stage), v_tiles.parity);
    }
    __device__ __forceinline__ void release_k() {
        if (elected()) barrier_arrive(SHAPE::barrier(shared, K_EMPTY, k_tiles.stage));
        k_tiles.next();
    }
    __device__ __forceinline__ void release_v() {
        if (elected()) barrier_arrive(SHAPE::barrier(shared, V_EMPTY, v_tiles.stage));
        v_tiles.next();
    }

    // --- the second level ---

    __device__ __forceinline__ uint32_t sums_address() const {
        return shared + SHAPE::SUMS_AT + index * SHAPE::SUMS_BYTES + 16 * thread();
    }
    __device__ __forceinline__ void flush() {
        const uint32_t at = sums_address();
#pragma unroll
        for (int i = 0; i < NUM_O / 4; i++) {
            float4 x = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
            if (flushed) {
                const uint4 w = load_shared(at + 2048 * i);
                x.x += __uint_as_float(w.x);
                x.y += __uint_as_float(w.y);
                x.z += __uint_as_float(w.z);
                x.w += __uint_as_float(w.w);
            }
            store_shared(at + 2048 * i, __float_as_uint(x.x), __float_as_uint(x.y),
                         __float_as_uint(x.z), __float_as_uint(x.w));
        }
        sum[0] += ones[0] + ones[1];
        sum[1] += ones[2] + ones[3];
        flushed = true;
        held = 0;
    }
    // Both levels into o and sum.
    __device__ __forceinline__ void collect() {
        if (flushed) {
            const uint32_t at = sums_address();
#pragma unroll
            for (int i = 0; i < NUM_O / 4; i++) {
                const uint4 w = load_shared(at + 2048 * i);
                o[4 * i] += __uint_as_float(w.x);
                o[4 * i + 1] += __uint_as_float(w.y);
                o[4 * i + 2] += __uint_as_float(w.z);
                o[4 * i + 3] += __uint_as_float(w.w);
            }
        }
        sum[0] += ones[0] + ones[1];
        sum[1] += ones[2] + ones[3];
    }
    __device__ __forceinline__ void scale_sums(const float (&alpha)[2]) {
        if (flushed) {
            const uint32_t at = sums_address();
#pragma unroll 4
            for (int i = 0; i < NUM_O / 4; i++) {
                const uint4 w = load_shared(at + 2048 * i);
                store_shared(at + 2048 * i, __float_as_uint(__uint_as_float(w.x) * alpha[0]),
                             __float_as_uint(__uint_as_float(w.y) * alpha[0]),
                             __float_as_uint(__uint_as_float(w.z) * alpha[1]),
                             __float_as_uint(__uint_as_float(w.w) * alpha[1]));
            }
        }
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] *= alpha[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < 4; i++) ones[i] *= alpha[i / 2];
        sum[0] *= alpha[0];
        sum[1] *= alpha[1];
    }

    // --- softmax ---

    // The rows' maxima over these keys too; what the sums so far are to be multiplied by.
    __device__ __forceinline__ void raise_maxima(float (&s)[32], float (&alpha)[2]) {
        float top[2] = {-INFINITY, -INFINITY};
        registers_pin(s);  // or the compiler finds maxima of every tile, ahead of the question
#pragma unroll
        for (int i = 0; i < 32; i++)
            top[i / 2 % 2] = max_nan(top[i / 2 % 2], s[i] * factor[i / 2 % 2]);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            top[slot] = max_nan(quad_max_nan(top[slot]) - LARGEST, max_[slot]);
            if (top[slot] == INFINITY) top[slot] = NAN;
            alpha[slot] = exp2_fast(max_[slot] - top[slot]);
            max_[slot] = top[slot];
        }
    }
    // P of 64 keys; whether some code is 448 or NaN.
    __device__ __forceinline__ bool exponentials(const float (&s)[32], uint32_t (&p)[8]) const {
        uint32_t ends = 0;  // bit 7 of each byte: a code of 0x7e, 448, or 0x7f, NaN
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int slot = i % 2, at = 8 * (i / 2) + 2 * slot;
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                x[j] = exp2_fast(fmaf(s[at + 4 * (j / 2) + j % 2], factor[slot], -max_[slot]));
            p[i] = pack_e4m3(x[0], x[1], x[2], x[3]);
            ends |= p[i] + 0x02020202;
        }
        return (ends & 0x80808080) != 0;
    }
    // Whether some code of P is 448, the largest.
    static __device__ __forceinline__ bool has_largest(const uint32_t (&p)[8]) {
        uint32_t largest = 0;  // bit 7 of each byte
#pragma unroll
        for (int i = 0; i < 8; i++) largest |= (p[i] + 0x02020202) & ~(p[i] + 0x01010101);
        return (largest & 0x80808080) != 0;
    }
    __device__ __forceinline__ void hide_scores(float (&s)[32], int half) {
        if (a.soft_cap > 0) this->cap_scores(s);
        if (64 * half + 64 > full.end || 64 * half < full.begin) this->mask_scores(s, 64 * half);
        if (!OPTIONS) return;
        const kv8_prefill_item &item = *item_slot<SHAPE>(items.stage());
        if (a.mask_bits != nullptr && 64 * half + 64 > item.shared_to)
            this->hide_by_mask(s, item, 64 * half);
        if (item_missing<SHAPE>(shared, items.stage())) this->hide_missing(s, item, 64 * half);
    }
    // S to P, of 64 keys from 64 * half on, while products of P `before` are under way. No maximum
    // per tile: where a P reaches e4m3's end, as any does of a row that has none yet, the rows' are
    // found again, and O and the sums follow. NaN, whose row is NaN, is no reason to.
    // For O all warps wait at one place, as wgmma's rules want it.
    __device__ __forceinline__ void softmax(float (&s)[32], uint32_t (&p)[8], uint32_t (&before)[8],
                                            int half) {
        hide_scores(s, half);
        const bool ends = exponentials(s, p);
        bool again = __any_sync(~0u, ends) != 0;
        if (again) again = __any_sync(~0u, has_largest(p)) != 0;
        float alpha[2];
        if (again) raise_maxima(s, alpha);
        wgmma_wait<0>();
        pin_output();
        registers_pin(before);
        if (again) {
            scale_sums(alpha);
            exponentials(s, p);
        }
    }

    // --- an item ---

    // Steps of 64 keys, two a tile. S of the next step and O += P V of this one are started
    // together; the latter is under way in the next step's softmax.
    __device__ __forceinline__ void run_tiles(int tile, int tile_end) {
        float s[32], alpha[2];
        uint32_t p[2][8];
        const uint32_t q = matrix_descriptor(shared + SHAPE::Q_AT + index * SHAPE::Q_BYTES, 16);
        wait_k();
        start_rows();
        uint32_t k = k_descriptor(), v = v_descriptor();
        registers_pin(s);
        wgmma_fence();
        start_scores(s, q, k, 0);
        wgmma_wait<0>();
        registers_pin(s);
        hide_scores(s, 2 * tile);
        raise_maxima(s, alpha);  // there are no sums yet
        exponentials(s, p[0]);
        for (;;) {
            wait_v();
            registers_pin(s);
            registers_pin(p[0]);
            pin_output();
            wgmma_fence();
            start_scores(s, q, k, 1);
            start_output(p[0], v, 0);
            wgmma_wait<1>();
            registers_pin(s);
            release_k();
            if (tile + 1 == tile_end) barrier_arrive(shared + SHAPE::Q_BARRIER_AT);
            softmax(s, p[1], p[0], 2 * tile + 1);
            if (++tile == tile_end) break;
            k = k_descriptor();
            wait_k();
            registers_pin(s);
            registers_pin(p[1]);
            pin_output();
            wgmma_fence();
            start_scores(s, q, k, 0);
            start_output(p[1], v, 1);
            wgmma_wait<1>();
            registers_pin(s);
            softmax(s, p[0], p[1], 2 * tile);
            release_v();
            if (++held == FLUSH_TILES) flush();
            v = v_descriptor();
        }
        registers_pin(p[1]);
        pin_output();
        wgmma_fence();
        start_output(p[1], v, 1);
        wgmma_wait<0>();
        pin_output();
        release_v();
        collect();
    }
    __device__ __forceinline__ void run_item(const kv8_prefill_item &item, int slot) {
        max_[0] = max_[1] = NO_MAXIMUM;
        sum[0] = sum[1] = 0;
        if (item.tile_begin < item.tile_end) {
            run_tiles(item.tile_begin, item.tile_end);
        } else {
#pragma unroll
            for (int i = 0; i < NUM_O; i++) o[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (max_[i] == NO_MAXIMUM) max_[i] = -INFINITY;
        const bool cleared = item_cleared<SHAPE>(shared, slot);
        const ItemView v = view_item(a, item);
        note_broken<SHAPE>(a, shared, slot,
                           item.is_together ? this->finish_together(item, v, cleared)
                                            : this->finish(item, v, cleared));
    }
    __device__ __forceinline__ void run() {
        for (;;) {
            const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
            if (item == nullptr) break;
            run_item(*item, items.stage());
            leave_item<SHAPE>(shared, items);
        }
        resolve_broken<SHAPE>(a, shared);
    }
};

}  // namespace kv8
