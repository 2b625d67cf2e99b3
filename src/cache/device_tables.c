/* device_tables.c - the host's part of page tables in a GPU's memory: which sequences' lists
 * changed since they were sent, and from where on. What makes tables of them is cuda/page_lists.cu.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_tables.h"

#include <string.h>

#include "page_lists_args.h"

enum { LEAST_PIECE = 1 << 18 }; /* bytes that go with one launch, of many rows */

/* Whose lists a group's table has. */
typedef struct group_table {
    kv8_seq *seqs; /* [num_seqs] of max_seqs */
    int32_t num_seqs;
    uint64_t version; /* kv8_pages_lists_version of those; 0: none */
} group_table;

struct kv8_device_tables {
    const kv8_cache *cache;
    kv8_staging *staging;
    kv8_kernel kernel;                       /* name NULL: not asked for yet */
    int32_t *lists, *last_page_len, *tables; /* device, as kv8_page_lists_args has them */
    size_t list_entries, table_entries;
    group_table *groups; /* [num_groups] */
    /* Of the next launch: at most as many as tables have. */
    kv8_page_row *rows;
    const int32_t **changed; /* [num_rows] the pages from changed_from on */
    size_t num_rows, num_changed;
    int32_t longest;
};

/* --- sizes --- */

static size_t num_seqs_of(const kv8_cache *cache) {
    return (size_t)cache->shape.max_seqs;
}
static size_t most_rows(const kv8_cache *cache) {
    return (num_seqs_of(cache) + 1) * (size_t)cache->num_groups;
}
static size_t longest_list(const kv8_cache *cache) {
    return (size_t)kv8_pages_longest_list(cache->pages);
}
/* A list that is all new takes one piece, and so do the last lengths of all groups. */
size_t kv8_device_tables_staged_bytes(const kv8_cache *cache) {
    const size_t list = sizeof(kv8_page_row) + longest_list(cache) * sizeof(int32_t);
    const size_t lengths = most_rows(cache) * sizeof(int32_t);
    const size_t most = list > lengths ? list : lengths;
    return most > LEAST_PIECE ? most : LEAST_PIECE;
}

/* --- create --- */

static kv8_status take_groups(kv8_device_tables *t) {
    const kv8_allocator *const allocator = t->cache->allocator;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, (size_t)t->cache->num_groups, sizeof *t->groups,
                      "device page tables", &memory));
    t->groups = memory;
    for (int32_t g = 0; g < t->cache->num_groups; g++) {
        KV8_TRY(kv8_alloc(allocator, num_seqs_of(t->cache), sizeof(kv8_seq),
                          "sequences of device page tables", &memory));
        t->groups[g].seqs = memory;
    }
    KV8_TRY(kv8_alloc(allocator, most_rows(t->cache), sizeof *t->rows, "rows of device page tables",
                      &memory));
    t->rows = memory;
    KV8_TRY(kv8_alloc(allocator, most_rows(t->cache), sizeof *t->changed, "changed page lists",
                      &memory));
    t->changed = memory;
    return KV8_OK;
}

kv8_status kv8_device_tables_create(kv8_device_tables **out, const kv8_cache *cache,
                                    kv8_staging *staging) {
    *out = NULL;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(cache->allocator, 1, sizeof(kv8_device_tables), "page tables", &memory));
    kv8_device_tables *const t = memory;
    *t = (kv8_device_tables){.cache = cache, .staging = staging};
    t->list_entries = longest_list(cache);
    t->table_entries = num_seqs_of(cache) + 1 + num_seqs_of(cache) * t->list_entries;
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(take_groups(t));
    const size_t each = (size_t)cache->num_groups * sizeof(int32_t);
    KV8_TRY_GOTO(
        kv8_take_zeros(staging->stream, num_seqs_of(cache) * t->list_entries, each, &memory));
    t->lists = memory;
    KV8_TRY_GOTO(kv8_take_zeros(staging->stream, t->table_entries, each, &memory));
    t->tables = memory;
    KV8_TRY_GOTO(kv8_take_zeros(staging->stream, num_seqs_of(cache) + 1, each, &memory));
    t->last_page_len = memory;
    *out = t;
    return KV8_OK;
fail:
    kv8_device_tables_destroy(t);
    return status;
}

