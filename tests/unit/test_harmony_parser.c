/* test_harmony_parser.c - harmony parsed: against the format's own text, with what a model should
 * not write, and against the renderer (a rendered conversation parses back).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "harmony_testing.h"

/* "role|name|recipient|channel|content_type|content" of every message, one a line. */
static char *describe(const kv8_harmony_parser *parser) {
    static char text[ROOM];
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    text[0] = '\0';
    for (size_t i = 0; i < kv8_harmony_parser_num_messages(parser); i++) {
        const kv8_message *const m = kv8_harmony_parser_message(parser, i);
        const size_t at = strlen(text);
        snprintf(text + at, ROOM - at, "%s%s|%s|%s|%s|%s|%s", i > 0 ? "\n" : "", roles[m->role],
                 m->name ? m->name : "-", m->recipient ? m->recipient : "-",
                 m->channel ? m->channel : "-", m->content_type ? m->content_type : "-",
                 m->content);
    }
    return text;
}

static void assert_parses(const char *output, const char *wanted, int32_t wanted_stop) {
    const ids text = control_text(output);
    kv8_harmony_parser *parser;
    assert_ok(kv8_harmony_parser_create(&parser, tiny));
    const int32_t stop = feed(parser, text.data, text.count);
    if (strcmp(describe(parser), wanted) != 0 || stop != wanted_stop)
        fail_msg("%s\ngives   %s (stop %d)\nwanted  %s (stop %d)", output, describe(parser), stop,
                 wanted, wanted_stop);
    kv8_harmony_parser_destroy(parser);
    kv8_free(text.data);
}

static void output_as_documented(void **state) {
    (void)state;
    assert_parses(
        "<|channel|>analysis<|message|>User asks: \"What is 2 + 2?\" Simple arithmetic. "
        "Provide answer.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4."
        "<|return|>",
        "assistant|-|-|analysis|-|User asks: \"What is 2 + 2?\" Simple arithmetic. "
        "Provide answer.\nassistant|-|-|final|-|2 + 2 = 4.",
        RETURN);
    assert_parses(
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        "{\"location\": \"Rome\"}<|call|>",
        "assistant|-|functions.get_weather|commentary|json|{\"location\": \"Rome\"}", CALL);
    assert_parses(
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>ok"
        "<|end|><|start|>user:ann<|message|>Hi<|end|>",
        "tool|functions.get_weather|assistant|commentary|-|ok\nuser|ann|-|-|-|Hi", 0);
}

static void header_variants(void **state) {
    (void)state;
    static const char wanted[] = "assistant|-|functions.f|commentary|json|{}";
    static const char *const headers[] = {
        "<|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>commentary to=functions.f <|constrain|> json",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary functions.f json",
        "<|channel|>commentary <|constrain|>json to=functions.f",
        " to=functions.f<|channel|>commentary json",
        " to=functions.f<|channel|>commentary <|constrain|>json",
        "to=functions.f<|channel|> commentary<|constrain|>json",
        "assistant to=functions.f<|channel|>commentary <|constrain|>json",
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json",
        "<|start|> to=functions.f<|channel|>commentary <|constrain|>json",
        "<|start|><|channel|>commentary to=functions.f <|constrain|>json",
        "<|channel|>commentary<|channel|> to=functions.f <|constrain|>json",
        "<|reserved_200000|><|channel|>commentary to=functions.f json",
    };
    char output[256];
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        snprintf(output, sizeof output, "%s<|message|>{}<|call|>", headers[i]);
        assert_parses(output, wanted, CALL);
    }
    assert_parses("<|channel|>commentary functions.f<|message|>{}<|call|>",
                  "assistant|-|functions.f|commentary|-|{}", CALL);
    assert_parses("<|channel|>analysis to=python code<|message|>1+1<|call|>",
                  "assistant|-|python|analysis|code|1+1", CALL);
    assert_parses("<|channel|>analysis code<|message|>1<|end|>", "assistant|-|-|analysis|code|1",
                  0);
    assert_parses("<|message|>bare<|return|>", "assistant|-|-|-|-|bare", RETURN);
    /* The prompt said who speaks. */
    assert_parses("user<|channel|>final<|message|>x<|end|>", "assistant|-|-|final|-|x", 0);
    assert_parses("<|channel|>musing<|message|>x<|return|>", "assistant|-|-|musing|-|x", RETURN);
}

