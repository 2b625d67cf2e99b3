/* pages_state.h - the objects inside a kv8_pages, for the files of this room only.
 *
 *   kv8_pages
 *    |- groups[num_groups]      page ids: pool and prefix index, one per distinct window_left
 *    `- sequences[max_seqs]     tokens, and per group a list of page ids
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PAGES_STATE_H
#define KV8_PAGES_STATE_H

#include "page_pool.h"
#include "pages_impl.h"
#include "prefix_index.h"

typedef struct kv8_page_group {
    int32_t window_left, layer;
    kv8_page_pool pool;
    kv8_prefix_index index;
} kv8_page_group;

/* A sequence holds, in each group, the pages of tokens [held_from, length): entries
 * held_from / page_size .. ceil(length / page_size) - 1 of its list; earlier ones are
 * KV8_NO_PAGE, later ones meaningless. */
typedef struct kv8_sequence {
    uint32_t generation; /* of the handle that is or was last valid */
    bool alive;
    bool has_ids;    /* every token's id is known */
    bool is_private; /* never published */
    bool keeps_all;  /* a snapshot has all that is held */
    int32_t length;
    int32_t room;          /* tokens that it takes before a page of any group changes hands */
    int32_t chain_pages;   /* pages that `chain` covers */
    kv8_prefix_hash chain; /* hash of the first chain_pages pages */
    uint64_t salt;         /* what the chain begins with: sequences of another salt share nothing */
    int32_t *held_from;    /* [num_groups] */
    int32_t *changed_from; /* [num_groups] entries of the list since kv8_pages_mark_sent */
    int32_t *lists;        /* [num_groups, table_pages] */
    int32_t *token_ids;    /* [as many as the page lists can reach] */
} kv8_sequence;

struct kv8_pages {
    const kv8_allocator *allocator;
    int32_t page_size, max_seqs, max_seq_len, window_slack;
    int32_t num_groups;
    int32_t table_pages; /* longest page list of a sequence */
    int32_t num_seqs;
    uint64_t lists_version; /* another one: a list may have changed, or a handle ended */
    kv8_status (*copy_page)(void *cookie, int32_t group, int32_t to, int32_t from);
    void *cookie;
    kv8_page_group *groups;
    kv8_sequence *sequences;
    int32_t *free_seqs; /* stack of indices; the next one is [max_seqs - num_seqs - 1] */
    /* Backing of the arrays of all sequences; sizes in pages.c. */
    int32_t *held_from, *changed_from, *lists, *token_ids;
};

static inline int32_t *kv8_sequence_list(const kv8_pages *pages, const kv8_sequence *sequence,
                                         int32_t group) {
    return sequence->lists + (size_t)group * (size_t)pages->table_pages;
}
/* Entries of a list from this one on are not what they were. */
static inline void kv8_sequence_changes(kv8_sequence *sequence, int32_t group, int32_t entry) {
    if (entry < sequence->changed_from[group]) sequence->changed_from[group] = entry;
}
/* Pages of a list that reaches up to `length` tokens. */
static inline int32_t kv8_pages_for(const kv8_pages *pages, int32_t length) {
    const uint32_t page_size = (uint32_t)pages->page_size;
    return (int32_t)(((uint32_t)length + page_size - 1) / page_size);
}
/* The first token that a sequence of `length` tokens must keep in a group: what a query at
 * position `length` sees, and window_slack more. */
static inline int32_t kv8_keep_from(const kv8_pages *pages, const kv8_page_group *group,
                                    int32_t length) {
    if (group->window_left < 0) return 0;
    const int64_t from = (int64_t)length - group->window_left - pages->window_slack;
    return (int32_t)kv8_max_i64(0, from);
}

/* kv8_pages_find, and the sequence itself. */
kv8_status kv8_sequence_find(const kv8_pages *pages, kv8_seq seq, kv8_sequence **sequence_out);

#endif
