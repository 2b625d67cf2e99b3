// prefill_row_state.cuh - the 64 packed query rows of a consumer warpgroup, whatever its
// arithmetic: their state, masks and caps, turns at the tensor cores, the join of split rows, and
// what is written.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include "prefill_shape.cuh"

namespace kv8 {

template <class SHAPE>
struct RowState {
    enum { D = SHAPE::HEAD_DIM, NUM_O = D / 2 };
    const kv8_prefill_args &a;
    uint32_t shared;
    int index, thread, lane;
    int rows_slot = 0;  // of the records of rows; Q that is fetched ahead has two
    // Per lane: rows lane/4 (slot 0) and lane/4 + 8 (slot 1) of the warp's sixteen.
    float factor[2];        // from S to log2 units
    float max_[2], sum[2];  // max_ in log2 units; P and sum are relative to it
    float o[NUM_O];

    __device__ RowState(const kv8_prefill_args &args, uint32_t base)
        : a(args),
          shared(base),
          index(__shfl_sync(~0u, threadIdx.x / 128, 0)),  // uniform
          thread(threadIdx.x % 128),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ int row_of(int slot) const {
        return thread / 32 * 16 + lane / 4 + 8 * slot;  // of the warpgroup's 64
    }
    // Of a row: factor, a word of join(), first key, end of keys.
    __device__ __forceinline__ uint32_t row_address(int row) const {
        return shared + SHAPE::ROWS_AT +
               16 * (64 * (rows_slot * SHAPE::NUM_CONSUMERS + index) + row);
    }

