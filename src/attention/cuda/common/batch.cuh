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

// Bits of the 32 keys from `first` on that lie in [begin, end).
__device__ __forceinline__ uint32_t keys_within(int first, int begin, int end) {
    const int from = min(max(begin - first, 0), 32), to = min(max(end - first, 0), 32);
    const uint64_t below_to = (UINT64_C(1) << to) - 1, below_from = (UINT64_C(1) << from) - 1;
    return uint32_t(below_to & ~below_from);
}
// Bits of 32 keys from `key` on of a row of a mask; whatever those are behind the row's last.
__device__ __forceinline__ uint32_t mask_word(const uint8_t *bits, int kv_len, int q_token,
                                              int key) {
    const int64_t row = int64_t(q_token) * kv_len, bit = row + key, last = (row + kv_len - 1) / 8;
    uint64_t word = 0;
#pragma unroll
    for (int i = 0; i < 5; i++) word |= uint64_t(bits[min(bit / 8 + i, last)]) << (8 * i);
    return uint32_t(word >> (bit % 8));
}
// first_hidden returns the first of the keys [begin, end) that a row of a mask hides, whose bits
// begin at bit `row`, or `end`: by a warp, 16 bytes a lane but at either end, where a lane has one.
// AHEAD: so many are on their way at once.
template <int AHEAD>
__device__ inline int first_hidden(const uint8_t *bits, int64_t row, int begin, int end) {
    constexpr int LANE = 16, WARP = 32 * LANE;
    if (begin >= end) return end;
    const uint8_t *const from = bits + (row + begin) / 8, *const to = bits + (row + end + 7) / 8;
    const int size = int(to - from), lane = threadIdx.x % 32;
    // Of the bytes those of a head and a tail of 1 to 16 are not taken 16 at a time.
    const int head = min(LANE - int(reinterpret_cast<uintptr_t>(from) % LANE), size);
    const int tail = max(size - 1 - int((reinterpret_cast<uintptr_t>(to) - 1) % LANE), head);
    const int edge = lane < LANE ? lane : tail + lane - LANE;
    const uint32_t edge_bits = edge < (lane < LANE ? head : size) ? from[edge] : 0xff;
    const int first_key = begin - int((row + begin) % 8);  // of the first byte
    int hidden = end;
    for (int at = head + lane * LANE; at < tail; at += AHEAD * WARP) {
        uint4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            x[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
            if (at + i * WARP < tail) x[i] = *reinterpret_cast<const uint4 *>(from + at + i * WARP);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if ((x[i].x & x[i].y & x[i].z & x[i].w) == ~0u) continue;
            const uint32_t gone[4] = {~x[i].x, ~x[i].y, ~x[i].z, ~x[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (gone[j] != 0)
                    hidden =
                        min(hidden, first_key + 8 * (at + i * WARP + 4 * j) + __ffs(gone[j]) - 1);
        }
    }
    // Bits of the first and the last byte may be other rows'.
    const int key = first_key + 8 * edge;
    const int before = min(max(begin - key, 0), 8), until = min(max(end - key, 0), 8);
    const uint32_t gone = ~edge_bits & ((1u << until) - 1) & ~((1u << before) - 1);
    if (gone != 0) hidden = min(hidden, key + __ffs(gone) - 1);
    return __reduce_min_sync(~0u, hidden);
}

}  // namespace kv8
