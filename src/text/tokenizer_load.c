/* tokenizer_load.c - tokenizer.json to tables, once, and the JSON is gone.
 *
 * The file is read as a list of what gpt-oss' converter writes; every key is either understood,
 * known to change nothing, or refused by name. Nothing is skipped: a tokenizer that is almost right
 * gives wrong tokens without a word.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include <jansson.h>

#include "tokenizer_tables.h"

enum {
    MAX_FILE = 256 << 20, /* nine times o200k_harmony's */
    MAX_IDS = 1 << 21,    /* ten times o200k_harmony's */
    MAX_ADDED = 4096,     /* o200k_harmony has 21 */
    NUM_CODE_POINTS = 0x144
};

/* The byte that each code point of a byte-level string stands for, or -1. Printable Latin-1 stands
 * for itself; the other 68 bytes, in order, are U+0100 and up. */
typedef struct byte_level {
    int16_t byte_of[NUM_CODE_POINTS];
} byte_level;

static void byte_level_init(byte_level *map) {
    for (int32_t i = 0; i < NUM_CODE_POINTS; i++) map->byte_of[i] = -1;
    int32_t next = 0x100;
    for (int32_t byte = 0; byte < 256; byte++) {
        const bool printable =
            (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
        map->byte_of[printable ? byte : next++] = (int16_t)byte;
    }
}

/* Bytes of a byte-level string (valid UTF-8, as jansson checks), written to `bytes` (length bytes
 * of room). false on a character that stands for no byte. */
static bool byte_level_decode(const byte_level *map, const char *text, size_t length, char *bytes,
                              size_t *length_out) {
    size_t done = 0;
    for (size_t i = 0; i < length; i++) {
        uint32_t code = (uint8_t)text[i];
        if (code >= 0x80) { /* every character of the map has at most two bytes */
            if (code >= 0xe0 || i + 1 == length) return false;
            code = (code & 0x1f) << 6 | ((uint8_t)text[++i] & 0x3f);
        }
        if (code >= NUM_CODE_POINTS || map->byte_of[code] < 0) return false;
        bytes[done++] = (char)(unsigned char)map->byte_of[code];
    }
    *length_out = done;
    return true;
}

/* --- what a key may be --- */

static kv8_status want_object(const json_t *value, const char *where) {
    if (!json_is_object(value))
        return kv8_fail(KV8_ERR_CORRUPT, "%s: %s", where,
                        value == NULL ? "missing" : "not an object");
    return KV8_OK;
}

/* Every key must be one of the space-separated words of `known`. */
static kv8_status want_only(json_t *object, const char *where, const char *known) {
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value) {
        const size_t length = strlen(key);
        bool found = false;
        for (const char *word = known; !found && *word != '\0';) {
            const size_t word_length = strcspn(word, " ");
            found = word_length == length && memcmp(word, key, length) == 0;
            word += word_length;
            word += *word == ' ';
        }
        if (!found)
            return kv8_fail(KV8_ERR_UNSUPPORTED, "%s.%.64s: this key is not supported", where, key);
    }
    return KV8_OK;
}

static kv8_status want_null(const json_t *object, const char *where, const char *key) {
    const json_t *const value = json_object_get(object, key);
    if (value != NULL && !json_is_null(value))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s.%s: only null is supported", where, key);
    return KV8_OK;
}

static kv8_status want_no_text(const json_t *object, const char *where, const char *key) {
    const json_t *const value = json_object_get(object, key);
    if (json_is_string(value) && json_string_length(value) == 0) return KV8_OK;
    return want_null(object, where, key);
}

static kv8_status want_string(const json_t *object, const char *where, const char *key,
                              const char *wanted) {
    const char *const text = json_string_value(json_object_get(object, key));
    if (text == NULL) return kv8_fail(KV8_ERR_CORRUPT, "%s.%s: not a string", where, key);
    if (strcmp(text, wanted) != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s.%s: \"%.64s\", only \"%s\" is supported", where,
                        key, text, wanted);
    return KV8_OK;
}

/* A boolean; absent means `when_absent`. */
static kv8_status read_bool(const json_t *object, const char *where, const char *key,
                            bool when_absent, bool *out) {
    const json_t *const value = json_object_get(object, key);
    if (value != NULL && !json_is_boolean(value))
        return kv8_fail(KV8_ERR_CORRUPT, "%s.%s: not true or false", where, key);
    *out = value == NULL ? when_absent : json_is_true(value);
    return KV8_OK;
}

