/* answer_grammar.c - what an answer may be when a request says so.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "answer_grammar.h"

#include <string.h>

#include "json_grammar.h"

typedef struct builder {
    grammar *g;
    const answer_shape *shape;
    api_error *error;
    bool failed;
} builder;

static int text(builder *b, const char *string, int next) {
    return grammar_text(b->g, string, strlen(string), next);
}

static int control(builder *b, int symbol, int next) {
    return grammar_range(b->g, symbol, symbol, next);
}

/* Any bytes, then `next`. */
static int free_text(builder *b, int next) {
    const int loop = grammar_open(b->g);
    grammar_close(b->g, loop, grammar_range(b->g, 0, 255, loop), next);
    return loop;
}

static int json(builder *b, const json_t *schema, const char *param, int next) {
    const int entry = json_grammar_add(b->g, schema, param, next, b->error);
    b->failed |= entry < 0;
    return entry < 0 ? next : entry;
}

/* " <|constrain|>json<|message|>", or without the type. */
static int content_type(builder *b, int next) {
    const int message = control(b, GRAMMAR_MESSAGE, next);
    const int type = control(b, GRAMMAR_CONSTRAIN, text(b, "json", message));
    return grammar_either(b->g, text(b, " ", type), message);
}

static bool is_strict(const json_t *function) {
    return json_is_true(json_object_get(function, "strict"));
}

/* Arguments hold to the schema where that is promised; else they are an object. */
static int arguments(builder *b, const json_t *function, int next) {
    const json_t *const parameters = json_object_get(function, "parameters");
    if (is_strict(function) && parameters != NULL) return json(b, parameters, "tools", next);
    return json_grammar_add_object(b->g, next);
}

/* A call: its recipient stands behind the channel or before it. */
static int call(builder *b, const char *name, const json_t *function) {
    const int body =
        content_type(b, arguments(b, function, control(b, GRAMMAR_CALL, grammar_end(b->g))));
    const int behind =
        control(b, GRAMMAR_CHANNEL, text(b, "commentary to=functions.", text(b, name, body)));
    const int before =
        text(b, " to=functions.",
             text(b, name, control(b, GRAMMAR_CHANNEL, text(b, "commentary", body))));
    return grammar_either(b->g, behind, before);
}

static int final_answer(builder *b) {
    const int end = control(b, GRAMMAR_RETURN, grammar_end(b->g));
    const answer_shape *const shape = b->shape;
    const int body = shape->schema != NULL ? json(b, shape->schema, shape->param, end)
                     : shape->any_object   ? json_grammar_add_object(b->g, end)
                                           : free_text(b, end);
    return control(b, GRAMMAR_CHANNEL, text(b, "final", content_type(b, body)));
}

/* A message that another one follows, at `next`. */
static int passing_message(builder *b, const char *channel, int next) {
    const int after =
        control(b, GRAMMAR_END, control(b, GRAMMAR_START, text(b, "assistant", next)));
    return control(b, GRAMMAR_CHANNEL,
                   text(b, channel, control(b, GRAMMAR_MESSAGE, free_text(b, after))));
}

static int channels(builder *b) {
    const int begin = grammar_open(b->g);
    int all = grammar_either(b->g, passing_message(b, "analysis", begin), final_answer(b));
    const char *name;
    json_t *function;
    if (json_object_size(b->shape->functions) > 0)
        all = grammar_either(b->g, all, passing_message(b, "commentary", begin));
    json_object_foreach(b->shape->functions, name, function) all =
        grammar_either(b->g, all, call(b, name, function));
    grammar_close(b->g, begin, all, all);
    return begin;
}

/* What is left of a call that the prompt has begun. */
static int rest_of_call(builder *b) {
    const char *name;
    json_t *function;
    int all = -1;
    json_object_foreach(b->shape->functions, name, function) {
        const int end = control(b, GRAMMAR_CALL, grammar_end(b->g));
        const bool named = b->shape->forced[0] != '\0';
        if (named && strcmp(name, b->shape->forced) != 0) continue;
        const int body = arguments(b, function, end);
        const int one = named ? body : text(b, name, content_type(b, body));
        all = all < 0 ? one : grammar_either(b->g, all, one);
    }
    return all;
}

bool answer_shape_is_held(const answer_shape *shape) {
    if (shape->schema != NULL || shape->any_object || shape->forced != NULL) return true;
    const char *name;
    json_t *function;
    json_object_foreach(shape->functions, name, function) {
        if (is_strict(function)) return true;
    }
    return false;
}

static int build(builder *b) {
    if (b->shape->forced != NULL) return rest_of_call(b);
    if (b->shape->is_chat) return channels(b);
    return b->shape->schema != NULL ? json(b, b->shape->schema, b->shape->param, grammar_end(b->g))
                                    : json_grammar_add_object(b->g, grammar_end(b->g));
}

bool answer_grammar_build(constraint **out, const vocabulary *v, const answer_shape *shape,
                          api_error *error) {
    *out = NULL;
    builder b = {.g = grammar_create(), .shape = shape, .error = error};
    if (b.g == NULL) return api_fail_memory(error);
    const int entry = build(&b);
    if (b.failed || grammar_is_broken(b.g)) {
        if (!b.failed) api_fail_memory(error);
        grammar_destroy(b.g);
        return false;
    }
    *out = constraint_create(v, b.g, entry);
    return *out != NULL || api_fail(error, 400, "unsupported_schema", shape->param,
                                    "%s: nothing can follow it", shape->param);
}
