/* api_request.c - the fields that all generating routes share.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* getrandom */
#include "api_request.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

bool api_check_model(const api_model *model, const fields *f) {
    const char *name = NULL;
    if (!field_string(f, "model", &name)) return false;
    if (name == NULL) return true;
    for (size_t i = 0; i < model->num_names; i++) {
        if (strcmp(name, model->names[i]) == 0) return true;
    }
    return api_fail(f->error, 404, "model_not_found", "model",
                    "model \"%.200s\" is not served here, \"%.200s\" is", name, model->name);
}

/* --- sampling --- */

static bool read_bias(api_request *request, const api_model *model, const fields *f) {
    json_t *map = NULL;
    if (!field_object(f, "logit_bias", &map)) return false;
    const size_t num = json_object_size(map);
    if (num == 0) return true;
    request->bias_ids = calloc(num, sizeof *request->bias_ids);
    request->bias = calloc(num, sizeof *request->bias);
    if (request->bias_ids == NULL || request->bias == NULL) return api_fail_memory(f->error);
    const fields entries = {.object = map, .within = "logit_bias.", .error = f->error};
    const char *key;
    json_t *value;
    int32_t count = 0;
    json_object_foreach(map, key, value) {
        char *end;
        const long id = strtol(key, &end, 10);
        if (*end != '\0' || end == key || id < 0 || id >= model->vocab_size)
            return field_fail(f, "logit_bias", "has the key \"%.32s\", must be an id below %d", key,
                              model->vocab_size);
        for (int32_t i = 0; i < count; i++) {
            if (request->bias_ids[i] == (int32_t)id)
                return field_fail(f, "logit_bias", "names the id %ld twice", id);
        }
        request->bias_ids[count] = (int32_t)id;
        if (!field_float(&entries, key, -100, 100, &request->bias[count])) return false;
        /* As OpenAI's -100 does, and vLLM's does not quite: the id is out. */
        if (request->bias[count] == -100.0f) request->bias[count] = -INFINITY;
        count++;
    }
    request->sampling.bias_ids = request->bias_ids;
    request->sampling.bias = request->bias;
    request->sampling.num_bias = count;
    return true;
}

static bool read_seed(api_request *request, const fields *f) {
    int64_t seed = 0;
    if (!field_int(f, "seed", INT64_MIN, INT64_MAX, &seed)) return false;
    request->sampling.seed = (uint64_t)seed;
    if (field_any(f, "seed") != NULL) return true;
    if (getrandom(&request->sampling.seed, sizeof request->sampling.seed, 0) < 0)
        return api_fail(f->error, 500, NULL, NULL, "the system has no random numbers");
    return true;
}

static bool read_sampling(api_request *request, const api_model *model, const fields *f) {
    kv8_sampling *const sampling = &request->sampling;
    *sampling = (kv8_sampling)KV8_SAMPLING_INIT;
    sampling->temperature = 1;
    sampling->top_p = 1;
    sampling->repetition_penalty = 1;
    if (!field_float(f, "temperature", 0, 100, &sampling->temperature) ||
        !field_float(f, "top_p", 0, 1, &sampling->top_p) ||
        !field_int32(f, "top_k", -1, INT32_MAX, &sampling->top_k) ||
        !field_float(f, "min_p", 0, 1, &sampling->min_p) ||
        !field_float(f, "presence_penalty", -2, 2, &sampling->presence_penalty) ||
        !field_float(f, "frequency_penalty", -2, 2, &sampling->frequency_penalty) ||
        !field_float(f, "repetition_penalty", 0.01, 100, &sampling->repetition_penalty))
        return false;
    if (sampling->top_p == 0.0f) return field_fail(f, "top_p", "is 0, must be above 0");
    if (sampling->top_k < 0) sampling->top_k = 0; /* -1 = all, as vLLM has it */
    return read_seed(request, f) && read_bias(request, model, f);
}

/* --- where a choice ends --- */

