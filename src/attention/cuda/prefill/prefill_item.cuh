// prefill_item.cuh - what the scheduling kernel and every role of a prefill block read alike from
// an item: its rows, and which keys a row may see. No arithmetic on values.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/ptx_sm80.cuh"
#include "common/softmax.cuh"
#include "prefill_args.h"
#include "widen.cuh"

namespace kv8 {

__host__ __device__ constexpr bool is_wide(int dtype) {
    return dtype == BF16 || dtype == F16;
}
template <bool IS_BF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    return IS_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

__device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t magic, uint32_t shift) {
    return (uint32_t)(((uint64_t)n * magic) >> (31 + shift));
}

struct ItemView {
    int32_t request, kv_head, row_begin, num_rows;  // num_rows: packed rows of the request left
    int32_t q_begin, qo_len, kv_len;
};
__device__ __forceinline__ ItemView view_item(const kv8_prefill_args &a,
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
// Keys [begin, end) that query `row` of the request may see.
__device__ __forceinline__ int row_end(const kv8_prefill_args &a, const ItemView &v, int row) {
    return a.causal ? max(min(v.kv_len, v.kv_len - v.qo_len + row + 1), 0) : v.kv_len;
}
__device__ __forceinline__ int row_begin(const kv8_prefill_args &a, const ItemView &v, int row) {
    return a.window_left < 0
               ? 0
               : min(max(v.kv_len - v.qo_len + row - a.window_left, 0), row_end(a, v, row));
}
__device__ __forceinline__ int query_of(const kv8_prefill_args &a, int packed_row) {
    return (int)divide((uint32_t)packed_row, a.group_magic, a.group_shift);
}
__device__ __forceinline__ float k_scale_of(const kv8_prefill_args &a, const ItemView &v) {
    if (a.k_scale == nullptr) return 1.0f;
    return a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
}
// e4m3 Q: of a row's head.
__device__ __forceinline__ float q_scale_of(const kv8_prefill_args &a, const ItemView &v, int query,
                                            int head) {
    return a.q_scale[v.request * a.q_scale_stride_batch +
                     (int64_t)(v.q_begin + query) * a.q_scale_stride_row +
                     v.kv_head * a.q_scale_stride_kv_head +
                     (head - v.kv_head * a.group_size) * a.q_scale_stride_group];
}

}  // namespace kv8
