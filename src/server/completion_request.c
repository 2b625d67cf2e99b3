/* completion_request.c - the body of /v1/completions: one prompt or many, as text or token ids.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "api_request.h"

enum { DEFAULT_MAX_TOKENS = 16 };

static bool read_prompts(api_request *request, const api_model *model, const fields *f) {
    const json_t *const prompt = field_any(f, "prompt");
    if (prompt == NULL) return field_fail(f, "prompt", "is missing");
    const bool many = json_is_array(prompt) && !json_is_integer(json_array_get(prompt, 0));
    const size_t num = many ? json_array_size(prompt) : 1;
    if (num == 0) return field_fail(f, "prompt", "is empty");
    if (num * (size_t)request->n > API_MAX_CHOICES)
        return field_fail(f, "prompt", "has %zu prompts, with n %d at most %d are taken", num,
                          request->n, API_MAX_CHOICES / request->n);
    request->prompts = calloc(num, sizeof *request->prompts);
    if (request->prompts == NULL) return api_fail_memory(f->error);
    request->num_prompts = num;
    for (size_t i = 0; i < num; i++) {
        const json_t *const item = many ? json_array_get(prompt, i) : prompt;
        if (!api_prompt_read(&request->prompts[i], model, item, "prompt", f->error)) return false;
    }
    return true;
}

bool api_request_read_completion(api_request *request, const api_model *model, json_t *body,
                                 api_error *error) {
    const fields f = {.object = body, .within = "", .error = error};
    *request = (api_request){.body = body};
    if (!api_request_read_common(request, model, &f) || !field_bool(&f, "echo", &request->echo) ||
        !field_int32(&f, "logprobs", 0, API_MAX_LOGPROBS, &request->num_logprobs))
        return false;
    request->wants_logprobs = field_any(&f, "logprobs") != NULL;
    answer_shape shape = {0};
    json_t *format = NULL;
    return field_object(&f, "response_format", &format) &&
           api_read_format(&shape, format, "response_format", error) &&
           api_request_constrain(request, model, &shape, error) &&
           read_prompts(request, model, &f) &&
           api_request_check_lengths(request, model, DEFAULT_MAX_TOKENS, error);
}
