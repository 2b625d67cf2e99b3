/* harmony_parser.c - what the model writes, one id at a time, as messages.
 *
 * Two states: in a header (text is collected until <|message|>) and in a content (text is passed
 * on as soon as its characters are whole). Nothing the model writes is an error:
 *   - a control token out of place ends what it interrupts, or is passed over;
 *   - a header that never ends is read as far as it is one, the rest is content;
 *   - bytes that are no UTF-8, U+0000 and ids without a token become U+FFFD.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "harmony_format.h"
#include "text_buffer.h"
#include "utf8.h"

/* No header is this long (bytes): it is content that lacks one. */
enum { MAX_HEADER = 4096 };

/* A message and what its strings lie in. */
typedef struct message_slot {
    kv8_message view;
    char *header, *channel;
    kv8_text_buffer content;
} message_slot;

struct kv8_harmony_parser {
    const kv8_tokenizer *tokenizer;
    kv8_harmony_control control;
    bool in_content;
    kv8_text_buffer header; /* in a header: its text so far */
    bool after_start;       /* <|start|> began it */
    bool has_channel;
    size_t channel_at; /* where in the header <|channel|> stood */
    char pending[4];   /* bytes of a character not yet whole */
    size_t num_pending;
    kv8_text_buffer event_text;
    message_slot *messages;
    size_t num_messages, capacity;
};

kv8_status kv8_harmony_parser_create(kv8_harmony_parser **out, const kv8_tokenizer *tokenizer) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(tokenizer);
    kv8_harmony_control control;
    KV8_TRY(kv8_harmony_control_find(tokenizer, &control));
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_harmony_parser), "harmony parser", &memory));
    kv8_harmony_parser *const parser = memory;
    parser->tokenizer = tokenizer;
    parser->control = control;
    *out = parser;
    return KV8_OK;
}

void kv8_harmony_parser_destroy(kv8_harmony_parser *parser) {
    if (parser == NULL) return;
    for (size_t i = 0; i < parser->num_messages; i++) {
        free(parser->messages[i].header);
        free(parser->messages[i].channel);
        kv8_text_free(&parser->messages[i].content);
    }
    free(parser->messages);
    kv8_text_free(&parser->header);
    kv8_text_free(&parser->event_text);
    kv8_release(NULL, parser, 1, sizeof *parser);
}

size_t kv8_harmony_parser_num_messages(const kv8_harmony_parser *parser) {
    return parser->num_messages;
}

const kv8_message *kv8_harmony_parser_message(const kv8_harmony_parser *parser,
                                              size_t message_idx) {
    return message_idx < parser->num_messages ? &parser->messages[message_idx].view : NULL;
}

/* --- bytes to whole characters --- */

static const char REPLACEMENT[] = "\xef\xbf\xbd"; /* U+FFFD */

static kv8_status put_replacement(kv8_text_buffer *text) {
    return kv8_text_append(text, REPLACEMENT, sizeof REPLACEMENT - 1);
}

/* Moves out of `pending` what can be decided; keeps a character that is not yet whole. */
static kv8_status settle_pending(kv8_harmony_parser *parser, kv8_text_buffer *text) {
    while (parser->num_pending > 0) {
        size_t used = 0;
        const kv8_utf8_kind kind = kv8_utf8_next(parser->pending, parser->num_pending, &used);
        if (kind == KV8_UTF8_INCOMPLETE) return KV8_OK;
        if (kind == KV8_UTF8_INVALID || parser->pending[0] == '\0')
            KV8_TRY(put_replacement(text));
        else
            KV8_TRY(kv8_text_append(text, parser->pending, used));
        parser->num_pending -= used;
        memmove(parser->pending, parser->pending + used, parser->num_pending);
    }
    return KV8_OK;
}

/* Nothing more will come: an unfinished character is one U+FFFD. */
static kv8_status flush_pending(kv8_harmony_parser *parser, kv8_text_buffer *text) {
    if (parser->num_pending == 0) return KV8_OK;
    parser->num_pending = 0;
    return put_replacement(text);
}

