// decode_combine.cuh - the end of a split: slices combined, splits combined, results written.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "common/row_end.cuh"
#include "decode/decode_mainloop.cuh"

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
struct Partial {
    float4 o;
    float2 max, sum;
};
__device__ inline Partial no_partial() {
    return {{0, 0, 0, 0}, {NO_KEY, NO_KEY}, {0, 0}};
}
__device__ inline void add_weighted(float4 &into, const float4 &from, float2 w) {
    into.x += from.x * w.x;
    into.y += from.y * w.y;
    into.z += from.z * w.x;
    into.w += from.w * w.y;
}

// Asks for those of the rows of a split and one head, a row each lane. Without a sink and a scale
// nothing is asked for, nor read later.
__device__ inline void copy_row_ends(const kv8_kernel_args &a, const Split &p, int head,
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
// The sum of one row and dim came out NaN while its weights are numbers. That is right where a NaN
// or infinities of both signs are visible; but a product of 0, a weight too small for f16 or the
// rest of a bf16 weight in two, and an infinity is NaN too, where the sum is infinite. Looks at
// every visible value again.
template <class C>
__device__ __noinline__ float rescan_values(const kv8_kernel_args &a, const Request r, int head,
                                            int row, int dim) {
    const int token = divide(row, a.by_group);
    const KeyRange keys = visible_keys(a, r, token);
    const uint16_t *const q = static_cast<const uint16_t *>(a.q) +
                              (r.qo_begin + token) * a.q_stride_row +
                              (head * a.group_size + row - token * a.group_size) * a.q_stride_head;
    const auto row_scale = [&](Format f, const kv8_kernel_pages &p, int64_t page, int slot) {
        return f == INT8 ? __half2float(__ushort_as_half(
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
        if (!page_exists(a, int(page))) continue;
        const uint8_t *const v =
            a.v.data + page * a.v.stride_page + slot * a.v.stride_slot + head * a.v.stride_head;
        const float value = widen_one<C::FV>(v, dim) * row_scale(C::FV, a.v, page, slot);
        if (isfinite(value)) continue;
        sum += value;  // two signs make NaN, and NaN stays
        if (a.soft_cap > 0) continue;
        const uint8_t *const k =
            a.k.data + page * a.k.stride_page + slot * a.k.stride_slot + head * a.k.stride_head;
        float score = 0;  // of -inf: weight 0 of an infinity
        for (int d = 0; d < C::DIM; d++)
            score +=
                widen_one<C::FK>(k, d) * (a.q_dtype == BF16 ? __uint_as_float(uint32_t(q[d]) << 16)
                                                            : __half2float(__ushort_as_half(q[d])));
        if (score * a.score_scale * row_scale(C::FK, a.k, page, slot) == -INFINITY) return NAN;
    }
    return sum == 0 ? NAN : sum;
}

// resolve_nans looks at the values again for what of `part` is NaN while its sum is a number.
template <class C>
__device__ void resolve_nans(const kv8_kernel_args &a, const Split &p, const Item<C> &item,
                             Partial &part) {
    const auto resolve = [&](float &x, float sum, int row, int dim) {
        if (isnan(x) && !isnan(sum) && item.row + row < p.num_rows)
            x = rescan_values<C>(a, p.request, p.head_begin + item.head,
                                 p.row_begin + item.row + row, item.dim + dim);
    };
    resolve(part.o.x, part.sum.x, 0, 0), resolve(part.o.z, part.sum.x, 0, 1);
    resolve(part.o.y, part.sum.y, 1, 0), resolve(part.o.w, part.sum.y, 1, 1);
}

// Where o of a lane's two rows lies, of the block's first head: those of all fragments of a warp,
// whose n-tile is one.
template <class C>
struct RowPair {
    static_assert(C::WARPS % C::NT == 0);
    int64_t x, y;
    bool has_x, has_y;

    RowPair() = default;
    __device__ RowPair(const kv8_kernel_args &a, const Split &p, int row)
        : x(row_place(a, p.request, p.head_begin, p.row_begin + row).o),
          y(row_place(a, p.request, p.head_begin, p.row_begin + row + 1).o),
          has_x(row < p.num_rows),
          has_y(row + 1 < p.num_rows) {}
};
// Both rows' factors first: what one waits for, the other hides.
template <class C>
__device__ void finish_item(const kv8_kernel_args &a, const Split &p, const Item<C> &item,
                            const RowPair<C> &rows, const RowEnd *ends, Partial part) {
    const RowFactor x = row_factor(row_end_or_default(a, ends[0]), part.max.x, part.sum.x);
    const RowFactor y = row_factor(row_end_or_default(a, ends[1]), part.max.y, part.sum.y);
    const int64_t more = item.head * a.group_size * a.o_stride_head + item.dim;
    if (C::FV != E4M3 && isnan((part.o.x + part.o.y) + (part.o.z + part.o.w)))
        resolve_nans(a, p, item, part);
    if (rows.has_x) store_row(a, rows.x + more, x, part.o.x, part.o.z);
    if (rows.has_y) store_row(a, rows.y + more, y, part.o.y, part.o.w);
    if (a.lse == nullptr || item.dim != 0) return;
    const int head = p.head_begin + item.head, row = p.row_begin + item.row;
    if (rows.has_x) store_lse(a, row_place(a, p.request, head, row).lse, part.max.x, part.sum.x);
    if (rows.has_y)
        store_lse(a, row_place(a, p.request, head, row + 1).lse, part.max.y, part.sum.y);
}

// The joined results of warps, the first at `first`, each `step` bytes behind the one before:
// fragment f of a head, this lane's part.
template <class C>
__device__ Partial combine_slices(const uint8_t *first, int step, const uint8_t *end, int row,
                                  int f) {
    Partial part = no_partial();
    const int maxima = C::FRAGMENTS * 512 + row * 4, o = (f * 32 + threadIdx.x % 32) * 16;
    const auto each = [&](auto &&visit) {
        if constexpr (C::SLICES > 0) {
#pragma unroll
            for (int n = 0; n < C::SLICES; n++) visit(first + n * step);
        } else {
#pragma unroll 4
            for (const uint8_t *at = first; at < end; at += step) visit(at);
        }
    };
    each([&](const uint8_t *at) {
        const float2 m = *reinterpret_cast<const float2 *>(at + maxima);
        part.max.x = fmaxf(part.max.x, m.x), part.max.y = fmaxf(part.max.y, m.y);
    });
    each([&](const uint8_t *at) {
        const float2 m = *reinterpret_cast<const float2 *>(at + maxima);
        const float2 sum = *reinterpret_cast<const float2 *>(at + maxima + C::ROWS * 4);
        const float2 w = {exp2_fast(m.x - part.max.x), exp2_fast(m.y - part.max.y)};
        part.sum.x += sum.x * w.x, part.sum.y += sum.y * w.y;
        add_weighted(part.o, *reinterpret_cast<const float4 *>(at + o), w);
    });
    return part;
}

// An item's part of the warps' results.
template <class C>
__device__ Partial combine_item(const kv8_kernel_args &a, const uint8_t *rings, const Item<C> &item,
                                int f) {
    constexpr int RESULT_PITCH = C::RING_WARPS * C::RING_BYTES;
    const uint8_t *const first =
        rings + item.head / C::HEADS * RESULT_PITCH + item.head % C::HEADS * C::RESULT_BYTES;
    return combine_slices<C>(first, a.decode.heads_per_block / C::HEADS * RESULT_PITCH,
                             rings + C::WARPS * C::RING_BYTES, item.row, f % C::FRAGMENTS);
}

// Partial results, by slot and fragment: a float4 a lane; then of the two rows of each lane c their
// maxima and sums.
template <class C>
__device__ void store_partial(const kv8_kernel_args &a, int64_t slot, int f, const Partial &part) {
    const int lane = threadIdx.x % 32;
    const int64_t at = slot * a.decode.heads_per_block * C::FRAGMENTS + f;
    __stcg(reinterpret_cast<float4 *>(a.decode.partials) + at * 32 + lane, part.o);
    if (lane < 4)
        __stcg(reinterpret_cast<float4 *>(a.decode.partial_sums) + at * 4 + lane,
               make_float4(part.max.x, part.max.y, part.sum.x, part.sum.y));
}

// Joins up to 8 * EACH_LANE results to `all`, in order. The two rows of each lane: sums_of(n) gives
// their maxima and sums, o_of(n) the lane's four values; both are called for n < count. Lane g
// looks after the sums of every 8th.
template <int EACH_LANE, class SUMS, class O>
__device__ __forceinline__ void combine_many(Partial &all, int count, SUMS &&sums_of, O &&o_of) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float4 own[EACH_LANE], parts[8 * EACH_LANE];
#pragma unroll
    for (int h = 0; h < EACH_LANE; h++) {
        own[h] = {NO_KEY, NO_KEY, 0, 0};
        if (h * 8 + g < count) own[h] = sums_of(h * 8 + g);
    }
#pragma unroll
    for (int n = 0; n < 8 * EACH_LANE; n++) {
        parts[n] = {0, 0, 0, 0};
        if (n < count) parts[n] = o_of(n);
    }
    float2 top = all.max;
#pragma unroll
    for (int h = 0; h < EACH_LANE; h++) top = {fmaxf(top.x, own[h].x), fmaxf(top.y, own[h].y)};
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, lanes));
        top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, lanes));
    }
    float2 w[EACH_LANE], sum = {0, 0};
