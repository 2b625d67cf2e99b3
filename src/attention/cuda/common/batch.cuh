// batch.cuh - what a launch's index arrays say of its requests: lengths, page tables, and which
// keys a query row may see. No arithmetic on values.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "common/attention_args.h"

namespace kv8 {

__device__ inline int divide(int n, const kv8_divisor &d) {
    return d.factor == 0 ? n : int(__umulhi(uint32_t(n), d.factor) >> d.shift);
}

struct KeyRange {
    int begin, end;
};
struct Request {
    int index, qo_begin, qo_len, kv_len;
};

// What memory says of a request. `last`: of its last page; without page_indptr the end of its keys,
// which begin at page_begin.
struct Lengths {
    int qo_begin, qo_end, page_begin, page_end, last;

    __device__ bool operator!=(const Lengths &x) const {
        return ((qo_begin ^ x.qo_begin) | (qo_end ^ x.qo_end) | (page_begin ^ x.page_begin) |
                (page_end ^ x.page_end) | (last ^ x.last)) != 0;
    }
};
// Past caches that may be older than the kernel before: two loads are two looks.
__device__ inline int load_fresh(const int32_t *from) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
// Without qo_lens.
__device__ inline void load_stored_lengths(const kv8_kernel_args &a, int b, Lengths &l) {
    l.qo_begin = load_fresh(a.qo_indptr + b), l.qo_end = load_fresh(a.qo_indptr + b + 1);
    if (a.page_indptr != nullptr) {
        l.page_begin = load_fresh(a.page_indptr + b),
        l.page_end = load_fresh(a.page_indptr + b + 1);
        l.last = load_fresh(a.last_page_len + b);
    } else if (__builtin_expect(a.seq_lens != nullptr, 1)) {
        l.last = load_fresh(a.seq_lens + b);
    } else {
        l.page_begin = load_fresh(a.kv_indptr + b), l.last = load_fresh(a.kv_indptr + b + 1);
    }
}
// Lengths of up to NUM requests from b on, those before `end`. What memory says of all is loaded
// before anything waits for it.
template <int NUM>
__device__ void load_lengths(const kv8_kernel_args &a, int b, int end, Lengths (&of)[NUM]) {
#pragma unroll
    for (int n = 0; n < NUM; n++) {
        of[n] = {0, 0, 0, 0, 0};
        if (b + n < end) load_stored_lengths(a, b + n, of[n]);
    }
    if (__builtin_expect(a.qo_lens == nullptr, 1)) return;
#pragma unroll
    for (int n = 0; n < NUM; n++)
        if (b + n < end)
            of[n].qo_end =
                min(of[n].qo_end, of[n].qo_begin + max(load_fresh(a.qo_lens + b + n), 0));
}
__device__ inline Lengths load_lengths(const kv8_kernel_args &a, int b) {
    Lengths of[1];
    load_lengths(a, b, b + 1, of);
    return of[0];
}
// load_lengths_once gives all threads of a block the same, by one of its warps: what all ask of one
// address stands in line there. Of a block's warps that look by themselves one may see what the
// kernel ahead writes and another not.
__device__ inline Lengths load_lengths_once(const kv8_kernel_args &a, int b, Lengths &shared) {
    if (threadIdx.x == 0) shared = load_lengths(a, b);
    __syncthreads();
    return shared;
}
// lengths_changed: whether memory says anything else by now; by all threads of a block.
__device__ inline bool lengths_changed(const kv8_kernel_args &a, int b, const Lengths &seen) {
    return __syncthreads_or(threadIdx.x < 32 && load_lengths(a, b) != seen);
}
__device__ inline Request make_request(const kv8_kernel_args &a, int b, const Lengths &l) {
    const int pages = l.page_end - l.page_begin;
    const int kv_len = a.page_indptr == nullptr ? l.last - l.page_begin
                       : pages == 0             ? 0
                                                : (pages - 1) * a.page_size + l.last;
    return {b, l.qo_begin, l.qo_end - l.qo_begin, kv_len};
}
__device__ inline const int32_t *request_pages(const kv8_kernel_args &a, int b, const Lengths &l) {
    return a.table + (a.page_indptr != nullptr ? l.page_begin : b * a.table_stride);
}
// Keys that the windows leave to query token t: begin and end both grow with t.
__device__ inline KeyRange visible_keys(const kv8_kernel_args &a, const Request &r, int t) {
    const int position = r.kv_len - r.qo_len + t;
    KeyRange k = {0, r.kv_len};
    if (a.window_right >= 0) k.end = max(min(position + a.window_right + 1, r.kv_len), 0);
    if (a.window_left >= 0) k.begin = min(max(position - a.window_left, 0), k.end);
    return k;
}
__device__ inline bool mask_bit(const kv8_kernel_args &a, const Request &r, int q_token, int key) {
    if (a.mask_bits == nullptr) return true;
    const int64_t bit = int64_t(q_token) * r.kv_len + key;
    return a.mask_bits[a.mask_indptr[r.index] + bit / 8] >> (bit % 8) & 1;
}

}  // namespace kv8
