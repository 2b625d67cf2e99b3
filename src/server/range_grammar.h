/* range_grammar.h - numbers from one to another, as they are written in JSON: whole ones, and
 * decimals.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_RANGE_GRAMMAR_H
#define KV8_SERVER_RANGE_GRAMMAR_H

#include "grammar.h"

/* Of a number beyond this, what follows may be lost in a double. */
#define RANGE_LIMIT INT64_C(9007199254740991)

/* -RANGE_LIMIT <= lo <= hi <= RANGE_LIMIT. */
int range_grammar_add(grammar *g, int64_t lo, int64_t hi, int next);

/* One end of a range of decimals. */
typedef struct range_end {
    bool given;
    bool outside; /* the end itself is none of the range */
    double value;
    char whole[24], fraction[24]; /* its magnitude in digits, no zeros at the end of the fraction */
} range_end;

/* Sets the digits of a value; false = it has more of them than a range may have. */
bool range_grammar_write(range_end *end);
/* Numbers without an exponent, of at most 16 digits before and behind the point; -1 = there is none
 * between the ends. */
int range_grammar_add_decimals(grammar *g, const range_end *lo, const range_end *hi, int next);

#endif
