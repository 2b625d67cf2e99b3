// decode_close.cuh - the end of a piece: slices joined, pieces joined, results written.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode_walk.cuh"

namespace kv8 {

// Results move in the order of MMA fragments. Item i of a block's heads: fragment i / 32 (head,
// then m-tile, then n-tile) of lane i % 32: two rows (x, y) at two dims, as {x d, y d, x d', y d'}.
template <class C>
struct Item {
    int head, row, dim, slot_row;  // head of the block; the first row and dim of each pair
    __device__ explicit Item(int i) {
        const int lane = i % 32, fragment = i / 32 % C::FRAGMENTS;
        head = i / 32 / C::FRAGMENTS;
        row = fragment % C::NT * 8 + lane % 4 * 2;
        dim = C::V::dim(fragment / C::NT, lane / 4);
        slot_row = head * C::ROWS + row;
    }
};

// What two rows have come to, relative to their maxima, in base 2.
struct Part {
    float4 o;
    float2 max, sum;
};
__device__ inline Part no_part() {
    return {{0, 0, 0, 0}, {NO_KEY, NO_KEY}, {0, 0}};
}
__device__ inline void add_weighted(float4 &into, const float4 &from, float2 w) {
    into.x += from.x * w.x;
    into.y += from.y * w.y;
    into.z += from.z * w.x;
    into.w += from.w * w.y;
}

// What the end of a row needs: its sink and the scale of V, as they are given.
struct RowEnd {
    float sink, v_scale;
};
// Asks for those of the rows of a piece and one head, a row each lane. Without a sink and a scale
// nothing is asked for, nor read later.
__device__ inline void copy_row_ends(const kv8_decode_args &a, const Piece &p, int head,
                                     RowEnd *ends) {
    const int lane = threadIdx.x % 32, row = p.row_begin + lane;
    if (lane >= p.num_rows) return;
    const uint32_t to = smem_address(ends + lane);
    if (a.sink_logit != nullptr)
        copy4(to,
              a.sink_logit + head * a.group_size + row - divide(row, a.by_group) * a.group_size);
    if (a.v_scale != nullptr)
        copy4(to + 4,
              a.v_scale + p.request.index * a.v_scale_stride_batch + head * a.v_scale_stride_head);
}
__device__ inline RowEnd usable(const kv8_decode_args &a, const RowEnd &end) {
    constexpr float LOG2E = 1.4426950408889634f;
    return {a.sink_logit == nullptr ? -INFINITY : end.sink * LOG2E,
            a.v_scale == nullptr ? 1.0f : end.v_scale};
}

__device__ inline void store2(const kv8_decode_args &a, int64_t at, float x, float y) {
    if (a.o_dtype == 1) {  // f32
        float *const o = static_cast<float *>(a.o) + at;
        o[0] = x, o[1] = y;
        return;
    }
    uint16_t *const o = static_cast<uint16_t *>(a.o) + at;
    const uint32_t both = a.o_dtype == BF16 ? pack_bf16(x, y) : pack_f16(x, y);
    o[0] = uint16_t(both), o[1] = uint16_t(both >> 16);
}

// The end of a row at two dims: the sink joins the denominator, once; lse never has it.
__device__ inline void finish(const kv8_decode_args &a, const Request &r, int head, int row,
                              int dim, const RowEnd &end, float x, float y, float max, float sum) {
    constexpr float LN2 = 0.6931471805599453f;
    const int token = divide(row, a.by_group),
              qo_head = head * a.group_size + row - token * a.group_size;
    const int64_t q_row = r.qo_begin + token;
    const float top = fmaxf(max, end.sink);
    const float weight = exp2_fast(max - top);
    const float denominator = sum * weight + exp2_fast(end.sink - top);
    const bool empty = sum == 0 || end.sink == INFINITY;
    const float f = __fdividef(weight, denominator) * end.v_scale;
    store2(a, q_row * a.o_stride_row + qo_head * a.o_stride_head + dim, empty ? 0.0f : x * f,
           empty ? 0.0f : y * f);
    if (a.lse != nullptr && dim == 0)
        a.lse[q_row * a.num_qo_heads + qo_head] = sum == 0 ? -INFINITY : (max + __log2f(sum)) * LN2;
}
// One stored element.
template <Format F>
__device__ inline float widen_one(const uint8_t *row, int d) {
    if constexpr (F == BF16)
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(row)[d]);
    else if constexpr (F == F16)
        return __half2float(reinterpret_cast<const __half *>(row)[d]);
    else if constexpr (F == E5M2)
        return __half2float(__ushort_as_half(static_cast<unsigned short>(row[d] << 8)));
    else if constexpr (F == INT8)
        return static_cast<float>(static_cast<int8_t>(row[d]));
    else
        return 0;  // e4m3 has no infinity, and its NaN needs no second look
}

