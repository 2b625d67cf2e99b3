/* prefill_math.cuh - a math warpgroup: 64 packed query rows of an item through both products and
 * the softmax, the join of split rows, and what is written.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_MATH_CUH
#define KV8_PREFILL_MATH_CUH

#include <cuda_bf16.h>

#include "prefill_shape.cuh"

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <bool BF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
/* 1 - 2 / (1 + e^2x): absolute error of a few 1e-7, where tanh.approx has 5e-4. */
__device__ __forceinline__ float tanh_exact(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * 2.885390082f));
}

template <class SHAPE>
struct math_warpgroup {
    enum { D = SHAPE::HEAD_DIM, NUM_O = D / 2 };
    static const bool BF16 = code_traits<SHAPE::CODE>::bf16;
    const kv8_prefill_args &a;
    uint32_t shared;
    int index, thread, lane;
    ring<SHAPE::NUM_STAGES> tiles; /* of K; V's are one behind while S(t + 1) is computed */
    int full_from, full_to;        /* keys that every row of the warpgroup may see */
    /* Per lane: rows lane/4 (slot 0) and lane/4 + 8 (slot 1) of the warp's sixteen. */
    float factor[2];       /* from S to log2 units */
    float max_[2], sum[2]; /* max_ in log2 units; P and sum are relative to it */
    float o[NUM_O];

    __device__ math_warpgroup(const kv8_prefill_args &args, uint32_t base)
        : a(args),
          shared(base),
          index(threadIdx.x / 128),
          thread(threadIdx.x % 128),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ uint32_t barrier(int kind, int stage) const {
        return shared + SHAPE::BARRIERS_AT + 8 * (kind * SHAPE::NUM_STAGES + stage);
    }
    __device__ __forceinline__ uint32_t q_address() const {
        return shared + SHAPE::Q_AT + index * SHAPE::COLUMNS * Q_BYTES;
    }
    __device__ __forceinline__ int row_of(int slot) const {
        return thread / 32 * 16 + lane / 4 + 8 * slot; /* of the warpgroup's 64 */
    }
    /* Of a row: factor, a word of join(), first key, end of keys. */
    __device__ __forceinline__ uint32_t row_address(int row) const {
        return shared + SHAPE::ROWS_AT + 16 * (64 * index + row);
    }

