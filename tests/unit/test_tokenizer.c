/* test_tokenizer.c - the tokenizer against ids that Hugging Face's `tokenizers` produced (golden
 * file, scripts/make_tokenizer_golden.py), against its own promise that no byte is lost, and with
 * files and texts that are wrong or hostile.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <time.h>

#include <jansson.h>

#include "tokenizer_testing.h"

#define TINY   "models/tiny-gpt-oss/tokenizer.json"
#define HELD   "models/tiny-gpt-oss/held.txt"
#define GOLDEN "tests/model/data/tokenizer_golden.json"

static char *read_file(const char *path, size_t *length_out) {
    FILE *const file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *length_out = (size_t)ftell(file);
    rewind(file);
    char *const data = malloc(*length_out + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *length_out, file), *length_out);
    data[*length_out] = '\0';
    fclose(file);
    return data;
}

/* FNV-1a over the ids as little-endian int32, in hexadecimal, as the golden script writes it. */
static void assert_hash(ids got, const char *wanted) {
    uint64_t value = 0xcbf29ce484222325u;
    for (size_t i = 0; i < got.count; i++) {
        for (int shift = 0; shift < 32; shift += 8)
            value = (value ^ ((uint32_t)got.data[i] >> shift & 0xff)) * 0x100000001b3u;
    }
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)value);
    assert_string_equal(text, wanted);
}

static kv8_tokenizer *tiny;
static json_t *golden;

static int setup(void **state) {
    (void)state;
    golden = json_load_file(GOLDEN, JSON_ALLOW_NUL, NULL);
    if (golden == NULL) return -1;
    return kv8_tokenizer_open(&tiny, TINY) == KV8_OK ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    kv8_tokenizer_close(tiny);
    json_decref(golden);
    return 0;
}

/* --- against tokenizers --- */

static void assert_ids(ids got, const json_t *wanted, const char *text) {
    for (size_t i = 0; i < got.count && i < json_array_size(wanted); i++) {
        const json_int_t id = json_integer_value(json_array_get(wanted, i));
        if (got.data[i] != id)
            fail_msg("\"%s\": id %zu is %d, tokenizers has %d", text, i, got.data[i], (int)id);
    }
    if (got.count != json_array_size(wanted))
        fail_msg("\"%s\": %zu ids, tokenizers has %zu", text, got.count, json_array_size(wanted));
}

static void texts_like_tokenizers(void **state) {
    (void)state;
    const json_t *const cases = json_object_get(golden, "cases");
    assert_true(json_array_size(cases) > 200);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *const row = json_array_get(cases, i);
        const char *const text = json_string_value(json_array_get(row, 0));
        const size_t length = json_string_length(json_array_get(row, 0));
        for (int special = 0; special < 2; special++) {
            const ids got = encode(tiny, text, length, (kv8_special)special);
            assert_ids(got, json_array_get(row, (size_t)special + 1), text);
            assert_decodes_to(tiny, got, text, length);
            kv8_free(got.data);
        }
    }
}

static void held_out_text_like_tokenizers(void **state) {
    (void)state;
    size_t length;
    char *const text = read_file(HELD, &length);
    const json_t *const documents = json_object_get(golden, "held_documents");
    size_t total = 0, begin = 0, document = 0;
    for (size_t at = 0; at <= length; at++) {
        if (at < length && text[at] != '\0') continue;
        const json_t *const row = json_array_get(documents, document++);
        const ids got = encode(tiny, text + begin, at - begin, KV8_SPECIAL_AS_TEXT);
        assert_int_equal(got.count, json_integer_value(json_array_get(row, 0)));
        assert_hash(got, json_string_value(json_array_get(row, 1)));
        assert_decodes_to(tiny, got, text + begin, at - begin);
        kv8_free(got.data);
        total += got.count + 1; /* each document begins with <|endoftext|> */
        begin = at + 1;
    }
    assert_int_equal(document, json_array_size(documents));
    assert_int_equal(total, 164038);
    assert_int_equal(total, json_integer_value(json_object_get(golden, "held_total")));
    free(text);
}

