// append_body.cuh - rows into pages on the GPU, the body of the append kernels: the bytes that
// kv8_cache_append stores for the same rows. A fused kernel hands in what it does to K first.
//
// A block has rows_per_block neighbouring rows: first some of its threads find each row's place,
// then all of them go over the rows' heads in passes. A head of one row is an *item*; 2^lanes_log2
// neighbouring threads of one warp take one. Two ways:
// - by eights: a thread takes eight elements of the item's first half and the eight at the same
// place of its second half (pairs, so that a rotation has both), 16 bytes a load, and has the next
//   pass's on their way meanwhile.
// - one by one: any head_dim, any alignment, and the slow definition of every number. The first way
//   goes over to it, a warp at a time, where it sees a clip, a NaN or an infinity.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "append_args.h"
#include "codec.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr uint32_t ALL_LANES = 0xffffffffu;

// No rotation: rows are stored as they come. A rotation has the same three members.
struct Unrotated {
    static constexpr bool rotates = false;
    static __device__ __forceinline__ void eights(const kv8_append_kernel_args &, int32_t, int32_t,
                                                  float *, float *) {}
    template <typename SOURCE>
    static __device__ __forceinline__ float one(const kv8_append_kernel_args &, int32_t, int32_t,
                                                const SOURCE *row, int32_t d) {
        return widen(row[d]);
    }
};

// --- where a row goes ---

struct Place {
    int64_t codes, row_scale, scale;  // offsets of the row's head 0
    bool there;                       // false: the row is left out
};

