// decode.cuh - decode attention over paged K and V on tensor cores: shapes, requests, splits.
//
// Work: a *stream* is (request, tile of ROWS packed query rows, block of KV heads); its keys are
// counted in granules of 16 tokens. All streams stand in one line, which is partitioned evenly:
// block i of the grid takes the i-th range, so many short and one very long request balance alike.
// A range's part of a stream is a *split*. A stream of one split is finished by its block;
// otherwise splits store partial results in the workspace and the one that arrives last combines
// them, in key order; of many splits first groups, then those.
//
// Within a block every warp is on its own: one KV head or two neighbours, every num_slices-th
// granule, a private ring of cp.async stages; no barrier until the split ends. Scores run
// as K (tokens on M) . Q^T, so a group of 8 query heads fills N; codes are widened to f16 exactly,
// in registers. The running maximum is lazy: a reference per row that only moves when a score
// exceeds it by 2^14.
//
// Grid: any number of blocks, as many as fit the machine. Block: WARPS * 32. Bound by: memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "common/batch.cuh"
#include "common/softmax.cuh"
#include "decode/decode_tile.cuh"
#include "ptx_sm90.cuh"

namespace kv8 {

// IS_CLUSTER: of decode_cluster.cuh: one request without mask bits and soft cap, one split a block.
template <Format FK_, Format FV_, int DIM_, int NT_, int WARPS_, int STAGES_, bool GRANULE_PAGES_,
          bool IS_CLUSTER_ = false, int HEADS_ = 1>
struct DecodeConfig {
    static constexpr Format FK = FK_, FV = FV_;  // of K and of V: they know nothing of each other
    static constexpr int DIM = DIM_;
    static constexpr int NT = NT_;  // n-tiles of 8 packed query rows
    static constexpr int ROWS = NT * 8;
    static constexpr int WARPS = WARPS_, THREADS = WARPS * 32;
    static constexpr int STAGES = STAGES_;
    // Pages hold whole granules: one table entry for each. Otherwise one for every token.
    static constexpr bool GRANULE_PAGES = GRANULE_PAGES_;
    static constexpr bool IS_CLUSTER = IS_CLUSTER_;
    // KV heads of a warp, neighbours: their bytes of a token are copied as one row.
    static constexpr int HEADS = HEADS_;
    static constexpr bool HAS_PRODUCER = false;
    static constexpr bool HAS_PIECES = true;            // where batch_invariant asks for them
    static constexpr int SLICES = 0;                    // of a block, where not only the plan knows
    static constexpr int RING_WARPS = 1;                // whose result is one
    static constexpr int MOST_CACHED = 2;               // requests of a lane whose lengths it keeps
    static constexpr int P_PARTS = FV == BF16 ? 2 : 1;  // bf16 probabilities are kept to 16 bits
    using RK = Row<FK, DIM * HEADS>;
    using RV = Row<FV, DIM * HEADS>;
    using K = KeyTile<FK, DIM, RK>;
    using V = ValueTile<FV, DIM, RV>;
    // A stage: a granule of K, of V, and with int8 the words that have the scales of K's rows, then
    // of V's; where a token's place says nothing of which half, how far to shift follows each word.
    static constexpr int SCALES = RK::TILE_BYTES + RV::TILE_BYTES,
                         SCALE_PITCH = GRANULE_PAGES ? 4 : 8;
    static constexpr int HEAD_SCALES = 2 * TOKENS * SCALE_PITCH;
    static constexpr int SCALE_BYTES = FK == INT8 || FV == INT8 ? HEADS * HEAD_SCALES : 0;
    static constexpr int STAGE_BYTES = SCALES + SCALE_BYTES;
    // A warp's result of a head: float4 [FRAGMENTS][32 lanes] as the MMA leaves it, then maxima,
    // then sums.
    static constexpr int FRAGMENTS = DIM / 16 * NT;
    static constexpr int RESULT_BYTES = FRAGMENTS * 512 + 2 * ROWS * 4;
    // They take the place of the warp's ring once that is empty.
    static constexpr int RING_BYTES =
        (STAGES * STAGE_BYTES > HEADS * RESULT_BYTES ? STAGES * STAGE_BYTES
                                                     : HEADS * RESULT_BYTES) +
            127 &
        ~127;
    // After the rings: the first unit of every request in the line, one int each and one more.
    static constexpr int FIXED_BYTES = WARPS * RING_BYTES;
};

__device__ inline int granules_of(KeyRange k) {
    return k.end > k.begin ? (k.end + TOKENS - 1) / TOKENS - k.begin / TOKENS : 0;
}
__device__ inline KeyRange request_keys(const kv8_kernel_args &a, const Request &r) {
    if (r.qo_len == 0) return {0, 0};
    const KeyRange first = visible_keys(a, r, 0), last = visible_keys(a, r, r.qo_len - 1);
    return {min(first.begin, last.begin), last.end};
}

// Under batch_invariant a split is a piece: keys are cut at multiples of piece_units, wherever a
// stream begins; GROUP pieces from a multiple of GROUP on are a group.
constexpr int GROUP = 8;
struct Piece {
    int index, first, last;   // this one, the first and the last of the stream, from key 0 on
    int own_first, own_last;  // and of those the block takes one after another
    int run;                  // pieces that a block computes one after another: 1; GROUP; 0, all
    int slot;                 // partial results of piece (run 1) or group i lie at slot + i
};

// A block's part of one stream.
struct Split {
    Request request;
    const int32_t *pages;
    int row_begin, num_rows;  // packed rows: token * group_size + head of the group
    int head_begin;           // first KV head
    int granule_begin, granule_end;
    KeyRange any, all;  // keys that some row, that all rows see; masks and gaps make `all` empty
    bool has_gaps;      // some of its pages are not there: their keys are to be masked
    int stream;         // index among all streams; -1: there is no split, and none will follow
    // The stream's splits: how many, the block of the first, where its and this one's partial
    // results lie. Those of the n-th, n > 0, lie at 2 * (first_block + n).
    int num_splits, first_block, first_slot, slot;
    Piece piece;  // of a run under batch_invariant, which has this in place of the line above
};

// The page table of a split, or of the first pages of very many, comes to where loads find it soon.
// Only a hint: where lengths are not what they will be, the addresses may be none, and then nothing
// happens.
__device__ inline void prefetch_pages(const kv8_kernel_args &a, const Split &p) {
    constexpr int LINE = 32;  // entries
    if (p.stream < 0) return;
    const int first = divide(p.granule_begin * TOKENS, a.by_page) + threadIdx.x % 32 * LINE;
    const int last = divide(max(p.granule_end * TOKENS - 1, 0), a.by_page);
    if (first < last + LINE)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.pages + min(first, last)));
}