static kv8_status want_bool(const json_t *object, const char *where, const char *key,
                            bool when_absent, bool wanted) {
    bool value = false;
    KV8_TRY(read_bool(object, where, key, when_absent, &value));
    if (value != wanted)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s.%s: only %s is supported", where, key,
                        wanted ? "true" : "false");
    return KV8_OK;
}

static kv8_status read_id(const json_t *value, int32_t *out) {
    if (!json_is_integer(value)) return kv8_fail(KV8_ERR_CORRUPT, "the id is not an integer");
    const json_int_t id = json_integer_value(value);
    if (id < 0 || id >= MAX_IDS)
        return kv8_fail(KV8_ERR_CORRUPT, "id %" JSON_INTEGER_FORMAT " is outside 0..%d", id,
                        MAX_IDS - 1);
    *out = (int32_t)id;
    return KV8_OK;
}

/* --- the parts of the file --- */

typedef struct loader {
    kv8_tokenizer *tokenizer;
    json_t *vocab, *merges, *added;
    byte_level map;
    int32_t num_vocab_ids; /* one more than the vocab's largest; beyond may be holes */
    char *scratch;         /* [scratch_size]: the longest vocab entry or merge, as bytes */
    size_t scratch_size;
} loader;

/* Things that add nothing to the ids, and those that would. */
static kv8_status check_surroundings(json_t *root) {
    KV8_TRY(want_object(root, "the file"));
    KV8_TRY(want_only(root, "(top)",
                      "version truncation padding added_tokens normalizer pre_tokenizer "
                      "post_processor decoder model"));
    KV8_TRY(want_string(root, "(top)", "version", "1.0"));
    KV8_TRY(want_null(root, "(top)", "truncation"));
    KV8_TRY(want_null(root, "(top)", "padding"));
    KV8_TRY(want_null(root, "(top)", "normalizer"));
    const json_t *const decoder = json_object_get(root, "decoder");
    KV8_TRY(want_object(decoder, "decoder"));
    KV8_TRY(want_string(decoder, "decoder", "type", "ByteLevel"));
    const json_t *const post = json_object_get(root, "post_processor");
    if (post == NULL || json_is_null(post)) return KV8_OK;
    KV8_TRY(want_object(post, "post_processor")); /* ByteLevel moves offsets only */
    return want_string(post, "post_processor", "type", "ByteLevel");
}

static kv8_status load_pre_tokenizer(loader *self, json_t *pre) {
    KV8_TRY(want_object(pre, "pre_tokenizer"));
    KV8_TRY(want_only(pre, "pre_tokenizer", "type pretokenizers"));
    KV8_TRY(want_string(pre, "pre_tokenizer", "type", "Sequence"));
    const json_t *const steps = json_object_get(pre, "pretokenizers");
    if (!json_is_array(steps) || json_array_size(steps) != 2)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "pre_tokenizer.pretokenizers: only Split and then ByteLevel is supported");

    json_t *const split = json_array_get(steps, 0);
    KV8_TRY(want_object(split, "pretokenizers[0]"));
    KV8_TRY(want_string(split, "pretokenizers[0]", "type", "Split"));
    KV8_TRY(want_only(split, "Split", "type pattern behavior invert"));
    KV8_TRY(want_string(split, "Split", "behavior", "Isolated"));
    KV8_TRY(want_bool(split, "Split", "invert", false, false));
    json_t *const pattern = json_object_get(split, "pattern");
    KV8_TRY(want_object(pattern, "Split.pattern"));
    KV8_TRY(want_only(pattern, "Split.pattern", "Regex"));
    const json_t *const regex = json_object_get(pattern, "Regex");
    if (!json_is_string(regex))
        return kv8_fail(KV8_ERR_CORRUPT, "Split.pattern.Regex: not a string");
    const kv8_status compiled = kv8_split_pattern_compile(
        &self->tokenizer->pattern, json_string_value(regex), json_string_length(regex));
    if (compiled != KV8_OK) return kv8_fail_within(compiled, "Split.pattern.Regex");

    json_t *const bytes = json_array_get(steps, 1);
    KV8_TRY(want_object(bytes, "pretokenizers[1]"));
    KV8_TRY(want_string(bytes, "pretokenizers[1]", "type", "ByteLevel"));
    KV8_TRY(want_only(bytes, "ByteLevel", "type add_prefix_space trim_offsets use_regex"));
    KV8_TRY(want_bool(bytes, "ByteLevel", "add_prefix_space", true, false));
    return want_bool(bytes, "ByteLevel", "use_regex", true, false);
}

