/* cascade.c - which requests of a run share leading pages, and where reading them once pays.
 *
 * A fork's page table begins with its parent's pages. Requests are sorted by their tables, page by
 * page, so that whoever shares stands together: a tree, whose node is some requests and the pages
 * that all of them begin with. A node is taken whole, or its branches each on their own, whichever
 * saves more; a request is in one prefix at most. Only index arrays are read. Where the keys and
 * rows of a prefix are cut is schedule.c's business.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "plan.h"

enum {
    /* A row's partial result, written, read back and joined, costs about as much as this many keys
     * of the row (150 ns; measured by docs/kernels/cpu_attention.md). */
    PART_KEYS = 256,
    /* A request's rows fill at most 1 / this of a block: above, it uses a widened key often enough
     * by itself. */
    MEMBERS_PER_BLOCK = 4,
    MAX_DEPTH = 8 /* branches within branches; deeper ones are not told apart */
};

typedef struct search {
    const kv8_attention_plan *plan;
    const kv8_attention_args *args;
    const kv8_attention_cascade *cascade;
} search;

/* --- one request, one node --- */

static int32_t qo_len_of(const search *s, int32_t request) {
    return kv8_request_of(&s->plan->spec, s->args, request).qo_len;
}

/* Leading pages whose keys all rows of the request see: not behind a window, not in any row's
 * future. 0 keeps it out. */
static int32_t whole_pages(const search *s, int32_t b) {
    const kv8_attention_spec *const spec = &s->plan->spec;
    const kv8_request request = kv8_request_of(spec, s->args, b);
    const int32_t qo_len = request.qo_len;
    if (qo_len == 0 || (int64_t)qo_len * s->plan->group_size > s->plan->member_rows) return 0;
    if (kv8_row_keys(spec, s->args, &request, qo_len - 1).begin > 0) return 0;
    return kv8_row_keys(spec, s->args, &request, 0).end / spec->page_size;
}

/* Entry `at` of the table of an entry's request, or -1 behind its whole pages. */
static int32_t page_of(const search *s, int32_t i, int32_t at) {
    const int32_t request = s->cascade->sorted[i].request;
    if (at >= s->cascade->members[request].whole_pages) return -1;
    return kv8_request_pages(s->args->pages, request)[at];
}

/* Entries [begin, end) in the order of their table entries `at` (Shell 1959, gaps by
 * Knuth): qsort has no argument for the batch, and may allocate. */
static void sort_entries(const search *s, int32_t begin, int32_t end, int32_t at) {
    kv8_attention_sorted *const sorted = s->cascade->sorted;
    int32_t gap = 1;
    while (gap < (end - begin) / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3) {
        for (int32_t i = begin + gap; i < end; i++) {
            const int32_t request = sorted[i].request, page = page_of(s, i, at);
            int32_t to = i;
            for (; to - gap >= begin && page_of(s, to - gap, at) > page; to -= gap)
                sorted[to].request = sorted[to - gap].request;
            sorted[to].request = request;
        }
    }
}

/* Pages that all of [begin, end) begin with, `known` at least. */
static int32_t common_pages(const search *s, int32_t begin, int32_t end, int32_t known) {
    const kv8_attention_sorted *const sorted = s->cascade->sorted;
    const kv8_attention_member *const members = s->cascade->members;
    const int32_t *const first = kv8_request_pages(s->args->pages, sorted[begin].request);
    int32_t common = members[sorted[begin].request].whole_pages;
    for (int32_t i = begin + 1; i < end; i++) {
        const int32_t *const pages = kv8_request_pages(s->args->pages, sorted[i].request);
        const int32_t whole = members[sorted[i].request].whole_pages;
        if (whole < common) common = whole;
        const size_t left = (size_t)(common - known) * sizeof *pages;
        if (memcmp(first + known, pages + known, left) == 0) continue;
        for (common = known; first[common] == pages[common];) common++;
    }
    return common;
}

/* What reading the shared keys once for [begin, end) saves, in keys of one row: each of these
 * requests is a block of its own otherwise and widens every key; in return each of their rows has
 * one partial result more. */
static int64_t saving(const search *s, int32_t begin, int32_t end, int32_t pages) {
    int64_t rows = 0;
    for (int32_t i = begin; i < end; i++)
        rows += (int64_t)qo_len_of(s, s->cascade->sorted[i].request) * s->plan->group_size;
    const int64_t keys = (int64_t)pages * s->plan->spec.page_size;
    if (keys < KV8_TILE_KEYS) return 0; /* part of a tile is widened like a whole one */
    const int64_t blocks = kv8_ceil_div(rows, s->plan->block_rows);
    return (end - begin - blocks) * KV8_ROW_OVERHEAD * keys - rows * PART_KEYS;
}

/* --- the tree --- */

/* The most that entries [begin, end), whose first `known` pages are equal, can save; notes the
 * prefixes that save it. */