/* A million letters are one piece: merging must not take quadratic time. */
static void million_letters_like_tokenizers(void **state) {
    (void)state;
    const size_t length = 1 << 20;
    char *const text = malloc(length);
    assert_non_null(text);
    uint64_t value = 1;
    for (size_t i = 0; i < length; i++) {
        value = value * 48271 % 0x7fffffff;
        text[i] = (char)('a' + value % 26);
    }
    const ids got = encode(tiny, text, length, KV8_SPECIAL_AS_TEXT);
    const json_t *const row = json_object_get(golden, "long_letters");
    assert_int_equal(got.count, json_integer_value(json_array_get(row, 0)));
    assert_hash(got, json_string_value(json_array_get(row, 1)));
    kv8_free(got.data);
    free(text);
}

/* --- bytes --- */

static size_t put_utf8(char *out, uint32_t code) {
    if (code < 0x80) return out[0] = (char)code, 1;
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint32_t lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = length - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(lead[length] | code);
    return length;
}

static void random_utf8_comes_back(void **state) {
    (void)state;
    test_rng rng = {7};
    char text[4 * 64];
    for (int round = 0; round < 3000; round++) {
        size_t length = 0;
        const int32_t count = rng_range(&rng, 0, 64);
        for (int32_t i = 0; i < count; i++) {
            const int32_t bits = rng_range(&rng, 1, 21);
            uint32_t code = (uint32_t)(rng_u64(&rng) & ((1u << bits) - 1));
            if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) code = 0xfffd;
            length += put_utf8(text + length, code);
        }
        for (int special = 0; special < 2; special++) {
            const ids got = encode(tiny, text, length, (kv8_special)special);
            assert_decodes_to(tiny, got, text, length);
            kv8_free(got.data);
        }
    }
}