void kv8_device_tables_destroy(kv8_device_tables *t) {
    if (t == NULL) return;
    const kv8_cache *const cache = t->cache;
    kv8_device *const device = kv8_stream_device(t->staging->stream);
    for (int32_t g = 0; t->groups != NULL && g < cache->num_groups; g++)
        kv8_release(cache->allocator, t->groups[g].seqs, num_seqs_of(cache), sizeof(kv8_seq));
    kv8_release(cache->allocator, t->groups, (size_t)cache->num_groups, sizeof *t->groups);
    kv8_release(cache->allocator, t->rows, most_rows(cache), sizeof *t->rows);
    kv8_release(cache->allocator, t->changed, most_rows(cache), sizeof *t->changed);
    kv8_device_free(device, t->last_page_len);
    kv8_device_free(device, t->tables);
    kv8_device_free(device, t->lists);
    kv8_release(cache->allocator, t, 1, sizeof *t);
}

/* --- load --- */

/* The rows collected so far. */
static kv8_status send_rows(kv8_device_tables *t) {
    kv8_staged piece;
    const size_t row_ints = t->num_rows * sizeof *t->rows / sizeof(int32_t);
    KV8_TRY(kv8_staging_stage(t->staging, (row_ints + t->num_changed) * sizeof(int32_t), &piece));
    void *const host = piece.host, *const device = piece.device;
    int32_t *to = (int32_t *)host + row_ints;
    for (size_t i = 0; i < t->num_rows; i++) {
        kv8_page_row *const row = &t->rows[i];
        const int32_t changed = row->count - row->changed_from;
        row->changed_at = (int32_t)(to - (int32_t *)host);
        if (changed > 0) memcpy(to, t->changed[i], (size_t)changed * sizeof *to);
        to += changed;
    }
    memcpy(host, t->rows, t->num_rows * sizeof *t->rows);
    KV8_TRY(kv8_staging_send(t->staging, &piece));
    const kv8_page_lists_args args = {
        .rows = device,
        .ints = device,
        .lists = t->lists,
        .last_page_len = t->last_page_len,
        .tables = t->tables,
        .list_entries = (int64_t)t->list_entries,
        .table_entries = (int64_t)t->table_entries,
        .max_seqs = t->cache->shape.max_seqs,
    };
    const int64_t blocks = kv8_max_i64(1, kv8_ceil_div(t->longest, KV8_PAGE_LISTS_EACH));
    const kv8_launch launch = {.grid = {(uint32_t)t->num_rows, (uint32_t)blocks},
                               .block = {KV8_PAGE_LISTS_THREADS}};
    t->num_rows = t->num_changed = 0;
    t->longest = 0;
    return kv8_kernel_launch(&t->kernel, t->staging->stream, &launch, &args);
}

static kv8_status add_row(kv8_device_tables *t, const kv8_page_row *row, const int32_t *changed) {
    const size_t num_changed = (size_t)(row->count - row->changed_from);
    const size_t bytes =
        (t->num_rows + 1) * sizeof *row + (t->num_changed + num_changed) * sizeof *changed;
    if (bytes > kv8_device_tables_staged_bytes(t->cache)) KV8_TRY(send_rows(t));
    t->rows[t->num_rows] = *row;
    t->changed[t->num_rows++] = changed;
    t->num_changed += num_changed;
    if (row->count > t->longest) t->longest = row->count;
    return KV8_OK;
}

static kv8_status add_group(kv8_device_tables *t, int32_t group, const kv8_seq *seqs,
                            int32_t num_seqs) {
    const kv8_pages *const pages = t->cache->pages;
    const int32_t page_size = t->cache->shape.page_size;
    int64_t begin = 0;
    for (int32_t b = 0; b < num_seqs; b++) {
        int32_t idx = 0;
        KV8_TRY(kv8_pages_find(pages, seqs[b], &idx));
        const int32_t count = (int32_t)kv8_ceil_div(kv8_pages_length(pages, idx), page_size);
        if (begin + count > INT32_MAX)
            return kv8_fail(KV8_ERR_FULL, "page table: %lld entries needed, the capacity is %d",
                            (long long)begin + count, INT32_MAX);
        const kv8_page_row row = {.group = group,
                                  .row = b,
                                  .sequence = idx,
                                  .begin = (int32_t)begin,
                                  .count = count,
                                  .last_page_len = kv8_pages_last_length(pages, idx),
                                  .changed_from = kv8_pages_changed_from(pages, idx, group)};
        KV8_TRY(add_row(t, &row, kv8_pages_list(pages, idx, group) + row.changed_from));
        begin += count;
    }
    const kv8_page_row rest = {
        .group = group, .row = num_seqs, .sequence = -1, .begin = (int32_t)begin};
    return add_row(t, &rest, NULL);
}

