/* test_schema.c - what JSON schemas let through: patterns against PCRE2, ranges of decimals against
 * arithmetic, formats and schemas put together against lists written here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "json_grammar.h"
#include "pattern_grammar.h"

/* The grammar of a schema; *entry is -1 with `why` when it is refused. */
static grammar *make(const char *schema, int *entry, api_error *why) {
    json_error_t error;
    json_t *const root = json_loads(schema, JSON_DECODE_ANY, &error);
    if (root == NULL) fail_msg("%s: %s", schema, error.text);
    grammar *const g = grammar_create();
    *why = (api_error){0};
    *entry = json_grammar_add(g, root, "schema", grammar_end(g), why);
    json_decref(root);
    return g;
}

static bool takes(grammar *g, int entry, const char *text) {
    int at = grammar_begin(g, entry);
    for (; *text != '\0' && at != 0; text++) at = grammar_step(g, at, (unsigned char)*text);
    return grammar_may_end(g, at);
}

/* Texts that the schema takes, NULL, and texts that it does not take, NULL. */
static void check(const char *schema, const char *const *texts) {
    int entry;
    api_error why;
    grammar *const g = make(schema, &entry, &why);
    if (entry < 0) fail_msg("%s: %s", schema, why.message);
    for (; *texts != NULL; texts++)
        if (!takes(g, entry, *texts)) fail_msg("%s refuses %s", schema, *texts);
    for (texts++; *texts != NULL; texts++)
        if (takes(g, entry, *texts)) fail_msg("%s takes %s", schema, *texts);
    grammar_destroy(g);
}
#define CHECK(schema, ...) check(schema, (const char *const[]){__VA_ARGS__, NULL})

static void refused(const char *schema, const char *part) {
    int entry;
    api_error why;
    grammar *const g = make(schema, &entry, &why);
    if (entry >= 0 || strstr(why.message, part) == NULL)
        fail_msg("%s: %s", schema, entry >= 0 ? "taken" : why.message);
    grammar_destroy(g);
}

/* --- patterns --- */

static const char *const patterns[] = {
    "^abc$",
    "abc",
    "^a",
    "b$",
    "^(a|b)*$",
    "^(?:ab|a)(?<x>b?)$",
    "^a{2,4}b?$",
    "^[a-c0-2]+$",
    "^[^ab\"]*$",
    "^\\d{3}-\\d+$",
    "^\\w+\\s\\w*$",
    "^\\S+$",
    "^\\D$|^\\W\\W$",
    "^.{2,3}$",
    "^a.c$",
    "^a.*c$|^c",
    "^\\u0061\\x62\\/$",
    "^[\\u00e0-\\u00ff]+$",
    "^[^\\u0000-\\u007f]$",
    "^\\\\\"\\n?$",
    "^[\\]\\-a]+$",
    "^[a-]{1,2}$",
    "^a+?b??$",
    "^(a?)*$",
    "^(|a)b$",
    "^[\\w.+-]+@[\\w-]+\\.[a-z]{2,}$",
    "^\\{a\\}$",
    "^a{x$",
    "^\\.\\*\\(\\)$",
    "",
    "^$",
    "^(?:[01]\\d|2[0-3]):[0-5]\\d$",
    "^\\uffe6|\\ud7ff$",
};

/* As a JSON string, in the one way that the grammar of a class writes it. */
static void quote(const char *text, char *out) {
    *out++ = '"';
    for (; *text != '\0'; text++) {
        const char *const named = strchr("\b\b\f\f\n\n\r\r\t\t\"\"\\\\", *text);
        static const char letters[] = "bbffnnrrtt\"\"\\\\";
        if (named != NULL)
            out += sprintf(out, "\\%c", letters[named - "\b\b\f\f\n\n\r\r\t\t\"\"\\\\"]);
        else if ((unsigned char)*text < 0x20)
            out += sprintf(out, "\\u%04x", (unsigned)*text);
        else
            *out++ = *text;
    }
    *out++ = '"';
    *out = '\0';
}