static kv8_status put_token(kv8_harmony_parser *parser, int32_t id, kv8_text_buffer *text) {
    size_t length;
    const char *const bytes = kv8_tokenizer_token_bytes(parser->tokenizer, id, &length);
    if (bytes == NULL) {
        KV8_TRY(flush_pending(parser, text));
        return put_replacement(text);
    }
    for (size_t i = 0; i < length; i++) {
        parser->pending[parser->num_pending++] = bytes[i];
        KV8_TRY(settle_pending(parser, text));
    }
    return KV8_OK;
}

/* --- messages --- */

static kv8_status grow_messages(kv8_harmony_parser *parser) {
    if (parser->num_messages < parser->capacity) return KV8_OK;
    const size_t capacity = parser->capacity == 0 ? 4 : 2 * parser->capacity;
    message_slot *const messages = realloc(parser->messages, capacity * sizeof *messages);
    if (messages == NULL)
        return kv8_fail(KV8_ERR_NO_MEMORY, "harmony: no memory for %zu messages", capacity);
    parser->messages = messages;
    parser->capacity = capacity;
    return KV8_OK;
}

/* Adds to the open message and to the event. */
static kv8_status put_content(kv8_harmony_parser *parser, const char *text, size_t length) {
    message_slot *const slot = &parser->messages[parser->num_messages - 1];
    KV8_TRY(kv8_text_append(&slot->content, text, length));
    slot->view.content = slot->content.data;
    return KV8_OK;
}

/* Cuts the channel out of the header: up to whitespace or "<". */
static kv8_status cut_channel(kv8_harmony_parser *parser, kv8_text_buffer *channel_out) {
    if (!parser->has_channel) return KV8_OK;
    char *begin = parser->header.data + parser->channel_at;
    begin += strspn(begin, " \t\n\v\f\r");
    const size_t length = strcspn(begin, " \t\n\v\f\r<");
    KV8_TRY(kv8_text_append(channel_out, begin, length));
    memset(begin, ' ', length);
    return KV8_OK;
}

static void begin_header(kv8_harmony_parser *parser, bool after_start) {
    kv8_text_free(&parser->header);
    parser->in_content = false;
    parser->after_start = after_start;
    parser->has_channel = false;
}

/* Turns the header into an open message. Without <|message|> (`ended` false) what is left of it is
 * content, and a header that says nothing makes no message (*opened_out false). */
static kv8_status open_message(kv8_harmony_parser *parser, bool ended, bool *opened_out) {
    kv8_text_buffer channel = {0};
    kv8_harmony_header header;
    kv8_status status;
    *opened_out = false;
    KV8_TRY_GOTO(flush_pending(parser, &parser->header));
    KV8_TRY_GOTO(grow_messages(parser));
    KV8_TRY_GOTO(kv8_text_append(&parser->header, "", 0)); /* a string even when nothing came */
    KV8_TRY_GOTO(cut_channel(parser, &channel));
    const size_t role_length = parser->has_channel ? parser->channel_at : SIZE_MAX;
    kv8_harmony_header_parse(parser->header.data, role_length, parser->after_start, ended, &header);
    const char *const channel_name = channel.length > 0 ? channel.data : NULL;
    const bool says_nothing = channel_name == NULL && header.recipient == NULL &&
                              header.content_type == NULL && header.rest[0] == '\0';
    if (!ended && says_nothing) {
        kv8_text_free(&channel);
        begin_header(parser, false);
        return KV8_OK;
    }
    message_slot slot = {.header = parser->header.data,
                         .channel = channel.data,
                         .view = {.role = header.role,
                                  .name = header.name,
                                  .recipient = header.recipient,
                                  .channel = channel_name,
                                  .content_type = header.content_type,
                                  .content = ""}};
    parser->header = (kv8_text_buffer){0}; /* the slot has it now */
    parser->messages[parser->num_messages++] = slot;
    parser->in_content = true;
    *opened_out = true;
    return kv8_text_append_string(&parser->event_text, header.rest);
fail:
    kv8_text_free(&channel);
    return status;
}

