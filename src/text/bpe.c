/* bpe.c - byte-pair encoding with a doubly linked list of symbols and a heap of candidate merges.
 *
 * Every merge removes one symbol and makes at most two new candidates, so a piece of n bytes costs
 * O(n log n) however long it is. Candidates are not taken out of the heap when their symbols
 * change; one that no longer matches its symbol's current rank is dropped when it surfaces.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bpe.h"

#include <string.h>

#include <xxhash.h>

/* --- building --- */

/* The power of two at which `count` entries fill at most half. */
static size_t slots_for(size_t count) {
    size_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    return slots;
}

kv8_status kv8_bpe_create(kv8_bpe *bpe_out, int32_t num_ids, size_t num_bytes, size_t num_merges) {
    kv8_bpe bpe = {.num_ids = num_ids,
                   .bytes_capacity = num_bytes,
                   .num_vocab_slots = slots_for((size_t)num_ids),
                   .num_merge_slots = slots_for(num_merges)};
    const size_t ids = (size_t)num_ids;
    *bpe_out = (kv8_bpe){0};
    void *memory = NULL;
    kv8_status status;
    KV8_TRY_GOTO(kv8_alloc(NULL, ids, sizeof *bpe.token_offsets, "token offsets", &memory));
    bpe.token_offsets = memory;
    KV8_TRY_GOTO(kv8_alloc(NULL, ids, sizeof *bpe.token_lengths, "token lengths", &memory));
    bpe.token_lengths = memory;
    KV8_TRY_GOTO(kv8_alloc(NULL, num_bytes, 1, "token bytes", &memory));
    bpe.bytes = memory;
    KV8_TRY_GOTO(kv8_alloc(NULL, bpe.num_vocab_slots, sizeof *bpe.vocab_slots, "vocab", &memory));
    bpe.vocab_slots = memory;
    KV8_TRY_GOTO(kv8_alloc(NULL, bpe.num_merge_slots, sizeof *bpe.merge_slots, "merges", &memory));
    bpe.merge_slots = memory;
    *bpe_out = bpe;
    return KV8_OK;
fail:
    kv8_bpe_destroy(&bpe);
    return status;
}

void kv8_bpe_destroy(kv8_bpe *bpe) {
    const size_t ids = (size_t)bpe->num_ids;
    kv8_release(NULL, bpe->token_offsets, ids, sizeof *bpe->token_offsets);
    kv8_release(NULL, bpe->token_lengths, ids, sizeof *bpe->token_lengths);
    kv8_release(NULL, bpe->bytes, bpe->bytes_capacity, 1);
    kv8_release(NULL, bpe->vocab_slots, bpe->num_vocab_slots, sizeof *bpe->vocab_slots);
    kv8_release(NULL, bpe->merge_slots, bpe->num_merge_slots, sizeof *bpe->merge_slots);
    *bpe = (kv8_bpe){0};
}

/* The slot that holds these bytes, or the free one where they belong. */
static size_t vocab_slot(const kv8_bpe *bpe, const char *bytes, size_t length) {
    const size_t mask = bpe->num_vocab_slots - 1;
    size_t slot = (size_t)XXH3_64bits(bytes, length) & mask;
    for (; bpe->vocab_slots[slot] != 0; slot = (slot + 1) & mask) {
        const int32_t id = bpe->vocab_slots[slot] - 1;
        if (bpe->token_lengths[id] == length &&
            memcmp(bpe->bytes + bpe->token_offsets[id], bytes, length) == 0)
            break;
    }
    return slot;
}

int32_t kv8_bpe_find(const kv8_bpe *bpe, const char *bytes, size_t length) {
    return bpe->vocab_slots[vocab_slot(bpe, bytes, length)] - 1;
}

