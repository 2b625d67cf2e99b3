/* chat_prompt.c - a conversation on its way from a request's JSON to a harmony prompt.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "chat_prompt.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "function_types.h"

bool chat_prompt_add(chat_prompt *chat, const kv8_message *message, api_error *error) {
    if (chat->num == chat->capacity) {
        const size_t capacity = chat->capacity == 0 ? 16 : chat->capacity * 2;
        kv8_message *const messages = realloc(chat->messages, capacity * sizeof *messages);
        if (messages == NULL) return api_fail_memory(error);
        chat->messages = messages;
        chat->capacity = capacity;
    }
    chat->messages[chat->num++] = *message;
    return true;
}

const char *chat_prompt_keep(chat_prompt *chat, const char *text, size_t length) {
    if (chat->texts == NULL) chat->texts = json_array();
    json_t *const string = json_stringn(text, length);
    if (json_array_append_new(chat->texts, string) != 0) return NULL;
    return json_string_value(string);
}

const char *chat_prompt_recipient(chat_prompt *chat, const char *name) {
    byte_buffer text = {0};
    byte_buffer_printf(&text, "functions.%s", name);
    const char *const kept = text.failed ? NULL : chat_prompt_keep(chat, text.data, text.length);
    byte_buffer_free(&text);
    return kept;
}

bool chat_prompt_instruct(chat_prompt *chat, const char *text, api_error *error) {
    if (chat->num > 0) {
        const kv8_message message = {.role = KV8_ROLE_DEVELOPER, .content = text};
        return chat_prompt_add(chat, &message, error);
    }
    if (chat->instructions.length > 0) byte_buffer_add_string(&chat->instructions, "\n\n");
    byte_buffer_add_string(&chat->instructions, text);
    return !chat->instructions.failed || api_fail_memory(error);
}

/* --- functions --- */

bool chat_prompt_add_function(chat_prompt *chat, const json_t *function, const fields *f) {
    const fields inner = {.object = function, .within = f->within, .error = f->error};
    const char *name = NULL, *about = NULL;
    json_t *parameters = NULL;
    if (!field_string(&inner, "name", &name) || !field_string(&inner, "description", &about) ||
        !field_object(&inner, "parameters", &parameters))
        return false;
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    if (name == NULL || name[0] == '\0' || strlen(name) > 128 || name[strspn(name, letters)] != 0)
        return field_fail(&inner, "name", "must be 1 to 128 letters, digits, \"_\", \"-\", \".\"");
    if (chat->names == NULL) chat->names = json_object();
    if (json_object_get(chat->names, name) != NULL)
        return field_fail(&inner, "name", "\"%s\" is given twice", name);
    if (json_object_set(chat->names, name, (json_t *)(uintptr_t)function) != 0)
        return api_fail_memory(f->error);
    function_types_add(&chat->functions, function);
    return !chat->functions.failed || api_fail_memory(f->error);
}

bool chat_prompt_choose(chat_prompt *chat, const json_t *choice, const fields *f) {
    const json_t *const named = json_object_get(choice, "function"); /* chat's form */
    const char *const word = json_string_value(choice);
    const char *const name =
        json_string_value(json_object_get(named != NULL ? named : choice, "name"));
    if (choice == NULL || (word != NULL && strcmp(word, "auto") == 0)) return true;
    if (word != NULL && strcmp(word, "none") == 0) {
        byte_buffer_free(&chat->functions);
        json_object_clear(chat->names);
        return true;
    }
    if (word != NULL && strcmp(word, "required") == 0)
        chat->forced = "";
    else if (name != NULL)
        chat->forced = name;
    else
        return field_fail(f, "tool_choice", "must be auto, none, required or name a function");
    if (chat->names == NULL || (name != NULL && json_object_get(chat->names, name) == NULL))
        return field_fail(f, "tool_choice", "asks for \"%.64s\", tools has no such function",
                          name != NULL ? name : "required");
    /* With one function to choose from, that is the one. */
    if (name == NULL && json_object_size(chat->names) == 1)
        chat->forced = json_object_iter_key(json_object_iter(chat->names));
    return true;
}

bool chat_prompt_constrain(chat_prompt *chat, const api_model *model, api_request *request,
                           const json_t *format, const char *param, api_error *error) {
    answer_shape shape = {.is_chat = true, .functions = chat->names, .forced = chat->forced};
    if (model->harmony && request->show_special)
        return api_fail_value(error, "skip_special_tokens",
                              "skip_special_tokens is false, control tokens are what channels are "
                              "parsed by here");
    if (!api_read_format(&shape, format, param, error)) return false;
    if (shape.schema != NULL) {
        const json_t *const inner = json_object_get(format, "json_schema");
        const char *const name =
            json_string_value(json_object_get(inner != NULL ? inner : format, "name"));
        char *const text = json_dumps(shape.schema, JSON_COMPACT);
        if (text == NULL) return api_fail_memory(error);
        byte_buffer_printf(&chat->formats, "## %s\n\n%s", name == NULL ? "answer" : name, text);
        free(text);
        if (chat->formats.failed) return api_fail_memory(error);
    }
    return api_request_constrain(request, model, &shape, error);
}

