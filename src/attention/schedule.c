/* schedule.c - cuts a run into items: (request, kv heads, block of rows, range of keys).
 *
 * First the keys that requests share, with the rows of all of them (cascade.c), then every
 * request's own. An item takes all heads that fit, since in the usual layout the heads of a token
 * are neighbours: one item then reads whole runs of memory. Where that would leave threads idle,
 * first the keys of a block are split, whose parts are joined in key order, then its heads. Where
 * the cuts lie is decided here and nowhere else.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

enum {
    ITEMS_PER_THREAD = 4, /* work of a run / this = the largest item: at most 1/4 of a turn idles */
    /* But none below this (block_weight: at head_dim 64 a unit is 0.4 ns on tiles, 1 on AVX-512):
     * an item lays out Q, a thread's first one begins with a cold tile, and its part must be
     * joined: 5 to 15 us on tiles. */
    MIN_ITEM_WEIGHT = 1 << 19,
    MIN_SPLIT_KEYS = 512, /* below, joining costs more than it spreads */
    /* The calling thread is in its item 3 us before another has woken: where each thread gets one
     * range of a block's keys, the first is so much longer. */
    LEAD_WEIGHT = 1 << 13
};

static int64_t block_weight(int64_t num_rows, int64_t num_keys) {
    return (num_rows + KV8_ROW_OVERHEAD) * num_keys;
}

/* What is cut. */
typedef struct work {
    const kv8_attention_plan *plan;
    const kv8_attention_args *args;
    const kv8_attention_cascade *cascade;
} work;

/* Rows of a prefix, until prefix is the number of them; of a request, from there on. */
typedef struct block {
    int32_t prefix, request, row_begin, num_rows;
    kv8_key_range keys;
} block;

/* The next rows of a prefix: its blocks are of nearly equal size, each of whole groups. */
static bool next_shared_block(const work *w, block *it) {
    int64_t row = (int64_t)it->row_begin + it->num_rows;
    for (; it->prefix < w->cascade->num_prefixes; it->prefix++, row = 0) {
        const kv8_attention_prefix *const prefix = &w->cascade->prefixes[it->prefix];
        const int64_t group_size = w->plan->group_size, packed = prefix->num_rows * group_size;
        if (row >= packed) continue;
        const int64_t num_blocks = kv8_ceil_div(packed, w->plan->block_rows);
        const int64_t groups = kv8_ceil_div(prefix->num_rows, num_blocks);
        it->row_begin = (int32_t)row;
        it->num_rows = (int32_t)kv8_min_i64(groups * group_size, packed - row);
        it->keys = (kv8_key_range){0, prefix->num_keys};
        return true;
    }
    it->row_begin = it->num_rows = 0;
    return false;
}

/* The first of the request's keys that no prefix computes. */
static int32_t own_keys(const work *w, int32_t request) {
    return w->cascade->num_prefixes == 0 ? 0 : w->cascade->members[request].num_keys;
}

/* Blocks in order; start with all 0. */
static bool next_block(const work *w, block *it) {
    const kv8_attention_plan *const plan = w->plan;
    if (it->prefix < w->cascade->num_prefixes && next_shared_block(w, it)) return true;
    int64_t row = (int64_t)it->row_begin + it->num_rows;
    for (; it->request < w->args->batch; it->request++, row = 0) {
        const int32_t b = it->request;
        const kv8_request request = kv8_request_of(&plan->spec, w->args, b);
        const int64_t packed = (int64_t)request.qo_len * plan->group_size;
        if (row >= packed) continue;
        it->row_begin = (int32_t)row;
        it->num_rows = (int32_t)kv8_min_i64(plan->block_rows, packed - row);
        it->keys = kv8_rows_keys(&plan->spec, w->args, &request, it->row_begin / plan->group_size,
                                 (it->row_begin + it->num_rows - 1) / plan->group_size);
        const int32_t own = own_keys(w, b);
        if (own > 0 && own >= it->keys.end) continue; /* a member: one block, all of it shared */
        if (own > 0) it->keys.begin = own;
        return true;
    }
    return false;
}

/* The weight that an item should not exceed, of all work; 0 = no limit. */
static int64_t item_weight(const work *w) {
    if (w->plan->num_threads == 1) return 0;
    int64_t total = 0;
    block it = {0};
    while (next_block(w, &it))
        total +=
            block_weight(it.num_rows, it.keys.end - it.keys.begin) * w->plan->spec.num_kv_heads;
    const int64_t per_thread = total / w->plan->num_threads;
    const int64_t fitting = kv8_max_i64(per_thread / MIN_ITEM_WEIGHT, 1);
    return per_thread / kv8_min_i64(fitting, ITEMS_PER_THREAD) + 1;
}

