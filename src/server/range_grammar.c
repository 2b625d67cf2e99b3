/* range_grammar.c - whole numbers from one to another: by their number of digits, and of one number
 * of digits by the first in which the ends differ. Decimals: whole parts strictly between the ends
 * have any fraction, that of an end a fraction from or up to the end's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "range_grammar.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
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

/* --- decimals --- */

enum { MAX_FRACTION = 16 };

bool range_grammar_write(range_end *end) {
    char text[64];
    const double value = fabs(end->value);
    int digits = 0;
    if (!(value <= (double)RANGE_LIMIT)) return false;
    do {
        snprintf(text, sizeof text, "%.*f", digits, value);
    } while (strtod(text, NULL) != value && ++digits <= MAX_FRACTION);
    if (digits > MAX_FRACTION) return false;
    char *const point = strchr(text, '.');
    if (point != NULL) *point = '\0';
    snprintf(end->whole, sizeof end->whole, "%.20s", text);
    snprintf(end->fraction, sizeof end->fraction, "%.20s", point == NULL ? "" : point + 1);
    return true;
}

/* A number that is written: its ends, of which one that is not given bounds nothing. */
typedef struct decimals {
    grammar *g;
    const range_end *lo, *hi;
    int next;
} decimals;

static int also(const decimals *d, int all, int one) {
    return all < 0 ? one : one < 0 ? all : grammar_either(d->g, all, one);
}

static int digit(const decimals *d, int from, int to, int rest) {
    return rest < 0 || from > to ? -1 : grammar_range(d->g, '0' + from, '0' + to, rest);
}

/* What an end has of digits: NULL = the number has left it already. Zeros are not written. */
static int first_of(const char *end) {
    return *end == '\0' ? 0 : *end - '0';
}
static const char *behind_first(const char *end) {
    return *end == '\0' ? end : end + 1;
}

/* Whether the number may stop where so much of the ends is left. */
static bool may_stop(const decimals *d, const char *lo, const char *hi) {
    return (lo == NULL || (*lo == '\0' && !d->lo->outside)) &&
           (hi == NULL || *hi != '\0' || !d->hi->outside);
}

/* Up to `left` digits of a fraction that keep the number between what is left of the ends. */
static int digits_within(const decimals *d, const char *lo, const char *hi, int left,
                         bool is_first) {
    int all = !is_first && may_stop(d, lo, hi) ? d->next : -1;
    const int low = lo == NULL ? -1 : first_of(lo), high = hi == NULL ? 10 : first_of(hi);
    if (left == 0 || low > high) return all;
    const char *const lo_rest = lo == NULL ? NULL : behind_first(lo);
    const char *const hi_rest = hi == NULL ? NULL : behind_first(hi);
    if (low == high)
        return also(d, all,
                    digit(d, low, low, digits_within(d, lo_rest, hi_rest, left - 1, false)));
    if (low + 1 < high)
        all = also(d, all,
                   digit(d, low + 1, high - 1, digits_within(d, NULL, NULL, left - 1, false)));
    if (lo != NULL)
        all = also(d, all, digit(d, low, low, digits_within(d, lo_rest, NULL, left - 1, false)));
    if (hi != NULL)
        all = also(d, all, digit(d, high, high, digits_within(d, NULL, hi_rest, left - 1, false)));
    return all;
}

/* What follows a whole part that is as far as that of an end, or of none. */
static int fraction(const decimals *d, bool at_low, bool at_high) {
    const char *const lo = at_low ? d->lo->fraction : NULL, *const hi =
                                                                at_high ? d->hi->fraction : NULL;
    const int digits = digits_within(d, lo, hi, MAX_FRACTION, true);
    const int point = digits < 0 ? -1 : grammar_range(d->g, '.', '.', digits);
    return also(d, may_stop(d, lo, hi) ? d->next : -1, point);
}

static int whole_parts(const decimals *d, int64_t lo, int64_t hi, int rest) {
    return lo > hi || rest < 0 ? -1 : magnitude(d->g, lo, hi, rest);
}

/* Numbers from 0 on. */
static int magnitudes(grammar *g, const range_end *lo, const range_end *hi, int next) {
    const decimals d = {g, lo, hi, next};
    const int64_t least = lo->given ? strtoll(lo->whole, NULL, 10) : 0;
    const int64_t most = hi->given ? strtoll(hi->whole, NULL, 10) : RANGE_LIMIT;
    if (least == most) return whole_parts(&d, least, most, fraction(&d, lo->given, hi->given));
    int all = whole_parts(&d, least, least, fraction(&d, lo->given, false));
    all = also(&d, all, whole_parts(&d, least + 1, most - 1, fraction(&d, false, false)));
    return also(&d, all, whole_parts(&d, most, most, fraction(&d, false, hi->given)));
}

int range_grammar_add_decimals(grammar *g, const range_end *lo, const range_end *hi, int next) {
    static const range_end zero = {.given = true, .whole = "0"};
    static const range_end above_zero = {.given = true, .outside = true, .whole = "0"};
    const decimals d = {g, lo, hi, next};
    const bool has_negative = !lo->given || lo->value < 0,
               has_positive = !hi->given || hi->value >= 0;
    int all = -1;
    if (lo->given && hi->given && lo->value > hi->value) return -1;
    if (has_positive) all = magnitudes(g, has_negative ? &zero : lo, hi, next);
    if (!has_negative) return all;
    const int below = magnitudes(g, has_positive ? &above_zero : hi, lo, next);
    return also(&d, all, below < 0 ? -1 : grammar_range(g, '-', '-', below));
}
