/* constraint.c - a grammar over the tokens of a vocabulary.
 *
 * What may come in a state is computed once, and kept. A state takes a run of n plain characters
 * when all of them but some exceptions lead from it to one state that takes a run of n - 1, with
 * the same exceptions: that is what strings of JSON are, of any length or of a limited one, and
 * most patterns. Plain tokens up to that length are then known without a look at their bytes; of
 * the others, only what is behind their plain characters is walked. Tokens that hold an exception
 * are taken out by masks, and walked if it may come at all. Where some place takes any plain
 * characters for ever, exceptions matter to tokens that hold others alone.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "constraint.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MASKS = 512, MAX_EXCEPTIONS = 64 };
/* Before answers come to them: states looked at, and masks: of the nearest states, and of those
 * where so many of ASCII's characters may come, whose masks take long. */
enum { AHEAD_STATES = 1024, AHEAD_MASKS = 128, AHEAD_NEAREST = 64, AHEAD_SYMBOLS = 24 };

/* What all plain characters lead to from a state, another state, and how many it takes; or these.
 */
enum { UNKNOWN = -1, MIXED = -2 };

/* What is kept of a state of the grammar. */
typedef struct known {
    uint32_t *mask; /* NULL = not computed */
    int plain;      /* where plain characters lead; 0 = none may come */
    int run;        /* how many of them in a row */
    int exceptions; /* which of them do not: of constraint.exceptions */
    bool endless;   /* any may come and any after them; known with `plain` */
} known;

/* Plain characters that do not lead where others do, by their first byte. */
typedef struct exceptions {
    byte_set never, elsewhere;
    uint64_t kinds, elsewhere_kinds; /* byte_kind() of all, of those that lead elsewhere */
    uint32_t *held;                  /* the mask of tokens that begin with some in their plain
                                      * characters; NULL = none */
} exceptions;