kv8_status kv8_bpe_add_token(kv8_bpe *bpe, int32_t id, const char *bytes, size_t length,
                             bool searchable) {
    if (bpe->token_lengths[id] != 0) return kv8_fail(KV8_ERR_CORRUPT, "id %d has two tokens", id);
    if (searchable) {
        const size_t slot = vocab_slot(bpe, bytes, length);
        if (bpe->vocab_slots[slot] != 0)
            return kv8_fail(KV8_ERR_CORRUPT, "ids %d and %d are the same bytes",
                            bpe->vocab_slots[slot] - 1, id);
        bpe->vocab_slots[slot] = id + 1;
    }
    memcpy(bpe->bytes + bpe->bytes_used, bytes, length);
    bpe->token_offsets[id] = (uint32_t)bpe->bytes_used;
    bpe->token_lengths[id] = (uint32_t)length;
    bpe->bytes_used += length;
    return KV8_OK;
}

static uint64_t merge_key(int32_t left, int32_t right) {
    return ((uint64_t)(uint32_t)left + 1) << 32 | (uint32_t)right;
}

/* The slot that holds this key, or the free one where it belongs. */
static size_t merge_slot(const kv8_bpe *bpe, uint64_t key) {
    const size_t mask = bpe->num_merge_slots - 1;
    /* Fibonacci hashing: 2^64 / golden ratio; the high bits are the mixed ones. */
    size_t slot = (size_t)((key * 0x9e3779b97f4a7c15u) >> 32) & mask;
    while (bpe->merge_slots[slot].key != 0 && bpe->merge_slots[slot].key != key)
        slot = (slot + 1) & mask;
    return slot;
}

kv8_status kv8_bpe_add_merge(kv8_bpe *bpe, int32_t left, int32_t right, uint32_t rank,
                             int32_t merged) {
    const uint64_t key = merge_key(left, right);
    kv8_bpe_merge *const slot = &bpe->merge_slots[merge_slot(bpe, key)];
    if (slot->key != 0) return kv8_fail(KV8_ERR_CORRUPT, "the same pair as merge %u", slot->rank);
    *slot = (kv8_bpe_merge){.key = key, .rank = rank, .merged = merged};
    return KV8_OK;
}

kv8_status kv8_bpe_finish(kv8_bpe *bpe) {
    for (int32_t value = 0; value < 256; value++) {
        const char byte = (char)(unsigned char)value;
        bpe->byte_ids[value] = kv8_bpe_find(bpe, &byte, 1);
        if (bpe->byte_ids[value] < 0)
            return kv8_fail(KV8_ERR_UNSUPPORTED, "no token for the single byte 0x%02x",
                            (unsigned)value);
    }
    return KV8_OK;
}

/* --- encoding --- */

/* A run of bytes that has become one token. */
typedef struct kv8_bpe_symbol {
    int32_t id;         /* -1 once merged into its left neighbour */
    int32_t prev, next; /* indices; -1 = none */
    uint32_t rank;      /* of the merge with next; NO_MERGE = there is none */
    int32_t merged;     /* that merge's token */
} kv8_bpe_symbol;

static const uint32_t NO_MERGE = UINT32_MAX;

void kv8_bpe_scratch_release(kv8_bpe_scratch *scratch) {
    kv8_release(NULL, scratch->symbols, scratch->capacity, sizeof *scratch->symbols);
    kv8_release(NULL, scratch->heap, scratch->capacity, 2 * sizeof *scratch->heap);
    *scratch = (kv8_bpe_scratch){0};
}

static kv8_status scratch_reserve(kv8_bpe_scratch *scratch, size_t length) {
    if (scratch->capacity >= length) return KV8_OK;
    const size_t capacity = length < 512 ? 512 : length;
    kv8_bpe_scratch_release(scratch);
    void *symbols = NULL, *heap = NULL;
    kv8_status status = kv8_alloc(NULL, capacity, sizeof(kv8_bpe_symbol), "bpe symbols", &symbols);
    if (status == KV8_OK)
        status = kv8_alloc(NULL, capacity, 2 * sizeof(uint64_t), "bpe heap", &heap);
    if (status != KV8_OK) {
        kv8_release(NULL, symbols, capacity, sizeof(kv8_bpe_symbol));
        return status;
    }
    *scratch = (kv8_bpe_scratch){.symbols = symbols, .heap = heap, .capacity = capacity};
    return KV8_OK;
}