static void malformed_output_becomes_content(void **state) {
    (void)state;
    assert_parses("", "", 0);
    assert_parses("<|return|>", "", RETURN);
    assert_parses("<|end|><|end|><|start|>assistant<|endoftext|>", "", EOT);
    assert_parses(" Just an answer.\n<|return|>", "assistant|-|-|-|-| Just an answer.\n", RETURN);
    assert_parses(" user said so", "assistant|-|-|-|-| user said so", 0);
    assert_parses("<|start|>assistant Hello there<|return|>", "assistant|-|-|-|-|Hello there",
                  RETURN);
    assert_parses("<|start|>Hello there<|return|>", "assistant|-|-|-|-|Hello there", RETURN);
    assert_parses("<|channel|>final Hello  there<|return|>", "assistant|-|-|final|-|Hello  there",
                  RETURN);
    assert_parses("<|channel|>commentary to=functions.f {\"a\": 1}<|call|>",
                  "assistant|-|functions.f|commentary|-|{\"a\": 1}", CALL);
    assert_parses("<|channel|>ana", "assistant|-|-|ana|-|", 0);
    assert_parses("<|channel|>analysis<|message|>cut off", "assistant|-|-|analysis|-|cut off", 0);
    /* The end of a message forgotten. */
    assert_parses("<|channel|>analysis<|message|>hm<|channel|>final<|message|>yes<|return|>",
                  "assistant|-|-|analysis|-|hm\nassistant|-|-|final|-|yes", RETURN);
    assert_parses(
        "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>yes",
        "assistant|-|-|analysis|-|hm\nassistant|-|-|final|-|yes", 0);
    assert_parses("Hello<|start|>assistant<|channel|>final<|message|>yes",
                  "assistant|-|-|-|-|Hello\nassistant|-|-|final|-|yes", 0);
    /* Control tokens that mean nothing inside a content. */
    assert_parses("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|reserved_200001|>d",
                  "assistant|-|-|final|-|abcd", 0);
    /* Text after <|end|> without <|start|>. */
    assert_parses("<|channel|>final<|message|>a<|end|>b<|return|>",
                  "assistant|-|-|final|-|a\nassistant|-|-|-|-|b", RETURN);
}

static void endless_header_is_content(void **state) {
    (void)state;
    enum { LENGTH = 20000 };
    static char output[LENGTH + 32], wanted[LENGTH + 64];
    char *const text = output;
    for (int i = 0; i < LENGTH; i++) text[i] = i % 7 == 6 ? ' ' : 'w';
    text[LENGTH] = '\0';
    snprintf(wanted, sizeof wanted, "assistant|-|-|-|-|%s", text);
    strcat(output, "<|end|>");
    assert_parses(output, wanted, 0);
}

/* Single bytes, as a model may write them: nothing is shown before its character is whole. */
static void bytes_become_whole_characters(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *wanted;
    } cases[] = {
        {"a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z", "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z"},
        {"a\x80z", "a\xef\xbf\xbdz"},
        {"\xe2\x82z", "\xef\xbf\xbdz"},
        {"\xe2\x82", "\xef\xbf\xbd"},
        {"\xf0\x9f\x98\xc3\xa9", "\xef\xbf\xbd\xc3\xa9"},
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    };
    int32_t byte_ids[256];
    for (int32_t id = 0; id < 4080; id++) {
        size_t length;
        const char *const bytes = kv8_tokenizer_token_bytes(tiny, id, &length);
        if (length == 1) byte_ids[(uint8_t)bytes[0]] = id;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t data[32];
        size_t count = 0;
        data[count++] = MESSAGE;
        for (const char *c = cases[i].bytes; *c != '\0'; c++) data[count++] = byte_ids[(uint8_t)*c];
        kv8_harmony_parser *parser;
        assert_ok(kv8_harmony_parser_create(&parser, tiny));
        feed(parser, data, count);
        assert_string_equal(kv8_harmony_parser_message(parser, 0)->content, cases[i].wanted);
        kv8_harmony_parser_destroy(parser);
    }
    const int32_t odd[] = {MESSAGE, byte_ids[0], byte_ids[0xe2], 4096, 2000000000, END};
    kv8_harmony_parser *parser;
    assert_ok(kv8_harmony_parser_create(&parser, tiny));
    feed(parser, odd, sizeof odd / sizeof *odd);
    assert_string_equal(kv8_harmony_parser_message(parser, 0)->content,
                        "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    kv8_harmony_event event;
    assert_refused(kv8_harmony_parser_push(parser, -1, &event), KV8_ERR_INVALID, "-1");
    assert_null(kv8_harmony_parser_message(parser, 1));
    kv8_harmony_parser_destroy(parser);
    kv8_harmony_parser_destroy(NULL);
}

/* --- both ways --- */

static const char *pick(test_rng *rng, const char *const *words, int32_t count) {
    return words[rng_range(rng, 0, count - 1)];
}
#define PICK(rng, ...)                            \
    pick(rng, (const char *const[]){__VA_ARGS__}, \
         (int32_t)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)))

