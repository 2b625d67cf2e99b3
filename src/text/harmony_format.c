/* harmony_format.c - control tokens, role words, and the reading of a header.
 *
 * Models vary their headers: the recipient before or after the channel, the content type with or
 * without <|constrain|>, with or without a space. Everything that can be understood is.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "harmony_format.h"

#include <string.h>

kv8_status kv8_harmony_control_find(const kv8_tokenizer *tokenizer,
                                    kv8_harmony_control *control_out) {
    kv8_harmony_control control;
    const struct {
        const char *text;
        int32_t *id;
    } wanted[] = {
        {"<|start|>", &control.start},
        {"<|message|>", &control.message},
        {"<|end|>", &control.end},
        {"<|call|>", &control.call},
        {"<|channel|>", &control.channel},
        {KV8_HARMONY_CONSTRAIN, &control.constrain},
        {"<|return|>", &control.end_of_return},
        {"<|endoftext|>", &control.end_of_text},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].id = kv8_tokenizer_special_id(tokenizer, wanted[i].text);
        if (*wanted[i].id < 0)
            return kv8_fail(KV8_ERR_UNSUPPORTED,
                            "harmony: the tokenizer has no control token \"%s\"", wanted[i].text);
    }
    *control_out = control;
    return KV8_OK;
}

static const char *const role_words[] = {[KV8_ROLE_SYSTEM] = "system",
                                         [KV8_ROLE_DEVELOPER] = "developer",
                                         [KV8_ROLE_USER] = "user",
                                         [KV8_ROLE_ASSISTANT] = "assistant"};
enum { NUM_ROLE_WORDS = sizeof role_words / sizeof *role_words };

const char *kv8_harmony_role_word(kv8_role role) {
    return (unsigned)role < NUM_ROLE_WORDS ? role_words[role] : NULL;
}

bool kv8_harmony_role_parse(const char *word, kv8_role *role_out, const char **name_out) {
    for (int role = 0; role < NUM_ROLE_WORDS; role++) {
        const size_t length = strlen(role_words[role]);
        if (strncmp(word, role_words[role], length) != 0) continue;
        if (word[length] != '\0' && word[length] != ':') continue;
        *role_out = (kv8_role)role;
        *name_out = word[length] == ':' && word[length + 1] != '\0' ? word + length + 1 : NULL;
        return true;
    }
    return false;
}

static bool is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* The next word from *at on, or NULL. The word is cut off with a 0; *cut_out is what the 0
 * replaced, so that the caller can undo it. */
static char *next_word(char **at, char *cut_out) {
    char *word = *at;
    while (is_space(*word)) word++;
    if (*word == '\0') return NULL;
    char *end = word;
    while (*end != '\0' && !is_space(*end)) end++;
    *cut_out = *end;
    *at = *end == '\0' ? end : end + 1;
    *end = '\0';
    return word;
}

/* Names that only tools have: one standing alone is a recipient whose "to=" is missing. */
static bool is_tool(const char *word) {
    static const char *const prefixes[] = {"functions.", "browser."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        if (strncmp(word, prefixes[i], strlen(prefixes[i])) == 0) return true;
    }
    return strcmp(word, "python") == 0;
}

/* Takes a word that says what it is. */
static bool take_marked(kv8_harmony_header *header, const char *word, bool *type_follows) {
    static const size_t marker = sizeof KV8_HARMONY_CONSTRAIN - 1;
    if (strncmp(word, "to=", 3) == 0) {
        if (word[3] != '\0') header->recipient = word + 3;
        return true;
    }
    if (strncmp(word, KV8_HARMONY_CONSTRAIN, marker) == 0) {
        *type_follows = word[marker] == '\0';
        if (!*type_follows) header->content_type = word + marker;
        return true;
    }
    if (*type_follows) {
        header->content_type = word;
        *type_follows = false;
        return true;
    }
    return false;
}

void kv8_harmony_header_parse(char *text, size_t role_length, bool after_start, bool ended,
                              kv8_harmony_header *header_out) {
    kv8_harmony_header header = {.role = KV8_ROLE_ASSISTANT, .rest = ""};
    const char *unmarked[2] = {NULL, NULL}; /* the last two words that do not say what they are */
    bool type_follows = false, first = true, any = false;
    kv8_role role;
    const char *name;
    char *at = text, *word, cut = '\0';
    while ((word = next_word(&at, &cut)) != NULL) {
        const bool may_be_role = first && (size_t)(word - text) < role_length;
        first = false;
        if (take_marked(&header, word, &type_follows)) {
            any = true;
        } else if (may_be_role && (after_start || ended) &&
                   kv8_harmony_role_parse(word, &role, &name)) {
            if (after_start) header.role = role, header.name = name;
            any = true;
        } else if (may_be_role && after_start && ended) {
            header.role = KV8_ROLE_TOOL;
            header.name = word;
        } else if (!ended) { /* the header stopped here and the model went on with content */
            word[strlen(word)] = cut;
            header.rest = any || role_length < SIZE_MAX ? word : text;
            break;
        } else {
            unmarked[0] = unmarked[1];
            unmarked[1] = word;
        }
    }
    const char *const last = unmarked[1];
    if (last != NULL && unmarked[0] == NULL && header.recipient == NULL && is_tool(last)) {
        header.recipient = last;
    } else if (last != NULL) {
        if (header.content_type == NULL) header.content_type = last;
        if (header.recipient == NULL) header.recipient = unmarked[0];
    }
    *header_out = header;
}
