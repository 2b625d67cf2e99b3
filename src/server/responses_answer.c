/* responses_answer.c - answers of /v1/responses: items of reasoning, text and calls, whole or as
 * named events. An item opens with its first word and closes with the response, so that text which
 * comes back to an item finds it open.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "answer.h"

typedef struct responses_state {
    int sequence;
    int num_items;
    int reasoning_at, text_at; /* output_index; -1 = not open. Calls have their own. */
} responses_state;

/* --- items --- */

static json_t *text_part(const char *type, json_t *text) {
    json_t *const part = json_pack("{s:s, s:o}", "type", type, "text", text);
    if (strcmp(type, "output_text") == 0) json_object_set_new(part, "annotations", json_array());
    return part;
}

static json_t *whole_text(const output_text *text) {
    return json_stringn(text->text.data == NULL ? "" : text->text.data, text->ready);
}

static json_t *reasoning_item(const answer *a, json_t *parts, const char *status) {
    return json_pack("{s:s, s:o, s:[], s:o, s:s}", "type", "reasoning", "id",
                     json_sprintf("rs_%s", a->id), "summary", "content", parts, "status", status);
}

static json_t *message_item(const answer *a, json_t *parts, const char *status) {
    return json_pack("{s:s, s:o, s:s, s:o, s:s}", "type", "message", "id",
                     json_sprintf("msg_%s", a->id), "role", "assistant", "content", parts, "status",
                     status);
}

static json_t *call_item(const choice_call *call, json_t *arguments, const char *status) {
    return json_pack("{s:s, s:o, s:s, s:s, s:o, s:s}", "type", "function_call", "id",
                     json_sprintf("fc_%s", call->id), "call_id", call->id, "name", call->name,
                     "arguments", arguments, "status", status);
}

/* --- the response --- */

static const char *status_of(const choice *said) {
    if (said->finish_reason == NULL) return "in_progress";
    return strcmp(said->finish_reason, "length") == 0 ? "incomplete" : "completed";
}

static json_t *usage_json(const generation *g) {
    const generation_usage usage = generation_get_usage(g);
    return json_pack("{s:I, s:{s:I}, s:I, s:{s:I}, s:I}", "input_tokens",
                     (json_int_t)usage.prompt_tokens, "input_tokens_details", "cached_tokens",
                     (json_int_t)usage.cached_tokens, "output_tokens",
                     (json_int_t)usage.completion_tokens, "output_tokens_details",
                     "reasoning_tokens", (json_int_t)usage.reasoning_tokens, "total_tokens",
                     (json_int_t)(usage.prompt_tokens + usage.completion_tokens));
}

/* A field of the request, or what it is by default. */
static void echo_field(json_t *object, const answer *a, const char *name, json_t *fallback) {
    json_t *const given = json_object_get(a->generation->request.body, name);
    if (given == NULL)
        json_object_set_new(object, name, fallback);
    else
        json_decref(fallback);
    if (given != NULL) json_object_set(object, name, given);
}

static json_t *response_json(const answer *a, json_t *output) {
    const generation *const g = a->generation;
    const choice *const said = &g->choices[0].said;
    const char *const status = status_of(said);
    const bool ended = said->finish_reason != NULL;
    json_t *const root = json_pack(
        "{s:s, s:s, s:I, s:s, s:n, s:s, s:o, s:b, s:n, s:b, s:s, s:o}", "id", a->id, "object",
        "response", "created_at", (json_int_t)a->created, "status", status, "error", "model",
        a->model, "output", output, "parallel_tool_calls", 0, "previous_response_id", "store", 0,
        "truncation", "disabled", "usage", ended ? usage_json(g) : json_null());
    json_object_set_new(root, "incomplete_details",
                        strcmp(status, "incomplete") == 0
                            ? json_pack("{s:s}", "reason", "max_output_tokens")
                            : json_null());
    echo_field(root, a, "instructions", json_null());
    echo_field(root, a, "max_output_tokens", json_null());
    echo_field(root, a, "metadata", json_object());
    echo_field(root, a, "reasoning", json_pack("{s:s, s:n}", "effort", "medium", "summary"));
    echo_field(root, a, "temperature", json_real(1));
    echo_field(root, a, "top_p", json_real(1));
    echo_field(root, a, "text", json_pack("{s:{s:s}}", "format", "type", "text"));
    echo_field(root, a, "tools", json_array());
    echo_field(root, a, "tool_choice", json_string("auto"));
    return root;
}

