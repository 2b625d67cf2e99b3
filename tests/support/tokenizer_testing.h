/* tokenizer_testing.h - ids of a text, and what they decode to.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TOKENIZER_TESTING_H
#define KV8_TOKENIZER_TESTING_H

#include <kv8/tokenizer.h>

#include "testing.h"

typedef struct ids {
    int32_t *data;
    size_t count;
} ids;

static inline ids encode(const kv8_tokenizer *tokenizer, const char *text, size_t length,
                         kv8_special special) {
    ids out = {NULL, 0};
    assert_ok(kv8_tokenizer_encode(tokenizer, text, length, special, &out.data, &out.count));
    assert_non_null(out.data);
    return out;
}

static inline void assert_decodes_to(const kv8_tokenizer *tokenizer, ids got, const char *text,
                                     size_t length) {
    size_t at = 0;
    for (size_t i = 0; i < got.count; i++) {
        size_t token_length;
        const char *const token = kv8_tokenizer_token_bytes(tokenizer, got.data[i], &token_length);
        assert_non_null(token);
        assert_true(token_length <= length - at);
        assert_memory_equal(token, text + at, token_length);
        at += token_length;
    }
    assert_int_equal(at, length);
}

#endif
