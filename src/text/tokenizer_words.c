/* tokenizer_words.c - a tokenizer for a model that has none: every byte, every control token of
 * harmony, and a word of three syllables for each other id. It is written as a tokenizer.json and
 * read as one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base_impl.h"

#include <kv8/tokenizer.h>

enum { NUM_BYTES = 256, ENTRY_SIZE = 64, REST_SIZE = 4096, MAX_WORDS = 1000000 };

/* As gpt-oss has them; in a smaller vocabulary they are its last ids. */
static const struct {
    const char *text;
    int32_t id;
} specials[] = {{"<|startoftext|>", 199998}, {"<|endoftext|>", 199999}, {"<|return|>", 200002},
                {"<|constrain|>", 200003},   {"<|channel|>", 200005},   {"<|start|>", 200006},
                {"<|end|>", 200007},         {"<|message|>", 200008},   {"<|call|>", 200012}};
enum { NUM_SPECIALS = sizeof specials / sizeof specials[0], LARGEST_SPECIAL = 200012 };

static int32_t special_id(int32_t vocab_size, int32_t i) {
    return vocab_size > LARGEST_SPECIAL ? specials[i].id : vocab_size - NUM_SPECIALS + i;
}
static bool is_special(int32_t vocab_size, int32_t id) {
    for (int32_t i = 0; i < NUM_SPECIALS; i++) {
        if (special_id(vocab_size, i) == id) return true;
    }
    return false;
}

/* The code point that stands for a byte in a byte-level string. */
static unsigned byte_level(unsigned byte) {
    unsigned next = 0x100;
    for (unsigned b = 0; b <= byte; b++) {
        const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        if (b == byte) return printable ? byte : next;
        next += !printable;
    }
    return next;
}

/* A space and three syllables, other ones for each id below a million. */
static int print_word(char *out, size_t size, int32_t id) {
    static const char consonants[] = "bcdfghjklmnprstvwxyz", vowels[] = "aeiou";
    int used = snprintf(out, size, "\"\\u0120");
    for (int32_t i = 0, rest = id; i < 3; i++, rest /= 100)
        used += snprintf(out + used, size - (size_t)used, "%c%c", consonants[rest % 100 / 5],
                         vowels[rest % 5]);
    return used + snprintf(out + used, size - (size_t)used, "\": %d", id);
}

static size_t print_all(char *out, size_t size, int32_t vocab_size) {
    size_t at = (size_t)snprintf(out, size, "{\"version\": \"1.0\", \"added_tokens\": [");
    for (int32_t i = 0; i < NUM_SPECIALS; i++)
        at += (size_t)snprintf(out + at, size - at,
                               "%s{\"id\": %d, \"content\": \"%s\", \"special\": true, "
                               "\"normalized\": false}",
                               i == 0 ? "" : ", ", special_id(vocab_size, i), specials[i].text);
    at += (size_t)snprintf(
        out + at, size - at,
        "], \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", "
        "\"pattern\": {\"Regex\": \" ?[A-Za-z]+|\\\\s+|[^\\\\sA-Za-z]+\"}, \"behavior\": "
        "\"Isolated\"}, {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": "
        "false}]}, \"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", "
        "\"ignore_merges\": true, \"merges\": [], \"vocab\": {");
    for (int32_t id = 0; id < vocab_size; id++) {
        if (is_special(vocab_size, id)) continue;
        at += (size_t)snprintf(out + at, size - at, "%s", id == 0 ? "" : ", ");
        at += (size_t)(id < NUM_BYTES ? snprintf(out + at, size - at, "\"\\u%04x\": %d",
                                                 byte_level((unsigned)id), id)
                                      : print_word(out + at, size - at, id));
    }
    return at + (size_t)snprintf(out + at, size - at, "}}}");
}

kv8_status kv8_tokenizer_create_words(kv8_tokenizer **out, int32_t vocab_size) {
    KV8_REQUIRE(out);
    *out = NULL;
    if (vocab_size < NUM_BYTES + NUM_SPECIALS || vocab_size > MAX_WORDS)
        return kv8_fail(KV8_ERR_INVALID, "a vocabulary of %d words, must be %d to %d", vocab_size,
                        (int)NUM_BYTES + (int)NUM_SPECIALS, (int)MAX_WORDS);
    const size_t size = (size_t)vocab_size * ENTRY_SIZE + REST_SIZE;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, size, 1, "words", &memory));
    const size_t length = print_all(memory, size, vocab_size);
    const kv8_status status = kv8_tokenizer_parse(out, memory, length, "words");
    kv8_release(NULL, memory, size, 1);
    return status;
}
