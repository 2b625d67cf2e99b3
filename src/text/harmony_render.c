/* harmony_render.c - a conversation as token ids. Only the control ids are control: every text is
 * encoded with the special tokens switched off.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "harmony_format.h"
#include "text_buffer.h"
#include "tokenizer_tables.h"

typedef struct renderer {
    const kv8_tokenizer *tokenizer;
    kv8_harmony_control control;
    kv8_token_ids ids;
} renderer;

static kv8_status put(renderer *self, int32_t id) {
    return kv8_token_ids_push(&self->ids, id);
}

static kv8_status put_text(renderer *self, const char *text) {
    return kv8_tokenizer_append(self->tokenizer, text, strlen(text), KV8_SPECIAL_AS_TEXT,
                                &self->ids);
}

/* "prefix" + text, encoded as one text. */
static kv8_status put_joined(renderer *self, const char *prefix, const char *text) {
    kv8_text_buffer joined = {0};
    kv8_status status = kv8_text_append_string(&joined, prefix);
    if (status == KV8_OK) status = kv8_text_append_string(&joined, text);
    if (status == KV8_OK) status = put_text(self, joined.data);
    kv8_text_free(&joined);
    return status;
}

/* --- what a message may hold --- */

/* A word of the header: whitespace would make it two, "<" could pass for a control token. */
static kv8_status check_word(const char *word, const char *what) {
    if (word == NULL) return KV8_OK;
    if (word[0] == '\0') return kv8_fail(KV8_ERR_INVALID, "%s is empty", what);
    if (strpbrk(word, " \t\n\v\f\r<") != NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s \"%.64s\" holds whitespace or \"<\"", what, word);
    return KV8_OK;
}

static const char *without_constrain(const char *content_type) {
    static const size_t length = sizeof KV8_HARMONY_CONSTRAIN - 1;
    if (content_type != NULL && strncmp(content_type, KV8_HARMONY_CONSTRAIN, length) == 0)
        return content_type + length;
    return content_type;
}

/* A tool's name takes the role's place, so it must not be a role or anything else a header has. */
static kv8_status check_tool_name(const char *name) {
    kv8_role role;
    const char *rest;
    if (name == NULL) return kv8_fail(KV8_ERR_INVALID, "name: a tool's message needs it");
    if (kv8_harmony_role_parse(name, &role, &rest) || strncmp(name, "to=", 3) == 0)
        return kv8_fail(KV8_ERR_INVALID, "name \"%.64s\" cannot be a tool's", name);
    return KV8_OK;
}

static kv8_status check_message(const kv8_message *message) {
    if (message->role != KV8_ROLE_TOOL && kv8_harmony_role_word(message->role) == NULL)
        return kv8_fail(KV8_ERR_INVALID, "role %d is none", (int)message->role);
    KV8_TRY(check_word(message->name, "name"));
    KV8_TRY(check_word(message->recipient, "recipient"));
    KV8_TRY(check_word(message->channel, "channel"));
    KV8_TRY(check_word(without_constrain(message->content_type), "content_type"));
    return message->role == KV8_ROLE_TOOL ? check_tool_name(message->name) : KV8_OK;
}

/* --- rendering --- */

/* The message with the format's defaults in place of what is absent. */
static kv8_message with_defaults(const kv8_message *given) {
    kv8_message message = *given;
    if (message.role == KV8_ROLE_TOOL) {
        if (message.recipient == NULL) message.recipient = "assistant";
        if (message.channel == NULL) message.channel = "commentary";
    } else if (message.role == KV8_ROLE_ASSISTANT && message.channel == NULL) {
        message.channel = message.recipient != NULL ? "commentary" : "final";
    }
    message.content_type = without_constrain(message.content_type);
    if (message.content == NULL) message.content = "";
    return message;
}

