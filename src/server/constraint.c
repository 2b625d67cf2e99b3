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

/* What all plain characters lead to from a state, another state, and how many it takes; or these.
 */
enum { UNKNOWN = -1, MIXED = -2 };

/* What is kept of a state of the grammar. */
typedef struct known {
    uint32_t *mask; /* NULL = not computed */
    int plain;      /* where plain characters lead; 0 = none may come */
    int run;        /* how many of them in a row */
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
        for (int i = c->num_known; i < num; i++)
            states[i] = (known){.plain = UNKNOWN, .run = UNKNOWN};
        c->states = states;
        c->num_known = num;
    }
    return &c->states[state];
}

/* --- runs of plain characters --- */

static int plain_of(constraint *c, int state) {
    known *const it = keep(c, state);
    if (it == NULL) return MIXED;
    if (it->plain == UNKNOWN) {
        const int to = grammar_after_plain(c->grammar, state);
        it->plain = to < 0 ? MIXED : to;
    }
    return it->plain;
}

/* Plain characters that a state takes in a row, all of them or none, MAX_RUN at most; MIXED = it
 * takes some of them. */
static int run_of(constraint *c, int state) {
    int run = 0;
    for (int at = state; run < MAX_RUN; run++) {
        const int rest = at < c->num_known ? c->states[at].run : UNKNOWN;
        const int to = rest == UNKNOWN ? plain_of(c, at) : 0;
        if (rest == MIXED || to == MIXED) run = MIXED;
        if (rest >= 0 && run >= 0) run += rest;
        if (to == at) run = MAX_RUN;
        if (to <= 0 || to == at) break;
        at = to;
    }
    if (run > MAX_RUN) run = MAX_RUN;
    known *const it = keep(c, state);
    if (it != NULL) it->run = run;
    return run;
}

/* --- masks --- */

/* Where a walk stands: the children of a node that are still to see. */
typedef struct frame {
    const uint16_t *row; /* of the state behind the node */
    int state;
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
static frame enter(constraint *c, int state, const token_trie *trie, int32_t node_idx, int length,
                   uint32_t *words) {
    const vocabulary *const v = c->vocabulary;
    const trie_node *const node = &trie->nodes[node_idx];
    const unsigned char byte = trie->bytes[node_idx];
    if (trie == &v->plain && node->depth == 1 && byte < 0x80 && run_of(c, state) == MAX_RUN) {
        const uint32_t *const all = v->begins + (size_t)byte * v->num_words;
        for (size_t i = 0; i < v->num_words; i++) words[i] |= all[i];
        return (frame){0};
    }
    for (int32_t i = node->first; i < node->own; i++) mask_set(words, trie->ids[i]);
    if (node->num_children == 0) return (frame){0};
    const int run = node->plain ? run_of(c, state) : -1;
    if (run > 0) set_subtree(trie, node, length, run, words);
    const uint16_t *const row = run >= 0 ? NULL : grammar_row(c->grammar, state);
    const int32_t num = row == NULL ? 0 : node->num_children;
    return (frame){.row = row,
                   .state = state,
                   .child = node->child,
                   .end = node->child + num,
                   .length = length};
}

/* Sets the bits of those tokens that the state goes on with. */
static void walk(constraint *c, int state, const token_trie *trie, uint32_t *words) {
    frame frames[MAX_TOKEN_BYTES + 1];
    int depth = 0;
    frames[0] = enter(c, state, trie, 0, 0, words);
    while (depth >= 0) {
        frame *const f = &frames[depth];
        while (f->child < f->end && f->row[trie->bytes[f->child]] == 0) f->child++;
        if (f->child == f->end) {
            depth--;
            continue;
        }
        const int32_t child = f->child++;
        const unsigned char byte = trie->bytes[child];
        const int length = f->length + ((byte & 0xc0) != 0x80);
        int to = f->row[byte];
        if (to == GRAMMAR_UNKNOWN) to = grammar_step(c->grammar, f->state, byte);
        if (to != 0) frames[++depth] = enter(c, to, trie, child, length, words);
    }
}

static bool is_free_text(grammar *g, int state) {
    for (int byte = 0; byte < 256; byte++) {
        if (grammar_step(g, state, byte) != state) return false;
    }
    return true;
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