#pragma unroll
    for (int h = 0; h < EACH_LANE; h++) {
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
    for (int n = 0; n < 8 * EACH_LANE; n++)
        add_weighted(all.o, parts[n],
                     {__shfl_sync(~0u, w[n / 8].x, n % 8 * 4 + c),
                      __shfl_sync(~0u, w[n / 8].y, n % 8 * 4 + c)});
}

// Where the results of a stream's n-th split lie.
__device__ inline int slot_of(const Split &p, int n) {
    return n == 0 ? p.first_slot : 2 * (p.first_block + n);
}

// Combines the partial results of fragment f of `count` splits of a stream: first, first + step, ..
template <class C>
__device__ Partial combine_partials(const kv8_kernel_args &a, const Split &p, int f, int first,
                                    int step, int count) {
    const int lane = threadIdx.x % 32, fragments = a.decode.heads_per_block * C::FRAGMENTS;
    // Slots are two apart, but for a stream's first.
    const int begin = slot_of(p, first), apart = 2 * step;
    const int base = 2 * (p.first_block + first), shift = begin - base;
    const auto at = [&](int n) {
        return (base + n * apart + (n == 0 ? shift : 0)) * fragments + f;
    };
    const float4 *const sums = reinterpret_cast<const float4 *>(a.decode.partial_sums) + lane % 4;
    const float4 *const o = reinterpret_cast<const float4 *>(a.decode.partials) + lane;
    Partial all = no_partial();
#pragma unroll 1
    for (int done = 0; done < count; done += 8)
        combine_many<1>(
            all, count - done, [&](int n) { return __ldcg(sums + at(done + n) * 4); },
            [&](int n) { return __ldcg(o + at(done + n) * 32); });
    return all;
}

