/* page_pool.h - which page ids of one group are in use, by how many sequences, and in which order
 * the free ones are taken again. Knows ids only: neither bytes nor tokens.
 *
 * Free pages stand in a circular doubly linked list through `next` and `prev`, whose anchor is the
 * index num_pages:
 *
 *   anchor -> [taken first] -> ... -> [taken last] -> anchor
 *
 * A page whose content may still be wanted (the prefix index can find it) is freed to the back and
 * so lives as long as possible; any other goes to the front.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PAGE_POOL_H
#define KV8_PAGE_POOL_H

#include "base_impl.h"

typedef struct kv8_page_pool {
    int32_t num_pages;
    int32_t num_free;
    int32_t num_shared;   /* with more than one reference */
    int32_t *refcount;    /* [num_pages]; 0 = in the list */
    int32_t *next, *prev; /* [num_pages + 1] */
} kv8_page_pool;

/* All pages free, taken in ascending order. On failure nothing is held; destroy is then fine too.
 */
kv8_status kv8_page_pool_create(kv8_page_pool *pool, int32_t num_pages,
                                const kv8_allocator *allocator);
void kv8_page_pool_destroy(kv8_page_pool *pool, const kv8_allocator *allocator);

/* The first free page, now with one reference. The caller has checked num_free > 0. */
int32_t kv8_page_pool_take(kv8_page_pool *pool);
/* One more reference; a free page leaves the list. */
void kv8_page_pool_share(kv8_page_pool *pool, int32_t page);
/* One reference less; a page without any returns to the list, at the back when `keep`. */
void kv8_page_pool_give(kv8_page_pool *pool, int32_t page, bool keep);

#endif
