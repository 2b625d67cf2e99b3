/* http_pages.c - routes that are answered at once: health, models, metrics, tokens and text.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "server_page.h"
#include "server_state.h"

void handle_health(exchange *x, json_t *body) {
    (void)body;
    reply_empty(x, atomic_load(&x->server->phase) == SERVER_OPEN ? 200 : 503);
}

void handle_version(exchange *x, json_t *body) {
    (void)body;
    reply_json(x, 200, json_pack("{s:s}", "version", kv8_version()));
}

void handle_page(exchange *x, json_t *body) {
    (void)body;
    reply_with_page(x);
}

/* --- models --- */

static json_t *model_json(const server *s, const char *name) {
    return json_pack("{s:s, s:s, s:I, s:s, s:s, s:n, s:i}", "id", name, "object", "model",
                     "created", (json_int_t)s->started, "owned_by", "kv8", "root", s->model.name,
                     "parent", "max_model_len", s->model.max_model_len);
}

void handle_models(exchange *x, json_t *body) {
    const server *const s = x->server;
    json_t *const list = json_array();
    (void)body;
    for (size_t i = 0; i < s->model.num_names; i++)
        json_array_append_new(list, model_json(s, s->model.names[i]));
    reply_json(x, 200, json_pack("{s:s, s:o}", "object", "list", "data", list));
}

void handle_model(exchange *x, json_t *body) {
    const server *const s = x->server;
    const char *const name = x->bare_path + strlen("/models/");
    (void)body;
    for (size_t i = 0; i < s->model.num_names; i++) {
        if (strcmp(name, s->model.names[i]) != 0) continue;
        reply_json(x, 200, model_json(s, name));
        return;
    }
    api_error error;
    api_fail(&error, 404, "model_not_found", "model", "model \"%.200s\" is not served here", name);
    reply_error(x, &error);
}

/* --- the engine's figures --- */

/* model_open: what is served, or NULL while it loads: it must not be read until then. */
static const server_model *model_open(const server *s) {
    return atomic_load(&s->phase) == SERVER_LOADING ? NULL : &s->model_given;
}

typedef struct figures {
    server_model served;
    kv8_engine_stats engine;
} figures;

/* Figures of a model that loads are all 0. */
static bool get_figures(exchange *x, figures *f) {
    const server_model *const model = model_open(x->server);
    *f = (figures){.engine = KV8_ENGINE_STATS_INIT};
    if (model != NULL) f->served = *model;
    if (f->served.kv_format == NULL) f->served.kv_format = "";
    if (model == NULL) return true;
    const kv8_status status = kv8_service_get_stats(model->service, &f->engine);
    if (status == KV8_OK) return true;
    api_error error;
    api_fail_library(&error, status, NULL);
    reply_error(x, &error);
    return false;
}

void handle_metrics(exchange *x, json_t *body) {
    server *const s = x->server;
    figures f;
    (void)body;
    if (!get_figures(x, &f)) return;
    const metrics_engine engine = {.model = s->options.names[0],
                                   .kv_format = f.served.kv_format,
                                   .kv_bytes = f.served.kv_bytes,
                                   .kv_tokens = f.served.kv_tokens,
                                   .kv_page_size = f.served.kv_page_size,
                                   .memory_speed = f.served.memory_speed,
                                   .stats = f.engine};
    byte_buffer text = {0};
    metrics_write(&s->metrics, &engine, &text);
    reply_text(x, 200, "text/plain; version=0.0.4; charset=utf-8", &text);
    byte_buffer_free(&text);
}

/* [[pages, used, shared], ..]: the cells of the pool's map. */
static json_t *page_map(const server *s) {
    const server_model *const model = model_open(s);
    kv8_page_map map = KV8_PAGE_MAP_INIT;
    json_t *const cells = json_array();
    if (model == NULL || kv8_service_get_page_map(model->service, &map) != KV8_OK) return cells;
    for (int32_t i = 0; i < map.num_cells; i++)
        json_array_append_new(cells,
                              json_pack("[i, i, i]", map.pages[i], map.used[i], map.shared[i]));
    return cells;
}

void handle_stats(exchange *x, json_t *body) {
    const server *const s = x->server;
    figures f;
    (void)body;
    if (!get_figures(x, &f)) return;
    const kv8_engine_stats *const e = &f.engine;
    reply_json(
        x, 200,
        json_pack("{s:s, s:s, s:i, s:I, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, "
                  "s:I, s:I, s:I, s:o}",
                  "model", s->options.names[0], "kv_format", f.served.kv_format, "max_model_len",
                  f.served.max_model_len, "kv_bytes", (json_int_t)f.served.kv_bytes, "running",
                  e->num_running, "waiting", e->num_waiting, "pages_total", e->pages_total,
                  "pages_used", e->pages_used, "pages_shared", e->pages_shared, "preemptions",
                  (json_int_t)e->num_preemptions, "prefix_queries", (json_int_t)e->prefix_queries,
                  "prefix_hits", (json_int_t)e->prefix_hits, "prompt_tokens",
                  (json_int_t)e->prompt_tokens, "generated_tokens", (json_int_t)e->generated_tokens,
                  "steps", (json_int_t)e->num_steps, "kv_clips", (json_int_t)e->kv_clips, "kv_nans",
                  (json_int_t)e->kv_nans, "map", page_map(s)));
}