    template <int N>
    __device__ __forceinline__ void cap_scores(float (&s)[N]) const {
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
        for (int i = 0; i < N; i++)
            s[i] = a.soft_cap * tanh_of_exponent(2 * LOG2E * (s[i] * cap_factor[i / 2 % 2]));
    }
    // s: sums of 2N keys from `first` on.
    template <int N>
    __device__ __forceinline__ void mask_scores(float (&s)[N], int first) const {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            int begin, end;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(begin), "=r"(end)
                         : "r"(row_address(row_of(slot)) + 8));
            // What P is 0 of: FP8's factor may be negative.
            const float hidden = SHAPE::FP8 ? copysignf(INFINITY, -factor[slot]) : -INFINITY;
            begin -= first + lane % 4 * 2;
            end -= first + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const int key = i / 2 * 8 + i % 2, at = i / 2 * 4 + 2 * slot + i % 2;
                if (key < begin || key >= end) s[at] = hidden;
            }
        }
    }
    // The tensor cores go from warpgroup to warpgroup; without turns all would compute products at
    // one time and softmax at another.
    __device__ __forceinline__ void wait_turn() const {
        named_barrier_sync(8 + index, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        named_barrier_arrive(8 + (index + 1) % SHAPE::NUM_CONSUMERS, 256);
    }

    // Leaves this piece and returns whether it was the last; then the state is all pieces'.
    __device__ __forceinline__ bool join(const kv8_prefill_item &item) {
        const int64_t group = SHAPE::NUM_CONSUMERS * (int64_t)item.slot + index;
        const int64_t place = group + (int64_t)item.split * SHAPE::NUM_CONSUMERS;
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
            const int64_t at = group + (int64_t)split * SHAPE::NUM_CONSUMERS;
            float keep[2], add[2];
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const float2 other =
                    __ldcg((const float2 *)a.partial_sums + at * 256 + thread + 128 * slot);
                const float top = fmaxf(max_[slot], other.x);
                const float base = top == -INFINITY ? 0.0f : top;
                keep[slot] = exp2_fast(max_[slot] - base);
                add[slot] = exp2_fast(other.x - base);
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

    __device__ __forceinline__ void finish(const kv8_prefill_item &item, const ItemView &v) {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) sum[slot] = quad_sum(sum[slot]);
        if (item.slot >= 0 && !join(item)) return;
        float v_scale = 1.0f;
        if (a.v_scale != nullptr)
            v_scale =
                a.v_scale[v.request * a.v_scale_stride_batch + v.kv_head * a.v_scale_stride_head];
        unsigned spoilt[2];  // lanes that hold something not finite
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = 64 * index + row_of(slot);
            const bool here = row < v.num_rows;
            const bool empty = max_[slot] == -INFINITY && sum[slot] == 0;  // else NaN keys
            float nothing = 0;
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                nothing += 0.0f * o[4 * i + 2 * slot] + 0.0f * o[4 * i + 2 * slot + 1];
            spoilt[slot] = __ballot_sync(~0u, here && nothing != 0);
            if (here) {
                const RowPlace place = place_of(v, row);
                float total = sum[slot];
                if (a.sink_logit != nullptr)
                    total += exp2_fast(a.sink_logit[place.head] * LOG2E - max_[slot]);
                store_row(slot, place.o, empty ? 0.0f : v_scale / total);
                if (a.lse != nullptr && lane % 4 == 0)
                    a.lse[place.lse] =
                        empty ? -INFINITY : (max_[slot] + __log2f(sum[slot])) / LOG2E;
            }
        }
        if (spoilt[0] | spoilt[1]) {
            for (int i = 0; i < 16; i++)
                if (spoilt[i / 8] >> (i % 8 * 4) & 15)
                    redo_row(item, v, 64 * index + thread / 32 * 16 + i, v_scale);
        }
    }

    // Of a row of the item: its query and head, and where its results go.
    struct RowPlace {
        int query, head;
        int64_t o, lse;
    };
    __device__ __forceinline__ RowPlace place_of(const ItemView &v, int row) const {
        RowPlace place;
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
    template <Format CODE>
    static __device__ __forceinline__ float value_of(const void *values, int64_t at) {
        if (CODE == BF16) return __uint_as_float((uint32_t)((const uint16_t *)values)[at] << 16);
        if (CODE == F16) return __half2float(((const __half *)values)[at]);
        if (CODE == INT8) return (float)((const int8_t *)values)[at];
        uint32_t low, high;
        widen<CODE, false>(((const uint8_t *)values)[at], __half2half2(__ushort_as_half(0)), low,
                           high);
        return __half2float(__ushort_as_half((uint16_t)low));
    }
    __device__ __forceinline__ float query_value(int64_t at) const {
        if (SHAPE::FP8) return value_of<E4M3>(a.q, at);
        return a.q_dtype == KV8_PREFILL_BF16 ? value_of<BF16>(a.q, at) : value_of<F16>(a.q, at);
    }
    // A row of which something is not finite, by one warp and key for key: 0 times what V holds at
    // a key that the row may not see, but others of its item may, must not reach it. Rare and slow.
    __device__ __forceinline__ void redo_row(const kv8_prefill_item &item, const ItemView &v,
                                             int row, float v_scale) const {
        const RowPlace place = place_of(v, row);
        float scale = a.score_scale;
        if (a.k_scale != nullptr)
            scale *=
                a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
        const int64_t q_at =
            (int64_t)(v.q_begin + place.query) * a.q_stride_row + place.head * a.q_stride_head;
        if (SHAPE::FP8) scale *= q_scale_of(a, v, place.query, place.head);
        float q[D / 32], out[D / 32], top = -INFINITY, total = 0;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            q[i] = query_value(q_at + lane + 32 * i);
            out[i] = 0;
        }
        const int end = row_end(a, v, place.query);
        for (int key = row_begin(a, v, place.query); key < end; key++) {
            const int nth = (int)divide(key, a.page_magic, a.page_shift);
            const int64_t page =
                (a.page_indptr != nullptr ? a.page_indices : a.block_table)[item.pages_at + nth];
            const int64_t slot = key - nth * a.page_size;
            const uint8_t *const k =
                a.k.data + 16 * (page * a.k.stride_page + slot * a.k.stride_slot +
                                 (int64_t)v.kv_head * a.k.stride_head);
            const uint8_t *const values =
                a.v.data + 16 * (page * a.v.stride_page + slot * a.v.stride_slot +
                                 (int64_t)v.kv_head * a.v.stride_head);
            float score = 0, weight = 1;
#pragma unroll
            for (int i = 0; i < D / 32; i++)
                score += q[i] * value_of<SHAPE::CODE>(k, lane + 32 * i);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
            score *= scale;
            if (SHAPE::CODE == INT8) {
                score *= row_scale_of(a.k, page, slot, v.kv_head);
                weight = row_scale_of(a.v, page, slot, v.kv_head);
            }
            if (a.soft_cap > 0)
                score = a.soft_cap * tanh_of_exponent(2 * LOG2E * (score / a.soft_cap));
            const float higher = fmaxf(top, score);  // NaN is left to p
            const float base = higher == -INFINITY ? 0.0f : higher;
            const float keep = exp2_fast(top - base), p = exp2_fast(score - base);
            top = higher;
            total = total * keep + p;
#pragma unroll
            for (int i = 0; i < D / 32; i++)
                out[i] = out[i] * keep + p * weight * value_of<SHAPE::CODE>(values, lane + 32 * i);
        }
        const float sink = a.sink_logit != nullptr ? a.sink_logit[place.head] : -INFINITY;
        const float divisor = total + exp2_fast(sink * LOG2E - top);
        const bool nothing = total == 0 || sink == INFINITY;  // whatever V holds
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            store_value(place.o + lane + 32 * i, nothing ? 0.0f : out[i] * (v_scale / divisor));
        if (a.lse != nullptr && lane == 0) a.lse[place.lse] = (top + __log2f(total)) / LOG2E;
    }
    __device__ __forceinline__ float row_scale_of(const kv8_prefill_pages &p, int64_t page,
                                                  int64_t slot, int head) const {
        return __half2float(
            __ushort_as_half(p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                                         head * p.scale_stride_head]));
    }
    __device__ __forceinline__ void store_row(int slot, int64_t at, float weight) const {
        if (SHAPE::FP8)
            store_runs(slot, at, weight);
        else
            store_pairs(slot, at, weight);
    }
    // wgmma's own columns: a lane has two neighbours of every eight.
    __device__ __forceinline__ void store_pairs(int slot, int64_t at, float weight) const {
        at += lane % 4 * 2;
        if (a.o_dtype != KV8_PREFILL_F32 && a.o_aligned) {  // as a rule
            uint16_t *const to = (uint16_t *)a.o + at;
            const bool bf16 = a.o_dtype == KV8_PREFILL_BF16;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                const float x = o[4 * i + 2 * slot] * weight, y = o[4 * i + 2 * slot + 1] * weight;
                *(uint32_t *)(to + 8 * i) = bf16 ? pack<true>(x, y) : pack<false>(x, y);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            store_pair(at + 8 * i, o[4 * i + 2 * slot] * weight, o[4 * i + 2 * slot + 1] * weight);
    }
    // FP8: column 16m + 8e + r of the product is dimension 16m + 2r + e, so that a lane has four
    // neighbours of every 16.
    __device__ __forceinline__ void store_runs(int slot, int64_t at, float weight) const {
        at += lane % 4 * 4;
#pragma unroll
        for (int m = 0; m < D / 16; m++) {
            const float *const even = o + 8 * m + 2 * slot, *const odd = even + 4;
            const float x[4] = {even[0] * weight, odd[0] * weight, even[1] * weight,
                                odd[1] * weight};
            store_four(at + 16 * m, x);
        }
    }
    __device__ __forceinline__ void store_four(int64_t at, const float (&x)[4]) const {
        if (!a.o_aligned) {
#pragma unroll
            for (int i = 0; i < 4; i++) store_value(at + i, x[i]);
        } else if (a.o_dtype == KV8_PREFILL_F32) {
            *(float4 *)((float *)a.o + at) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            const bool bf16 = a.o_dtype == KV8_PREFILL_BF16;
            *(uint2 *)((uint16_t *)a.o + at) =
                make_uint2(bf16 ? pack<true>(x[0], x[1]) : pack<false>(x[0], x[1]),
                           bf16 ? pack<true>(x[2], x[3]) : pack<false>(x[2], x[3]));
        }
    }
    __device__ __forceinline__ void store_pair(int64_t at, float x, float y) const {
        if (a.o_dtype == KV8_PREFILL_F32) {
            float *const to = (float *)a.o + at;
            if (a.o_aligned) {
                *(float2 *)to = make_float2(x, y);
            } else {
                to[0] = x;
                to[1] = y;
            }
        } else {
            uint16_t *const to = (uint16_t *)a.o + at;
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
};

}  // namespace kv8
