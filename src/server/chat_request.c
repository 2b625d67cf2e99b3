/* chat_request.c - the body of /v1/chat/completions: messages, tools, reasoning effort.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat_prompt.h"

/* --- messages --- */

typedef struct message_reader {
    chat_prompt *chat;
    json_t *calls; /* names of the functions called so far, by the call's id */
    fields f;      /* of the message */
    char content_param[64];
} message_reader;

static bool read_calls(message_reader *self, const json_t *calls) {
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
        if (id != NULL && json_object_set(self->calls, id, json_object_get(function, "name")) != 0)
            return api_fail_memory(self->f.error);
        const kv8_message message = {.role = KV8_ROLE_ASSISTANT,
                                     .channel = "commentary",
                                     .recipient = chat_prompt_recipient(self->chat, name),
                                     .content_type = "<|constrain|>json",
                                     .content = text == NULL ? "{}" : text};
        if (message.recipient == NULL) return api_fail_memory(self->f.error);
        if (!chat_prompt_add(self->chat, &message, self->f.error)) return false;
    }
    return true;
}

static bool read_assistant(message_reader *self, const char *content) {
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

static bool read_tool(message_reader *self, const char *content) {
    const char *id = NULL, *name = NULL;
    if (!field_string(&self->f, "tool_call_id", &id) || !field_string(&self->f, "name", &name))
        return false;
    if (name == NULL && id != NULL) name = json_string_value(json_object_get(self->calls, id));
    if (name == NULL)
        return field_fail(&self->f, "tool_call_id", "\"%.64s\" is no earlier call's",
                          id == NULL ? "" : id);
    const kv8_message message = {.role = KV8_ROLE_TOOL,
                                 .name = chat_prompt_recipient(self->chat, name),
                                 .content = content == NULL ? "" : content};
    if (message.name == NULL) return api_fail_memory(self->f.error);
    return chat_prompt_add(self->chat, &message, self->f.error);
}

static bool read_message(message_reader *self) {
    const char *role = NULL, *name = NULL, *content = NULL;
    if (!field_string(&self->f, "role", &role) ||
        !chat_prompt_text(self->chat, json_object_get(self->f.object, "content"),
                          self->content_param, &content, self->f.error))
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
    json_t *messages = NULL, *item;
    if (!field_array(f, "messages", &messages)) return false;
    if (json_array_size(messages) == 0) return field_fail(f, "messages", "is missing or empty");
    message_reader self = {.chat = chat, .calls = json_object()};
    bool good = self.calls != NULL || api_fail_memory(f->error);
    size_t i;
    json_array_foreach(messages, i, item) {
        char within[48];
        snprintf(within, sizeof within, "messages[%zu].", i);
        snprintf(self.content_param, sizeof self.content_param, "messages[%zu].content", i);
        self.f = (fields){.object = item, .within = within, .error = f->error};
        if (good && !json_is_object(item))
            good = field_fail(f, "messages", "[%zu] must be an object", i);
        good = good && read_message(&self);
    }
    json_decref(self.calls);
    return good;
}

/* --- the rest --- */

static bool read_tools(chat_prompt *chat, const fields *f) {
    json_t *tools = NULL, *tool;
    if (!field_array(f, "tools", &tools)) return false;
    size_t i;
    json_array_foreach(tools, i, tool) {
        char within[48];
        snprintf(within, sizeof within, "tools[%zu].function.", i);
        const fields inner = {.object = tool, .within = within, .error = f->error};
        const json_t *const function = json_object_get(tool, "function");
        const char *const type = json_string_value(json_object_get(tool, "type"));
        if (!json_is_object(function) || (type != NULL && strcmp(type, "function") != 0))
            return field_fail(f, "tools", "[%zu] is of type \"%.64s\", functions are supported", i,
                              type == NULL ? "" : type);
        if (!chat_prompt_add_function(chat, function, &inner)) return false;
    }
    return chat_prompt_choose(chat, field_any(f, "tool_choice"), f);
}

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

bool api_request_read_chat(api_request *request, const api_model *model, json_t *body,
                           api_error *error) {
    const fields f = {.object = body, .within = "", .error = error};
    *request = (api_request){.body = body};
    chat_prompt chat = {0};
    json_t *format = NULL;
    const bool good =
        api_request_read_common(request, model, &f) && read_logprobs(request, &f) &&
        read_reasoning(request, &chat, &f) && read_messages(&chat, &f) && read_tools(&chat, &f) &&
        field_object(&f, "response_format", &format) &&
        chat_prompt_constrain(&chat, model, request, format, "response_format", error) &&
        chat_prompt_render(&chat, model, request, error) &&
        api_request_check_lengths(request, model, model->max_model_len, error);
    chat_prompt_free(&chat);
    return good;
}
