/* pattern_grammar.c - a pattern is read into a tree, which is then made a grammar from its end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pattern_grammar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "character_grammar.h"

enum { MAX_NODES = 2048, MAX_RANGES = 4096, MAX_NESTING = 64, MAX_COUNT = 1024 };

typedef enum part_kind { EMPTY, SET, DOT, ANY, CAT, EITHER, REPEAT } part_kind;

/* ANY: any characters, of any number. SET: ranges[from .. to - 1]. CAT, EITHER: left and right.
 * REPEAT: left, min to max times; max -1 = any number. */
typedef struct part {
    part_kind kind;
    int left, right, min, max;
} part;

typedef struct pattern {
    const char *at; /* what is left to read */
    part parts[MAX_NODES];
    int num_parts, nesting;
    code_range ranges[MAX_RANGES];
    int num_ranges;
    pattern_facts *facts;
} pattern;

static int refuse(pattern *p, const char *what) {
    if (p->facts->refused[0] == '\0')
        snprintf(p->facts->refused, sizeof p->facts->refused, "%s", what);
    return -1;
}

static int add(pattern *p, part made) {
    if (p->num_parts == MAX_NODES) return refuse(p, "so long a pattern");
    p->parts[p->num_parts] = made;
    return p->num_parts++;
}

static int add_pair(pattern *p, part_kind kind, int left, int right) {
    if (left < 0 || right < 0) return -1;
    return add(p, (part){.kind = kind, .left = left, .right = right});
}

/* --- characters --- */

static int take_code_point(pattern *p) {
    const unsigned char *const s = (const unsigned char *)p->at;
    const int length = s[0] < 0x80 ? 1 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    int code = length == 1 ? s[0] : s[0] & (0x7f >> length);
    for (int i = 1; i < length; i++) code = code << 6 | (s[i] & 0x3f);
    p->at += length;
    return code;
}

static bool add_range(pattern *p, int lo, int hi) {
    if (p->num_ranges == MAX_RANGES) return refuse(p, "a pattern of so many classes") >= 0;
    p->ranges[p->num_ranges++] = (code_range){lo, hi};
    return true;
}

/* What is in none of the ranges from `from` on takes their place. */
static bool negate(pattern *p, int from) {
    code_range before[MAX_RANGES / 8];
    const int num = p->num_ranges - from;
    int next = 0;
    if (num > (int)(sizeof before / sizeof before[0]))
        return refuse(p, "a class of so many ranges") >= 0;
    memcpy(before, p->ranges + from, (size_t)num * sizeof before[0]);
    p->num_ranges = from;
    while (next <= MAX_CODE_POINT) {
        int begin = MAX_CODE_POINT + 1, end = next; /* of the next range that covers something */
        for (int i = 0; i < num; i++) {
            if (before[i].hi < next) continue;
            if (before[i].lo < begin) begin = before[i].lo;
        }
        if (begin > next && !add_range(p, next, begin - 1)) return false;
        end = begin > next ? begin : next;
        for (int i = 0; i < num; i++) {
            if (before[i].lo <= end && before[i].hi >= end) end = before[i].hi + 1, i = -1;
        }
        next = end;
    }
    return true;
}

/* \d, \w, \s and what they are not; false = another letter. Spaces of a class are ASCII's, but what
 * is no space is none of Unicode's. */
