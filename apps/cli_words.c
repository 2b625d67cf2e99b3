/* cli_words.c - words that a user types: which of the known ones, which of them a misspelt one is
 * near to, and KV settings.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "cli.h"

enum { MAX_WORD = 40 };

static int least(int a, int b) {
    return a < b ? a : b;
}

/* Insertions, deletions, replacements and swaps of neighbours that make one word of the other
 * (optimal string alignment); more than any word has for words too long. */
static int distance(const char *a, const char *b) {
    const size_t rows = strlen(a), columns = strlen(b);
    int d[MAX_WORD + 1][MAX_WORD + 1];
    if (rows > MAX_WORD || columns > MAX_WORD) return MAX_WORD + 1;
    for (size_t i = 0; i <= rows; i++) {
        for (size_t j = 0; j <= columns; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = (int)(i + j);
                continue;
            }
            d[i][j] = least(least(d[i - 1][j], d[i][j - 1]) + 1,
                            d[i - 1][j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = least(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[rows][columns];
}

const char *cli_nearest(const char *word, const char *const names[], size_t num) {
    const char *nearest = NULL;
    int nearest_distance = 3; /* two slips at most, and fewer than the word has letters */
    for (size_t i = 0; i < num; i++) {
        const int found = distance(word, names[i]);
        if (found >= nearest_distance || (size_t)found * 2 > strlen(names[i])) continue;
        nearest = names[i];
        nearest_distance = found;
    }
    return nearest;
}

int cli_word(const char *option, const char *text, const char *const names[], size_t num) {
    char known[512] = "";
    for (size_t i = 0, at = 0; i < num && at < sizeof known; i++) {
        if (strcmp(text, names[i]) == 0) return (int)i;
        const char *const before = i == 0 ? "" : i + 1 < num ? ", " : " or ";
        at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", before, names[i]);
    }
    const char *const nearest = cli_nearest(text, names, num);
    cli_fail("--%s is \"%s\", must be %s%s%s%s", option, text, known,
             nearest == NULL ? "" : "; did you mean ", nearest == NULL ? "" : nearest,
             nearest == NULL ? "" : "?");
    return -1;
}

/* --- KV settings --- */

/* What stands between the signs of "k=int8,v=e4m3@full": dtypes and these. */
static const char *const kv_words[] = {"full", "k", "v", "sliding"};
enum {
    NUM_DTYPES = KV8_DTYPE_COUNT - 1 - KV8_DTYPE_NONE,
    NUM_KV_WORDS = NUM_DTYPES + sizeof kv_words / sizeof kv_words[0]
};

/* The first word of a list that is none, and what it may have been meant to be; NULL = nothing. */
static const char *nearest_kv_word(const char *text) {
    static const char signs[] = ",=@";
    const char *known_words[NUM_KV_WORDS];
    for (int i = 0; i < NUM_KV_WORDS; i++)
        known_words[i] = i < NUM_DTYPES ? kv8_dtype_name((kv8_dtype)(KV8_DTYPE_NONE + 1 + i))
                                        : kv_words[i - NUM_DTYPES];
    for (text += strspn(text, signs); *text != '\0'; text += strspn(text, signs)) {
        char word[MAX_WORD] = "";
        const size_t length = strcspn(text, signs);
        snprintf(word, sizeof word, "%.*s", (int)least((int)length, MAX_WORD), text);
        size_t known = 0;
        while (known < NUM_KV_WORDS && strcmp(known_words[known], word) != 0) known++;
        if (known == NUM_KV_WORDS) return cli_nearest(word, known_words, NUM_KV_WORDS);
        text += length;
    }
    return NULL;
}

int cli_fail_kv(const char *text) {
    const char *const nearest = nearest_kv_word(text);
    if (nearest == NULL) return cli_fail("%s", kv8_status_message());
    return cli_fail("%s; did you mean %s?", kv8_status_message(), nearest);
}

int cli_parse_kv(const char *text, kv8_kv_setting *settings_out, int32_t capacity,
                 int32_t *num_out) {
    const kv8_status status = kv8_kv_setting_parse_list(text, settings_out, capacity, num_out);
    return status == KV8_OK ? CLI_OK : cli_fail_kv(text);
}
