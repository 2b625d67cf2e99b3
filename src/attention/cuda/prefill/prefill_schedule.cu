// prefill_schedule.cu - cuts a prefill launch into items, longest first, on the device, so that a
// captured launch follows its lengths; before, where there is a mask, finds of each row where it
// begins to hide keys.
//
// Grid of the schedule: one block of 1024 threads. Traffic: the index arrays in, 64 bytes an item
// out. Bound by latency, of memory and of its instructions, which no cache has yet: what is in
// between lies in shared memory where it fits, and few loops are unrolled. Grid of masks: blocks
// of 8 warps that take a row each in turn. Traffic: the bits of keys that the rows may see. Bound
// by memory, of few rows by latency.
//
// Items go to whichever block of the main kernel is free, the longest first. Rounds in which every
// block takes a whole one come first; what is left, of which blocks would end up to an item apart,
// stands in a line that is cut at equal distances over the items' keys, a range a block. Where
// blocks have few items each, of about one length, and start together, all of them stand in the
// line, and a range is a block's own: nobody takes what another has time for. Items of few rows are
// bound by memory, which serves the heads of a token best together: those of about one length stay
// whole where that leaves blocks idle for less than half an item, and those of blocks of one
// warpgroup are cut at the same places for all heads. All of it depends on the lengths alone: equal
// inputs, equal bits.
//
// SPDX-License-Identifier: Apache-2.0
#include <stddef.h>

#include "prefill/prefill_item.cuh"
#include "prefill_schedule_args.h"
#include "take_turn.cuh"

