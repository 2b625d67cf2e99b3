/* api_request.h - what a client asks to have generated, whichever of the routes it came by: JSON
 * checked field by field, prompts as token ids. Knows no connection and no engine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_API_REQUEST_H
#define KV8_SERVER_API_REQUEST_H

#include <kv8/engine.h>
#include <kv8/harmony.h>

#include "answer_grammar.h"
#include "constraint_store.h"
#include "fields.h"
#include "output_text.h"

enum { API_MAX_CHOICES = 1024, API_MAX_STOPS = 64, API_MAX_LOGPROBS = 20 };

/* What requests are checked against. */
typedef struct api_model {
    const char *name;         /* the first is what answers say */
    const char *const *names; /* all that a request may say */
    size_t num_names;
    const kv8_tokenizer *tokenizer;
    const vocabulary *vocabulary;
    constraint_store *constraints;
    int32_t vocab_size, max_model_len;
    size_t max_prompt_bytes;  /* no longer text fits into max_model_len tokens */
    bool harmony;             /* chat output is parsed by channel */
    const char *current_date; /* of the chat's system message; NULL = no line */
} api_model;

typedef struct api_prompt {
    int32_t *ids;
    size_t num;
} api_prompt;

typedef struct api_request {
    json_t *body; /* owned; strings are borrowed from it */
    api_prompt *prompts;
    size_t num_prompts;
    int32_t n;         /* choices of every prompt */
    size_t num_primed; /* tokens at the prompt's end that the answer begins with */

    bool stream, include_usage, continuous_usage;
    bool echo, return_token_ids, return_tokens_as_ids, show_special, include_reasoning;
    bool wants_logprobs;         /* of generated tokens, and with echo of the prompt's */
    int32_t num_logprobs;        /* likeliest tokens beside each; 0 = the token's own alone */
    int32_t num_prompt_logprobs; /* -1 = not asked for */
    int32_t prompt_top;          /* what the engine is asked for; 0 = no logprobs of the prompt */

    stop_strings stops;
    int32_t *stop_ids;
    size_t num_stop_ids;
    bool ignore_eos;
    int32_t max_tokens; /* -1 = not given */
    int32_t min_tokens;
    int32_t priority;
    uint64_t cache_salt;
    kv8_sampling sampling;
    int32_t *bias_ids;
    float *bias;
    constraint *constraint; /* what the answer may be; NULL = anything */
} api_request;

/* Takes the body (an object). On failure the request is as api_request_free() takes it. */
bool api_request_read_completion(api_request *request, const api_model *model, json_t *body,
                                 api_error *error);
bool api_request_read_chat(api_request *request, const api_model *model, json_t *body,
                           api_error *error);
bool api_request_read_responses(api_request *request, const api_model *model, json_t *body,
                                api_error *error);
void api_request_free(api_request *request);

/* --- the parts --- */

/* Fields that all routes share: model, sampling, limits, stops, streaming. */
bool api_request_read_common(api_request *request, const api_model *model, const fields *f);
/* response_format, or what stands for it: the shape's schema or any_object. */
bool api_read_format(answer_shape *shape, const json_t *format, const char *param,
                     api_error *error);
/* The request's constraint. */
bool api_request_constrain(api_request *request, const api_model *model, const answer_shape *shape,
                           api_error *error);
/* Every prompt has room for max_tokens, which is chosen here when it was not given: at most
 * `fallback`. */
bool api_request_check_lengths(api_request *request, const api_model *model, int32_t fallback,
                               api_error *error);
/* A string or token ids as a prompt; `param` names it. */
bool api_prompt_read(api_prompt *prompt, const api_model *model, const json_t *value,
                     const char *param, api_error *error);
/* The model is one of those served; NULL or absent is fine. */
bool api_check_model(const api_model *model, const fields *f);

#endif
