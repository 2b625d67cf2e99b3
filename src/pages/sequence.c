/* sequence.c - sequences: handles, fork, and the taking and giving of pages as a sequence grows,
 * moves its windows, shrinks or is restored. A shared tail page that will be written is replaced by
 * a copy, which is a call out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "pages_state.h"

enum { MAX_GENERATION = INT32_MAX };

/* --- handles: generation in the high half, index in the low --- */

static kv8_seq handle_of(const kv8_pages *pages, const kv8_sequence *sequence) {
    return ((kv8_seq)sequence->generation << 32) | (kv8_seq)(sequence - pages->sequences);
}

kv8_status kv8_sequence_find(const kv8_pages *pages, kv8_seq seq, kv8_sequence **sequence_out) {
    const kv8_seq idx = seq & 0xffffffff, generation = seq >> 32;
    if (seq >= 0 && idx < pages->max_seqs) {
        kv8_sequence *const sequence = &pages->sequences[idx];
        if (sequence->alive && (kv8_seq)sequence->generation == generation) {
            *sequence_out = sequence;
            return KV8_OK;
        }
    }
    return kv8_fail(KV8_ERR_NOT_FOUND, "cache: no sequence has the handle %lld (destroyed?)",
                    (long long)seq);
}

kv8_status kv8_pages_find(const kv8_pages *pages, kv8_seq seq, int32_t *idx_out) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    *idx_out = kv8_seq_index(seq);
    return KV8_OK;
}

/* --- pages --- */

/* A page for writing, no longer findable. The caller has checked that one is free. */
static int32_t take_page(kv8_page_group *group) {
    const int32_t page = kv8_page_pool_take(&group->pool);
    kv8_prefix_index_remove(&group->index, page);
    return page;
}

/* Gives back entries [begin, end) of a list, last page first, so that a chain of published pages
 * is forgotten from its end. */
static void give_pages(kv8_page_group *group, const int32_t *list, int32_t begin, int32_t end) {
    for (int32_t i = end - 1; i >= begin; i--)
        kv8_page_pool_give(&group->pool, list[i], group->index.listed[list[i]]);
}

/* --- create, fork, destroy --- */

/* A free index becomes an empty sequence. */
static kv8_status open_sequence(kv8_pages *pages, kv8_sequence **sequence_out) {
    const int32_t max_seqs = pages->max_seqs;
    if (pages->num_seqs == max_seqs)
        return kv8_fail(KV8_ERR_FULL, "cache: all %d sequences (max_seqs) are in use", max_seqs);
    const int32_t idx = pages->free_seqs[max_seqs - 1 - pages->num_seqs];
    pages->num_seqs++;
    kv8_sequence *const sequence = &pages->sequences[idx];
    sequence->generation = sequence->generation == MAX_GENERATION ? 1 : sequence->generation + 1;
    sequence->alive = true;
    sequence->has_ids = true;
    sequence->is_private = false;
    sequence->keeps_all = false;
    sequence->length = sequence->room = 0;
    sequence->chain_pages = 0;
    sequence->salt = 0;
    sequence->chain = (kv8_prefix_hash){0};
    for (int32_t g = 0; g < pages->num_groups; g++)
        sequence->held_from[g] = sequence->changed_from[g] = 0;
    *sequence_out = sequence;
    return KV8_OK;
}

kv8_status kv8_pages_seq_create(kv8_pages *pages, kv8_seq *seq_out) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(open_sequence(pages, &sequence));
    *seq_out = handle_of(pages, sequence);
    return KV8_OK;
}

kv8_status kv8_pages_seq_fork(kv8_pages *pages, kv8_seq parent, kv8_seq *seq_out) {
    kv8_sequence *source = NULL, *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, parent, &source));
    KV8_TRY(open_sequence(pages, &sequence));
    source->room = 0; /* its last page is no longer its own */
    sequence->has_ids = source->has_ids;
    sequence->is_private = source->is_private;
    sequence->length = source->length;
    sequence->chain_pages = source->chain_pages;
    sequence->chain = source->chain;
    sequence->salt = source->salt;
    memcpy(sequence->token_ids, source->token_ids, (size_t)source->length * sizeof(int32_t));
    const int32_t end = kv8_pages_for(pages, source->length);
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const int32_t *const from = kv8_sequence_list(pages, source, g);
        int32_t *const to = kv8_sequence_list(pages, sequence, g);
        memcpy(to, from, (size_t)end * sizeof *to);
        sequence->held_from[g] = source->held_from[g];
        for (int32_t i = source->held_from[g] / pages->page_size; i < end; i++)
            kv8_page_pool_share(&pages->groups[g].pool, to[i]);
    }
    *seq_out = handle_of(pages, sequence);
    return KV8_OK;
}

