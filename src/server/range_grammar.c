/* range_grammar.c - whole numbers from one to another: by their number of digits, and of one number
 * of digits by the first in which the ends differ.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "range_grammar.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_DIGITS = 17 };

static int any_digits(grammar *g, size_t num, int next) {
    for (size_t i = 0; i < num; i++) next = grammar_range(g, '0', '9', next);
    return next;
}

/* Digits from lo on, of as many; or up to hi. */
static int digits_from(grammar *g, const char *lo, int next) {
    if (*lo == '\0') return next;
    const int least = grammar_range(g, *lo, *lo, digits_from(g, lo + 1, next));
    if (*lo == '9') return least;
    return grammar_either(g, least,
                          grammar_range(g, *lo + 1, '9', any_digits(g, strlen(lo + 1), next)));
}

static int digits_to(grammar *g, const char *hi, int next) {
    if (*hi == '\0') return next;
    const int most = grammar_range(g, *hi, *hi, digits_to(g, hi + 1, next));
    if (*hi == '0') return most;
    return grammar_either(g, most,
                          grammar_range(g, '0', *hi - 1, any_digits(g, strlen(hi + 1), next)));
}

/* lo <= hi have as many digits. */
static int digits_between(grammar *g, const char *lo, const char *hi, int next) {
    if (*lo == '\0') return next;
    if (*lo == *hi) return grammar_range(g, *lo, *lo, digits_between(g, lo + 1, hi + 1, next));
    const int least = grammar_range(g, *lo, *lo, digits_from(g, lo + 1, next));
    const int most = grammar_range(g, *hi, *hi, digits_to(g, hi + 1, next));
    const int ends = grammar_either(g, least, most);
    if (*lo + 1 == *hi) return ends;
    return grammar_either(g, ends,
                          grammar_range(g, *lo + 1, *hi - 1, any_digits(g, strlen(lo + 1), next)));
}

/* 0 <= lo <= hi. */
static int magnitude(grammar *g, int64_t lo, int64_t hi, int next) {
    int all = -1;
    for (int64_t from = lo; from <= hi;) {
        char low[MAX_DIGITS + 4], high[MAX_DIGITS + 4];
        int64_t to = 9; /* the last number of as many digits */
        while (to < from) to = to * 10 + 9;
        if (to > hi) to = hi;
        snprintf(low, sizeof low, "%" PRId64, from);
        snprintf(high, sizeof high, "%" PRId64, to);
        const int one = digits_between(g, low, high, next);
        all = all < 0 ? one : grammar_either(g, all, one);
        from = to + 1;
    }
    return all;
}

int range_grammar_add(grammar *g, int64_t lo, int64_t hi, int next) {
    const int above = hi < 0 ? -1 : magnitude(g, lo < 0 ? 0 : lo, hi, next);
    if (lo >= 0) return above;
    const int below = grammar_range(g, '-', '-', magnitude(g, hi < 0 ? -hi : 1, -lo, next));
    return above < 0 ? below : grammar_either(g, above, below);
}
