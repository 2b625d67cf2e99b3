// prefill_schedule.cu - cuts a prefill launch into items, longest first, on the device, so that a
// captured launch follows its lengths.
//
// Grid: one block of 1024 threads. Traffic: the index arrays in, 64 bytes an item out. Bound by
// latency, a few microseconds.
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
#include "prefill/prefill_item.cuh"
#include "prefill_schedule_args.h"

namespace kv8 {

enum {
    SCHEDULE_THREADS = 1024,
    LENGTH_BINS = 4096,
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

// Sum over all threads' values before this one; *total is everyone's.
__device__ static int scan(int value, int *warp_sums, int *total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // of the last call's readers
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int i = 0; i < SCHEDULE_THREADS / 32; i++) {
        if (i < warp) before += warp_sums[i];
        all += warp_sums[i];
    }
    *total = all;
    return before + sum - value;
}

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
struct ItemKeys {
    KeyRange some, all;
    bool has_gaps;
};
__device__ static ItemKeys keys_of(const kv8_kernel_args &a, const ItemView &v) {
    const int first = first_query(a, v), last = last_query(a, v);
    if (a.key_begin == nullptr)  // they move right with the row
        return {{row_begin(a, v, first), row_end(a, v, last)},
                {row_begin(a, v, last), row_end(a, v, first)},
                false};
    ItemKeys k = {{INT32_MAX, 0}, {0, INT32_MAX}, false};
#pragma unroll 4
    for (int query = first; query <= last; query++) {
        const KeyRange row = {row_begin(a, v, query), row_end(a, v, query)};
        k.all = {max(k.all.begin, row.begin), min(k.all.end, row.end)};
        if (row.begin == row.end) continue;
        const bool is_apart = row.begin > k.some.end || row.end < k.some.begin;
        k.has_gaps = k.has_gaps || (k.some.end > 0 && is_apart);
        k.some = {min(k.some.begin, row.begin), max(k.some.end, row.end)};
    }
    k.some.begin = min(k.some.begin, k.some.end);
    return k;
}

// Rows of the i-th block, in order of requests.
__device__ static kv8_prefill_block block_of(const kv8_kernel_args &a, int i) {
    int low = 0, high = a.batch - 1;  // the last request that begins at or before i
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a.prefill.block_indptr[middle] <= i)
            low = middle;
        else
            high = middle - 1;
    }
    const ItemView v =
        view_item(a, item_of(a, low, (i - a.prefill.block_indptr[low]) * a.prefill.block_rows));
    const KeyRange keys = keys_of(a, v).some;
    const int from = keys.begin / KV8_PREFILL_TILE_KEYS;
    const kv8_prefill_block block = {
        low, v.row_begin, from,
        max(from, (keys.end + KV8_PREFILL_TILE_KEYS - 1) / KV8_PREFILL_TILE_KEYS), INT32_MAX};
    return block;
}
__device__ static int length_of(const kv8_prefill_block &block) {
    return block.tile_end - block.tile_begin;
}

__device__ static int bin_of(int length, int shift) {
    return max(LENGTH_BINS - 1 - (length >> shift), 0);
}

struct SortedBlock {
    kv8_prefill_block block;
    int32_t bin, rank, unused;
};
static_assert(sizeof(SortedBlock) <= sizeof(kv8_prefill_item), "lies where items will");

