/* test_output_text.c - text cut into pieces of any length says the same: whole characters, stop
 * strings, what waits.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include "output_text.h"

/* Sends what is ready. */
static void send_ready(output_text *text, byte_buffer *sent) {
    if (text->ready == text->sent) return;
    byte_buffer_add(sent, text->text.data + text->sent, text->ready - text->sent);
    text->sent = text->ready;
}

/* Feeds `bytes` in pieces; the result is what a client would have, and how it ended. */
static const char *feed(const char *bytes, size_t length, size_t piece, const stop_strings *stops,
                        byte_buffer *sent) {
    output_text text = {0};
    const char *found = NULL;
    for (size_t at = 0; at < length && found == NULL; at += piece) {
        output_text_add(&text, bytes + at, length - at < piece ? length - at : piece);
        found = output_text_stop(&text, stops);
        send_ready(&text, sent);
    }
    if (found == NULL) {
        output_text_finish(&text);
        found = output_text_stop(&text, stops);
        output_text_release(&text);
        send_ready(&text, sent);
    }
    output_text_free(&text);
    return found;
}

static void check(const char *bytes, size_t length, const stop_strings *stops, const char *wanted,
                  const char *wanted_stop) {
    for (size_t piece = 1; piece <= length; piece++) {
        byte_buffer sent = {0};
        byte_buffer_add_string(&sent, "");
        const char *const found = feed(bytes, length, piece, stops, &sent);
        if (strcmp(sent.data, wanted) != 0)
            fail_msg("pieces of %zu: \"%s\", wanted \"%s\"", piece, sent.data, wanted);
        if (wanted_stop == NULL) assert_null(found);
        if (wanted_stop != NULL) assert_string_equal(found, wanted_stop);
        byte_buffer_free(&sent);
    }
}

static void characters_come_whole(void **state) {
    (void)state;
    static const struct {
        const char *bytes, *wanted;
    } cases[] = {
        {"a\xc3\xa9z", "a\xc3\xa9z"},
        {"\xf0\x9f\x99\x82", "\xf0\x9f\x99\x82"},
        {"\xe2\x82", "\xef\xbf\xbd"}, /* cut off */
        {"\xe2\x82"
         "A",
         "\xef\xbf\xbd"
         "A"},                                                    /* broken off: one for both */
        {"\x80\xbf", "\xef\xbf\xbd\xef\xbf\xbd"},                 /* begins nothing */
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* a surrogate */
        {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},                 /* overlong */
        {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xf0\x9f"
         "x",
         "\xef\xbf\xbd"
         "x"},
    };
    const stop_strings none = {0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check(cases[i].bytes, strlen(cases[i].bytes), &none, cases[i].wanted, NULL);
}

static void stop_strings_end_it(void **state) {
    (void)state;
    const char *strings[] = {"END", "\n\n", "ab", "b"};
    const stop_strings stops = {.strings = strings, .num = 2};
    const stop_strings kept = {.strings = strings, .num = 2, .include = true};
    const stop_strings nested = {.strings = strings + 2, .num = 2};
    const struct {
        const char *text;
        const stop_strings *stops;
        const char *wanted, *stop;
    } cases[] = {
        {"one END two", &stops, "one ", "END"},
        {"one END two", &kept, "one END", "END"},
        {"END", &stops, "", "END"},
        {"E EN ENEND", &stops, "E EN EN", "END"},
        {"one EN", &stops, "one EN", NULL}, /* only began like one */
        {"a\n\nb END", &stops, "a", "\n\n"},
        {"x\ny", &stops, "x\ny", NULL},
        {"xxab", &nested, "xx", "ab"}, /* both end here: the one that began first */
        {"xb", &nested, "x", "b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check(cases[i].text, strlen(cases[i].text), cases[i].stops, cases[i].wanted, cases[i].stop);
}

/* Random texts over three letters and random stop strings, against the definition: the stop string
 * whose end comes first; of those that end there, the longest. */
static void random_stops(void **state) {
    (void)state;
    uint64_t random = 1;
    for (int run = 0; run < 3000; run++) {
        char words[3][5], text[25], wanted[25];
        const char *strings[3];
        for (int i = 0; i < 4; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            char *const to = i < 3 ? words[i] : text;
            const size_t length = i < 3 ? 1 + (random >> 60) % 4 : 24;
            for (size_t c = 0; c < length; c++) to[c] = "abc"[(random >> (2 * c + 3)) % 3];
            to[length] = '\0';
            if (i < 3) strings[i] = words[i];
        }
        const stop_strings stops = {.strings = strings, .num = 3};
        const char *stop = NULL;
        strcpy(wanted, text);
        for (size_t end = 1; end <= 24 && stop == NULL; end++) {
            for (int i = 0; i < 3; i++) {
                const size_t length = strlen(words[i]);
                if (length > end || memcmp(text + end - length, words[i], length) != 0) continue;
                if (stop == NULL || length > strlen(stop)) stop = words[i];
            }
            if (stop != NULL) wanted[end - strlen(stop)] = '\0';
        }
        check(text, 24, &stops, wanted, stop);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(characters_come_whole),
        cmocka_unit_test(stop_strings_end_it),
        cmocka_unit_test(random_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
