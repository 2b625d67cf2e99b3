/* pages.c - the life of a kv8_pages: everything allocated, facts read, everything released.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pages_state.h"

/* --- create --- */

/* Entries of a multi-dimensional array, or an overflow refused by kv8_alloc. */
static size_t times(size_t a, size_t b) {
    size_t product = 0;
    return kv8_mul_size(a, b, &product) ? product : SIZE_MAX;
}

static size_t num_held_from(const kv8_pages *pages) {
    return times((size_t)pages->max_seqs, (size_t)pages->num_groups);
}
static size_t num_list_entries(const kv8_pages *pages) {
    return times(num_held_from(pages), (size_t)pages->table_pages);
}
/* Tokens that a sequence can reach: see longest_list. */
static size_t seq_capacity(const kv8_pages *pages) {
    return (size_t)kv8_min_i64((int64_t)pages->table_pages * pages->page_size, pages->max_seq_len);
}
static size_t num_token_ids(const kv8_pages *pages) {
    return times((size_t)pages->max_seqs, seq_capacity(pages));
}

/* A sequence cannot hold more pages of a group without a window than the group has, so a huge
 * max_seq_len costs nothing beyond the pool's own size. */
static int32_t longest_list(const kv8_pages_options *o) {
    int64_t longest = kv8_ceil_div(o->max_seq_len, o->page_size);
    for (int32_t g = 0; g < o->num_groups; g++) {
        if (o->groups[g].window_left < 0) longest = kv8_min_i64(longest, o->groups[g].num_pages);
    }
    return (int32_t)longest;
}

static kv8_status create_groups(kv8_pages *pages, const kv8_pages_options *o) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(o->allocator, (size_t)o->num_groups, sizeof(kv8_page_group), "page groups",
                      &memory));
    pages->groups = memory;
    for (int32_t g = 0; g < o->num_groups; g++) {
        kv8_page_group *const group = &pages->groups[g];
        group->window_left = o->groups[g].window_left;
        group->layer = o->groups[g].layer;
        KV8_TRY(kv8_page_pool_create(&group->pool, o->groups[g].num_pages, o->allocator));
        KV8_TRY(kv8_prefix_index_create(&group->index, o->groups[g].num_pages, o->page_size,
                                        o->allocator));
    }
    return KV8_OK;
}

static kv8_status create_sequences(kv8_pages *pages) {
    const kv8_allocator *const allocator = pages->allocator;
    const size_t max_seqs = (size_t)pages->max_seqs;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, max_seqs, sizeof(kv8_sequence), "sequences", &memory));
    pages->sequences = memory;
    KV8_TRY(kv8_alloc(allocator, max_seqs, sizeof(int32_t), "sequence slots", &memory));
    pages->free_seqs = memory;
    KV8_TRY(
        kv8_alloc(allocator, num_held_from(pages), sizeof(int32_t), "sequence windows", &memory));
    pages->held_from = memory;
    KV8_TRY(kv8_alloc(allocator, num_held_from(pages), sizeof(int32_t), "changed lists", &memory));
    pages->changed_from = memory;
    KV8_TRY(kv8_alloc(allocator, num_list_entries(pages), sizeof(int32_t), "page tables", &memory));
    pages->lists = memory;
    KV8_TRY(kv8_alloc(allocator, num_token_ids(pages), sizeof(int32_t), "token ids", &memory));
    pages->token_ids = memory;
    for (size_t i = 0; i < max_seqs; i++) {
        kv8_sequence *const sequence = &pages->sequences[i];
        const size_t first_group = i * (size_t)pages->num_groups;
        sequence->held_from = pages->held_from + first_group;
        sequence->changed_from = pages->changed_from + first_group;
        sequence->lists = pages->lists + first_group * (size_t)pages->table_pages;
        sequence->token_ids = pages->token_ids + i * seq_capacity(pages);
        pages->free_seqs[max_seqs - 1 - i] = (int32_t)i;
    }
    return KV8_OK;
}

kv8_status kv8_pages_create(kv8_pages **out, const kv8_pages_options *options) {
    *out = NULL;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_pages), "pages", &memory));
    kv8_pages *const pages = memory;
    *pages = (kv8_pages){
        .allocator = options->allocator,
        .page_size = options->page_size,
        .max_seqs = options->max_seqs,
        .max_seq_len = options->max_seq_len,
        .window_slack = options->window_slack,
        .num_groups = options->num_groups,
        .table_pages = longest_list(options),
        .copy_page = options->copy_page,
        .cookie = options->cookie,
    };
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(create_groups(pages, options));
    KV8_TRY_GOTO(create_sequences(pages));
    *out = pages;
    return KV8_OK;