/* The model's switches, and where its two lists are. */
static kv8_status check_model(loader *self, json_t *model) {
    KV8_TRY(want_object(model, "model"));
    KV8_TRY(want_only(model, "model",
                      "type dropout unk_token continuing_subword_prefix end_of_word_suffix "
                      "fuse_unk byte_fallback ignore_merges vocab merges"));
    KV8_TRY(want_string(model, "model", "type", "BPE"));
    KV8_TRY(want_null(model, "model", "dropout"));
    KV8_TRY(want_null(model, "model", "unk_token"));
    KV8_TRY(want_no_text(model, "model", "continuing_subword_prefix"));
    KV8_TRY(want_no_text(model, "model", "end_of_word_suffix"));
    KV8_TRY(want_bool(model, "model", "fuse_unk", false, false));
    KV8_TRY(want_bool(model, "model", "byte_fallback", false, false));
    KV8_TRY(read_bool(model, "model", "ignore_merges", false,
                      &self->tokenizer->bpe.whole_pieces_first));
    self->vocab = json_object_get(model, "vocab");
    self->merges = json_object_get(model, "merges");
    KV8_TRY(want_object(self->vocab, "model.vocab"));
    if (!json_is_array(self->merges))
        return kv8_fail(KV8_ERR_CORRUPT, "model.merges: not an array");
    return KV8_OK;
}

/* Counting pass: sizes the tables before the first entry goes in. */
static kv8_status create_tables(loader *self) {
    const bool whole_pieces_first = self->tokenizer->bpe.whole_pieces_first;
    int32_t num_ids = 0, id = 0;
    size_t num_bytes = 0, longest = 0;
    const char *key;
    json_t *value;
    json_object_foreach(self->vocab, key, value) {
        const kv8_status status = read_id(value, &id);
        if (status != KV8_OK) return kv8_fail_within(status, "model.vocab[\"%.64s\"]", key);
        const size_t length = strlen(key);
        num_ids = id >= num_ids ? id + 1 : num_ids;
        num_bytes += length;
        longest = length > longest ? length : longest;
    }
    if ((size_t)num_ids > json_object_size(self->vocab) + json_array_size(self->added))
        return kv8_fail(KV8_ERR_CORRUPT,
                        "model.vocab: id %d with only %zu tokens leaves ids unused", num_ids - 1,
                        json_object_size(self->vocab));
    self->num_vocab_ids = num_ids;
    for (size_t i = 0; i < json_array_size(self->added); i++) {
        const json_t *const token = json_array_get(self->added, i);
        const kv8_status status = read_id(json_object_get(token, "id"), &id);
        if (status != KV8_OK) return kv8_fail_within(status, "added_tokens[%zu]", i);
        num_ids = id >= num_ids ? id + 1 : num_ids;
        num_bytes += json_string_length(json_object_get(token, "content"));
    }
    KV8_TRY(
        kv8_bpe_create(&self->tokenizer->bpe, num_ids, num_bytes, json_array_size(self->merges)));
    self->tokenizer->bpe.whole_pieces_first = whole_pieces_first;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)num_ids, sizeof(bool), "special flags", &memory));
    self->tokenizer->is_special = memory;
    KV8_TRY(kv8_alloc(NULL, MAX_ADDED, sizeof(int32_t), "specials", &memory));
    self->tokenizer->specials = memory;
    self->scratch_size = 2 * longest + 1; /* a merge is two entries side by side */
    KV8_TRY(kv8_alloc(NULL, self->scratch_size, 1, "token scratch", &memory));
    self->scratch = memory;
    return KV8_OK;
}