static bool read_stops(api_request *request, const fields *f) {
    json_t *const stop = field_any(f, "stop");
    if (!field_bool(f, "include_stop_str_in_output", &request->stops.include)) return false;
    if (stop == NULL) return true;
    if (!json_is_string(stop) && !json_is_array(stop))
        return field_fail_type(f, "stop", "a string or an array of strings");
    const size_t num = json_is_array(stop) ? json_array_size(stop) : 1;
    if (num > API_MAX_STOPS)
        return field_fail(f, "stop", "has %zu strings, at most %d are taken", num, API_MAX_STOPS);
    request->stops.strings = calloc(num + 1, sizeof *request->stops.strings);
    if (request->stops.strings == NULL) return api_fail_memory(f->error);
    for (size_t i = 0; i < num; i++) {
        json_t *const item = json_is_array(stop) ? json_array_get(stop, i) : stop;
        const char *const string = json_string_value(item);
        if (string == NULL) return field_fail(f, "stop", "holds something else than strings");
        if (string[0] == '\0' || strlen(string) != json_string_length(item))
            return field_fail(f, "stop", "holds an empty string or the character U+0000");
        request->stops.strings[request->stops.num++] = string;
    }
    return true;
}

static bool read_ids(const fields *f, const char *name, int32_t vocab_size, const json_t *list,
                     int32_t **ids_out, size_t *num_out) {
    const size_t num = json_array_size(list);
    int32_t *const ids = malloc((num + 1) * sizeof *ids);
    if (ids == NULL) return api_fail_memory(f->error);
    for (size_t i = 0; i < num; i++) {
        const json_t *const item = json_array_get(list, i);
        const json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id >= vocab_size) {
            free(ids);
            return field_fail(f, name, "[%zu] is no token id: a whole number from 0 to %d", i,
                              vocab_size - 1);
        }
        ids[i] = (int32_t)id;
    }
    *ids_out = ids;
    *num_out = num;
    return true;
}

static bool read_limits(api_request *request, const api_model *model, const fields *f) {
    json_t *stop_ids = NULL;
    request->max_tokens = -1;
    if (!field_int32(f, "max_tokens", 0, INT32_MAX, &request->max_tokens) ||
        !field_int32(f, "max_completion_tokens", 0, INT32_MAX, &request->max_tokens) ||
        !field_int32(f, "min_tokens", 0, INT32_MAX, &request->min_tokens) ||
        !field_bool(f, "ignore_eos", &request->ignore_eos) ||
        !field_array(f, "stop_token_ids", &stop_ids))
        return false;
    if (request->max_tokens >= 0 && request->min_tokens > request->max_tokens)
        return field_fail(f, "min_tokens", "is %d, must be at most max_tokens, %d",
                          request->min_tokens, request->max_tokens);
    if (stop_ids != NULL && !read_ids(f, "stop_token_ids", model->vocab_size, stop_ids,
                                      &request->stop_ids, &request->num_stop_ids))
        return false;
    return read_stops(request, f);
}

/* --- the rest --- */

static bool read_stream(api_request *request, const fields *f) {
    json_t *options = NULL;
    if (!field_bool(f, "stream", &request->stream) || !field_object(f, "stream_options", &options))
        return false;
    if (options == NULL) return true;
    if (!request->stream)
        return field_fail(f, "stream_options", "goes with stream, which is not true");
    const fields inner = {.object = options, .within = "stream_options.", .error = f->error};
    return field_bool(&inner, "include_usage", &request->include_usage) &&
           field_bool(&inner, "continuous_usage_stats", &request->continuous_usage);
}

/* FNV-1a: equal salts share pages, others do not; 0 is nobody's. */
static uint64_t hash_salt(const char *salt) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *c = salt; *c != '\0'; c++) hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    return hash == 0 ? 1 : hash;
}

