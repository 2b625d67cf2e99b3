// decode_partition.cuh - the line of all streams, its ranges, and the splits of a block one by one.
//
// All of it is one warp's work: lengths are few, and the others wait for the first split only.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode.cuh"

namespace kv8 {

// n / d for 0 <= n, 0 < d.
__device__ inline int quotient(int n, int d) {
    const float inverse = __fdividef(1.0f, __int2float_rn(d));
    int q = __float2int_rz(__int2float_rn(n) * inverse);
    q += __float2int_rn(__int2float_rn(n - q * d) * inverse);
    const int rest = n - q * d;
    return rest < 0 ? q - 1 : rest >= d ? q + 1 : q;
}

// The same where the quotient is below 2^20.
__device__ inline int small_quotient(int n, int d) {
    const int q = __float2int_rz(__int2float_rn(n) * __fdividef(1.0f, __int2float_rn(d)));
    const int rest = n - q * d;
    return rest < 0 ? q - 1 : rest >= d ? q + 1 : q;
}

// A unit is one granule of one stream, or as much time. Each stream has `split_units` more than
// granules, which stand for what a block spends between two splits.
struct Partition {
    int total, num_blocks;  // blocks that get a range
    int range;
    int unit, end;  // what the block has not taken yet of its range
    // Where all streams are of one length they are cut at the same places. even_units: units of a
    // stream then, whole ranges; 0 where streams differ. stream_units: of the longest in the line.
    int even_units, stream_units;

    __device__ int begin(int block) const { return min(block * range, total); }
    // The block whose range holds a unit.
    __device__ int owner(int at) const { return small_quotient(at, range); }
};

template <class C>
__device__ int row_tiles(const kv8_kernel_args &a, int qo_len) {
    return (qo_len * a.group_size + C::ROWS - 1) / C::ROWS;
}

struct Totals {
    int units, streams, longest;  // longest: units of a stream
    bool any_empty;               // requests with rows and no key
};

// A stream shorter than what lies between two counts as that long: those of a window are even.
__device__ inline int units_of(const kv8_kernel_args &a, KeyRange keys) {
    const int granules = granules_of(keys);
    return granules > 0 ? max(granules, a.decode.split_units) + a.decode.split_units : 0;
}

// Lengths of the requests of each lane: consecutive ones, few enough to stay in registers.
template <int MOST>
struct CachedLengths {
    Lengths of[MOST];

