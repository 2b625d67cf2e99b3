/* grammar.h - which bytes, and which control tokens between them, an answer may go on with: a graph
 * of nodes with calls, run as sets of places that are remembered, so that every step but the first
 * of its kind is one look into a table.
 *
 * Symbols are the 256 bytes and, above them, the control tokens. A grammar is built from its end:
 * each function takes the node that follows and returns the node to enter at. Any number of answers
 * may follow one grammar, from any thread.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_GRAMMAR_H
#define KV8_SERVER_GRAMMAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    GRAMMAR_START = 256, /* <|start|> and so on */
    GRAMMAR_CHANNEL,
    GRAMMAR_MESSAGE,
    GRAMMAR_END,
    GRAMMAR_RETURN,
    GRAMMAR_CALL,
    GRAMMAR_CONSTRAIN,
    GRAMMAR_NUM_SYMBOLS
};

typedef struct grammar grammar;

typedef struct byte_set {
    uint64_t bits[4];
} byte_set;

static inline bool byte_set_has(const byte_set *s, int byte) {
    return (s->bits[byte >> 6] >> (byte & 63) & 1) != 0;
}

/* NULL = no memory. Later failures of memory make the grammar broken. */
grammar *grammar_create(void);
void grammar_destroy(grammar *g);
/* Memory ran out, or it has more nodes than there may be. */
bool grammar_is_broken(const grammar *g);

/* The end of the answer, or of a rule. */
int grammar_end(grammar *g);
/* One symbol of lo..hi. */
int grammar_range(grammar *g, int lo, int hi, int next);
int grammar_text(grammar *g, const char *text, size_t length, int next);
/* One plain character: of a string of JSON, as it is: whole, no quote, no backslash, no control.
 * Not those that begin with a byte of `but`. */
int grammar_plain(grammar *g, byte_set but, int next);
/* One of two. */
int grammar_either(grammar *g, int one, int other);
/* A node to loop to: grammar_either() of what is set later. */
int grammar_open(grammar *g);
void grammar_close(grammar *g, int open, int one, int other);
/* A rule that may be called before it is set, by others and by itself. */
int grammar_add_rule(grammar *g);
void grammar_set_rule(grammar *g, int rule, int entry);
int grammar_call(grammar *g, int rule, int next);

/* --- following --- */

/* States are numbers; 0 is the one from which nothing follows. */
int grammar_begin(grammar *g, int entry);
/* Where each symbol leads, [GRAMMAR_NUM_SYMBOLS], or that grammar_step() has yet to find that out;
 * NULL = nowhere. It stays while the grammar does. */
enum { GRAMMAR_UNKNOWN = 0xffff };
const uint16_t *grammar_row(grammar *g, int state);
int grammar_step(grammar *g, int state, int symbol);
/* Where plain characters lead, all but those of the exceptions to one state: by their first byte,
 * the ones that may not come, and the ones that lead elsewhere or in part. */
typedef struct plain_step {
    int to; /* 0 = only exceptions may come */
    byte_set never, elsewhere;
    bool endless; /* any plain characters may come, and any after them, wherever they lead */
} plain_step;
plain_step grammar_plain_step(grammar *g, int state);
bool grammar_may_end(const grammar *g, int state);
/* Half of the states that there may be are known; beyond the last, answers end in state 0. */
bool grammar_is_half_full(const grammar *g);

#endif
