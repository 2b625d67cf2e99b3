/* sequence.c - sequences: handles, fork, scales, and the taking and giving of pages as a sequence
 * grows, moves its windows, or shrinks. Touches rows only to copy a shared tail page whole.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "cache_state.h"

enum { MAX_GENERATION = INT32_MAX };

/* --- handles: generation in the high half, slot in the low --- */

static kv8_seq handle_of(const kv8_cache *cache, const kv8_sequence *sequence) {
    return ((kv8_seq)sequence->generation << 32) | (kv8_seq)(sequence - cache->sequences);
}

kv8_status kv8_sequence_find(const kv8_cache *cache, kv8_seq seq, kv8_sequence **sequence_out) {
    if (cache == NULL) return kv8_fail(KV8_ERR_INVALID, "cache is NULL");
    const kv8_seq slot = seq & 0xffffffff, generation = seq >> 32;
    if (seq >= 0 && slot < cache->shape.max_seqs) {
        kv8_sequence *const sequence = &cache->sequences[slot];
        if (sequence->alive && (kv8_seq)sequence->generation == generation) {
            *sequence_out = sequence;
            return KV8_OK;
        }
    }
    return kv8_fail(KV8_ERR_NOT_FOUND, "cache: no sequence has the handle %lld (destroyed?)",
                    (long long)seq);
}

/* An empty slot becomes an empty sequence with the cache's scales. */
static kv8_status open_slot(kv8_cache *cache, kv8_sequence **sequence_out) {
    const int32_t max_seqs = cache->shape.max_seqs;
    if (cache->num_seqs == max_seqs)
        return kv8_fail(KV8_ERR_FULL, "cache: all %d sequences (max_seqs) are in use", max_seqs);
    const int32_t slot = cache->free_slots[max_seqs - 1 - cache->num_seqs];
    cache->num_seqs++;
    kv8_sequence *const sequence = &cache->sequences[slot];
    sequence->generation = sequence->generation == MAX_GENERATION ? 1 : sequence->generation + 1;
    sequence->alive = true;
    sequence->has_ids = true;
    sequence->own_scales = false;
    sequence->length = 0;
    sequence->chain_pages = 0;
    sequence->chain = (kv8_prefix_hash){0};
    sequence->append_mark = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) sequence->held_from[g] = 0;
    const size_t num_scales = kv8_head_index(cache, 2, 0, 0);
    memcpy(sequence->scales, cache->layer_scales, num_scales * sizeof(float));
    *sequence_out = sequence;
    return KV8_OK;
}

kv8_status kv8_cache_seq_create(kv8_cache *cache, kv8_seq *seq_out) {
    if (cache == NULL || seq_out == NULL)
        return kv8_fail(KV8_ERR_INVALID, "seq_create: cache or seq_out is NULL");
    kv8_sequence *sequence = NULL;
    KV8_TRY(open_slot(cache, &sequence));
    *seq_out = handle_of(cache, sequence);
    return KV8_OK;
}

kv8_status kv8_cache_seq_fork(kv8_cache *cache, kv8_seq parent, kv8_seq *seq_out) {
    kv8_sequence *source = NULL, *sequence = NULL;
    KV8_TRY(kv8_sequence_find(cache, parent, &source));
    if (seq_out == NULL) return kv8_fail(KV8_ERR_INVALID, "seq_fork: seq_out is NULL");
    KV8_TRY(open_slot(cache, &sequence));
    sequence->has_ids = source->has_ids;
    sequence->own_scales = source->own_scales;
    sequence->length = source->length;
    sequence->chain_pages = source->chain_pages;
    sequence->chain = source->chain;
    memcpy(sequence->scales, source->scales, kv8_head_index(cache, 2, 0, 0) * sizeof(float));
    memcpy(sequence->token_ids, source->token_ids, (size_t)source->length * sizeof(int32_t));
    const int32_t end = kv8_pages_for(cache, source->length);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int32_t *const from = kv8_sequence_pages(cache, source, g);
        int32_t *const to = kv8_sequence_pages(cache, sequence, g);
        memcpy(to, from, (size_t)end * sizeof *to);
        sequence->held_from[g] = source->held_from[g];
        for (int32_t i = source->held_from[g] / cache->shape.page_size; i < end; i++)
            kv8_page_pool_share(&cache->groups[g].pool, to[i]);
    }
    *seq_out = handle_of(cache, sequence);
    return KV8_OK;
}