/* How one block is cut: num_splits ranges of `keys` keys (the first of `lead` more; multiples of
 * the tile; the first and the last may have fewer), times groups of at most `heads` heads. */
typedef struct block_cut {
    int64_t tile_begin, keys, lead;
    int32_t num_splits, heads, num_groups;
} block_cut;

static block_cut cut_block(const work *w, const block *it, int64_t weight_limit) {
    const kv8_attention_plan *const plan = w->plan;
    const int32_t num_heads = plan->spec.num_kv_heads;
    const int64_t num_keys = it->keys.end - it->keys.begin;
    block_cut cut = {.tile_begin = it->keys.begin / KV8_TILE_KEYS * KV8_TILE_KEYS};
    const int32_t fitting = plan->block_rows / it->num_rows;
    const int32_t most = fitting < KV8_ITEM_HEADS ? fitting : KV8_ITEM_HEADS;
    int64_t groups = kv8_ceil_div(num_heads, most < 1 ? 1 : most);
    const int64_t weight = block_weight(it->num_rows, num_keys) * num_heads;
    const int64_t parts = weight_limit > 0 ? kv8_ceil_div(weight, weight_limit) : 1;
    int64_t keys = 0;
    if (plan->spec.batch_invariant) {
        /* A request of more than one block spreads over threads by its rows. */
        const int64_t qo_len = kv8_request_of(&plan->spec, w->args, it->request).qo_len;
        if (qo_len * plan->group_size <= plan->block_rows) {
            keys = plan->piece_keys;
            cut.tile_begin = it->keys.begin / keys * keys;
        }
    } else if (parts > groups) {
        if (groups == 1 && parts == plan->num_threads)
            cut.lead = LEAD_WEIGHT / (block_weight(it->num_rows, KV8_TILE_KEYS) * num_heads) *
                       KV8_TILE_KEYS;
        keys = (num_keys * groups - cut.lead) / parts;
        if (keys < MIN_SPLIT_KEYS) {
            keys = MIN_SPLIT_KEYS;
            cut.lead = 0;
        }
    }
    keys = kv8_ceil_div(keys, KV8_TILE_KEYS) * KV8_TILE_KEYS;
    const int32_t all_keys = it->keys.end - cut.tile_begin;
    cut.keys = keys > 0 && keys < all_keys ? (int32_t)keys : all_keys;
    cut.num_splits = cut.keys > 0
                         ? (int32_t)kv8_ceil_div(it->keys.end - cut.tile_begin - cut.lead, cut.keys)
                         : 1;
    if (groups * cut.num_splits < parts)
        groups = kv8_min_i64(kv8_ceil_div(parts, cut.num_splits), num_heads);
    cut.heads = (int32_t)kv8_ceil_div(num_heads, groups);
    cut.num_groups = (int32_t)kv8_ceil_div(num_heads, cut.heads);
    return cut;
}

/* The first row in the cascade of the block's prefix or request; -1 = it shares nothing. */
static int32_t first_shared_row(const work *w, const block *it) {
    if (it->prefix < w->cascade->num_prefixes) return w->cascade->prefixes[it->prefix].first_row;
    return own_keys(w, it->request) > 0 ? w->cascade->members[it->request].first_row : -1;
}

/* Item `index` of a block: groups innermost, so that threads meet in the same pages. Rows of the
 * cascade always leave partial results and are joined after all items. */
static kv8_attention_item item_of(const work *w, const block *it, const block_cut *cut,
                                  int64_t index, int64_t first_partial, int64_t first_join) {
    const kv8_attention_plan *const plan = w->plan;
    const int64_t split = index / cut->num_groups, group = index % cut->num_groups;
    const int64_t end = cut->tile_begin + cut->lead + (split + 1) * cut->keys;
    const int64_t head = group * cut->heads;
    const int64_t group_floats = (int64_t)cut->heads * it->num_rows * (plan->v_row + 2);
    const int32_t shared_row = first_shared_row(w, it);
    const bool shared = it->prefix < w->cascade->num_prefixes;
    kv8_attention_item item = {
        .request = shared ? w->cascade->rows[shared_row].request : it->request,
        .kv_head = (int32_t)head,
        .num_heads = (int32_t)kv8_min_i64(cut->heads, plan->spec.num_kv_heads - head),
        .row_begin = it->row_begin,
        .num_rows = it->num_rows,
        .key_begin = split == 0 ? it->keys.begin : (int32_t)(end - cut->keys),
        .key_end = split == cut->num_splits - 1 ? it->keys.end : (int32_t)end,
        .shared = shared ? shared_row : -1,
        .join = -1,
        .partial = -1};
    if (cut->num_splits == 1 && shared_row < 0) return item;
    if (shared_row < 0) item.join = (int32_t)(first_join + group);
    item.partial = first_partial + group * cut->num_splits * group_floats +
                   split * item.num_heads * it->num_rows * (plan->v_row + 2);
    return item;
}