static void invalid_utf8_names_its_offset(void **state) {
    (void)state;
    static const struct {
        const char *text;
        const char *offset;
    } cases[] = {
        {"\x80", "offset 0"},
        {"abc\xff", "offset 3"},
        {"a\xc0\x80", "offset 1"},
        {"a\xc1\xbf", "offset 1"},
        {"\xe0\x9f\xbf", "offset 0"},
        {"12345678\xf0\x8f\xbf\xbf", "offset 8"},
        {"\xed\xa0\x80", "offset 0"},
        {"x\xed\xbf\xbf", "offset 1"},
        {"\xf4\x90\x80\x80", "offset 0"},
        {"\xf5\x80\x80\x80", "offset 0"},
        {"ab\xc3", "offset 2"},
        {"\xe2\x82", "offset 0"},
        {"\xf0\x9f\x98", "offset 0"},
        {"\xe2\x82\x41", "offset 0"},
        {"\xc3\xa9\xc3\xa9\xa9", "offset 4"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t *data = NULL;
        size_t count = 77;
        assert_refused(kv8_tokenizer_encode(tiny, cases[i].text, strlen(cases[i].text),
                                            KV8_SPECIAL_AS_TOKENS, &data, &count),
                       KV8_ERR_INVALID, cases[i].offset);
        assert_null(data);
        assert_int_equal(count, 77);
    }
}

static void complete_length_of_every_prefix(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t complete;
    } cases[] = {
        {"", 0},
        {"a", 1},
        {"a\xc3", 1},
        {"a\xc3\xa9", 3},
        {"\xe2\x82", 0},
        {"\xe2", 0},
        {"\xe2\x82\xac", 3},
        {"x\xf0\x9f\x98", 1},
        {"x\xf0\x9f", 1},
        {"x\xf0", 1},
        {"\xf0\x9f\x98\x80", 4},
        {"\x80", 1},
        {"\x80\x80\x80", 3},
        {"a\xc0", 2},
        {"a\xf5", 2},
        {"\xe0\x80", 2},
        {"\xed\xa0", 2},
        {"\xf4\x90", 2},
        {"\xf4\x8f\xbf", 0},
        {"\xc3\xc3", 1},
        {"\xe2\x82\xe2", 2},
        {"\xf0\x9f\x98\xf0\x9f", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(kv8_utf8_complete_length(cases[i].bytes, strlen(cases[i].bytes)),
                         cases[i].complete);
}

static void tokens_and_specials(void **state) {
    (void)state;
    assert_int_equal(kv8_tokenizer_vocab_size(tiny), 4096);
    assert_int_equal(kv8_tokenizer_special_id(tiny, "<|start|>"), 4088);
    assert_int_equal(kv8_tokenizer_special_id(tiny, "<|star"), -1);
    assert_int_equal(kv8_tokenizer_special_id(tiny, "a"), -1);
    assert_true(kv8_tokenizer_is_special(tiny, 4095));
    assert_false(kv8_tokenizer_is_special(tiny, 4079));
    assert_false(kv8_tokenizer_is_special(tiny, -1));
    assert_false(kv8_tokenizer_is_special(tiny, 4096));
    size_t length = 9;
    assert_null(kv8_tokenizer_token_bytes(tiny, -1, &length));
    assert_int_equal(length, 0);
    assert_null(kv8_tokenizer_token_bytes(tiny, 4096, &length));
    assert_memory_equal(kv8_tokenizer_token_bytes(tiny, 4089, &length), "<|end|>", 7);
    assert_int_equal(length, 7);
}

/* --- a tokenizer of our own: 256 bytes, "ab", "abc" that no merge makes, odd specials --- */

static void byte_level_string(unsigned char byte, char *out) {
    uint32_t code = byte, others = 0;
    for (uint32_t b = 0; b <= byte; b++) {
        const bool same = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        if (b == byte && !same) code = 0x100 + others;
        others += !same;
    }
    out[put_utf8(out, code)] = '\0';
}

static json_t *own_tokenizer(const char *pattern, bool ignore_merges) {
    json_t *const vocab = json_object();
    for (int byte = 0; byte < 256; byte++) {
        char key[8];
        byte_level_string((unsigned char)byte, key);
        json_object_set_new(vocab, key, json_integer(byte));
    }
    json_object_set_new(vocab, "ab", json_integer(256));
    json_object_set_new(vocab, "abc", json_integer(257));
    json_object_set_new(vocab, "bc", json_integer(258));
    json_object_set_new(vocab, "<x>", json_integer(259));
    json_error_t error;
    json_t *const root = json_pack_ex(
        &error, 0,
        "{s:s, s:n, s:n, s:[{s:i,s:s,s:b},{s:i,s:s,s:b},{s:i,s:s,s:b}], s:n,"
        " s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b}]}, s:{s:s},"
        " s:{s:s, s:b, s:o, s:[s,[s,s]]}}",
        "version", "1.0", "truncation", "padding", "added_tokens", "id", 259, "content", "<x>",
        "special", 1, "id", 260, "content", "<x>y", "special", 1, "id", 300, "content", "y<x>",
        "special", 1, "normalizer", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type",
        "Split", "pattern", "Regex", pattern, "behavior", "Isolated", "invert", 0, "type",
        "ByteLevel", "add_prefix_space", 0, "use_regex", 0, "decoder", "type", "ByteLevel", "model",
        "type", "BPE", "ignore_merges", (int)ignore_merges, "vocab", vocab, "merges", "b c", "a",
        "b");
    if (root == NULL) fail_msg("%s", error.text);
    return root;
}

/* Takes the JSON away. */
static kv8_status parse(kv8_tokenizer **out, json_t *root) {
    char *const text = json_dumps(root, 0);
    assert_non_null(text);
    const kv8_status status = kv8_tokenizer_parse(out, text, strlen(text), "test.json");
    free(text);
    json_decref(root);
    return status;
}

static void assert_encodes(const kv8_tokenizer *tokenizer, kv8_special special, const char *text,
                           size_t count, const int32_t *wanted) {
    const ids got = encode(tokenizer, text, strlen(text), special);
    assert_int_equal(got.count, count);
    assert_memory_equal(got.data, wanted, count * sizeof *wanted);
    kv8_free(got.data);
}
#define ENCODES(tokenizer, special, text, ...)                               \
    assert_encodes(tokenizer, special, text,                                 \
                   sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t), \
                   (const int32_t[]){__VA_ARGS__})

static void merges_decide_unless_ignored(void **state) {
    (void)state;
    kv8_tokenizer *tokenizer = NULL;
    assert_ok(parse(&tokenizer, own_tokenizer("\\s+|\\S+", false)));
    ENCODES(tokenizer, KV8_SPECIAL_AS_TEXT, "abc", 'a', 258); /* "b c" ranks before "a b" */
    ENCODES(tokenizer, KV8_SPECIAL_AS_TEXT, "abab", 256, 256);
    kv8_tokenizer_close(tokenizer);
    assert_ok(parse(&tokenizer, own_tokenizer("\\s+|\\S+", true)));
    ENCODES(tokenizer, KV8_SPECIAL_AS_TEXT, "abc", 257);
    ENCODES(tokenizer, KV8_SPECIAL_AS_TEXT, "abca", 'a', 258, 'a');
    /* Text between matches is a piece as well. */
    kv8_tokenizer_close(tokenizer);
    assert_ok(parse(&tokenizer, own_tokenizer("-", true)));
    ENCODES(tokenizer, KV8_SPECIAL_AS_TEXT, "abc--ab-c", 257, '-', '-', 256, '-', 'c');
    kv8_tokenizer_close(tokenizer);
}

static void longest_special_leftmost(void **state) {
    (void)state;
    kv8_tokenizer *tokenizer = NULL;
    assert_ok(parse(&tokenizer, own_tokenizer("\\s+|\\S+", true)));
    ENCODES(tokenizer, KV8_SPECIAL_AS_TOKENS, "<x>", 259);
    ENCODES(tokenizer, KV8_SPECIAL_AS_TOKENS, "a<x>yb", 'a', 260, 'b');
    ENCODES(tokenizer, KV8_SPECIAL_AS_TOKENS, "y<x>y", 300, 'y');
    ENCODES(tokenizer, KV8_SPECIAL_AS_TOKENS, "<x><x>y<x>", 259, 260, 259);
    /* As text a special stays text, even where the whole piece is its name. */
    ENCODES(tokenizer, KV8_SPECIAL_AS_TEXT, "<x>", '<', 'x', '>');
    assert_int_equal(kv8_tokenizer_vocab_size(tokenizer), 301);
    size_t length;
    assert_null(kv8_tokenizer_token_bytes(tokenizer, 299, &length)); /* nobody has this id */
    kv8_tokenizer_close(tokenizer);
}

static double seconds_to_encode(const kv8_tokenizer *tokenizer, const char *text, size_t length) {
    const clock_t begin = clock();
    const ids got = encode(tokenizer, text, length, KV8_SPECIAL_AS_TOKENS);
    assert_decodes_to(tokenizer, got, text, length);
    kv8_free(got.data);
    return (double)(clock() - begin) / CLOCKS_PER_SEC;
}

/* Runs that make the o200k pattern look ahead or give back as far as it can. */
static void hostile_texts_take_linear_time(void **state) {
    (void)state;
    static const char *const units[] = {
        "A",   " ",  "\n",           "\r\n ",     " \n",     "'",     "!",
        "/",   "1",  "\xcc\x81",     "a\xcc\x81", "A'",      "<|end", "<|",
        "\t ", "Aa", "\xe6\xbc\xa2", "\xc7\x85",  "\xca\xb0"};
    const size_t length = 1 << 18;
    char *const text = malloc(length + 1);
    assert_non_null(text);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const size_t unit = strlen(units[i]), used = length / unit * unit;
        for (size_t at = 0; at < used; at += unit) memcpy(text + at, units[i], unit);
        text[used] = 'x';
        const double seconds = seconds_to_encode(tiny, text, used + 1);
        if (!(seconds < 5)) fail_msg("\"%s\" over and over: %.1f s", units[i], seconds);
    }
    free(text);
}

