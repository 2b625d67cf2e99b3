/* prefix_list.c - which prefixes can be found, as lists of tokens: the pages of the group that
 * keeps every token form a tree, each pointing at the hash of the page before it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pages_state.h"

enum { NO_PARENT = -1, LOST_PARENT = -2 };

/* The tree: [num_pages] each. */
typedef struct tree {
    const kv8_prefix_index *index;
    int32_t *parent, *num_children;
    int32_t *token_ids; /* of one prefix */
} tree;

/* The group that keeps every token, or where none does the first. */
static const kv8_page_group *whole_group(const kv8_pages *pages) {
    for (int32_t g = 0; g < pages->num_groups; g++) {
        if (pages->groups[g].window_left < 0) return &pages->groups[g];
    }
    return &pages->groups[0];
}

static void link_pages(tree *t) {
    const kv8_prefix_index *const index = t->index;
    for (int32_t i = 0; i < index->num_pages; i++) t->num_children[i] = 0;
    for (int32_t i = 0; i < index->num_pages; i++) {
        if (!index->listed[i]) continue;
        const kv8_prefix_hash above = index->parent[i];
        const int32_t found = kv8_prefix_index_page_of(index, above);
        t->parent[i] = found >= 0                          ? found
                       : above.low == 0 && above.high == 0 ? NO_PARENT
                                                           : LOST_PARENT;
        if (found >= 0) t->num_children[found]++;
    }
}

/* Pages down to and with this one; 0 = one before it is lost, or the prefix has a salt. */
static int32_t depth_of(const tree *t, int32_t page) {
    int32_t depth = 0;
    for (; page >= 0 && depth <= t->index->num_pages; page = t->parent[page]) depth++;
    return page == NO_PARENT ? depth : 0;
}

static kv8_status show(const tree *t, int32_t page, kv8_prefix_visitor visit, void *cookie) {
    const int32_t page_size = t->index->page_size, depth = depth_of(t, page);
    if (!t->index->listed[page] || t->num_children[page] == 1 || depth == 0) return KV8_OK;
    for (int32_t i = depth; i-- > 0; page = t->parent[page]) {
        for (int32_t d = 0; d < page_size; d++)
            t->token_ids[i * page_size + d] = t->index->token_ids[page * page_size + d];
    }
    return visit(cookie, t->token_ids, depth * page_size);
}

kv8_status kv8_pages_list_prefixes(const kv8_pages *pages, kv8_prefix_visitor visit, void *cookie) {
    const kv8_page_group *const group = whole_group(pages);
    const kv8_page_pool *const pool = &group->pool;
    const size_t num = (size_t)pool->num_pages;
    const size_t num_ints = num * (2 + (size_t)pages->page_size);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(pages->allocator, num_ints, sizeof(int32_t), "tree of prefixes", &memory));
    tree t = {.index = &group->index, .parent = memory};
    t.num_children = t.parent + num;
    t.token_ids = t.num_children + num;
    link_pages(&t);
    kv8_status status = KV8_OK;
    const int32_t end = pool->num_pages; /* the anchor of the free pages, oldest first */
    for (int32_t p = pool->next[end]; p != end && status == KV8_OK; p = pool->next[p])
        status = show(&t, p, visit, cookie);
    for (int32_t p = 0; p < end && status == KV8_OK; p++)
        if (pool->refcount[p] > 0) status = show(&t, p, visit, cookie);
    kv8_release(pages->allocator, memory, num_ints, sizeof(int32_t));
    return status;
}