// The sum of one row and dim came out NaN while its weights are numbers. That is right where a NaN
// or infinities of both signs are visible; but a product of 0, a weight too small for f16 or the
// rest of a split one, and an infinity is NaN too, where the sum is infinite. Looks at every
// visible value again.
template <class C>
__device__ __noinline__ float look_again(const kv8_decode_args &a, const Request r, int head,
                                         int row, int dim) {
    const int token = divide(row, a.by_group);
    const KeyRange keys = visible_keys(a, r, token);
    const uint16_t *const q = static_cast<const uint16_t *>(a.q) +
                              (r.qo_begin + token) * a.q_stride_row +
                              (head * a.group_size + row - token * a.group_size) * a.q_stride_head;
    const auto row_scale = [&](const kv8_decode_pages &p, int64_t page, int slot) {
        return C::F == INT8
                   ? __half2float(__ushort_as_half(
                         p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                                     head * p.scale_stride_head]))
                   : 1.0f;
    };
    const int32_t *const pages = request_pages(a, r.index, load_lengths(a, r.index));
    float sum = 0;
    for (int key = keys.begin; key < keys.end; key++) {
        if (!mask_bit(a, r, token, key)) continue;
        const int index = key / a.page_size, slot = key - index * a.page_size;
        const int64_t page = pages[index];
        const uint8_t *const v =
            a.v.data + page * a.v.stride_page + slot * a.v.stride_slot + head * a.v.stride_head;
        const float value = widen_one<C::F>(v, dim) * row_scale(a.v, page, slot);
        if (isfinite(value)) continue;
        sum += value;  // two signs make NaN, and NaN stays
        if (a.soft_cap > 0) continue;
        const uint8_t *const k =
            a.k.data + page * a.k.stride_page + slot * a.k.stride_slot + head * a.k.stride_head;
        float score = 0;  // of -inf: weight 0 of an infinity
        for (int d = 0; d < C::DIM; d++)
            score +=
                widen_one<C::F>(k, d) * (a.q_dtype == BF16 ? __uint_as_float(uint32_t(q[d]) << 16)
                                                           : __half2float(__ushort_as_half(q[d])));
        if (score * a.score_scale * row_scale(a.k, page, slot) == -INFINITY) return NAN;
    }
    return sum == 0 ? NAN : sum;
}

template <class C>
__device__ float sure(const kv8_decode_args &a, const Request &r, int head, int row, int dim,
                      float x, float sum) {
    if (C::F == E4M3 || !isnan(x) || isnan(sum)) return x;
    return look_again<C>(a, r, head, row, dim);
}

template <class C>
__device__ void finish_item(const kv8_decode_args &a, const Piece &p, const Item<C> &item,
                            const RowEnd (&ends)[2], const Part &part) {
    const int head = p.head_begin + item.head;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int row = p.row_begin + item.row + n;
        if (item.row + n >= p.num_rows) continue;
        const float sum = n == 0 ? part.sum.x : part.sum.y;
        const float x = n == 0 ? part.o.x : part.o.y, y = n == 0 ? part.o.z : part.o.w;
        finish(a, p.request, head, row, item.dim, ends[n],
               sure<C>(a, p.request, head, row, item.dim, x, sum),
               sure<C>(a, p.request, head, row, item.dim + 1, y, sum),
               n == 0 ? part.max.x : part.max.y, sum);
    }
}

