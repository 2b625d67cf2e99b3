/* bpe.h - byte-pair encoding: tokens as bytes, merges by rank, one piece of text to ids.
 *
 * Compact tables built once and then only read: one blob of bytes, open-addressing hashes (half
 * full at most) from bytes to id and from (left id, right id) to (rank, merged id). Knows no JSON,
 * no regular expression, no special token's meaning.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BPE_H
#define KV8_BPE_H

#include "token_ids.h"

/* key = (left + 1) << 32 | right; 0 = free slot. */
typedef struct kv8_bpe_merge {
    uint64_t key;
    uint32_t rank;
    int32_t merged;
} kv8_bpe_merge;

typedef struct kv8_bpe {
    int32_t num_ids;         /* one more than the largest id */
    uint32_t *token_offsets; /* [num_ids] into bytes */
    uint32_t *token_lengths; /* [num_ids]; 0 = no token has this id */
    char *bytes;
    size_t bytes_used, bytes_capacity;
    int32_t *vocab_slots; /* [num_vocab_slots] id + 1; 0 = free */
    size_t num_vocab_slots;
    kv8_bpe_merge *merge_slots; /* [num_merge_slots] */
    size_t num_merge_slots;
    int32_t byte_ids[256];
    bool whole_pieces_first; /* a piece that is a token is that token, whatever the merges say */
} kv8_bpe;

/* Empty tables with room for ids below num_ids, num_bytes bytes of tokens, num_merges merges.
 * On failure *bpe_out is all zero. */
kv8_status kv8_bpe_create(kv8_bpe *bpe_out, int32_t num_ids, size_t num_bytes, size_t num_merges);
void kv8_bpe_destroy(kv8_bpe *bpe);

/* The id of a searchable token with these bytes, or -1. */
int32_t kv8_bpe_find(const kv8_bpe *bpe, const char *bytes, size_t length);
/* Adds a token (length > 0, 0 <= id < num_ids). One that is not searchable (a control token) never
 * comes out of text. An id or searchable bytes that are taken already: KV8_ERR_CORRUPT. */
kv8_status kv8_bpe_add_token(kv8_bpe *bpe, int32_t id, const char *bytes, size_t length,
                             bool searchable);
/* Lower rank merges first. A pair that is there already: KV8_ERR_CORRUPT. */
kv8_status kv8_bpe_add_merge(kv8_bpe *bpe, int32_t left, int32_t right, uint32_t rank,
                             int32_t merged);
/* Ends the building: every single byte must be a token, else some text could not be encoded. */
kv8_status kv8_bpe_finish(kv8_bpe *bpe);

/* Working memory of one caller; grows to its longest piece. Starts all zero. */
typedef struct kv8_bpe_scratch {
    struct kv8_bpe_symbol *symbols;
    uint64_t *heap; /* [2 * capacity] rank << 32 | symbol index: least first, leftmost on ties */
    size_t heap_count, capacity;
} kv8_bpe_scratch;
void kv8_bpe_scratch_release(kv8_bpe_scratch *scratch);

/* Appends the ids of one piece (length < 2^31) in O(length log length). */
kv8_status kv8_bpe_encode(const kv8_bpe *bpe, kv8_bpe_scratch *scratch, const char *piece,
                          size_t length, kv8_token_ids *ids);

#endif
