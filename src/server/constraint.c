/* constraint.c - a grammar over the tokens of a vocabulary.
 *
 * What may come in a state is computed once, and kept. Two kinds of state take nearly everything
 * and would walk all tokens for it: in free text, and in a JSON string. Both are known by looping
 * back to themselves, and have the tokens that cannot leave them prepared.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "constraint.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TOKEN_BYTES = 512, MAX_MASKS = 512, NUM_CONTROL = GRAMMAR_NUM_SYMBOLS - 256 };

typedef struct sorted_token {
    const unsigned char *bytes;
    int32_t id, length;
    int32_t common; /* bytes it shares with the one before */
} sorted_token;

struct vocabulary {
    const kv8_tokenizer *tokenizer;
    size_t num_words;
    sorted_token *tokens; /* that stay in no string: [num_others], then the plain ones */
    size_t num_tokens, num_others;
    uint32_t *all, *plain; /* masks: every token with text; those of whole plain characters */
    int32_t control[NUM_CONTROL], eos[8];
    int32_t num_eos;
};

struct constraint {
    const vocabulary *vocabulary;
    grammar *grammar;
    int first;
    pthread_mutex_t lock;
    uint32_t *masks[MAX_MASKS]; /* by state; NULL = not computed */
};

static void set_bit(uint32_t *words, int32_t id) {
    words[id / 32] |= 1u << (id % 32);
}

/* --- the vocabulary --- */

/* Whole characters that a JSON string holds as they are. */
static bool is_plain(const unsigned char *bytes, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (bytes[i] < 0x20 || bytes[i] == '"' || bytes[i] == '\\' || bytes[i] == 0x7f)
            return false;
    }
    json_t *const string = json_stringn((const char *)bytes, length); /* checks the UTF-8 */
    json_decref(string);
    return string != NULL;
}

static int by_bytes(const void *a, const void *b) {
    const sorted_token *const x = a, *const y = b;
    const size_t least = (size_t)(x->length < y->length ? x->length : y->length);
    const int order = memcmp(x->bytes, y->bytes, least);
    return order != 0 ? order : (x->length > y->length) - (x->length < y->length);
}

static void sort(sorted_token *tokens, size_t num) {
    qsort(tokens, num, sizeof *tokens, by_bytes);
    for (size_t i = 1; i < num; i++) {
        int32_t common = 0;
        while (common < tokens[i].length && common < tokens[i - 1].length &&
               tokens[i].bytes[common] == tokens[i - 1].bytes[common])
            common++;
        tokens[i].common = common;
    }
}

/* Those of one kind go behind those that are there. */
static void collect(vocabulary *v, int32_t vocab_size, bool plain) {
    for (int32_t id = 0; id < vocab_size; id++) {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(v->tokenizer, id, &length);
        if (bytes == NULL || length == 0 || length > MAX_TOKEN_BYTES ||
            kv8_tokenizer_is_special(v->tokenizer, id) ||
            is_plain((const unsigned char *)bytes, length) != plain)
            continue;
        v->tokens[v->num_tokens++] = (sorted_token){
            .bytes = (const unsigned char *)bytes, .id = id, .length = (int32_t)length};
        set_bit(v->all, id);
        if (plain) set_bit(v->plain, id);
    }
}

vocabulary *vocabulary_create(const kv8_tokenizer *tokenizer, int32_t vocab_size,
                              const int32_t *eos, int32_t num_eos) {
    static const char *const control[NUM_CONTROL] = {"<|start|>",    "<|channel|>", "<|message|>",
                                                     "<|end|>",      "<|return|>",  "<|call|>",
                                                     "<|constrain|>"};
    vocabulary *const v = calloc(1, sizeof *v);
    if (v == NULL) return NULL;
    v->tokenizer = tokenizer;
    v->num_words = ((size_t)vocab_size + 31) / 32;
    v->tokens = calloc((size_t)vocab_size, sizeof *v->tokens);
    v->all = calloc(v->num_words, sizeof *v->all);
    v->plain = calloc(v->num_words, sizeof *v->plain);
    if (v->tokens == NULL || v->all == NULL || v->plain == NULL) {
        vocabulary_destroy(v);
        return NULL;
    }
    collect(v, vocab_size, false);
    v->num_others = v->num_tokens;
    collect(v, vocab_size, true);
    sort(v->tokens, v->num_others);
    sort(v->tokens + v->num_others, v->num_tokens - v->num_others);
    for (int i = 0; i < NUM_CONTROL; i++) {
        v->control[i] = kv8_tokenizer_special_id(tokenizer, control[i]);
        if (v->control[i] >= vocab_size) v->control[i] = -1;
    }
    for (int32_t i = 0; i < num_eos && v->num_eos < 8; i++)
        if (eos[i] >= 0 && eos[i] < vocab_size) v->eos[v->num_eos++] = eos[i];
    return v;
}

bool vocabulary_has_control(const vocabulary *v) {
    for (int i = 0; i < NUM_CONTROL; i++) {
        if (v->control[i] < 0) return false;
    }
    return true;
}

void vocabulary_destroy(vocabulary *v) {
    if (v == NULL) return;
    free(v->tokens);
    free(v->all);
    free(v->plain);
    free(v);
}

/* --- masks --- */

