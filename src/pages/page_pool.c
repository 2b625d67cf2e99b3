/* page_pool.c - reference counts and the list of free pages.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "page_pool.h"

#include <assert.h>

static void unlink_page(kv8_page_pool *pool, int32_t page) {
    const int32_t before = pool->prev[page], after = pool->next[page];
    pool->next[before] = after;
    pool->prev[after] = before;
    pool->num_free--;
}

static void link_after(kv8_page_pool *pool, int32_t before, int32_t page) {
    const int32_t after = pool->next[before];
    pool->next[before] = page;
    pool->prev[page] = before;
    pool->next[page] = after;
    pool->prev[after] = page;
    pool->num_free++;
}

kv8_status kv8_page_pool_create(kv8_page_pool *pool, int32_t num_pages,
                                const kv8_allocator *allocator) {
    *pool = (kv8_page_pool){.num_pages = num_pages};
    kv8_status status = KV8_OK;
    void *refcount = NULL, *next = NULL, *prev = NULL;
    const size_t count = (size_t)num_pages;
    KV8_TRY_GOTO(kv8_alloc(allocator, count, sizeof(int32_t), "page pool", &refcount));
    pool->refcount = refcount;
    KV8_TRY_GOTO(kv8_alloc(allocator, count + 1, sizeof(int32_t), "page pool", &next));
    pool->next = next;
    KV8_TRY_GOTO(kv8_alloc(allocator, count + 1, sizeof(int32_t), "page pool", &prev));
    pool->prev = prev;
    pool->next[num_pages] = num_pages;
    pool->prev[num_pages] = num_pages;
    for (int32_t page = 0; page < num_pages; page++) link_after(pool, pool->prev[num_pages], page);
    return KV8_OK;
fail:
    kv8_page_pool_destroy(pool, allocator);
    return status;
}

void kv8_page_pool_destroy(kv8_page_pool *pool, const kv8_allocator *allocator) {
    const size_t count = (size_t)pool->num_pages;
    kv8_release(allocator, pool->refcount, count, sizeof(int32_t));
    kv8_release(allocator, pool->next, count + 1, sizeof(int32_t));
    kv8_release(allocator, pool->prev, count + 1, sizeof(int32_t));
    *pool = (kv8_page_pool){0};
}

int32_t kv8_page_pool_take(kv8_page_pool *pool) {
    assert(pool->num_free > 0);
    const int32_t page = pool->next[pool->num_pages];
    unlink_page(pool, page);
    pool->refcount[page] = 1;
    return page;
}

void kv8_page_pool_share(kv8_page_pool *pool, int32_t page) {
    assert(page >= 0 && page < pool->num_pages);
    if (pool->refcount[page] == 0) unlink_page(pool, page);
    if (++pool->refcount[page] == 2) pool->num_shared++;
}

void kv8_page_pool_give(kv8_page_pool *pool, int32_t page, bool keep) {
    assert(page >= 0 && page < pool->num_pages && pool->refcount[page] > 0);
    const int32_t left = --pool->refcount[page];
    if (left == 1) pool->num_shared--;
    if (left > 0) return;
    link_after(pool, keep ? pool->prev[pool->num_pages] : pool->num_pages, page);
}
