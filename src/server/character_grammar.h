/* character_grammar.h - characters of a JSON string, as they are written between its quotes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CHARACTER_GRAMMAR_H
#define KV8_SERVER_CHARACTER_GRAMMAR_H

#include "grammar.h"

enum { MAX_CODE_POINT = 0x10ffff };

/* Code points, both ends too. */
typedef struct code_range {
    int lo, hi;
} code_range;

/* Any character: a plain one or an escape, and no half of a surrogate pair. */
int character_grammar_all(grammar *g, int next);
/* A plain character, or a backslash and one of the letters. */
int character_grammar_any(grammar *g, const char *letters, int next);
/* A character of one of the ranges, in the one way that writes it as it is where it can be. */
int character_grammar_set(grammar *g, const code_range *ranges, int num, int next);

#endif