/* Items in order of their output_index. */
static json_t *output_json(const answer *a, const responses_state *state) {
    const choice *const said = &a->generation->choices[0].said;
    const char *const status = status_of(said);
    json_t *const output = json_array();
    for (int at = 0; at < state->num_items; at++) {
        json_t *item = NULL;
        if (at == state->reasoning_at)
            item = reasoning_item(
                a, json_pack("[o]", text_part("reasoning_text", whole_text(&said->reasoning))),
                status);
        else if (at == state->text_at)
            item = message_item(
                a, json_pack("[o]", text_part("output_text", whole_text(&said->text))), status);
        for (size_t i = 0; i < said->num_calls && item == NULL; i++) {
            if (said->calls[i].item_at == at)
                item = call_item(&said->calls[i], whole_text(&said->calls[i].arguments), status);
        }
        json_array_append_new(output, item);
    }
    return output;
}

/* Opens the item at *at if it is not. Returns true when it was opened now. */
static bool open_item(responses_state *state, int *at) {
    if (*at >= 0) return false;
    *at = state->num_items++;
    return true;
}

static json_t *whole(answer *a) {
    choice *const said = &a->generation->choices[0].said;
    responses_state state = {.reasoning_at = -1, .text_at = -1};
    if (said->reasoning.ready > 0) open_item(&state, &state.reasoning_at);
    const bool silent = said->reasoning.ready == 0 && said->num_calls == 0;
    if (said->text.ready > 0 || silent) open_item(&state, &state.text_at);
    for (size_t i = 0; i < said->num_calls; i++) open_item(&state, &said->calls[i].item_at);
    return response_json(a, output_json(a, &state));
}

/* --- the stream --- */

/* Adds the event's type and number. Takes the value. */
static void add_event(answer *a, byte_buffer *out, const char *type, json_t *value) {
    responses_state *const state = a->state;
    json_object_set_new(value, "type", json_string(type));
    json_object_set_new(value, "sequence_number", json_integer(state->sequence++));
    answer_add_named_event(out, type, value);
}

static void stream_begin(answer *a, byte_buffer *out) {
    responses_state *const state = calloc(1, sizeof *state);
    out->failed |= state == NULL;
    if (state == NULL) return;
    state->reasoning_at = state->text_at = -1;
    a->state = state;
    add_event(a, out, "response.created",
              json_pack("{s:o}", "response", response_json(a, json_array())));
    add_event(a, out, "response.in_progress",
              json_pack("{s:o}", "response", response_json(a, json_array())));
}

static void add_item(answer *a, byte_buffer *out, int at, json_t *item) {
    add_event(a, out, "response.output_item.added",
              json_pack("{s:i, s:o}", "output_index", at, "item", item));
}

/* {item_id, output_index, content_index}. */
static json_t *part_place(const answer *a, const char *prefix, int at) {
    return json_pack("{s:o, s:i, s:i}", "item_id", json_sprintf("%s%s", prefix, a->id),
                     "output_index", at, "content_index", 0);
}

static void add_part(answer *a, byte_buffer *out, const char *event, const char *prefix, int at,
                     json_t *part) {
    json_t *const value = part_place(a, prefix, at);
    json_object_set_new(value, "part", part);
    add_event(a, out, event, value);
}

static void stream_reasoning(answer *a, const choice *said, byte_buffer *out) {
    responses_state *const state = a->state;
    if (said->reasoning.ready == said->reasoning.sent) return;
    if (open_item(state, &state->reasoning_at)) {
        add_item(a, out, state->reasoning_at, reasoning_item(a, json_array(), "in_progress"));
        add_part(a, out, "response.content_part.added", "rs_", state->reasoning_at,
                 text_part("reasoning_text", json_string("")));
    }
    json_t *const value = part_place(a, "rs_", state->reasoning_at);
    json_object_set_new(value, "delta", answer_unsent(&said->reasoning));
    add_event(a, out, "response.reasoning_text.delta", value);
}

