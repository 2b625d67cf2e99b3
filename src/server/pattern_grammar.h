/* pattern_grammar.h - regular expressions, as a JSON schema's "pattern" has them, as grammars of
 * the characters between a string's quotes.
 *
 * ECMAScript's syntax: literals, ".", classes, groups, alternatives, quantifiers; "^" and "$" at
 * the ends of the whole or of its alternatives. A pattern without them may stand anywhere in the
 * string. "." is any character but a line break. What a grammar cannot hold is refused by name: a
 * look ahead or behind, a back reference, a word's boundary, a Unicode property, an anchor within.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_PATTERN_GRAMMAR_H
#define KV8_SERVER_PATTERN_GRAMMAR_H

#include "grammar.h"

/* What a pattern is about. */
typedef struct pattern_facts {
    int min, max;     /* characters of a string that it takes; max -1 = any number */
    char refused[64]; /* why it is none; "" = it is one */
} pattern_facts;

/* Enters the pattern; -1 = facts->refused says why not. */
int pattern_grammar_add(grammar *g, const char *pattern, int next, pattern_facts *facts);
/* The pattern of a "format": date, time, date-time, duration, uuid, ipv4, ipv6, hostname, email,
 * uri; NULL = one that says nothing here. */
const char *pattern_of_format(const char *format);

#endif
