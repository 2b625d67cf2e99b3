/* test_tokenizer_words.c - a tokenizer of words: each id has a token of its own, a word is one
 * token, and no byte is lost.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tokenizer_testing.h"

static void words_are_tokens(void **state) {
    (void)state;
    static const int32_t sizes[] = {265, 4096, 201088};
    static const char text[] = " bababa and \xc3\xa9 42, not <|end|>!\n";
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        kv8_tokenizer *tokenizer = NULL;
        assert_ok(kv8_tokenizer_create_words(&tokenizer, sizes[i]));
        assert_int_equal(kv8_tokenizer_vocab_size(tokenizer), sizes[i]);
        const int32_t end = kv8_tokenizer_special_id(tokenizer, "<|end|>");
        assert_int_equal(end, sizes[i] == 201088 ? 200007 : sizes[i] - 3);
        for (int32_t id = 0; id < sizes[i]; id += id < 300 ? 1 : 97) {
            size_t length = 0;
            const char *const token = kv8_tokenizer_token_bytes(tokenizer, id, &length);
            assert_non_null(token);
            if (id < 256 || kv8_tokenizer_is_special(tokenizer, id)) continue;
            const ids got = encode(tokenizer, token, length, KV8_SPECIAL_AS_TEXT);
            assert_int_equal(got.count, 1);
            assert_int_equal(got.data[0], id);
            kv8_free(got.data);
        }
        const ids got = encode(tokenizer, text, sizeof text - 1, KV8_SPECIAL_AS_TEXT);
        assert_decodes_to(tokenizer, got, text, sizeof text - 1);
        kv8_free(got.data);
        kv8_tokenizer_close(tokenizer);
    }
    kv8_tokenizer *tokenizer = NULL;
    assert_refused(kv8_tokenizer_create_words(&tokenizer, 264), KV8_ERR_INVALID, "264");
    assert_refused(kv8_tokenizer_create_words(&tokenizer, 1000001), KV8_ERR_INVALID, "1000001");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_are_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