// The page of keys that nobody sees: like every id that is not there, not below num_pages.
constexpr int UNSEEN = INT32_MIN;
__device__ inline bool page_exists(const kv8_kernel_args &a, int page) {
    return uint32_t(page) < a.num_pages;
}
// Pages that somebody sees are not there, one for each of these lanes: their keys are to be masked.
__device__ inline void mark_gaps(const kv8_kernel_args &a, Split &p, uint32_t lanes) {
    p.has_gaps = true, p.all = {0, 0};
    if (a.bad_pages != nullptr && threadIdx.x % 32 == 0) atomicAdd(a.bad_pages, __popc(lanes));
}
// Does some row of the split see one of these keys?
__device__ inline bool mask_shows(const kv8_kernel_args &a, const Split &p, int key, int num_keys) {
    const int first_row = divide(p.row_begin, a.by_group);
    const int last_row = divide(p.row_begin + p.num_rows - 1, a.by_group);
    for (int q_token = first_row; q_token <= last_row; q_token++) {
        const KeyRange seen = visible_keys(a, p.request, q_token);
        for (int k = max(key, seen.begin); k < min(key + num_keys, seen.end); k++)
            if (mask_bit(a, p.request, q_token, k)) return true;
    }
    return false;
}

// Whether a mask may hide these keys from all rows of a split.
__device__ inline bool may_hide(const kv8_kernel_args &a, const Split &p, int key, int num_keys) {
    return a.mask_bits != nullptr && (key < p.all.begin || key + num_keys > p.all.end);
}
// The keys of a split with a mask that all rows see, up to the first that it hides from one: by a
// warp, once the mask's bits may be read.
__device__ inline void find_unmasked(const kv8_kernel_args &a, Split &p) {
    if (__builtin_expect(a.mask_bits == nullptr, 1) || p.stream < 0) return;
    const int first_row = divide(p.row_begin, a.by_group);
    const int last_row = divide(p.row_begin + p.num_rows - 1, a.by_group), lane = threadIdx.x % 32;
    const KeyRange top = visible_keys(a, p.request, first_row);
    const KeyRange low = visible_keys(a, p.request, last_row);
    const int begin = p.granule_begin * TOKENS, end = min(p.granule_end * TOKENS, top.end);
    const uint8_t *const bits = a.mask_bits + a.mask_indptr[p.request.index];
    int hidden = end;
#pragma unroll 1
    for (int q_token = first_row; q_token <= last_row; q_token++)
        hidden =
            min(hidden, first_hidden<1>(bits, int64_t(q_token) * p.request.kv_len, begin, end));
    if (hidden >= end) hidden = top.end;
    __syncwarp();
    if (lane == 0) p.all = {low.begin, hidden};
    __syncwarp();
}

}  // namespace kv8
