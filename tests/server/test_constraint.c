/* test_constraint.c - which tokens a JSON schema lets through: against every token tried byte by
 * byte, and in time, on a vocabulary of 200,000.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include <time.h>

#include "constraint_store.h"
#include "json_grammar.h"
#include "range_grammar.h"

enum { NUM_IDS = 200000, NUM_WORDS = (NUM_IDS + 31) / 32 };

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* A random word, number, piece of JSON or of UTF-8, in the letters that stand for bytes. */
static void make_word(uint64_t *random, char word[64]) {
    static const char letters[] = "etaoinshrdlucmfwypvbgkjqxz0123456789{}[]:,\"-._/\\ETAOIN";
    static const char *const wide[] = {"\u00c3\u00a9", "\u00c3",
                                       "\u00a9",       "\u00e3\u00ae\u00ac",
                                       "\u00e3\u00ae", "\u00f3\u00a1\u00a2\u00a3",
                                       "\u00a2\u00a3"};
    const size_t length = 2 + next_random(random) % 9;
    const size_t kinds = next_random(random) % 4 == 0 ? sizeof letters - 1 : 26;
    const bool is_wide = next_random(random) % 32 == 0;
    word[0] = '\0';
    for (size_t i = 0; i < length; i++) {
        const char letter[2] = {letters[next_random(random) % kinds]};
        const bool one_wide = is_wide && next_random(random) % 3 == 0;
        strcat(word,
               one_wide ? wide[next_random(random) % (sizeof wide / sizeof wide[0])] : letter);
    }
}

/* The shipped tokenizer with as many more tokens as make 200,000. */
static kv8_tokenizer *make_tokenizer(void) {
    json_error_t why;
    json_t *const root = json_load_file("models/tiny-gpt-oss/tokenizer.json", 0, &why);
    assert_non_null(root);
    json_t *const vocab = json_object_get(json_object_get(root, "model"), "vocab");
    uint64_t random = 7;
    for (int id = 4096; id < NUM_IDS;) {
        char word[64];
        make_word(&random, word);
        if (json_object_get(vocab, word) == NULL) {
            assert_int_equal(json_object_set_new(vocab, word, json_integer(id)), 0);
            id++;
        }
    }
    char *const text = json_dumps(root, JSON_COMPACT);
    kv8_tokenizer *tokenizer = NULL;
    assert_ok(kv8_tokenizer_parse(&tokenizer, text, strlen(text), "made"));
    free(text);
    json_decref(root);
    return tokenizer;
}

static const char SCHEMA[] =
    "{\"type\":\"object\",\"required\":[\"name\",\"tags\",\"at\",\"items\"],\"properties\":{"
    "\"name\":{\"type\":\"string\"},\"kind\":{\"enum\":[\"alpha\",\"alphabet\",\"beta\"]},"
    "\"tags\":{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":12}},"
    "\"at\":{\"type\":\"object\",\"properties\":{\"x\":{\"type\":\"number\"},"
    "\"y\":{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"integer\"}]}}},"
    "\"note\":{\"type\":\"string\",\"minLength\":3,\"maxLength\":200},\"items\":{\"$ref\":"
    "\"#/$defs/list\"}},\"$defs\":{\"list\":{\"type\":\"array\",\"items\":{\"anyOf\":[{\"type\":"
    "[\"string\",\"boolean\"]},{\"$ref\":\"#/$defs/list\"},{}]}}}}";
static const char ANSWER[] =
    "{\"name\": \"a name \\u00e9 with \xc3\xa9 \xf0\x9f\x99\x82 in it and some more words\","
    " \"kind\":\"alphabet\",\n  \"tags\": [\"one\", \"two\", \"three\"], \"at\":{\"x\":-1.5e10,"
    "\"y\": null},\"note\": \"short, but it \\\"could\\\" be much longer than this\", \"items\":"
    "[true, \"text\", [\"\\n\", [], [false]], {\"any\": [1, 2.5], \"more\": {}}]}";

typedef struct fixture {
    kv8_tokenizer *tokenizer;
    vocabulary *vocabulary;
    int32_t eos;
} fixture;

static grammar *make_grammar(const char *text, int *entry) {
    json_error_t why;
    api_error error = {0};
    grammar *const g = grammar_create();
    json_t *const schema = json_loads(text, JSON_DECODE_ANY, &why);
    assert_non_null(schema);
    *entry = json_grammar_add(g, schema, "schema", grammar_end(g), &error);
    if (*entry < 0) fail_msg("%s", error.message);
    json_decref(schema);
    return g;
}