static void random_message(test_rng *rng, kv8_message *message, char *content, size_t room) {
    *message =
        (kv8_message){.role = (kv8_role)rng_range(rng, 0, KV8_ROLE_TOOL), .content = content};
    content[0] = '\0';
    for (int32_t n = rng_range(rng, 0, 12); n > 0; n--) {
        const char *const part =
            PICK(rng, " ", "\n", "word", "<|end|>", "<|start|>user", "to=x", "\xf0\x9f\x98\x80",
                 "\xc3\xa9", "{\"a\": [1, 2]}", "'s", "\t\t", "<|channel|>", "\xe6\xbc\xa2", "123");
        if (strlen(content) + strlen(part) < room) strcat(content, part);
    }
    if (message->role == KV8_ROLE_DEVELOPER && content[0] == '\0') strcpy(content, "x");
    if (rng_range(rng, 0, 3) == 0) message->name = PICK(rng, "ann", "x:y", "\xc3\xa9");
    if (message->role == KV8_ROLE_TOOL) {
        message->name = PICK(rng, "functions.f", "python", "browser.open", "userland");
        message->recipient = "assistant";
        message->channel = PICK(rng, "commentary", "analysis");
    } else if (message->role == KV8_ROLE_ASSISTANT) {
        message->channel = PICK(rng, "analysis", "commentary", "commentary", "odd");
        message->recipient = PICK(rng, NULL, "functions.get_weather", "python");
        if (message->recipient != NULL) message->content_type = PICK(rng, NULL, "json", "code");
    }
}

static void assert_same_string(const char *got, const char *wanted) {
    if (wanted == NULL)
        assert_null(got);
    else
        assert_string_equal(got, wanted);
}

/* parse(render(x)) == x. No final answers here: they would drop analysis. */
static void conversations_come_back(void **state) {
    (void)state;
    test_rng rng = {3};
    for (int round = 0; round < 400; round++) {
        kv8_message messages[8] = {{.role = KV8_ROLE_SYSTEM, .content = "s"}};
        char contents[8][256];
        const size_t count = (size_t)rng_range(&rng, 1, 8);
        for (size_t i = 1; i < count; i++)
            random_message(&rng, &messages[i], contents[i], sizeof contents[i]);
        const ids got = render(messages, count, NULL);
        kv8_harmony_parser *parser;
        assert_ok(kv8_harmony_parser_create(&parser, tiny));
        feed(parser, got.data, got.count);
        assert_int_equal(kv8_harmony_parser_num_messages(parser), count);
        for (size_t i = 0; i < count; i++) {
            const kv8_message *const back = kv8_harmony_parser_message(parser, i);
            assert_int_equal(back->role, messages[i].role);
            assert_same_string(back->name, messages[i].name);
            assert_same_string(back->recipient, messages[i].recipient);
            assert_same_string(back->channel, messages[i].channel);
            assert_same_string(back->content_type, messages[i].content_type);
            const size_t heading =
                messages[i].role == KV8_ROLE_DEVELOPER ? strlen("# Instructions\n\n") : 0;
            assert_string_equal(back->content + heading, messages[i].content);
        }
        kv8_harmony_parser_destroy(parser);
        kv8_free(got.data);
    }
}

/* Any ids at all: no crash, every event keeps its promises, no more text than was fed. */
static void random_ids_never_fail(void **state) {
    (void)state;
    test_rng rng = {5};
    for (int round = 0; round < 200; round++) {
        int32_t data[300];
        size_t fed = 0, kept = 0;
        for (int i = 0; i < 300; i++) {
            const bool control = rng_range(&rng, 0, 2) == 0;
            data[i] = control ? rng_range(&rng, 4080, 4100) : rng_range(&rng, 0, 4095);
            size_t length;
            kv8_tokenizer_token_bytes(tiny, data[i], &length);
            fed += 3 * length + 3;
        }
        kv8_harmony_parser *parser;
        assert_ok(kv8_harmony_parser_create(&parser, tiny));
        feed(parser, data, 300);
        for (size_t i = 0; i < kv8_harmony_parser_num_messages(parser); i++)
            kept += strlen(kv8_harmony_parser_message(parser, i)->content);
        assert_true(kept <= fed);
        assert_true(kv8_harmony_parser_num_messages(parser) <= 300);
        kv8_harmony_parser_destroy(parser);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(output_as_documented),
        cmocka_unit_test(header_variants),
        cmocka_unit_test(malformed_output_becomes_content),
        cmocka_unit_test(endless_header_is_content),
        cmocka_unit_test(bytes_become_whole_characters),
        cmocka_unit_test(conversations_come_back),
        cmocka_unit_test(random_ids_never_fail),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