// Ranks by bin, and in order within a bin, so that they do not depend on a race.
template <class THING>
__device__ static void rank_by_bins(THING *found, int count, int *bins, int *warp_sums) {
    for (int i = threadIdx.x; i < LENGTH_BINS; i += SCHEDULE_THREADS) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += SCHEDULE_THREADS) atomicAdd(&bins[found[i].bin], 1);
    __syncthreads();
    const int per_thread = LENGTH_BINS / SCHEDULE_THREADS;
    int *const mine = bins + threadIdx.x * per_thread, total;
    int sum = 0;
    for (int i = 0; i < per_thread; i++) sum += mine[i];
    sum = scan(sum, warp_sums, &total);
    for (int i = 0; i < per_thread; i++) {
        const int things = mine[i];
        mine[i] = sum;
        sum += things;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int bin = threadIdx.x < count ? found[threadIdx.x].bin : -1;
        for (int first = 0; first < count; first += 32) {
            const int i = first + threadIdx.x;
            const int next = i + 32 < count ? found[i + 32].bin : -1;
            const unsigned same = __match_any_sync(~0u, bin);
            const int before = __popc(same & ((1u << threadIdx.x) - 1));
            if (i < count) found[i].rank = bins[bin] + before;
            __syncwarp();
            if (i < count && before == 0) bins[bin] += __popc(same);
            __syncwarp();
            bin = next;
        }
    }
    __syncthreads();
}

// find_unmasked says of each block the first key that a mask hides from one of its rows: by all
// warps, several a block where blocks are few, which take its rows in turn.
__device__ static void find_unmasked(const kv8_kernel_args &a, SortedBlock *found, int num_blocks) {
    constexpr int WARPS = SCHEDULE_THREADS / 32;
    const int each = max(WARPS / num_blocks, 1), warp = threadIdx.x / 32;
    for (int i = warp / each; i < num_blocks; i += WARPS / each) {
        kv8_prefill_block &block = found[i].block;
        const kv8_prefill_item item = item_of(a, block.request, block.row_begin);
        const ItemView v = view_item(a, item);
        const RequestKeys keys(a, item);
        const int last = last_query(a, v);
        const int tile = block.tile_begin * KV8_PREFILL_TILE_KEYS;
        int first = INT32_MAX;
        for (int query = first_query(a, v) + warp % each; query <= last; query += each) {
            const int64_t row = (int64_t)query * v.kv_len;
            const int begin = row_begin(a, v, query), end = min(row_end(a, v, query), first);
            const int key = first_hidden<4>(keys.mask, row, begin, end);
            if (key < end) first = key;
            if (first >= tile + KV8_PREFILL_TILE_KEYS) continue;
            first = tile;  // all tiles are masked
            break;
        }
        if (threadIdx.x % 32 == 0 && first < INT32_MAX) atomicMin(&block.unmasked_to, first);
    }
    __syncthreads();
}

__device__ static int bin_shift(const kv8_kernel_args &a) {
    int shift = 0;
    while (a.prefill.max_tiles >> shift >= LENGTH_BINS) shift++;
    return shift;
}
// Longest first; blocks of one length in order of requests.
__device__ static void sort_blocks(const kv8_kernel_args &a, int num_blocks, int *bins,
                                   int *warp_sums) {
    SortedBlock *const found = (SortedBlock *)a.prefill.items;  // the list comes later
    const int shift = bin_shift(a);
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS) {
        found[i].block = block_of(a, i);
        found[i].bin = bin_of(length_of(found[i].block), shift);
    }
    __syncthreads();
    if (a.mask_bits != nullptr && num_blocks > 0) find_unmasked(a, found, num_blocks);
    rank_by_bins(found, num_blocks, bins, warp_sums);
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS)
        a.prefill.blocks[found[i].rank] = found[i].block;
    __syncthreads();
}