static bool loops(grammar *g, int state, int from, int to) {
    for (int byte = from; byte <= to; byte++) {
        if (byte != '"' && byte != '\\' && grammar_step(g, state, byte) != state) return false;
    }
    return true;
}

static bool is_free_text(grammar *g, int state) {
    return loops(g, state, 0, 255) && grammar_step(g, state, '"') == state &&
           grammar_step(g, state, '\\') == state;
}

/* Strings of all schemas are made by one function: two bytes tell for the longer characters too. */
static bool is_string(grammar *g, int state) {
    return loops(g, state, 0x20, 0x7e) &&
           grammar_step(g, grammar_step(g, state, 0xc3), 0xa9) == state;
}

static bool begins_alike(const sorted_token *a, const sorted_token *b, int32_t length) {
    return b->length >= length && memcmp(a->bytes, b->bytes, (size_t)length) == 0;
}

/* The first token after `from` that does not share its first `length` bytes: by strides that
 * double, then halve. */
static size_t skip_alike(const sorted_token *tokens, size_t num, size_t from, int32_t length) {
    size_t stride = 1, at = from; /* the last one known to share them */
    while (at + stride < num && begins_alike(&tokens[from], &tokens[at + stride], length)) {
        at += stride;
        stride *= 2;
    }
    for (; stride > 0; stride /= 2) {
        if (at + stride < num && begins_alike(&tokens[from], &tokens[at + stride], length))
            at += stride;
    }
    return at + 1;
}

/* Sets the bits of those tokens that the state goes on with. */
static void walk(grammar *g, int from, const sorted_token *tokens, size_t num, uint32_t *words) {
    int states[MAX_TOKEN_BYTES + 1]; /* after so many bytes of the token */
    int32_t alive = 0;               /* bytes that lead somewhere */
    states[0] = from;
    for (size_t i = 0; i < num;) {
        const sorted_token *const token = &tokens[i];
        if (token->common < alive) alive = token->common;
        while (alive < token->length) {
            const int to = grammar_step(g, states[alive], token->bytes[alive]);
            if (to == 0) break;
            states[++alive] = to;
        }
        if (alive == token->length) {
            set_bit(words, token->id);
            i++;
        } else {
            i = skip_alike(tokens, num, i, alive + 1);
        }
    }
}

static void compute(constraint *c, int state, uint32_t *words) {
    const vocabulary *const v = c->vocabulary;
    grammar *const g = c->grammar;
    if (is_free_text(g, state)) {
        memcpy(words, v->all, v->num_words * sizeof *words);
    } else {
        const bool string = is_string(g, state);
        if (string) memcpy(words, v->plain, v->num_words * sizeof *words);
        walk(g, state, v->tokens, v->num_others, words);
        if (!string)
            walk(g, state, v->tokens + v->num_others, v->num_tokens - v->num_others, words);
    }
    for (int i = 0; i < NUM_CONTROL; i++) {
        if (v->control[i] >= 0 && grammar_step(g, state, 256 + i) != 0)
            set_bit(words, v->control[i]);
    }
    for (int32_t i = 0; i < v->num_eos && grammar_may_end(g, state); i++) set_bit(words, v->eos[i]);
}

void constraint_mask(void *cookie, uint32_t *words) {
    const constraint_place *const place = cookie;
    constraint *const c = place->constraint;
    const size_t size = c->vocabulary->num_words * sizeof *words;
    pthread_mutex_lock(&c->lock);
    uint32_t *kept = place->state < MAX_MASKS ? c->masks[place->state] : NULL;
    if (kept == NULL && place->state < MAX_MASKS) {
        kept = calloc(1, size);
        if (kept != NULL) compute(c, place->state, kept);
        c->masks[place->state] = kept;
    }
    if (kept != NULL)
        memcpy(words, kept, size);
    else
        compute(c, place->state, words);
    pthread_mutex_unlock(&c->lock);
}

/* --- following --- */

constraint *constraint_create(const vocabulary *v, grammar *g, int entry) {
    const int first = grammar_begin(g, entry);
    constraint *const c = first == 0 ? NULL : calloc(1, sizeof *c);
    if (c == NULL) {
        grammar_destroy(g);
        return NULL;
    }
    c->vocabulary = v;
    c->grammar = g;
    c->first = first;
    pthread_mutex_init(&c->lock, NULL);
    return c;
}

void constraint_destroy(constraint *c) {
    if (c == NULL) return;
    for (int i = 0; i < MAX_MASKS; i++) free(c->masks[i]);
    grammar_destroy(c->grammar);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

constraint_place constraint_begin(constraint *c) {
    return (constraint_place){.constraint = c, .state = c->first};
}

void constraint_take(constraint_place *place, int32_t token) {
    constraint *const c = place->constraint;
    const vocabulary *const v = c->vocabulary;
    pthread_mutex_lock(&c->lock);
    int symbol = -1;
    for (int i = 0; i < NUM_CONTROL; i++) {
        if (v->control[i] == token) symbol = 256 + i;
    }
    if (symbol >= 0) {
        place->state = grammar_step(c->grammar, place->state, symbol);
    } else {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(v->tokenizer, token, &length);
        for (size_t i = 0; i < length; i++)
            place->state = grammar_step(c->grammar, place->state, (unsigned char)bytes[i]);
    }
    pthread_mutex_unlock(&c->lock);
}
