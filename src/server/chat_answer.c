/* chat_answer.c - answers of /v1/chat/completions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "answer.h"

/* Both names of the field: OpenAI's clients read the first, older ones the second. */
static void add_reasoning(json_t *object, const choice *said) {
    if (!said->request->include_reasoning || said->reasoning.ready == said->reasoning.sent) return;
    json_object_set_new(object, "reasoning", answer_unsent(&said->reasoning));
    json_object_set_new(object, "reasoning_content", answer_unsent(&said->reasoning));
}

static json_t *call_json(const choice_call *call, size_t call_idx, bool in_stream) {
    json_t *const function = json_pack("{s:o}", "arguments", answer_unsent(&call->arguments));
    json_t *const object = json_pack("{s:o}", "function", function);
    if (in_stream) json_object_set_new(object, "index", json_integer((json_int_t)call_idx));
    if (!call->announced) {
        json_object_set_new(object, "id", json_string(call->id));
        json_object_set_new(object, "type", json_string("function"));
        json_object_set_new(function, "name", json_string(call->name));
    }
    return object;
}

static void add_calls(json_t *object, const choice *said, bool in_stream) {
    json_t *const calls = json_array();
    for (size_t i = 0; i < said->num_calls; i++) {
        const choice_call *const call = &said->calls[i];
        if (!call->announced || call->arguments.ready > call->arguments.sent)
            json_array_append_new(calls, call_json(call, i, in_stream));
    }
    if (json_array_size(calls) > 0)
        json_object_set_new(object, "tool_calls", calls);
    else
        json_decref(calls);
}

/* --- the whole answer --- */

static json_t *message_json(const choice *said) {
    const bool silent = said->num_calls > 0 && said->text.text.length == 0;
    json_t *const message = json_pack("{s:s, s:o, s:n}", "role", "assistant", "content",
                                      silent ? json_null() : answer_unsent(&said->text), "refusal");
    add_reasoning(message, said);
    add_calls(message, said, false);
    return message;
}

static json_t *whole(answer *a) {
    const generation *const g = a->generation;
    json_t *const choices = json_array();
    for (size_t i = 0; i < g->num_choices; i++) {
        const choice *const said = &g->choices[i].said;
        json_t *const object =
            json_pack("{s:i, s:o, s:o}", "index", said->index, "message", message_json(said),
                      "logprobs", answer_chat_logprobs(said));
        answer_add_ending(object, said, true);
        json_array_append_new(choices, object);
    }
    json_t *const root = json_pack("{s:s, s:s, s:I, s:s, s:o, s:o}", "id", a->id, "object",
                                   "chat.completion", "created", (json_int_t)a->created, "model",
                                   a->model, "choices", choices, "usage", answer_usage(g));
    if (g->request.return_token_ids)
        json_object_set_new(root, "prompt_token_ids",
                            answer_token_ids(g->request.prompts[0].ids, g->request.prompts[0].num));
    if (g->request.num_prompt_logprobs >= 0)
        json_object_set_new(root, "prompt_logprobs", answer_prompt_logprobs(&g->choices[0].said));
    return root;
}

/* --- the stream --- */

static void stream_begin(answer *a, byte_buffer *out) {
    (void)a;
    (void)out;
}

static void stream_choice(answer *a, generation_choice *spoken, byte_buffer *out) {
    choice *const said = &spoken->said;
    /* Reasoning that nobody asked for makes no events. */
    if (!said->request->include_reasoning) said->reasoning.sent = said->reasoning.ready;
    const bool ends = spoken->ended && !spoken->told;
    if (!ends && !choice_has_news(said)) return;
    json_t *const delta = json_object();
    if (!spoken->greeted) json_object_set_new(delta, "role", json_string("assistant"));
    if (said->text.ready > said->text.sent)
        json_object_set_new(delta, "content", answer_unsent(&said->text));
    add_reasoning(delta, said);
    add_calls(delta, said, true);
    json_t *const object = json_pack("{s:i, s:o, s:o}", "index", said->index, "delta", delta,
                                     "logprobs", answer_chat_logprobs(said));
    answer_add_ending(object, said, ends);
    answer_add_event(out, answer_chunk(a, "chat.completion.chunk", spoken, object));
}

static void stream_end(answer *a, byte_buffer *out) {
    answer_end_chunks(a, "chat.completion.chunk", out);
}

const answer_kind chat_answer = {.id_prefix = "chatcmpl-",
                                 .is_chat = true,
                                 .read = api_request_read_chat,
                                 .whole = whole,
                                 .stream_begin = stream_begin,
                                 .stream_choice = stream_choice,
                                 .stream_end = stream_end,
                                 .stream_fail = answer_fail_chunks};