// A warp counted at one of its block's counters, for `own` results of its.
class Arrival {
   public:
    __device__ Arrival(uint32_t *counters, int expected, int own = 1)
        : counter(counters + threadIdx.x / 32), all_others(uint32_t(expected - own)) {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                         : "=r"(others)
                         : "l"(counter), "r"(own)
                         : "memory");
    }
    // Whether all `expected` had come. By all lanes, once.
    __device__ bool is_last() const {
        const bool is_last = __shfl_sync(~0u, others, 0) == all_others;
        if (is_last && threadIdx.x % 32 == 0) *counter = 0;  // ready for the next launch
        return is_last;
    }

   private:
    uint32_t *const counter;
    const uint32_t all_others;
    uint32_t others = 0;  // counted before; the first lane knows
};

// Runs after every warp has stored its result: each warp finishes its fragments of the split, or
// stores partial ones. Of splits in groups of GROUP, then of the groups, whoever is last to do so
// combines them: each warp its fragments, so that many splits are combined by many blocks.
template <class C>
__device__ void combine_splits(const kv8_kernel_args &a, const Split &p, const uint8_t *rings,
                               const RowEnd *ends) {
    const int fragments = a.decode.heads_per_block * C::FRAGMENTS, warp = threadIdx.x / 32;
    if (warp >= fragments) return;
    // Counters of groups, by the slot of their first split; then those of streams.
    uint32_t *const of_streams = a.decode.arrivals + int64_t(2 * gridDim.x) * C::WARPS;
    constexpr bool KEEPS_ROWS = C::NT == 1;  // wider tiles leave no registers for them
    const int row = Item<C>(threadIdx.x).row;
    int first = 0, step = 0, count = 1;  // the splits combined at this turn; step 0: none yet
    bool is_top = p.num_splits == 1;
    RowPair<C> rows;
    if (KEEPS_ROWS && is_top) rows = {a, p, row};
    for (;;) {
#pragma unroll 1
        for (int f = warp; f < fragments; f += C::WARPS) {
            if (C::NT > 1 && f % C::NT * 8 >= p.num_rows) continue;  // no such rows
            const Item<C> item(f * 32 + threadIdx.x % 32);
            const Partial part = step > 0 ? combine_partials<C>(a, p, f, first, step, count)
                                          : combine_item<C>(a, rings, item, f);
            if (is_top)
                finish_item(a, p, item, KEEPS_ROWS ? rows : RowPair<C>(a, p, row),
                            ends + item.slot_row, part);
            else
                store_partial<C>(a, step == 0 ? p.slot : slot_of(p, first), f, part);
        }
        if (is_top) return;
        uint32_t *counters = of_streams + int64_t(p.stream) * C::WARPS;
        if (step == 0 && p.num_splits > GROUP) {
            first = (int(blockIdx.x) - p.first_block) / GROUP * GROUP, step = 1;
            count = min(GROUP, p.num_splits - first);
            counters = a.decode.arrivals + int64_t(slot_of(p, first)) * C::WARPS;
        } else {
            count = step == 0 ? p.num_splits : (p.num_splits + GROUP - 1) / GROUP;
            first = 0, step = step == 0 ? 1 : GROUP, is_top = true;
        }
        const Arrival arrival(counters, count);
        if (KEEPS_ROWS && is_top) rows = {a, p, row};  // while the counter comes
        if (!arrival.is_last()) return;
    }
}

}  // namespace kv8
