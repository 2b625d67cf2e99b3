/* choice.h - one choice of an answer while it is generated: what its tokens say, as text, reasoning
 * and calls, and where it ended. A completion's tokens are text; a chat's go through the harmony
 * parser.
 *
 * What a stream sends and what a whole answer holds is read from here, so the two are equal.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CHOICE_H
#define KV8_SERVER_CHOICE_H

#include "api_request.h"

/* A call of a function. */
typedef struct choice_call {
    char id[32];
    const char *name; /* without "functions."; borrowed from the parser */
    output_text arguments;
    size_t message_idx; /* of the parser */
    bool announced;     /* the stream has its id and name */
    int item_at;        /* its place among /v1/responses' items; -1 = none yet */
} choice_call;

/* The logprobs of one token; the likeliest follow in choice.top. */
typedef struct choice_logprob {
    int32_t token;
    float logprob; /* NAN = the first token of a prompt, which has none */
    int32_t num_top;
    size_t top_at;      /* in choice.top */
    size_t text_offset; /* characters of text before it */
} choice_logprob;

typedef enum choice_kind { CHOICE_TEXT, CHOICE_HARMONY } choice_kind;

typedef struct choice {
    const api_request *request;
    const api_model *model;
    choice_kind kind;
    int32_t index, prompt_idx;

    output_text text, reasoning;
    choice_call *calls;
    size_t num_calls, calls_capacity;
    kv8_harmony_parser *parser; /* CHOICE_HARMONY */

    int32_t *tokens; /* generated */
    size_t num_tokens, tokens_capacity, tokens_sent;
    choice_logprob *logprobs;
    size_t num_logprobs, logprobs_capacity, logprobs_sent;
    kv8_logprob *top;
    size_t num_top, top_capacity;
    size_t num_prompt_logprobs; /* of `logprobs`, the first ones */

    int32_t num_cached, num_reasoning_tokens;
    const char *finish_reason; /* NULL while it goes on */
    const char *stop_string;   /* that ended it, or NULL */
    int32_t stop_id;           /* of stop_token_ids that ended it, or -1 */
    bool failed_memory;
} choice;

/* A failure is the api's: memory, or a vocabulary without harmony's tokens. */
bool choice_begin(choice *c, const api_request *request, const api_model *model, choice_kind kind,
                  int32_t index, int32_t prompt_idx, api_error *error);
/* Takes what an event says. Returns true when the choice has ended by it; a stop string may end it
 * before the engine does. */
bool choice_take(choice *c, const kv8_event *event);
/* Bytes, reasoning or calls that were not sent yet. */
bool choice_has_news(const choice *c);
/* Everything so far counts as sent. */
void choice_mark_sent(choice *c);
void choice_free(choice *c);

#endif
