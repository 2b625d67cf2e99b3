/* vocabulary.c - the tokens of a model as tries.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "vocabulary.h"

#include <stdlib.h>
#include <string.h>

/* A token, or what is left of it behind its plain characters. */
typedef struct piece {
    const unsigned char *bytes;
    int32_t id, length;
    int32_t run;        /* plain characters before these bytes */
    int32_t characters; /* of these bytes */
    int32_t plain_from; /* behind so many of these bytes all characters are plain */
} piece;

typedef struct pieces {
    piece *items;
    size_t num;
} pieces;

/* --- plain characters --- */

/* Bytes of the plain character that stands here; 0 = none does. */
static int32_t plain_character(const unsigned char *bytes, int32_t left) {
    static const unsigned char least[] = {0x80, 0x80, 0xa0, 0x90}; /* of the second byte */
    const unsigned char lead = bytes[0];
    if (lead < 0x80) return lead >= 0x20 && lead != '"' && lead != '\\' && lead != 0x7f;
    const int32_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (lead < 0xc2 || lead > 0xf4 || length > left) return 0;
    const unsigned char lo = lead == 0xe0 || lead == 0xf0 ? least[length - 1] : 0x80;
    const unsigned char hi = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (bytes[1] < lo || bytes[1] > hi) return 0;
    for (int32_t i = 2; i < length; i++) {
        if (bytes[i] < 0x80 || bytes[i] > 0xbf) return 0;
    }
    return length;
}

/* The piece without its plain characters, as many as count. */
static piece without_run(const piece *whole) {
    piece rest = *whole;
    while (rest.length > 0 && rest.run < MAX_RUN) {
        const int32_t length = plain_character(rest.bytes, rest.length);
        if (length == 0) break;
        rest.bytes += length;
        rest.length -= length;
        rest.plain_from -= rest.plain_from < length ? rest.plain_from : length;
        rest.characters--;
        rest.run++;
    }
    return rest;
}

static piece make_piece(const char *bytes, size_t length, int32_t id) {
    piece it = {.bytes = (const unsigned char *)bytes, .id = id, .length = (int32_t)length};
    for (int32_t i = 0; i < it.length;) {
        const int32_t plain = plain_character(it.bytes + i, it.length - i);
        it.characters += (it.bytes[i] & 0xc0) != 0x80;
        i += plain > 0 ? plain : 1;
        if (plain == 0) it.plain_from = i;
    }
    return it;
}

/* --- tries --- */

static int by_bytes(const void *a, const void *b) {
    const piece *const x = a, *const y = b;
    const size_t least = (size_t)(x->length < y->length ? x->length : y->length);
    const int order = memcmp(x->bytes, y->bytes, least);
    return order != 0 ? order : (x->length > y->length) - (x->length < y->length);
}

/* Bytes that a piece shares with the one before it. */
static int32_t shared_bytes(const pieces *p, size_t i) {
    int32_t shared = 0;
    if (i == 0) return 0;
    const piece *const a = &p->items[i - 1], *const b = &p->items[i];
    while (shared < a->length && shared < b->length && a->bytes[shared] == b->bytes[shared])
        shared++;
    return shared;
}

/* Appends the children of a node; the number of nodes then. */
static int32_t add_children(token_trie *trie, const pieces *p, trie_node *node, int32_t num) {
    const uint16_t depth = node->depth;
    node->child = num;
    for (node->own = node->first; node->own < node->end; node->own++) {
        if (p->items[node->own].length > depth) break;
    }
    for (int32_t i = node->own; i < node->end; i++) {
        const unsigned char byte = p->items[i].bytes[depth];
        if (num == node->child || trie->bytes[num - 1] != byte) {
            trie->bytes[num] = byte;
            trie->nodes[num++] = (trie_node){.first = i, .depth = (uint16_t)(depth + 1)};
        }
        trie->nodes[num - 1].end = i + 1;
    }
    node->num_children = (uint16_t)(num - node->child);
    node->plain = true;
    for (int32_t i = node->own; i < node->end && node->plain; i++) {
        const piece *const it = &p->items[i];
        node->plain = it->plain_from <= depth && it->length - depth <= MAX_RUN &&
                      (it->bytes[depth] & 0xc0) != 0x80;
    }
    return num;
}

static bool trie_build(token_trie *trie, pieces p) {
    qsort(p.items, p.num, sizeof *p.items, by_bytes);
    size_t most = 1; /* nodes: the root, and the bytes that a piece does not share */
    for (size_t i = 0; i < p.num; i++) most += (size_t)(p.items[i].length - shared_bytes(&p, i));
    trie->nodes = malloc(most * sizeof *trie->nodes);
    trie->bytes = malloc(most);
    trie->ids = malloc((p.num + 1) * sizeof *trie->ids);
    trie->lengths = malloc((p.num + 1) * sizeof *trie->lengths);
    if (trie->nodes == NULL || trie->bytes == NULL || trie->ids == NULL || trie->lengths == NULL)
        return false;
    for (size_t i = 0; i < p.num; i++) {
        trie->ids[i] = p.items[i].id;
        trie->lengths[i] = (uint16_t)p.items[i].characters;
    }
    trie->nodes[0] = (trie_node){.end = (int32_t)p.num};
    trie->bytes[0] = 0;
    int32_t num = 1;
    for (int32_t i = 0; i < num; i++) num = add_children(trie, &p, &trie->nodes[i], num);
    for (int32_t i = num - 1; i >= 0; i--) {
        trie_node *const node = &trie->nodes[i];
        for (int32_t k = node->child; k < node->child + node->num_children; k++)
            node->below |= byte_kind(trie->bytes[k]) | trie->nodes[k].below;
    }
    return true;
}