    __device__ const Lengths nth(int n) const {
        Lengths own = of[0];
#pragma unroll
        for (int i = 1; i < MOST; i++)
            if (n == i) own = of[i];
        return own;
    }
};
// Whether the line is laid before the kernel ahead in the stream has ended.
template <class C>
__device__ bool is_laid_early(const kv8_kernel_args &a) {
    return a.batch <= 32 * C::MOST_CACHED && (C::HAS_PRODUCER || a.decode.piece_units == 0);
}
__device__ inline int lengths_per_lane(const kv8_kernel_args &a) {
    return (a.batch + 31) / 32;
}
template <int MOST>
__device__ void load_cached(const kv8_kernel_args &a, CachedLengths<MOST> &cached) {
    const int each = lengths_per_lane(a), first = threadIdx.x % 32 * each;
    load_lengths(a, first, min(first + each, a.batch), cached.of);
}
template <int MOST>
__device__ bool unchanged(const kv8_kernel_args &a, const CachedLengths<MOST> &cached) {
    CachedLengths<MOST> now;
    load_cached(a, now);
    bool differs = false;
#pragma unroll
    for (int n = 0; n < MOST; n++) differs |= now.of[n] != cached.of[n];
    return !__any_sync(~0u, differs);
}
// What sum_units() asks for: of a lane's own requests, from what is cached and from memory.
template <int MOST>
__device__ auto own_cached(const CachedLengths<MOST> &cached) {
    return [&](int, int, Lengths(&of)[MOST]) {
#pragma unroll
        for (int n = 0; n < MOST; n++) of[n] = cached.of[n];
    };
}
__device__ inline auto own_loaded(const kv8_kernel_args &a) {
    return [&](int b, int end, auto &of) { load_lengths(a, b, end, of); };
}
// Of request b, by all lanes.
template <int MOST>
__device__ Lengths cached_lengths(const kv8_kernel_args &a, const CachedLengths<MOST> &cached,
                                  int b) {
    const int lane = small_quotient(b, lengths_per_lane(a));
    const Lengths own = cached.nth(b - lane * lengths_per_lane(a));
    return {__shfl_sync(~0u, own.qo_begin, lane), __shfl_sync(~0u, own.qo_end, lane),
            __shfl_sync(~0u, own.page_begin, lane), __shfl_sync(~0u, own.page_end, lane),
            __shfl_sync(~0u, own.last, lane)};
}

// A request's units to starts[b] and, with its streams, to `sum`; units_of(keys): a stream's.
template <class C, class UNITS>
__device__ __forceinline__ void count_request(const kv8_kernel_args &a, int *starts, int b,
                                              const Lengths &lengths, UNITS &&units_of,
                                              Totals &sum) {
    const Request r = make_request(a, b, lengths);
    const int streams = row_tiles<C>(a, r.qo_len) * a.decode.head_blocks;
    const int length = units_of(request_keys(a, r));
    starts[b] = length * streams;
    sum.units += length * streams, sum.streams += streams;
    sum.longest = max(sum.longest, length);
    sum.any_empty |= length == 0 && r.qo_len > 0;
}

// The first unit of each request in the line, and totals. A lane takes consecutive requests, some
// at once: own_lengths(b, end, of) are those of its requests from b on; units_of(keys) a stream's.
template <class C, class LENGTHS, class UNITS>
__device__ Totals sum_units(const kv8_kernel_args &a, int *starts, LENGTHS &&own_lengths,
                            UNITS &&units_of) {
    const int lane = threadIdx.x % 32, each = lengths_per_lane(a);
    const int first = min(lane * each, a.batch), last = min(first + each, a.batch);
    Totals sum = {0, 0, 0, false};
#pragma unroll 1
    for (int begin = first; begin < last; begin += C::MOST_CACHED) {
        Lengths of[C::MOST_CACHED];
        own_lengths(begin, last, of);
#pragma unroll
        for (int n = 0; n < C::MOST_CACHED; n++) {
            const int b = begin + n;
            if (b >= last) break;
            count_request<C>(a, starts, b, of[n], units_of, sum);
        }
    }
    const int own = sum.units;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int units = __shfl_up_sync(~0u, sum.units, d);
        const int streams = __shfl_up_sync(~0u, sum.streams, d);
        if (lane >= d) sum.units += units, sum.streams += streams;
    }
    int start = sum.units - own;
#pragma unroll 1
    for (int b = first; b < last; b++) {
        const int units = starts[b];
        starts[b] = start;
        start += units;
    }
    if (lane == 31) starts[a.batch] = sum.units;
    __syncwarp();
    return {__shfl_sync(~0u, sum.units, 31), __shfl_sync(~0u, sum.streams, 31),
            __reduce_max_sync(~0u, sum.longest), __any_sync(~0u, sum.any_empty) != 0};
}

// No more blocks than there is work for, and where streams are few and even a multiple of them, so
// that they are cut evenly.
__device__ inline Partition cut_partition(const kv8_kernel_args &a, const Totals &sum) {
    Partition partition;
    int blocks = min(int(gridDim.x),
                     max(divide(sum.units + a.decode.min_units - 1, a.decode.by_min_units), 1));
    partition.total = sum.units, partition.even_units = 0, partition.stream_units = sum.longest;
    // Where there is a choice without the last few blocks, which start after the others.
    const int usual = sum.streams * 2 <= blocks ? blocks - blocks / 32 : blocks;
    const int each = sum.streams > 0 ? small_quotient(usual, sum.streams) : 0;
    const bool is_even = sum.units > 0 && sum.units == sum.streams * sum.longest;
    if (is_even && each * sum.streams * 8 >= blocks * 7) {
        const int granules = sum.longest - a.decode.split_units;
        blocks = each * sum.streams;
        partition.even_units = quotient(granules + each - 1, each) * each;
        partition.total = partition.even_units * sum.streams;
    }
    partition.range = max(quotient(partition.total + blocks - 1, blocks), 1);
    // The shortest are not split: what joins two splits costs more.
    if (is_even && sum.longest == 2 * a.decode.split_units) {
        blocks = min(int(gridDim.x), sum.streams);
        partition.total = sum.units, partition.even_units = 0;
        partition.range = small_quotient(sum.streams + blocks - 1, blocks) * sum.longest;
        blocks = small_quotient(sum.units + partition.range - 1, partition.range);
    }
    partition.num_blocks = blocks;
    partition.unit = partition.begin(blockIdx.x), partition.end = partition.begin(blockIdx.x + 1);
    return partition;
}