// The request that owns a row: the last whose rows begin at or before it. Looked for first where it
// is if all before it have one row: each step of a search waits for the one before.
static __device__ __forceinline__ int32_t find_request(const int32_t *indptr, int32_t batch,
                                                       int32_t row) {
    if (row < batch && indptr[row] == row && indptr[row + 1] == row + 1) return row;
    int32_t low = 0, high = batch;  // indptr[low] <= row < indptr[high]
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (indptr[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The page table's place of a row of request b; page -1 where it has none.
static __device__ __forceinline__ int64_t find_in_table(const kv8_append_kernel_args &a, int32_t b,
                                                        int32_t row, int32_t &slot) {
    int32_t kv_len, first = 0;
    if (a.page_indptr != nullptr) {
        first = a.page_indptr[b];
        const int32_t num_pages = a.page_indptr[b + 1] - first;
        kv_len = num_pages == 0 ? 0 : (num_pages - 1) * a.page_size + a.last_page_len[b];
    } else {
        kv_len = a.seq_lens[b];
    }
    const int32_t position = kv_len - (a.indptr[b + 1] - row);
    if (position < 0) return -1;  // a table without room for its rows stores nothing
    const int32_t page_idx = position / a.page_size;
    slot = position - page_idx * a.page_size;
    return a.page_indptr != nullptr ? a.page_indices[first + page_idx]
                                    : a.block_table[b * a.block_table_stride + page_idx];
}

static __device__ __forceinline__ Place find_place(const kv8_append_kernel_args &a,
                                                   const kv8_append_plane &p, int32_t row) {
    Place at = {};
    const int32_t b = a.indptr == nullptr ? 0 : find_request(a.indptr, a.batch, row);
    int64_t page;
    int32_t slot = 0;
    if (a.slot_mapping != nullptr) {
        const int64_t mapped = a.slot_mapping[row];
        page = mapped < 0 ? -1 : mapped / a.page_size;
        slot = static_cast<int32_t>(mapped - page * a.page_size);
    } else {
        page = find_in_table(a, b, row, slot);
    }
    at.there = page >= 0 && page < a.num_pages;
    if (page >= a.num_pages && a.bad_pages != nullptr && blockIdx.y == 0) atomicAdd(a.bad_pages, 1);
    if (!at.there) return at;
    at.codes = page * p.stride_page + slot * p.stride_slot;
    at.row_scale = page * p.row_scale_stride_page + slot * p.row_scale_stride_slot;
    at.scale = b * p.scale_stride_request;
    return at;
}

// --- a head of a row ---

struct Item {
    int32_t row, head;
    int64_t codes, row_scale, scale;  // offsets
    bool there;
};

static __device__ __forceinline__ int32_t first_row(const kv8_append_kernel_args &a) {
    return blockIdx.x * a.rows_per_block;
}
// Memory of rows past the last one may not exist.
static __device__ __forceinline__ int32_t rows_of_block(const kv8_append_kernel_args &a) {
    const int32_t num_rows = a.indptr == nullptr ? a.max_rows : min(a.max_rows, a.indptr[a.batch]);
    return min(a.rows_per_block, num_rows - first_row(a));
}

template <typename SOURCE>
static __device__ __forceinline__ const SOURCE *source_of(const kv8_append_plane &p, int32_t row,
                                                          int32_t head) {
    return static_cast<const SOURCE *>(p.source) + row * p.source_stride_row +
           head * p.source_stride_head;
}

// What this thread takes part in: a row of the block and a head.
struct Cursor {
    int32_t row, head;
};
static __device__ __forceinline__ Cursor cursor_at(const kv8_append_kernel_args &a,
                                                   const kv8_append_plane &p, int32_t pass) {
    const uint32_t idx = (pass * KV8_APPEND_THREADS + threadIdx.x) >> p.lanes_log2;
    const int32_t row = idx / static_cast<uint32_t>(a.num_kv_heads);
    return {row, static_cast<int32_t>(idx) - row * a.num_kv_heads};
}

static __device__ __forceinline__ Item get_item(const kv8_append_kernel_args &a,
                                                const kv8_append_plane &p, const Place *places,
                                                int32_t num_rows, const Cursor &c) {
    Item it = {};
    if (c.row >= num_rows) return it;
    const Place &at = places[c.row];
    it.row = first_row(a) + c.row;
    it.head = c.head;
    it.codes = at.codes + c.head * p.stride_head;
    it.row_scale = at.row_scale + c.head * p.row_scale_stride_head;
    it.scale = at.scale + c.head * p.scale_stride_head;
    it.there = at.there;
    return it;
}

static __device__ __forceinline__ void store_row_scale(const kv8_append_plane &p, const Item &it,
                                                       uint16_t code) {
    static_cast<uint16_t *>(p.row_scale)[it.row_scale] = code;
}
static __device__ __forceinline__ float scale_of(const kv8_append_plane &p, const Item &it) {
    return p.scale == nullptr ? 1.0f : p.scale[it.scale];
}
// First of this thread's eight elements in either half.
static __device__ __forceinline__ int32_t first_of_eight(const kv8_append_plane &p) {
    return KV8_APPEND_VECTOR * (threadIdx.x & ((1 << p.lanes_log2) - 1));
}

static __device__ __forceinline__ void count(const kv8_append_plane &p, const Item &it,
                                             uint32_t clips, uint32_t nans) {
    if (p.counters == nullptr) return;
    unsigned long long *const cell =
        reinterpret_cast<unsigned long long *>(p.counters) + 2 * it.head;
    if (clips > 0) atomicAdd(cell, static_cast<unsigned long long>(clips));
    if (nans > 0) atomicAdd(cell + 1, static_cast<unsigned long long>(nans));
}

// --- one by one ---

// As the processors divide: a NaN keeps its sign and payload and becomes quiet.
static __device__ __forceinline__ float divide_one(float x, float scale) {
    return isnan(x) ? __uint_as_float(__float_as_uint(x) | KV8_F32_QUIET) : __fdiv_rn(x, scale);
}

template <kv8_dtype DTYPE, typename SOURCE, typename ROTATION>
static __device__ void store_ones(const kv8_append_kernel_args &a, const kv8_append_plane &p,
                                  const Item &it, const SOURCE *row, float scale, int32_t lane,
                                  int32_t lanes) {
    using to = format<DTYPE>;
    typename to::code *const codes = static_cast<typename to::code *>(p.codes) + it.codes;
    uint32_t clips = 0, nans = 0;
#pragma unroll 1
    for (int32_t d = lane; d < p.head_dim; d += lanes) {
        const float q = divide_one(ROTATION::one(a, it.row, p.head_dim, row, d), scale);
        codes[d] = to::encode(q);
        clips += fabsf(q) > to::max;
        nans += isnan(q) != 0;
    }
    count(p, it, clips, nans);
}

// All lanes of the warp call it; those without an item take part in the sums alone.
template <typename SOURCE, typename ROTATION>
static __device__ void store_int8_ones(const kv8_append_kernel_args &a, const kv8_append_plane &p,
                                       const Item &it, const SOURCE *row, float scale, int32_t lane,
                                       int32_t lanes) {
    const int32_t head_dim = it.there ? p.head_dim : 0;
    float absmax = 0;
    uint32_t nans = 0, infs = 0;
#pragma unroll 1
    for (int32_t d = lane; d < head_dim; d += lanes) {
        const float x = fabsf(divide_one(ROTATION::one(a, it.row, p.head_dim, row, d), scale));
        nans += isnan(x) != 0;
        infs += isinf(x) != 0;
        if (isfinite(x)) absmax = fmaxf(absmax, x);
    }
    for (int32_t step = lanes / 2; step > 0; step /= 2) {
        absmax = fmaxf(absmax, __shfl_xor_sync(ALL_LANES, absmax, step));
        nans += __shfl_xor_sync(ALL_LANES, nans, step);
        infs += __shfl_xor_sync(ALL_LANES, infs, step);
    }
    if (!it.there) return;
    int8_t *const codes = static_cast<int8_t *>(p.codes) + it.codes;
    const bool empty = absmax == 0 && infs == 0;
    const uint16_t code = nans > 0 ? 0x7e00u : empty ? 0 : int8_row_scale(absmax);
    const float row_scale = kv8_f16_decode(code);
    uint32_t clips = 0;
#pragma unroll 1
    for (int32_t d = lane; d < head_dim; d += lanes) {
        float q = 0;
        if (nans == 0 && !empty)
            q = __fdiv_rn(divide_one(ROTATION::one(a, it.row, p.head_dim, row, d), scale),
                          row_scale);
        codes[d] = int8_encode(q);
        clips += fabsf(q) > 127.0f;
    }
    if (lane == 0) store_row_scale(p, it, code);
    count(p, it, clips, lane == 0 ? nans : 0);
}

template <typename SOURCE, typename ROTATION>
static __device__ __forceinline__ void append_ones(const kv8_append_kernel_args &a,
                                                   const kv8_append_plane &p, const Item it) {
    const int32_t lanes = 1 << p.lanes_log2, lane = threadIdx.x & (lanes - 1);
    const SOURCE *const row = source_of<SOURCE>(p, it.row, it.head);
    const float scale = it.there ? scale_of(p, it) : 1.0f;
    if (p.dtype == KV8_INT8)
        return store_int8_ones<SOURCE, ROTATION>(a, p, it, row, scale, lane, lanes);
    if (!it.there) return;
#define KV8_STORE(DTYPE) \
    case DTYPE:          \
        return store_ones<DTYPE, SOURCE, ROTATION>(a, p, it, row, scale, lane, lanes);
#define KV8_STORE_FLOAT8(words, rule, name, dtype, mantissa, bias, max) KV8_STORE(dtype)
    switch (p.dtype) {
        KV8_STORE(KV8_F32)
        KV8_STORE(KV8_BF16)
        KV8_STORE(KV8_F16)
        KV8_FLOAT8_FORMATS(KV8_STORE_FLOAT8)
    }
#undef KV8_STORE_FLOAT8
#undef KV8_STORE
}

// --- by eights ---

// Both halves of a thread's share: eight elements from d on, eight from d + head_dim / 2 on. False
// when something in the warp needs the slow way; then nothing has been stored.
template <kv8_dtype DTYPE>
static __device__ __forceinline__ bool store_eights(const kv8_append_plane &p, const Item &it,
                                                    bool mine, float low[8], float high[8],
                                                    const divisor &by) {
    using to = format<DTYPE>;
    const bool right = divide8<to::wide>(low, by) & divide8<to::wide>(high, by);
    const float most = max_nan(max_magnitude8(low), max_magnitude8(high));
    if (__any_sync(ALL_LANES, mine && !(right && most <= to::fast_max))) return false;
    if (!mine) return true;
    typename to::code *const codes =
        static_cast<typename to::code *>(p.codes) + it.codes + first_of_eight(p);
    to::store8(low, codes);
    to::store8(high, codes + p.head_dim / 2);
    return true;
}

// Quotients too small for divide8 are 0 beside any row scale, so only a row of nothing else needs
// the slow way, as one that clips does: beyond 127 times f16's largest.
static __device__ __forceinline__ bool store_int8_eights(const kv8_append_plane &p, const Item &it,
                                                         bool mine, float low[8], float high[8],
                                                         const divisor &by) {
    const bool right = divide8<false>(low, by) & divide8<false>(high, by);
    float most = mine ? max_nan(max_magnitude8(low), max_magnitude8(high)) : 0.0f;
    for (int32_t step = 1 << p.lanes_log2 >> 1; step > 0; step /= 2)
        most = max_nan(most, __shfl_xor_sync(ALL_LANES, most, step));
    const bool fine = right && most <= 127.0f * 65504.0f && (by.exact || most > KV8_NEAR_MIN);
    if (__any_sync(ALL_LANES, mine && !fine)) return false;
    if (!mine) return true;
    const uint16_t code = most == 0 ? 0 : int8_row_scale(most);
    const float row_scale = __half2float(__ushort_as_half(code));
    divide8_by_row(low, row_scale);
    divide8_by_row(high, row_scale);
    const int32_t d = first_of_eight(p);
    int8_t *const codes = static_cast<int8_t *>(p.codes) + it.codes + d;
    int8_store8(low, codes);
    int8_store8(high, codes + p.head_dim / 2);
    if (d == 0) store_row_scale(p, it, code);
    return true;
}

// A thread's share of a pass, as it lies in memory; and from where the next one comes.
template <typename SOURCE>
struct Share {
    eight<SOURCE> low, high;
};
template <typename SOURCE>
struct SourceCursor {
    Cursor at;
    const SOURCE *from;
    int32_t num_rows;  // of the block; 0: the thread has no elements
};
template <typename SOURCE>
static __device__ __forceinline__ SourceCursor<SOURCE> first_source(const kv8_append_kernel_args &a,
                                                                    const kv8_append_plane &p,
                                                                    int32_t num_rows) {
    const int32_t d = first_of_eight(p);
    SourceCursor<SOURCE> c;
    c.at = cursor_at(a, p, 0);
    c.from = source_of<SOURCE>(p, first_row(a) + c.at.row, c.at.head) + d;
    c.num_rows = d < p.head_dim / 2 ? num_rows : 0;
    return c;
}
// Loads and goes on to the next pass.
template <typename SOURCE>
static __device__ __forceinline__ Share<SOURCE> load_share(const kv8_append_kernel_args &a,
                                                           const kv8_append_plane &p,
                                                           SourceCursor<SOURCE> &c) {
    Share<SOURCE> raw = {};
    if (c.at.row < c.num_rows) {
        raw.low = load8(c.from);
        raw.high = load8(c.from + p.head_dim / 2);
    }
    c.at.row += p.step_rows;
    c.at.head += p.step_heads;
    c.from += p.step_source;
    if (c.at.head >= a.num_kv_heads) {
        c.at.head -= a.num_kv_heads;
        c.at.row++;
        c.from += p.wrap_source;
    }
    return raw;
}

template <kv8_dtype DTYPE, typename SOURCE, typename ROTATION>
static __device__ __forceinline__ bool store_share(const kv8_append_kernel_args &a,
                                                   const kv8_append_plane &p, const Item &it,
                                                   const Share<SOURCE> &raw) {
    const int32_t d = first_of_eight(p);
    const bool mine = it.there && d < p.head_dim / 2;
    const divisor by = make_divisor(mine ? scale_of(p, it) : 1.0f);
    float low[8], high[8];
    widen8(raw.low, low);
    widen8(raw.high, high);
    if (ROTATION::rotates && mine) ROTATION::eights(a, it.row, d, low, high);
    if constexpr (DTYPE == KV8_INT8)
        return store_int8_eights(p, it, mine, low, high, by);
    else
        return store_eights<DTYPE>(p, it, mine, low, high, by);
}

// --- the kernels ---

static __device__ __forceinline__ void find_places(const kv8_append_kernel_args &a,
                                                   const kv8_append_plane &p, int32_t num_rows,
                                                   Place *places) {
    const int32_t row = threadIdx.x;
    if (row < num_rows) places[row] = find_place(a, p, first_row(a) + row);
    __syncthreads();
}

// The passes that must go the slow way, as bits; of passes there are at most 32. They wait until
// the end: the fast loop then holds nothing across the slow code.
template <kv8_dtype DTYPE, typename SOURCE, typename ROTATION>
static __device__ __forceinline__ uint32_t append_dtype(const kv8_append_kernel_args &a,
                                                        const kv8_append_plane &p,
                                                        const Place *places, int32_t num_rows,
                                                        Cursor at, SourceCursor<SOURCE> source,
                                                        Share<SOURCE> next) {
    uint32_t slow = 0;
#pragma unroll 1
    for (int32_t pass = 0; pass < p.num_passes; pass++) {
        const Share<SOURCE> raw = next;
        const Item it = get_item(a, p, places, num_rows, at);
        at = source.at;
        next = load_share(a, p, source);  // past the last pass, of no row
        if (!store_share<DTYPE, SOURCE, ROTATION>(a, p, it, raw)) slow |= 1u << pass;
    }
    return slow;
}

template <typename SOURCE, typename ROTATION>
static __device__ __forceinline__ void append_eights(const kv8_append_kernel_args &a,
                                                     const kv8_append_plane &p, Place *places) {
    const int32_t num_rows = rows_of_block(a);
    SourceCursor<SOURCE> source = first_source<SOURCE>(a, p, num_rows);
    const Cursor at = source.at;
    const Share<SOURCE> first = load_share(a, p, source);
    find_places(a, p, num_rows, places);
    uint32_t slow = 0;
#define KV8_APPEND(DTYPE)                                                                        \
    case DTYPE:                                                                                  \
        slow = append_dtype<DTYPE, SOURCE, ROTATION>(a, p, places, num_rows, at, source, first); \
        break;
#define KV8_APPEND_FLOAT8(words, rule, name, dtype, mantissa, bias, max) KV8_APPEND(dtype)
    switch (p.dtype) {
        KV8_APPEND(KV8_F32)
        KV8_APPEND(KV8_BF16)
        KV8_APPEND(KV8_F16)
        KV8_FLOAT8_FORMATS(KV8_APPEND_FLOAT8)
        KV8_APPEND(KV8_INT8)
    }
#undef KV8_APPEND_FLOAT8
#undef KV8_APPEND
    for (; slow != 0; slow &= slow - 1)
        append_ones<SOURCE, ROTATION>(
            a, p, get_item(a, p, places, num_rows, cursor_at(a, p, __ffs(slow) - 1)));
}

template <typename SOURCE, bool EIGHTS, typename ROTATION>
static __device__ __forceinline__ void append_plane(const kv8_append_kernel_args &a,
                                                    const kv8_append_plane &p, Place *places) {
    if (EIGHTS) return append_eights<SOURCE, ROTATION>(a, p, places);
    const int32_t num_rows = rows_of_block(a);
    find_places(a, p, num_rows, places);
    for (int32_t pass = 0; pass < p.num_passes; pass++)
        append_ones<SOURCE, ROTATION>(a, p,
                                      get_item(a, p, places, num_rows, cursor_at(a, p, pass)));
}

// blockIdx.y: K (rotated) or V. Each has code of its own, in which its plane's fields are operands
// at fixed places of the constant bank.
template <typename SOURCE, bool EIGHTS, typename ROTATION>
static __device__ __forceinline__ void append_rows(const kv8_append_kernel_args &a) {
    __shared__ Place places[KV8_APPEND_MAX_ROWS];
    take_turn();
    if (blockIdx.y == 0)
        append_plane<SOURCE, EIGHTS, ROTATION>(a, a.plane[0], places);
    else
        append_plane<SOURCE, EIGHTS, Unrotated>(a, a.plane[1], places);
}

}  // namespace kv8
