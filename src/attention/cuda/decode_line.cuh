// decode_line.cuh - the line of all streams: its shares, and the pieces of a block, one by one.
//
// All of it is one warp's work: lengths are few, and the others wait for the first piece only.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode.cuh"

namespace kv8 {

// n / d for 0 <= n, 0 < d.
__device__ inline int quotient(int n, int d) {
    const float inverse = __fdividef(1.0f, __int2float_rn(d));
    int q = __float2int_rz(__int2float_rn(n) * inverse);
    q += __float2int_rn(__int2float_rn(n - q * d) * inverse);
    const int rest = n - q * d;
    return rest < 0 ? q - 1 : rest >= d ? q + 1 : q;
}

// A unit is one granule of one stream.
struct Line {
    int total, num_blocks;  // blocks that get a share
    int share;
    int unit, end;  // what the block has not taken yet of its share

    __device__ int begin(int block) const { return min(block * share, total); }
    // The block whose share holds a unit.
    __device__ int owner(int at) const { return quotient(at, share); }
};

template <class C>
__device__ int row_tiles(const kv8_decode_args &a, int qo_len) {
    return (qo_len * a.group_size + C::ROWS - 1) / C::ROWS;
}

struct Totals {
    int units, streams;
    bool any_empty;  // requests with rows and no key
};

// Where each request starts in the line. A lane takes consecutive requests.
template <class C>
__device__ Totals lay_line(const kv8_decode_args &a, int *starts) {
    const int lane = threadIdx.x % 32, each = (a.batch + 31) / 32;
    const int first = min(lane * each, a.batch), last = min(first + each, a.batch);
    const int head_blocks = a.head_blocks;
    Totals sum = {0, 0, false};
#pragma unroll 2
    for (int b = first; b < last; b++) {
        const Request r = load_request(a, b);
        const int streams = row_tiles<C>(a, r.qo_len) * head_blocks;
        const int units = granules_of(request_keys(a, r)) * streams;
        starts[b] = units;
        sum.units += units, sum.streams += streams;
        sum.any_empty |= units == 0 && r.qo_len > 0;
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
            __any_sync(~0u, sum.any_empty) != 0};
}

// No more blocks than there is work for, and where streams are few a multiple of them, so that even
// streams are cut evenly.
__device__ inline Line cut_line(const kv8_decode_args &a, const Totals &sum) {
    Line line;
    int blocks = min(int(gridDim.x), max(divide(sum.units + a.min_units - 1, a.by_min_units), 1));
    if (sum.streams > 0 && sum.streams <= blocks) {
        const int even = quotient(blocks, sum.streams) * sum.streams;
        if (even * 8 >= blocks * 7) blocks = even;
    }
    line.total = sum.units, line.num_blocks = blocks;
    line.share = max(quotient(sum.units + blocks - 1, blocks), 1);
    line.unit = line.begin(blockIdx.x), line.end = line.begin(blockIdx.x + 1);
    return line;
}

// The last request that starts at or before a unit.
__device__ inline int find_request(const kv8_decode_args &a, const int *starts, int unit) {
    const int lane = threadIdx.x % 32, each = (a.batch + 31) / 32;
    const int coarse = lane * each;
    const int lanes = __popc(__ballot_sync(~0u, coarse < a.batch && starts[coarse] <= unit));
    if (each == 1) return lanes - 1;
    const int first = (lanes - 1) * each;
    int found = 0;
    for (int n = lane; n - lane < each; n += 32)
        found += __popc(
            __ballot_sync(~0u, n < each && first + n < a.batch && starts[first + n] <= unit));
    return first + found - 1;
}

// The block's next piece, by all lanes of a warp.
template <class C>
__device__ Piece next_piece(const kv8_decode_args &a, const int *starts, Line &line) {
    Piece p;
    p.stream = -1;
    if (line.unit >= line.end) return p;
    const int b = find_request(a, starts, line.unit), start = starts[b];
    p.request = load_request(a, b);
    p.pages = request_pages(a, b);
    const KeyRange keys = request_keys(a, p.request);
    const int granules = granules_of(keys), begin = keys.begin / TOKENS;
    const int head_blocks = a.head_blocks;
    const int index = quotient(line.unit - start, granules);
    const int tile = divide(index, a.by_head_blocks), heads = index - tile * head_blocks;
    p.head_begin = heads * a.heads_per_block;
    p.row_begin = tile * C::ROWS;
    p.num_rows = min(C::ROWS, p.request.qo_len * a.group_size - p.row_begin);
    const KeyRange top = visible_keys(a, p.request, divide(p.row_begin, a.by_group));
    const KeyRange low =
        visible_keys(a, p.request, divide(p.row_begin + p.num_rows - 1, a.by_group));
    p.any = {min(top.begin, low.begin), low.end};
    p.all = {low.begin, top.end};
    if (a.mask_bits != nullptr) p.all = {0, 0};
    // Tiles of all requests before this one: at most (qo_begin * group_size) / ROWS + request.
    p.stream = (p.request.qo_begin * a.group_size / C::ROWS + b + tile) * head_blocks + heads;
    const int stream_begin = start + index * granules, stream_end = stream_begin + granules;
    p.granule_begin = begin + line.unit - stream_begin;
    p.granule_end = begin + min(line.end, stream_end) - stream_begin;
    p.first_block = line.owner(stream_begin);
    p.num_pieces = line.owner(stream_end - 1) - p.first_block + 1;
    // A share's first piece may be the end of a stream, its last the beginning of another.
    const int block = blockIdx.x;
    p.first_slot = 2 * p.first_block + (line.begin(p.first_block) < stream_begin);
    p.slot = block == p.first_block ? p.first_slot : 2 * block;
    line.unit += p.granule_end - p.granule_begin;
    return p;
}

}  // namespace kv8