static void heap_push(kv8_bpe_scratch *scratch, uint64_t entry) {
    uint64_t *const heap = scratch->heap;
    size_t at = scratch->heap_count++;
    for (; at > 0 && heap[(at - 1) / 2] > entry; at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = entry;
}

static uint64_t heap_pop(kv8_bpe_scratch *scratch) {
    uint64_t *const heap = scratch->heap;
    const uint64_t least = heap[0];
    const uint64_t last = heap[--scratch->heap_count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= scratch->heap_count) break;
        if (child + 1 < scratch->heap_count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return least;
}

/* Looks up the merge of symbol `idx` with its right neighbour and makes it a candidate. */
static void consider(const kv8_bpe *bpe, kv8_bpe_scratch *scratch, int32_t idx) {
    kv8_bpe_symbol *const symbol = &scratch->symbols[idx];
    symbol->rank = NO_MERGE;
    if (symbol->next < 0) return;
    const int32_t right = scratch->symbols[symbol->next].id;
    const kv8_bpe_merge *const merge =
        &bpe->merge_slots[merge_slot(bpe, merge_key(symbol->id, right))];
    if (merge->key == 0) return;
    symbol->rank = merge->rank;
    symbol->merged = merge->merged;
    heap_push(scratch, (uint64_t)merge->rank << 32 | (uint32_t)idx);
}

static void merge_with_next(const kv8_bpe *bpe, kv8_bpe_scratch *scratch, int32_t idx) {
    kv8_bpe_symbol *const symbol = &scratch->symbols[idx];
    kv8_bpe_symbol *const gone = &scratch->symbols[symbol->next];
    symbol->id = symbol->merged;
    symbol->next = gone->next;
    gone->id = -1;
    gone->rank = NO_MERGE;
    if (symbol->next >= 0) scratch->symbols[symbol->next].prev = idx;
    consider(bpe, scratch, idx);
    if (symbol->prev >= 0) consider(bpe, scratch, symbol->prev);
}

kv8_status kv8_bpe_encode(const kv8_bpe *bpe, kv8_bpe_scratch *scratch, const char *piece,
                          size_t length, kv8_token_ids *ids) {
    if (length == 1) return kv8_token_ids_push(ids, bpe->byte_ids[(uint8_t)piece[0]]);
    if (bpe->whole_pieces_first) {
        const int32_t id = kv8_bpe_find(bpe, piece, length);
        if (id >= 0) return kv8_token_ids_push(ids, id);
    }
    KV8_TRY(scratch_reserve(scratch, length));
    kv8_bpe_symbol *const symbols = scratch->symbols;
    const int32_t count = (int32_t)length;
    for (int32_t i = 0; i < count; i++) {
        symbols[i] = (kv8_bpe_symbol){.id = bpe->byte_ids[(uint8_t)piece[i]],
                                      .prev = i - 1,
                                      .next = i + 1 < count ? i + 1 : -1};
    }
    /* At most length - 1 candidates now and, each merge taking one and adding two, one more per
     * merge: below 2 * length in all. */
    scratch->heap_count = 0;
    for (int32_t i = 0; i < count; i++) consider(bpe, scratch, i);
    while (scratch->heap_count > 0) {
        const uint64_t entry = heap_pop(scratch);
        const int32_t idx = (int32_t)(entry & UINT32_MAX);
        if (symbols[idx].rank == (uint32_t)(entry >> 32)) merge_with_next(bpe, scratch, idx);
    }
    for (int32_t i = 0; i >= 0; i = symbols[i].next)
        KV8_TRY(kv8_token_ids_push(ids, symbols[i].id));
    return KV8_OK;
}
