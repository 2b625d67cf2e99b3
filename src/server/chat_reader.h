/* chat_reader.h - what the messages of chat completions and the items of responses have in common:
 * an array of objects read one after another, calls and what came of them, the tools.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CHAT_READER_H
#define KV8_SERVER_CHAT_READER_H

#include "chat_prompt.h"

typedef struct chat_reader {
    chat_prompt *chat;
    json_t *calls; /* names of the functions called so far, by the call's id */
    fields f;      /* of the object in hand */
} chat_reader;

/* All below: false with the error set. */

/* Gives every object of the array `name` to `read_object`. */
bool chat_reader_run(chat_prompt *chat, const fields *f, const char *name, json_t *objects,
                     bool (*read_object)(chat_reader *self));
/* The field's text: a string or parts. */
bool chat_reader_text(chat_reader *self, const char *name, const char **text_out);
/* Adds a call of a function; arguments NULL = none, id NULL = nothing will come of it. */
bool chat_reader_add_call(chat_reader *self, const char *id, const char *name,
                          const char *arguments);
/* Adds what came of a call: of the function `name`, or NULL = of the call that the field `id_field`
 * named. */
bool chat_reader_add_output(chat_reader *self, const char *id_field, const char *id,
                            const char *name, const char *output);
/* The functions of tools[i], or of its object `within`, and tool_choice. */
bool chat_reader_tools(chat_prompt *chat, const fields *f, const char *within);

#endif
