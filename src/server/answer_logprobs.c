/* answer_logprobs.c - logprobs in the forms that clients read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>

#include "answer.h"

/* A token as a string: its text, or "bytes:\xNN.." where that is not whole UTF-8. */
static json_t *token_text(const kv8_tokenizer *tokenizer, int32_t token) {
    size_t length = 0;
    const char *const bytes = kv8_tokenizer_token_bytes(tokenizer, token, &length);
    json_t *const text = json_stringn(bytes == NULL ? "" : bytes, bytes == NULL ? 0 : length);
    if (text != NULL) return text;
    byte_buffer spelt = {0};
    byte_buffer_add_string(&spelt, "bytes:");
    for (size_t i = 0; i < length; i++)
        byte_buffer_printf(&spelt, "\\x%02x", (unsigned char)bytes[i]);
    json_t *const string = json_string(spelt.data);
    byte_buffer_free(&spelt);
    return string;
}

/* The same, or where the request wants ids, vLLM's "token_id:N". */
static json_t *token_string(const choice *said, int32_t token) {
    if (!said->request->return_tokens_as_ids) return token_text(said->model->tokenizer, token);
    char id[24];
    snprintf(id, sizeof id, "token_id:%d", token);
    return json_string(id);
}

static json_t *token_bytes(const kv8_tokenizer *tokenizer, int32_t token) {
    size_t length = 0;
    const char *const bytes = kv8_tokenizer_token_bytes(tokenizer, token, &length);
    json_t *const list = json_array();
    for (size_t i = 0; bytes != NULL && i < length; i++)
        json_array_append_new(list, json_integer((unsigned char)bytes[i]));
    return list;
}

/* JSON has no infinity: an id that cannot come has -9999, as vLLM writes it. */
static json_t *logprob_number(float logprob) {
    if (isnan(logprob)) return json_null();
    return json_real(logprob < -9999.0f ? -9999.0 : (double)logprob);
}

static int32_t num_top_shown(const choice *said, const choice_logprob *item) {
    const int32_t wanted = said->request->num_logprobs;
    return item->num_top < wanted ? item->num_top : wanted;
}

/* {text: logprob}: the likeliest, and the token itself. */
static json_t *top_map(const choice *said, const choice_logprob *item) {
    if (isnan(item->logprob)) return json_null();
    json_t *const map = json_object();
    const int32_t num = num_top_shown(said, item);
    for (int32_t i = 0; i <= num; i++) {
        const kv8_logprob own = {.token = item->token, .logprob = item->logprob};
        const kv8_logprob *const at = i < num ? &said->top[item->top_at + (size_t)i] : &own;
        json_t *const key = token_string(said, at->token);
        if (key != NULL && json_object_get(map, json_string_value(key)) == NULL)
            json_object_set_new(map, json_string_value(key), logprob_number(at->logprob));
        json_decref(key);
    }
    return map;
}

json_t *answer_completion_logprobs(const choice *said) {
    if (!said->request->wants_logprobs) return json_null();
    json_t *const tokens = json_array(), *const logprobs = json_array(), *const tops = json_array(),
                  *const offsets = json_array();
    size_t i = said->logprobs_sent;
    if (!said->request->echo && i < said->num_prompt_logprobs) i = said->num_prompt_logprobs;
    for (; i < said->num_logprobs; i++) {
        const choice_logprob *const item = &said->logprobs[i];
        json_array_append_new(tokens, token_string(said, item->token));
        json_array_append_new(logprobs, logprob_number(item->logprob));
        json_array_append_new(tops, top_map(said, item));
        json_array_append_new(offsets, json_integer((json_int_t)item->text_offset));
    }
    return json_pack("{s:o, s:o, s:o, s:o}", "tokens", tokens, "token_logprobs", logprobs,
                     "top_logprobs", tops, "text_offset", offsets);
}

static json_t *chat_entry(const choice *said, int32_t token, float logprob) {
    return json_pack("{s:o, s:o, s:o}", "token", token_string(said, token), "logprob",
                     logprob_number(logprob), "bytes", token_bytes(said->model->tokenizer, token));
}

json_t *answer_chat_logprobs(const choice *said) {
    if (!said->request->wants_logprobs) return json_null();
    json_t *const content = json_array();
    size_t i = said->logprobs_sent;
    if (i < said->num_prompt_logprobs) i = said->num_prompt_logprobs;
    for (; i < said->num_logprobs; i++) {
        const choice_logprob *const item = &said->logprobs[i];
        json_t *const entry = chat_entry(said, item->token, item->logprob);
        json_t *const top = json_array();
        for (int32_t t = 0; t < num_top_shown(said, item); t++) {
            const kv8_logprob *const at = &said->top[item->top_at + (size_t)t];
            json_array_append_new(top, chat_entry(said, at->token, at->logprob));
        }
        json_object_set_new(entry, "top_logprobs", top);
        json_array_append_new(content, entry);
    }
    return json_pack("{s:o}", "content", content);
}

static void add_prompt_entry(json_t *map, const choice *said, int32_t token, float logprob,
                             json_t *rank) {
    char key[16];
    snprintf(key, sizeof key, "%d", token);
    json_t *const entry =
        json_pack("{s:o, s:o, s:o}", "logprob", logprob_number(logprob), "rank", rank,
                  "decoded_token", token_text(said->model->tokenizer, token));
    if (json_object_get(map, key) == NULL)
        json_object_set_new(map, key, entry);
    else
        json_decref(entry);
}

json_t *answer_prompt_logprobs(const choice *said) {
    json_t *const list = json_array();
    for (size_t i = 0; i < said->num_prompt_logprobs; i++) {
        const choice_logprob *const item = &said->logprobs[i];
        if (isnan(item->logprob)) {
            json_array_append_new(list, json_null());
            continue;
        }
        json_t *const map = json_object();
        for (int32_t t = 0; t < item->num_top && t < said->request->num_prompt_logprobs; t++) {
            const kv8_logprob *const at = &said->top[item->top_at + (size_t)t];
            add_prompt_entry(map, said, at->token, at->logprob, json_integer(t + 1));
        }
        add_prompt_entry(map, said, item->token, item->logprob, json_null());
        json_array_append_new(list, map);
    }
    return list;
}
