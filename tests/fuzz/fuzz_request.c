/* fuzz_request.c - foreign bytes as the body of a request, and as a JSON schema. The first byte
 * says which; the rest is the input.
 *
 *   'c' 'h' 'r'  a body of completions, chat or responses: taken or refused with a message
 *   's'          a schema: refused, or a grammar that can be followed from its beginning
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "api_request.h"
#include "json_grammar.h"

static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz_request: %s\n", what);
    abort();
}

static const api_model *tiny(void) {
    static const char *const names[] = {"tiny"};
    static kv8_tokenizer *tokenizer;
    static api_model model;
    if (tokenizer != NULL) return &model;
    must(kv8_tokenizer_open(&tokenizer, KV8_TINY_TOKENIZER) == KV8_OK, "tokenizer");
    const int32_t vocab_size = kv8_tokenizer_vocab_size(tokenizer);
    const vocabulary *const v = vocabulary_create(tokenizer, vocab_size, NULL, 0);
    constraint_store *const constraints = constraint_store_create();
    must(v != NULL && constraints != NULL, "vocabulary");
    model = (api_model){.name = names[0],
                        .names = names,
                        .num_names = 1,
                        .tokenizer = tokenizer,
                        .vocabulary = v,
                        .constraints = constraints,
                        .vocab_size = vocab_size,
                        .max_model_len = 4096,
                        .max_prompt_bytes = 1 << 16,
                        .harmony = true};
    return &model;
}

static void read_body(char kind, json_t *body) {
    api_request request;
    api_error error = {0};
    const bool good = kind == 'c'   ? api_request_read_completion(&request, tiny(), body, &error)
                      : kind == 'h' ? api_request_read_chat(&request, tiny(), body, &error)
                                    : api_request_read_responses(&request, tiny(), body, &error);
    must(good == (error.status == 0), "an error without a status, or a status without an error");
    must(good || error.message[0] != '\0', "an error without a message");
    must(!good || (request.num_prompts > 0 && request.max_tokens >= 0), "a request of nothing");
    api_request_free(&request);
}

static void compile(json_t *schema) {
    api_error error = {0};
    grammar *const g = grammar_create();
    must(g != NULL, "memory");
    const int entry = json_grammar_add(g, schema, "schema", grammar_end(g), &error);
    must((entry >= 0) == (error.status == 0), "a refusal without an error");
    if (entry >= 0) {
        int state = grammar_begin(g, entry);
        must(state != 0, "nothing begins a grammar that was taken");
        /* Some way into it: the lowest byte that leads on. */
        for (int i = 0; i < 64 && state != 0; i++) {
            int next = 0;
            for (int byte = 0; byte < 256 && next == 0; byte++) next = grammar_step(g, state, byte);
            state = next;
        }
    }
    grammar_destroy(g);
    json_decref(schema);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1 || size > 1 << 16) return 0;
    json_error_t why;
    json_t *const value = json_loadb((const char *)data + 1, size - 1, JSON_ALLOW_NUL, &why);
    if (value == NULL) return 0;
    if (data[0] == 's')
        compile(value);
    else if (json_is_object(value))
        read_body((char)data[0], value);
    else
        json_decref(value);
    return 0;
}
