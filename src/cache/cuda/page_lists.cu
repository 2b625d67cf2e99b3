// page_lists.cu - page tables of a batch from lists that stay on the GPU.
//
// Grid: x = rows of the tables, y = ceil(longest list / KV8_PAGE_LISTS_EACH). Block: 256 threads.
// Bytes: every list read and written once, what changed sent and written once. Bound by: the launch
// of few and short lists, else memory.
//
// SPDX-License-Identifier: Apache-2.0
#include "page_lists_args.h"

// Rows without pages from `row` on.
static __device__ void fill_up(const kv8_page_lists_args &a, const kv8_page_row &row,
                               int32_t *indptr, int32_t *last_page_len) {
    for (int i = row.row + threadIdx.x; i <= a.max_seqs; i += KV8_PAGE_LISTS_THREADS) {
        indptr[i] = row.begin;
        last_page_len[i] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(KV8_PAGE_LISTS_THREADS)
    kv8_page_lists__sm80(const __grid_constant__ kv8_page_lists_args a) {
    const kv8_page_row row = a.rows[blockIdx.x];
    int32_t *const indptr = a.tables + row.group * a.table_entries;
    int32_t *const last_page_len = a.last_page_len + row.group * (a.max_seqs + 1);
    int32_t *const indices = indptr + a.max_seqs + 1 + row.begin;
    if (row.sequence < 0) {
        if (blockIdx.y == 0) fill_up(a, row, indptr, last_page_len);
        return;
    }
    if (blockIdx.y == 0 && threadIdx.x == 0) {
        indptr[row.row] = row.begin;
        last_page_len[row.row] = row.last_page_len;
    }
    int32_t *const list =
        a.lists + (static_cast<int64_t>(row.group) * a.max_seqs + row.sequence) * a.list_entries;
    const int first = blockIdx.y * KV8_PAGE_LISTS_EACH;
    const int end = min(row.count, first + KV8_PAGE_LISTS_EACH);
#pragma unroll 4
    for (int i = first + threadIdx.x; i < end; i += KV8_PAGE_LISTS_THREADS) {
        if (i < row.changed_from)
            indices[i] = list[i];
        else
            list[i] = indices[i] = a.ints[row.changed_at + i - row.changed_from];
    }
}
