/* prefill_view.cuh - what the scheduling kernel and every role of a prefill block read alike from
 * an item: its rows, and which keys a row may see. No arithmetic on values.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_VIEW_CUH
#define KV8_PREFILL_VIEW_CUH

#include "prefill_args.h"

__device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t magic, uint32_t shift) {
    return (uint32_t)(((uint64_t)n * magic) >> (31 + shift));
}

struct item_view {
    int32_t request, kv_head, row_begin, num_rows; /* num_rows: packed rows of the request left */
    int32_t q_begin, qo_len, kv_len;
};
__device__ __forceinline__ item_view view_item(const kv8_prefill_args &a,
                                               const kv8_prefill_item &item) {
    item_view v;
    v.request = item.request;
    v.kv_head = item.kv_head;
    v.row_begin = item.row_begin;
    v.q_begin = item.q_begin;
    v.qo_len = item.qo_len;
    v.kv_len = item.kv_len;
    v.num_rows = v.qo_len * a.group_size - v.row_begin;
    return v;
}
/* Keys [begin, end) that query `row` of the request may see. */
__device__ __forceinline__ int row_end(const kv8_prefill_args &a, const item_view &v, int row) {
    return a.causal ? max(min(v.kv_len, v.kv_len - v.qo_len + row + 1), 0) : v.kv_len;
}
__device__ __forceinline__ int row_begin(const kv8_prefill_args &a, const item_view &v, int row) {
    return a.window_left < 0
               ? 0
               : min(max(v.kv_len - v.qo_len + row - a.window_left, 0), row_end(a, v, row));
}
__device__ __forceinline__ int query_of(const kv8_prefill_args &a, int packed_row) {
    return (int)divide((uint32_t)packed_row, a.group_magic, a.group_shift);
}
__device__ __forceinline__ float k_scale_of(const kv8_prefill_args &a, const item_view &v) {
    if (a.k_scale == 0) return 1.0f;
    return a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
}
/* e4m3 Q: of a row's head. */
__device__ __forceinline__ float q_scale_of(const kv8_prefill_args &a, const item_view &v,
                                            int query, int head) {
    return a.q_scale[v.request * a.q_scale_stride_batch +
                     (int64_t)(v.q_begin + query) * a.q_scale_stride_row +
                     v.kv_head * a.q_scale_stride_kv_head +
                     (head - v.kv_head * a.group_size) * a.q_scale_stride_group];
}

#endif