static bool judge(const pcre2_code *code, const char *text) {
    pcre2_match_data *const data = pcre2_match_data_create_from_pattern(code, NULL);
    const int found = pcre2_match(code, (PCRE2_SPTR)text, strlen(text), 0, 0, data, NULL);
    pcre2_match_data_free(data);
    return found >= 0;
}

static void make_text(uint64_t *random, char out[64]) {
    static const char *const pieces[] = {
        "a",      "b",          "c",  "ab",    "abc",  "0",      "12",     "345",    "-",
        " ",      ".",          "@",  "x",     "\n",   "\t",     "\"",     "\\",     "/",
        "{",      "}",          "*",  "(",     ")",    "]",      "_",      "\u00e9", "\u00ff",
        "\u4e2d", "\U0001f642", "aa", "23:59", "aaab", "\u3000", "\uffe6", "\ud7ff", "Z"};
    const uint64_t num = (*random >> 40) % 5;
    out[0] = '\0';
    for (uint64_t i = 0; i < num; i++) {
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        strcat(out, pieces[(*random >> 33) % (sizeof pieces / sizeof pieces[0])]);
    }
    *random = *random * 6364136223846793005u + 1442695040888963407u;
}

static void patterns_take_what_pcre2_finds(void **state) {
    (void)state;
    enum { TEXTS = 4000 };
    size_t all_found = 0;
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        int number;
        size_t offset, num_found = 0;
        pcre2_compile_context *const context = pcre2_compile_context_create(NULL);
        pcre2_set_newline(context, PCRE2_NEWLINE_ANYCRLF);
        pcre2_code *const code =
            pcre2_compile((PCRE2_SPTR)patterns[i], PCRE2_ZERO_TERMINATED,
                          PCRE2_UTF | PCRE2_DOLLAR_ENDONLY | PCRE2_ALT_BSUX | PCRE2_NO_AUTO_CAPTURE,
                          &number, &offset, context);
        if (code == NULL) fail_msg("PCRE2 refuses %s: %d at %zu", patterns[i], number, offset);
        grammar *const g = grammar_create();
        pattern_facts facts;
        const int end = grammar_range(g, '"', '"', grammar_end(g));
        const int inside = pattern_grammar_add(g, patterns[i], end, &facts);
        if (inside < 0) fail_msg("%s: %s", patterns[i], facts.refused);
        const int entry = grammar_range(g, '"', '"', inside);
        uint64_t random = 11;
        for (int k = 0; k < TEXTS; k++) {
            char text[64], quoted[160];
            make_text(&random, text);
            quote(text, quoted);
            /* No space of Unicode is none of \s either: the grammar takes neither. */
            const bool wide_space = strstr(text, "\u3000") != NULL;
            const bool found = judge(code, text), taken = takes(g, entry, quoted);
            if (found != taken && !(wide_space && found && !taken))
                fail_msg("%s on %s: PCRE2 %d, the grammar %d", patterns[i], quoted, found, taken);
            num_found += taken;
        }
        all_found += num_found;
        grammar_destroy(g);
        pcre2_code_free(code);
        pcre2_compile_context_free(context);
    }
    assert_in_range(all_found, 5000, 100000); /* neither none nor all */
}