/* Ends whatever is open: a content, or a header that turns out to be one. */
static kv8_status close_open(kv8_harmony_parser *parser, kv8_harmony_event *event) {
    bool open = parser->in_content;
    if (open)
        KV8_TRY(flush_pending(parser, &parser->event_text));
    else
        KV8_TRY(open_message(parser, false, &open));
    event->message_done = open;
    return KV8_OK;
}

static kv8_status push_text(kv8_harmony_parser *parser, int32_t id) {
    if (parser->in_content) return put_token(parser, id, &parser->event_text);
    KV8_TRY(put_token(parser, id, &parser->header));
    bool opened;
    return parser->header.length > MAX_HEADER ? open_message(parser, false, &opened) : KV8_OK;
}

/* <|channel|> where content was: the model forgot <|end|><|start|>assistant. */
static kv8_status push_channel(kv8_harmony_parser *parser, kv8_harmony_event *event,
                               bool *next_header) {
    if (parser->in_content) {
        *next_header = true;
        return close_open(parser, event);
    }
    KV8_TRY(flush_pending(parser, &parser->header));
    if (parser->has_channel) return kv8_text_append_string(&parser->header, " ");
    parser->has_channel = true;
    parser->channel_at = parser->header.length;
    return KV8_OK;
}

static kv8_status push_constrain(kv8_harmony_parser *parser) {
    if (parser->in_content) return KV8_OK;
    KV8_TRY(flush_pending(parser, &parser->header));
    return kv8_text_append_string(&parser->header, " " KV8_HARMONY_CONSTRAIN);
}

/* The event's text joins the message it belongs to: the last one, if any text came at all. */
static kv8_status fill_event(kv8_harmony_parser *parser, kv8_harmony_event *event) {
    const bool of_last = parser->in_content || event->message_done;
    event->message_idx = (int32_t)(parser->num_messages - (of_last ? 1 : 0));
    event->text = parser->event_text.data != NULL ? parser->event_text.data : "";
    event->text_length = parser->event_text.length;
    return of_last ? put_content(parser, event->text, event->text_length) : KV8_OK;
}

kv8_status kv8_harmony_parser_push(kv8_harmony_parser *parser, int32_t id,
                                   kv8_harmony_event *event_out) {
    KV8_REQUIRE(parser, event_out);
    if (id < 0) return kv8_fail(KV8_ERR_INVALID, "harmony: id %d is negative", id);
    const kv8_harmony_control *const control = &parser->control;
    const bool stops =
        id == control->end_of_return || id == control->call || id == control->end_of_text;
    kv8_harmony_event event = {.stop = stops ? id : 0};
    bool next_header = false, opened;
    parser->event_text.length = 0;
    if (stops || id == control->end || id == control->start) {
        KV8_TRY(close_open(parser, &event));
        next_header = true;
    } else if (id == control->message) {
        if (!parser->in_content) KV8_TRY(open_message(parser, true, &opened));
    } else if (id == control->channel) {
        KV8_TRY(push_channel(parser, &event, &next_header));
    } else if (id == control->constrain) {
        KV8_TRY(push_constrain(parser));
    } else if (!kv8_tokenizer_is_special(parser->tokenizer, id)) {
        KV8_TRY(push_text(parser, id));
    }
    KV8_TRY(fill_event(parser, &event));
    if (next_header) begin_header(parser, id == control->start);
    if (next_header && id == control->channel) parser->has_channel = true, parser->channel_at = 0;
    *event_out = event;
    return KV8_OK;
}

kv8_status kv8_harmony_parser_finish(kv8_harmony_parser *parser, kv8_harmony_event *event_out) {
    KV8_REQUIRE(parser, event_out);
    kv8_harmony_event event = {0};
    parser->event_text.length = 0;
    KV8_TRY(close_open(parser, &event));
    KV8_TRY(fill_event(parser, &event));
    begin_header(parser, false);
    *event_out = event;
    return KV8_OK;
}
