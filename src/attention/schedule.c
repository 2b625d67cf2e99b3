/* schedule.c - cuts a run into items: (request, kv head, block of rows, range of keys).
 *
 * A block of rows walks its keys alone unless that would leave threads idle; then its keys are
 * split and the parts joined in key order. Where the cuts lie is decided here and nowhere else.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

enum {
    ITEMS_PER_THREAD = 8, /* work of a run / this = the largest item: at most 1/8 of a turn idles */
    MIN_SPLIT_KEYS = 256, /* below, joining costs more than it spreads */
    ROW_OVERHEAD = 16,    /* widening a key costs about as much as this many rows use it */
    /* batch_invariant: cuts by the request's own keys alone, at most 16 of at least 1024 keys (one
     * more where the first begins inside a tile). */
    INVARIANT_SPLITS = 16,
    INVARIANT_MIN_KEYS = 1024
};

static int64_t block_weight(int64_t num_rows, int64_t num_keys) {
    return (num_rows + ROW_OVERHEAD) * num_keys;
}

typedef struct block {
    int32_t request, row_begin, num_rows;
    kv8_key_range keys;
} block;

/* Blocks in order; start with request = 0, row_begin = 0, num_rows = 0. */
static bool next_block(const kv8_attention_plan *plan, const kv8_attention_args *args, block *it) {
    int64_t row = (int64_t)it->row_begin + it->num_rows;
    for (; it->request < args->batch; it->request++, row = 0) {
        const int32_t b = it->request;
        const int32_t qo_len = args->qo_indptr[b + 1] - args->qo_indptr[b];
        const int64_t packed = (int64_t)qo_len * plan->group_size;
        if (row >= packed) continue;
        it->row_begin = (int32_t)row;
        it->num_rows = (int32_t)kv8_min_i64(plan->block_rows, packed - row);
        const int32_t kv_len = kv8_request_kv_len(&args->pages, plan->spec.page_size, b);
        it->keys = kv8_rows_keys(&plan->spec, qo_len, kv_len, it->row_begin / plan->group_size,
                                 (it->row_begin + it->num_rows - 1) / plan->group_size);
        return true;
    }
    return false;
}

/* The weight that an item should not exceed, of all work; 0 = no limit. */
static int64_t item_weight(const kv8_attention_plan *plan, const kv8_attention_args *args) {
    if (plan->num_threads == 1 || plan->spec.batch_invariant) return 0;
    int64_t total = 0;
    block it = {0};
    while (next_block(plan, args, &it))
        total += block_weight(it.num_rows, it.keys.end - it.keys.begin) * plan->spec.num_kv_heads;
    return total / ((int64_t)plan->num_threads * ITEMS_PER_THREAD) + 1;
}

/* Keys of one split of this block, a multiple of the tile; 0 = it stays whole. */
static int64_t split_keys(const kv8_attention_plan *plan, const kv8_attention_args *args,
                          const block *it, int64_t weight_limit) {
    const int64_t num_keys = it->keys.end - it->keys.begin;
    int64_t keys = 0;
    if (plan->spec.batch_invariant) {
        /* A request of more than one block spreads over threads by its rows. */
        const int64_t qo_len = args->qo_indptr[it->request + 1] - args->qo_indptr[it->request];
        if (qo_len * plan->group_size > plan->block_rows) return 0;
        keys = kv8_max_i64(kv8_ceil_div(num_keys, INVARIANT_SPLITS), INVARIANT_MIN_KEYS);
    } else if (weight_limit > 0) {
        keys = kv8_max_i64(weight_limit / (it->num_rows + ROW_OVERHEAD), MIN_SPLIT_KEYS);
    }
    keys = kv8_ceil_div(keys, KV8_TILE_KEYS) * KV8_TILE_KEYS;
    return keys < num_keys ? keys : 0;
}

