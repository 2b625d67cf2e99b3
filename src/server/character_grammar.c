/* character_grammar.c - UTF-8 and the escapes of JSON as ranges of bytes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "character_grammar.h"

#include <stdio.h>
#include <string.h>

static int text(grammar *g, const char *string, int next) {
    return grammar_text(g, string, strlen(string), next);
}

/* One of two, of which the first may be none (-1). */
static int also(grammar *g, int all, int one) {
    return all < 0 ? one : grammar_either(g, all, one);
}

/* --- any character --- */

static int hex(grammar *g, int num, int next) {
    for (int i = 0; i < num; i++)
        next = grammar_either(
            g, grammar_range(g, '0', '9', next),
            grammar_either(g, grammar_range(g, 'a', 'f', next), grammar_range(g, 'A', 'F', next)));
    return next;
}

/* Four digits of a character: no D800 to DFFF. */
static int unit(grammar *g, int next) {
    const int three = hex(g, 3, next);
    const int after_d = grammar_range(g, '0', '7', hex(g, 2, next));
    int all = grammar_either(g, text(g, "d", after_d), text(g, "D", after_d));
    all = grammar_either(g, all, grammar_range(g, '0', '9', three));
    all = grammar_either(
        g, all,
        grammar_either(g, grammar_range(g, 'a', 'c', three), grammar_range(g, 'A', 'C', three)));
    return grammar_either(
        g, all,
        grammar_either(g, grammar_range(g, 'e', 'f', three), grammar_range(g, 'E', 'F', three)));
}

static int letters_of(grammar *g, const char *letters, int next) {
    int all = -1;
    for (; *letters != '\0'; letters++)
        all = also(g, all, grammar_range(g, *letters, *letters, next));
    return all;
}

int character_grammar_all(grammar *g, int next) {
    const int escape =
        grammar_either(g, text(g, "u", unit(g, next)), letters_of(g, "\"\\/bfnrt", next));
    return grammar_either(g, grammar_plain(g, (byte_set){0}, next),
                          grammar_range(g, '\\', '\\', escape));
}

int character_grammar_any(grammar *g, const char *letters, int next) {
    const int escape = letters_of(g, letters, next);
    return grammar_either(g, grammar_plain(g, (byte_set){0}, next),
                          grammar_range(g, '\\', '\\', escape));
}

/* --- characters of a range --- */

