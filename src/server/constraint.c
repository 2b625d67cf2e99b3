/* constraint.c - a grammar over the tokens of a vocabulary.
 *
 * What may come in a state is computed once, and kept. A state takes a run of n plain characters
 * when all of them lead from it to one state that takes a run of n - 1: that is what strings of
 * JSON are, of any length or of a limited one. Plain tokens up to that length are then known
 * without a look at their bytes; of the others, only what is behind their plain characters is
 * walked.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "constraint.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MASKS = 512 };

/* What all plain characters lead to from a state: another state, or one of these. */
enum { UNKNOWN = -1, MIXED = -2 };

/* What is kept of a state of the grammar. */
typedef struct known {
    uint32_t *mask; /* NULL = not computed */
    int plain;      /* where plain characters lead; 0 = none may come */
} known;

struct constraint {
    const vocabulary *vocabulary;
    grammar *grammar;
    int first;
    _Atomic int num_users;
    pthread_mutex_t lock; /* of what follows, and of the grammar */
    known *states;        /* [num_known] */
    int num_known, num_masks;
};

/* --- what is kept --- */

/* Of a state; NULL = no memory. Valid until the next call. */
static known *keep(constraint *c, int state) {
    if (state >= c->num_known) {
        const int num = state * 2 > 64 ? state * 2 : 64;
        known *const states = realloc(c->states, (size_t)num * sizeof *states);
        if (states == NULL) return NULL;
        for (int i = c->num_known; i < num; i++) states[i] = (known){.plain = UNKNOWN};
        c->states = states;
        c->num_known = num;
    }
    return &c->states[state];
}

/* --- runs of plain characters --- */

/* Characters by their lead byte: all of a kind have second bytes lo to hi, then `tail` more. */
typedef struct lead_kind {
    unsigned char from, to, lo, hi;
    int tail;
} lead_kind;

/* Where bytes from..to lead, if all lead to one state; else MIXED. */
static int lead_of(grammar *g, int state, int from, int to) {
    const uint16_t *const row = grammar_row(g, state);
    if (row == NULL) return 0;
    for (int byte = from + 1; byte <= to; byte++) {
        if (row[byte] != row[from] && byte != '"' && byte != '\\') return MIXED;
    }
    return row[from];
}

/* Where all characters of a kind lead. */
static int lead_of_kind(grammar *g, int state, const lead_kind *kind) {
    int to = lead_of(g, state, kind->from, kind->to);
    if (to > 0) to = lead_of(g, to, kind->lo, kind->hi);
    for (int i = 0; i < kind->tail && to > 0; i++) to = lead_of(g, to, 0x80, 0xbf);
    return to;
}

static int find_plain(grammar *g, int state) {
    static const lead_kind kinds[] = {{0xc2, 0xdf, 0x80, 0xbf, 0}, {0xe0, 0xe0, 0xa0, 0xbf, 1},
                                      {0xe1, 0xec, 0x80, 0xbf, 1}, {0xed, 0xed, 0x80, 0x9f, 1},
                                      {0xee, 0xef, 0x80, 0xbf, 1}, {0xf0, 0xf0, 0x90, 0xbf, 2},
                                      {0xf1, 0xf3, 0x80, 0xbf, 2}, {0xf4, 0xf4, 0x80, 0x8f, 2}};
    const int to = lead_of(g, state, 0x20, 0x7e);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0] && to >= 0; i++) {
        if (lead_of_kind(g, state, &kinds[i]) != to) return MIXED;
    }
    return to;
}

static int plain_of(constraint *c, int state) {
    known *const it = keep(c, state);
    if (it == NULL) return MIXED;
    if (it->plain == UNKNOWN) it->plain = find_plain(c->grammar, state);
    return it->plain;
}

/* Plain characters that a state takes in a row, all of them or none; -1 = it takes some of them. */
static int run_of(constraint *c, int state) {
    for (int run = 0; run < MAX_RUN; run++) {
        const int to = plain_of(c, state);
        if (to == state) return MAX_RUN;
        if (to <= 0) return to == 0 ? run : -1;
        state = to;
    }
    return MAX_RUN;
}

/* --- masks --- */

/* Where a walk stands: the children of a node that are still to see. */
typedef struct frame {
    const uint16_t *row; /* of the state behind the node */
    int32_t child, end;
    int length; /* characters begun before the children */
} frame;

/* Plain tokens of a node's subtree, whose bytes up to the node have `length` characters. */
static void set_subtree(const token_trie *trie, const trie_node *node, int length, int run,
                        uint32_t *words) {
    for (int32_t i = node->own; i < node->end; i++)
        if (trie->lengths[i] - length <= run) mask_set(words, trie->ids[i]);
}

/* The frame of a node, at a state. No children: all of its subtree is known. */
static frame enter(constraint *c, int state, const token_trie *trie, const trie_node *node,
                   int length, uint32_t *words) {
    for (int32_t i = node->first; i < node->own; i++) mask_set(words, trie->ids[i]);
    if (node->num_children == 0) return (frame){0};
    const int run = node->plain ? run_of(c, state) : -1;
    if (run > 0) set_subtree(trie, node, length, run, words);
    const uint16_t *const row = run >= 0 ? NULL : grammar_row(c->grammar, state);
    const int32_t num = row == NULL ? 0 : node->num_children;
    return (frame){.row = row, .child = node->child, .end = node->child + num, .length = length};
}

