/* prefix_index.h - finds the page of one group that holds given tokens after a given prefix.
 * Knows token ids and hashes, never who owns a page nor what its rows contain.
 *
 * A page's hash is XXH3-128 over (hash of the pages before it, its own token ids), so that one
 * hash stands for the whole prefix. A find compares hash, parent hash and every token id: equal
 * hashes of different tokens only cost a comparison. Pages with equal low hash bits form a chain
 * through `next`; removal walks it, so the table needs no tombstones.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFIX_INDEX_H
#define KV8_PREFIX_INDEX_H

#include "base_impl.h"

typedef struct kv8_prefix_hash {
    uint64_t low, high;
} kv8_prefix_hash;

typedef struct kv8_prefix_index {
    int32_t num_pages, page_size;
    size_t num_buckets;             /* a power of two >= num_pages */
    int32_t *bucket;                /* [num_buckets] first page of the chain, or -1 */
    int32_t *next;                  /* [num_pages] */
    uint8_t *listed;                /* [num_pages] 1 = findable */
    kv8_prefix_hash *hash, *parent; /* [num_pages] */
    int32_t *token_ids;             /* [num_pages, page_size] */
} kv8_prefix_index;

/* Hash of the page that holds token_ids after the prefix of hash `parent` ({0, 0} = none). */
kv8_prefix_hash kv8_prefix_hash_page(kv8_prefix_hash parent, const int32_t *token_ids,
                                     int32_t page_size);

/* On failure nothing is held; destroy is then fine too. */
kv8_status kv8_prefix_index_create(kv8_prefix_index *index, int32_t num_pages, int32_t page_size,
                                   const kv8_allocator *allocator);
void kv8_prefix_index_destroy(kv8_prefix_index *index, const kv8_allocator *allocator);

/* The page, or -1. */
int32_t kv8_prefix_index_find(const kv8_prefix_index *index, kv8_prefix_hash hash,
                              kv8_prefix_hash parent, const int32_t *token_ids);
/* A page of this hash, whatever its tokens; -1 = none. */
int32_t kv8_prefix_index_page_of(const kv8_prefix_index *index, kv8_prefix_hash hash);
/* Makes `page` findable, unless it is already or another page holds the same. */
void kv8_prefix_index_insert(kv8_prefix_index *index, int32_t page, kv8_prefix_hash hash,
                             kv8_prefix_hash parent, const int32_t *token_ids);
/* Forgets `page`; one that is not listed is fine. */
void kv8_prefix_index_remove(kv8_prefix_index *index, int32_t page);

#endif