static constraint *make_constraint(const fixture *f, const char *schema) {
    int entry;
    grammar *const g = make_grammar(schema, &entry);
    constraint *const c = constraint_create(f->vocabulary, g, entry);
    assert_non_null(c);
    return c;
}

static int setup(void **state) {
    static fixture f;
    f.tokenizer = make_tokenizer();
    f.eos = kv8_tokenizer_special_id(f.tokenizer, "<|return|>");
    f.vocabulary = vocabulary_create(f.tokenizer, NUM_IDS, &f.eos, 1);
    assert_non_null(f.vocabulary);
    assert_true(vocabulary_has_control(f.vocabulary));
    *state = &f;
    return 0;
}

static int teardown(void **state) {
    fixture *const f = *state;
    vocabulary_destroy(f->vocabulary);
    kv8_tokenizer_close(f->tokenizer);
    return 0;
}

/* The place moves by a token of one byte, which the tokenizer has for each. */
static void take_byte(const fixture *f, constraint_place *place, char byte) {
    for (int32_t id = 0; id < 4096; id++) {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(f->tokenizer, id, &length);
        if (bytes == NULL || length != 1 || bytes[0] != byte) continue;
        constraint_take(place, id);
        return;
    }
    fail_msg("no token is the byte %d", byte);
}

/* At every place of the answer: a token's bit is set where its bytes, one by one, lead somewhere;
 * some masks are prepared, others come as they are asked for. */
static void check_masks(const fixture *f, const char *schema, const char *answer) {
    constraint *const c = make_constraint(f, schema);
    int entry;
    grammar *const g = make_grammar(schema, &entry);
    static uint32_t words[NUM_WORDS];
    constraint_prepare(c);
    constraint_place place = constraint_begin(c);
    int at = grammar_begin(g, entry);
    for (size_t i = 0;; i++) {
        memset(words, 0, sizeof words);
        constraint_mask(&place, words);
        for (int32_t id = 0; id < NUM_IDS; id += i % 8 == 0 ? 1 : 61) {
            size_t length = 0;
            const char *const bytes = kv8_tokenizer_token_bytes(f->tokenizer, id, &length);
            int to = bytes == NULL || kv8_tokenizer_is_special(f->tokenizer, id) ? 0 : at;
            for (size_t b = 0; b < length && to != 0; b++)
                to = grammar_step(g, to, (unsigned char)bytes[b]);
            const bool wanted = id == f->eos ? grammar_may_end(g, at) : to != 0;
            if (((words[id / 32] >> (id % 32)) & 1) != wanted)
                fail_msg("%s: after %zu bytes token %d is %s", schema, i, id,
                         wanted ? "left out" : "let in");
        }
        if (answer[i] == '\0') break;
        at = grammar_step(g, at, (unsigned char)answer[i]);
        if (at == 0) fail_msg("%s: byte %zu of %s is refused", schema, i, answer);
        take_byte(f, &place, answer[i]);
    }
    assert_true(grammar_may_end(g, at));
    grammar_destroy(g);
    constraint_release(c);
}

static void masks_are_what_bytes_say(void **state) {
    check_masks(*state, SCHEMA, ANSWER);
}

/* Classes that most characters are in, alone, bounded, beside others, and such as some characters
 * of a first byte are in. */
