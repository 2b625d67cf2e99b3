// prefill_item.cuh - what the scheduling kernel and every role of a prefill block read alike from
// an item: its rows, and which keys a row may see. No arithmetic on values.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/batch.cuh"
#include "common/softmax.cuh"
#include "prefill/prefill_codes.cuh"
#include "prefill_args.h"
#include "ptx_sm80.cuh"

namespace kv8 {

template <bool IS_BF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    return IS_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

// What a block keeps of a packed row in shared memory.
struct RowRecord {
    float factor;        // from S to log2 units
    float top;           // the row's maximum as S has it; -INFINITY: no key seen yet
    int32_t begin, end;  // keys that the row may see
};
static_assert(sizeof(RowRecord) == KV8_PREFILL_ROW_BYTES, "what the host asks for");

// Places in the list of items that a block computes, by one thread: its own first, then those that
// it takes from the queue.
__device__ __forceinline__ int take_from_queue(const kv8_kernel_args &a) {
    return atomicAdd(&a.prefill.queue->next, 1);
}
__device__ __forceinline__ int item_behind(const kv8_kernel_args &a, int n) {
    return n + 1 < a.prefill.queue->own[blockIdx.x + 1] ? n + 1 : take_from_queue(a);
}
__device__ __forceinline__ int first_item(const kv8_kernel_args &a) {
    return item_behind(a, a.prefill.queue->own[blockIdx.x] - 1);
}

struct ItemView {
    int32_t request, kv_head, row_begin, num_rows;  // num_rows: packed rows of the request left
    int32_t q_begin, qo_len, kv_len;
};
__device__ __forceinline__ ItemView view_item(const kv8_kernel_args &a,
                                              const kv8_prefill_item &item) {
    ItemView v;
    v.request = item.request;
    v.kv_head = item.kv_head;
    v.row_begin = item.row_begin;
    v.q_begin = item.q_begin;
    v.qo_len = item.qo_len;
    v.kv_len = item.kv_len;
    v.num_rows = v.qo_len * a.group_size - v.row_begin;
    return v;
}
// Keys [begin, end) that query `row` of the request may see. RANGES: rows may have their own.
template <bool RANGES = true>
__device__ __forceinline__ int row_end(const kv8_kernel_args &a, const ItemView &v, int row) {
    int end = v.kv_len;
    if (a.window_right >= 0) end = min(v.kv_len - v.qo_len + row + a.window_right + 1, end);
    if (RANGES && a.key_end != nullptr) end = min(a.key_end[v.q_begin + row], end);
    return max(end, 0);
}
template <bool RANGES = true>
__device__ __forceinline__ int row_begin(const kv8_kernel_args &a, const ItemView &v, int row) {
    const bool has_range = RANGES && a.key_begin != nullptr;
    if (a.window_left < 0 && !has_range) return 0;
    int begin = a.window_left < 0 ? 0 : max(v.kv_len - v.qo_len + row - a.window_left, 0);
    if (has_range) begin = max(a.key_begin[v.q_begin + row], begin);
    return min(begin, row_end<RANGES>(a, v, row));
}
__device__ __forceinline__ int query_of(const kv8_kernel_args &a, int packed_row) {
    return divide((uint32_t)packed_row, a.by_group);
}
// Queries of an item's rows: first to last.
__device__ __forceinline__ int first_query(const kv8_kernel_args &a, const ItemView &v) {
    return query_of(a, v.row_begin);
}
__device__ __forceinline__ int last_query(const kv8_kernel_args &a, const ItemView &v) {
    return query_of(a, v.row_begin + min(a.prefill.block_rows, v.num_rows) - 1);
}
__device__ __forceinline__ float k_scale_of(const kv8_kernel_args &a, const ItemView &v) {
    if (a.k_scale == nullptr) return 1.0f;
    return a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
}
// e4m3 Q: of a row's head.
__device__ __forceinline__ float q_scale_of(const kv8_kernel_args &a, const ItemView &v, int query,
                                            int head) {
    return a.q_scale[v.request * a.q_scale_stride_batch +
                     (int64_t)(v.q_begin + query) * a.q_scale_stride_row +
                     v.kv_head * a.q_scale_stride_kv_head +
                     (head - v.kv_head * a.group_size) * a.q_scale_stride_group];
}
// The page of keys that nobody sees: like every id that is not there, not below num_pages.
constexpr int UNSEEN = INT32_MIN;
__device__ __forceinline__ bool page_exists(const kv8_kernel_args &a, int page) {
    return (uint32_t)page < a.num_pages;
}
// Of a request: its pages, and which bits of the mask are whose.
struct RequestKeys {
    const int32_t *pages;
    const uint8_t *mask;  // may be 0
    int kv_len;
    __device__ __forceinline__ RequestKeys(const kv8_kernel_args &a, const kv8_prefill_item &item) {
        pages = a.table + item.pages_at;
        mask = a.mask_bits != nullptr ? a.mask_bits + a.mask_indptr[item.request] : 0;
        kv_len = item.kv_len;
    }
    __device__ __forceinline__ RequestKeys() {}
    __device__ __forceinline__ bool mask_has(int query, int key) const {
        const int64_t bit = (int64_t)query * kv_len + key;
        return mask == nullptr || (mask[bit / 8] >> (bit % 8) & 1);
    }
    // Of the 32 keys from `first` on bits of those that a row of the item sees; by a warp.
    __device__ __forceinline__ uint32_t seen_keys(const kv8_kernel_args &a, const ItemView &v,
                                                  int first) const {
        const int last = last_query(a, v);
        uint32_t seen = 0;
#pragma unroll 1
        for (int query = first_query(a, v) + threadIdx.x % 32; query <= last; query += 32) {
            const int begin = row_begin(a, v, query), end = row_end(a, v, query);
            const uint32_t bits = mask != nullptr ? mask_word(mask, kv_len, query, first) : ~0u;
            seen |= bits & keys_within(first, begin, end);
        }
        return __reduce_or_sync(~0u, seen);
    }
    // Pages of the keys [from, to) that are not there and of which a row sees a key, as all have
    // without gaps: the warp's share, one of `warps`.
    __device__ __forceinline__ int count_missing(const kv8_kernel_args &a, const ItemView &v,
                                                 bool has_gaps, int from, int to, int warp,
                                                 int warps) const {
        const int lane = threadIdx.x % 32, last = divide(max(to - 1, 0), a.by_page);
        int count = 0;
#pragma unroll 1
        for (int n = divide(from, a.by_page) + 32 * warp; from < to && n <= last; n += 32 * warps) {
            const bool missing = n + lane <= last && !page_exists(a, pages[n + lane]);
            uint32_t lanes = __ballot_sync(~0u, missing);
            if (!has_gaps) count += __popc(lanes);
#pragma unroll 1
            for (; has_gaps && lanes != 0; lanes &= lanes - 1) {
                const int key = (n + __ffs(lanes) - 1) * a.page_size;
                const int begin = max(key, from), end = min(key + a.page_size, to);
                uint32_t seen = 0;
#pragma unroll 1
                for (int first = begin; first < end && seen == 0; first += 32)
                    seen = seen_keys(a, v, first) & keys_within(first, begin, end);
                count += seen != 0;
            }
        }
        return count;
    }
};

// Of a row of an item: its query and head, and where its results go.
struct RowPlace {
    int query, head;
    int64_t o, lse;
};
__device__ __forceinline__ RowPlace place_of(const kv8_kernel_args &a, const ItemView &v, int row) {
    RowPlace place;
    place.query = query_of(a, v.row_begin + row);
    place.head = v.kv_head * a.group_size + v.row_begin + row - place.query * a.group_size;
    const int64_t at = v.q_begin + place.query;
    place.o = at * a.o_stride_row + place.head * a.o_stride_head;
    place.lse = at * a.lse_stride_row + place.head * a.lse_stride_head;
    return place;
}
// Of V, over O's where it may have one.
template <bool CODES = true>
__device__ __forceinline__ float v_scale_of(const kv8_kernel_args &a, const ItemView &v) {
    float scale = 1.0f;
    if (a.v_scale != nullptr)
        scale = a.v_scale[v.request * a.v_scale_stride_batch + v.kv_head * a.v_scale_stride_head];
    if (CODES && a.o_scale != nullptr) scale /= *a.o_scale;
    return scale;
}

// One instruction, which the compiler makes three of where it is written out.
__device__ __forceinline__ uint64_t multiply_add(uint32_t a, uint32_t b, uint64_t c) {
    uint64_t sum;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
    return sum;
}
// A key's row of K or V, and its scale.
__device__ __forceinline__ const uint8_t *key_row(const kv8_kernel_pages &p, int page, int slot,
                                                  int kv_head) {
    uint64_t at = multiply_add((uint32_t)page, (uint32_t)p.stride_page, (uint64_t)p.data);
    at = multiply_add((uint32_t)slot, (uint32_t)p.stride_slot, at);
    return (const uint8_t *)multiply_add((uint32_t)kv_head, (uint32_t)p.stride_head, at);
}
__device__ __forceinline__ __half key_scale(const kv8_kernel_pages &p, int page, int slot,
                                            int kv_head) {
    return __ushort_as_half(p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                                        kv_head * p.scale_stride_head]);
}

