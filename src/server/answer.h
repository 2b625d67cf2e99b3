/* answer.h - how what was generated is told: one table of functions for each kind of route, and the
 * pieces they share. Writes JSON and events, and knows no connection.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_ANSWER_H
#define KV8_SERVER_ANSWER_H

#include "generation.h"

typedef struct answer {
    generation *generation;
    char id[96];       /* "chatcmpl-..." */
    int64_t created;   /* Unix time */
    const char *model; /* the name that the request used */
    void *state;       /* the route's own, from malloc */
} answer;

typedef struct answer_kind {
    const char *id_prefix;
    bool is_chat; /* its tokens are messages */
    bool (*read)(api_request *request, const api_model *model, json_t *body, api_error *error);
    /* The whole answer, once every choice has ended. */
    json_t *(*whole)(answer *a);
    /* The stream: before the first token; what a choice has to say, if it has; after the last. */
    void (*stream_begin)(answer *a, byte_buffer *out);
    void (*stream_choice)(answer *a, generation_choice *spoken, byte_buffer *out);
    void (*stream_end)(answer *a, byte_buffer *out);
    void (*stream_fail)(answer *a, const api_error *error, byte_buffer *out);
} answer_kind;

extern const answer_kind completion_answer, chat_answer, responses_answer;

/* --- pieces --- */

/* JSON as it goes to clients. Takes the value; NULL (no memory) marks the buffer as failed. */
void answer_add_json(byte_buffer *out, json_t *value);
/* One event "data: {...}". Takes the value. */
void answer_add_event(byte_buffer *out, json_t *value);
/* The same after "event: NAME". */
void answer_add_named_event(byte_buffer *out, const char *name, json_t *value);

json_t *answer_usage(const generation *g);
json_t *answer_token_ids(const int32_t *ids, size_t num);
/* Of the unsent tokens of a choice; null where none were asked for. */
json_t *answer_completion_logprobs(const choice *said);
json_t *answer_chat_logprobs(const choice *said);
/* vLLM's prompt_logprobs: null, then {id: {logprob, rank, decoded_token}} for every token. */
json_t *answer_prompt_logprobs(const choice *said);

/* Adds to a chunk or a whole choice what both forms have besides text: finish_reason, stop_reason,
 * token_ids. `ended`: it tells the end. */
void answer_add_ending(json_t *object, const choice *said, bool ended);
/* Of chat and completions: the chunk's frame around one choice, with usage where asked for; the
 * usage event and [DONE]. */
json_t *answer_chunk(answer *a, const char *object, generation_choice *spoken, json_t *said);
void answer_end_chunks(answer *a, const char *object, byte_buffer *out);
void answer_fail_chunks(answer *a, const api_error *error, byte_buffer *out);
/* Unsent text. */
json_t *answer_unsent(const output_text *text);

#endif
