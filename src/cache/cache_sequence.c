/* cache_sequence.c - the calls on sequences: page ids are the pages room's, and what a cache adds
 * to them are the scales of each sequence.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "cache_state.h"

kv8_status kv8_cache_find(const kv8_cache *cache, kv8_seq seq, int32_t *idx_out) {
    if (cache == NULL) return kv8_fail(KV8_ERR_INVALID, "cache is NULL");
    return kv8_pages_find(cache->pages, seq, idx_out);
}

void kv8_cache_settle_scales(kv8_cache *cache, int32_t idx) {
    kv8_pages_seq_set_private(cache->pages, idx,
                              memcmp(kv8_sequence_scales(cache, idx), cache->layer_scales,
                                     kv8_num_scales(cache) * sizeof(float)) != 0);
}

kv8_status kv8_cache_seq_create(kv8_cache *cache, kv8_seq *seq_out) {
    KV8_REQUIRE(cache, seq_out);
    return kv8_pages_seq_create(cache->pages, seq_out);
}

kv8_status kv8_cache_seq_fork(kv8_cache *cache, kv8_seq parent, kv8_seq *seq_out) {
    KV8_REQUIRE(cache, seq_out);
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, parent, &idx));
    KV8_TRY(kv8_pages_seq_fork(cache->pages, parent, seq_out));
    memcpy(kv8_sequence_scales(cache, kv8_seq_index(*seq_out)), kv8_sequence_scales(cache, idx),
           kv8_num_scales(cache) * sizeof(float));
    return KV8_OK;
}

kv8_status kv8_cache_seq_destroy(kv8_cache *cache, kv8_seq seq) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    kv8_cache_drop_scales(cache, idx);
    return kv8_pages_seq_destroy(cache->pages, seq);
}

kv8_status kv8_cache_seq_length(const kv8_cache *cache, kv8_seq seq, int32_t *length_out) {
    KV8_REQUIRE(cache, length_out);
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    *length_out = kv8_pages_length(cache->pages, idx);
    return KV8_OK;
}

int32_t kv8_cache_find_twice(kv8_cache *cache, const kv8_seq *seqs, int32_t num_seqs) {
    const uint64_t mark = ++cache->batch_mark;
    for (int32_t i = 0; i < num_seqs; i++) {
        uint64_t *const last = &cache->batch_marks[kv8_seq_index(seqs[i])];
        if (*last == mark) return i;
        *last = mark;
    }
    return -1;
}

kv8_status kv8_cache_seq_set_scales(kv8_cache *cache, kv8_seq seq, int32_t layer,
                                    const float *k_scale, const float *v_scale) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    const int32_t length = kv8_pages_length(cache->pages, idx);
    if (length > 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "seq_set_scales: the sequence holds %d tokens, must be empty", length);
    KV8_TRY(kv8_cache_check_scales(cache, "k_scale", layer, k_scale));
    KV8_TRY(kv8_cache_check_scales(cache, "v_scale", layer, v_scale));
    const float *const given[2] = {k_scale, v_scale};
    for (int kv = 0; kv < 2; kv++) {
        if (given[kv] == NULL) continue;
        memcpy(kv8_sequence_scales(cache, idx) + kv8_head_index(cache, kv, layer, 0), given[kv],
               (size_t)cache->shape.num_kv_heads * sizeof(float));
    }
    kv8_cache_settle_scales(cache, idx);
    return KV8_OK;
}

kv8_status kv8_cache_extend(kv8_cache *cache, kv8_seq seq, int32_t num_tokens,
                            const int32_t *token_ids) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    return kv8_pages_extend(cache->pages, seq, num_tokens, token_ids);
}

kv8_status kv8_cache_truncate(kv8_cache *cache, kv8_seq seq, int32_t length) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    return kv8_pages_truncate(cache->pages, seq, length);
}

kv8_status kv8_cache_publish(kv8_cache *cache, kv8_seq seq) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    return kv8_pages_publish(cache->pages, seq, INT32_MAX);
}

kv8_status kv8_cache_prefix_match(kv8_cache *cache, const int32_t *token_ids, int32_t num_tokens,
                                  kv8_seq *seq_out, int32_t *matched_out) {
    KV8_REQUIRE(cache, seq_out, matched_out);
    if (num_tokens > 0) KV8_REQUIRE(token_ids);
    return kv8_pages_prefix_match(cache->pages, 0, token_ids, num_tokens, seq_out, matched_out);
}

kv8_status kv8_cache_prefix_hold(kv8_cache *cache, const int32_t *token_ids, int32_t num_tokens,
                                 kv8_seq *seq_out, int32_t *held_out) {
    KV8_REQUIRE(cache, seq_out, held_out);
    if (num_tokens > 0) KV8_REQUIRE(token_ids);
    return kv8_pages_prefix_hold(cache->pages, token_ids, num_tokens, seq_out, held_out);
}

kv8_status kv8_cache_list_prefixes(const kv8_cache *cache, kv8_prefix_visitor visit, void *cookie) {
    KV8_REQUIRE(cache);
    if (visit == NULL) return kv8_fail(KV8_ERR_INVALID, "visit is NULL");
    return kv8_pages_list_prefixes(cache->pages, visit, cookie);
}
