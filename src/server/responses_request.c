/* responses_request.c - the body of /v1/responses: input as a text or as items.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "chat_reader.h"

static bool read_call(chat_reader *self) {
    const char *name = NULL, *id = NULL, *arguments = NULL;
    if (!field_string(&self->f, "name", &name) || !field_string(&self->f, "call_id", &id) ||
        !chat_reader_text(self, "arguments", &arguments))
        return false;
    if (name == NULL) return field_fail(&self->f, "name", "is missing");
    return chat_reader_add_call(self, id, name, arguments);
}

static bool read_call_output(chat_reader *self) {
    const char *id = NULL, *output = NULL;
    if (!field_string(&self->f, "call_id", &id) || !chat_reader_text(self, "output", &output))
        return false;
    return chat_reader_add_output(self, "call_id", id, NULL, output);
}

static bool read_reasoning_item(chat_reader *self) {
    const char *text = NULL;
    if (!chat_reader_text(self, "content", &text)) return false;
    const kv8_message message = {
        .role = KV8_ROLE_ASSISTANT, .channel = "analysis", .content = text};
    return text == NULL || chat_prompt_add(self->chat, &message, self->f.error);
}

static bool read_message(chat_reader *self) {
    const char *role = NULL, *content = NULL;
    if (!field_string(&self->f, "role", &role) || !chat_reader_text(self, "content", &content))
        return false;
    if (role == NULL) return field_fail(&self->f, "role", "is missing");
    if (content == NULL) return field_fail(&self->f, "content", "is missing");
    if (strcmp(role, "system") == 0 || strcmp(role, "developer") == 0)
        return chat_prompt_instruct(self->chat, content, self->f.error);
    const bool of_user = strcmp(role, "user") == 0;
    if (!of_user && strcmp(role, "assistant") != 0)
        return field_fail(&self->f, "role",
                          "is \"%.64s\", must be system, developer, user or assistant", role);
    const kv8_message message = {.role = of_user ? KV8_ROLE_USER : KV8_ROLE_ASSISTANT,
                                 .content = content};
    return chat_prompt_add(self->chat, &message, self->f.error);
}

static bool read_item(chat_reader *self) {
    const char *type = "message";
    if (!field_string(&self->f, "type", &type)) return false;
    if (strcmp(type, "message") == 0) return read_message(self);
    if (strcmp(type, "reasoning") == 0) return read_reasoning_item(self);
    if (strcmp(type, "function_call") == 0) return read_call(self);
    if (strcmp(type, "function_call_output") == 0) return read_call_output(self);
    return field_fail(&self->f, "type", "is \"%.64s\", which is not supported", type);
}

static bool read_input(chat_prompt *chat, const fields *f) {
    json_t *const input = field_any(f, "input");
    const char *text = NULL;
    if (json_is_string(input)) {
        if (!field_string(f, "input", &text)) return false;
        const kv8_message message = {.role = KV8_ROLE_USER, .content = text};
        return chat_prompt_add(chat, &message, f->error);
    }
    if (json_array_size(input) == 0)
        return field_fail(f, "input", "must be a string or an array of items");
    return chat_reader_run(chat, f, "input", input, read_item);
}

/* What else an answer is to hold: of that only logprobs would be missed. */
static bool check_include(const fields *f) {
    json_t *include = NULL;
    const json_t *item = NULL;
    size_t i = 0;
    if (!field_array(f, "include", &include)) return false;
    json_array_foreach(include, i, item) {
        const char *const name = json_string_value(item);
        if (name != NULL && strcmp(name, "message.output_text.logprobs") == 0)
            return field_fail(f, "include", "holds \"%s\": responses have no logprobs", name);
    }
    return true;
}

static bool read_settings(api_request *request, chat_prompt *chat, const fields *f,
                          const json_t **format_out) {
    json_t *reasoning = NULL, *text = NULL, *format = NULL;
    const char *effort = NULL, *instructions = NULL, *previous = NULL;
    bool background = false;
    int32_t top_logprobs = 0;
    if (!field_object(f, "reasoning", &reasoning) || !field_object(f, "text", &text) ||
        !field_string(f, "instructions", &instructions) ||
        !field_string(f, "previous_response_id", &previous) ||
        !field_bool(f, "background", &background) || !check_include(f) ||
        !field_int32(f, "top_logprobs", 0, API_MAX_LOGPROBS, &top_logprobs) ||
        !field_int32(f, "max_output_tokens", 1, INT32_MAX, &request->max_tokens))
        return false;
    if (previous != NULL)
        return field_fail(f, "previous_response_id", "is not supported: responses are not stored");
    if (background) return field_fail(f, "background", "is not supported");
    if (top_logprobs > 0)
        return field_fail(f, "top_logprobs", "is not supported: responses have no logprobs");
    const fields of_reasoning = {.object = reasoning, .within = "reasoning.", .error = f->error};
    const fields of_text = {.object = text, .within = "text.", .error = f->error};
    if (!field_string(&of_reasoning, "effort", &effort) ||
        !field_object(&of_text, "format", &format))
        return false;
    *format_out = format;
    if (instructions != NULL && !chat_prompt_instruct(chat, instructions, f->error)) return false;
    return chat_prompt_set_reasoning(chat, effort, "reasoning.effort", f->error);
}

bool api_request_read_responses(api_request *request, const api_model *model, json_t *body,
                                api_error *error) {
    const fields f = {.object = body, .within = "", .error = error};
    *request = (api_request){.body = body};
    chat_prompt chat = {0};
    const json_t *format = NULL;
    bool good = api_request_read_common(request, model, &f) &&
                read_settings(request, &chat, &f, &format) && read_input(&chat, &f) &&
                chat_reader_tools(&chat, &f, "") &&
                chat_prompt_constrain(&chat, model, request, format, "text.format", error);
    if (good && request->n != 1) good = field_fail(&f, "n", "must be 1 here");
    good = good && chat_prompt_render(&chat, model, request, error) &&
           api_request_check_lengths(request, model, model->max_model_len, error);
    chat_prompt_free(&chat);
    return good;
}