kv8_status kv8_cache_seq_destroy(kv8_cache *cache, kv8_seq seq) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(cache, seq, &sequence));
    const int32_t end = kv8_pages_for(cache, sequence->length);
    for (int32_t g = 0; g < cache->num_groups; g++)
        kv8_group_give_pages(&cache->groups[g], kv8_sequence_pages(cache, sequence, g),
                             sequence->held_from[g] / cache->shape.page_size, end);
    sequence->alive = false;
    cache->num_seqs--;
    cache->free_slots[cache->shape.max_seqs - 1 - cache->num_seqs] =
        (int32_t)(sequence - cache->sequences);
    return KV8_OK;
}

kv8_status kv8_cache_seq_length(const kv8_cache *cache, kv8_seq seq, int32_t *length_out) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(cache, seq, &sequence));
    *length_out = sequence->length;
    return KV8_OK;
}

kv8_status kv8_cache_seq_set_scales(kv8_cache *cache, kv8_seq seq, int32_t layer,
                                    const float *k_scale, const float *v_scale) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(cache, seq, &sequence));
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (sequence->length > 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "seq_set_scales: the sequence holds %d tokens, must be empty",
                        sequence->length);
    KV8_TRY(kv8_cache_check_scales(cache, "k_scale", layer, k_scale));
    KV8_TRY(kv8_cache_check_scales(cache, "v_scale", layer, v_scale));
    const float *const given[2] = {k_scale, v_scale};
    for (int kv = 0; kv < 2; kv++) {
        if (given[kv] == NULL) continue;
        memcpy(sequence->scales + kv8_head_index(cache, kv, layer, 0), given[kv],
               (size_t)cache->shape.num_kv_heads * sizeof(float));
    }
    sequence->own_scales = memcmp(sequence->scales, cache->layer_scales,
                                  kv8_head_index(cache, 2, 0, 0) * sizeof(float)) != 0;
    return KV8_OK;
}

/* --- pages --- */

int32_t kv8_group_take_page(kv8_group *group) {
    const int32_t page = kv8_page_pool_take(&group->pool);
    kv8_prefix_index_remove(&group->index, page);
    return page;
}

void kv8_group_give_pages(kv8_group *group, const int32_t *pages, int32_t begin, int32_t end) {
    for (int32_t i = end - 1; i >= begin; i--)
        kv8_page_pool_give(&group->pool, pages[i], group->index.listed[pages[i]]);
}

/* What extend will do in one group; computed for every group before anything is changed. */
typedef struct growth {
    int32_t held_from;         /* the new one */
    int32_t first, keep;       /* pages [first, keep) are given back */
    int32_t old_end, new_end;  /* pages [old_end, new_end) are taken */
    bool copy_tail;            /* page old_end - 1 is shared and will be written */
    int32_t needed, available; /* pages taken; pages free once [first, keep) are given back */
} growth;

static growth plan_growth(const kv8_cache *cache, const kv8_sequence *sequence, int32_t g,
                          int32_t num_tokens) {
    const kv8_group *const group = &cache->groups[g];
    const int32_t *const pages = kv8_sequence_pages(cache, sequence, g);
    const int32_t page_size = cache->shape.page_size, length = sequence->length;
    growth plan = {.held_from = sequence->held_from[g],
                   .first = sequence->held_from[g] / page_size,
                   .old_end = kv8_pages_for(cache, length),
                   .new_end = kv8_pages_for(cache, length + num_tokens)};
    plan.keep = plan.first;
    const int32_t keep = kv8_keep_from(cache, group, length) / page_size;
    if (keep > plan.first) {
        plan.keep = keep;
        plan.held_from = keep * page_size;
    }
    plan.copy_tail = length % page_size != 0 && group->pool.refcount[pages[plan.old_end - 1]] > 1;
    plan.needed = plan.new_end - plan.old_end + (plan.copy_tail ? 1 : 0);
    plan.available = group->pool.num_free;
    for (int32_t i = plan.first; i < plan.keep; i++)
        plan.available += group->pool.refcount[pages[i]] == 1;
    return plan;
}

static void copy_page(kv8_cache *cache, int32_t g, int32_t to, int32_t from) {
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        const kv8_layer *const layer = &cache->layers[i];
        if (layer->group != g) continue;
        memcpy(layer->data + (size_t)to * layer->page_bytes,
               layer->data + (size_t)from * layer->page_bytes, layer->page_bytes);
    }
}