fail:
    kv8_pages_destroy(pages);
    return status;
}

void kv8_pages_destroy(kv8_pages *pages) {
    if (pages == NULL) return;
    const kv8_allocator *const allocator = pages->allocator;
    const size_t max_seqs = (size_t)pages->max_seqs;
    kv8_release(allocator, pages->token_ids, num_token_ids(pages), sizeof(int32_t));
    kv8_release(allocator, pages->lists, num_list_entries(pages), sizeof(int32_t));
    kv8_release(allocator, pages->changed_from, num_held_from(pages), sizeof(int32_t));
    kv8_release(allocator, pages->held_from, num_held_from(pages), sizeof(int32_t));
    kv8_release(allocator, pages->free_seqs, max_seqs, sizeof(int32_t));
    kv8_release(allocator, pages->sequences, max_seqs, sizeof(kv8_sequence));
    for (int32_t g = 0; pages->groups != NULL && g < pages->num_groups; g++) {
        kv8_page_pool_destroy(&pages->groups[g].pool, allocator);
        kv8_prefix_index_destroy(&pages->groups[g].index, allocator);
    }
    kv8_release(allocator, pages->groups, (size_t)pages->num_groups, sizeof(kv8_page_group));
    kv8_release(allocator, pages, 1, sizeof(kv8_pages));
}

/* --- facts --- */

int32_t kv8_pages_page_size(const kv8_pages *pages) {
    return pages->page_size;
}
int32_t kv8_pages_max_seq_len(const kv8_pages *pages) {
    return pages->max_seq_len;
}
int32_t kv8_pages_num_groups(const kv8_pages *pages) {
    return pages->num_groups;
}
int64_t kv8_pages_reach(const kv8_pages *pages, int32_t group) {
    const int64_t window = pages->groups[group].window_left;
    return window < 0 ? -1 : window + pages->window_slack;
}
int32_t kv8_pages_num_seqs(const kv8_pages *pages) {
    return pages->num_seqs;
}

int32_t kv8_pages_num_pages(const kv8_pages *pages, int32_t group) {
    return pages->groups[group].pool.num_pages;
}

int32_t kv8_pages_num_free(const kv8_pages *pages, int32_t group) {
    return pages->groups[group].pool.num_free;
}

int32_t kv8_pages_num_shared(const kv8_pages *pages, int32_t group) {
    return pages->groups[group].pool.num_shared;
}

void kv8_pages_count(const kv8_pages *pages, int32_t group, int32_t first, int32_t num,
                     int32_t *used_out, int32_t *shared_out) {
    const int32_t *const refcount = pages->groups[group].pool.refcount + first;
    *used_out = *shared_out = 0;
    for (int32_t i = 0; i < num; i++) {
        *used_out += refcount[i] > 0;
        *shared_out += refcount[i] > 1;
    }
}

uint64_t kv8_pages_lists_version(const kv8_pages *pages) {
    return pages->lists_version;
}

int32_t kv8_pages_longest_list(const kv8_pages *pages) {
    return pages->table_pages;
}

int32_t kv8_pages_length(const kv8_pages *pages, int32_t idx) {
    return pages->sequences[idx].length;
}

const int32_t *kv8_pages_token_ids(const kv8_pages *pages, int32_t idx) {
    const kv8_sequence *const sequence = &pages->sequences[idx];
    return sequence->has_ids ? sequence->token_ids : NULL;
}

const int32_t *kv8_pages_list(const kv8_pages *pages, int32_t idx, int32_t group) {
    return kv8_sequence_list(pages, &pages->sequences[idx], group);
}

int32_t kv8_pages_held_from(const kv8_pages *pages, int32_t idx, int32_t group) {
    return pages->sequences[idx].held_from[group];
}

int32_t kv8_pages_kept_from(const kv8_pages *pages, int32_t idx, int32_t group) {
    const kv8_sequence *const sequence = &pages->sequences[idx];
    if (sequence->keeps_all) return sequence->held_from[group];
    return (int32_t)kv8_max_i64(sequence->held_from[group],
                                kv8_keep_from(pages, &pages->groups[group], sequence->length));
}
