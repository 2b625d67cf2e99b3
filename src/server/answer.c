/* answer.c - the pieces that answers share: events, usage, endings.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "answer.h"

static int add_bytes(const char *bytes, size_t length, void *cookie) {
    byte_buffer_add(cookie, bytes, length);
    return 0;
}

/* Logprobs are f32: nine digits say them exactly. */
void answer_add_json(byte_buffer *out, json_t *value) {
    if (json_dump_callback(value, add_bytes, out, JSON_COMPACT | JSON_REAL_PRECISION(9)) != 0)
        out->failed = true;
    json_decref(value);
}

void answer_add_event(byte_buffer *out, json_t *value) {
    byte_buffer_add_string(out, "data: ");
    answer_add_json(out, value);
    byte_buffer_add_string(out, "\n\n");
}

void answer_add_named_event(byte_buffer *out, const char *name, json_t *value) {
    byte_buffer_printf(out, "event: %s\n", name);
    answer_add_event(out, value);
}

json_t *answer_usage(const generation *g) {
    const generation_usage usage = generation_get_usage(g);
    return json_pack(
        "{s:I, s:I, s:I, s:{s:I}, s:{s:I}}", "prompt_tokens", (json_int_t)usage.prompt_tokens,
        "completion_tokens", (json_int_t)usage.completion_tokens, "total_tokens",
        (json_int_t)(usage.prompt_tokens + usage.completion_tokens), "prompt_tokens_details",
        "cached_tokens", (json_int_t)usage.cached_tokens, "completion_tokens_details",
        "reasoning_tokens", (json_int_t)usage.reasoning_tokens);
}

/* Those of a choice that are not sent yet. */
static json_t *unsent_token_ids(const choice *said) {
    json_t *const list = json_array();
    for (size_t i = said->tokens_sent; i < said->num_tokens; i++)
        json_array_append_new(list, json_integer(said->tokens[i]));
    return list;
}

json_t *answer_token_ids(const int32_t *ids, size_t num) {
    json_t *const list = json_array();
    for (size_t i = 0; i < num; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

json_t *answer_unsent(const output_text *text) {
    if (text->ready == text->sent) return json_string("");
    return json_stringn(text->text.data + text->sent, text->ready - text->sent);
}

void answer_add_ending(json_t *object, const choice *said, bool ended) {
    json_object_set_new(object, "finish_reason",
                        ended ? json_string(said->finish_reason) : json_null());
    if (ended && said->stop_string != NULL)
        json_object_set_new(object, "stop_reason", json_string(said->stop_string));
    else if (ended && said->stop_id >= 0)
        json_object_set_new(object, "stop_reason", json_integer(said->stop_id));
    if (said->request->return_token_ids)
        json_object_set_new(object, "token_ids", unsent_token_ids(said));
}

json_t *answer_chunk(answer *a, const char *object, generation_choice *spoken, json_t *said) {
    const generation *const g = a->generation;
    const api_request *const request = &g->request;
    json_t *const chunk =
        json_pack("{s:s, s:s, s:I, s:s, s:[o]}", "id", a->id, "object", object, "created",
                  (json_int_t)a->created, "model", a->model, "choices", said);
    if (request->return_token_ids && !spoken->greeted) {
        const api_prompt *const prompt = &request->prompts[spoken->said.prompt_idx];
        json_object_set_new(chunk, "prompt_token_ids", answer_token_ids(prompt->ids, prompt->num));
    }
    if (request->continuous_usage) json_object_set_new(chunk, "usage", answer_usage(g));
    spoken->greeted = true;
    spoken->told = spoken->ended;
    choice_mark_sent(&spoken->said);
    return chunk;
}

void answer_end_chunks(answer *a, const char *object, byte_buffer *out) {
    if (a->generation->request.include_usage)
        answer_add_event(out, json_pack("{s:s, s:s, s:I, s:s, s:[], s:o}", "id", a->id, "object",
                                        object, "created", (json_int_t)a->created, "model",
                                        a->model, "choices", "usage", answer_usage(a->generation)));
    byte_buffer_add_string(out, "data: [DONE]\n\n");
}

void answer_fail_chunks(answer *a, const api_error *error, byte_buffer *out) {
    (void)a;
    answer_add_event(out, api_error_json(error));
    byte_buffer_add_string(out, "data: [DONE]\n\n");
}