kv8_status kv8_pages_seq_destroy(kv8_pages *pages, kv8_seq seq) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    const int32_t end = kv8_pages_for(pages, sequence->length);
    for (int32_t g = 0; g < pages->num_groups; g++)
        give_pages(&pages->groups[g], kv8_sequence_list(pages, sequence, g),
                   sequence->held_from[g] / pages->page_size, end);
    sequence->alive = false;
    pages->num_seqs--;
    pages->lists_version++;
    pages->free_seqs[pages->max_seqs - 1 - pages->num_seqs] =
        (int32_t)(sequence - pages->sequences);
    return KV8_OK;
}

void kv8_pages_seq_set_private(kv8_pages *pages, int32_t idx, bool is_private) {
    pages->sequences[idx].is_private = is_private;
}

bool kv8_pages_is_private(const kv8_pages *pages, int32_t idx) {
    return pages->sequences[idx].is_private;
}

/* --- growing --- */

/* What extend will do in one group; computed for every group before anything is changed. */
typedef struct growth {
    int32_t held_from;         /* the new one */
    int32_t first, keep;       /* pages [first, keep) are given back */
    int32_t needed, available; /* pages taken; pages free once [first, keep) are given back */
} growth;

/* The last page is another's too and will be written. */
static bool shares_tail(const kv8_pages *pages, const kv8_sequence *sequence, int32_t g) {
    if (sequence->length % pages->page_size == 0) return false;
    const int32_t last = kv8_pages_for(pages, sequence->length) - 1;
    return pages->groups[g].pool.refcount[kv8_sequence_list(pages, sequence, g)[last]] > 1;
}

static growth plan_growth(const kv8_pages *pages, const kv8_sequence *sequence, int32_t g,
                          int32_t num_tokens) {
    const kv8_page_group *const group = &pages->groups[g];
    const int32_t *const list = kv8_sequence_list(pages, sequence, g);
    const int32_t page_size = pages->page_size, length = sequence->length;
    growth plan = {.held_from = sequence->held_from[g],
                   .first = sequence->held_from[g] / page_size,
                   .needed = kv8_pages_for(pages, length + num_tokens) -
                             kv8_pages_for(pages, length) + shares_tail(pages, sequence, g)};
    plan.keep = plan.first;
    const int32_t keep = kv8_keep_from(pages, group, length) / page_size;
    if (keep > plan.first) {
        plan.keep = keep;
        plan.held_from = keep * page_size;
    }
    plan.available = group->pool.num_free;
    for (int32_t i = plan.first; i < plan.keep; i++)
        plan.available += group->pool.refcount[list[i]] == 1;
    return plan;
}

/* Gives back what no later query can see. */
static void move_window(kv8_pages *pages, kv8_sequence *sequence, int32_t g, const growth *plan) {
    int32_t *const list = kv8_sequence_list(pages, sequence, g);
    give_pages(&pages->groups[g], list, plan->first, plan->keep);
    for (int32_t i = plan->first; i < plan->keep; i++) list[i] = KV8_NO_PAGE;
    if (plan->first < plan->keep) kv8_sequence_changes(sequence, g, plan->first);
    sequence->held_from[g] = plan->held_from;
}

/* Makes the tail the sequence's own to write. */
static kv8_status own_tail(kv8_pages *pages, kv8_sequence *sequence, int32_t g) {
    if (sequence->length % pages->page_size == 0) return KV8_OK;
    kv8_page_group *const group = &pages->groups[g];
    const int32_t last = kv8_pages_for(pages, sequence->length) - 1;
    int32_t *const tail = &kv8_sequence_list(pages, sequence, g)[last];
    if (!shares_tail(pages, sequence, g)) {
        /* A published page that truncate cut into will hold something else. */
        kv8_prefix_index_remove(&group->index, *tail);
        return KV8_OK;
    }
    const int32_t shared = *tail, own = take_page(group);
    const kv8_status status = pages->copy_page(pages->cookie, g, own, shared);
    /* The shared page keeps its other references, so giving it back never frees it. */
    *tail = status == KV8_OK ? own : shared;
    kv8_sequence_changes(sequence, g, last);
    kv8_page_pool_give(&group->pool, status == KV8_OK ? shared : own, false);
    return status;
}