static void grow(kv8_cache *cache, kv8_sequence *sequence, int32_t g, const growth *plan) {
    kv8_group *const group = &cache->groups[g];
    int32_t *const pages = kv8_sequence_pages(cache, sequence, g);
    kv8_group_give_pages(group, pages, plan->first, plan->keep);
    for (int32_t i = plan->first; i < plan->keep; i++) pages[i] = KV8_NO_PAGE;
    sequence->held_from[g] = plan->held_from;
    if (plan->copy_tail) {
        /* The shared page keeps its other references, so giving it back never frees it. */
        const int32_t shared = pages[plan->old_end - 1];
        const int32_t own = kv8_group_take_page(group);
        copy_page(cache, g, own, shared);
        kv8_page_pool_give(&group->pool, shared, false);
        pages[plan->old_end - 1] = own;
    } else if (sequence->length % cache->shape.page_size != 0) {
        /* A published page that truncate cut into is about to hold something else. */
        kv8_prefix_index_remove(&group->index, pages[plan->old_end - 1]);
    }
    for (int32_t i = plan->old_end; i < plan->new_end; i++) pages[i] = kv8_group_take_page(group);
}

kv8_status kv8_cache_extend(kv8_cache *cache, kv8_seq seq, int32_t num_tokens,
                            const int32_t *token_ids) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(cache, seq, &sequence));
    if (num_tokens < 0)
        return kv8_fail(KV8_ERR_INVALID, "extend: num_tokens is %d, must be >= 0", num_tokens);
    if (num_tokens > cache->shape.max_seq_len - sequence->length)
        return kv8_fail(KV8_ERR_INVALID,
                        "extend: %d tokens after the sequence's %d exceed max_seq_len %d",
                        num_tokens, sequence->length, cache->shape.max_seq_len);
    if (num_tokens == 0) return KV8_OK;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const growth plan = plan_growth(cache, sequence, g, num_tokens);
        const kv8_group *const group = &cache->groups[g];
        if (plan.needed > plan.available)
            return kv8_fail(KV8_ERR_FULL,
                            "extend: %d tokens need %d pages in the group of layer %d "
                            "(window_left %d), %d of its %d are free",
                            num_tokens, plan.needed, group->first_layer, group->window_left,
                            plan.available, group->pool.num_pages);
    }
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const growth plan = plan_growth(cache, sequence, g, num_tokens);
        grow(cache, sequence, g, &plan);
    }
    if (token_ids == NULL)
        sequence->has_ids = false;
    else
        memcpy(sequence->token_ids + sequence->length, token_ids,
               (size_t)num_tokens * sizeof *token_ids);
    sequence->length += num_tokens;
    return KV8_OK;
}

kv8_status kv8_cache_truncate(kv8_cache *cache, kv8_seq seq, int32_t length) {
    kv8_sequence *sequence = NULL;
    KV8_TRY(kv8_sequence_find(cache, seq, &sequence));
    if (length < 0 || length > sequence->length)
        return kv8_fail(KV8_ERR_INVALID, "truncate: length is %d, must be 0 to %d", length,
                        sequence->length);
    if (length == sequence->length) return KV8_OK;
    for (int32_t g = 0; length > 0 && g < cache->num_groups; g++) {
        const kv8_group *const group = &cache->groups[g];
        const int32_t held_from = sequence->held_from[g];
        if (held_from > 0 && length - group->window_left < held_from)
            return kv8_fail(KV8_ERR_INVALID,
                            "truncate: length is %d; with window_left %d the tokens held from %d "
                            "on allow no less than %d (window_slack is %d)",
                            length, group->window_left, held_from, held_from + group->window_left,
                            cache->shape.window_slack);
    }
    const int32_t page_size = cache->shape.page_size;
    const int32_t old_end = kv8_pages_for(cache, sequence->length);
    const int32_t new_end = kv8_pages_for(cache, length);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int32_t first = sequence->held_from[g] / page_size;
        kv8_group_give_pages(&cache->groups[g], kv8_sequence_pages(cache, sequence, g),
                             new_end > first ? new_end : first, old_end);
        if (length == 0) sequence->held_from[g] = 0;
    }
    sequence->length = length;
    if (length / page_size < sequence->chain_pages) {
        sequence->chain_pages = 0;
        sequence->chain = (kv8_prefix_hash){0};
    }
    return KV8_OK;
}
