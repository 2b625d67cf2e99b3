/* harmony_testing.h - the small model's tokenizer, its control tokens, and harmony rendered,
 * decoded and fed to a parser, for the tests of both ways.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TEST_HARMONY_TESTING_H
#define KV8_TEST_HARMONY_TESTING_H

#include <kv8/harmony.h>

#include "testing.h"

#define TINY "models/tiny-gpt-oss/tokenizer.json"

enum { ROOM = 1 << 16 };
enum { START = 4088, END = 4089, MESSAGE = 4090, RETURN = 4084, CALL = 4094, EOT = 4081 };

static kv8_tokenizer *tiny;

static inline int setup(void **state) {
    (void)state;
    return kv8_tokenizer_open(&tiny, TINY) == KV8_OK ? 0 : -1;
}

static inline int teardown(void **state) {
    (void)state;
    kv8_tokenizer_close(tiny);
    return 0;
}

typedef struct ids {
    int32_t *data;
    size_t count;
} ids;

static inline ids render(const kv8_message *messages, size_t count,
                         const kv8_harmony_options *options) {
    ids out = {NULL, 0};
    assert_ok(kv8_harmony_render(tiny, messages, count, options, &out.data, &out.count));
    return out;
}

static inline ids control_text(const char *text) {
    ids out = {NULL, 0};
    assert_ok(kv8_tokenizer_encode(tiny, text, strlen(text), KV8_SPECIAL_AS_TOKENS, &out.data,
                                   &out.count));
    return out;
}

static inline void decode(const int32_t *data, size_t count, char *out) {
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *const bytes = kv8_tokenizer_token_bytes(tiny, data[i], &length);
        assert_non_null(bytes);
        assert_true(at + length < ROOM);
        memcpy(out + at, bytes, length);
        at += length;
    }
    out[at] = '\0';
}

/* Feeds ids, checks what every event promises, and returns the last stop. */
static inline int32_t feed(kv8_harmony_parser *parser, const int32_t *data, size_t count) {
    static char streamed[ROOM];
    size_t length = 0, streamed_idx = SIZE_MAX;
    int32_t stop = 0;
    for (size_t i = 0; i <= count; i++) {
        kv8_harmony_event event;
        assert_ok(i < count ? kv8_harmony_parser_push(parser, data[i], &event)
                            : kv8_harmony_parser_finish(parser, &event));
        assert_non_null(event.text);
        assert_int_equal(kv8_utf8_complete_length(event.text, event.text_length),
                         event.text_length);
        const size_t idx = (size_t)event.message_idx;
        const kv8_message *const message = kv8_harmony_parser_message(parser, idx);
        if (idx != streamed_idx) length = 0;
        streamed_idx = idx;
        assert_true(length + event.text_length < ROOM);
        memcpy(streamed + length, event.text, event.text_length);
        length += event.text_length;
        streamed[length] = '\0';
        if (message == NULL) {
            assert_int_equal(idx, kv8_harmony_parser_num_messages(parser));
            assert_int_equal(event.text_length, 0);
            assert_false(event.message_done);
        } else {
            assert_int_equal(idx, kv8_harmony_parser_num_messages(parser) - 1);
            assert_string_equal(message->content, streamed);
        }
        if (event.stop) stop = event.stop;
    }
    return stop;
}

#endif