/* Sets the bits of those tokens that the state goes on with. */
static void walk(constraint *c, int state, const token_trie *trie, uint32_t *words) {
    frame frames[MAX_TOKEN_BYTES + 1];
    int depth = 0;
    frames[0] = enter(c, state, trie, &trie->nodes[0], 0, words);
    while (depth >= 0) {
        frame *const f = &frames[depth];
        while (f->child < f->end && f->row[trie->bytes[f->child]] == 0) f->child++;
        if (f->child == f->end) {
            depth--;
            continue;
        }
        const unsigned char byte = trie->bytes[f->child];
        const int length = f->length + ((byte & 0xc0) != 0x80);
        frames[++depth] = enter(c, f->row[byte], trie, &trie->nodes[f->child++], length, words);
    }
}

static bool is_free_text(grammar *g, int state) {
    const uint16_t *const row = grammar_row(g, state);
    for (int byte = 0; byte < 256 && row != NULL; byte++) {
        if (row[byte] != state) return false;
    }
    return row != NULL;
}

/* Plain tokens as long as the run is, and the others by what is behind their plain characters. */
static void compute_string(constraint *c, int state, int run, uint32_t *words) {
    const vocabulary *const v = c->vocabulary;
    memcpy(words, v->short_ones + (size_t)run * v->num_words, v->num_words * sizeof *words);
    for (int before = 0; before <= run; before++) {
        walk(c, state, &v->behind[before], words);
        if (before < run) state = plain_of(c, state);
    }
}

static void compute(constraint *c, int state, uint32_t *words) {
    const vocabulary *const v = c->vocabulary;
    grammar *const g = c->grammar;
    const int run = run_of(c, state);
    if (is_free_text(g, state)) {
        memcpy(words, v->all, v->num_words * sizeof *words);
    } else if (run > 0) {
        compute_string(c, state, run, words);
    } else {
        walk(c, state, &v->plain, words);
        walk(c, state, &v->others, words);
    }
    for (int i = 0; i < NUM_CONTROL; i++) {
        if (v->control[i] >= 0 && grammar_step(g, state, 256 + i) != 0)
            mask_set(words, v->control[i]);
    }
    for (int32_t i = 0; i < v->num_eos && grammar_may_end(g, state); i++)
        mask_set(words, v->eos[i]);
}

/* Computes the mask of a state and keeps it, if there is room. */
static void compute_and_keep(constraint *c, int state, uint32_t *words) {
    compute(c, state, words);
    known *const it = keep(c, state);
    if (it == NULL || c->num_masks == MAX_MASKS) return;
    const size_t size = c->vocabulary->num_words * sizeof *words;
    it->mask = malloc(size);
    if (it->mask == NULL) return;
    memcpy(it->mask, words, size);
    c->num_masks++;
}

void constraint_mask(void *cookie, uint32_t *words) {
    const constraint_place *const place = cookie;
    constraint *const c = place->constraint;
    pthread_mutex_lock(&c->lock);
    const known *const it = keep(c, place->state);
    if (it != NULL && it->mask != NULL)
        memcpy(words, it->mask, c->vocabulary->num_words * sizeof *words);
    else
        compute_and_keep(c, place->state, words);
    pthread_mutex_unlock(&c->lock);
}

/* --- following --- */

constraint *constraint_create(const vocabulary *v, grammar *g, int entry) {
    const int first = grammar_begin(g, entry);
    constraint *const c = first == 0 ? NULL : calloc(1, sizeof *c);
    if (c == NULL) {
        grammar_destroy(g);
        return NULL;
    }
    c->vocabulary = v;
    c->grammar = g;
    c->first = first;
    atomic_init(&c->num_users, 1);
    pthread_mutex_init(&c->lock, NULL);
    return c;
}

constraint *constraint_share(constraint *c) {
    atomic_fetch_add(&c->num_users, 1);
    return c;
}

bool constraint_is_full(constraint *c) {
    pthread_mutex_lock(&c->lock);
    const bool full = grammar_is_half_full(c->grammar);
    pthread_mutex_unlock(&c->lock);
    return full;
}

void constraint_release(constraint *c) {
    if (c == NULL || atomic_fetch_sub(&c->num_users, 1) > 1) return;
    for (int i = 0; i < c->num_known; i++) free(c->states[i].mask);
    free(c->states);
    grammar_destroy(c->grammar);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

constraint_place constraint_begin(constraint *c) {
    return (constraint_place){.constraint = c, .state = c->first};
}

void constraint_take(constraint_place *place, int32_t token) {
    constraint *const c = place->constraint;
    const vocabulary *const v = c->vocabulary;
    pthread_mutex_lock(&c->lock);
    int symbol = -1;
    for (int i = 0; i < NUM_CONTROL; i++) {
        if (v->control[i] == token) symbol = 256 + i;
    }
    if (symbol >= 0) {
        place->state = grammar_step(c->grammar, place->state, symbol);
    } else {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(v->tokenizer, token, &length);
        for (size_t i = 0; i < length; i++)
            place->state = grammar_step(c->grammar, place->state, (unsigned char)bytes[i]);
    }
    pthread_mutex_unlock(&c->lock);
}
