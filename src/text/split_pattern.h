/* split_pattern.h - the pre-tokenizer's regular expression, compiled by PCRE2, and its matches in
 * a text. Knows nothing of tokens.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SPLIT_PATTERN_H
#define KV8_SPLIT_PATTERN_H

#include "base_impl.h"

/* A compiled pattern: read only after compile, shared by all threads. */
typedef struct kv8_split_pattern {
    void *code; /* pcre2_code */
    bool jit;
} kv8_split_pattern;

/* Unicode semantics throughout. \s and \S mean Unicode's White_Space (PCRE2's own \s also takes
 * U+180E). A pattern that does not compile, or that could match nothing, is KV8_ERR_UNSUPPORTED. */
kv8_status kv8_split_pattern_compile(kv8_split_pattern *pattern_out, const char *text,
                                     size_t length);
void kv8_split_pattern_free(kv8_split_pattern *pattern);

/* One caller's matching state. */
typedef struct kv8_splitter {
    const kv8_split_pattern *pattern;
    void *match_data, *context, *jit_stack;
} kv8_splitter;
kv8_status kv8_splitter_open(kv8_splitter *splitter_out, const kv8_split_pattern *pattern);
void kv8_splitter_close(kv8_splitter *splitter);

/* The first match at or after `start` in valid UTF-8; *begin_out == *end_out == length when there
 * is none. A text on which the pattern backtracks beyond all reason is KV8_ERR_UNSUPPORTED. */
kv8_status kv8_splitter_next(const kv8_splitter *splitter, const char *text, size_t length,
                             size_t start, size_t *begin_out, size_t *end_out);

#endif