/* Whole tables. A sequence that is in the batch twice is sent twice: only then are all marked. */
static kv8_status load_lists(kv8_device_tables *t, int32_t first, int32_t num_groups,
                             const kv8_seq *seqs, int32_t num_seqs) {
    t->num_rows = t->num_changed = 0;
    t->longest = 0;
    if (t->kernel.name == NULL)
        KV8_TRY(kv8_kernel_get(&t->kernel, kv8_stream_device(t->staging->stream),
                               "kv8_page_lists__sm80", sizeof(kv8_page_lists_args), 0));
    for (int32_t g = first; g < first + num_groups; g++) {
        t->groups[g].version = 0;
        KV8_TRY(add_group(t, g, seqs, num_seqs));
    }
    KV8_TRY(send_rows(t));
    for (int32_t g = first; g < first + num_groups; g++) {
        group_table *const group = &t->groups[g];
        for (int32_t b = 0; b < num_seqs; b++)
            kv8_pages_mark_sent(t->cache->pages, kv8_seq_index(seqs[b]), g);
        if (num_seqs > 0) memcpy(group->seqs, seqs, (size_t)num_seqs * sizeof *seqs);
        group->num_seqs = num_seqs;
        group->version = kv8_pages_lists_version(t->cache->pages);
    }
    return KV8_OK;
}

static int32_t *indptr_of(const kv8_device_tables *t, int32_t group) {
    return t->tables + (size_t)group * t->table_entries;
}
static int32_t *last_page_len_of(const kv8_device_tables *t, int32_t group) {
    return t->last_page_len + (size_t)group * (num_seqs_of(t->cache) + 1);
}

/* Last lengths of all groups, which are the same, in one copy: between two arrays lie the zeros
 * that the first of them ends in. */
static kv8_status load_last_lengths(kv8_device_tables *t, int32_t first, int32_t num_groups,
                                    const kv8_seq *seqs, int32_t num_seqs) {
    const size_t stride = num_seqs_of(t->cache) + 1, num = (size_t)num_seqs;
    kv8_staged piece;
    KV8_TRY(kv8_staging_stage(t->staging,
                              ((size_t)(num_groups - 1) * stride + num) * sizeof(int32_t), &piece));
    void *const memory = piece.host;
    int32_t *const host = memory;
    kv8_pages_last_lengths(t->cache->pages, seqs, num_seqs, host);
    for (int32_t g = 1; g < num_groups; g++) {
        int32_t *const to = host + (size_t)g * stride;
        memset(to - (stride - num), 0, (stride - num) * sizeof *to);
        memcpy(to, host, num * sizeof *to);
    }
    return kv8_stream_copy(t->staging->stream, last_page_len_of(t, first), host, piece.bytes);
}

static bool has_lists(const kv8_device_tables *t, int32_t group, const kv8_seq *seqs,
                      int32_t num_seqs) {
    const group_table *const has = &t->groups[group];
    return num_seqs > 0 && has->version == kv8_pages_lists_version(t->cache->pages) &&
           has->num_seqs == num_seqs &&
           memcmp(has->seqs, seqs, (size_t)num_seqs * sizeof *seqs) == 0;
}

kv8_status kv8_device_tables_load(kv8_device_tables *t, int32_t first, int32_t num_groups,
                                  const kv8_seq *seqs, int32_t num_seqs, bool lists_alone) {
    bool has_all = true;
    for (int32_t g = first; g < first + num_groups; g++)
        has_all = has_all && has_lists(t, g, seqs, num_seqs);
    if (!has_all) return load_lists(t, first, num_groups, seqs, num_seqs);
    return lists_alone ? KV8_OK : load_last_lengths(t, first, num_groups, seqs, num_seqs);
}

kv8_page_table kv8_device_tables_get(const kv8_device_tables *t, int32_t group) {
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    table.page_indptr = indptr_of(t, group);
    table.last_page_len = last_page_len_of(t, group);
    table.page_indices = table.page_indptr + num_seqs_of(t->cache) + 1;
    return table;
}
