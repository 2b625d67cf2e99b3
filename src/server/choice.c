/* choice.c - one choice of an answer while it is generated.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* getrandom */
#include "choice.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Room for one more item of a growing array; NULL = no memory, which the choice notes. */
static void *grow(choice *c, void *items, size_t num, size_t *capacity, size_t size) {
    if (num < *capacity) return items;
    const size_t wanted = *capacity == 0 ? 16 : *capacity * 2;
    void *const grown = realloc(items, wanted * size);
    c->failed_memory |= grown == NULL;
    if (grown != NULL) *capacity = wanted;
    return grown;
}

/* --- text of a completion --- */

static void add_token_text(choice *c, int32_t token, bool show_special) {
    size_t length = 0;
    const char *const bytes = kv8_tokenizer_token_bytes(c->model->tokenizer, token, &length);
    if (bytes == NULL || (!show_special && kv8_tokenizer_is_special(c->model->tokenizer, token)))
        return;
    output_text_add(&c->text, bytes, length);
}

/* --- channels of a chat --- */

static bool add_call(choice *c, size_t message_idx, const char *recipient) {
    choice_call *const calls =
        grow(c, c->calls, c->num_calls, &c->calls_capacity, sizeof *c->calls);
    if (calls == NULL) return false;
    static const char prefix[] = "functions.";
    const size_t skip = strncmp(recipient, prefix, sizeof prefix - 1) == 0 ? sizeof prefix - 1 : 0;
    uint64_t random[2] = {0};
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return false;
    c->calls = calls;
    calls[c->num_calls] =
        (choice_call){.message_idx = message_idx, .name = recipient + skip, .item_at = -1};
    snprintf(calls[c->num_calls].id, sizeof calls->id, "call_%016llx%08llx",
             (unsigned long long)random[0], (unsigned long long)(random[1] >> 32));
    c->num_calls++;
    return true;
}

static choice_call *find_call(choice *c, size_t message_idx, const char *recipient) {
    for (size_t i = c->num_calls; i-- > 0;) {
        if (c->calls[i].message_idx == message_idx) return &c->calls[i];
    }
    return add_call(c, message_idx, recipient) ? &c->calls[c->num_calls - 1] : NULL;
}

static bool is_reasoning(const kv8_message *message) {
    return message->channel != NULL && strcmp(message->channel, "analysis") == 0;
}

/* Where an event's text goes: analysis is reasoning, a message to somebody is a call, the rest is
 * what the user reads. */
static void add_message_text(choice *c, const kv8_harmony_event *event) {
    const size_t message_idx = (size_t)event->message_idx;
    const kv8_message *const message = kv8_harmony_parser_message(c->parser, message_idx);
    if (message == NULL) return;
    output_text *text = &c->text;
    if (message->recipient != NULL) {
        choice_call *const call = find_call(c, message_idx, message->recipient);
        if (call == NULL) return;
        text = &call->arguments;
    } else if (is_reasoning(message)) {
        text = &c->reasoning;
    }
    output_text_add_characters(text, event->text, event->text_length);
    if (text != &c->text) output_text_release(text);
}

static void push_message_token(choice *c, int32_t token) {
    kv8_harmony_event event;
    if (kv8_harmony_parser_push(c->parser, token, &event) != KV8_OK) {
        c->failed_memory = true;
        return;
    }
    add_message_text(c, &event);
    const kv8_message *const message =
        kv8_harmony_parser_message(c->parser, (size_t)event.message_idx);
    if (message != NULL && message->recipient == NULL && is_reasoning(message))
        c->num_reasoning_tokens++;
}

/* --- logprobs --- */

static void add_logprob(choice *c, int32_t token, float logprob, const kv8_logprob *top,
                        int32_t num_top) {
    choice_logprob *const items =
        grow(c, c->logprobs, c->num_logprobs, &c->logprobs_capacity, sizeof *items);
    if (items == NULL) return;
    c->logprobs = items;
    items[c->num_logprobs++] = (choice_logprob){.token = token,
                                                .logprob = logprob,
                                                .num_top = num_top,
                                                .top_at = c->num_top,
                                                .text_offset = c->text.num_characters};
    for (int32_t i = 0; i < num_top; i++) {
        kv8_logprob *const grown = grow(c, c->top, c->num_top, &c->top_capacity, sizeof *grown);
        if (grown == NULL) return;
        c->top = grown;
        grown[c->num_top++] = top[i];
    }
}

/* Prompt tokens after the first in order, echoed as text where the request asks for that. */
static void take_prompt_logprobs(choice *c, const kv8_event *event) {
    const api_prompt *const prompt = &c->request->prompts[c->prompt_idx];
    const int32_t wanted = c->request->prompt_top;
    for (int32_t i = 0; i < event->num_prompt_logprobs; i++) {
        const size_t position = (size_t)(event->prompt_first + i);
        if (position != c->num_prompt_logprobs || position >= prompt->num) continue;
        add_logprob(c, prompt->ids[position], event->prompt_logprob[i],
                    event->prompt_top + (size_t)i * (size_t)wanted, wanted);
        if (c->request->echo) add_token_text(c, prompt->ids[position], true);
        c->num_prompt_logprobs++;
    }
    output_text_release(&c->text);
}

/* --- life --- */

static void push_primer(choice *c) {
    const api_prompt *const prompt = &c->request->prompts[c->prompt_idx];
    for (size_t i = prompt->num - c->request->num_primed; i < prompt->num; i++)
        push_message_token(c, prompt->ids[i]);
    c->num_reasoning_tokens = 0;
}