namespace kv8 {

enum {
    SCHEDULE_THREADS = KV8_PREFILL_SCHEDULE_THREADS,
    SCHEDULE_WARPS = SCHEDULE_THREADS / 32,
    MASK_WARPS = KV8_PREFILL_MASK_THREADS / 32,
    LENGTH_BINS = SCHEDULE_THREADS,
    FITTING_BLOCKS = 512,  // what shared memory holds; more lies in the workspace
    FITTING_PARTS = 768,
    WARP_ITEMS = 8,  // that a warp has before it stores them
    MOST_SPLITS = 64,
    LEAST_TOGETHER = 3,  // splits that share their join
    // Tiles of a split at least, where blocks take several items, or one; equal splits that share
    // their join may have one.
    LEAST_TILES = 8,
    LEAST_EVEN_TILES = 2,
    EVEN_TILES = 8,  // what an equal split may have more than a range that is a block's own
    ITEM_TILES = 1,  // what starting and finishing an item costs, in tiles
    OWN_ITEMS = 3,   // up to so many of a length for each block, each range is a block's own
    LINE_ITEMS = 2,  // what a block takes of the line, in items
    THIN_ROWS = 128  // packed rows of an item, on average, up to which memory bounds it
};
// What blocks may be idle at the end, of an item and of all their items, for items that memory
// bounds to stay whole.
constexpr float IDLE_OF_ITEM = 0.5f, IDLE_OF_ALL = 0.25f;

// place: the bin of its length, then its rank.
struct SortedBlock {
    kv8_prefill_block block;
    int32_t place;
};
static_assert(sizeof(SortedBlock) <= sizeof(kv8_prefill_item), "lies where items will");

// An item of the line. place: the bin of its length, then its rank; of equal splits its place in
// the line, and where ranges are blocks' own its range.
struct Part {
    int32_t block, tile_begin, tile_end, slot;
    int16_t kv_head;
    int8_t split, num_splits;
    int32_t place;
};
static_assert(sizeof(Part) <= sizeof(kv8_prefill_broken), "lies where broken rows will");

// Where an item of the line begins, its first part and its first slot, if it has slots.
struct LineItem {
    int32_t at, part, slot;
};

struct __align__(16) Scratch {
    int32_t warp_sums[SCHEDULE_WARPS];
    int32_t bins[LENGTH_BINS];  // before: each request's first block, of so few requests
    union {                     // one after another
        SortedBlock found[FITTING_BLOCKS];
        LineItem line[SCHEDULE_THREADS + 1];
        kv8_prefill_item items[SCHEDULE_WARPS][WARP_ITEMS];
    };
    kv8_prefill_block blocks[FITTING_BLOCKS];
    Part parts[FITTING_PARTS];
};

// A value of each warp's last lane, to all: each lane has that of a warp.
__device__ static int exchange(int of_warp, Scratch &scratch) {
    __syncthreads();  // of the last call's readers
    if (threadIdx.x % 32 == 31) scratch.warp_sums[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return scratch.warp_sums[threadIdx.x % 32];
}
// Sum over all threads' values.
__device__ static int sum_of(int value, Scratch &scratch) {
    return __reduce_add_sync(~0u, exchange(__reduce_add_sync(~0u, value), scratch));
}
// Sum over all threads' values before this one; *total is everyone's.
__device__ static int scan(int value, Scratch &scratch, int *total) {
    const int lane = threadIdx.x % 32;
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    const int of_warp = exchange(sum, scratch);
    *total = __reduce_add_sync(~0u, of_warp);
    return __reduce_add_sync(~0u, lane < int(threadIdx.x) / 32 ? of_warp : 0) + sum - value;
}
static_assert(SCHEDULE_WARPS == 32, "a lane has a warp's sum");

__device__ static int32_t request_qo_len(const kv8_kernel_args &a, int32_t b) {
    const int32_t rows = a.qo_indptr[b + 1] - a.qo_indptr[b];
    return a.qo_lens == nullptr ? rows : min(rows, max(a.qo_lens[b], 0));
}
__device__ static int32_t request_kv_len(const kv8_kernel_args &a, int32_t b) {
    if (a.page_indptr == nullptr)
        return a.seq_lens != nullptr ? a.seq_lens[b] : a.kv_indptr[b + 1] - a.kv_indptr[b];
    const int32_t num_pages = a.page_indptr[b + 1] - a.page_indptr[b];
    return num_pages == 0 ? 0 : (num_pages - 1) * a.page_size + a.last_page_len[b];
}
// An item of a request's rows from row_begin on, but for its keys.
__device__ static kv8_prefill_item item_of(const kv8_kernel_args &a, int request, int row_begin) {
    kv8_prefill_item item = {};
    item.request = request;
    item.row_begin = row_begin;
    item.q_begin = a.qo_indptr[request];
    item.qo_len = request_qo_len(a, request);
    item.kv_len = request_kv_len(a, request);
    item.pages_at = a.page_indptr != nullptr ? a.page_indptr[request] : request * a.table_stride;
    return item;
}
// Keys of an item's rows: those that some may see, and those that all do. Whether the former may
// hold keys that no row sees.
__device__ static void find_keys(const kv8_kernel_args &a, kv8_prefill_item &item) {
    const ItemView v = view_item(a, item);
    const int first = first_query(a, v), last = last_query(a, v);
    KeyRange some = {row_begin(a, v, first), row_end(a, v, last)};  // they move right with the row
    KeyRange all = {row_begin(a, v, last), row_end(a, v, first)};
    if (a.key_begin != nullptr) {
        some = {INT32_MAX, 0}, all = {0, INT32_MAX};
#pragma unroll 4
        for (int query = first; query <= last; query++) {
            const KeyRange row = {row_begin(a, v, query), row_end(a, v, query)};
            all = {max(all.begin, row.begin), min(all.end, row.end)};
            if (row.begin == row.end) continue;
            const bool is_apart = row.begin > some.end || row.end < some.begin;
            item.has_gaps |= some.end > 0 && is_apart;
            some = {min(some.begin, row.begin), max(some.end, row.end)};
        }
        some.begin = min(some.begin, some.end);
    }
    item.seen_from = some.begin;
    item.seen_to = some.end;
    item.shared_from = all.begin;
    item.shared_to = all.end;
}
// whole_item gives an item of all keys of the rows from row_begin on, of the first KV head, as
// without a mask.
__device__ static void whole_item(const kv8_kernel_args &a, int request, int row_begin,
                                  kv8_prefill_item &item) {
    kv8_prefill_item found = item_of(a, request, row_begin);
    find_keys(a, found);
    const int to = (found.seen_to + KV8_PREFILL_TILE_KEYS - 1) / KV8_PREFILL_TILE_KEYS;
    found.tile_begin = found.seen_from / KV8_PREFILL_TILE_KEYS;
    found.tile_end = max(found.tile_begin, to);
    found.slot = -1;
    found.num_splits = 1;
    item = found;
}

// The last of `count` things that begins at or before i, where begin(n) grows with n.
template <class BEGIN>
__device__ static int last_before(int i, int count, BEGIN &&begin) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (begin(middle) <= i)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Rows of the i-th block, in order of requests. block_indptr: each request's first.
__device__ static kv8_prefill_block block_of(const kv8_kernel_args &a, const int32_t *block_indptr,
                                             int i) {
    const int request = last_before(i, a.batch, [&](int b) { return block_indptr[b]; });
    kv8_prefill_item item;
    whole_item(a, request, (i - block_indptr[request]) * a.prefill.block_rows, item);
    return {request, item.row_begin, item.tile_begin, item.tile_end};
}
__device__ static int length_of(const kv8_prefill_block &block) {
    return block.tile_end - block.tile_begin;
}

__device__ static int bin_of(int length, int shift) {
    return max(LENGTH_BINS - 1 - (length >> shift), 0);
}
__device__ static int bin_shift(const kv8_kernel_args &a) {
    int shift = 0;
    while (a.prefill.max_tiles >> shift >= LENGTH_BINS) shift++;
    return shift;
}

// Of `count` things each one's place, which is a bin, becomes its rank: by bin, and in order within
// one, so that it does not depend on a race. stride: words between two places.
__device__ static void rank_by_bins(int32_t *places, int stride, int count, Scratch &scratch) {
    int *const bins = scratch.bins, total;
    if (count == 0) return;
    bins[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += SCHEDULE_THREADS)
        atomicAdd(&bins[places[i * stride]], 1);
    __syncthreads();
    const int before_bin = scan(bins[threadIdx.x], scratch, &total);
    bins[threadIdx.x] = before_bin;
    __syncthreads();
    if (threadIdx.x < 32) {
        int bin = threadIdx.x < count ? places[threadIdx.x * stride] : -1;
#pragma unroll 1
        for (int first = 0; first < count; first += 32) {
            const int i = first + threadIdx.x;
            const int next = i + 32 < count ? places[(i + 32) * stride] : -1;
            const unsigned same = __match_any_sync(~0u, bin);
            const int before = __popc(same & ((1u << threadIdx.x) - 1));
            if (i < count) places[i * stride] = bins[bin] + before;
            __syncwarp();
            if (i < count && before == 0) bins[bin] += __popc(same);
            __syncwarp();
            bin = next;
        }
    }
    __syncthreads();
}
template <class THING>
__device__ static void rank_by_bins(THING *things, int count, Scratch &scratch) {
    rank_by_bins(&things->place, sizeof(THING) / sizeof(int32_t), count, scratch);
}

// Longest first; blocks of one length in order of requests.
__device__ static void sort_blocks(const kv8_kernel_args &a, const int32_t *block_indptr,
                                   kv8_prefill_block *blocks, int num_blocks, Scratch &scratch) {
    SortedBlock *const found =
        num_blocks <= FITTING_BLOCKS ? scratch.found : (SortedBlock *)a.prefill.items;
    const int shift = bin_shift(a);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS) {
        found[i].block = block_of(a, block_indptr, i);
        found[i].place = bin_of(length_of(found[i].block), shift);
    }
    __syncthreads();
    rank_by_bins(found, num_blocks, scratch);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS)
        blocks[found[i].place] = found[i].block;
    __syncthreads();
}

