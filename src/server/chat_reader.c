/* chat_reader.c - messages and items of a conversation, one object after another.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "chat_reader.h"

#include <stdio.h>
#include <string.h>

bool chat_reader_run(chat_prompt *chat, const fields *f, const char *name, json_t *objects,
                     bool (*read_object)(chat_reader *self)) {
    chat_reader self = {.chat = chat, .calls = json_object()};
    bool good = self.calls != NULL || api_fail_memory(f->error);
    size_t i;
    json_t *object;
    json_array_foreach(objects, i, object) {
        char within[48];
        snprintf(within, sizeof within, "%s[%zu].", name, i);
        self.f = (fields){.object = object, .within = within, .error = f->error};
        if (good && !json_is_object(object))
            good = field_fail(f, name, "[%zu] must be an object", i);
        good = good && read_object(&self);
    }
    json_decref(self.calls);
    return good;
}

bool chat_reader_text(chat_reader *self, const char *name, const char **text_out) {
    char param[64];
    snprintf(param, sizeof param, "%s%s", self->f.within, name);
    return chat_prompt_text(self->chat, json_object_get(self->f.object, name), param, text_out,
                            self->f.error);
}

bool chat_reader_add_call(chat_reader *self, const char *id, const char *name,
                          const char *arguments) {
    if (id != NULL && json_object_set_new(self->calls, id, json_string(name)) != 0)
        return api_fail_memory(self->f.error);
    const kv8_message message = {.role = KV8_ROLE_ASSISTANT,
                                 .channel = "commentary",
                                 .recipient = chat_prompt_recipient(self->chat, name),
                                 .content_type = "<|constrain|>json",
                                 .content = arguments == NULL ? "{}" : arguments};
    if (message.recipient == NULL) return api_fail_memory(self->f.error);
    return chat_prompt_add(self->chat, &message, self->f.error);
}

bool chat_reader_add_output(chat_reader *self, const char *id_field, const char *id,
                            const char *name, const char *output) {
    if (name == NULL && id != NULL) name = json_string_value(json_object_get(self->calls, id));
    if (name == NULL)
        return field_fail(&self->f, id_field, "\"%.64s\" is no earlier call's",
                          id == NULL ? "" : id);
    const kv8_message message = {.role = KV8_ROLE_TOOL,
                                 .name = chat_prompt_recipient(self->chat, name),
                                 .content = output == NULL ? "" : output};
    if (message.name == NULL) return api_fail_memory(self->f.error);
    return chat_prompt_add(self->chat, &message, self->f.error);
}

bool chat_reader_tools(chat_prompt *chat, const fields *f, const char *within) {
    json_t *tools = NULL, *tool;
    if (!field_array(f, "tools", &tools)) return false;
    size_t i;
    json_array_foreach(tools, i, tool) {
        char path[48];
        snprintf(path, sizeof path, "tools[%zu].%s%s", i, within, within[0] == '\0' ? "" : ".");
        const fields inner = {.object = tool, .within = path, .error = f->error};
        const json_t *const function = within[0] == '\0' ? tool : json_object_get(tool, within);
        const char *const type = json_string_value(json_object_get(tool, "type"));
        if (!json_is_object(function) || (type != NULL && strcmp(type, "function") != 0))
            return field_fail(f, "tools", "[%zu] is of type \"%.64s\", functions are supported", i,
                              type == NULL ? "" : type);
        if (!chat_prompt_add_function(chat, function, &inner)) return false;
    }
    return chat_prompt_choose(chat, field_any(f, "tool_choice"), f);
}