// The joined results of warps, the first at `first`, each `step` bytes behind the one before:
// fragment f of a head, this lane's part.
template <class C>
__device__ Part join_slices(const uint8_t *first, int step, const uint8_t *end, int row, int f) {
    Part part = no_part();
    const int maxima = C::FRAGMENTS * 512 + row * 4, o = (f * 32 + threadIdx.x % 32) * 16;
#pragma unroll 4
    for (const uint8_t *at = first; at < end; at += step) {
        const float2 m = *reinterpret_cast<const float2 *>(at + maxima);
        part.max.x = fmaxf(part.max.x, m.x), part.max.y = fmaxf(part.max.y, m.y);
    }
#pragma unroll 4
    for (const uint8_t *at = first; at < end; at += step) {
        const float2 m = *reinterpret_cast<const float2 *>(at + maxima);
        const float2 sum = *reinterpret_cast<const float2 *>(at + maxima + C::ROWS * 4);
        const float2 w = {exp2_fast(m.x - part.max.x), exp2_fast(m.y - part.max.y)};
        part.sum.x += sum.x * w.x, part.sum.y += sum.y * w.y;
        add_weighted(part.o, *reinterpret_cast<const float4 *>(at + o), w);
    }
    return part;
}

// Partial results, by slot and fragment: a float4 a lane; then of the two rows of each lane c their
// maxima and sums.
template <class C>
__device__ void leave_part(const kv8_decode_args &a, int64_t slot, int f, const Part &part) {
    const int lane = threadIdx.x % 32;
    const int64_t at = slot * a.heads_per_block * C::FRAGMENTS + f;
    __stcg(reinterpret_cast<float4 *>(a.partials) + at * 32 + lane, part.o);
    if (lane < 4)
        __stcg(reinterpret_cast<float4 *>(a.partial_sums) + at * 4 + lane,
               make_float4(part.max.x, part.max.y, part.sum.x, part.sum.y));
}

// Joins up to 8 * HELD results to `all`, in order. The two rows of each lane: sums_of(n) gives
// their maxima and sums, o_of(n) the lane's four values; both are called for n < count. Lane g
// looks after the sums of every 8th.
template <int HELD, class SUMS, class O>
__device__ __forceinline__ void join_many(Part &all, int count, SUMS &&sums_of, O &&o_of) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float4 own[HELD], parts[8 * HELD];
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        own[h] = {NO_KEY, NO_KEY, 0, 0};
        if (h * 8 + g < count) own[h] = sums_of(h * 8 + g);
    }
#pragma unroll
    for (int n = 0; n < 8 * HELD; n++) {
        parts[n] = {0, 0, 0, 0};
        if (n < count) parts[n] = o_of(n);
    }
    float2 top = all.max;
#pragma unroll
    for (int h = 0; h < HELD; h++) top = {fmaxf(top.x, own[h].x), fmaxf(top.y, own[h].y)};
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, lanes));
        top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, lanes));
    }
    float2 w[HELD], sum = {0, 0};
#pragma unroll
    for (int h = 0; h < HELD; h++) {
        w[h] = {exp2_fast(own[h].x - top.x), exp2_fast(own[h].y - top.y)};
        sum.x += own[h].z * w[h].x, sum.y += own[h].w * w[h].y;
    }
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
        sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
    }
    const float2 keep = {exp2_fast(all.max.x - top.x), exp2_fast(all.max.y - top.y)};
    all.sum = {all.sum.x * keep.x + sum.x, all.sum.y * keep.y + sum.y};
    all.max = top;
    const float4 before = all.o;
    all.o = {0, 0, 0, 0};
    add_weighted(all.o, before, keep);
#pragma unroll
    for (int n = 0; n < 8 * HELD; n++)
        add_weighted(all.o, parts[n],
                     {__shfl_sync(~0u, w[n / 8].x, n % 8 * 4 + c),
                      __shfl_sync(~0u, w[n / 8].y, n % 8 * 4 + c)});
}