// How the blocks' work is handed out. All threads know it.
struct Handout {
    int num_whole;            // blocks of rows whose items are whole
    float range;              // of the line of the others; 0: no item is split
    bool is_even;             // one round: each item is cut into equal splits
    float of_tile;            // then: splits for each tile
    bool is_owned;            // no item is whole: each range is a block's own
    bool has_first;           // else: the first item of each block is
    bool has_heads_together;  // all heads of a block of rows are cut at the same places
    int least_even;           // tiles of an equal split
    bool is_together;         // all splits run at one time, each in a block of its own
};
__device__ static int tiles_of(const kv8_prefill_block &block) {
    return length_of(block) + ITEM_TILES;
}
__device__ static int even_splits(const Handout &h, int length) {
    const int splits = min((int)(h.of_tile * (length + ITEM_TILES)), length / h.least_even);
    return max(min(splits, (int)MOST_SPLITS), 1);
}
// start_together: no blocks of decode are ahead of some of them.
__device__ static Handout hand_out(const kv8_prefill_schedule_args &s,
                                   const kv8_prefill_block *blocks, int num_blocks,
                                   bool start_together, Scratch &scratch) {
    __shared__ int first_cut;
    const kv8_kernel_args &a = s.args;
    const int heads = a.num_kv_heads, machine = a.prefill.num_blocks;
    const int num_rows = a.qo_indptr[a.batch];
    int work = 0, total;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS) work += tiles_of(blocks[i]);
    total = sum_of(work, scratch);
    if (a.prefill.max_slots == 0 || total == 0) return {num_blocks};
    const float per_block = (float)heads / machine, share = total * per_block;
    const int longest = length_of(blocks[0]);
    Handout h = {0, share, false, machine / ((float)total * heads)};
    h.least_even = s.shares_joins ? 1 : LEAST_EVEN_TILES;
    const bool is_one_round = num_blocks * heads <= machine;
    const bool is_wide = a.prefill.block_rows > 64;
    const float even = (float)longest / even_splits(h, longest) + ITEM_TILES;
    h.has_first = start_together && (is_wide || is_one_round);
    const bool is_level = longest <= 2 * length_of(blocks[num_blocks - 1]);
    h.is_owned = start_together && is_wide && is_level &&
                 share < OWN_ITEMS * (longest + ITEM_TILES) &&
                 !(is_one_round && even <= share + EVEN_TILES);
    h.is_even = is_one_round && !h.is_owned;
    h.has_heads_together = !is_wide;
    const float items = num_blocks * per_block, idle = ceilf(items) - items;
    const int thin = is_wide ? min((int)THIN_ROWS, a.prefill.block_rows * 2 / 3) : (int)THIN_ROWS;
    const bool is_thin = num_rows * a.group_size <= thin * num_blocks;
    if (is_thin && is_level && !is_one_round && !h.is_owned && idle < IDLE_OF_ITEM &&
        idle < IDLE_OF_ALL * items)
        return {num_blocks};
    if (!h.is_even && !h.is_owned) {
        if (threadIdx.x == 0) first_cut = num_blocks;
        int before_all = 0;
        for (int first = 0; first < num_blocks; first += SCHEDULE_THREADS) {
            const int i = first + threadIdx.x;
            const int tiles = i < num_blocks ? tiles_of(blocks[i]) : 0;
            const int before = before_all + scan(tiles, scratch, &total);
            before_all += total;
            if (i < num_blocks && before * per_block + LINE_ITEMS * tiles > share)
                atomicMin(&first_cut, i);
        }
        __syncthreads();
        h.num_whole = first_cut * heads / machine * machine / heads;
        work = 0;
        for (int i = threadIdx.x; i < h.num_whole; i += SCHEDULE_THREADS)
            work += tiles_of(blocks[i]);
        h.range = share - sum_of(work, scratch) * per_block;
    }
    h.range = fmaxf(h.range, (float)longest / (MOST_SPLITS - 2));
    return h;
}