bool chat_prompt_set_reasoning(chat_prompt *chat, const char *effort, const char *param,
                               api_error *error) {
    if (effort == NULL) return true;
    if (strcmp(effort, "low") != 0 && strcmp(effort, "medium") != 0 && strcmp(effort, "high") != 0)
        return api_fail_value(error, param, "%s is \"%.64s\", must be low, medium or high", param,
                              effort);
    chat->reasoning = effort;
    return true;
}

/* --- texts --- */

static bool join_parts(byte_buffer *text, const json_t *parts, const char *param,
                       api_error *error) {
    size_t i;
    json_t *part;
    json_array_foreach(parts, i, part) {
        const char *const type = json_string_value(json_object_get(part, "type"));
        const json_t *const string = json_object_get(part, "text");
        const bool known = type == NULL || strcmp(type, "text") == 0 ||
                           strcmp(type, "input_text") == 0 || strcmp(type, "output_text") == 0 ||
                           strcmp(type, "reasoning_text") == 0 || strcmp(type, "summary_text") == 0;
        if (!known || !json_is_string(string))
            return api_fail_value(error, param, "%s[%zu] is of type \"%.64s\", text is supported",
                                  param, i, type == NULL ? "" : type);
        if (i > 0) byte_buffer_add_string(text, "\n");
        byte_buffer_add(text, json_string_value(string), json_string_length(string));
    }
    return !text->failed || api_fail_memory(error);
}

bool chat_prompt_text(chat_prompt *chat, const json_t *content, const char *param,
                      const char **text_out, api_error *error) {
    *text_out = NULL;
    if (content == NULL || json_is_null(content)) return true;
    const char *text = json_string_value(content);
    size_t length = json_string_length(content);
    if (json_is_array(content)) {
        byte_buffer joined = {0};
        if (!join_parts(&joined, content, param, error)) {
            byte_buffer_free(&joined);
            return false;
        }
        length = joined.length;
        text = chat_prompt_keep(chat, length == 0 ? "" : joined.data, length);
        byte_buffer_free(&joined);
        if (text == NULL) return api_fail_memory(error);
    } else if (text == NULL) {
        return api_fail_value(error, param, "%s must be a string or an array of parts", param);
    }
    if (strlen(text) != length)
        return api_fail_value(error, param, "%s holds the character U+0000", param);
    *text_out = text;
    return true;
}

/* --- rendering --- */

/* What a forced call begins with, as the model would have written it. */
static bool prime(chat_prompt *chat, const api_model *model, api_request *request,
                  api_error *error) {
    byte_buffer text = {0};
    byte_buffer_printf(&text, "<|channel|>commentary to=functions.%s%s", chat->forced,
                       chat->forced[0] == '\0' ? "" : " <|constrain|>json<|message|>");
    int32_t *ids = NULL;
    size_t num = 0;
    kv8_status status = text.failed ? KV8_ERR_NO_MEMORY : KV8_OK;
    if (status == KV8_OK)
        status = kv8_tokenizer_encode(model->tokenizer, text.data, text.length,
                                      KV8_SPECIAL_AS_TOKENS, &ids, &num);
    byte_buffer_free(&text);
    if (status != KV8_OK) return api_fail_library(error, status, "tool_choice");
    api_prompt *const prompt = &request->prompts[0];
    int32_t *const grown = realloc(prompt->ids, (prompt->num + num) * sizeof *grown);
    if (grown != NULL) {
        memcpy(grown + prompt->num, ids, num * sizeof *ids);
        prompt->ids = grown;
        prompt->num += num;
        request->num_primed = num;
    }
    kv8_free(ids);
    return grown != NULL || api_fail_memory(error);
}

bool chat_prompt_render(chat_prompt *chat, const api_model *model, api_request *request,
                        api_error *error) {
    if (chat->instructions.length > 0) {
        const kv8_message first = {.role = KV8_ROLE_DEVELOPER, .content = chat->instructions.data};
        if (!chat_prompt_add(chat, &first, error)) return false;
        memmove(chat->messages + 1, chat->messages, (chat->num - 1) * sizeof *chat->messages);
        chat->messages[0] = first;
    }
    kv8_harmony_options options = KV8_HARMONY_OPTIONS_INIT;
    options.reasoning = chat->reasoning;
    options.current_date = model->current_date;
    options.functions = chat->functions.data;
    options.formats = chat->formats.data;
    request->prompts = calloc(1, sizeof *request->prompts);
    if (request->prompts == NULL) return api_fail_memory(error);
    request->num_prompts = 1;
    const kv8_status status =
        kv8_harmony_render(model->tokenizer, chat->messages, chat->num, &options,
                           &request->prompts[0].ids, &request->prompts[0].num);
    if (status != KV8_OK) return api_fail_library(error, status, "messages");
    return chat->forced == NULL || prime(chat, model, request, error);
}

void chat_prompt_free(chat_prompt *chat) {
    free(chat->messages);
    json_decref(chat->texts);
    json_decref(chat->names);
    byte_buffer_free(&chat->instructions);
    byte_buffer_free(&chat->functions);
    byte_buffer_free(&chat->formats);
    *chat = (chat_prompt){0};
}