/* --- scales fitted to live traffic --- */

static const server_calibration *find_calibration(exchange *x) {
    const server_calibration *const c = x->server->model_given.calibration;
    api_error error;
    if (c != NULL && atomic_load(&x->server->phase) == SERVER_OPEN) return c;
    if (c != NULL)
        api_fail(&error, 503, "shutting_down", NULL, "the server is shutting down");
    else
        api_fail(&error, 404, "not_found", NULL, "this server was started without --calibrate");
    reply_error(x, &error);
    return NULL;
}

static void reply_calibration(exchange *x, const server_calibration *c, const char *refused) {
    if (refused != NULL) {
        api_error error;
        api_fail(&error, 409, "conflict", NULL, "%s", refused);
        reply_error(x, &error);
        return;
    }
    const server_calibration_state now = c->look(c->cookie);
    reply_json(x, 200,
               json_pack("{s:s, s:s, s:I, s:I}", "state", now.state, "file", now.path, "tokens",
                         (json_int_t)now.num_tokens, "max_tokens", (json_int_t)now.max_tokens));
}

void handle_calibration(exchange *x, json_t *body) {
    const server_calibration *const c = find_calibration(x);
    (void)body;
    if (c != NULL) reply_calibration(x, c, NULL);
}

void handle_calibration_start(exchange *x, json_t *body) {
    const server_calibration *const c = find_calibration(x);
    json_decref(body);
    if (c != NULL) reply_calibration(x, c, c->start(c->cookie));
}

void handle_calibration_stop(exchange *x, json_t *body) {
    const server_calibration *const c = find_calibration(x);
    json_decref(body);
    if (c != NULL) reply_calibration(x, c, c->stop(c->cookie));
}

/* --- tokens and text --- */

static json_t *token_strings(const kv8_tokenizer *tokenizer, const api_prompt *prompt) {
    json_t *const list = json_array();
    for (size_t i = 0; i < prompt->num; i++) {
        size_t length = 0;
        const char *const bytes = kv8_tokenizer_token_bytes(tokenizer, prompt->ids[i], &length);
        output_text text = {0};
        if (bytes != NULL) output_text_add(&text, bytes, length);
        output_text_finish(&text);
        output_text_release(&text);
        json_array_append_new(list, answer_unsent(&text));
        output_text_free(&text);
    }
    return list;
}

/* A prompt, or a chat's messages, as the generating routes take them. */
static bool read_prompt(exchange *x, json_t *body, api_request *request, api_prompt *prompt,
                        api_error *error) {
    const api_model *const model = &x->server->model;
    const fields f = {.object = body, .within = "", .error = error};
    *request = (api_request){0};
    if (json_object_get(body, "messages") != NULL) {
        const bool good = api_request_read_chat(request, model, body, error);
        if (good) {
            *prompt = request->prompts[0];
            request->prompts[0] = (api_prompt){0};
        }
        return good;
    }
    request->body = body;
    const json_t *const text = field_any(&f, "prompt");
    if (!api_check_model(model, &f)) return false;
    if (!json_is_string(text)) return field_fail_type(&f, "prompt", "a string");
    if (json_string_length(text) == 0) return true;
    return api_prompt_read(prompt, model, text, "prompt", error);
}

void handle_tokenize(exchange *x, json_t *body) {
    api_request request;
    api_prompt prompt = {0};
    api_error error = {0};
    if (!read_prompt(x, body, &request, &prompt, &error)) {
        reply_error(x, &error);
    } else {
        json_t *const counted = json_pack("{s:I, s:i, s:o}", "count", (json_int_t)prompt.num,
                                          "max_model_len", x->server->model.max_model_len, "tokens",
                                          answer_token_ids(prompt.ids, prompt.num));
        if (json_is_true(json_object_get(request.body, "return_token_strs")))
            json_object_set_new(counted, "token_strs",
                                token_strings(x->server->model.tokenizer, &prompt));
        reply_json(x, 200, counted);
    }
    kv8_free(prompt.ids);
    api_request_free(&request);
}

void handle_detokenize(exchange *x, json_t *body) {
    const api_model *const model = &x->server->model;
    api_error error = {0};
    api_prompt prompt = {0};
    const fields f = {.object = body, .within = "", .error = &error};
    const json_t *const tokens = field_any(&f, "tokens");
    const bool good =
        api_check_model(model, &f) &&
        (json_is_array(tokens) || field_fail_type(&f, "tokens", "an array of token ids")) &&
        (json_array_size(tokens) == 0 || api_prompt_read(&prompt, model, tokens, "tokens", &error));
    if (good) {
        output_text text = {0};
        for (size_t i = 0; i < prompt.num; i++) {
            size_t length = 0;
            const char *const bytes =
                kv8_tokenizer_token_bytes(model->tokenizer, prompt.ids[i], &length);
            if (bytes != NULL) output_text_add(&text, bytes, length);
        }
        output_text_finish(&text);
        output_text_release(&text);
        reply_json(x, 200, json_pack("{s:o}", "prompt", answer_unsent(&text)));
        output_text_free(&text);
    } else {
        reply_error(x, &error);
    }
    kv8_free(prompt.ids);
    json_decref(body);
}