// Where an item is cut: at `first` and every `step` behind it, from the cut `from` on.
struct Cuts {
    float first, step;
    int from, splits;

    __device__ int begin(int split, int length) const {
        if (split == splits) return length;
        return split == 0 ? 0 : at(from + split - 1);
    }
    __device__ int at(int cut) const { return __float2int_rn(first + cut * step); }
};
// Of an item that begins at `line` of the line. No split is shorter than some tiles: ranges shorter
// than those are cut at every second of them, or less often, and an item's last cut may be left
// out, as its first.
__device__ static Cuts cuts_of(const Handout &h, int length, float line) {
    if (h.range == 0) return {0, 0, 0, 1};
    if (h.is_even) {
        const int splits = even_splits(h, length);
        return {(float)length / splits, (float)length / splits, 0, splits};
    }
    const int least = h.is_owned ? LEAST_EVEN_TILES : LEAST_TILES;
    const float step = fmaxf(ceilf((least + 1) / h.range), 1) * h.range;
    Cuts cuts = {(floorf(line / step) + 1) * step - line, step, 0, 1};
    cuts.from = cuts.at(0) < least;
    int last = (int)ceilf((length - cuts.first) / step);
    while (last >= cuts.from && length - cuts.at(last) < least) last--;
    cuts.splits = max(last + 1 - cuts.from, 0) + 1;
    return cuts;
}