static int encode(int code, unsigned char out[4]) {
    const int length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char marks[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (int i = length - 1; i > 0; i--, code >>= 6) out[i] = (unsigned char)(0x80 | (code & 0x3f));
    out[0] = (unsigned char)(marks[length] | code);
    return length;
}

static int tails(grammar *g, int num, int next) {
    for (int i = 0; i < num; i++) next = grammar_range(g, 0x80, 0xbf, next);
    return next;
}

/* Bytes from lo to hi, of `num` both. */
static int bytes_between(grammar *g, const unsigned char *lo, const unsigned char *hi, int num,
                         int next) {
    static const unsigned char least[] = {0x80, 0x80, 0x80}, most[] = {0xbf, 0xbf, 0xbf};
    if (num == 0) return next;
    if (*lo == *hi)
        return grammar_range(g, *lo, *lo, bytes_between(g, lo + 1, hi + 1, num - 1, next));
    const bool lo_whole = memcmp(lo + 1, least, (size_t)num - 1) == 0;
    const bool hi_whole = memcmp(hi + 1, most, (size_t)num - 1) == 0;
    const int from = *lo + !lo_whole, to = *hi - !hi_whole;
    int all = -1;
    if (!lo_whole) all = grammar_range(g, *lo, *lo, bytes_between(g, lo + 1, most, num - 1, next));
    if (from <= to) all = also(g, all, grammar_range(g, from, to, tails(g, num - 1, next)));
    if (!hi_whole)
        all = also(g, all,
                   grammar_range(g, *hi, *hi, bytes_between(g, least, hi + 1, num - 1, next)));
    return all;
}

/* A control character, a quote or a backslash. */
static int escape(grammar *g, int code, int next) {
    static const char codes[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const char *const known = code > 0 ? strchr(codes, code) : NULL;
    char written[8] = {'\\'};
    if (known != NULL)
        written[1] = letters[known - codes];
    else
        snprintf(written, sizeof written, "\\u%04x", (unsigned)code & 0xffffu);
    return text(g, written, next);
}

/* The last code point written as this one is: as an escape, or in as many bytes. */
static int last_alike(int code) {
    static const int ends[] = {0x1f,  '"' - 1, '"',    '\\' - 1, '\\',          0x7f,
                               0x7ff, 0xd7ff,  0xdfff, 0xffff,   MAX_CODE_POINT};
    size_t i = 0;
    while (ends[i] < code) i++;
    return ends[i];
}

static void add_range(grammar *g, int lo, int hi, int *all, int next) {
    unsigned char from[4], to[4];
    const bool is_escape = lo < 0x20 || lo == '"' || lo == '\\';
    const bool is_half = lo >= 0xd800 && lo <= 0xdfff;
    const int length = encode(lo, from);
    encode(hi, to);
    for (int code = lo; is_escape && code <= hi; code++)
        *all = also(g, *all, escape(g, code, next));
    if (!is_escape && !is_half) *all = also(g, *all, bytes_between(g, from, to, length, next));
}

/* --- wide sets --- */

/* Characters of one first byte: the last one of those from `code` on. */
static int last_of_lead(int code) {
    const int low = code < 0x80 ? 0 : code < 0x800 ? 0x3f : code < 0x10000 ? 0xfff : 0x3ffff;
    const int last = code | low;
    return code < 0xd800 && last > 0xd7ff ? 0xd7ff : last < MAX_CODE_POINT ? last : MAX_CODE_POINT;
}

static bool covers(const code_range *ranges, int num, int lo, int hi) {
    for (int i = 0; i < num && lo <= hi; i++) {
        if (ranges[i].lo <= lo && ranges[i].hi >= lo) lo = ranges[i].hi + 1, i = -1;
    }
    return lo > hi;
}

static int lead_of(int code) {
    unsigned char bytes[4];
    encode(code, bytes);
    return bytes[0];
}

/* The first bytes of plain characters that are not all in the ranges; *num: of the others. */
static byte_set find_parts(const code_range *ranges, int num_ranges, int *num) {
    byte_set parts = {.bits = {~0ull, ~0ull, ~0ull, ~0ull}};
    *num = 0;
    for (int code = 0x20, last; code <= MAX_CODE_POINT; code = last + 1) {
        if (code == 0xd800) code = 0xe000;
        last = last_of_lead(code);
        if (code == '"' || code == '\\' || code == 0x7f) continue;
        if (!covers(ranges, num_ranges, code, last)) continue;
        const int lead = lead_of(code);
        parts.bits[lead >> 6] &= ~((uint64_t)1 << (lead & 63));
        ++*num;
    }
    return parts;
}

/* What a set takes of most first bytes is a plain character with exceptions; the rest, and small
 * sets, are ranges. */
int character_grammar_set(grammar *g, const code_range *ranges, int num, int next) {
    enum { WIDE = 16 };
    int num_whole = 0;
    byte_set parts = find_parts(ranges, num, &num_whole);
    const bool wide = num_whole >= WIDE;
    int all = wide ? grammar_plain(g, parts, next) : -1;
    for (int i = 0; i < num; i++) {
        for (int lo = ranges[i].lo, hi; lo <= ranges[i].hi; lo = hi + 1) {
            hi = wide ? last_of_lead(lo) : last_alike(lo);
            if (hi > ranges[i].hi) hi = ranges[i].hi;
            if (hi > last_alike(lo)) hi = last_alike(lo);
            if (!wide || byte_set_has(&parts, lead_of(lo))) add_range(g, lo, hi, &all, next);
        }
    }
    return all;
}