// Of a row of O, one value. CODES: it may be of 8 bits.
template <bool CODES = true>
__device__ __forceinline__ void store_one(const kv8_kernel_args &a, int64_t at, float x) {
    if (a.o_dtype == KV8_F32)
        ((float *)a.o)[at] = x;
    else if (CODES && !is_wide(a.o_dtype))
        ((uint8_t *)a.o)[at] = (uint8_t)pack_codes(a.o_dtype, x, x);
    else
        ((uint16_t *)a.o)[at] = (uint16_t)(a.o_dtype == BF16 ? pack_bf16(x, x) : pack_f16(x, x));
}
// Two neighbours of a row of O, not of 8 bits.
__device__ __forceinline__ void store_pair(const kv8_kernel_args &a, int64_t at, float x, float y) {
    if (a.o_dtype == KV8_F32) {
        float *const to = (float *)a.o + at;
        if (a.prefill.o_aligned) {
            *(float2 *)to = make_float2(x, y);
        } else {
            to[0] = x;
            to[1] = y;
        }
    } else {
        uint16_t *const to = (uint16_t *)a.o + at;
        const uint32_t pair = a.o_dtype == BF16 ? pack<true>(x, y) : pack<false>(x, y);
        if (a.prefill.o_aligned) {
            *(uint32_t *)to = pair;
        } else {
            to[0] = (uint16_t)pair;
            to[1] = (uint16_t)(pair >> 16);
        }
    }
}
// A row of O from element `at` on, times its weight: `count` of N pairs of neighbours, eight
// columns from one pair to the next. value(i, j): the sum of pair i.
template <bool CODES, int N, class VALUE>
__device__ __forceinline__ void store_pairs(const kv8_kernel_args &a, int64_t at, float weight,
                                            int count, const VALUE &value) {
    const auto pair = [&](int i) {
        return make_float2(value(i, 0) * weight, value(i, 1) * weight);
    };
    if (!a.prefill.o_aligned) {  // one piece of code, past which the sums move in a circle
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const float first[2] = {value(0, 0), value(0, 1)};
            store_one<CODES>(a, at + 8 * i, first[0] * weight);
            store_one<CODES>(a, at + 8 * i + 1, first[1] * weight);
#pragma unroll
            for (int j = 0; j < 2 * N; j++)
                value(j / 2, j % 2) = j < 2 * N - 2 ? value(j / 2 + 1, j % 2) : first[j % 2];
        }
    } else if (a.o_dtype == KV8_F32) {
        float *const to = (float *)a.o + at;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) *(float2 *)(to + 8 * i) = pair(i);
    } else if (CODES && !is_wide(a.o_dtype)) {
        uint8_t *const to = (uint8_t *)a.o + at;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count)
                *(uint16_t *)(to + 8 * i) = (uint16_t)pack_codes(a.o_dtype, pair(i).x, pair(i).y);
    } else {
        uint16_t *const to = (uint16_t *)a.o + at;
        const bool bf16 = a.o_dtype == BF16;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count)
                *(uint32_t *)(to + 8 * i) =
                    bf16 ? pack<true>(pair(i).x, pair(i).y) : pack<false>(pair(i).x, pair(i).y);
    }
}

}  // namespace kv8
