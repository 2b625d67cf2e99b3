/* prefix.c - publish and match: sequences that begin alike share pages. Decides which pages a
 * prefix needs in each group; prefix_index.h finds them.
 *
 * A prefix of n pages can be used when every group without a window has pages 0..n-1, and every
 * window group those pages that a query at position n * page_size sees. Of a text that is found
 * whole the last token is left to compute. Pages of a private sequence mean something else and are
 * never published.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pages_state.h"

kv8_status kv8_pages_publish(kv8_pages *pages, kv8_seq seq, int32_t length) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    if (!sequence->has_ids || sequence->is_private) return KV8_OK;
    const int32_t page_size = pages->page_size;
    const int32_t num_full = (int32_t)kv8_min_i64(length, sequence->length) / page_size;
    for (int32_t i = sequence->chain_pages; i < num_full; i++) {
        const int32_t *const token_ids = sequence->token_ids + (size_t)i * (size_t)page_size;
        const kv8_prefix_hash parent = sequence->chain;
        const kv8_prefix_hash hash = kv8_prefix_hash_page(parent, token_ids, page_size);
        for (int32_t g = 0; g < pages->num_groups; g++) {
            /* A restored window may begin inside a page, whose first slots hold nothing. */
            if (i * page_size < sequence->held_from[g]) continue;
            kv8_prefix_index_insert(&pages->groups[g].index,
                                    kv8_sequence_list(pages, sequence, g)[i], hash, parent,
                                    token_ids);
        }
        sequence->chain = hash;
    }
    if (num_full > sequence->chain_pages) sequence->chain_pages = num_full;
    return KV8_OK;
}

/* First page that a sequence of num_pages full pages needs in a group. */
static int32_t first_needed(const kv8_pages *pages, const kv8_page_group *group,
                            int32_t num_pages) {
    if (group->window_left < 0) return 0;
    const int64_t token = (int64_t)num_pages * pages->page_size - group->window_left;
    return (int32_t)(kv8_max_i64(0, token) / pages->page_size);
}

/* How many pages in a row, up to and with this one, the group holds; `run` without this one. */
static int32_t run_with(const kv8_page_group *group, int32_t run, kv8_prefix_hash hash,
                        kv8_prefix_hash parent, const int32_t *token_ids) {
    return kv8_prefix_index_find(&group->index, hash, parent, token_ids) >= 0 ? run + 1 : 0;
}

/* Longest usable prefix in pages, at most max_pages, after `parent`. `runs` is scratch of
 * num_groups. */
static int32_t longest_prefix(const kv8_pages *pages, kv8_prefix_hash parent,
                              const int32_t *token_ids, int32_t max_pages, int32_t *runs) {
    const int32_t page_size = pages->page_size;
    int32_t best = 0;
    for (int32_t g = 0; g < pages->num_groups; g++) runs[g] = 0;
    for (int32_t i = 0; i < max_pages; i++) {
        const int32_t *const ids = token_ids + (size_t)i * (size_t)page_size;
        const kv8_prefix_hash hash = kv8_prefix_hash_page(parent, ids, page_size);
        bool usable = true;
        for (int32_t g = 0; g < pages->num_groups; g++) {
            const kv8_page_group *const group = &pages->groups[g];
            runs[g] = run_with(group, runs[g], hash, parent, ids);
            if (group->window_left < 0 && runs[g] == 0) return best;
            usable = usable && runs[g] >= i + 1 - first_needed(pages, group, i + 1);
        }
        if (usable) best = i + 1;
        parent = hash;
    }
    return best;
}

/* Gives back what a sequence has of a group before page `end`: its window begins there. */
static void drop_before(kv8_pages *pages, kv8_sequence *sequence, int32_t g, int32_t end) {
    int32_t *const list = kv8_sequence_list(pages, sequence, g);
    for (int32_t i = end; i-- > sequence->held_from[g] / pages->page_size;) {
        if (list[i] != KV8_NO_PAGE) kv8_page_pool_give(&pages->groups[g].pool, list[i], true);
        list[i] = KV8_NO_PAGE;
    }
    sequence->held_from[g] = end * pages->page_size;
}

/* Shares the first num_pages pages of a prefix, in each group from held_from on, or from behind the
 * last page that is missing. */