// Where the results of a stream's n-th piece lie.
__device__ inline int slot_of(const Piece &p, int n) {
    return n == 0 ? p.first_slot : 2 * (p.first_block + n);
}

// Joins the partial results of fragment f of `count` pieces of a stream: first, first + step, ..
template <class C>
__device__ Part join_pieces(const kv8_decode_args &a, const Piece &p, int f, int first, int step,
                            int count) {
    const int lane = threadIdx.x % 32, fragments = a.heads_per_block * C::FRAGMENTS;
    const auto at = [&](int n) { return int64_t(slot_of(p, first + n * step)) * fragments + f; };
    Part all = no_part();
#pragma unroll 1
    for (int done = 0; done < count; done += 8)
        join_many<1>(
            all, count - done,
            [&](int n) {
                return __ldcg(reinterpret_cast<const float4 *>(a.partial_sums) + at(done + n) * 4 +
                              lane % 4);
            },
            [&](int n) {
                return __ldcg(reinterpret_cast<const float4 *>(a.partials) + at(done + n) * 32 +
                              lane);
            });
    return all;
}

// Counts this warp at one of its block's counters; true for the last of `expected`.
__device__ inline bool arrive_last(uint32_t *counters, int expected) {
    uint32_t before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        uint32_t *const counter = counters + threadIdx.x / 32;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(counter)
                     : "memory");
        if (before == uint32_t(expected - 1)) *counter = 0;  // ready for the next launch
    }
    return __shfl_sync(~0u, before, 0) == uint32_t(expected - 1);
}

// After every warp has left its result: each warp finishes its fragments of the piece, or leaves
// partial ones. Of pieces in groups of GROUP, then of the groups, whoever is last to do so joins
// them: each warp its fragments, so that many pieces are joined by many blocks.
template <class C>
__device__ void close_piece(const kv8_decode_args &a, const Piece &p, const uint8_t *rings,
                            const RowEnd *ends) {
    constexpr int GROUP = 8;
    const int fragments = a.heads_per_block * C::FRAGMENTS, warp = threadIdx.x / 32;
    if (warp >= fragments) return;
    // Counters of groups, by the slot of their first piece; then those of streams.
    uint32_t *const of_streams = a.arrivals + int64_t(2 * gridDim.x) * C::WARPS;
    int first = 0, step = 0, count = 1;  // the pieces joined now; step 0: none yet
    bool is_top = p.num_pieces == 1;
    for (;;) {
#pragma unroll 1
        for (int f = warp; f < fragments; f += C::WARPS) {
            const Item<C> item(f * 32 + threadIdx.x % 32);
            const Part part =
                step > 0
                    ? join_pieces<C>(a, p, f, first, step, count)
                    : join_slices<C>(rings + item.head / C::HEADS * C::RING_BYTES +
                                         item.head % C::HEADS * C::RESULT_BYTES,
                                     a.heads_per_block / C::HEADS * C::RING_BYTES,
                                     rings + C::WARPS * C::RING_BYTES, item.row, f % C::FRAGMENTS);
            if (is_top)
                finish_item(a, p, item,
                            {usable(a, ends[item.slot_row]), usable(a, ends[item.slot_row + 1])},
                            part);
            else
                leave_part<C>(a, step == 0 ? p.slot : slot_of(p, first), f, part);
        }
        if (is_top) return;
        if (step == 0 && p.num_pieces > GROUP) {
            first = (int(blockIdx.x) - p.first_block) / GROUP * GROUP, step = 1;
            count = min(GROUP, p.num_pieces - first);
            if (!arrive_last(a.arrivals + int64_t(slot_of(p, first)) * C::WARPS, count)) return;
        } else {
            count = step == 0 ? p.num_pieces : (p.num_pieces + GROUP - 1) / GROUP;
            first = 0, step = step == 0 ? 1 : GROUP, is_top = true;
            if (!arrive_last(of_streams + int64_t(p.stream) * C::WARPS, count)) return;
        }
    }
}

}  // namespace kv8