    /* Q into shared memory, two threads a row. bf16 meets f16 codes as f16 times a power of two of
     * the row, which takes its largest value to [2^13, 2^14): exact but for values 2^27 below the
     * row's largest. A negative or zero factor goes into Q, so that maxima stay maxima. */
    __device__ __forceinline__ void load_q(const item_view &v) {
        const int row = thread / 2, half = thread % 2;
        const int packed = v.row_begin + min(64 * index + row, v.num_rows - 1);
        const int query = query_of(a, packed);
        const int head = v.kv_head * a.group_size + packed - query * a.group_size;
        const uint16_t *const q = (const uint16_t *)a.q +
                                  (int64_t)(v.q_begin + query) * a.q_stride_row +
                                  head * a.q_stride_head + half * (D / 2);
        const bool q_bf16 = a.q_dtype == KV8_PREFILL_BF16;
        float scale = a.score_scale;
        if (a.k_scale != 0)
            scale *=
                a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
        float sign = scale < 0 ? -1.0f : scale == 0 ? 0.0f : 1.0f;
        uint4 raw[D / 16];
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            if (a.q_aligned)
                raw[i] = *(const uint4 *)(q + 8 * i);
            else
                raw[i] = make_uint4(
                    q[8 * i] | q[8 * i + 1] << 16, q[8 * i + 2] | q[8 * i + 3] << 16,
                    q[8 * i + 4] | q[8 * i + 5] << 16, q[8 * i + 6] | q[8 * i + 7] << 16);
        }
        float power = 1.0f;
        if (q_bf16 && !BF16) {
            uint32_t largest = 0; /* of the magnitudes' bits, which sort as the values do */
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                const uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    largest = max(largest, max(w[j] & 0x7FFF, (w[j] >> 16) & 0x7FFF));
            }
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            const int exponent = (int)(largest >> 7) - 127;
            if (exponent < 128 && exponent > -127)
                power = __int_as_float((127 + max(min(13 - exponent, 100), -100)) << 23);
        }
        if (half == 0) {
            const float f = sign == 0 ? 1.0f : fabsf(scale) / power;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(row_address(row)), "f"(f) : "memory");
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(row_address(row) + 8),
                         "r"(row_begin(a, v, query)), "r"(row_end(a, v, query))
                         : "memory");
        }
        power *= sign;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
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
                w[j] = pack<BF16>(low * power, high * power);
            }
            const int column = half * (D / 2) + 8 * i;
            store_shared(q_address() + column / 64 * Q_BYTES + 128 * row +
                             (((column % 64) / 8) ^ (row % 8)) * 16,
                         w[0], w[1], w[2], w[3]);
        }
        fence_stores_before_wgmma();
        named_barrier_sync(1 + index, 128);
    }

    __device__ __forceinline__ void start_item(const item_view &v) {
        load_q(v);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(factor[slot])
                         : "r"(row_address(row_of(slot))));
            if (a.soft_cap > 0) factor[slot] = 1.0f; /* the cap leaves log2 units */
            max_[slot] = -INFINITY;
            sum[slot] = 0;
        }
        full_to = row_end(a, v, query_of(a, v.row_begin + min(64 * index, v.num_rows - 1)));
        full_from =
            row_begin(a, v, query_of(a, v.row_begin + min(64 * index + 63, v.num_rows - 1)));
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] = 0;
    }

    __device__ __forceinline__ void start_scores(float (&s)[64], uint32_t q, uint32_t k) {
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            wgmma_shared_n128<BF16>(s, descriptor_at(q, i / 4 * Q_BYTES + i % 4 * 32),
                                    descriptor_at(k, i / 4 * TILE_BYTES + i % 4 * 32), i != 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_output(const uint32_t (&p)[32], uint32_t v) {
#pragma unroll
        for (int i = 0; i < 8; i++) wgmma_registers<BF16>(o, p + 4 * i, descriptor_at(v, i * 2048));
        wgmma_commit();
    }
    __device__ __forceinline__ uint32_t k_descriptor(uint32_t stage) const {
        return matrix_descriptor(shared + SHAPE::K_AT + stage * (SHAPE::COLUMNS * TILE_BYTES), 16);
    }
    __device__ __forceinline__ uint32_t v_descriptor(uint32_t stage) const {
        return matrix_descriptor(shared + SHAPE::V_AT + stage * (SHAPE::COLUMNS * TILE_BYTES),
                                 TILE_BYTES);
    }
    __device__ __forceinline__ void release_k(uint32_t stage) {
        if (SHAPE::K_ARRIVALS == 32 || lane == 0) barrier_arrive(barrier(1, stage));
    }
    __device__ __forceinline__ void release_v(uint32_t stage) {
        if (lane == 0) barrier_arrive(barrier(3, stage));
    }

    /* int8: a key's scale is its column's. */
    __device__ __forceinline__ void scale_scores(float (&s)[64], uint32_t stage) const {
        const uint32_t at = shared + SHAPE::K_SCALES_AT + stage * TILE_KEYS * 2 + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            uint32_t pair;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(at + 16 * i) : "memory");
            const float2 scale = __half22float2(*(const __half2 *)&pair);
            s[4 * i] *= scale.x;
            s[4 * i + 1] *= scale.y;
            s[4 * i + 2] *= scale.x;
            s[4 * i + 3] *= scale.y;
        }
    }
    __device__ __forceinline__ void cap_scores(float (&s)[64]) const {
        const float inverse = __frcp_rn(a.soft_cap);
        float cap_factor[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(cap_factor[slot])
                         : "r"(row_address(row_of(slot))));
            cap_factor[slot] *= inverse;
        }