static void what_a_grammar_cannot_hold_is_named(void **state) {
    (void)state;
    static const char *const cases[][2] = {{"(?=a)", "a look ahead"},
                                           {"(?!a)", "a look ahead"},
                                           {"(?<=a)b", "a look behind"},
                                           {"(?<!a)b", "a look behind"},
                                           {"(a)\\\\1", "a back reference"},
                                           {"\\\\k<x>", "a back reference"},
                                           {"\\\\bword", "boundary"},
                                           {"\\\\p{L}", "Unicode property"},
                                           {"a(^b)", "^ or $ within"},
                                           {"(a$|b)c", "^ or $ within"},
                                           {"(a", "without its end"},
                                           {"a)", "without \\\"(\\\""},
                                           {"[a", "without its end"},
                                           {"[]", "empty class"},
                                           {"*a", "quantifier of nothing"},
                                           {"a{3,2}", "from high to low"},
                                           {"[b-a]", "from high to low"},
                                           {"\\\\q", "unknown letter"},
                                           {"(?i:a)", "flags"},
                                           {"\\\\ud800", "half"},
                                           {"a{2000}", "above 1024"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char schema[128], part[64];
        snprintf(schema, sizeof schema, "{\"type\":\"string\",\"pattern\":\"%s\"}", cases[i][0]);
        snprintf(part, sizeof part, "%s", strstr(cases[i][1], "\\\"") ? "without" : cases[i][1]);
        refused(schema, part);
    }
    refused("{\"pattern\":\"a\",\"maxLength\":9}", "maxLength beside a longer pattern");
    refused("{\"pattern\":\"^a?$\",\"minLength\":1}", "minLength beside a shorter pattern");
    refused("{\"pattern\":\"a\",\"enum\":[\"a\"]}", "pattern with enum");
    CHECK("{\"type\":\"string\",\"pattern\":\"^[ab]{2,4}$\",\"minLength\":2,\"maxLength\":4}",
          "\"ab\"", "\"abab\"", NULL, "\"a\"", "\"ababa\"");
}

/* --- formats --- */

static void formats_are_what_their_standards_say(void **state) {
    (void)state;
    CHECK("{\"type\":\"string\",\"format\":\"date\"}", "\"2024-02-29\"", "\"1999-12-31\"",
          "\"2000-02-29\"", NULL, "\"2023-02-29\"", "\"1900-02-29\"", "\"2024-13-01\"",
          "\"2024-04-31\"", "\"24-01-01\"", "\"\"");
    CHECK("{\"type\":\"string\",\"format\":\"time\"}", "\"23:59:59Z\"", "\"00:00:00.5+01:30\"",
          NULL, "\"24:00:00Z\"", "\"12:00Z\"", "\"12:00:00\"");
    CHECK("{\"type\":\"string\",\"format\":\"date-time\"}", "\"2024-06-30T12:00:00Z\"", NULL,
          "\"2024-06-31T12:00:00Z\"", "\"2024-06-30 12:00:00Z\"");
    CHECK("{\"type\":\"string\",\"format\":\"duration\"}", "\"P1Y2M3DT4H5M6S\"", "\"PT1M\"",
          "\"P2W\"", NULL, "\"P\"", "\"PT\"", "\"1D\"", "\"P1W2D\"");
    CHECK("{\"type\":\"string\",\"format\":\"uuid\"}", "\"123e4567-e89b-12d3-a456-426614174000\"",
          NULL, "\"123e4567e89b12d3a456426614174000\"");
    CHECK("{\"type\":\"string\",\"format\":\"ipv4\"}", "\"255.0.10.199\"", NULL, "\"256.0.0.1\"",
          "\"01.2.3.4\"", "\"1.2.3\"");
    CHECK("{\"type\":\"string\",\"format\":\"ipv6\"}", "\"::\"", "\"::1\"", "\"fe80::1:2\"",
          "\"1:2:3:4:5:6:7:8\"", "\"1::\"", NULL, "\"1:2:3:4:5:6:7\"", "\"1::2::3\"", "\":1\"");
    CHECK("{\"type\":\"string\",\"format\":\"email\"}", "\"a.b+c@ex-ample.org\"", NULL, "\"a@\"",
          "\"@b\"", "\"a b@c.d\"", "\".a@b.c\"");
    CHECK("{\"type\":\"string\",\"format\":\"hostname\"}", "\"a-b.example.org\"", NULL, "\"-a.b\"",
          "\"a_b\"", "\"a..b\"");
    CHECK("{\"type\":\"string\",\"format\":\"uri\"}", "\"https://example.org:80/a/b?c=d#e\"", NULL,
          "\"example.org\"", "\"http://\"", "\"http://a b\"");
    CHECK("{\"type\":\"string\",\"format\":\"who knows\"}", "\"anything\"", NULL, "1");
    CHECK("{\"type\":[\"string\",\"null\"],\"format\":\"date\"}", "null", "\"2024-01-01\"", NULL,
          "\"x\"");
}

/* --- ranges --- */

static void decimals_are_between_their_ends(void **state) {
    (void)state;
    static const char *const ends[] = {"-12.5", "-2",  "-1.05", "-0.001", "0",    "0.5",
                                       "0.55",  "0.9", "1",     "1.25",   "9.99", "100"};
    enum { NUM = sizeof ends / sizeof ends[0] };
    for (int i = 0; i <= NUM; i++) {
        for (int k = i; k <= NUM; k++) {
            for (int outside = 0; outside < 4; outside++) {
                char schema[160], low[48] = "", high[48] = "";
                const bool lo_out = (outside & 1) != 0, hi_out = (outside & 2) != 0;
                if (i < NUM)
                    snprintf(low, sizeof low, ",\"%s\":%s", lo_out ? "exclusiveMinimum" : "minimum",
                             ends[i]);
                if (k < NUM)
                    snprintf(high, sizeof high, ",\"%s\":%s",
                             hi_out ? "exclusiveMaximum" : "maximum", ends[k]);
                if (i == k && i < NUM && outside != 0) continue;
                snprintf(schema, sizeof schema, "{\"type\":\"number\"%s%s}", low, high);
                int entry;
                api_error why;
                grammar *const g = make(schema, &entry, &why);
                if (entry < 0) fail_msg("%s: %s", schema, why.message);
                const double lo = i < NUM ? atof(ends[i]) : -HUGE_VAL;
                const double hi = k < NUM ? atof(ends[k]) : HUGE_VAL;
                for (int hundredth = -1300; hundredth <= 10100;
                     hundredth += hundredth < 150 ? 5 : 37) {
                    char text[32];
                    snprintf(text, sizeof text, "%s%d.%02d", hundredth < 0 ? "-" : "",
                             abs(hundredth) / 100, abs(hundredth) % 100);
                    const double value = atof(text);
                    const bool wanted =
                        (lo_out ? value > lo : value >= lo) && (hi_out ? value < hi : value <= hi);
                    if (takes(g, entry, text) != wanted) fail_msg("%s: %s", schema, text);
                    char *const point = strchr(text, '.');
                    if (hundredth % 10 == 0) point[2] = '\0';
                    if (takes(g, entry, text) != wanted) fail_msg("%s: %s", schema, text);
                    if (hundredth % 100 == 0) point[0] = '\0';
                    if (takes(g, entry, text) != wanted) fail_msg("%s: %s", schema, text);
                }
                assert_false(takes(g, entry, "") || takes(g, entry, "-") || takes(g, entry, "1.") ||
                             takes(g, entry, ".5") || takes(g, entry, "01"));
                grammar_destroy(g);
            }
        }
    }
    CHECK("{\"type\":\"integer\",\"minimum\":1.5,\"exclusiveMaximum\":4.5}", "2", "4", NULL, "1",
          "5");
    CHECK("{\"type\":\"integer\",\"exclusiveMinimum\":1.5,\"maximum\":4.5}", "2", "4", NULL, "1",
          "5");
    CHECK("{\"type\":\"integer\",\"exclusiveMinimum\":-2,\"exclusiveMaximum\":2}", "-1", "1", NULL,
          "-2", "2");
    refused("{\"type\":\"number\",\"minimum\":2,\"maximum\":1}", "\"maximum\"");
    refused("{\"type\":\"number\",\"minimum\":1e30}", "\"minimum\"");
    refused("{\"type\":\"number\",\"minimum\":\"1\"}", "\"minimum\"");
}

/* --- several schemas together --- */

static void schemas_are_put_together(void **state) {
    (void)state;
    CHECK("{\"allOf\":[{\"type\":\"integer\",\"minimum\":3},{\"type\":\"number\",\"maximum\":5}]}",
          "3", "5", NULL, "2", "6", "4.5");
    CHECK(
        "{\"allOf\":[{\"$ref\":\"#/$defs/a\"}],\"default\":1,\"$defs\":{\"a\":{\"type\":"
        "\"boolean\"}}}",
        "true", NULL, "1");
    CHECK(
        "{\"allOf\":[{\"$ref\":\"#/$defs/base\"},{\"properties\":{\"b\":{\"type\":\"integer\"}},"
        "\"required\":[\"b\"]}],\"$defs\":{\"base\":{\"type\":\"object\",\"properties\":{\"a\":{"
        "\"type\":\"string\"}},\"required\":[\"a\"]}}}",
        "{\"a\":\"x\",\"b\":1}", NULL, "{\"a\":\"x\"}", "{\"b\":1}", "1");
    CHECK(
        "{\"type\":\"object\",\"properties\":{\"a\":{\"const\":1},\"b\":{\"const\":2}},\"anyOf\":[{"
        "\"required\":[\"a\"]},{\"required\":[\"b\"]}]}",
        "{\"a\":1}", "{\"b\":2}", "{\"a\":1,\"b\":2}", NULL, "{}");
    CHECK("{\"allOf\":[{\"enum\":[1,2,3]},{\"enum\":[2,3,4]}]}", "2", "3", NULL, "1", "4");
    CHECK("{\"allOf\":[{\"type\":[\"string\",\"null\"]},{\"type\":\"string\",\"maxLength\":1}]}",
          "\"a\"", NULL, "null", "\"ab\"");
    CHECK(
        "{\"allOf\":[{\"properties\":{\"a\":{\"type\":\"integer\"}},\"additionalProperties\":false}"
        ","
        "{\"properties\":{\"b\":{\"type\":\"integer\"},\"a\":{\"minimum\":2}}}]}",
        "{}", "{\"a\":2}", NULL, "{\"a\":1}", "{\"b\":1}");
    CHECK(
        "{\"oneOf\":[{\"$ref\":\"#/$defs/x\"},{\"$ref\":\"#/$defs/y\"}],\"properties\":{\"n\":{"
        "\"type\":\"integer\"}},\"required\":[\"n\"],\"$defs\":{\"x\":{\"properties\":{\"k\":{"
        "\"const\":\"x\"}},\"required\":[\"k\"]},\"y\":{\"properties\":{\"k\":{\"const\":\"y\"}},"
        "\"required\":[\"k\"]}}}",
        "{\"n\":1,\"k\":\"x\"}", "{\"n\":1,\"k\":\"y\"}", NULL, "{\"k\":\"x\"}",
        "{\"n\":1,\"k\":\"z\"}");
    CHECK(
        "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"null\"}],"
        "\"minItems\":2,\"maxItems\":2}",
        "[1,null]", "[ 1, null ]", NULL, "[1]", "[null,1]", "[1,null,1]", "[]");
    CHECK(
        "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"}],\"items\":false,"
        "\"minItems\":1}",
        "[1]", NULL, "[1,1]", "[]");
    refused("{\"type\":\"array\",\"prefixItems\":[{}]}", "prefixItems of any number");
    refused("{\"allOf\":[{\"type\":\"string\"},{\"type\":\"integer\"}]}", "different types");
    refused("{\"allOf\":[{\"pattern\":\"a\"},{\"pattern\":\"b\"}]}", "different pattern");
    refused("{\"allOf\":[{\"not\":{}}]}", "\"not\"");
    refused("{\"allOf\":[{\"$ref\":\"#\"}]}", "");
    refused("{\"allOf\":[1]}", "no schema");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patterns_take_what_pcre2_finds),
        cmocka_unit_test(what_a_grammar_cannot_hold_is_named),
        cmocka_unit_test(formats_are_what_their_standards_say),
        cmocka_unit_test(decimals_are_between_their_ends),
        cmocka_unit_test(schemas_are_put_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