static bool take_class_letter(pattern *p, char letter, bool *good) {
    static const code_range spaces[] = {{9, 13},          {28, 32},         {0x85, 0x85},
                                        {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
                                        {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f},
                                        {0x3000, 0x3000}, {0xfeff, 0xfeff}};
    const int from = p->num_ranges;
    *good = true;
    switch (letter) {
        case 'd':
        case 'D': *good = add_range(p, '0', '9'); break;
        case 'w':
        case 'W':
            *good = add_range(p, '0', '9') && add_range(p, 'A', 'Z') && add_range(p, '_', '_') &&
                    add_range(p, 'a', 'z');
            break;
        case 's': *good = add_range(p, 9, 13) && add_range(p, ' ', ' '); break;
        case 'S':
            for (size_t i = 0; i < sizeof spaces / sizeof spaces[0] && *good; i++)
                *good = add_range(p, spaces[i].lo, spaces[i].hi);
            break;
        default: return false;
    }
    if (*good && letter < 'a') *good = negate(p, from);
    return true;
}

static int take_hex(pattern *p, int num) {
    int value = 0;
    for (int i = 0; i < num; i++, p->at++) {
        const char digit = *p->at;
        const int of = digit >= '0' && digit <= '9'   ? digit - '0'
                       : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                       : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                      : -1;
        if (of < 0) return refuse(p, "\\x or \\u without its digits");
        value = value * 16 + of;
    }
    if (num == 4 && value >= 0xd800 && value <= 0xdfff) return refuse(p, "half of a character");
    return value;
}

/* The character behind a backslash; -1 = refused. */
static int take_escape(pattern *p) {
    static const char letters[] = "tnrfv0", values[] = "\t\n\r\f\v";
    const char letter = *p->at;
    if (letter >= '1' && letter <= '9') return refuse(p, "a back reference");
    if (letter == 'k') return refuse(p, "a back reference");
    if (letter == 'b' || letter == 'B') return refuse(p, "\\b, a word's boundary");
    if (letter == 'p' || letter == 'P') return refuse(p, "\\p, a Unicode property");
    if (letter == '\0') return refuse(p, "a backslash at the end");
    const char *const found = strchr(letters, letter);
    if (found != NULL) {
        p->at++;
        return values[found - letters];
    }
    if (letter == 'x' || letter == 'u') {
        p->at++;
        return take_hex(p, letter == 'x' ? 2 : 4);
    }
    const bool is_word = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z');
    return is_word ? refuse(p, "an escape of an unknown letter") : take_code_point(p);
}

/* A character of a class; -1 = refused, -2 = \d and the like, whose ranges are added. */
static int take_class_item(pattern *p) {
    bool good;
    if (*p->at != '\\') return take_code_point(p);
    p->at++;
    if (take_class_letter(p, *p->at, &good)) {
        p->at++;
        return good ? -2 : -1;
    }
    if (*p->at == 'b') { /* in a class: backspace */
        p->at++;
        return '\b';
    }
    return take_escape(p);
}

/* Behind "[". */
static int take_class(pattern *p) {
    const int from = p->num_ranges;
    const bool inverse = *p->at == '^';
    p->at += inverse;
    while (*p->at != ']') {
        if (*p->at == '\0') return refuse(p, "a class without its end");
        const int lo = take_class_item(p);
        if (lo == -1) return -1;
        if (lo == -2) continue;
        int hi = lo;
        if (p->at[0] == '-' && p->at[1] != ']' && p->at[1] != '\0') {
            p->at++;
            hi = take_class_item(p);
            if (hi < lo) return refuse(p, "a class's range from high to low");
        }
        if (!add_range(p, lo, hi)) return -1;
    }
    p->at++;
    if (inverse && !negate(p, from)) return -1;
    if (p->num_ranges == from) return refuse(p, "an empty class");
    return add(p, (part){.kind = SET, .left = from, .right = p->num_ranges});
}

/* --- the syntax --- */

static int take_alternatives(pattern *p, bool is_whole);

/* Behind "(". */
static int take_group(pattern *p) {
    if (p->at[0] == '?') {
        if (p->at[1] == ':') {
            p->at += 2;
        } else if (p->at[1] == '<' && p->at[2] != '=' && p->at[2] != '!') {
            p->at += strcspn(p->at, ">");
            if (*p->at == '\0') return refuse(p, "a group without its end");
            p->at++;
        } else {
            return refuse(p, p->at[1] == '=' || p->at[1] == '!' ? "a look ahead"
                             : p->at[1] == '<'                  ? "a look behind"
                                                                : "a group with flags");
        }
    }
    if (++p->nesting > MAX_NESTING) return refuse(p, "groups nested so deeply");
    const int inside = take_alternatives(p, false);
    p->nesting--;
    if (inside < 0) return -1;
    if (*p->at != ')') return refuse(p, "a group without its end");
    p->at++;
    return inside;
}

static int take_character(pattern *p) {
    const int from = p->num_ranges;
    bool good = true;
    if (*p->at == '\\') {
        p->at++;
        if (take_class_letter(p, *p->at, &good)) {
            p->at++;
        } else {
            const int code = take_escape(p);
            good = code >= 0 && add_range(p, code, code);
        }
    } else {
        const int code = take_code_point(p);
        good = add_range(p, code, code);
    }
    return good ? add(p, (part){.kind = SET, .left = from, .right = p->num_ranges}) : -1;
}

static int take_atom(pattern *p) {
    switch (*p->at) {
        case '(': p->at++; return take_group(p);
        case '[': p->at++; return take_class(p);
        case '.': p->at++; return add(p, (part){.kind = DOT});
        case '^':
        case '$': return refuse(p, "^ or $ within a pattern");
        case '*':
        case '+':
        case '?': return refuse(p, "a quantifier of nothing");
        default: return take_character(p);
    }
}

/* "{2,3}": false = it is no quantifier. */
static bool read_braces(const char *at, int *min, int *max, int *length) {
    int used = 0;
    if (sscanf(at, "{%4d}%n", min, &used) == 1 && used > 0) {
        *max = *min;
    } else if (sscanf(at, "{%4d,}%n", min, &used) == 1 && used > 0) {
        *max = -1;
    } else if (sscanf(at, "{%4d,%4d}%n", min, max, &used) != 2 || used == 0) {
        return false;
    }
    *length = used;
    return *min >= 0;
}

static int take_quantified(pattern *p) {
    const int inside = take_atom(p);
    int min = 1, max = 1, length = 1;
    if (inside < 0) return -1;
    switch (*p->at) {
        case '*': min = 0, max = -1; break;
        case '+': max = -1; break;
        case '?': min = 0; break;
        case '{':
            if (!read_braces(p->at, &min, &max, &length)) return inside;
            break;
        default: return inside;
    }
    if (min > MAX_COUNT || max > MAX_COUNT || (max >= 0 && max < min))
        return refuse(p, "a quantifier from high to low, or above 1024");
    p->at += length;
    p->at += *p->at == '?'; /* lazy: the same strings */
    return add(p, (part){.kind = REPEAT, .left = inside, .min = min, .max = max});
}

/* Up to "|", ")" or the end. */
static int take_sequence(pattern *p, bool is_whole) {
    const bool from_start = !is_whole || *p->at == '^';
    if (is_whole && *p->at == '^') p->at++;
    int all = add(p, (part){.kind = from_start ? EMPTY : ANY});
    while (all >= 0 && *p->at != '\0' && *p->at != '|' && *p->at != ')') {
        const bool ends = *p->at == '$' && (p->at[1] == '\0' || p->at[1] == '|');
        if (is_whole && ends) break;
        all = add_pair(p, CAT, all, take_quantified(p));
    }
    if (!is_whole) return all;
    if (*p->at == '$') {
        p->at++;
        return all;
    }
    return add_pair(p, CAT, all, add(p, (part){.kind = ANY}));
}

static int take_alternatives(pattern *p, bool is_whole) {
    int all = take_sequence(p, is_whole);
    while (all >= 0 && *p->at == '|') {
        p->at++;
        all = add_pair(p, EITHER, all, take_sequence(p, is_whole));
    }
    return all;
}

/* --- lengths --- */

/* Far above what a string may be asked to have. */
enum { MANY = 1 << 20 };

static int sum_of(int a, int b) {
    return a < 0 || b < 0 ? -1 : a + b < MANY ? a + b : -1;
}

static void measure(const pattern *p, int idx, int *min, int *max) {
    const part *const at = &p->parts[idx];
    int left_min = 0, left_max = 0, right_min = 0, right_max = 0;
    if (at->kind >= CAT) measure(p, at->left, &left_min, &left_max);
    if (at->kind == CAT || at->kind == EITHER) measure(p, at->right, &right_min, &right_max);
    switch (at->kind) {
        case EMPTY: *min = *max = 0; break;
        case SET:
        case DOT: *min = *max = 1; break;
        case ANY: *min = 0, *max = -1; break;
        case CAT:
            *min = left_min + right_min < MANY ? left_min + right_min : MANY;
            *max = sum_of(left_max, right_max);
            break;
        case EITHER:
            *min = left_min < right_min ? left_min : right_min;
            *max = left_max < 0 || right_max < 0 ? -1 : left_max > right_max ? left_max : right_max;
            break;
        case REPEAT:
            *min = 0, *max = at->max < 0 && left_max != 0 ? -1 : 0;
            for (int i = 0; i < at->min && *min < MANY; i++) *min += left_min;
            for (int i = 0; i < at->max && left_max != 0; i++) *max = sum_of(*max, left_max);
            break;
    }
}

/* --- the grammar --- */

static int emit(grammar *g, const pattern *p, int idx, int next);

static int emit_repeat(grammar *g, const pattern *p, const part *at, int next) {
    const int rule = grammar_add_rule(g);
    int all = next;
    grammar_set_rule(g, rule, emit(g, p, at->left, grammar_end(g)));
    if (at->max < 0) {
        all = grammar_open(g);
        grammar_close(g, all, grammar_call(g, rule, all), next);
    }
    for (int i = at->max < 0 ? at->min : at->max; i > 0; i--) {
        all = grammar_call(g, rule, all);
        if (i > at->min) all = grammar_either(g, all, next);
    }
    return all;
}

static int emit_any(grammar *g, int next) {
    const int loop = grammar_open(g);
    grammar_close(g, loop, character_grammar_any(g, "\"\\/bfnrt", loop), next);
    return loop;
}

static int emit(grammar *g, const pattern *p, int idx, int next) {
    const part *const at = &p->parts[idx];
    switch (at->kind) {
        case EMPTY: return next;
        case SET: return character_grammar_set(g, p->ranges + at->left, at->right - at->left, next);
        case DOT: return character_grammar_any(g, "\"\\/bft", next);
        case ANY: return emit_any(g, next);
        case CAT: return emit(g, p, at->left, emit(g, p, at->right, next));
        case EITHER:
            return grammar_either(g, emit(g, p, at->left, next), emit(g, p, at->right, next));
        case REPEAT: return emit_repeat(g, p, at, next);
    }
    return next;
}

int pattern_grammar_add(grammar *g, const char *text, int next, pattern_facts *facts) {
    pattern *const p = calloc(1, sizeof *p);
    *facts = (pattern_facts){0};
    if (p == NULL) {
        snprintf(facts->refused, sizeof facts->refused, "a pattern: no memory");
        return -1;
    }
    p->at = text;
    p->facts = facts;
    const int whole = take_alternatives(p, true);
    if (whole >= 0 && *p->at != '\0') refuse(p, "\")\" without \"(\"");
    int entry = -1;
    if (facts->refused[0] == '\0') {
        measure(p, whole, &facts->min, &facts->max);
        entry = emit(g, p, whole, next);
    }
    free(p);
    return entry;
}

/* --- formats --- */

#define YEAR4                                                     \
    "(?:\\d\\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|" \
    "[13579][26])00)"
#define DATE                                                                       \
    "(?:\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[" \
    "1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))|" YEAR4 "-02-29)"
#define TIME                                                               \
    "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?(?:Z|[+-](?:[01]" \
    "\\d|2[0-3]):[0-5]\\d)"
#define OCTET    "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define IPV4     OCTET "(?:\\." OCTET "){3}"
#define H16      "[0-9a-fA-F]{1,4}"
#define LABEL    "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOSTNAME LABEL "(?:\\." LABEL "){0,3}"

const char *pattern_of_format(const char *format) {
    static const char *const known[][2] = {
        {"date", "^" DATE "$"},
        {"time", "^" TIME "$"},
        {"date-time", "^" DATE "T" TIME "$"},
        {"duration",
         "^P(?:\\d{1,9}W|(?:\\d{1,9}Y(?:\\d{1,9}M(?:\\d{1,9}D)?)?|\\d{1,9}M(?:\\d{1,9}D)?|\\d{1,"
         "9}D)(?:T(?:\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|\\d{1,9}S))?|T(?"
         ":"
         "\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|\\d{1,9}S))$"},
        {"uuid", "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"},
        {"ipv4", "^" IPV4 "$"},
        {"ipv6", "^(?:(?:" H16 ":){7}" H16 "|(?:" H16 ":){1,6}:" H16 "|(?:" H16 ":){1,5}(?::" H16
                 "){1,2}|::(?:" H16 ":){0,6}" H16 "|(?:" H16 ":){1,7}:|::)$"},
        {"hostname", "^" HOSTNAME "$"},
        {"email", "^[A-Za-z0-9_+-]+(?:\\.[A-Za-z0-9_+-]+)*@" HOSTNAME "$"},
        {"uri", "^[a-z][a-z0-9+.-]*://" HOSTNAME
                "(?::\\d{1,4})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*(?:\\?[A-Za-z0-9._~!$&'()*+,;=:@"
                "/-]*)?(?:#[A-Za-z0-9._~!$&'()*+,;=:@/-]*)?$"},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(format, known[i][0]) == 0) return known[i][1];
    }
    return NULL;
}