#pragma unroll
        for (int i = 0; i < 64; i++) s[i] = a.soft_cap * tanh_exact(s[i] * cap_factor[i / 2 % 2]);
    }
    __device__ __forceinline__ void mask_scores(float (&s)[64], int tile) const {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            int begin, end;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(begin), "=r"(end)
                         : "r"(row_address(row_of(slot)) + 8));
            begin -= tile * TILE_KEYS + lane % 4 * 2;
            end -= tile * TILE_KEYS + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = i / 2 * 8 + i % 2, at = i / 2 * 4 + 2 * slot + i % 2;
                if (key < begin || key >= end) s[at] = -INFINITY;
            }
        }
    }
    /* The rows' maxima over this tile too; O and the sums follow. */
    __device__ __forceinline__ void raise_maxima(const float (&s)[64]) {
        float top[2] = {s[0], s[2]}, alpha[2];
#pragma unroll
        for (int i = 0; i < 64; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            top[slot] = fmaxf(quad_max(top[slot]) * factor[slot], max_[slot]);
            alpha[slot] = max_[slot] == -INFINITY ? 0.0f : exp2_approx(max_[slot] - top[slot]);
            max_[slot] = top[slot];
            sum[slot] *= alpha[slot];
        }
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] *= alpha[i / 2 % 2];
    }
    /* S to P in 16 bits. A row's maximum is found in the first tile it sees and then only where a
     * lane's sum of a tile reaches 2^15, near f16's end: P may be as large, the final division
     * takes it back, and the tiles between cost no comparisons, shuffles or rescaling. */
    template <bool FIRST>
    __device__ __forceinline__ void softmax(float (&s)[64], uint32_t (&p)[32], int tile) {
        if (a.soft_cap > 0) cap_scores(s);
        if ((tile + 1) * TILE_KEYS > full_to || tile * TILE_KEYS < full_from) mask_scores(s, tile);
        if (FIRST) raise_maxima(s);
        for (bool raised = FIRST;; raised = true) {
            float part[2][2] = {{0, 0}, {0, 0}};
            const float offset[2] = {max_[0] == -INFINITY ? 0.0f : max_[0],
                                     max_[1] == -INFINITY ? 0.0f : max_[1]};
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int slot = i % 2;
                const float x = fmaf(s[2 * i], factor[slot], -offset[slot]);
                const float y = fmaf(s[2 * i + 1], factor[slot], -offset[slot]);
                const float low = exp2_approx(x);
                const float high = exp2_approx(y);
                part[slot][0] += low;
                part[slot][1] += high;
                p[i] = pack<BF16>(low, high);
            }
            const float add[2] = {part[0][0] + part[0][1], part[1][0] + part[1][1]};
            const bool fits = add[0] < 32768.0f && add[1] < 32768.0f && max_[0] != -INFINITY &&
                              max_[1] != -INFINITY;
            if (raised || __all_sync(~0u, fits)) {
                sum[0] += add[0];
                sum[1] += add[1];
                break;
            }
            raise_maxima(s);
        }
    }

    /* The tensor cores go from warpgroup to warpgroup; without turns all would compute products at
     * one time and softmax at another. */
    __device__ __forceinline__ void wait_turn() const {
        named_barrier_sync(8 + index, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        named_barrier_arrive(8 + (index + 1) % SHAPE::NUM_MATH, 256);
    }

    __device__ __forceinline__ void run(const kv8_prefill_item &item) {
        int tile, tile_end;
        {
            start_item(view_item(a, item));
            tile = item.tile_begin;
            tile_end = item.tile_end;
        }
        if (tile < tile_end) {
            float s[64];
            uint32_t p[32];
            bool v_here = false, k_here = false; /* asked before the softmax, needed after */
            const uint32_t q = matrix_descriptor(q_address(), 16);
            uint32_t k = k_descriptor(tiles.stage());
            barrier_wait(barrier(0, tiles.stage()), tiles.parity());
            wait_turn();
            registers_pin(s);
            wgmma_fence();
            start_scores(s, q, k);
            pass_turn();
            wgmma_wait<0>();
            registers_pin(s);
            if (SHAPE::CODE == CODE_INT8) scale_scores(s, tiles.stage());
            release_k(tiles.stage());
            softmax<true>(s, p, tile);
            for (;;) {
                const ring<SHAPE::NUM_STAGES> v_tiles = tiles;
                const uint32_t v = v_descriptor(v_tiles.stage());
                tiles.next();
                if (++tile == tile_end) {
                    barrier_wait(barrier(2, v_tiles.stage()), v_tiles.parity());
                    wait_turn();
                    registers_pin(o);
                    registers_pin(p);
                    wgmma_fence();
                    start_output(p, v);
                    pass_turn();
                    wgmma_wait<0>();
                    registers_pin(o);
                    release_v(v_tiles.stage());
                    break;
                }
                k = k_descriptor(tiles.stage());
                if (!v_here) barrier_wait(barrier(2, v_tiles.stage()), v_tiles.parity());
                if (!k_here) barrier_wait(barrier(0, tiles.stage()), tiles.parity());
                wait_turn();
                registers_pin(s);
                registers_pin(o);
                registers_pin(p);
                wgmma_fence();
                start_output(p, v);
                start_scores(s, q, k);
                pass_turn();
                wgmma_wait<1>();
                registers_pin(o);
                release_v(v_tiles.stage());
                wgmma_wait<0>();
                registers_pin(s);
                registers_pin(p);
                if (SHAPE::CODE == CODE_INT8) scale_scores(s, tiles.stage());
                release_k(tiles.stage());
                v_here = barrier_test(barrier(2, tiles.stage()), tiles.parity());
                ring<SHAPE::NUM_STAGES> next_tiles = tiles;
                next_tiles.next();
                k_here = barrier_test(barrier(0, next_tiles.stage()), next_tiles.parity());
                softmax<false>(s, p, tile);
            }
        }
        finish(item, view_item(a, item));
    }

    /* Leaves this piece and returns whether it was the last; then the state is all pieces'. */
    __device__ __forceinline__ bool join(const kv8_prefill_item &item) {
        const int64_t group = SHAPE::NUM_MATH * (int64_t)item.slot + index;
        const int64_t place = group + (int64_t)item.split * SHAPE::NUM_MATH;
        float *const mine = a.partials + place * (64 * D) + thread;
        float2 *const my_sums = (float2 *)a.partial_sums + place * 256 + thread;
#pragma unroll
        for (int i = 0; i < NUM_O; i++) mine[128 * i] = o[i];
#pragma unroll
        for (int slot = 0; slot < 2; slot++)
            my_sums[128 * slot] = make_float2(max_[slot], sum[slot]);
        __threadfence();
        named_barrier_sync(1 + index, 128);
        const uint32_t flag = row_address(0) + 4;
        if (thread == 0) {
            uint32_t *const arrivals = a.arrivals + group;
            const uint32_t before = atomicAdd(arrivals, 1);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
        }
        named_barrier_sync(1 + index, 128);
        uint32_t before;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
        if (before + 1 != (uint32_t)item.num_splits) return false;
        __threadfence();
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] = 0;
        max_[0] = max_[1] = -INFINITY;
        sum[0] = sum[1] = 0;
        for (int split = 0; split < item.num_splits; split++) {
            const int64_t at = group + (int64_t)split * SHAPE::NUM_MATH;
            float keep[2], add[2];
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const float2 other =
                    __ldcg((const float2 *)a.partial_sums + at * 256 + thread + 128 * slot);
                const float top = fmaxf(max_[slot], other.x);
                const float base = top == -INFINITY ? 0.0f : top;
                keep[slot] = exp2_approx(max_[slot] - base);
                add[slot] = exp2_approx(other.x - base);
                max_[slot] = top;
                sum[slot] = sum[slot] * keep[slot] + other.y * add[slot];
            }
#pragma unroll
            for (int i = 0; i < NUM_O; i++)
                o[i] = o[i] * keep[i / 2 % 2] +
                       __ldcg(a.partials + at * (64 * D) + thread + 128 * i) * add[i / 2 % 2];
        }
        return true;
    }

    __device__ __forceinline__ void finish(const kv8_prefill_item &item, const item_view &v) {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) sum[slot] = quad_sum(sum[slot]);
        if (item.slot >= 0 && !join(item)) return;
        float v_scale = 1.0f;
        if (a.v_scale != 0)
            v_scale =
                a.v_scale[v.request * a.v_scale_stride_batch + v.kv_head * a.v_scale_stride_head];
        unsigned spoilt[2]; /* lanes that hold something not finite */
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = 64 * index + row_of(slot);
            const bool here = row < v.num_rows;
            const bool empty = max_[slot] == -INFINITY && sum[slot] == 0; /* else NaN keys */
            float nothing = 0;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                nothing += 0.0f * o[4 * i + 2 * slot] + 0.0f * o[4 * i + 2 * slot + 1];
            spoilt[slot] = __ballot_sync(~0u, here && nothing != 0);
            if (here) {
                const row_place place = place_of(v, row);
                float total = sum[slot];
                if (a.sink_logit != 0)
                    total += exp2_approx(a.sink_logit[place.head] * LOG2_E - max_[slot]);
                store_row(slot, place.o, empty ? 0.0f : v_scale / total);
                if (a.lse != 0 && lane % 4 == 0)
                    a.lse[place.lse] =
                        empty ? -INFINITY : (max_[slot] + __log2f(sum[slot])) / LOG2_E;
            }
        }
        if (spoilt[0] | spoilt[1]) {
            for (int i = 0; i < 16; i++)
                if (spoilt[i / 8] >> (i % 8 * 4) & 15)
                    redo_row(item, v, 64 * index + thread / 32 * 16 + i, v_scale);
        }
    }

    static constexpr float LOG2_E = 1.4426950408889634f;
    /* Of a row of the item: its query and head, and where its results go. */
    struct row_place {
        int query, head;
        int64_t o, lse;
    };
    __device__ __forceinline__ row_place place_of(const item_view &v, int row) const {
        row_place place;
        place.query = query_of(a, v.row_begin + row);
        place.head = v.kv_head * a.group_size + v.row_begin + row - place.query * a.group_size;
        const int64_t at = v.q_begin + place.query;
        place.o = at * a.o_stride_row + place.head * a.o_stride_head;
        place.lse = at * a.num_qo_heads + place.head;
        return place;
    }
    __device__ __forceinline__ void store_value(int64_t at, float x) const {
        if (a.o_dtype == KV8_PREFILL_F32)
            ((float *)a.o)[at] = x;
        else
            ((uint16_t *)a.o)[at] =
                (uint16_t)(a.o_dtype == KV8_PREFILL_BF16 ? pack<true>(x, x) : pack<false>(x, x));
    }
    static __device__ __forceinline__ float value_of(const uint8_t *row, int d) {
        if (SHAPE::CODE == CODE_BF16)
            return __uint_as_float((uint32_t)((const uint16_t *)row)[d] << 16);
        if (SHAPE::CODE == CODE_F16) return __half2float(((const __half *)row)[d]);
        if (SHAPE::CODE == CODE_INT8) return (float)((const int8_t *)row)[d];
        uint32_t low, high;
        widen<SHAPE::CODE, false>(row[d], __half2half2(__ushort_as_half(0)), low, high);
        return __half2float(__ushort_as_half((uint16_t)low));
    }
    /* A row of which something is not finite, by one warp and key for key: 0 times what V holds at
     * a key that the row may not see, but others of its item may, must not reach it. Rare and slow.
     */
    __device__ __forceinline__ void redo_row(const kv8_prefill_item &item, const item_view &v,
                                             int row, float v_scale) const {
        const row_place place = place_of(v, row);
        float scale = a.score_scale;
        if (a.k_scale != 0)
            scale *=
                a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
        const int64_t q_at =
            (int64_t)(v.q_begin + place.query) * a.q_stride_row + place.head * a.q_stride_head;
        float q[D / 32], out[D / 32], top = -INFINITY, total = 0;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const uint16_t code = ((const uint16_t *)a.q)[q_at + lane + 32 * i];
            q[i] = a.q_dtype == KV8_PREFILL_BF16 ? __uint_as_float((uint32_t)code << 16)
                                                 : __half2float(__ushort_as_half(code));
            out[i] = 0;
        }
        const int end = row_end(a, v, place.query);
        for (int key = row_begin(a, v, place.query); key < end; key++) {
            const int nth = (int)divide(key, a.page_magic, a.page_shift);
            const int64_t page =
                (a.page_indptr != 0 ? a.page_indices : a.block_table)[item.pages_at + nth];
            const int64_t slot = key - nth * a.page_size;
            const uint8_t *const k =
                a.k.data + 16 * (page * a.k.stride_page + slot * a.k.stride_slot +
                                 (int64_t)v.kv_head * a.k.stride_head);
            const uint8_t *const values =
                a.v.data + 16 * (page * a.v.stride_page + slot * a.v.stride_slot +
                                 (int64_t)v.kv_head * a.v.stride_head);
            float score = 0, weight = 1;
#pragma unroll
            for (int i = 0; i < D / 32; i++) score += q[i] * value_of(k, lane + 32 * i);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
            score *= scale;
            if (SHAPE::CODE == CODE_INT8) {
                score *= row_scale_of(a.k, page, slot, v.kv_head);
                weight = row_scale_of(a.v, page, slot, v.kv_head);
            }
            if (a.soft_cap > 0) score = a.soft_cap * tanh_exact(score / a.soft_cap);
            const float higher = fmaxf(top, score); /* NaN is left to p */
            const float base = higher == -INFINITY ? 0.0f : higher;
            const float keep = exp2_approx(top - base), p = exp2_approx(score - base);
            top = higher;
            total = total * keep + p;
#pragma unroll
            for (int i = 0; i < D / 32; i++)
                out[i] = out[i] * keep + p * weight * value_of(values, lane + 32 * i);
        }
        const float sink = a.sink_logit == 0 ? -INFINITY : a.sink_logit[place.head];
        const bool empty = total == 0 || sink == INFINITY; /* whatever was seen */
        const float weight = v_scale / (total + exp2_approx(sink * LOG2_E - top));
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            store_value(place.o + lane + 32 * i, empty ? 0.0f : out[i] * weight);
        if (a.lse != 0 && lane == 0) a.lse[place.lse] = (top + __log2f(total)) / LOG2_E;
    }
    __device__ __forceinline__ float row_scale_of(const kv8_prefill_pages &p, int64_t page,
                                                  int64_t slot, int head) const {
        return __half2float(
            __ushort_as_half(p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                                         head * p.scale_stride_head]));
    }
    __device__ __forceinline__ void store_row(int slot, int64_t at, float weight) const {
        at += lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float x = o[4 * i + 2 * slot] * weight, y = o[4 * i + 2 * slot + 1] * weight;
            if (a.o_dtype == KV8_PREFILL_F32) {
                float *const to = (float *)a.o + at + 8 * i;
                if (a.o_aligned) {
                    *(float2 *)to = make_float2(x, y);
                } else {
                    to[0] = x;
                    to[1] = y;
                }
            } else {
                uint16_t *const to = (uint16_t *)a.o + at + 8 * i;
                const uint32_t pair =
                    a.o_dtype == KV8_PREFILL_BF16 ? pack<true>(x, y) : pack<false>(x, y);
                if (a.o_aligned) {
                    *(uint32_t *)to = pair;
                } else {
                    to[0] = (uint16_t)pair;
                    to[1] = (uint16_t)(pair >> 16);
                }
            }
        }
    }
};

#endif
