/* vocabulary.h - the tokens of a model as a grammar walks through them: tries of their bytes, and
 * masks of what strings of JSON are mostly made of.
 *
 * A token is plain when it is whole characters that such a string holds as they are, and not more
 * than MAX_RUN of them. Every other token begins with some of those: behind them lies the part that
 * a grammar has to look at.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_VOCABULARY_H
#define KV8_SERVER_VOCABULARY_H

#include <kv8/tokenizer.h>

#include "grammar.h"

enum { MAX_TOKEN_BYTES = 512, MAX_RUN = 16, NUM_CONTROL = GRAMMAR_NUM_SYMBOLS - 256 };

/* The tokens of a node's subtree are first .. end - 1, those that end at the node come before own.
 */
typedef struct trie_node {
    int32_t first, own, end;
    int32_t child; /* its children lie side by side */
    uint16_t num_children, depth;
    bool plain;     /* what is behind it in its tokens: MAX_RUN plain characters at most */
    uint64_t below; /* byte_kind() of every byte behind it */
} trie_node;

typedef struct token_trie {
    trie_node *nodes;     /* 0 is the root */
    unsigned char *bytes; /* [nodes]: that lead to each */
    int32_t *ids;         /* of tokens, in the order of their bytes */
    uint16_t *lengths;    /* of tokens, in characters */
} token_trie;

typedef struct vocabulary {
    const kv8_tokenizer *tokenizer;
    size_t num_words;         /* of a mask */
    uint32_t *all;            /* the mask of every token with text */
    uint32_t *short_ones;     /* [MAX_RUN + 1] masks: plain tokens of so many characters at most */
    uint32_t *begins;         /* [128] masks: plain tokens by their first byte */
    uint32_t *holds;          /* [256] masks: tokens by first bytes of their first plain characters,
                               * MAX_RUN of them */
    token_trie plain, others; /* by all of their bytes */
    token_trie behind[MAX_RUN + 1]; /* the others again, by what follows so many plain characters */
    int32_t control[NUM_CONTROL], eos[8];
    int32_t num_eos;
} vocabulary;

/* The tokenizer is borrowed. vocab_size: the model's. eos: ids that end an answer. NULL = no
 * memory. */
vocabulary *vocabulary_create(const kv8_tokenizer *tokenizer, int32_t vocab_size,
                              const int32_t *eos, int32_t num_eos);
void vocabulary_destroy(vocabulary *v);
/* Whether it has all control tokens that a chat's grammar speaks of. */
bool vocabulary_has_control(const vocabulary *v);

/* One bit for a first byte of a plain character, shared by few; 0 for one that continues. */
static inline uint64_t byte_kind(unsigned char byte) {
    if (byte >= 0xc0) return (uint64_t)1 << (byte < 0xe0 ? 17 : 18 + byte % 8);
    if (byte >= 0x80) return 0;
    if (byte >= '0' && byte <= '9') return (uint64_t)1 << 16;
    return (uint64_t)1 << (byte < 0x40 ? byte % 32 : 32 + byte % 32);
}

static inline void mask_set(uint32_t *words, int32_t id) {
    words[id / 32] |= 1u << (id % 32);
}

#endif
