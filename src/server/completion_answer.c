/* completion_answer.c - answers of /v1/completions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "answer.h"

static json_t *choice_json(const choice *said, bool ended) {
    json_t *const object =
        json_pack("{s:i, s:o, s:o}", "index", said->index, "text", answer_unsent(&said->text),
                  "logprobs", answer_completion_logprobs(said));
    answer_add_ending(object, said, ended);
    return object;
}

static json_t *whole(answer *a) {
    const generation *const g = a->generation;
    json_t *const choices = json_array();
    for (size_t i = 0; i < g->num_choices; i++) {
        const choice *const said = &g->choices[i].said;
        const api_prompt *const prompt = &g->request.prompts[said->prompt_idx];
        json_t *const object = choice_json(said, true);
        if (g->request.return_token_ids)
            json_object_set_new(object, "prompt_token_ids",
                                answer_token_ids(prompt->ids, prompt->num));
        if (g->request.num_prompt_logprobs >= 0)
            json_object_set_new(object, "prompt_logprobs", answer_prompt_logprobs(said));
        json_array_append_new(choices, object);
    }
    return json_pack("{s:s, s:s, s:I, s:s, s:o, s:o}", "id", a->id, "object", "text_completion",
                     "created", (json_int_t)a->created, "model", a->model, "choices", choices,
                     "usage", answer_usage(g));
}

static void stream_begin(answer *a, byte_buffer *out) {
    (void)a;
    (void)out;
}

static void stream_choice(answer *a, generation_choice *spoken, byte_buffer *out) {
    const bool ends = spoken->ended && !spoken->told;
    if (!ends && !choice_has_news(&spoken->said)) return;
    json_t *const object = choice_json(&spoken->said, ends);
    answer_add_event(out, answer_chunk(a, "text_completion", spoken, object));
}

static void stream_end(answer *a, byte_buffer *out) {
    answer_end_chunks(a, "text_completion", out);
}

const answer_kind completion_answer = {.id_prefix = "cmpl-",
                                       .read = api_request_read_completion,
                                       .whole = whole,
                                       .stream_begin = stream_begin,
                                       .stream_choice = stream_choice,
                                       .stream_end = stream_end,
                                       .stream_fail = answer_fail_chunks};