static bool read_scheduling(api_request *request, const fields *f) {
    const char *salt = NULL;
    if (!field_int32(f, "priority", INT32_MIN, INT32_MAX, &request->priority) ||
        !field_string(f, "cache_salt", &salt))
        return false;
    if (salt != NULL && salt[0] == '\0') return field_fail(f, "cache_salt", "is empty");
    if (salt != NULL) request->cache_salt = hash_salt(salt);
    return true;
}

/* What would change the answer and is not computed here is refused by name. */
static bool refuse_unsupported(const fields *f) {
    bool beams = false;
    int32_t best_of = 1, n = 1;
    if (!field_bool(f, "use_beam_search", &beams) || !field_int32(f, "n", 1, API_MAX_CHOICES, &n) ||
        !field_int32(f, "best_of", 1, INT32_MAX, &best_of))
        return false;
    if (beams) return field_fail(f, "use_beam_search", "is not supported");
    if (field_any(f, "best_of") != NULL && best_of != n)
        return field_fail(f, "best_of", "is %d, must be n, %d", best_of, n);
    static const char *const names[] = {"suffix",
                                        "guided_json",
                                        "guided_regex",
                                        "guided_choice",
                                        "guided_grammar",
                                        "structured_outputs",
                                        "prompt_embeds",
                                        "audio",
                                        "logits_processors",
                                        "allowed_token_ids",
                                        "bad_words",
                                        "truncate_prompt_tokens"};
    return field_refuse(f, names, sizeof names / sizeof names[0]);
}

bool api_request_read_common(api_request *request, const api_model *model, const fields *f) {
    bool skip_special = true;
    request->n = 1;
    request->num_prompt_logprobs = -1;
    request->include_reasoning = true;
    if (!api_check_model(model, f) || !refuse_unsupported(f) || !read_sampling(request, model, f) ||
        !read_limits(request, model, f) || !read_stream(request, f) ||
        !read_scheduling(request, f) || !field_int32(f, "n", 1, API_MAX_CHOICES, &request->n) ||
        !field_bool(f, "return_token_ids", &request->return_token_ids) ||
        !field_bool(f, "return_tokens_as_token_ids", &request->return_tokens_as_ids) ||
        !field_bool(f, "skip_special_tokens", &skip_special) ||
        !field_int32(f, "prompt_logprobs", 0, API_MAX_LOGPROBS, &request->num_prompt_logprobs))
        return false;
    request->show_special = !skip_special;
    if (request->stream && request->num_prompt_logprobs >= 0)
        return field_fail(f, "prompt_logprobs", "does not go with stream");
    return true;
}

bool api_read_format(answer_shape *shape, const json_t *format, const char *param,
                     api_error *error) {
    const char *const type = json_string_value(json_object_get(format, "type"));
    const json_t *const inner = json_object_get(format, "json_schema"); /* chat's form */
    const json_t *const schema = json_object_get(inner != NULL ? inner : format, "schema");
    shape->param = param;
    if (format == NULL || (type != NULL && strcmp(type, "text") == 0)) return true;
    if (type != NULL && strcmp(type, "json_object") == 0) {
        shape->any_object = true;
        return true;
    }
    if (type == NULL || strcmp(type, "json_schema") != 0)
        return api_fail_value(error, param,
                              "%s is of type \"%.64s\", must be text, json_object or json_schema",
                              param, type == NULL ? "" : type);
    if (!json_is_object(schema))
        return api_fail_value(error, param, "%s has no schema that is an object", param);
    shape->schema = schema;
    return true;
}

/* All that a constraint is built of. */
static char *constraint_key(const answer_shape *shape) {
    json_t *const all =
        json_pack("{s:b, s:O?, s:b, s:O?, s:s?}", "chat", shape->is_chat, "schema", shape->schema,
                  "any", shape->any_object, "functions", shape->functions, "forced", shape->forced);
    char *const key = all == NULL ? NULL : json_dumps(all, JSON_COMPACT);
    json_decref(all);
    return key;
}

