// prefill_schedule.cu - cuts a prefill launch into items, longest first, on the device, so that a
// captured launch follows its lengths.
//
// Grid: one block of 1024 threads. Traffic: the index arrays in, 64 bytes an item out. Bound by
// latency, a few microseconds.
//
// Items go to whichever block of the main kernel is free. Sorted by length they would still end up
// to one item apart, so an item that would outlast the average end is cut over its keys into
// splits that would not. All of it depends on the lengths alone: equal inputs, equal bits.
//
// SPDX-License-Identifier: Apache-2.0
#include "prefill/prefill_item.cuh"
#include "prefill_schedule_args.h"

namespace kv8 {

enum {
    SCHEDULE_THREADS = 1024,
    LENGTH_BINS = 4096,
    MOST_SPLITS = 64,
    LEAST_SHARE = 32,  // splits are not shorter than this part of a block's whole work
    LEAST_TILES = 8,   // nor than this, where blocks take more than one item
    ITEM_TILES = 1     // what starting and finishing an item costs, in tiles
};

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

__device__ static int bin_of(const kv8_prefill_block &block, int shift) {
    return max(LENGTH_BINS - 1 - (length_of(block) >> shift), 0);
}

struct SortedBlock {
    kv8_prefill_block block;
    int32_t bin, rank, unused;
};
static_assert(sizeof(SortedBlock) <= sizeof(kv8_prefill_item), "lies where items will");

// By a warp: the first key that a mask hides from a row of the block, of bytes that may be others'
// at either end of a row.
__device__ static int unmasked_keys(const kv8_kernel_args &a, const kv8_prefill_block &block) {
    const kv8_prefill_item item = item_of(a, block.request, block.row_begin);
    const ItemView v = view_item(a, item);
    const RequestKeys keys(a, item);
    const int last = last_query(a, v);
    int first = v.kv_len;
    for (int query = first_query(a, v); query <= last; query++) {
        const int64_t row = (int64_t)query * v.kv_len;
#pragma unroll 8
        for (int64_t byte = row / 8 + threadIdx.x % 32; byte * 8 < row + v.kv_len; byte += 32) {
            const uint32_t before = (1u << max((int)min(row - byte * 8, (int64_t)8), 0)) - 1;
            const uint32_t hidden = ~(keys.mask[byte] | before) & 0xff;
            if (hidden != 0) first = min(first, (int)(byte * 8 - row) + __ffs(hidden) - 1);
        }
    }
    return __reduce_min_sync(~0u, first);
}

// Longest first; blocks of one length in order of requests.
__device__ static void sort_blocks(const kv8_kernel_args &a, int num_blocks, int *bins,
                                   int *warp_sums) {
    SortedBlock *const found = (SortedBlock *)a.prefill.items;  // the list comes later
    int shift = 0;
    while (a.prefill.max_tiles >> shift >= LENGTH_BINS) shift++;
    for (int i = threadIdx.x; i < LENGTH_BINS; i += SCHEDULE_THREADS) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS) {
        found[i].block = block_of(a, i);
        found[i].bin = bin_of(found[i].block, shift);
        atomicAdd(&bins[found[i].bin], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; a.mask_bits != nullptr && i < num_blocks;
         i += SCHEDULE_THREADS / 32) {
        const int keys = unmasked_keys(a, found[i].block);
        if (threadIdx.x % 32 == 0) found[i].block.unmasked_to = keys;
    }
    const int per_thread = LENGTH_BINS / SCHEDULE_THREADS;
    int *const mine = bins + threadIdx.x * per_thread, total;
    int sum = 0;
    for (int i = 0; i < per_thread; i++) sum += mine[i];
    sum = scan(sum, warp_sums, &total);
    for (int i = 0; i < per_thread; i++) {
        const int count = mine[i];
        mine[i] = sum;
        sum += count;
    }
    __syncthreads();
    // One warp ranks, in order, so that ranks do not depend on a race; all move.
    if (threadIdx.x < 32) {
        int bin = threadIdx.x < num_blocks ? found[threadIdx.x].bin : -1;
        for (int first = 0; first < num_blocks; first += 32) {
            const int i = first + threadIdx.x;
            const int next = i + 32 < num_blocks ? found[i + 32].bin : -1;
            const unsigned same = __match_any_sync(~0u, bin);
            const int before = __popc(same & ((1u << threadIdx.x) - 1));
            if (i < num_blocks) found[i].rank = bins[bin] + before;
            __syncwarp();
            if (i < num_blocks && before == 0) bins[bin] += __popc(same);
            __syncwarp();
            bin = next;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS)
        a.prefill.blocks[found[i].rank] = found[i].block;
    __syncthreads();
}

// Every block for every KV head, split where it would outlast the average end.
__device__ static void cut_items(const kv8_kernel_args &a, int num_blocks, int *warp_sums) {
    const int heads = a.num_kv_heads;
    int work = 0, total;
    for (int i = threadIdx.x; i < num_blocks; i += SCHEDULE_THREADS)
        work += length_of(a.prefill.blocks[i]) + ITEM_TILES;
    scan(work, warp_sums, &total);
    const float share = (float)total * heads / a.prefill.num_blocks;
    const int64_t all_work = (int64_t)total * heads;
    const bool is_one_round = num_blocks * heads <= a.prefill.num_blocks;
    const int least = max(is_one_round ? 2 : LEAST_TILES, (int)(share / LEAST_SHARE));
    int work_before = 0, items_before = 0, slots_before = 0;
    for (int first = 0; first < num_blocks; first += SCHEDULE_THREADS) {
        const int i = first + threadIdx.x;
        kv8_prefill_block block = {};
        int length = 0;
        if (i < num_blocks) {
            block = a.prefill.blocks[i];
            length = length_of(block);
        }
        int before = scan(i < num_blocks ? length + ITEM_TILES : 0, warp_sums, &total);
        const float start = (float)(work_before + before) * heads / a.prefill.num_blocks;
        work_before += total;
        const int longest = max(least, (int)(share - start));
        int num_splits = (length + longest - 1) / longest;
        if (is_one_round && all_work > 0)
            num_splits =
                min((int)((int64_t)(length + ITEM_TILES) * a.prefill.num_blocks / all_work),
                    length / least);
        num_splits = a.prefill.max_slots > 0 ? max(min(num_splits, (int)MOST_SPLITS), 1) : 1;
        int slot = slots_before + scan(num_splits > 1 ? num_splits * heads : 0, warp_sums, &total);
        slots_before += total;
        if (slot + num_splits * heads > a.prefill.max_slots) num_splits = 1;
        int at = items_before + scan(i < num_blocks ? num_splits * heads : 0, warp_sums, &total);
        items_before += total;
        if (i >= num_blocks) continue;
        kv8_prefill_item item = item_of(a, block.request, block.row_begin);
        const ItemKeys keys = keys_of(a, view_item(a, item));
        item.seen_from = keys.some.begin;
        item.seen_to = keys.some.end;
        item.shared_from = keys.all.begin;
        item.shared_to = min(keys.all.end, block.unmasked_to);
        item.has_gaps = keys.has_gaps || block.unmasked_to < keys.some.end;
        item.num_splits = (int8_t)num_splits;
        for (int split = 0; split < num_splits; split++) {
            item.split = (int8_t)split;
            item.tile_begin = block.tile_begin + (int)((int64_t)length * split / num_splits);
            item.tile_end = block.tile_begin + (int)((int64_t)length * (split + 1) / num_splits);
            for (int head = 0; head < heads; head++) {
                item.kv_head = head;
                item.slot = num_splits > 1 ? slot + head * num_splits : -1;
                a.prefill.items[at++] = item;
            }
        }
    }
    if (threadIdx.x == 0) {
        a.prefill.queue->num_items = items_before;
        a.prefill.queue->next = 0;
    }
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
    int num_blocks = 0, total;
    for (int first = 0; first < a.batch; first += SCHEDULE_THREADS) {
        const int b = first + threadIdx.x;
        const int blocks = b < a.batch ? count_blocks(s, b) : 0;
        const int before = scan(blocks, warp_sums, &total);
        if (b < a.batch) a.prefill.block_indptr[b] = num_blocks + before;
        num_blocks += total;
    }
    for (int i = threadIdx.x; i < a.prefill.max_slots * (a.prefill.block_rows / 64);
         i += SCHEDULE_THREADS)
        a.prefill.arrivals[i] = 0;
    __syncthreads();
    sort_blocks(a, num_blocks, bins, warp_sums);
    cut_items(a, num_blocks, warp_sums);
}

}  // namespace kv8