// The line's parts, in order; returns how many.
__device__ static int cut_line(const kv8_kernel_args &a, const Handout &h,
                               const kv8_prefill_block *blocks, int num_blocks, Part *parts,
                               Scratch &scratch) {
    // KV heads that are cut at the same places, whose parts follow one another.
    const int together = h.has_heads_together ? a.num_kv_heads : 1;
    const int each = a.num_kv_heads / together, shift = bin_shift(a);
    const int count = (num_blocks - h.num_whole) * each;
    int line = 0, num_parts = 0, num_slots = 0, total;
    for (int first = 0; first < count; first += SCHEDULE_THREADS) {
        const int some = min(count - first, (int)SCHEDULE_THREADS), n = first + threadIdx.x;
        const bool is_item = threadIdx.x < some;
        const int length = is_item ? length_of(blocks[h.num_whole + n / each]) : 0;
        const int at = line + scan(is_item ? length + ITEM_TILES : 0, scratch, &total);
        line += total;
        int splits = is_item ? cuts_of(h, length, at).splits : 0;
        const int slots = splits > 1 ? splits * together : 0;
        int slot = num_slots + scan(slots, scratch, &total);
        num_slots += total;
        if (slots == 0) slot = -1;
        if (slot + slots > a.prefill.max_slots) slot = -1, splits = 1;
        const int part = num_parts + scan(splits * together, scratch, &total);
        if (is_item) scratch.line[threadIdx.x] = {at, part, slot};
        if (threadIdx.x == 0) scratch.line[some].part = num_parts + total;
        __syncthreads();
#pragma unroll 1
        for (int i = num_parts + threadIdx.x; i < num_parts + total; i += SCHEDULE_THREADS) {
            const int idx = last_before(i, some, [&](int k) { return scratch.line[k].part; });
            const LineItem item = scratch.line[idx];
            const int block = h.num_whole + (first + idx) / each, of_item = i - item.part;
            const int tiles = length_of(blocks[block]), split = of_item / together;
            const int head = (first + idx) % each + of_item % together;
            Cuts cuts = cuts_of(h, tiles, item.at);
            cuts.splits = (scratch.line[idx + 1].part - item.part) / together;
            const int begin = cuts.begin(split, tiles), end = cuts.begin(split + 1, tiles);
            const int from = blocks[block].tile_begin;
            const int slot =
                item.slot < 0 ? item.slot : item.slot + of_item % together * cuts.splits;
            parts[i] = {block,
                        from + begin,
                        from + end,
                        slot,
                        (int16_t)head,
                        (int8_t)split,
                        (int8_t)cuts.splits,
                        h.is_owned  ? min((int)((item.at + (begin + end) * 0.5f) / h.range),
                                          a.prefill.num_blocks - 1)
                        : h.is_even ? i
                                    : bin_of(end - begin, shift)};
        }
        num_parts += total;
    }
    __syncthreads();
    return num_parts;
}

