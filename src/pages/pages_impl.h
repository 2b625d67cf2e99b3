/* pages_impl.h - what pages shows the rooms above: sequences of tokens as lists of page ids, shared
 * by reference counts, found again by their tokens, given back behind windows. Knows neither bytes
 * nor formats nor where a page lies; what must happen to a page's bytes is a call out.
 *
 * Page ids come in groups: pools of their own, one for every distinct window. Every sequence has a
 * list of ids in each group. Between calls a sequence is named by its handle; kv8_pages_find gives
 * its index, valid while it lives.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PAGES_IMPL_H
#define KV8_PAGES_IMPL_H

#include "base_impl.h"

#include <kv8/pages.h>

typedef struct kv8_pages kv8_pages;

typedef struct kv8_page_group_options {
    int32_t window_left; /* -1 = every token stays */
    int32_t num_pages;
    int32_t layer; /* names the group in messages */
} kv8_page_group_options;

typedef struct kv8_pages_options {
    const kv8_allocator *allocator;
    int32_t page_size, max_seqs, max_seq_len, window_slack, num_groups;
    const kv8_page_group_options *groups; /* [num_groups]. Copied. */
    /* Makes page `to` of a group hold what page `from` holds. */
    kv8_status (*copy_page)(void *cookie, int32_t group, int32_t to, int32_t from);
    void *cookie;
} kv8_pages_options;

/* The options are checked by the caller. *out is NULL on failure. */
KV8_SHARED kv8_status kv8_pages_create(kv8_pages **out, const kv8_pages_options *options);
KV8_SHARED void kv8_pages_destroy(kv8_pages *pages);

/* --- facts --- */

KV8_SHARED int32_t kv8_pages_page_size(const kv8_pages *pages);
KV8_SHARED int32_t kv8_pages_max_seq_len(const kv8_pages *pages);
KV8_SHARED int32_t kv8_pages_num_groups(const kv8_pages *pages);
int32_t kv8_pages_num_seqs(const kv8_pages *pages);
KV8_SHARED int32_t kv8_pages_num_pages(const kv8_pages *pages, int32_t group);
KV8_SHARED int32_t kv8_pages_num_free(const kv8_pages *pages, int32_t group);
/* Pages that more than one sequence holds. */
KV8_SHARED int32_t kv8_pages_num_shared(const kv8_pages *pages, int32_t group);
/* Of pages [first, first + num) of a group: how many are held, and by more than one sequence. */
KV8_SHARED void kv8_pages_count(const kv8_pages *pages, int32_t group, int32_t first, int32_t num,
                                int32_t *used_out, int32_t *shared_out);
/* Tokens before the next one that a sequence keeps in a group, the slack included; -1 = all. */
KV8_SHARED int64_t kv8_pages_reach(const kv8_pages *pages, int32_t group);
/* While it stays, tables of the same sequences differ in last_page_len alone. */
uint64_t kv8_pages_lists_version(const kv8_pages *pages);
/* The longest list that a sequence can have in any group. */
int32_t kv8_pages_longest_list(const kv8_pages *pages);

/* The index, below max_seqs, of the living sequence that a handle names; KV8_ERR_NOT_FOUND for
 * stale and foreign handles. */
kv8_status kv8_pages_find(const kv8_pages *pages, kv8_seq seq, int32_t *idx_out);
/* The index in a handle that find has accepted. */
static inline int32_t kv8_seq_index(kv8_seq seq) {
    return (int32_t)(seq & 0xffffffff);
}
KV8_SHARED int32_t kv8_pages_length(const kv8_pages *pages, int32_t idx);
/* NULL when the id of some token was not given. */
const int32_t *kv8_pages_token_ids(const kv8_pages *pages, int32_t idx);
/* First token worth keeping: held, and in reach of a query or of truncate within the slack; all
 * that is held of a sequence of kv8_pages_prefix_hold. */
int32_t kv8_pages_kept_from(const kv8_pages *pages, int32_t idx, int32_t group);
/* Pages of tokens [held_from, length); earlier entries are KV8_NO_PAGE. */
const int32_t *kv8_pages_list(const kv8_pages *pages, int32_t idx, int32_t group);
KV8_SHARED int32_t kv8_pages_held_from(const kv8_pages *pages, int32_t idx, int32_t group);
/* The last num_rows positions lie in pages of the group that only this sequence holds and that
 * nobody can find; KV8_ERR_INVALID says which does not. */