/* A pattern that tries every way to cut the text is stopped, and says so. */
static void hopeless_pattern_gives_up(void **state) {
    (void)state;
    kv8_tokenizer *tokenizer = NULL;
    assert_ok(parse(&tokenizer, own_tokenizer("(?:a|aa|aaa)+(?:a|aa)+b", true)));
    char text[256]; /* the b is there, out of reach, else the matcher would not even begin */
    memset(text, 'a', sizeof text);
    text[254] = 'c';
    text[255] = 'b';
    int32_t *data = NULL;
    size_t count;
    assert_refused(
        kv8_tokenizer_encode(tokenizer, text, sizeof text, KV8_SPECIAL_AS_TEXT, &data, &count),
        KV8_ERR_UNSUPPORTED, "match limit");
    assert_null(data);
    kv8_tokenizer_close(tokenizer);
}

/* --- files that are not what they should be --- */

/* Replaces (or, value NULL, removes) what stands at a path like "model.vocab" or "list.0.key". */
static void set_at(json_t *root, const char *path, const char *value) {
    char copy[128];
    snprintf(copy, sizeof copy, "%s", path);
    json_t *at = root;
    char *key = copy, *dot;
    for (; (dot = strchr(key, '.')) != NULL; key = dot + 1) {
        *dot = '\0';
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(key)) : json_object_get(at, key);
        assert_non_null(at);
    }
    json_t *const replacement = value == NULL ? NULL : json_loads(value, JSON_DECODE_ANY, NULL);
    assert_true(value == NULL || replacement != NULL);
    if (json_is_array(at) && value == NULL)
        json_array_remove(at, (size_t)atoi(key));
    else if (json_is_array(at))
        json_array_set_new(at, (size_t)atoi(key), replacement);
    else if (value == NULL)
        json_object_del(at, key);
    else
        json_object_set_new(at, key, replacement);
}

