// decode_pieces.cuh - batch_invariant: what a row's result is made of depends on its own keys
// alone, and so do its bits.
//
// Keys are cut at multiples of piece_units granules, counted from key 0, and a piece's granules go
// to slices by their place too. Results are folded in order: pieces to a group, groups to the
// whole. Which block computes what is free: a unit of the line is a piece; a group, where pieces
// are more than there are slots for; or a whole stream. Blocks take equal ranges of units, whole
// streams in turn, and fold what they have alone in slots of their own.
//
// The line's functions are called, not inlined: they run beside the main loop, which has the
// registers. Where a producer runs them they are inlined too, before the kernel ahead in the stream
// has ended.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_combine.cuh"
#include "decode/decode_partition.cuh"

namespace kv8 {

// --- the line ---

// What the block has not taken yet, in shared memory.
struct Pieces {
    int unit, end;      // units: the next, and the end
    int run;            // pieces of a unit: 1, GROUP, or 0, all of a stream
    const Split *last;  // the piece taken last
};

// Units that hold the keys.
__device__ inline int units_of_pieces(const kv8_kernel_args &a, KeyRange keys, int run) {
    if (keys.end <= keys.begin) return 0;
    if (run == 0) return 1;
    const int tokens = a.decode.piece_units * TOKENS * run;
    return quotient(keys.end - 1, tokens) - quotient(keys.begin, tokens) + 1;
}

// By one warp. own_lengths: as sum_units(). Returns whether there are requests with rows and no
// key.
template <class C, class LENGTHS>
__device__ bool cut_pieces(const kv8_kernel_args &a, int *starts, Pieces &pieces,
                           LENGTHS &&own_lengths) {
    constexpr int MANY = 8;  // streams for each block: even enough
    Totals sum;
    int run = 1;
    for (;;) {
        sum = sum_units<C>(a, starts, own_lengths,
                           [&](KeyRange keys) { return units_of_pieces(a, keys, run); });
        if (run == 0 || sum.units <= a.decode.max_slots) break;
        run = run == 1 && sum.streams < MANY * int(gridDim.x) ? GROUP : 0;
    }
    Pieces all = {int(blockIdx.x), sum.units, run, nullptr};
    if (run > 0) {
        all.unit = quotient(sum.units * blockIdx.x, gridDim.x);
        all.end = quotient(sum.units * (blockIdx.x + 1), gridDim.x);
    }
    if (threadIdx.x % 32 == 0) pieces = all;
    __syncwarp();
    return sum.any_empty;
}

// The piece behind `last`, in the same stream: all else is as it was.
__device__ inline void follow_piece(const kv8_kernel_args &a, const Split &last, Split &into) {
    constexpr int WORDS = sizeof(Split) / 4;
    static_assert(WORDS <= 32 && sizeof(Split) % 4 == 0);
    const int lane = threadIdx.x % 32, index = last.piece.index + 1;
    const int begin = index * a.decode.piece_units, end = begin + a.decode.piece_units;
    if (lane < WORDS)
        reinterpret_cast<int *>(&into)[lane] = reinterpret_cast<const int *>(&last)[lane];
    __syncwarp();
    if (lane == 0) {
        into.piece.index = index;
        into.granule_begin = begin;
        into.granule_end = max(min(end, (into.any.end + TOKENS - 1) / TOKENS), begin);
    }
    // The page table of the one behind, if there is one.
    const int32_t *const entries = into.pages + divide(end * TOKENS, a.by_page) + lane * 32;
    if (lane < 4) asm volatile("prefetch.global.L2 [%0];" ::"l"(entries));
}

// The block's next piece from another stream, as next_split().
template <class C, class LENGTHS>
__device__ void open_piece(const kv8_kernel_args &a, const int *starts, Pieces &pieces, Split &into,
                           LENGTHS &&lengths_of) {
    const bool writes = threadIdx.x % 32 == 0;
    const int run = pieces.run, tokens = a.decode.piece_units * TOKENS;
    int unit = pieces.unit;
    bool found = false;
    while (!found && unit < pieces.end) {
        const int b = find_request(a, starts, unit);
        const Lengths lengths = lengths_of(b);
        const Request r = make_request(a, b, lengths);
        const KeyRange keys = request_keys(a, r);
        const int units = units_of_pieces(a, keys, run), before = unit - starts[b];
        const int index = quotient(before, units), nth = before - index * units;
        const int first_unit = run == 0 ? 0 : quotient(keys.begin, tokens * run);
        const KeyRange any = open_stream<C>(a, r, index, into);
        // A tile whose rows see nothing has one piece, without keys.
        const int first = min(quotient(any.begin, tokens), quotient(keys.end - 1, tokens));
        const int last = max(any.end > 0 ? quotient(any.end - 1, tokens) : 0, first);
        // The block's units of the stream, and what of them some row of the tile sees.
        const int own = run == 0 ? 1 : min(pieces.end - unit, units - nth);
        const int from = run == 0 ? first : max(first, (first_unit + nth) * run);
        const int to = run == 0 ? last : min(last, (first_unit + nth + own) * run - 1);
        found = from <= to;  // others of the request may see those keys
        if (writes && found) {
            const int seen = divide(any.begin / TOKENS, a.decode.by_slices) * a.decode.num_slices;
            const int begin = max(from * a.decode.piece_units, seen);
            const int end = min((from + 1) * a.decode.piece_units, (any.end + TOKENS - 1) / TOKENS);
            into.request = r, into.pages = request_pages(a, b, lengths);
            into.granule_begin = begin, into.granule_end = max(end, begin);
            into.piece = {from, first, last, from, to, run, unit - nth - first_unit};
        }
        unit += run == 0 ? int(gridDim.x) : own;
    }
    __syncwarp();  // all lanes have read what changes now
    if (writes) pieces.unit = unit;
    if (writes && !found) into.stream = -1;
}

template <class C, class LENGTHS>
__device__ void next_piece(const kv8_kernel_args &a, const int *starts, Pieces &pieces, Split &into,
                           LENGTHS &&lengths_of) {
    const Split *const last = pieces.last;
    if (last != nullptr && last->piece.index < last->piece.own_last)
        follow_piece(a, *last, into);
    else
        open_piece<C>(a, starts, pieces, into, lengths_of);
    __syncwarp();
    if (threadIdx.x % 32 == 0) pieces.last = &into;
    __syncwarp();
}

// From what lies in memory.
template <class C>
__device__ __noinline__ bool cut_pieces(const kv8_kernel_args &a, int *starts, Pieces &pieces) {
    return cut_pieces<C>(a, starts, pieces, own_loaded(a));
}
template <class C>
__device__ __noinline__ void next_piece(const kv8_kernel_args &a, const int *starts, Pieces &pieces,
                                        Split &into) {
    next_piece<C>(a, starts, pieces, into, [&](int b) { return load_lengths(a, b); });
}

// --- results ---

// o and sums of a slot's fragment.
template <class C>
__device__ float4 load_o(const kv8_kernel_args &a, int slot, int f) {
    const int64_t at = int64_t(slot) * a.decode.heads_per_block * C::FRAGMENTS + f;
    return __ldcg(reinterpret_cast<const float4 *>(a.decode.partials) + at * 32 + threadIdx.x % 32);
}
template <class C>
__device__ float4 load_sums(const kv8_kernel_args &a, int slot, int f) {
    const int64_t at = int64_t(slot) * a.decode.heads_per_block * C::FRAGMENTS + f;
    return __ldcg(reinterpret_cast<const float4 *>(a.decode.partial_sums) + at * 4 +
                  threadIdx.x % 4);
}

// Joins one row's later keys to `o` and `sum`, by one arithmetic everywhere: what is empty leaves
// the other's bits.
__device__ inline float fold(float x, float keep, float y, float weight) {
    return __fmaf_rn(y, weight, __fmul_rn(x, keep));
}
__device__ inline void fold(Partial &all, const float4 &o, float2 sum, float2 keep, float2 w) {
    all.o = {fold(all.o.x, keep.x, o.x, w.x), fold(all.o.y, keep.y, o.y, w.y),
             fold(all.o.z, keep.x, o.z, w.x), fold(all.o.w, keep.y, o.w, w.y)};
    all.sum = {fold(all.sum.x, keep.x, sum.x, w.x), fold(all.sum.y, keep.y, sum.y, w.y)};
}
// Joins a slot's result, of earlier keys, to `part`.
template <class C>
__device__ void fold_before(const kv8_kernel_args &a, int slot, int f, Partial &part) {
    const float4 sums = load_sums<C>(a, slot, f);
    Partial all = {load_o<C>(a, slot, f), {sums.x, sums.y}, {sums.z, sums.w}};
    const float2 top = {fmaxf(all.max.x, part.max.x), fmaxf(all.max.y, part.max.y)};
    fold(all, part.o, part.sum, {exp2_fast(all.max.x - top.x), exp2_fast(all.max.y - top.y)},
         {exp2_fast(part.max.x - top.x), exp2_fast(part.max.y - top.y)});
    part = all, part.max = top;
}
// Joins `count` slots in order, eight at a time: slot_of(n), n < count. Lane g looks after the
// maxima and sums of the n-th, n % 8 = g.
template <class C, class SLOT>
__device__ Partial fold_slots(const kv8_kernel_args &a, int f, int count, SLOT &&slot_of) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    Partial all = no_partial();
#pragma unroll 1
    for (int done = 0; done < count; done += 8) {
        float4 own = {NO_KEY, NO_KEY, 0, 0}, parts[8];
        if (done + g < count) own = load_sums<C>(a, slot_of(done + g), f);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            parts[n] = {0, 0, 0, 0};
            if (done + n < count) parts[n] = load_o<C>(a, slot_of(done + n), f);
        }
        float2 top = {fmaxf(own.x, all.max.x), fmaxf(own.y, all.max.y)};
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
            const float x = __shfl_up_sync(~0u, top.x, lanes),
                        y = __shfl_up_sync(~0u, top.y, lanes);
            top = {fmaxf(top.x, x), fmaxf(top.y, y)};  // a lane without one gets its own
        }
        float2 before = {__shfl_up_sync(~0u, top.x, 4), __shfl_up_sync(~0u, top.y, 4)};
        if (g == 0) before = all.max;
        const float2 keep = {exp2_fast(before.x - top.x), exp2_fast(before.y - top.y)};
        const float2 w = {exp2_fast(own.x - top.x), exp2_fast(own.y - top.y)};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const auto of = [&](float x) { return __shfl_sync(~0u, x, n * 4 + c); };
            fold(all, parts[n], {of(own.z), of(own.w)}, {of(keep.x), of(keep.y)},
                 {of(w.x), of(w.y)});
        }
        all.max = {__shfl_sync(~0u, top.x, 28 + c), __shfl_sync(~0u, top.y, 28 + c)};
    }
    return all;
}

