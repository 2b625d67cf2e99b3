/* kv8/harmony.h - the harmony chat format of gpt-oss: rendering a conversation to token ids and
 * parsing what the model writes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_HARMONY_H
#define KV8_HARMONY_H

#include <kv8/tokenizer.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv8_role {
    KV8_ROLE_SYSTEM = 0,
    KV8_ROLE_DEVELOPER,
    KV8_ROLE_USER,
    KV8_ROLE_ASSISTANT,
    KV8_ROLE_TOOL /* `name` is the tool's ("functions.get_weather") */
} kv8_role;

/* One message. Strings are UTF-8, 0-terminated; NULL = absent. Text that looks like a control
 * token stays text. Name, recipient, channel and content type are single words: whitespace or "<"
 * in them is KV8_ERR_INVALID, as is a tool that is called like a role. */
typedef struct kv8_message {
    kv8_role role;
    const char *name;
    const char *recipient;    /* "functions.x", "assistant" */
    const char *channel;      /* "analysis", "commentary", "final" */
    const char *content_type; /* "<|constrain|>json" or "json": rendered as constrain + rest;
                                 parsed as "json" */
    const char *content;
} kv8_message;

typedef struct kv8_harmony_options {
    size_t struct_size;
    const char *identity;         /* NULL = "You are ChatGPT, a large language model trained by
                                     OpenAI."; "" = no line */
    const char *knowledge_cutoff; /* NULL = "2024-06"; "" = no line */
    const char *current_date;     /* "2025-06-28"; NULL = no line */
    const char *reasoning;        /* "low", "medium" (NULL), "high" */
    const char *functions;        /* declarations of the functions that may be called, as stand
                                     in "namespace functions {"; NULL or "" = none */
    const char *formats;          /* what stands under "# Response Formats"; NULL or "" = none */
} kv8_harmony_options;
#define KV8_HARMONY_OPTIONS_INIT KV8_SIZED(kv8_harmony_options)

/* The ids of a conversation, ending with "<|start|>assistant" ready for the model. A leading SYSTEM
 * message is rendered verbatim as the system message; without one the boilerplate is made from
 * options (NULL = all defaults). A DEVELOPER message becomes "# Instructions\n\n" + content; an
 * empty one is left out. Functions and formats stand in the leading DEVELOPER message, or make
 * one; the boilerplate says which channel calls go to. An ASSISTANT message without a channel is
 * "final", or "commentary" if it has a recipient: it is then a call and ends with <|call|>. A TOOL
 * message goes to "assistant" on "commentary" unless it says otherwise. Analysis before the last
 * final answer is dropped, as the format asks. *ids_out is malloc'ed (kv8_free), written on success
 * only. A tokenizer without the control tokens is KV8_ERR_UNSUPPORTED naming the first it lacks. */
KV8_API KV8_NODISCARD kv8_status kv8_harmony_render(const kv8_tokenizer *tokenizer,
                                                    const kv8_message *messages,
                                                    size_t num_messages,
                                                    const kv8_harmony_options *options,
                                                    int32_t **ids_out, size_t *num_out);

/* Streaming parser of the model's output, starting inside an assistant header. Lenient: unknown
 * channels and malformed headers never fail, they end up as content. A message opens with
 * <|message|>, or when a header ends without one but says something. A <|start|> or <|channel|>
 * inside a content ends it; other control tokens there are passed over. Memory grows with what
 * was fed, nothing else. The tokenizer must outlive the parser. */
typedef struct kv8_harmony_parser kv8_harmony_parser;
KV8_API KV8_NODISCARD kv8_status kv8_harmony_parser_create(kv8_harmony_parser **out,
                                                           const kv8_tokenizer *tokenizer);
KV8_API void kv8_harmony_parser_destroy(kv8_harmony_parser *parser);

typedef struct kv8_harmony_event {
    int32_t message_idx; /* the message now being written (in a header: the one to come) */
    const char *text;    /* new content, whole UTF-8 characters; "" in a header. Bytes that are no
                            UTF-8, U+0000 and ids without a token come as U+FFFD */
    size_t text_length;
    int32_t message_done; /* <|end|>, <|return|> or <|call|> closed it */
    int32_t stop;         /* 0, or the stop token's id (<|return|>, <|call|>, <|endoftext|>) */
} kv8_harmony_event;
/* Feeds one id (>= 0); *event_out borrows from the parser until the next call. After a stop the
 * parser is back at the beginning of an assistant message. */
KV8_API KV8_NODISCARD kv8_status kv8_harmony_parser_push(kv8_harmony_parser *parser, int32_t id,
                                                         kv8_harmony_event *event_out);
/* Ends the stream: flushes text held back, closes the open message. */
KV8_API KV8_NODISCARD kv8_status kv8_harmony_parser_finish(kv8_harmony_parser *parser,
                                                           kv8_harmony_event *event_out);
/* The open message counts. */
KV8_API size_t kv8_harmony_parser_num_messages(const kv8_harmony_parser *parser);
/* Borrowed until destroy or the next push; NULL when there is no such message. */
KV8_API const kv8_message *kv8_harmony_parser_message(const kv8_harmony_parser *parser,
                                                      size_t message_idx);

#ifdef __cplusplus
}
#endif
#endif