static void foreign_files_are_refused_by_name(void **state) {
    (void)state;
    static const struct {
        const char *path, *value;
        kv8_status status;
        const char *part;
    } cases[] = {
        {"version", "\"2.0\"", KV8_ERR_UNSUPPORTED, "version"},
        {"surprise", "null", KV8_ERR_UNSUPPORTED, "surprise"},
        {"truncation", "{\"max_length\": 5}", KV8_ERR_UNSUPPORTED, "truncation"},
        {"padding", "{}", KV8_ERR_UNSUPPORTED, "padding"},
        {"normalizer", "{\"type\": \"NFC\"}", KV8_ERR_UNSUPPORTED, "normalizer"},
        {"post_processor", "{\"type\": \"TemplateProcessing\"}", KV8_ERR_UNSUPPORTED,
         "post_processor"},
        {"decoder", "null", KV8_ERR_CORRUPT, "decoder"},
        {"decoder.type", "\"Metaspace\"", KV8_ERR_UNSUPPORTED, "Metaspace"},
        {"pre_tokenizer", "null", KV8_ERR_CORRUPT, "pre_tokenizer"},
        {"pre_tokenizer.type", "\"Whitespace\"", KV8_ERR_UNSUPPORTED, "Whitespace"},
        {"pre_tokenizer.pretokenizers.1", NULL, KV8_ERR_UNSUPPORTED, "pretokenizers"},
        {"pre_tokenizer.pretokenizers.0.type", "\"Digits\"", KV8_ERR_UNSUPPORTED, "Digits"},
        {"pre_tokenizer.pretokenizers.0.behavior", "\"Removed\"", KV8_ERR_UNSUPPORTED, "Removed"},
        {"pre_tokenizer.pretokenizers.0.invert", "true", KV8_ERR_UNSUPPORTED, "invert"},
        {"pre_tokenizer.pretokenizers.0.pattern", "{\"String\": \" \"}", KV8_ERR_UNSUPPORTED,
         "String"},
        {"pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(a\"", KV8_ERR_UNSUPPORTED,
         "does not compile"},
        {"pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a*\"", KV8_ERR_UNSUPPORTED, "empty"},
        {"pre_tokenizer.pretokenizers.0.pattern.Regex", "7", KV8_ERR_CORRUPT, "Regex"},
        {"pre_tokenizer.pretokenizers.1.add_prefix_space", "true", KV8_ERR_UNSUPPORTED,
         "add_prefix_space"},
        {"pre_tokenizer.pretokenizers.1.use_regex", "true", KV8_ERR_UNSUPPORTED, "use_regex"},
        {"pre_tokenizer.pretokenizers.1.use_regex", NULL, KV8_ERR_UNSUPPORTED, "use_regex"},
        {"model", NULL, KV8_ERR_CORRUPT, "model: missing"},
        {"model.type", "\"WordPiece\"", KV8_ERR_UNSUPPORTED, "WordPiece"},
        {"model.type", "3", KV8_ERR_CORRUPT, "model.type"},
        {"model.dropout", "0.1", KV8_ERR_UNSUPPORTED, "dropout"},
        {"model.unk_token", "\"<unk>\"", KV8_ERR_UNSUPPORTED, "unk_token"},
        {"model.continuing_subword_prefix", "\"##\"", KV8_ERR_UNSUPPORTED, "subword_prefix"},
        {"model.end_of_word_suffix", "\"</w>\"", KV8_ERR_UNSUPPORTED, "end_of_word_suffix"},
        {"model.fuse_unk", "true", KV8_ERR_UNSUPPORTED, "fuse_unk"},
        {"model.byte_fallback", "true", KV8_ERR_UNSUPPORTED, "byte_fallback"},
        {"model.ignore_merges", "1", KV8_ERR_CORRUPT, "ignore_merges"},
        {"model.max_input_chars_per_word", "100", KV8_ERR_UNSUPPORTED, "max_input_chars_per_word"},
        {"model.vocab", "[]", KV8_ERR_CORRUPT, "model.vocab"},
        {"model.vocab.ab", "-1", KV8_ERR_CORRUPT, "id -1"},
        {"model.vocab.ab", "1.5", KV8_ERR_CORRUPT, "\"ab\""},
        {"model.vocab.ab", "\"256\"", KV8_ERR_CORRUPT, "integer"},
        {"model.vocab.ab", "9223372036854775807", KV8_ERR_CORRUPT, "9223372036854775807"},
        {"model.vocab.ab", "2000000", KV8_ERR_CORRUPT, "2000000"},
        {"model.vocab.ab", "257", KV8_ERR_CORRUPT, "two tokens"},
        {"model.vocab.ab", "262", KV8_ERR_CORRUPT, "no token has id 256"},
        {"model.vocab.a", NULL, KV8_ERR_CORRUPT, "no token has id 97"},
        {"model.vocab.a b", "260", KV8_ERR_CORRUPT, "byte-level"},
        {"model.vocab.\xe6\xbc\xa2", "260", KV8_ERR_CORRUPT, "byte-level"},
        {"model.vocab.\xc5\x84", "260", KV8_ERR_CORRUPT, "byte-level"},
        {"model.vocab.", "260", KV8_ERR_CORRUPT, "byte-level"},
        {"model.merges", "{}", KV8_ERR_CORRUPT, "merges"},
        {"model.merges.0", "\"b  c\"", KV8_ERR_CORRUPT, "merges[0]"},
        {"model.merges.1", "[\"a\"]", KV8_ERR_CORRUPT, "merges[1]"},
        {"model.merges.1", "[\"a\", 5]", KV8_ERR_CORRUPT, "merges[1]"},
        {"model.merges.1", "[\"a\", \"zz\"]", KV8_ERR_CORRUPT, "\"zz\""},
        {"model.merges.1", "[\"a\", \"c\"]", KV8_ERR_CORRUPT, "make is no token"},
        {"model.merges.1", "[\"b\", \"c\"]", KV8_ERR_CORRUPT, "same pair"},
        {"model.merges.1", "[\"\", \"c\"]", KV8_ERR_CORRUPT, "merges[1]"},
        {"model.merges.1", "[\"ababababababababababab\", \"c\"]", KV8_ERR_CORRUPT, "merges[1]"},
        {"added_tokens", "{}", KV8_ERR_CORRUPT, "added_tokens"},
        {"added_tokens.1", "7", KV8_ERR_CORRUPT, "added_tokens[1]"},
        {"added_tokens.1.id", "259", KV8_ERR_CORRUPT, "two tokens"},
        {"added_tokens.0.id", "260", KV8_ERR_CORRUPT, "model.vocab"},
        {"added_tokens.1.id", "4000000000", KV8_ERR_CORRUPT, "4000000000"},
        {"added_tokens.1.id", NULL, KV8_ERR_CORRUPT, "added_tokens[1]"},
        {"added_tokens.1.content", "\"<x>\"", KV8_ERR_CORRUPT, "twice"},
        {"added_tokens.1.content", "\"\"", KV8_ERR_CORRUPT, "content"},
        {"added_tokens.1.content", "null", KV8_ERR_CORRUPT, "content"},
        {"added_tokens.1.lstrip", "true", KV8_ERR_UNSUPPORTED, "lstrip"},
        {"added_tokens.1.rstrip", "true", KV8_ERR_UNSUPPORTED, "rstrip"},
        {"added_tokens.1.single_word", "true", KV8_ERR_UNSUPPORTED, "single_word"},
        {"added_tokens.1.normalized", "true", KV8_ERR_UNSUPPORTED, "normalized"},
        {"added_tokens.1.special", "false", KV8_ERR_UNSUPPORTED, "special"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *const root = own_tokenizer("\\S+", true);
        set_at(root, cases[i].path, cases[i].value);
        kv8_tokenizer *tokenizer = tiny;
        const kv8_status status = parse(&tokenizer, root);
        if (status != cases[i].status)
            fail_msg("%s = %s: got %s (%s)", cases[i].path, cases[i].value, kv8_status_name(status),
                     status == KV8_OK ? "" : kv8_status_message());
        assert_refused(status, cases[i].status, cases[i].part);
        assert_refused(status, cases[i].status, "test.json: ");
        assert_null(tokenizer);
    }
}

static void broken_json_is_refused(void **state) {
    (void)state;
    json_t *const root = own_tokenizer("\\S+", true);
    char *const text = json_dumps(root, 0);
    const size_t length = strlen(text);
    json_decref(root);
    for (size_t cut = 0; cut < length; cut += 1 + length / 97) {
        kv8_tokenizer *tokenizer = tiny;
        assert_refused(kv8_tokenizer_parse(&tokenizer, text, cut, "cut.json"), KV8_ERR_CORRUPT,
                       "cut.json: line");
        assert_null(tokenizer);
    }
    free(text);
    kv8_tokenizer *tokenizer = tiny;
    static const char twice[] = "{\"version\": \"1.0\", \"version\": \"1.0\"}";
    assert_refused(kv8_tokenizer_parse(&tokenizer, twice, strlen(twice), "x"), KV8_ERR_CORRUPT,
                   "duplicate");
    assert_refused(kv8_tokenizer_parse(&tokenizer, "[]", 2, "x"), KV8_ERR_CORRUPT, "object");
    assert_refused(kv8_tokenizer_open(&tokenizer, "no/such/file"), KV8_ERR_NOT_FOUND,
                   "no/such/file");
    assert_null(tokenizer);
    kv8_tokenizer_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_like_tokenizers),
        cmocka_unit_test(held_out_text_like_tokenizers),
        cmocka_unit_test(million_letters_like_tokenizers),
        cmocka_unit_test(random_utf8_comes_back),
        cmocka_unit_test(invalid_utf8_names_its_offset),
        cmocka_unit_test(complete_length_of_every_prefix),
        cmocka_unit_test(tokens_and_specials),
        cmocka_unit_test(merges_decide_unless_ignored),
        cmocka_unit_test(longest_special_leftmost),
        cmocka_unit_test(hostile_texts_take_linear_time),
        cmocka_unit_test(hopeless_pattern_gives_up),
        cmocka_unit_test(foreign_files_are_refused_by_name),
        cmocka_unit_test(broken_json_is_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