struct constraint {
    const vocabulary *vocabulary;
    grammar *grammar;
    int first;
    _Atomic int num_users;
    atomic_flag prepared;
    pthread_mutex_t lock; /* of what follows, and of the grammar */
    known *states;        /* [num_known] */
    int num_known, num_masks;
    exceptions exceptions[MAX_EXCEPTIONS]; /* [num_exceptions]; 0: none */
    int num_exceptions;
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

/* The index of the exceptions of a step; -1 = there is no room for them. */
static int keep_exceptions(constraint *c, const plain_step *step) {
    const vocabulary *const v = c->vocabulary;
    exceptions it = {.never = step->never, .elsewhere = step->elsewhere};
    for (int i = 0; i < c->num_exceptions; i++) {
        const exceptions *const kept = &c->exceptions[i];
        if (memcmp(&kept->never, &it.never, sizeof it.never) == 0 &&
            memcmp(&kept->elsewhere, &it.elsewhere, sizeof it.elsewhere) == 0)
            return i;
    }
    if (c->num_exceptions == MAX_EXCEPTIONS) return -1;
    it.held = calloc(v->num_words, sizeof *it.held);
    if (it.held == NULL) return -1;
    for (int byte = 0; byte < 256; byte++) {
        const bool never = byte_set_has(&it.never, byte);
        if (!never && !byte_set_has(&it.elsewhere, byte)) continue;
        const uint32_t *const holds = v->holds + (size_t)byte * v->num_words;
        for (size_t i = 0; i < v->num_words; i++) it.held[i] |= holds[i];
        it.kinds |= byte_kind((unsigned char)byte);
        if (!never) it.elsewhere_kinds |= byte_kind((unsigned char)byte);
    }
    c->exceptions[c->num_exceptions] = it;
    return c->num_exceptions++;
}

static int plain_of(constraint *c, int state) {
    known *const it = keep(c, state);
    if (it == NULL) return MIXED;
    if (it->plain == UNKNOWN) {
        const plain_step step = grammar_plain_step(c->grammar, state);
        const byte_set *const e = &step.elsewhere;
        const bool some = (e->bits[0] | e->bits[1] | e->bits[2] | e->bits[3]) != 0;
        const int kept = step.to > 0 ? keep_exceptions(c, &step) : 0;
        it->plain = kept < 0 || (step.to == 0 && some) ? MIXED : step.to;
        it->exceptions = kept < 0 ? 0 : kept;
        it->endless = step.endless;
    }
    return it->plain;
}

static const exceptions *exceptions_of(constraint *c, int state) {
    return &c->exceptions[c->states[state].exceptions];
}

/* Plain characters that a state takes in a row, all of them or none, MAX_RUN at most; MIXED = it
 * takes some of them. */
static int run_of(constraint *c, int state) {
    int run = 0;
    for (int at = state; run < MAX_RUN; run++) {
        const int rest = at < c->num_known ? c->states[at].run : UNKNOWN;
        const int to = rest == UNKNOWN ? plain_of(c, at) : 0;
        if (rest == MIXED || to == MIXED) run = MIXED;
        if ((rest > 0 || to > 0) && exceptions_of(c, at) != exceptions_of(c, state)) run = MIXED;
        if (run == MIXED) break;
        if (rest >= 0) run += rest;
        if (to == at) run = MAX_RUN;
        if (to <= 0 || to == at) break;
        at = to;
    }
    if (run > MAX_RUN) run = MAX_RUN;
    known *const it = keep(c, state);
    if (it != NULL) it->run = run;
    return run;
}

/* Every plain token may come. */
static bool is_endless(constraint *c, int state) {
    plain_of(c, state);
    return state < c->num_known && c->states[state].endless;
}

/* --- masks --- */

/* Where a walk stands: the children of a node that are still to see. */
typedef struct frame {
    const uint16_t *row; /* of the state behind the node */
    int state;
    int32_t child, end;
    int length;  /* characters begun before the children */
    bool wanted; /* all of the children are to be seen */
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
    const bool is_first = trie == &v->plain && node->depth == 1 && byte < 0x80;
    const bool endless = (node->plain || is_first) && is_endless(c, state);
    if (is_first &&
        (endless || (run_of(c, state) == MAX_RUN && exceptions_of(c, state)->kinds == 0))) {
        const uint32_t *const all = v->begins + (size_t)byte * v->num_words;
        for (size_t i = 0; i < v->num_words; i++) words[i] |= all[i];
        return (frame){0};
    }
    for (int32_t i = node->first; i < node->own; i++) mask_set(words, trie->ids[i]);
    if (node->num_children == 0) return (frame){0};
    int run = node->plain ? endless ? MAX_RUN : run_of(c, state) : -1;
    if (run > 0 && !endless && (node->below & exceptions_of(c, state)->kinds) != 0) run = -1;
    if (run > 0) set_subtree(trie, node, length, run, words);
    const uint16_t *const row = run >= 0 ? NULL : grammar_row(c->grammar, state);
    const int32_t num = row == NULL ? 0 : node->num_children;
    return (frame){.row = row,
                   .state = state,
                   .child = node->child,
                   .end = node->child + num,
                   .length = length};
}

static uint64_t kinds_within(const token_trie *trie, int32_t node) {
    return byte_kind(trie->bytes[node]) | trie->nodes[node].below;
}

/* Sets the bits of those tokens that the state goes on with; kinds: only of tokens that hold some
 * byte of these, 0 = of all. */
static void walk(constraint *c, int state, const token_trie *trie, uint64_t kinds,
                 uint32_t *words) {
    frame frames[MAX_TOKEN_BYTES + 1];
    int depth = 0;
    frames[0] = enter(c, state, trie, 0, 0, words);
    frames[0].wanted = kinds == 0;
    while (depth >= 0) {
        frame *const f = &frames[depth];
        while (f->child < f->end && f->row[trie->bytes[f->child]] == 0) f->child++;
        if (f->child == f->end) {
            depth--;
            continue;
        }
        const int32_t child = f->child++;
        const bool wanted = f->wanted || (byte_kind(trie->bytes[child]) & kinds) != 0;
        if (!wanted && (kinds_within(trie, child) & kinds) == 0) continue;
        const unsigned char byte = trie->bytes[child];
        const int length = f->length + ((byte & 0xc0) != 0x80);
        int to = f->row[byte];
        if (to == GRAMMAR_UNKNOWN) to = grammar_step(c->grammar, f->state, byte);
        if (to == 0) continue;
        frames[++depth] = enter(c, to, trie, child, length, words);
        frames[depth].wanted = wanted;
    }
}

static bool is_free_text(grammar *g, int state) {
    for (int byte = 0; byte < 256; byte++) {
        if (grammar_step(g, state, byte) != state) return false;
    }
    return true;
}

/* Plain tokens as long as the run is, and the others by what is behind their plain characters: but
 * for those that begin with exceptions among these. */
static void compute_string(constraint *c, int state, int run, uint32_t *words) {
    const vocabulary *const v = c->vocabulary;
    const exceptions e = *exceptions_of(c, state);
    int at = state;
    memcpy(words, v->short_ones + (size_t)run * v->num_words, v->num_words * sizeof *words);
    for (int before = 0; before <= run; before++) {
        walk(c, at, &v->behind[before], 0, words);
        if (before < run) at = plain_of(c, at);
    }
    for (size_t i = 0; e.kinds != 0 && i < v->num_words; i++) words[i] &= ~e.held[i];
    if (e.elsewhere_kinds == 0) return;
    if (!is_endless(c, state)) walk(c, state, &v->plain, e.elsewhere_kinds, words);
    walk(c, state, &v->others, e.elsewhere_kinds, words);
}

static void compute(constraint *c, int state, uint32_t *words) {
    const vocabulary *const v = c->vocabulary;
    grammar *const g = c->grammar;
    const int run = run_of(c, state);
    const bool endless = is_endless(c, state);
    if (is_free_text(g, state)) {
        memcpy(words, v->all, v->num_words * sizeof *words);
    } else if (run > 0) {
        compute_string(c, state, run, words);
    } else {
        if (!endless) walk(c, state, &v->plain, 0, words);
        walk(c, state, &v->others, 0, words);
    }
    const uint32_t *const plain = v->short_ones + MAX_RUN * v->num_words;
    for (size_t i = 0; endless && i < v->num_words; i++) words[i] |= plain[i];
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

/* --- ahead of the answers --- */

typedef struct discovery {
    int states[AHEAD_STATES]; /* [num], by their distance from the first */
    int num;
    bool seen[GRAMMAR_UNKNOWN];
} discovery;

/* Adds the states behind one, not those within characters, nor within escapes of strings that come
 * to an end by their length: they lead where others do.
 * How many of ASCII's characters lead on from it. */
static int discover(constraint *c, int state, discovery *d) {
    int num = 0;
    const uint16_t *const row = grammar_row(c->grammar, state);
    for (int symbol = 0; row != NULL && symbol < GRAMMAR_NUM_SYMBOLS; symbol++) {
        const bool escape = symbol == '\\' && row['a'] != state;
        const bool within = escape || (symbol >= 0x80 && symbol < GRAMMAR_START);
        if (row[symbol] == 0 || within) continue;
        const int to = grammar_step(c->grammar, state, symbol);
        num += symbol < 0x80;
        if (to == 0 || d->seen[to] || d->num == AHEAD_STATES) continue;
        d->seen[to] = true;
        d->states[d->num++] = to;
    }
    return num;
}

void constraint_prepare(constraint *c) {
    if (atomic_flag_test_and_set(&c->prepared)) return;
    discovery *const d = calloc(1, sizeof *d);
    uint32_t *const words = malloc(c->vocabulary->num_words * sizeof *words);
    if (d != NULL) d->states[d->num++] = c->first;
    for (int i = 0; d != NULL && words != NULL && i < d->num; i++) {
        const int state = d->states[i];
        pthread_mutex_lock(&c->lock);
        const bool wanted = discover(c, state, d) >= AHEAD_SYMBOLS || i < AHEAD_NEAREST;
        const known *const it = wanted && c->num_masks < AHEAD_MASKS ? keep(c, state) : NULL;
        if (it != NULL && it->mask == NULL) {
            memset(words, 0, c->vocabulary->num_words * sizeof *words);
            compute_and_keep(c, state, words);
        }
        pthread_mutex_unlock(&c->lock);
    }
    free(words);
    free(d);
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
    c->num_exceptions = 1;
    atomic_init(&c->num_users, 1);
    atomic_flag_clear(&c->prepared);
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
    for (int i = 0; i < c->num_exceptions; i++) free(c->exceptions[i].held);
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