kv8_status kv8_pages_check_writable(const kv8_pages *pages, int32_t idx, int32_t group,
                                    int32_t num_rows);

/* --- a sequence's life: as the calls of the same names in kv8/cache.h --- */

kv8_status kv8_pages_seq_create(kv8_pages *pages, kv8_seq *seq_out);
KV8_SHARED kv8_status kv8_pages_seq_fork(kv8_pages *pages, kv8_seq parent, kv8_seq *seq_out);
KV8_SHARED kv8_status kv8_pages_seq_destroy(kv8_pages *pages, kv8_seq seq);
/* A private sequence is never published, nor are its forks: its pages mean something else. */
void kv8_pages_seq_set_private(kv8_pages *pages, int32_t idx, bool is_private);
bool kv8_pages_is_private(const kv8_pages *pages, int32_t idx);
/* Where copy_page fails, no token is added and every page still holds what it held. */
KV8_SHARED kv8_status kv8_pages_extend(kv8_pages *pages, kv8_seq seq, int32_t num_tokens,
                                       const int32_t *token_ids);
/* Gives back what a sequence of its length holds behind its windows, as the next extend would. */
KV8_SHARED kv8_status kv8_pages_move_windows(kv8_pages *pages, kv8_seq seq);
KV8_SHARED kv8_status kv8_pages_truncate(kv8_pages *pages, kv8_seq seq, int32_t length);
/* The full pages of the first `length` tokens. */
KV8_SHARED kv8_status kv8_pages_publish(kv8_pages *pages, kv8_seq seq, int32_t length);
/* Only sequences of one salt share pages; 0 is that of seq_create. No tokens match nothing. */
KV8_SHARED kv8_status kv8_pages_prefix_match(kv8_pages *pages, uint64_t salt,
                                             const int32_t *token_ids, int32_t num_tokens,
                                             kv8_seq *seq_out, int32_t *matched_out);
/* The first token that a restored sequence holds in a group. */
typedef int32_t (*kv8_pages_first)(const void *cookie, int32_t group);
/* As the calls of the same names in kv8/cache.h. */
kv8_status kv8_pages_prefix_hold(kv8_pages *pages, const int32_t *token_ids, int32_t num_tokens,
                                 kv8_seq *seq_out, int32_t *held_out);
kv8_status kv8_pages_list_prefixes(const kv8_pages *pages, kv8_prefix_visitor visit, void *cookie);
/* A new sequence of `length` tokens, with pages to be filled; token_ids: int32 of any alignment, or
 * NULL. KV8_ERR_FULL when pages or sequences are short: nothing is then taken. */
kv8_status kv8_pages_seq_restore(kv8_pages *pages, int32_t length, const void *token_ids,
                                 kv8_pages_first first, const void *cookie, kv8_seq *seq_out);

/* --- lists of a batch: as kv8_cache_page_table and kv8_cache_block_table --- */

kv8_status kv8_pages_table(const kv8_pages *pages, int32_t group, const kv8_seq *seqs,
                           int32_t num_seqs, int32_t *indptr_out, int32_t *indices_out,
                           int64_t capacity, int32_t *last_page_len_out);
/* Of sequences that such a table was made of, at the same version, the last array alone. */
void kv8_pages_last_lengths(const kv8_pages *pages, const kv8_seq *seqs, int32_t num_seqs,
                            int32_t *last_page_len_out);
/* Tokens in a sequence's last page; 0 of an empty one. */
int32_t kv8_pages_last_length(const kv8_pages *pages, int32_t idx);
/* For who keeps a copy of a sequence's list in a group: entries below this one are those of the
 * last kv8_pages_mark_sent, which says that the copy has them all. */
int32_t kv8_pages_changed_from(const kv8_pages *pages, int32_t idx, int32_t group);
void kv8_pages_mark_sent(kv8_pages *pages, int32_t idx, int32_t group);
kv8_status kv8_pages_block_table(const kv8_pages *pages, int32_t group, const kv8_seq *seqs,
                                 int32_t num_seqs, int32_t *block_table_out, int64_t stride,
                                 int32_t *seq_lens_out);

#endif