static void take_prefix(kv8_pages *pages, kv8_sequence *sequence, const int32_t *token_ids,
                        int32_t num_pages) {
    const int32_t page_size = pages->page_size;
    for (int32_t i = 0; i < num_pages; i++) {
        const int32_t *const ids = token_ids + (size_t)i * (size_t)page_size;
        const kv8_prefix_hash parent = sequence->chain;
        const kv8_prefix_hash hash = kv8_prefix_hash_page(parent, ids, page_size);
        for (int32_t g = 0; g < pages->num_groups; g++) {
            kv8_page_group *const group = &pages->groups[g];
            int32_t *const entry = &kv8_sequence_list(pages, sequence, g)[i];
            *entry = KV8_NO_PAGE;
            if (i * page_size < sequence->held_from[g]) continue;
            *entry = kv8_prefix_index_find(&group->index, hash, parent, ids);
            if (*entry >= 0)
                kv8_page_pool_share(&group->pool, *entry);
            else
                drop_before(pages, sequence, g, i + 1);
        }
        for (int32_t d = 0; d < page_size; d++) sequence->token_ids[i * page_size + d] = ids[d];
        sequence->chain = hash;
    }
    sequence->chain_pages = num_pages;
    sequence->length = num_pages * page_size;
}

/* A new sequence of the longest prefix, of at most `limit` tokens; window groups begin where a
 * query behind it looks, or with `whole` where they can. */
static kv8_status match(kv8_pages *pages, uint64_t salt, const int32_t *token_ids, int32_t limit,
                        bool whole, kv8_seq *seq_out, int32_t *matched_out) {
    kv8_seq seq = KV8_SEQ_NONE;
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_pages_seq_create(pages, &seq));
    KV8_TRY(kv8_sequence_find(pages, seq, &sequence));
    sequence->salt = salt;
    sequence->keeps_all = whole;
    sequence->chain = (kv8_prefix_hash){.low = salt};
    const int32_t page_size = pages->page_size;
    limit = (int32_t)kv8_min_i64(limit, pages->max_seq_len);
    /* The new sequence's window starts serve as scratch until they are known. */
    const int32_t num_pages = longest_prefix(
        pages, sequence->chain, token_ids, limit < 0 ? 0 : limit / page_size, sequence->held_from);
    for (int32_t g = 0; g < pages->num_groups; g++)
        sequence->held_from[g] =
            whole ? 0 : first_needed(pages, &pages->groups[g], num_pages) * page_size;
    take_prefix(pages, sequence, token_ids, num_pages);
    *seq_out = seq;
    *matched_out = sequence->length;
    return KV8_OK;
}

static kv8_status check_tokens(const char *call, const int32_t *token_ids, int32_t num_tokens) {
    if (num_tokens >= 0 && (token_ids != NULL || num_tokens == 0)) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s: %d tokens at %s", call, num_tokens,
                    token_ids == NULL ? "NULL" : "an address");
}

/* Of whole pages all of which are found the last token is given back, where the windows behind it
 * are those that the token before it needs. */
static bool can_give_one_back(const kv8_pages *pages, int32_t num_tokens) {
    for (int32_t g = 0; g < pages->num_groups; g++) {
        const kv8_page_group *const group = &pages->groups[g];
        const int32_t first = first_needed(pages, group, num_tokens / pages->page_size);
        if (first > 0 && num_tokens - 1 - group->window_left < first * pages->page_size)
            return false;
    }
    return num_tokens % pages->page_size == 0;
}

kv8_status kv8_pages_prefix_match(kv8_pages *pages, uint64_t salt, const int32_t *token_ids,
                                  int32_t num_tokens, kv8_seq *seq_out, int32_t *matched_out) {
    KV8_TRY(check_tokens("prefix_match", token_ids, num_tokens));
    const int32_t limit = num_tokens - !can_give_one_back(pages, num_tokens);
    KV8_TRY(match(pages, salt, token_ids, limit, false, seq_out, matched_out));
    if (num_tokens == 0 || *matched_out < num_tokens) return KV8_OK;
    *matched_out = num_tokens - 1;
    return kv8_pages_truncate(pages, *seq_out, num_tokens - 1);
}

kv8_status kv8_pages_prefix_hold(kv8_pages *pages, const int32_t *token_ids, int32_t num_tokens,
                                 kv8_seq *seq_out, int32_t *held_out) {
    KV8_TRY(check_tokens("prefix_hold", token_ids, num_tokens));
    return match(pages, 0, token_ids, num_tokens, true, seq_out, held_out);
}