// The last request that starts at or before a unit.
__device__ inline int find_request(const kv8_kernel_args &a, const int *starts, int unit) {
    const int lane = threadIdx.x % 32, each = (a.batch + 31) / 32;
    const int coarse = lane * each;
    const int lanes = __popc(__ballot_sync(~0u, coarse < a.batch && starts[coarse] <= unit));
    if (each == 1) return max(lanes - 1, 0);
    const int first = max(lanes - 1, 0) * each;
    int found = 0;
    for (int n = lane; n - lane < each; n += 32)
        found += __popc(
            __ballot_sync(~0u, n < each && first + n < a.batch && starts[first + n] <= unit));
    return max(first + found - 1, 0);
}

// The request's index-th stream, without the keys of the split, to shared memory. Returns the keys
// that some row sees. What is known is written at once: this runs beside the main loop, which has
// the registers.
template <class C>
__device__ KeyRange open_stream(const kv8_kernel_args &a, const Request &r, int index,
                                Split &into) {
    const int tile = divide(index, a.decode.by_head_blocks);
    const int heads = index - tile * a.decode.head_blocks, row_begin = tile * C::ROWS;
    const int num_rows = min(C::ROWS, r.qo_len * a.group_size - row_begin);
    const KeyRange top = visible_keys(a, r, divide(row_begin, a.by_group));
    const KeyRange low = visible_keys(a, r, divide(row_begin + num_rows - 1, a.by_group));
    const KeyRange any = {min(top.begin, low.begin), low.end};
    if (threadIdx.x % 32 != 0) return any;
    into.row_begin = row_begin, into.num_rows = num_rows;
    into.head_begin = heads * a.decode.heads_per_block;
    into.any = any, into.all = {low.begin, top.end}, into.has_gaps = false;
    if (a.mask_bits != nullptr) into.all = {0, 0};
    // Tiles of all requests before this one: at most (qo_begin * group_size) / ROWS + request.
    into.stream =
        (r.qo_begin * a.group_size / C::ROWS + r.index + tile) * a.decode.head_blocks + heads;
    return any;
}

// The block's next split to shared memory, by all lanes of a warp; lengths_of(b) are a request's.
template <class C, class LENGTHS>
__device__ void next_split(const kv8_kernel_args &a, const int *starts, Partition &partition,
                           Split &into, LENGTHS &&lengths_of) {
    const bool writes = threadIdx.x % 32 == 0;
    if (partition.unit >= partition.end) {
        if (writes) into.stream = -1;
        return;
    }
    const bool is_even = partition.even_units > 0;
    // Of all streams.
    const int nth = is_even ? small_quotient(partition.unit, partition.even_units) : 0;
    const int unit = is_even ? nth * partition.stream_units : partition.unit;
    const int b = find_request(a, starts, unit);
    const Lengths lengths = lengths_of(b);
    const Request r = make_request(a, b, lengths);
    if (writes) into.request = r, into.pages = request_pages(a, b, lengths);
    const KeyRange keys = request_keys(a, r);
    const int granules = granules_of(keys), begin = keys.begin / TOKENS;
    const int stream_units = units_of(a, keys);
    const int index = small_quotient(unit - starts[b], stream_units);
    const KeyRange any = open_stream<C>(a, r, index, into);
    const int units = is_even ? partition.even_units : stream_units;
    const int stream_begin = is_even ? nth * units : starts[b] + index * units;
    const int stream_end = stream_begin + units, more = units - granules;
    // The units beside the granules are spread evenly among them, so that cuts are even too.
    const auto granule = [&](int at) {
        return begin + at - (more == 0 ? 0 : small_quotient(at * more, units));
    };
    const int end = min(partition.end, stream_end);
    const int first_block = partition.owner(stream_begin), block = blockIdx.x;
    // A range's first split may be the end of a stream, its last the beginning of another.
    const int first_slot = 2 * first_block + (partition.begin(first_block) < stream_begin);
    if (writes) {
        const int from = max(granule(partition.unit - stream_begin), any.begin / TOKENS);
        into.granule_begin = from;
        into.granule_end =
            max(min(granule(end - stream_begin), (any.end + TOKENS - 1) / TOKENS), from);
        into.num_splits = partition.owner(stream_end - 1) - first_block + 1;
        into.first_block = first_block, into.first_slot = first_slot;
        into.slot = block == first_block ? first_slot : 2 * block;
    }
    partition.unit = end;
}

}  // namespace kv8