static kv8_status add_special(loader *self, json_t *entry) {
    kv8_tokenizer *const tokenizer = self->tokenizer;
    KV8_TRY(want_only(entry, "(token)", "id content single_word lstrip rstrip normalized special"));
    const json_t *const content = json_object_get(entry, "content");
    if (!json_is_string(content) || json_string_length(content) == 0)
        return kv8_fail(KV8_ERR_CORRUPT, "content: not a string of at least one character");
    KV8_TRY(want_bool(entry, "(token)", "single_word", false, false));
    KV8_TRY(want_bool(entry, "(token)", "lstrip", false, false));
    KV8_TRY(want_bool(entry, "(token)", "rstrip", false, false));
    KV8_TRY(want_bool(entry, "(token)", "normalized", false, false));
    KV8_TRY(want_bool(entry, "(token)", "special", false, true));
    const char *const text = json_string_value(content);
    if (kv8_tokenizer_special_id(tokenizer, text) >= 0)
        return kv8_fail(KV8_ERR_CORRUPT, "\"%.64s\" is there twice", text);
    int32_t id = 0;
    KV8_TRY(read_id(json_object_get(entry, "id"), &id));
    const json_t *const in_vocab = json_object_get(self->vocab, text);
    if (in_vocab != NULL && json_integer_value(in_vocab) != id)
        return kv8_fail(KV8_ERR_CORRUPT,
                        "\"%.64s\" has id %d here and %" JSON_INTEGER_FORMAT " in model.vocab",
                        text, id, json_integer_value(in_vocab));
    KV8_TRY(kv8_bpe_add_token(&tokenizer->bpe, id, text, json_string_length(content), false));
    tokenizer->is_special[id] = true;
    tokenizer->special_lead[(uint8_t)text[0]] = true;
    tokenizer->specials[tokenizer->num_specials++] = id;
    return KV8_OK;
}

/* Longest text first, so that the first that fits is the longest. */
static void sort_specials(kv8_tokenizer *tokenizer) {
    for (size_t i = 1; i < tokenizer->num_specials; i++) {
        const int32_t id = tokenizer->specials[i];
        const uint32_t length = tokenizer->bpe.token_lengths[id];
        size_t at = i;
        for (; at > 0; at--) {
            const int32_t before = tokenizer->specials[at - 1];
            if (tokenizer->bpe.token_lengths[before] >= length) break;
            tokenizer->specials[at] = before;
        }
        tokenizer->specials[at] = id;
    }
}

static kv8_status load_specials(loader *self) {
    for (size_t i = 0; i < json_array_size(self->added); i++) {
        const kv8_status status = add_special(self, json_array_get(self->added, i));
        if (status != KV8_OK) return kv8_fail_within(status, "added_tokens[%zu]", i);
    }
    sort_specials(self->tokenizer);
    return KV8_OK;
}

static kv8_status load_vocab(loader *self) {
    const char *key;
    json_t *value;
    json_object_foreach(self->vocab, key, value) {
        const int32_t id = (int32_t)json_integer_value(value);
        if (self->tokenizer->is_special[id] && kv8_tokenizer_special_id(self->tokenizer, key) == id)
            continue;
        size_t length = 0;
        if (!byte_level_decode(&self->map, key, strlen(key), self->scratch, &length) || length == 0)
            return kv8_fail(KV8_ERR_CORRUPT, "model.vocab[\"%.64s\"]: not a byte-level string",
                            key);
        const kv8_status status =
            kv8_bpe_add_token(&self->tokenizer->bpe, id, self->scratch, length, true);
        if (status != KV8_OK) return kv8_fail_within(status, "model.vocab[\"%.64s\"]", key);
    }
    for (int32_t id = 0; id < self->num_vocab_ids; id++) {
        if (self->tokenizer->bpe.token_lengths[id] == 0)
            return kv8_fail(KV8_ERR_CORRUPT, "model.vocab: no token has id %d", id);
    }
    return KV8_OK;
}

/* The two sides of a merge: a pair of strings or one string with a space between. */
static kv8_status merge_sides(const json_t *merge, const char *text[2], size_t length[2]) {
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        for (size_t side = 0; side < 2; side++) {
            const json_t *const value = json_array_get(merge, side);
            text[side] = json_string_value(value);
            length[side] = json_string_length(value);
        }
        if (text[0] != NULL && text[1] != NULL) return KV8_OK;
    } else if (json_is_string(merge)) {
        const char *const whole = json_string_value(merge);
        const char *const space = strchr(whole, ' ');
        if (space != NULL && strchr(space + 1, ' ') == NULL) {
            text[0] = whole;
            length[0] = (size_t)(space - whole);
            text[1] = space + 1;
            length[1] = json_string_length(merge) - length[0] - 1;
            return KV8_OK;
        }
    }
    return kv8_fail(KV8_ERR_CORRUPT, "not two strings");
}