// Where an item's tiles are cut: at `first`, and every `step` behind it.
struct Cuts {
    float first, step;
    int least;  // tiles of a split
};
// Calls use(begin, end) for every split of `length` tiles; returns how many there are.
template <class USE>
__device__ static int each_split(const Cuts &cuts, int length, USE &&use) {
    int begin = 0, count = 0;
    for (int n = 0; cuts.step > 0; n++) {
        const float at = cuts.first + n * cuts.step;
        if (at >= length) break;
        const int end = __float2int_rn(at);
        if (end - begin < cuts.least || length - end < cuts.least) continue;
        use(begin, end);
        begin = end, count++;
    }
    use(begin, length);
    return count + 1;
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
};
__device__ static int tiles_of(const kv8_prefill_block &block) {
    return length_of(block) + ITEM_TILES;
}
__device__ static int even_splits(const Handout &h, int length) {
    const int splits = min((int)(h.of_tile * (length + ITEM_TILES)), length / h.least_even);
    return max(min(splits, (int)MOST_SPLITS), 1);
}
// start_together: no blocks of decode are ahead of some of them.
__device__ static Handout hand_out(const kv8_prefill_schedule_args &s, int num_blocks,
                                   bool start_together, int *warp_sums) {
    __shared__ int first_cut;
    const kv8_kernel_args &a = s.args;
    const int heads = a.num_kv_heads, machine = a.prefill.num_blocks;
    int work = 0, total;
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS)
        work += tiles_of(a.prefill.blocks[i]);
    scan(work, warp_sums, &total);
    if (a.prefill.max_slots == 0 || total == 0) return {num_blocks};
    const float per_block = (float)heads / machine, share = total * per_block;
    const int longest = length_of(a.prefill.blocks[0]);
    Handout h = {0, share, false, machine / ((float)total * heads)};
    h.least_even = s.shares_joins ? 1 : LEAST_EVEN_TILES;
    const bool is_one_round = num_blocks * heads <= machine;
    const bool is_wide = a.prefill.block_rows > 64;
    const float even = (float)longest / even_splits(h, longest) + ITEM_TILES;
    h.has_first = start_together && (is_wide || is_one_round);
    const bool is_level = longest <= 2 * length_of(a.prefill.blocks[num_blocks - 1]);
    h.is_owned = start_together && is_wide && is_level &&
                 share < OWN_ITEMS * (longest + ITEM_TILES) &&
                 !(is_one_round && even <= share + EVEN_TILES);
    h.is_even = is_one_round && !h.is_owned;
    h.has_heads_together = !is_wide;
    const float items = num_blocks * per_block, idle = ceilf(items) - items;
    const int thin = is_wide ? min((int)THIN_ROWS, a.prefill.block_rows * 2 / 3) : (int)THIN_ROWS;
    const bool is_thin = a.qo_indptr[a.batch] * a.group_size <= thin * num_blocks;
    if (is_thin && is_level && !is_one_round && !h.is_owned && idle < IDLE_OF_ITEM &&
        idle < IDLE_OF_ALL * items)
        return {num_blocks};
    if (!h.is_even && !h.is_owned) {
        if (threadIdx.x == 0) first_cut = num_blocks;
        int before_all = 0;
        for (int first = 0; first < num_blocks; first += SCHEDULE_THREADS) {
            const int i = first + threadIdx.x;
            const int tiles = i < num_blocks ? tiles_of(a.prefill.blocks[i]) : 0;
            const int before = before_all + scan(tiles, warp_sums, &total);
            before_all += total;
            if (i < num_blocks && before * per_block + LINE_ITEMS * tiles > share)
                atomicMin(&first_cut, i);
        }
        __syncthreads();
        h.num_whole = first_cut * heads / machine * machine / heads;
        work = 0;
        for (int i = threadIdx.x; i < h.num_whole; i += SCHEDULE_THREADS)
            work += tiles_of(a.prefill.blocks[i]);
        scan(work, warp_sums, &total);
        h.range = share - total * per_block;
    }
    h.range = fmaxf(h.range, (float)longest / (MOST_SPLITS - 2));
    return h;
}
// Of an item that begins at `at` of the line.
__device__ static Cuts cuts_of(const Handout &h, int length, float at) {
    if (h.range == 0) return {0, 0, 1};
    if (!h.is_even)
        return {(floorf(at / h.range) + 1) * h.range - at, h.range,
                h.is_owned ? LEAST_EVEN_TILES : LEAST_TILES};
    const float step = (float)length / even_splits(h, length);
    return {step, step, 1};
}

