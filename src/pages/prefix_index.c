/* prefix_index.c - the hash table from prefixes to pages.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefix_index.h"

#include <assert.h>
#include <string.h>
#include <xxhash.h>

kv8_prefix_hash kv8_prefix_hash_page(kv8_prefix_hash parent, const int32_t *token_ids,
                                     int32_t page_size) {
    /* The parent enters twice: its low half as the seed, its high half by exclusive or, so that
     * all of its 128 bits reach the child and no buffer is needed to join parent and tokens. */
    const XXH128_hash_t hash =
        XXH3_128bits_withSeed(token_ids, (size_t)page_size * sizeof *token_ids, parent.low);
    const XXH128_hash_t mixed = {hash.low64, hash.high64 ^ parent.high};
    const XXH128_hash_t result = XXH3_128bits(&mixed, sizeof mixed);
    return (kv8_prefix_hash){result.low64, result.high64};
}

kv8_status kv8_prefix_index_create(kv8_prefix_index *index, int32_t num_pages, int32_t page_size,
                                   const kv8_allocator *allocator) {
    *index = (kv8_prefix_index){.num_pages = num_pages, .page_size = page_size, .num_buckets = 1};
    while (index->num_buckets < (size_t)num_pages) index->num_buckets *= 2;
    const size_t count = (size_t)num_pages;
    kv8_status status = KV8_OK;
    void *memory = NULL;
    KV8_TRY_GOTO(
        kv8_alloc(allocator, index->num_buckets, sizeof(int32_t), "prefix index", &memory));
    index->bucket = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, count, sizeof(int32_t), "prefix index", &memory));
    index->next = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, count, 1, "prefix index", &memory));
    index->listed = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, count, sizeof(kv8_prefix_hash), "prefix index", &memory));
    index->hash = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, count, sizeof(kv8_prefix_hash), "prefix index", &memory));
    index->parent = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, count * (size_t)page_size, sizeof(int32_t),
                           "prefix index token ids", &memory));
    index->token_ids = memory;
    for (size_t i = 0; i < index->num_buckets; i++) index->bucket[i] = -1;
    return KV8_OK;
fail:
    kv8_prefix_index_destroy(index, allocator);
    return status;
}

void kv8_prefix_index_destroy(kv8_prefix_index *index, const kv8_allocator *allocator) {
    const size_t count = (size_t)index->num_pages;
    kv8_release(allocator, index->bucket, index->num_buckets, sizeof(int32_t));
    kv8_release(allocator, index->next, count, sizeof(int32_t));
    kv8_release(allocator, index->listed, count, 1);
    kv8_release(allocator, index->hash, count, sizeof(kv8_prefix_hash));
    kv8_release(allocator, index->parent, count, sizeof(kv8_prefix_hash));
    kv8_release(allocator, index->token_ids, count * (size_t)index->page_size, sizeof(int32_t));
    *index = (kv8_prefix_index){0};
}

static bool same_hash(kv8_prefix_hash a, kv8_prefix_hash b) {
    return a.low == b.low && a.high == b.high;
}

static int32_t *bucket_of(const kv8_prefix_index *index, kv8_prefix_hash hash) {
    return &index->bucket[hash.low & (index->num_buckets - 1)];
}

int32_t kv8_prefix_index_find(const kv8_prefix_index *index, kv8_prefix_hash hash,
                              kv8_prefix_hash parent, const int32_t *token_ids) {
    const size_t page_size = (size_t)index->page_size;
    for (int32_t page = *bucket_of(index, hash); page >= 0; page = index->next[page]) {
        if (same_hash(index->hash[page], hash) && same_hash(index->parent[page], parent) &&
            memcmp(index->token_ids + (size_t)page * page_size, token_ids,
                   page_size * sizeof *token_ids) == 0)
            return page;
    }
    return -1;
}

int32_t kv8_prefix_index_page_of(const kv8_prefix_index *index, kv8_prefix_hash hash) {
    int32_t page = *bucket_of(index, hash);
    while (page >= 0 && !same_hash(index->hash[page], hash)) page = index->next[page];
    return page;
}

void kv8_prefix_index_insert(kv8_prefix_index *index, int32_t page, kv8_prefix_hash hash,
                             kv8_prefix_hash parent, const int32_t *token_ids) {
    assert(page >= 0 && page < index->num_pages);
    if (index->listed[page] || kv8_prefix_index_find(index, hash, parent, token_ids) >= 0) return;
    const size_t page_size = (size_t)index->page_size;
    int32_t *const bucket = bucket_of(index, hash);
    index->hash[page] = hash;
    index->parent[page] = parent;
    memcpy(index->token_ids + (size_t)page * page_size, token_ids, page_size * sizeof *token_ids);
    index->next[page] = *bucket;
    *bucket = page;
    index->listed[page] = 1;
}

void kv8_prefix_index_remove(kv8_prefix_index *index, int32_t page) {
    assert(page >= 0 && page < index->num_pages);
    if (!index->listed[page]) return;
    int32_t *link = bucket_of(index, index->hash[page]);
    while (*link != page) link = &index->next[*link];
    *link = index->next[page];
    index->listed[page] = 0;
}