/* The prompt as text, all of it now; where its logprobs are asked for, the first token, which has
 * none, and the others with their logprobs. */
static void echo_prompt(choice *c, const api_prompt *prompt) {
    const bool scored = c->request->prompt_top > 0;
    if (scored) {
        add_logprob(c, prompt->ids[0], NAN, NULL, 0);
        c->num_prompt_logprobs = 1;
    }
    for (size_t i = 0; c->request->echo && i < (scored ? 1 : prompt->num); i++)
        add_token_text(c, prompt->ids[i], true);
    output_text_release(&c->text);
}

bool choice_begin(choice *c, const api_request *request, const api_model *model, choice_kind kind,
                  int32_t index, int32_t prompt_idx, api_error *error) {
    *c = (choice){.request = request,
                  .model = model,
                  .kind = kind,
                  .index = index,
                  .prompt_idx = prompt_idx,
                  .stop_id = -1};
    if (kind == CHOICE_HARMONY) {
        const kv8_status status = kv8_harmony_parser_create(&c->parser, model->tokenizer);
        if (status != KV8_OK) return api_fail_library(error, status, NULL);
        push_primer(c);
    }
    echo_prompt(c, &request->prompts[prompt_idx]);
    return !c->text.text.failed && !c->failed_memory ? true : api_fail_memory(error);
}

/* What is held back was no stop string after all. */
static void flush(choice *c) {
    if (c->kind == CHOICE_HARMONY) {
        kv8_harmony_event event;
        if (kv8_harmony_parser_finish(c->parser, &event) == KV8_OK)
            add_message_text(c, &event);
        else
            c->failed_memory = true;
    } else {
        output_text_finish(&c->text);
    }
    c->stop_string = output_text_stop(&c->text, &c->request->stops);
    output_text_release(&c->text);
}

static bool is_stop_id(const choice *c, int32_t token) {
    for (size_t i = 0; i < c->request->num_stop_ids; i++) {
        if (c->request->stop_ids[i] == token) return true;
    }
    return false;
}

static void finish(choice *c, const kv8_event *event) {
    flush(c);
    c->finish_reason = event->finish == KV8_FINISH_LENGTH ? "length" : "stop";
    if (c->num_calls > 0 && event->finish == KV8_FINISH_EOS) c->finish_reason = "tool_calls";
    if (event->finish == KV8_FINISH_STOP && is_stop_id(c, event->token)) c->stop_id = event->token;
    if (c->stop_string != NULL) c->finish_reason = "stop";
}

static void take_token(choice *c, const kv8_event *event) {
    const int32_t token = event->token;
    int32_t *const tokens = grow(c, c->tokens, c->num_tokens, &c->tokens_capacity, sizeof *tokens);
    if (tokens == NULL) return;
    c->tokens = tokens;
    tokens[c->num_tokens++] = token;
    if (c->request->wants_logprobs)
        add_logprob(c, token, event->logprob, event->top, c->request->num_logprobs);
    const bool ends = event->finish == KV8_FINISH_EOS || event->finish == KV8_FINISH_STOP;
    const bool shown = !ends || (c->request->stops.include && event->finish == KV8_FINISH_STOP);
    if (c->kind == CHOICE_HARMONY &&
        (shown || kv8_tokenizer_is_special(c->model->tokenizer, token)))
        push_message_token(c, token);
    if (c->kind == CHOICE_TEXT && shown) add_token_text(c, token, c->request->show_special);
}

bool choice_take(choice *c, const kv8_event *event) {
    if (event->num_cached > 0) c->num_cached = event->num_cached;
    if (event->num_prompt_logprobs > 0) take_prompt_logprobs(c, event);
    if (event->token >= 0) take_token(c, event);
    if (event->finish != KV8_FINISH_NONE) {
        finish(c, event);
        return true;
    }
    if ((int64_t)c->num_tokens < c->request->min_tokens) {
        output_text_release(&c->text);
        return false;
    }
    c->stop_string = output_text_stop(&c->text, &c->request->stops);
    if (c->stop_string == NULL) return false;
    c->finish_reason = "stop";
    return true;
}

bool choice_has_news(const choice *c) {
    if (c->text.ready > c->text.sent || c->reasoning.ready > c->reasoning.sent) return true;
    for (size_t i = 0; i < c->num_calls; i++) {
        if (!c->calls[i].announced || c->calls[i].arguments.ready > c->calls[i].arguments.sent)
            return true;
    }
    return false;
}

void choice_mark_sent(choice *c) {
    c->text.sent = c->text.ready;
    c->reasoning.sent = c->reasoning.ready;
    c->tokens_sent = c->num_tokens;
    c->logprobs_sent = c->num_logprobs;
    for (size_t i = 0; i < c->num_calls; i++) {
        c->calls[i].announced = true;
        c->calls[i].arguments.sent = c->calls[i].arguments.ready;
    }
}

void choice_free(choice *c) {
    for (size_t i = 0; i < c->num_calls; i++) output_text_free(&c->calls[i].arguments);
    free(c->calls);
    output_text_free(&c->text);
    output_text_free(&c->reasoning);
    kv8_harmony_parser_destroy(c->parser);
    free(c->tokens);
    free(c->logprobs);
    free(c->top);
    *c = (choice){0};
}