// A turn of combining: what is folded, and the slot that takes it.
struct PieceTurn {
    int count, zero, at, step;  // slots zero, at + step, at + 2 * step..; count 0: warps' results
    int before, all_before;     // slots that are folded in ahead, the second last; -1: none
    int to;                     // -1: the rows are whole
};
// With the warps' results.
__device__ inline PieceTurn first_turn(const kv8_kernel_args &a, const Piece &p) {
    const int begin = max(p.index / GROUP * GROUP, p.first);
    const int end = min(p.index / GROUP * GROUP + GROUP - 1, p.last);
    const int own = a.decode.max_slots + 2 * blockIdx.x;  // and the next
    PieceTurn turn = {0, 0, 0, 0, -1, -1, -1};
    if (p.run == 1) {
        if (p.first != p.last) turn.to = p.slot + p.index;
        return turn;
    }
    if (p.index > begin) turn.before = own;
    if (p.index < end) {
        turn.to = own;
    } else if (p.run == GROUP) {
        if (p.first / GROUP != p.last / GROUP) turn.to = p.slot + p.index / GROUP;
    } else {
        if (begin > p.first) turn.all_before = own + 1;
        if (end < p.last) turn.to = own + 1;
    }
    return turn;
}
// The turn after one that has stored its result; false: it is another block's, or this one's later.
template <class C>
__device__ bool next_turn(const kv8_kernel_args &a, const Piece &p, PieceTurn &turn) {
    const int first_group = p.first / GROUP, last_group = p.last / GROUP;
    uint32_t *const of_groups = a.decode.arrivals;
    uint32_t *const of_streams = of_groups + int64_t(a.decode.max_slots) * C::WARPS;
    if (turn.to >= a.decode.max_slots) return false;
    if (turn.count == 0 && p.run == 1) {
        const int group = p.index / GROUP;
        const int begin = max(group * GROUP, p.first), end = min(group * GROUP + GROUP - 1, p.last);
        const int slot = p.slot + begin;
        if (p.index < min(end, p.own_last)) return false;  // the block's last counts all its own
        turn = {end - begin + 1, slot, slot, 1, -1, -1, first_group == last_group ? -1 : slot};
        return Arrival(of_groups + int64_t(slot) * C::WARPS, turn.count,
                       p.index - max(begin, p.own_first) + 1)
            .is_last();
    }
    const int zero = p.slot + (p.run == 1 ? p.first : first_group);
    const int at = p.slot + (p.run == 1 ? first_group * GROUP : first_group);
    turn = {last_group - first_group + 1, zero, at, GROUP / p.run, -1, -1, -1};
    return Arrival(of_streams + int64_t(zero) * C::WARPS, turn.count).is_last();
}
// As combine_splits().
template <class C>
__device__ void combine_pieces(const kv8_kernel_args &a, const Split &p, const uint8_t *rings,
                               const RowEnd *ends) {
    const int fragments = a.decode.heads_per_block * C::FRAGMENTS, warp = threadIdx.x / 32;
    if (warp >= fragments) return;
    const RowPair<C> rows(a, p, Item<C>(threadIdx.x).row);
    PieceTurn turn = first_turn(a, p.piece);
    for (;;) {
#pragma unroll 1
        for (int f = warp; f < fragments; f += C::WARPS) {
            if (C::NT > 1 && f % C::NT * 8 >= p.num_rows) continue;  // no such rows
            const Item<C> item(f * 32 + threadIdx.x % 32);
            Partial part =
                turn.count > 0
                    ? fold_slots<C>(
                          a, f, turn.count,
                          [&](int n) { return n == 0 ? turn.zero : turn.at + n * turn.step; })
                    : combine_item<C>(a, rings, item, f);
            if (turn.before >= 0) fold_before<C>(a, turn.before, f, part);
            if (turn.all_before >= 0) fold_before<C>(a, turn.all_before, f, part);
            if (turn.to >= 0)
                store_partial<C>(a, turn.to, f, part);
            else
                finish_item(a, p, item, rows, ends + item.slot_row, part);
        }
        if (turn.to < 0 || !next_turn<C>(a, p.piece, turn)) return;
    }
}

}  // namespace kv8