static void trie_free(token_trie *trie) {
    free(trie->nodes);
    free(trie->bytes);
    free(trie->ids);
    free(trie->lengths);
}

/* --- life --- */

/* Every token with text; plain ones come before the others, num_plain of them. */
static pieces collect(vocabulary *v, int32_t vocab_size, size_t *num_plain) {
    pieces p = {.items = calloc((size_t)vocab_size + 1, sizeof *p.items)};
    *num_plain = 0;
    for (int32_t id = 0; id < vocab_size && p.items != NULL; id++) {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(v->tokenizer, id, &length);
        if (bytes == NULL || length == 0 || length > MAX_TOKEN_BYTES ||
            kv8_tokenizer_is_special(v->tokenizer, id))
            continue;
        const piece it = make_piece(bytes, length, id), rest = without_run(&it);
        mask_set(v->all, id);
        for (const unsigned char *at = it.bytes; at < rest.bytes; at++)
            if ((*at & 0xc0) != 0x80) mask_set(v->holds + *at * v->num_words, id);
        p.items[p.num++] = it;
        if (rest.length > 0) continue;
        p.items[p.num - 1] = p.items[*num_plain];
        p.items[(*num_plain)++] = it;
        for (int32_t run = rest.run; run <= MAX_RUN; run++)
            mask_set(v->short_ones + (size_t)run * v->num_words, id);
        if (it.bytes[0] < 0x80) mask_set(v->begins + it.bytes[0] * v->num_words, id);
    }
    return p;
}

/* Pieces of one run after the other, those of `run` first. */
static bool build_behind(vocabulary *v, pieces others) {
    size_t num = 0;
    for (size_t i = 0; i < others.num; i++) others.items[i] = without_run(&others.items[i]);
    for (int32_t run = 0; run <= MAX_RUN; run++, others.items += num, others.num -= num) {
        num = 0;
        for (size_t i = 0; i < others.num; i++) {
            const piece it = others.items[i];
            if (it.run != run) continue;
            others.items[i] = others.items[num];
            others.items[num++] = it;
        }
        if (!trie_build(&v->behind[run], (pieces){.items = others.items, .num = num})) return false;
    }
    return true;
}

static bool build(vocabulary *v, int32_t vocab_size) {
    size_t num_plain;
    v->all = calloc(v->num_words, sizeof *v->all);
    v->short_ones = calloc((MAX_RUN + 1) * v->num_words, sizeof *v->short_ones);
    v->begins = calloc(128 * v->num_words, sizeof *v->begins);
    v->holds = calloc(256 * v->num_words, sizeof *v->holds);
    if (v->all == NULL || v->short_ones == NULL || v->begins == NULL || v->holds == NULL)
        return false;
    const pieces p = collect(v, vocab_size, &num_plain);
    const pieces others = {.items = p.items + num_plain, .num = p.num - num_plain};
    const bool good = p.items != NULL &&
                      trie_build(&v->plain, (pieces){.items = p.items, .num = num_plain}) &&
                      trie_build(&v->others, others) && build_behind(v, others);
    free(p.items);
    return good;
}

vocabulary *vocabulary_create(const kv8_tokenizer *tokenizer, int32_t vocab_size,
                              const int32_t *eos, int32_t num_eos) {
    static const char *const control[NUM_CONTROL] = {"<|start|>",    "<|channel|>", "<|message|>",
                                                     "<|end|>",      "<|return|>",  "<|call|>",
                                                     "<|constrain|>"};
    vocabulary *const v = calloc(1, sizeof *v);
    if (v == NULL) return NULL;
    v->tokenizer = tokenizer;
    v->num_words = ((size_t)vocab_size + 31) / 32;
    if (!build(v, vocab_size)) {
        vocabulary_destroy(v);
        return NULL;
    }
    for (int i = 0; i < NUM_CONTROL; i++) {
        v->control[i] = kv8_tokenizer_special_id(tokenizer, control[i]);
        if (v->control[i] >= vocab_size) v->control[i] = -1;
    }
    for (int32_t i = 0; i < num_eos && v->num_eos < 8; i++)
        if (eos[i] >= 0 && eos[i] < vocab_size) v->eos[v->num_eos++] = eos[i];
    return v;
}

bool vocabulary_has_control(const vocabulary *v) {
    for (int i = 0; i < NUM_CONTROL; i++) {
        if (v->control[i] < 0) return false;
    }
    return true;
}

void vocabulary_destroy(vocabulary *v) {
    if (v == NULL) return;
    trie_free(&v->plain);
    trie_free(&v->others);
    for (int run = 0; run <= MAX_RUN; run++) trie_free(&v->behind[run]);
    free(v->all);
    free(v->short_ones);
    free(v->begins);
    free(v->holds);
    free(v);
}