static int64_t divide(const search *s, int32_t begin, int32_t end, int32_t known, int32_t depth) {
    kv8_attention_sorted *const sorted = s->cascade->sorted;
    int64_t all = 0;
    sort_entries(s, begin, end, known);
    for (int32_t i = begin, next; i < end; i = next) {
        const int32_t page = page_of(s, i, known);
        for (next = i; next < end && page_of(s, next, known) == page; next++)
            sorted[next].end = next + 1, sorted[next].pages = 0;
        if (page < 0 || next == i + 1) continue;
        const int32_t common = common_pages(s, i, next, known + 1);
        const int64_t whole = saving(s, i, next, common);
        const int64_t branches = depth < MAX_DEPTH ? divide(s, i, next, common, depth + 1) : 0;
        if (whole > branches) sorted[i].end = next, sorted[i].pages = common;
        all += kv8_max_i64(whole, branches);
    }
    return all;
}

/* The prefix noted at entry `at`: its rows, request by request. */
static void add_prefix(const search *s, kv8_attention_cascade *cascade, int32_t at) {
    const kv8_attention_sorted *const first = &cascade->sorted[at];
    kv8_attention_prefix *const prefix = &cascade->prefixes[cascade->num_prefixes++];
    *prefix = (kv8_attention_prefix){.first_row = cascade->num_rows,
                                     .num_keys = first->pages * s->plan->spec.page_size};
    for (int32_t i = at; i < first->end; i++) {
        const int32_t request = cascade->sorted[i].request;
        kv8_attention_member *const member = &cascade->members[request];
        member->num_keys = prefix->num_keys;
        member->first_row = cascade->num_rows;
        for (int32_t row = 0; row < qo_len_of(s, request); row++)
            cascade->rows[cascade->num_rows++] = (kv8_attention_shared_row){
                .request = request, .q_row = s->args->qo_indptr[request] + row, .part = {-1, -1}};
    }
    prefix->num_rows = cascade->num_rows - prefix->first_row;
}

/* --- for plan.c and run.c --- */

/* The arrays one after another, each 64-byte aligned; returns the bytes of all. */
static size_t lay_out(const kv8_attention_plan *plan, uint8_t *base, kv8_attention_cascade *out) {
    const size_t requests = (size_t)plan->max_prefixes * 2, rows = (size_t)plan->max_shared_rows;
    const size_t sizes[] = {requests * sizeof *out->members, requests * sizeof *out->sorted,
                            (size_t)plan->max_prefixes * sizeof *out->prefixes,
                            rows * sizeof *out->rows, (size_t)plan->max_parts * sizeof *out->parts};
    size_t at[6] = {0};
    for (int i = 0; i < 5; i++) at[i + 1] = at[i] + kv8_round_up(sizes[i], KV8_ALIGNMENT);
    if (base == NULL) return at[5];
    *out = (kv8_attention_cascade){
        .members = (kv8_attention_member *)(void *)(base + at[0]),
        .sorted = (kv8_attention_sorted *)(void *)(base + at[1]),
        .prefixes = (kv8_attention_prefix *)(void *)(base + at[2]),
        .rows = (kv8_attention_shared_row *)(void *)(base + at[3]),
        .parts = (kv8_attention_part *)(void *)(base + at[4]),
    };
    return at[5];
}

void kv8_attention_cascade_bounds(kv8_attention_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    plan->member_rows = plan->block_rows / MEMBERS_PER_BLOCK;
    if (spec->batch_invariant || spec->has_mask || spec->has_key_range || spec->page_size == 0 ||
        spec->max_batch < 2 || spec->max_total_q < 2 || plan->group_size > plan->member_rows) {
        plan->member_rows = 0;
        return;
    }
    const int64_t longest = plan->member_rows / plan->group_size; /* query rows of a member */
    plan->max_prefixes = ((int64_t)spec->max_batch + 1) / 2;
    plan->max_shared_rows = kv8_min_i64(spec->max_total_q, spec->max_batch * longest);
    /* A prefix's rows fill all of its blocks but one; and every member has a block of own keys. */
    plan->max_parts = plan->max_prefixes +
                      plan->max_shared_rows * plan->group_size / plan->block_rows +
                      kv8_min_i64(spec->max_batch, spec->max_total_q);
    plan->cascade_size = lay_out(plan, NULL, NULL);
}

kv8_attention_cascade kv8_attention_cascade_at(const kv8_attention_plan *plan, void *memory) {
    kv8_attention_cascade cascade = {0};
    if (plan->member_rows > 0) (void)lay_out(plan, memory, &cascade);
    return cascade;
}

kv8_attention_cascade kv8_attention_cascade_find(const kv8_attention_plan *plan,
                                                 const kv8_attention_args *args, void *memory) {
    kv8_attention_cascade cascade = kv8_attention_cascade_at(plan, memory);
    if (plan->member_rows == 0 || args->batch < 2) return cascade;
    const search s = {plan, args, &cascade};
    int32_t candidates = 0;
    for (int32_t b = 0; b < args->batch; b++) {
        cascade.members[b] = (kv8_attention_member){.whole_pages = whole_pages(&s, b)};
        if (cascade.members[b].whole_pages > 0) cascade.sorted[candidates++].request = b;
    }
    (void)divide(&s, 0, candidates, 0, 0);
    for (int32_t i = 0; i < candidates; i = cascade.sorted[i].end)
        if (cascade.sorted[i].pages > 0) add_prefix(&s, &cascade, i);
    return cascade;
}
