/* fuzz_tokenizer.c - foreign bytes as tokenizer.json, as text, as what a model writes. The first
 * byte says which; the rest is the input.
 *
 *   'j'  JSON: loads or is refused; if it loads, a text must come back from its ids
 *   't'  text: valid UTF-8 comes back from its ids, as text and with special tokens; and as a
 *        user's message it renders
 *   'i'  two bytes an id: the harmony parser takes them all
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kv8/harmony.h>

/* Not assert(): the checks are the harness, in every build. */
static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_tokenizer: %s: %s\n", what, kv8_status_message());
    abort();
}

static const kv8_tokenizer *tiny(void) {
    static kv8_tokenizer *tokenizer;
    if (tokenizer == NULL)
        must(kv8_tokenizer_open(&tokenizer, KV8_TINY_TOKENIZER) == KV8_OK, "tiny tokenizer");
    return tokenizer;
}

static void check_round_trip(const kv8_tokenizer *tokenizer, const char *text, size_t length,
                             kv8_special special) {
    int32_t *ids = NULL;
    size_t count = 0, at = 0;
    /* Refused for what it is (UTF-8) or for what its pattern costs: both fine. */
    if (kv8_tokenizer_encode(tokenizer, text, length, special, &ids, &count) != KV8_OK) return;
    for (size_t i = 0; i < count; i++) {
        size_t token_length;
        const char *const bytes = kv8_tokenizer_token_bytes(tokenizer, ids[i], &token_length);
        must(bytes != NULL && token_length <= length - at, "token length");
        must(memcmp(bytes, text + at, token_length) == 0, "token bytes");
        must(special == KV8_SPECIAL_AS_TOKENS || !kv8_tokenizer_is_special(tokenizer, ids[i]),
             "special token out of plain text");
        at += token_length;
    }
    must(at == length, "bytes lost");
    kv8_free(ids);
}

static void fuzz_json(const char *json, size_t length) {
    static const char text[] = "a b ab  AB'll <|end|> <x>y 123\n\n \xc3\xa9\xe6\xbc\xa2";
    kv8_tokenizer *tokenizer;
    if (kv8_tokenizer_parse(&tokenizer, json, length, "fuzz") != KV8_OK) {
        must(tokenizer == NULL, "tokenizer after failure");
        must(kv8_status_message()[0] != '\0', "message after failure");
        return;
    }
    check_round_trip(tokenizer, text, sizeof text - 1, KV8_SPECIAL_AS_TEXT);
    check_round_trip(tokenizer, text, sizeof text - 1, KV8_SPECIAL_AS_TOKENS);
    kv8_tokenizer_close(tokenizer);
}

static void fuzz_text(const char *text, size_t length) {
    check_round_trip(tiny(), text, length, KV8_SPECIAL_AS_TEXT);
    check_round_trip(tiny(), text, length, KV8_SPECIAL_AS_TOKENS);
    must(kv8_utf8_complete_length(text, length) + 3 >= length, "held back too much");
    char *const content = malloc(length + 1);
    must(content != NULL, "memory");
    memcpy(content, text, length);
    content[length] = '\0';
    const kv8_message message = {.role = KV8_ROLE_USER, .content = content};
    int32_t *ids = NULL;
    size_t count = 0;
    if (kv8_harmony_render(tiny(), &message, 1, NULL, &ids, &count) == KV8_OK) kv8_free(ids);
    free(content);
}

static void check_event(const kv8_harmony_parser *parser, const kv8_harmony_event *event) {
    must(kv8_utf8_complete_length(event->text, event->text_length) == event->text_length,
         "half a character");
    must((size_t)event->message_idx <= kv8_harmony_parser_num_messages(parser), "message_idx");
}

static void fuzz_ids(const uint8_t *data, size_t size) {
    kv8_harmony_parser *parser;
    kv8_harmony_event event;
    must(kv8_harmony_parser_create(&parser, tiny()) == KV8_OK, "create");
    for (size_t i = 0; i + 1 < size; i += 2) {
        const int32_t id = (data[i] << 8 | data[i + 1]) % 4100;
        must(kv8_harmony_parser_push(parser, id, &event) == KV8_OK, "push");
        check_event(parser, &event);
    }
    must(kv8_harmony_parser_finish(parser, &event) == KV8_OK, "finish");
    check_event(parser, &event);
    kv8_harmony_parser_destroy(parser);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    const char *const rest = (const char *)data + 1;
    if (data[0] == 'j') fuzz_json(rest, size - 1);
    if (data[0] == 't') fuzz_text(rest, size - 1);
    if (data[0] == 'i') fuzz_ids(data + 1, size - 1);
    return 0;
}