// An item of the line, and where it comes in the list.
struct Part {
    int32_t block, kv_head, tile_begin, tile_end, slot;
    int8_t split, num_splits;
    int16_t unused;
    int32_t bin, rank;
};
static_assert(sizeof(Part) <= sizeof(kv8_prefill_broken), "lies where broken rows will");

// The line's parts, in order; returns how many.
__device__ static int cut_line(const kv8_kernel_args &a, const Handout &h, int num_blocks,
                               Part *parts, int *warp_sums) {
    // KV heads that are cut at the same places, whose parts follow one another.
    const int together = h.has_heads_together ? a.num_kv_heads : 1;
    const int each = a.num_kv_heads / together, shift = bin_shift(a);
    const int count = (num_blocks - h.num_whole) * each;
    int line = 0, parts_before = 0, slots_before = 0, total;
    for (int first = 0; first < count; first += SCHEDULE_THREADS) {
        const int i = first + threadIdx.x, block = h.num_whole + i / each;
        const bool is_item = i < count;
        const int length = is_item ? length_of(a.prefill.blocks[block]) : 0;
        const int at = line + scan(is_item ? length + ITEM_TILES : 0, warp_sums, &total);
        line += total;
        Cuts cuts = cuts_of(h, length, at);
        int splits = is_item ? each_split(cuts, length, [](int, int) {}) : 0;
        const int slot = slots_before + scan(splits > 1 ? splits * together : 0, warp_sums, &total);
        slots_before += total;
        if (splits > 1 && slot + splits * together > a.prefill.max_slots) cuts.step = 0, splits = 1;
        int to = parts_before + scan(splits * together, warp_sums, &total);
        parts_before += total;
        if (!is_item) continue;
        Part part = {block, 0, 0, 0, -1, 0, (int8_t)splits, 0, 0, 0};
        const int from = a.prefill.blocks[block].tile_begin;
        each_split(cuts, length, [&](int begin, int end) {
            part.tile_begin = from + begin;
            part.tile_end = from + end;
            part.bin = h.is_owned ? min((int)((at + (begin + end) * 0.5f) / h.range),
                                        a.prefill.num_blocks - 1)
                                  : bin_of(end - begin, shift);
            for (int n = 0; n < together; n++) {
                part.kv_head = i % each + n;
                if (splits > 1) part.slot = slot + n * splits;
                parts[to++] = part;
            }
            part.split++;
        });
    }
    __syncthreads();
    return parts_before;
}

// Each range of the line to the block of its number, in the order of the line.
__device__ static void give_ranges(const kv8_kernel_args &a, Part *parts, int count) {
    const int machine = a.prefill.num_blocks;
    for (int i = threadIdx.x; i <= count; i += SCHEDULE_THREADS) {
        const int last = i < count ? parts[i].bin : machine;
        for (int n = i > 0 ? parts[i - 1].bin + 1 : 0; n <= last; n++) a.prefill.queue->own[n] = i;
        if (i < count) parts[i].rank = i;
    }
    __syncthreads();
}