static kv8_status put_header(renderer *self, const kv8_message *message) {
    const char *const word = kv8_harmony_role_word(message->role);
    KV8_TRY(put(self, self->control.start));
    KV8_TRY(put_text(self, word != NULL ? word : message->name));
    if (word != NULL && message->name != NULL) KV8_TRY(put_joined(self, ":", message->name));
    if (message->recipient != NULL) KV8_TRY(put_joined(self, " to=", message->recipient));
    if (message->channel != NULL) {
        KV8_TRY(put(self, self->control.channel));
        KV8_TRY(put_text(self, message->channel));
    }
    if (message->content_type != NULL) {
        KV8_TRY(put_text(self, " "));
        KV8_TRY(put(self, self->control.constrain));
        KV8_TRY(put_text(self, message->content_type));
    }
    return put(self, self->control.message);
}

static kv8_status put_message(renderer *self, const kv8_message *given) {
    KV8_TRY(check_message(given));
    const kv8_message message = with_defaults(given);
    if (message.role == KV8_ROLE_DEVELOPER) {
        if (message.content[0] == '\0') return KV8_OK; /* no instructions, no message */
        KV8_TRY(put_header(self, &message));
        KV8_TRY(put_joined(self, "# Instructions\n\n", message.content));
    } else {
        KV8_TRY(put_header(self, &message));
        KV8_TRY(put_text(self, message.content));
    }
    const bool is_call = message.role == KV8_ROLE_ASSISTANT && message.recipient != NULL;
    return put(self, is_call ? self->control.call : self->control.end);
}

/* --- the first messages --- */

static bool has_functions(const kv8_harmony_options *options) {
    return options->functions != NULL && options->functions[0] != '\0';
}

/* One line of the system message, or none for "". */
static kv8_status add_line(kv8_text_buffer *text, const char *label, const char *value) {
    if (value == NULL || value[0] == '\0') return KV8_OK;
    KV8_TRY(kv8_text_append_string(text, label));
    KV8_TRY(kv8_text_append_string(text, value));
    return kv8_text_append_string(text, "\n");
}

static kv8_status build_system(const kv8_harmony_options *options, kv8_text_buffer *text) {
    const char *const reasoning = options->reasoning != NULL ? options->reasoning : "medium";
    if (strcmp(reasoning, "low") != 0 && strcmp(reasoning, "medium") != 0 &&
        strcmp(reasoning, "high") != 0)
        return kv8_fail(KV8_ERR_INVALID, "reasoning \"%.64s\": must be low, medium or high",
                        reasoning);
    KV8_TRY(add_line(text, "",
                     options->identity != NULL
                         ? options->identity
                         : "You are ChatGPT, a large language model trained by OpenAI."));
    KV8_TRY(add_line(text, "Knowledge cutoff: ",
                     options->knowledge_cutoff != NULL ? options->knowledge_cutoff : "2024-06"));
    KV8_TRY(add_line(text, "Current date: ", options->current_date));
    if (text->length > 0) KV8_TRY(kv8_text_append_string(text, "\n"));
    KV8_TRY(add_line(text, "Reasoning: ", reasoning));
    KV8_TRY(kv8_text_append_string(text,
                                   "\n# Valid channels: analysis, commentary, final. Channel must "
                                   "be included for every message."));
    if (!has_functions(options)) return KV8_OK;
    return kv8_text_append_string(
        text, "\nCalls to these tools must go to the commentary channel: 'functions'.");
}

static kv8_status put_boilerplate(renderer *self, const kv8_harmony_options *options) {
    kv8_text_buffer text = {0};
    kv8_status status = build_system(options, &text);
    const kv8_message system = {.role = KV8_ROLE_SYSTEM, .content = text.data};
    if (status == KV8_OK) status = put_message(self, &system);
    kv8_text_free(&text);
    return status;
}

/* "# Title", blank line, body, after a blank line where it is not the first. */
static kv8_status add_section(kv8_text_buffer *text, const char *title, const char *body,
                              const char *close) {
    if (body == NULL || body[0] == '\0') return KV8_OK;
    if (text->length > 0) KV8_TRY(kv8_text_append_string(text, "\n\n"));
    KV8_TRY(kv8_text_append_string(text, title));
    KV8_TRY(kv8_text_append_string(text, body));
    return kv8_text_append_string(text, close);
}