static bool find_constraint(api_request *request, const api_model *model, const answer_shape *shape,
                            api_error *error) {
    if (!answer_shape_is_held(shape)) return true;
    char *const key = constraint_key(shape);
    if (key == NULL) return api_fail_memory(error);
    request->constraint = constraint_store_find(model->constraints, key);
    if (request->constraint == NULL &&
        answer_grammar_build(&request->constraint, model->vocabulary, shape, error))
        constraint_store_keep(model->constraints, key, request->constraint);
    free(key);
    return request->constraint != NULL;
}

bool api_request_constrain(api_request *request, const api_model *model, const answer_shape *shape,
                           api_error *error) {
    if (shape->is_chat && (!model->harmony || !vocabulary_has_control(model->vocabulary)))
        return shape->schema == NULL && !shape->any_object
                   ? true
                   : api_fail_value(error, shape->param,
                                    "%s needs harmony's channels, which are not parsed here",
                                    shape->param);
    if (!find_constraint(request, model, shape, error)) return false;
    if (request->constraint == NULL || (!request->ignore_eos && request->min_tokens == 0))
        return true;
    return api_fail_value(error, request->ignore_eos ? "ignore_eos" : "min_tokens",
                          "an answer of a given form ends where that does: no ignore_eos, no "
                          "min_tokens");
}

bool api_prompt_read(api_prompt *prompt, const api_model *model, const json_t *value,
                     const char *param, api_error *error) {
    const fields f = {.within = "", .error = error};
    if (json_is_string(value)) {
        if (json_string_length(value) > model->max_prompt_bytes)
            return api_fail(
                error, 400, "context_length_exceeded", param,
                "%s has %zu bytes, more than the %d tokens of this model's context hold", param,
                json_string_length(value), model->max_model_len);
        const kv8_status status = kv8_tokenizer_encode(
            model->tokenizer, json_string_value(value), json_string_length(value),
            KV8_SPECIAL_AS_TOKENS, &prompt->ids, &prompt->num);
        if (status != KV8_OK) return api_fail_library(error, status, param);
    } else if (!json_is_array(value)) {
        return field_fail(&f, param,
                          "must be a string, an array of token ids, or an array of these");
    } else if (!read_ids(&f, param, model->vocab_size, value, &prompt->ids, &prompt->num)) {
        return false;
    }
    return prompt->num > 0 || field_fail(&f, param, "is empty");
}

bool api_request_check_lengths(api_request *request, const api_model *model, int32_t fallback,
                               api_error *error) {
    int32_t room = model->max_model_len;
    for (size_t i = 0; i < request->num_prompts; i++) {
        const size_t num = request->prompts[i].num;
        const size_t wanted = request->max_tokens >= 0 ? (size_t)request->max_tokens : 1;
        if (num + wanted > (size_t)model->max_model_len)
            return api_fail(error, 400, "context_length_exceeded",
                            request->max_tokens > 0 ? "max_tokens" : "prompt",
                            "%zu tokens of prompt and %zu to generate are more than the %d tokens "
                            "that this model's context holds",
                            num, wanted, model->max_model_len);
        if (model->max_model_len - (int32_t)num < room) room = model->max_model_len - (int32_t)num;
    }
    if (request->max_tokens < 0) request->max_tokens = room < fallback ? room : fallback;
    const int32_t echoed = request->echo && request->wants_logprobs ? request->num_logprobs : -1;
    const int32_t top =
        echoed > request->num_prompt_logprobs ? echoed : request->num_prompt_logprobs;
    request->prompt_top = top < 0 ? 0 : top == 0 ? 1 : top;
    return true;
}

void api_request_free(api_request *request) {
    for (size_t i = 0; i < request->num_prompts; i++) kv8_free(request->prompts[i].ids);
    free(request->prompts);
    free(request->stops.strings);
    free(request->stop_ids);
    free(request->bias_ids);
    free(request->bias);
    constraint_release(request->constraint);
    json_decref(request->body);
    *request = (api_request){0};
}
