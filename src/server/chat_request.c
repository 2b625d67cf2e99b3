/* chat_request.c - the body of /v1/chat/completions: messages, tools, reasoning effort.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "chat_reader.h"

/* --- messages --- */

static bool read_calls(chat_reader *self, const json_t *calls) {
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) {
        const json_t *const function = json_object_get(call, "function");
        const char *const name = json_string_value(json_object_get(function, "name"));
        const json_t *const arguments = json_object_get(function, "arguments");
        const char *const id = json_string_value(json_object_get(call, "id"));
        const char *text = NULL;
        if (name == NULL) return field_fail(&self->f, "tool_calls", "[%zu] names no function", i);
        if (!chat_prompt_text(self->chat, arguments, "arguments", &text, self->f.error))
            return false;
        if (!chat_reader_add_call(self, id, name, text)) return false;
    }
    return true;
}

static bool read_assistant(chat_reader *self, const char *content) {
    const char *reasoning = NULL;
    json_t *calls = NULL;
    if (!field_string(&self->f, "reasoning_content", &reasoning) ||
        !field_string(&self->f, "reasoning", &reasoning) ||
        !field_array(&self->f, "tool_calls", &calls))
        return false;
    const bool has_calls = json_array_size(calls) > 0;
    const kv8_message thought = {
        .role = KV8_ROLE_ASSISTANT, .channel = "analysis", .content = reasoning};
    /* Text before calls is a preamble, not the answer. */
    const kv8_message answer = {.role = KV8_ROLE_ASSISTANT,
                                .channel = has_calls ? "commentary" : "final",
                                .content = content};
    if (reasoning != NULL && reasoning[0] != '\0' &&
        !chat_prompt_add(self->chat, &thought, self->f.error))
        return false;
    const bool speaks = content != NULL && (content[0] != '\0' || !has_calls);
    if (speaks && !chat_prompt_add(self->chat, &answer, self->f.error)) return false;
    return read_calls(self, calls);
}

static bool read_tool(chat_reader *self, const char *content) {
    const char *id = NULL, *name = NULL;
    if (!field_string(&self->f, "tool_call_id", &id) || !field_string(&self->f, "name", &name))
        return false;
    return chat_reader_add_output(self, "tool_call_id", id, name, content);
}

static bool read_message(chat_reader *self) {
    const char *role = NULL, *name = NULL, *content = NULL;
    if (!field_string(&self->f, "role", &role) || !chat_reader_text(self, "content", &content))
        return false;
    if (role == NULL) return field_fail(&self->f, "role", "is missing");
    if (strcmp(role, "assistant") == 0) return read_assistant(self, content);
    if (strcmp(role, "tool") == 0) return read_tool(self, content);
    if (content == NULL) return field_fail(&self->f, "content", "is missing");
    if (strcmp(role, "system") == 0 || strcmp(role, "developer") == 0)
        return chat_prompt_instruct(self->chat, content, self->f.error);
    if (strcmp(role, "user") != 0)
        return field_fail(&self->f, "role",
                          "is \"%.64s\", must be system, developer, user, assistant or tool", role);
    if (!field_string(&self->f, "name", &name)) return false;
    const kv8_message message = {.role = KV8_ROLE_USER, .name = name, .content = content};
    return chat_prompt_add(self->chat, &message, self->f.error);
}

static bool read_messages(chat_prompt *chat, const fields *f) {
    json_t *messages = NULL;
    if (!field_array(f, "messages", &messages)) return false;
    if (json_array_size(messages) == 0) return field_fail(f, "messages", "is missing or empty");
    return chat_reader_run(chat, f, "messages", messages, read_message);
}

/* --- the rest --- */

/* reasoning_effort, reasoning: {effort, exclude}, and the words of vLLM. */
static bool read_reasoning(api_request *request, chat_prompt *chat, const fields *f) {
    const char *effort = NULL;
    json_t *reasoning = NULL, *template = NULL;
    bool exclude = false;
    if (!field_object(f, "reasoning", &reasoning) ||
        !field_object(f, "chat_template_kwargs", &template) ||
        !field_bool(f, "include_reasoning", &request->include_reasoning))
        return false;
    const fields inner = {.object = reasoning, .within = "reasoning.", .error = f->error};
    const fields words = {.object = template, .within = "chat_template_kwargs.", .error = f->error};
    if (!field_string(&words, "reasoning_effort", &effort) ||
        !field_string(&inner, "effort", &effort) || !field_bool(&inner, "exclude", &exclude) ||
        !field_string(f, "reasoning_effort", &effort))
        return false;
    if (exclude) request->include_reasoning = false;
    return chat_prompt_set_reasoning(chat, effort, "reasoning_effort", f->error);
}

static bool read_logprobs(api_request *request, const fields *f) {
    if (!field_bool(f, "logprobs", &request->wants_logprobs) ||
        !field_int32(f, "top_logprobs", 0, API_MAX_LOGPROBS, &request->num_logprobs))
        return false;
    return request->wants_logprobs || request->num_logprobs == 0 ||
           field_fail(f, "top_logprobs", "goes with logprobs, which is not true");
}

/* Output other than text; modalities is null, empty or ["text"]. */
static bool refuse_modalities(const fields *f) {
    json_t *modalities = NULL, *item;
    size_t i;
    if (!field_array(f, "modalities", &modalities)) return false;
    json_array_foreach(modalities, i, item) {
        const char *const name = json_string_value(item);
        if (name == NULL || strcmp(name, "text") != 0)
            return field_fail(f, "modalities", "holds something else than \"text\"");
    }
    return true;
}

/* The older form of tool_choice; both its words ask for nothing without functions. */
static bool refuse_function_call(const fields *f) {
    const json_t *const call = field_any(f, "function_call");
    const char *const word = json_string_value(call);
    if (call == NULL || (word != NULL && (strcmp(word, "none") == 0 || strcmp(word, "auto") == 0)))
        return true;
    return field_fail(f, "function_call", "is not supported, tool_choice is");
}

/* What would change the prompt or the answer and is not computed here is refused by name. */
static bool refuse_unsupported(const fields *f) {
    static const char *const names[] = {"chat_template", "continue_final_message", "echo",
                                        "functions", "web_search_options"};
    bool generates = true;
    if (!field_refuse(f, names, sizeof names / sizeof names[0]) ||
        !field_bool(f, "add_generation_prompt", &generates))
        return false;
    if (!generates)
        return field_fail(f, "add_generation_prompt", "is false, which is not supported");
    return refuse_function_call(f) && refuse_modalities(f);
}

bool api_request_read_chat(api_request *request, const api_model *model, json_t *body,
                           api_error *error) {
    const fields f = {.object = body, .within = "", .error = error};
    *request = (api_request){.body = body};
    chat_prompt chat = {0};
    json_t *format = NULL;
    const bool good =
        refuse_unsupported(&f) && api_request_read_common(request, model, &f) &&
        read_logprobs(request, &f) && read_reasoning(request, &chat, &f) &&
        read_messages(&chat, &f) && chat_reader_tools(&chat, &f, "function") &&
        field_object(&f, "response_format", &format) &&
        chat_prompt_constrain(&chat, model, request, format, "response_format", error) &&
        chat_prompt_render(&chat, model, request, error) &&
        api_request_check_lengths(request, model, model->max_model_len, error);
    chat_prompt_free(&chat);
    return good;
}