static void masks_of_wide_sets(void **state) {
    static const char *const cases[][2] = {
        {"^[^x]*$", "\"ab cd-\xc3\xa9\\\"f\""},
        {"^\\\\S+$", "\"ab\xe3\x81\x82\xc3\xa9-\""},
        {"^[^x]{2,20}$", "\"abcdefghijklmnopqrst\""},
        {"^[^a-z]+$", "\"AB-\xf0\x9f\x99\x82\""},
        {"^[^@ ]+@[^@]+$", "\"ab@c d.e\""},
        {"^\\\\w+( \\\\w+)*$", "\"ab cd ef\""},
        {"^([^a]*|[^\\u00e9]*b)$", "\"cdab\""},
        {"^[^\\u3042-\\ud7ff]*[^\\n]$", "\"ab\xc3\xa9\xe3\x80\x82\\t.\""},
        {"ab[^c]$", "\"xaba\xc3\xa9yab.\""},
        {"abc", "\"xab\\\"ababcab\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char schema[96];
        snprintf(schema, sizeof schema, "{\"type\":\"string\",\"pattern\":\"%s\"}", cases[i][0]);
        check_masks(*state, schema, cases[i][1]);
    }
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The time of looking at each byte of the vocabulary once. */
static double time_of_all_bytes(const fixture *f) {
    unsigned sum = 0;
    const double begin = now();
    for (int32_t id = 0; id < NUM_IDS; id++) {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(f->tokenizer, id, &length);
        for (size_t i = 0; bytes != NULL && i < length; i++) sum += (unsigned char)bytes[i];
    }
    const double time = now() - begin;
    assert_true(sum > 0);
    return time;
}

/* A request's first answer, and others under the same constraint. */
static void a_token_costs_little(void **state) {
    enum { MAX_IDS = 256 };
    const fixture *const f = *state;
    static uint32_t words[NUM_WORDS];
    int32_t *ids = NULL;
    size_t num = 0;
    assert_ok(kv8_tokenizer_encode(f->tokenizer, ANSWER, strlen(ANSWER), KV8_SPECIAL_AS_TEXT, &ids,
                                   &num));
    assert_in_range(num, 1, MAX_IDS);
    double first[MAX_IDS] = {0}, all_first = 1, prepared = 1, best = 1;
    for (int fresh = 0; fresh < 6; fresh++) {
        constraint *const c = make_constraint(f, SCHEMA);
        if (fresh < 3) constraint_prepare(c);
        for (int run = 0; run < 4; run++) {
            constraint_place place = constraint_begin(c);
            double all = 0;
            for (size_t i = 0; i < num; i++) {
                const double begin = now();
                constraint_mask(&place, words);
                constraint_take(&place, ids[i]);
                const double time = now() - begin;
                if (run == 0) first[i] = time;
                all += time / (double)num;
            }
            double *const least = run > 0 ? &best : fresh < 3 ? &prepared : &all_first;
            if (all < *least) *least = all;
        }
        constraint_release(c);
    }
    qsort(first, num, sizeof first[0], by_size);
    const double bytes = time_of_all_bytes(f);
    print_message(
        "%zu tokens: %.1f us each at first (p50 %.1f, p90 %.1f, p99 %.1f), prepared %.1f, then "
        "%.1f us; the bytes of all tokens once: %.0f us\n",
        num, all_first * 1e6, first[num / 2] * 1e6, first[num * 9 / 10] * 1e6,
        first[num * 99 / 100] * 1e6, prepared * 1e6, best * 1e6, bytes * 1e6);
    assert_true(all_first < bytes / 20); /* a mask is not made by looking at every token */
    assert_true(best < bytes / 100);     /* those of states met before are kept */
    kv8_free(ids);
}

/* The times of a string of NUM_TOKENS "a" under a pattern, of all and of the longest, where they
 * are less than those before. */
enum { NUM_TOKENS = 64 };
static void time_pattern(const fixture *f, const char *pattern, bool prepared, double *least_all,
                         double *least_most) {
    double all = 0, most = 0;
    static uint32_t words[NUM_WORDS];
    char schema[64];
    int32_t *ids = NULL;
    size_t num = 0;
    snprintf(schema, sizeof schema, "{\"type\":\"string\",\"pattern\":\"%s\"}", pattern);
    constraint *const c = make_constraint(f, schema);
    if (prepared) constraint_prepare(c);
    constraint_place place = constraint_begin(c);
    assert_ok(kv8_tokenizer_encode(f->tokenizer, "\"a", 2, KV8_SPECIAL_AS_TEXT, &ids, &num));
    for (size_t i = 0; i < NUM_TOKENS; i++) {
        const double begin = now();
        memset(words, 0, sizeof words);
        constraint_mask(&place, words);
        constraint_take(&place, ids[i < num ? i : num - 1]);
        const double time = now() - begin;
        all += time;
        if (time > most) most = time;
        assert_int_not_equal(place.state, 0);
    }
    if (all < *least_all) *least_all = all;
    if (most < *least_most) *least_most = most;
    constraint_release(c);
    kv8_free(ids);
}

/* A token that leads to a new state costs no look at all tokens, whatever few characters may not
 * come, or lead elsewhere while others go on as before; prepared, hardly any leads to one. */
static void wide_sets_cost_little(void **state) {
    static const char *const patterns[] = {"^[^x]{200}$",    "^[^\\\\n]{1,200}$", "^.{200}$",
                                           "^\\\\D{9,200}$", "^[\\\\w /]{200}$",  "abc",
                                           "a.*b",           "^\\\\S+$"};
    const fixture *const f = *state;
    const double bytes = time_of_all_bytes(f);
    for (size_t p = 0; p < sizeof patterns / sizeof patterns[0]; p++) {
        double all = 1, most = 1, all_prepared = 1, most_prepared = 1;
        for (int run = 0; run < 3; run++) { /* others may have the processor amid one */
            time_pattern(f, patterns[p], false, &all, &most);
            time_pattern(f, patterns[p], true, &all_prepared, &most_prepared);
        }
        print_message(
            "%-16s %.0f us a token of a new state, %.0f at most; prepared %.1f and %.0f\n",
            patterns[p], all / NUM_TOKENS * 1e6, most * 1e6, all_prepared / NUM_TOKENS * 1e6,
            most_prepared * 1e6);
        assert_true(all / NUM_TOKENS < bytes / 8 && most < bytes * 2);
        assert_true(all_prepared / NUM_TOKENS < bytes / 100 && most_prepared < bytes / 8);
    }
}

static bool takes(grammar *g, int entry, const char *text) {
    int at = grammar_begin(g, entry);
    for (; *text != '\0' && at != 0; text++) at = grammar_step(g, at, (unsigned char)*text);
    return grammar_may_end(g, at);
}

/* Every number about, against what a range is. */
static void ranges_take_what_is_between(void **state) {
    (void)state;
    static const int64_t ends[] = {-RANGE_LIMIT, -1001, -1000, -999, -100, -47,  -10,        -9,
                                   -1,           0,     1,     9,    10,   11,   19,         20,
                                   99,           100,   101,   345,  999,  1000, RANGE_LIMIT};
    enum { NUM = sizeof ends / sizeof ends[0] };
    for (int i = 0; i < NUM; i++) {
        for (int k = i; k < NUM; k++) {
            grammar *const g = grammar_create();
            const int entry = range_grammar_add(g, ends[i], ends[k], grammar_end(g));
            char text[32];
            for (int64_t v = -1102; v <= 1102; v++) {
                snprintf(text, sizeof text, "%lld", (long long)v);
                if (takes(g, entry, text) != (v >= ends[i] && v <= ends[k]))
                    fail_msg("%s between %lld and %lld", text, (long long)ends[i],
                             (long long)ends[k]);
            }
            for (int e = 0; e < NUM; e++) {
                snprintf(text, sizeof text, "%lld", (long long)ends[e]);
                assert_int_equal(takes(g, entry, text), e >= i && e <= k);
            }
            assert_false(takes(g, entry, "-0") || takes(g, entry, "007") || takes(g, entry, "-") ||
                         takes(g, entry, "") || takes(g, entry, "9007199254740992"));
            grammar_destroy(g);
        }
    }
}

/* The last sixteen that were asked for; one in use outlives its place. */
static void constraints_are_kept(void **state) {
    enum { NUM = 20 };
    constraint_store *const s = constraint_store_create();
    constraint *made[NUM];
    char key[8];
    assert_non_null(s);
    for (int i = 0; i < NUM; i++) {
        snprintf(key, sizeof key, "%d", i);
        assert_null(constraint_store_find(s, key));
        made[i] = make_constraint(*state, SCHEMA);
        constraint_store_keep(s, key, made[i]);
        constraint *const oldest = constraint_store_find(s, "0");
        assert_ptr_equal(oldest, made[0]);
        constraint_release(oldest);
    }
    for (int i = 0; i < NUM; i++) {
        static uint32_t words[NUM_WORDS];
        snprintf(key, sizeof key, "%d", i);
        constraint *const found = constraint_store_find(s, key);
        if (i == 0 || i > 4)
            assert_ptr_equal(found, made[i]);
        else
            assert_null(found);
        constraint_release(found);
        constraint_place place = constraint_begin(made[i]);
        constraint_mask(&place, words);
        constraint_release(made[i]);
    }
    constraint_store_destroy(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_are_what_bytes_say), cmocka_unit_test(masks_of_wide_sets),
        cmocka_unit_test(a_token_costs_little),     cmocka_unit_test(wide_sets_cost_little),
        cmocka_unit_test(constraints_are_kept),     cmocka_unit_test(ranges_take_what_is_between),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