/* To the end of the last page, which is the sequence's own after it grew, or until a window moves.
 */
static int32_t find_room(const kv8_pages *pages, const kv8_sequence *sequence) {
    const int64_t page_size = pages->page_size;
    int64_t end = kv8_pages_for(pages, sequence->length) * page_size;
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const int64_t reach = kv8_pages_reach(pages, g);
        const int64_t moves = (sequence->held_from[g] / page_size + 1) * page_size + reach;
        if (reach >= 0) end = kv8_min_i64(end, moves);
    }
    return (int32_t)kv8_max_i64(0, end - sequence->length);
}

/* Pages for num_tokens more; on failure the sequence is as it was, but for its windows. */
static kv8_status grow(kv8_pages *pages, kv8_sequence *sequence, int32_t num_tokens) {
    pages->lists_version++;
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const growth plan = plan_growth(pages, sequence, g, num_tokens);
        const kv8_page_group *const group = &pages->groups[g];
        if (plan.needed > plan.available)
            return kv8_fail(KV8_ERR_FULL,
                            "extend: %d tokens need %d pages in the group of layer %d "
                            "(window_left %d), %d of its %d are free",
                            num_tokens, plan.needed, group->layer, group->window_left,
                            plan.available, group->pool.num_pages);
    }
    /* In this order a copy that fails leaves every list as it was. */
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const growth plan = plan_growth(pages, sequence, g, num_tokens);
        move_window(pages, sequence, g, &plan);
    }
    for (int32_t g = 0; g < pages->num_groups; g++) KV8_TRY(own_tail(pages, sequence, g));
    const int32_t old_end = kv8_pages_for(pages, sequence->length);
    const int32_t new_end = kv8_pages_for(pages, sequence->length + num_tokens);
    for (int32_t g = 0; g < pages->num_groups && old_end < new_end; g++) {
        int32_t *const list = kv8_sequence_list(pages, sequence, g);
        for (int32_t i = old_end; i < new_end; i++) list[i] = take_page(&pages->groups[g]);
        kv8_sequence_changes(sequence, g, old_end);
    }
    return KV8_OK;
}

kv8_status kv8_pages_extend(kv8_pages *pages, kv8_seq seq, int32_t num_tokens,
                            const int32_t *token_ids) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    if (num_tokens < 0)
        return kv8_fail(KV8_ERR_INVALID, "extend: num_tokens is %d, must be >= 0", num_tokens);
    if (num_tokens > pages->max_seq_len - sequence->length)
        return kv8_fail(KV8_ERR_INVALID,
                        "extend: %d tokens after the sequence's %d exceed max_seq_len %d",
                        num_tokens, sequence->length, pages->max_seq_len);
    if (num_tokens == 0) return KV8_OK;
    const bool grows = num_tokens > sequence->room;
    if (grows) KV8_TRY(grow(pages, sequence, num_tokens));
    if (token_ids == NULL)
        sequence->has_ids = false;
    else
        memcpy(sequence->token_ids + sequence->length, token_ids,
               (size_t)num_tokens * sizeof *token_ids);
    sequence->length += num_tokens;
    sequence->room = grows ? find_room(pages, sequence) : sequence->room - num_tokens;
    return KV8_OK;
}

kv8_status kv8_pages_move_windows(kv8_pages *pages, kv8_seq seq) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    pages->lists_version++;
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const growth plan = plan_growth(pages, sequence, g, 0);
        move_window(pages, sequence, g, &plan);
    }
    return KV8_OK;
}