static kv8_status add_merge(loader *self, const json_t *merge, uint32_t rank) {
    kv8_bpe *const bpe = &self->tokenizer->bpe;
    const char *text[2] = {NULL, NULL};
    size_t length[2] = {0, 0}, total = 0;
    int32_t ids[2] = {-1, -1};
    KV8_TRY(merge_sides(merge, text, length));
    for (int side = 0; side < 2; side++) {
        size_t bytes = 0;
        if (length[side] <= self->scratch_size / 2 &&
            byte_level_decode(&self->map, text[side], length[side], self->scratch + total, &bytes))
            ids[side] = kv8_bpe_find(bpe, self->scratch + total, bytes);
        if (ids[side] < 0)
            return kv8_fail(KV8_ERR_CORRUPT, "\"%.64s\" is no token of model.vocab", text[side]);
        total += bytes;
    }
    const int32_t merged = kv8_bpe_find(bpe, self->scratch, total);
    if (merged < 0)
        return kv8_fail(KV8_ERR_CORRUPT, "what \"%.64s\" and \"%.64s\" make is no token", text[0],
                        text[1]);
    return kv8_bpe_add_merge(bpe, ids[0], ids[1], rank, merged);
}

static kv8_status load_merges(loader *self) {
    const size_t count = json_array_size(self->merges);
    for (size_t i = 0; i < count; i++) {
        const kv8_status status = add_merge(self, json_array_get(self->merges, i), (uint32_t)i);
        if (status != KV8_OK) return kv8_fail_within(status, "model.merges[%zu]", i);
    }
    return KV8_OK;
}

static kv8_status load_all(loader *self, json_t *root) {
    KV8_TRY(check_surroundings(root));
    KV8_TRY(load_pre_tokenizer(self, json_object_get(root, "pre_tokenizer")));
    KV8_TRY(check_model(self, json_object_get(root, "model")));
    self->added = json_object_get(root, "added_tokens");
    if (self->added != NULL && !json_is_array(self->added))
        return kv8_fail(KV8_ERR_CORRUPT, "added_tokens: not an array");
    if (json_array_size(self->added) > MAX_ADDED)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "added_tokens: %zu of them, the limit is %d",
                        json_array_size(self->added), MAX_ADDED);
    for (size_t i = 0; i < json_array_size(self->added); i++) {
        if (!json_is_object(json_array_get(self->added, i)))
            return kv8_fail(KV8_ERR_CORRUPT, "added_tokens[%zu]: not an object", i);
    }
    KV8_TRY(create_tables(self));
    KV8_TRY(load_specials(self));
    KV8_TRY(load_vocab(self));
    KV8_TRY(kv8_bpe_finish(&self->tokenizer->bpe));
    return load_merges(self);
}

kv8_status kv8_tokenizer_parse(kv8_tokenizer **out, const char *json, size_t length,
                               const char *name) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(json, name);
    json_error_t error;
    errno = 0; /* the parser does not always say that memory ran out; malloc does */
    json_t *const root = json_loadb(json, length, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL && errno == ENOMEM)
        return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory to parse %zu bytes of JSON", name,
                        length);
    if (root == NULL)
        return kv8_fail(KV8_ERR_CORRUPT, "%s: line %d, column %d: %s", name, error.line,
                        error.column, error.text);
    loader self = {0};
    void *memory = NULL;
    kv8_status status = kv8_alloc(NULL, 1, sizeof *self.tokenizer, "tokenizer", &memory);
    self.tokenizer = memory;
    if (status == KV8_OK) {
        byte_level_init(&self.map);
        status = load_all(&self, root);
    }
    kv8_release(NULL, self.scratch, self.scratch_size, 1);
    json_decref(root);
    kv8_heap_trim(); /* o200k_harmony's JSON takes 150 MB while it lives */
    if (status != KV8_OK) {
        kv8_tokenizer_close(self.tokenizer);
        return kv8_fail_within(status, "%s", name);
    }
    *out = self.tokenizer;
    return KV8_OK;
}

kv8_status kv8_tokenizer_open(kv8_tokenizer **out, const char *path) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(path);
    char *json = NULL;
    size_t length = 0;
    KV8_TRY(kv8_file_read(path, MAX_FILE, &json, &length));
    const kv8_status status = kv8_tokenizer_parse(out, json, length, path);
    kv8_release(NULL, json, length + 1, 1);
    return status;
}

void kv8_tokenizer_close(kv8_tokenizer *tokenizer) {
    if (tokenizer == NULL) return;
    kv8_release(NULL, tokenizer->is_special, (size_t)tokenizer->bpe.num_ids, sizeof(bool));
    kv8_release(NULL, tokenizer->specials, MAX_ADDED, sizeof(int32_t));
    kv8_split_pattern_free(&tokenizer->pattern);
    kv8_bpe_destroy(&tokenizer->bpe);
    kv8_release(NULL, tokenizer, 1, sizeof *tokenizer);
}