// Each range of the line to the block of its number, in the order of the line.
__device__ static void give_ranges(const kv8_kernel_args &a, const Part *parts, int count) {
    const int machine = a.prefill.num_blocks;
    for (int i = threadIdx.x; i <= count; i += SCHEDULE_THREADS) {
        const int last = i < count ? parts[i].place : machine;
        for (int n = i > 0 ? parts[i - 1].place + 1 : 0; n <= last; n++)
            a.prefill.queue->own[n] = i;
    }
}

// An item and its place in the list: of the i-th part, or else of the i-th block of rows.
__device__ static int make_item(const kv8_prefill_schedule_args &s, const Handout &h,
                                const kv8_prefill_block *blocks, const Part *parts, int i,
                                kv8_prefill_item &item) {
    const kv8_kernel_args &a = s.args;
    const kv8_prefill_block block = blocks[parts != nullptr ? parts[i].block : i];
    whole_item(a, block.request, block.row_begin, item);
    if (a.mask_bits != nullptr) {
        const ItemView v = view_item(a, item);
        const int last = v.q_begin + last_query(a, v);
        int unmasked_to = INT32_MAX;
#pragma unroll 8
        for (int row = v.q_begin + first_query(a, v); row <= last; row++)
            unmasked_to = min(unmasked_to, s.unmasked_to[row]);
        item.shared_to = min(item.shared_to, unmasked_to);
        item.has_gaps |= unmasked_to < item.seen_to;
    }
    if (parts == nullptr) return i * a.num_kv_heads;
    const Part part = parts[i];
    item.kv_head = part.kv_head;
    item.tile_begin = part.tile_begin;
    item.tile_end = part.tile_end;
    item.slot = part.slot;
    item.split = part.split;
    item.num_splits = part.num_splits;
    item.is_together = h.is_together && part.num_splits >= LEAST_TOGETHER;
    return h.num_whole * a.num_kv_heads + (h.is_owned ? i : part.place);
}
// put_items stores items, those of whole blocks of rows for all KV heads, side by side, and those
// of parts. By all warps.
__device__ static void put_items(const kv8_prefill_schedule_args &s, const Handout &h,
                                 const kv8_prefill_block *blocks, const Part *parts, int num_parts,
                                 Scratch &scratch) {
    constexpr int WORDS = sizeof(kv8_prefill_item) / sizeof(uint4);
    constexpr int ALL = SCHEDULE_WARPS * WARP_ITEMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Those of parts begin with the first warp too.
    const int from_parts = (h.num_whole + ALL - 1) / ALL * ALL;
    kv8_prefill_item *const items = scratch.items[warp];
#pragma unroll 1
    for (int first = warp * WARP_ITEMS; first < from_parts + num_parts; first += ALL) {
        const bool is_part = first >= from_parts;
        const int end = is_part ? from_parts + num_parts : h.num_whole;
        const int some = min(end - first, (int)WARP_ITEMS);
        const int heads = is_part ? 1 : s.args.num_kv_heads, num_words = some * heads * WORDS;
        int place = 0;
        if (lane < some)
            place = make_item(s, h, blocks, is_part ? parts : nullptr,
                              first + lane - (is_part ? from_parts : 0), items[lane]);
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i - lane < num_words; i += 32) {
            const int item = i / WORDS / heads, head = i / WORDS % heads;
            const int to = __shfl_sync(~0u, place, item) + head;
            if (i >= num_words) continue;
            uint4 word = ((const uint4 *)&items[item])[i % WORDS];
            if (i % WORDS == 0) word.y += head;
            ((uint4 *)(s.args.prefill.items + to))[i % WORDS] = word;
        }
        __syncwarp();
    }
}
static_assert(offsetof(kv8_prefill_item, kv_head) == 4, "put_items counts heads");

