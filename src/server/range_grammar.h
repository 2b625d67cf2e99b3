/* range_grammar.h - whole numbers from one to another, as they are written in JSON.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_RANGE_GRAMMAR_H
#define KV8_SERVER_RANGE_GRAMMAR_H

#include "grammar.h"

/* Of a number beyond this, what follows may be lost in a double. */
#define RANGE_LIMIT INT64_C(9007199254740991)

/* -RANGE_LIMIT <= lo <= hi <= RANGE_LIMIT. */
int range_grammar_add(grammar *g, int64_t lo, int64_t hi, int next);

#endif