/* Tells the block's rows of the cascade where their partial results will lie. */
static void note_part(const work *w, const block *it, const block_cut *cut, int32_t part,
                      int64_t first_partial) {
    const int32_t group_size = w->plan->group_size;
    const int32_t which = it->prefix < w->cascade->num_prefixes ? 0 : 1;
    kv8_attention_shared_row *const rows =
        w->cascade->rows + first_shared_row(w, it) + it->row_begin / group_size;
    w->cascade->parts[part] = (kv8_attention_part){.first = first_partial,
                                                   .num_rows = it->num_rows,
                                                   .num_splits = cut->num_splits,
                                                   .heads = cut->heads};
    for (int32_t i = 0; i < it->num_rows / group_size; i++) {
        rows[i].part[which] = part;
        rows[i].row[which] = i * group_size;
    }
}

kv8_attention_schedule kv8_attention_cut(const kv8_attention_plan *plan,
                                         const kv8_attention_args *args,
                                         const kv8_attention_cascade *cascade,
                                         kv8_attention_item *items, kv8_attention_join *joins) {
    const work w = {plan, args, cascade};
    kv8_attention_schedule all = {.max_splits = 1};
    const int64_t weight_limit = item_weight(&w);
    block it = {0};
    while (next_block(&w, &it)) {
        const block_cut cut = cut_block(&w, &it, weight_limit);
        const int64_t first_join = all.num_joins, first_partial = all.partial_floats;
        const int64_t num_items = (int64_t)cut.num_splits * cut.num_groups;
        const bool in_cascade = first_shared_row(&w, &it) >= 0;
        all.max_splits = cut.num_splits > all.max_splits ? cut.num_splits : all.max_splits;
        for (int64_t i = 0; i < num_items && items != NULL; i++) {
            const kv8_attention_item item = item_of(&w, &it, &cut, i, first_partial, first_join);
            items[all.num_items + i] = item;
            if (item.join < 0 || i >= cut.num_groups) continue;
            joins[item.join].first = item;
            joins[item.join].num_splits = cut.num_splits;
            atomic_init(&joins[item.join].num_left, cut.num_splits);
        }
        all.num_items += num_items;
        if (in_cascade) note_part(&w, &it, &cut, all.num_parts++, first_partial);
        if (cut.num_splits == 1 && !in_cascade) continue;
        if (!in_cascade) all.num_joins += cut.num_groups;
        all.partial_floats +=
            (int64_t)cut.num_splits * plan->spec.num_kv_heads * it.num_rows * (plan->v_row + 2);
    }
    return all;
}

/* A block of weight w has parts = ceil(w / limit); all w / limit sum to at most `turns`. Its items
 * are at most parts + 2 * heads: splits = parts / groups rounded up, and one for the tile that the
 * first begins in; groups are raised only while the product is below parts. It is split only when
 * parts > groups, so w / limit > 1, and then splits <= parts / groups + 2 <= 4 w / limit / groups:
 * its partials are at most 4 w / limit items of block_rows rows. Blocks of the cascade that are not
 * split leave partials too: two for each of its rows and heads. */
void kv8_attention_cut_bounds(kv8_attention_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    const int64_t num_heads = spec->num_kv_heads;
    const int64_t packed = (int64_t)spec->max_total_q * plan->group_size;
    const int64_t requests = kv8_min_i64(spec->max_batch, spec->max_total_q);
    const int64_t blocks = requests + packed / plan->block_rows + plan->max_parts;
    const int64_t turns =
        plan->num_threads == 1 ? 0 : (int64_t)plan->num_threads * ITEMS_PER_THREAD;
    const int64_t item_rows = kv8_min_i64(plan->block_rows, packed * num_heads);
    int64_t rows = 0;
    plan->max_items = turns + blocks * (2 * num_heads + 1);
    plan->max_joins = 0;
    if (spec->batch_invariant) {
        if (spec->max_kv_len > plan->piece_keys) {
            const int64_t splits = 1 + kv8_ceil_div(spec->max_kv_len, plan->piece_keys);
            plan->max_items = (requests * splits + blocks) * num_heads;
            plan->max_joins = requests * num_heads;
            rows = kv8_min_i64(packed, requests * plan->block_rows) * num_heads * splits;
        }
    } else if (turns > 0 && spec->max_kv_len > MIN_SPLIT_KEYS) {
        plan->max_joins = turns;
        rows = 4 * turns * item_rows;
    }
    rows += 2 * plan->max_shared_rows * plan->group_size * num_heads;
    plan->max_partial_floats = rows * (plan->v_row + 2);
}