// Every block for every KV head.
__device__ static void make_items(const kv8_prefill_schedule_args &s,
                                  const kv8_prefill_block *blocks, int num_blocks,
                                  bool start_together, Scratch &scratch) {
    const kv8_kernel_args &a = s.args;
    const int heads = a.num_kv_heads, machine = a.prefill.num_blocks;
    Handout h = hand_out(s, blocks, num_blocks, start_together, scratch);
    // There is a cut a block at most, and by rounding one more.
    Part *const parts = (num_blocks - h.num_whole + 1) * heads + machine <= FITTING_PARTS
                            ? scratch.parts
                            : (Part *)a.prefill.broken;
    const int num_parts = cut_line(a, h, blocks, num_blocks, parts, scratch);
    if (h.is_owned)
        give_ranges(a, parts, num_parts);
    else if (!h.is_even)
        rank_by_bins(parts, num_parts, scratch);
    // Each block has one item, if any.
    h.is_together = s.shares_joins && h.is_even && h.has_first && num_parts <= machine;
    put_items(s, h, blocks, parts, num_parts, scratch);
    const int num_items = h.num_whole * heads + num_parts;
    kv8_prefill_queue *const queue = a.prefill.queue;
    for (int i = threadIdx.x; !h.is_owned && i <= machine; i += SCHEDULE_THREADS)
        queue->own[i] = h.has_first ? min(i, num_items) : 0;
    if (threadIdx.x == 0) {
        queue->num_items = num_items;
        queue->next = h.is_owned ? num_parts : h.has_first ? min(machine, num_items) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(KV8_PREFILL_MASK_THREADS)
    kv8_prefill_masks__sm80(const __grid_constant__ kv8_prefill_schedule_args s) {
    const kv8_kernel_args &a = s.args;
    take_turn();
    const int num_rows = a.qo_indptr[a.batch];
    for (int row = blockIdx.x * MASK_WARPS + threadIdx.x / 32; row < num_rows;
         row += gridDim.x * MASK_WARPS) {
        const int request = last_before(row, a.batch, [&](int b) { return a.qo_indptr[b]; });
        const kv8_prefill_item item = item_of(a, request, 0);
        const ItemView v = view_item(a, item);
        const int query = row - v.q_begin;
        if (query >= v.qo_len) continue;  // not in use: it may have no bits
        const int begin = row_begin(a, v, query), end = row_end(a, v, query);
        const int key =
            first_hidden<4>(RequestKeys(a, item).mask, (int64_t)query * v.kv_len, begin, end);
        if (threadIdx.x % 32 == 0) s.unmasked_to[row] = key < end ? key : INT32_MAX;
    }
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    kv8_prefill_schedule__sm80(const __grid_constant__ kv8_prefill_schedule_args s) {
    __shared__ Scratch scratch;
    const kv8_kernel_args &a = s.args;
    const int block_rows = a.prefill.block_rows;
    int32_t *const block_indptr = a.batch <= LENGTH_BINS ? scratch.bins : a.prefill.block_indptr;
    int num_blocks = 0, total, has_decode = 0;
    take_turn();
    for (int i = threadIdx.x; i < a.prefill.max_slots * (block_rows / 64); i += SCHEDULE_THREADS)
        a.prefill.arrivals[i] = 0;
    for (int first = 0; first < a.batch; first += SCHEDULE_THREADS) {
        const int b = first + threadIdx.x;
        const int rows = b < a.batch ? request_qo_len(a, b) : 0;
        // Requests of few rows may be left to decode.
        const bool is_decode = s.decode_lens != nullptr && rows <= s.decode_rows;
        const int blocks = is_decode ? 0 : (rows * a.group_size + block_rows - 1) / block_rows;
        const int before = scan(blocks, scratch, &total);
        if (b < a.batch) {
            block_indptr[b] = num_blocks + before;
            if (s.decode_lens != nullptr) s.decode_lens[b] = is_decode ? rows : 0;
        }
        num_blocks += total;
        has_decode |= is_decode && rows > 0;
    }
    has_decode = __syncthreads_or(has_decode);
    kv8_prefill_block *const blocks =
        num_blocks <= FITTING_BLOCKS ? scratch.blocks : a.prefill.blocks;
    sort_blocks(a, block_indptr, blocks, num_blocks, scratch);
    make_items(s, blocks, num_blocks, !has_decode, scratch);
}

}  // namespace kv8