/* The developer message with functions and formats, after instructions where there are any. */
static kv8_status put_developer(renderer *self, const char *instructions,
                                const kv8_harmony_options *options) {
    const kv8_message developer = {.role = KV8_ROLE_DEVELOPER};
    kv8_text_buffer text = {0};
    kv8_status status = put_header(self, &developer);
    if (status == KV8_OK) status = add_section(&text, "# Instructions\n\n", instructions, "");
    if (status == KV8_OK)
        status = add_section(&text, "# Tools\n\n## functions\n\nnamespace functions {\n\n",
                             options->functions, "} // namespace functions");
    if (status == KV8_OK)
        status = add_section(&text, "# Response Formats\n\n", options->formats, "");
    if (status == KV8_OK) status = put_text(self, text.data);
    kv8_text_free(&text);
    return status == KV8_OK ? put(self, self->control.end) : status;
}

/* Index of the last final answer, or 0: analysis before it is not sent back. Analysis after it led
 * to calls that are not answered yet, and stays. */
static size_t last_final(const kv8_message *messages, size_t num_messages) {
    for (size_t i = num_messages; i-- > 0;) {
        if (messages[i].role != KV8_ROLE_ASSISTANT) continue;
        const kv8_message message = with_defaults(&messages[i]);
        if (strcmp(message.channel, "final") == 0) return i;
    }
    return 0;
}

static kv8_status render_all(renderer *self, const kv8_message *messages, size_t num_messages,
                             const kv8_harmony_options *options) {
    size_t first = 0;
    if (num_messages == 0 || messages[0].role != KV8_ROLE_SYSTEM) {
        KV8_TRY(put_boilerplate(self, options));
    } else {
        const kv8_status status = put_message(self, &messages[first++]);
        if (status != KV8_OK) return kv8_fail_within(status, "messages[0]");
    }
    if (has_functions(options) || (options->formats != NULL && options->formats[0] != '\0')) {
        const bool instructs = first < num_messages && messages[first].role == KV8_ROLE_DEVELOPER;
        const char *const instructions = instructs ? messages[first++].content : NULL;
        KV8_TRY(put_developer(self, instructions, options));
    }
    const size_t final_idx = last_final(messages, num_messages);
    for (size_t i = first; i < num_messages; i++) {
        const char *const channel = messages[i].channel;
        const bool of_the_model =
            messages[i].role == KV8_ROLE_ASSISTANT || messages[i].role == KV8_ROLE_TOOL;
        if (i < final_idx && of_the_model && channel != NULL && strcmp(channel, "analysis") == 0)
            continue;
        const kv8_status status = put_message(self, &messages[i]);
        if (status != KV8_OK) return kv8_fail_within(status, "messages[%zu]", i);
    }
    KV8_TRY(put(self, self->control.start));
    return put_text(self, "assistant");
}

kv8_status kv8_harmony_render(const kv8_tokenizer *tokenizer, const kv8_message *messages,
                              size_t num_messages, const kv8_harmony_options *options,
                              int32_t **ids_out, size_t *num_out) {
    KV8_REQUIRE(tokenizer, ids_out, num_out);
    static const kv8_harmony_options defaults = KV8_HARMONY_OPTIONS_INIT;
    if (options == NULL) options = &defaults;
    KV8_TAKE_STRUCT(kv8_harmony_options, options);
    if (messages == NULL && num_messages > 0)
        return kv8_fail(KV8_ERR_INVALID, "messages is NULL, num_messages is %zu", num_messages);
    renderer self = {.tokenizer = tokenizer};
    KV8_TRY(kv8_harmony_control_find(tokenizer, &self.control));
    const kv8_status status = render_all(&self, messages, num_messages, options);
    if (status != KV8_OK) {
        free(self.ids.data);
        return status;
    }
    *ids_out = self.ids.data;
    *num_out = self.ids.count;
    return KV8_OK;
}