kv8_status kv8_pages_truncate(kv8_pages *pages, kv8_seq seq, int32_t length) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    if (length < 0 || length > sequence->length)
        return kv8_fail(KV8_ERR_INVALID, "truncate: length is %d, must be 0 to %d", length,
                        sequence->length);
    if (length == sequence->length) return KV8_OK;
    for (int32_t g = 0; length > 0 && g < pages->num_groups; g++) {
        const kv8_page_group *const group = &pages->groups[g];
        const int32_t held_from = sequence->held_from[g];
        if (held_from > 0 && length - group->window_left < held_from)
            return kv8_fail(KV8_ERR_INVALID,
                            "truncate: length is %d; with window_left %d the tokens held from %d "
                            "on allow no less than %d (window_slack is %d)",
                            length, group->window_left, held_from, held_from + group->window_left,
                            pages->window_slack);
    }
    const int32_t page_size = pages->page_size;
    const int32_t old_end = kv8_pages_for(pages, sequence->length);
    const int32_t new_end = kv8_pages_for(pages, length);
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const int32_t first = sequence->held_from[g] / page_size;
        give_pages(&pages->groups[g], kv8_sequence_list(pages, sequence, g),
                   new_end > first ? new_end : first, old_end);
        if (length == 0) sequence->held_from[g] = 0;
    }
    sequence->length = length;
    sequence->room = 0;
    pages->lists_version++;
    if (length / page_size < sequence->chain_pages) {
        sequence->chain_pages = 0;
        sequence->chain = (kv8_prefix_hash){.low = sequence->salt};
    }
    return KV8_OK;
}

kv8_status kv8_pages_check_writable(const kv8_pages *pages, int32_t idx, int32_t group_idx,
                                    int32_t num_rows) {
    const kv8_sequence *const sequence = &pages->sequences[idx];
    const kv8_page_group *const group = &pages->groups[group_idx];
    const int32_t *const list = kv8_sequence_list(pages, sequence, group_idx);
    const int32_t page_size = pages->page_size;
    const int32_t begin = sequence->length - num_rows;
    if (num_rows == 0) return KV8_OK;
    if (begin < 0)
        return kv8_fail(KV8_ERR_INVALID, "append: %d rows for a sequence of %d tokens", num_rows,
                        sequence->length);
    if (begin < sequence->held_from[group_idx])
        return kv8_fail(KV8_ERR_INVALID,
                        "append: position %d is behind the window, which is held from %d on", begin,
                        sequence->held_from[group_idx]);
    for (int32_t i = begin / page_size; i < kv8_pages_for(pages, sequence->length); i++) {
        if (group->pool.refcount[list[i]] > 1 || group->index.listed[list[i]])
            return kv8_fail(KV8_ERR_INVALID,
                            "append: the page of position %d is %s; extend, then append, then "
                            "fork or publish",
                            i * page_size,
                            group->index.listed[list[i]] ? "published" : "shared with a fork");
    }
    return KV8_OK;
}

/* --- restoring --- */

kv8_status kv8_pages_seq_restore(kv8_pages *pages, int32_t length, const void *token_ids,
                                 kv8_pages_first first, const void *cookie, kv8_seq *seq_out) {
    if (length > pages->max_seq_len)
        return kv8_fail(KV8_ERR_INVALID, "the snapshot's length is %d, max_seq_len %d", length,
                        pages->max_seq_len);
    const int32_t page_size = pages->page_size, end = kv8_pages_for(pages, length);
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const kv8_page_group *const group = &pages->groups[g];
        const int32_t needed = end - first(cookie, g) / page_size;
        if (needed > group->pool.num_free)
            return kv8_fail(KV8_ERR_FULL,
                            "%d pages needed in the group of layer %d, %d of its %d are free",
                            needed, group->layer, group->pool.num_free, group->pool.num_pages);
    }
    kv8_sequence *sequence = NULL;
    KV8_TRY(open_sequence(pages, &sequence));
    sequence->has_ids = token_ids != NULL;
    sequence->length = length;
    if (token_ids != NULL) memcpy(sequence->token_ids, token_ids, (size_t)length * sizeof(int32_t));
    for (int32_t g = 0; g < pages->num_groups; g++) {
        int32_t *const list = kv8_sequence_list(pages, sequence, g);
        sequence->held_from[g] = first(cookie, g);
        for (int32_t i = 0; i < end; i++)
            list[i] =
                i < sequence->held_from[g] / page_size ? KV8_NO_PAGE : take_page(&pages->groups[g]);
    }
    *seq_out = handle_of(pages, sequence);
    return KV8_OK;
}
