/* chat_prompt.h - a conversation on its way from a request's JSON to a harmony prompt: messages
 * with the strings they need, the functions a model may call, and one it must.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CHAT_PROMPT_H
#define KV8_SERVER_CHAT_PROMPT_H

#include "api_request.h"

typedef struct chat_prompt {
    kv8_message *messages;
    size_t num, capacity;
    json_t *texts;            /* strings made for the messages */
    byte_buffer instructions; /* of system and developer messages before all others */
    byte_buffer functions;    /* declarations; empty = none */
    json_t *names;            /* the functions by name */
    byte_buffer formats;      /* of the answer, for the model to read; empty = none */
    const char *forced;       /* the function that must be called; "" = any; NULL = none must */
    const char *reasoning;    /* "low", "medium", "high"; NULL = medium */
} chat_prompt;

/* All of it; false with the error set. The strings of *message are borrowed. */
bool chat_prompt_add(chat_prompt *chat, const kv8_message *message, api_error *error);
/* A string that lives as long as the chat; NULL = no memory. */
const char *chat_prompt_keep(chat_prompt *chat, const char *text, size_t length);
/* "functions.NAME", kept. */
const char *chat_prompt_recipient(chat_prompt *chat, const char *name);
/* A system or developer message: before all others it joins the instructions. */
bool chat_prompt_instruct(chat_prompt *chat, const char *text, api_error *error);
/* A function {name, description?, parameters?}; `f` names it in errors. */
bool chat_prompt_add_function(chat_prompt *chat, const json_t *function, const fields *f);
/* "auto", "none", "required", or an object that names one function at `name_at`. */
bool chat_prompt_choose(chat_prompt *chat, const json_t *choice, const fields *f);
/* The form of the answer: "# Response Formats" in the prompt, and the request's constraint. Last,
 * after functions and choice. */
bool chat_prompt_constrain(chat_prompt *chat, const api_model *model, api_request *request,
                           const json_t *format, const char *param, api_error *error);
/* reasoning_effort's words. */
bool chat_prompt_set_reasoning(chat_prompt *chat, const char *effort, const char *param,
                               api_error *error);
/* The text of a message's content: a string, or an array of parts {type, text}. *text_out is NULL
 * for null or absent content. */
bool chat_prompt_text(chat_prompt *chat, const json_t *content, const char *param,
                      const char **text_out, api_error *error);
/* The request's one prompt; what a forced call begins with is the primer at its end. */
bool chat_prompt_render(chat_prompt *chat, const api_model *model, api_request *request,
                        api_error *error);
void chat_prompt_free(chat_prompt *chat);

#endif