kv8_attention_schedule kv8_attention_cut(const kv8_attention_plan *plan,
                                         const kv8_attention_args *args, kv8_attention_item *items,
                                         kv8_attention_join *joins) {
    kv8_attention_schedule cut = {.max_splits = 1};
    const int32_t num_heads = plan->spec.num_kv_heads;
    const int64_t weight_limit = item_weight(plan, args);
    block it = {0};
    while (next_block(plan, args, &it)) {
        const int64_t tile_begin = it.keys.begin / KV8_TILE_KEYS * KV8_TILE_KEYS;
        const int64_t keys = split_keys(plan, args, &it, weight_limit);
        const int64_t floats = (int64_t)it.num_rows * (plan->v_row + 2); /* of one partial */
        int64_t num_splits = keys == 0 ? 1 : kv8_ceil_div(it.keys.end - tile_begin, keys);
        if (num_splits > 1 &&
            cut.partial_floats + num_splits * num_heads * floats > plan->max_partial_floats)
            num_splits = 1; /* cannot be: cut_bounds leaves room */
        cut.max_splits = (int32_t)kv8_max_i64(cut.max_splits, num_splits);
        const int64_t first = cut.num_items, first_partial = cut.partial_floats;
        cut.num_items += num_splits * num_heads;
        if (num_splits > 1) {
            cut.num_joins += num_heads;
            cut.partial_floats += num_splits * num_heads * floats;
        }
        if (items == NULL) continue;
        /* Heads innermost: threads meet in the same pages. */
        for (int64_t i = 0; i < num_splits * num_heads; i++) {
            const int64_t split = i / num_heads, head = i % num_heads;
            const int64_t begin = tile_begin + split * keys, end = begin + keys;
            const bool last = split == num_splits - 1;
            kv8_attention_item *const item = &items[first + i];
            *item = (kv8_attention_item){
                .request = it.request,
                .kv_head = (int32_t)head,
                .row_begin = it.row_begin,
                .num_rows = it.num_rows,
                .key_begin = split == 0 ? it.keys.begin : (int32_t)begin,
                .key_end = last ? it.keys.end : (int32_t)end,
                .partial =
                    num_splits == 1 ? -1 : first_partial + (head * num_splits + split) * floats,
            };
            if (num_splits > 1 && split == 0)
                joins[cut.num_joins - num_heads + head] =
                    (kv8_attention_join){.first = *item, .num_splits = (int32_t)num_splits};
        }
    }
    return cut;
}

void kv8_attention_cut_bounds(kv8_attention_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    const int64_t num_heads = spec->num_kv_heads;
    const int64_t packed = (int64_t)spec->max_total_q * plan->group_size;
    const int64_t requests = kv8_min_i64(spec->max_batch, spec->max_total_q);
    const int64_t blocks = (requests + packed / plan->block_rows) * num_heads;
    const int64_t floats = plan->v_row + 2; /* of one row's partial */
    int64_t parts = 0, rows = 0;
    if (spec->batch_invariant) {
        if (spec->max_kv_len > INVARIANT_MIN_KEYS) {
            const int64_t splits =
                1 +
                kv8_min_i64(INVARIANT_SPLITS, kv8_ceil_div(spec->max_kv_len, INVARIANT_MIN_KEYS));
            parts = requests * num_heads * splits;
            rows = kv8_min_i64(packed, requests * plan->block_rows) * num_heads * splits;
        }
    } else if (plan->num_threads > 1 && spec->max_kv_len > MIN_SPLIT_KEYS) {
        /* Split blocks have x = weight/limit > 1 parts' worth of work; x rounded up, the tile that
         * the first part may begin in included, is below 3x, and all x sum to at most the items
         * that item_weight asks for. */
        parts = 3 * (int64_t)plan->num_threads * ITEMS_PER_THREAD;
        rows = parts * kv8_min_i64(plan->block_rows, packed);
    }
    plan->max_items = blocks + parts;
    plan->max_joins = parts / 2;
    plan->max_partial_floats = rows * floats;
}