static void open_text(answer *a, byte_buffer *out) {
    responses_state *const state = a->state;
    if (!open_item(state, &state->text_at)) return;
    add_item(a, out, state->text_at, message_item(a, json_array(), "in_progress"));
    add_part(a, out, "response.content_part.added", "msg_", state->text_at,
             text_part("output_text", json_string("")));
}

static void stream_text(answer *a, const choice *said, byte_buffer *out) {
    responses_state *const state = a->state;
    if (said->text.ready == said->text.sent) return;
    open_text(a, out);
    json_t *const value = part_place(a, "msg_", state->text_at);
    json_object_set_new(value, "delta", answer_unsent(&said->text));
    json_object_set_new(value, "logprobs", json_array());
    add_event(a, out, "response.output_text.delta", value);
}

static void stream_calls(answer *a, choice *said, byte_buffer *out) {
    for (size_t i = 0; i < said->num_calls; i++) {
        choice_call *const call = &said->calls[i];
        if (open_item(a->state, &call->item_at))
            add_item(a, out, call->item_at, call_item(call, json_string(""), "in_progress"));
        if (call->arguments.ready > call->arguments.sent)
            add_event(
                a, out, "response.function_call_arguments.delta",
                json_pack("{s:o, s:i, s:o}", "item_id", json_sprintf("fc_%s", call->id),
                          "output_index", call->item_at, "delta", answer_unsent(&call->arguments)));
    }
}

static void stream_choice(answer *a, generation_choice *spoken, byte_buffer *out) {
    if (a->state == NULL || !choice_has_news(&spoken->said)) return;
    stream_reasoning(a, &spoken->said, out);
    stream_text(a, &spoken->said, out);
    stream_calls(a, &spoken->said, out);
    choice_mark_sent(&spoken->said);
}

/* The text's own event, then the part's. */
static void close_part(answer *a, byte_buffer *out, const char *event, const char *prefix, int at,
                       const char *type, const output_text *text) {
    json_t *const value = part_place(a, prefix, at);
    json_object_set_new(value, "text", whole_text(text));
    if (strcmp(type, "output_text") == 0) json_object_set_new(value, "logprobs", json_array());
    add_event(a, out, event, value);
    add_part(a, out, "response.content_part.done", prefix, at, text_part(type, whole_text(text)));
}

static void stream_end(answer *a, byte_buffer *out) {
    responses_state *const state = a->state;
    const choice *const said = &a->generation->choices[0].said;
    if (state == NULL) return;
    if (state->num_items == 0) open_text(a, out);
    if (state->reasoning_at >= 0)
        close_part(a, out, "response.reasoning_text.done", "rs_", state->reasoning_at,
                   "reasoning_text", &said->reasoning);
    if (state->text_at >= 0)
        close_part(a, out, "response.output_text.done", "msg_", state->text_at, "output_text",
                   &said->text);
    for (size_t i = 0; i < said->num_calls; i++)
        add_event(
            a, out, "response.function_call_arguments.done",
            json_pack("{s:o, s:i, s:s, s:o}", "item_id", json_sprintf("fc_%s", said->calls[i].id),
                      "output_index", said->calls[i].item_at, "name", said->calls[i].name,
                      "arguments", whole_text(&said->calls[i].arguments)));
    json_t *const output = output_json(a, state);
    for (int at = 0; at < state->num_items; at++)
        add_event(a, out, "response.output_item.done",
                  json_pack("{s:i, s:O}", "output_index", at, "item",
                            json_array_get(output, (size_t)at)));
    const bool cut = strcmp(status_of(said), "incomplete") == 0;
    add_event(a, out, cut ? "response.incomplete" : "response.completed",
              json_pack("{s:o}", "response", response_json(a, output)));
}

static void stream_fail(answer *a, const api_error *error, byte_buffer *out) {
    if (a->state == NULL) return;
    add_event(a, out, "error",
              json_pack("{s:s, s:s?, s:s?}", "message", error->message, "code", error->code,
                        "param", error->param[0] == '\0' ? NULL : error->param));
}

const answer_kind responses_answer = {.id_prefix = "resp_",
                                      .is_chat = true,
                                      .read = api_request_read_responses,
                                      .whole = whole,
                                      .stream_begin = stream_begin,
                                      .stream_choice = stream_choice,
                                      .stream_end = stream_end,
                                      .stream_fail = stream_fail};