// An item of a block of rows: all its keys, of the first KV head.
__device__ static kv8_prefill_item whole_item(const kv8_kernel_args &a,
                                              const kv8_prefill_block &block) {
    kv8_prefill_item item = item_of(a, block.request, block.row_begin);
    const ItemKeys keys = keys_of(a, view_item(a, item));
    item.seen_from = keys.some.begin;
    item.seen_to = keys.some.end;
    item.shared_from = keys.all.begin;
    item.shared_to = min(keys.all.end, block.unmasked_to);
    item.has_gaps = keys.has_gaps || block.unmasked_to < keys.some.end;
    item.tile_begin = block.tile_begin;
    item.tile_end = block.tile_end;
    item.slot = -1;
    item.num_splits = 1;
    return item;
}
// Every block for every KV head.
__device__ static void make_items(const kv8_prefill_schedule_args &s, int num_blocks,
                                  bool start_together, int *bins, int *warp_sums) {
    const kv8_kernel_args &a = s.args;
    Part *const parts = (Part *)a.prefill.broken;
    const Handout h = hand_out(s, num_blocks, start_together, warp_sums);
    const int num_parts = cut_line(a, h, num_blocks, parts, warp_sums);
    if (h.is_owned)
        give_ranges(a, parts, num_parts);
    else
        rank_by_bins(parts, num_parts, bins, warp_sums);
    // Each block has one item, if any.
    const bool is_together =
        s.shares_joins && h.is_even && h.has_first && num_parts <= a.prefill.num_blocks;
    const int heads = a.num_kv_heads;
    for (int i = threadIdx.x; i < h.num_whole; i += SCHEDULE_THREADS) {
        kv8_prefill_item item = whole_item(a, a.prefill.blocks[i]);
        for (item.kv_head = 0; item.kv_head < heads; item.kv_head++)
            a.prefill.items[i * heads + item.kv_head] = item;
    }
    for (int i = threadIdx.x; i < num_parts; i += SCHEDULE_THREADS) {
        const Part part = parts[i];
        kv8_prefill_item item = whole_item(a, a.prefill.blocks[part.block]);
        item.kv_head = part.kv_head;
        item.tile_begin = part.tile_begin;
        item.tile_end = part.tile_end;
        item.slot = part.slot;
        item.split = part.split;
        item.num_splits = part.num_splits;
        item.is_together = is_together && part.num_splits >= LEAST_TOGETHER;
        a.prefill.items[h.num_whole * heads + part.rank] = item;
    }
    const int num_items = h.num_whole * heads + num_parts;
    kv8_prefill_queue *const queue = a.prefill.queue;
    for (int i = threadIdx.x; !h.is_owned && i <= a.prefill.num_blocks; i += SCHEDULE_THREADS)
        queue->own[i] = h.has_first ? min(i, num_items) : 0;
    __syncthreads();
    if (threadIdx.x == 0)
        queue->num_items = num_items, queue->next = queue->own[a.prefill.num_blocks];
}

// Blocks that a request's rows make; those of few rows may be left to decode.
__device__ static int count_blocks(const kv8_prefill_schedule_args &s, int b) {
    const int rows = request_qo_len(s.args, b);
    const bool is_decode = s.decode_lens != nullptr && rows <= s.decode_rows;
    if (s.decode_lens != nullptr) s.decode_lens[b] = is_decode ? rows : 0;
    const int block_rows = s.args.prefill.block_rows;
    return is_decode ? 0 : (rows * s.args.group_size + block_rows - 1) / block_rows;
}

extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    kv8_prefill_schedule__sm80(const __grid_constant__ kv8_prefill_schedule_args s) {
    const kv8_kernel_args &a = s.args;
    __shared__ int bins[LENGTH_BINS];
    __shared__ int warp_sums[SCHEDULE_THREADS / 32];
    int num_blocks = 0, total, has_decode = 0;
    for (int first = 0; first < a.batch; first += SCHEDULE_THREADS) {
        const int b = first + threadIdx.x;
        const int blocks = b < a.batch ? count_blocks(s, b) : 0;
        const int before = scan(blocks, warp_sums, &total);
        if (b < a.batch) a.prefill.block_indptr[b] = num_blocks + before;
        num_blocks += total;
        has_decode |= s.decode_lens != nullptr && b < a.batch && s.decode_lens[b] > 0;
    }
    for (int i = threadIdx.x; i < a.prefill.max_slots * (a.prefill.block_rows / 64);
         i += SCHEDULE_THREADS)
        a.prefill.arrivals[i] = 0;
    has_decode = __syncthreads_or(has_decode);
    sort_blocks(a, num_blocks, bins, warp_sums);
    make_items(s, num_blocks, !has_decode, bins, warp_sums);
}

}  // namespace kv8
