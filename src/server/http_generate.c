/* http_generate.c - requests that the engine answers: waiting for its events without a thread, and
 * telling them, whole or as a stream of one event a write.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* memmem */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server_state.h"

/* --- waiting --- */

static void suspend(void *cookie) {
    MHD_suspend_connection(cookie);
}

static void wake(void *cookie) {
    watch_wake(cookie);
}

/* Without a stop string to look for, a whole answer needs no look at every token. */
static bool spares_tokens(const generation *g) {
    return !g->request.stream && g->request.stops.num == 0;
}

static bool sleep_now(exchange *x) {
    return generation_sleep(x->generation, spares_tokens(x->generation), suspend, x->connection);
}

/* --- the stream --- */

/* Takes what has come; returns false when there was nothing. */
static bool stream_more(exchange *x) {
    generation *const g = x->generation;
    const answer_kind *const kind = x->route->kind;
    generation_choice *const spoken = generation_next(g);
    if (spoken != NULL && g->error.status == 0) {
        kind->stream_choice(&x->answer, spoken, &x->out);
        if (g->num_open > 0) return true;
    }
    if (g->error.status == 0 && g->num_open > 0) return spoken != NULL;
    if (g->error.status != 0)
        kind->stream_fail(&x->answer, &g->error, &x->out);
    else
        kind->stream_end(&x->answer, &x->out);
    x->stream_ended = true;
    return true;
}

/* Copies (a part of) one event. */
static ssize_t copy_event(exchange *x, char *to, size_t room) {
    const char *const from = x->out.data + x->out_at;
    const size_t left = x->out.length - x->out_at;
    const char *const end = memmem(from, left, "\n\n", 2);
    size_t length = end == NULL ? left : (size_t)(end - from) + 2;
    if (length > room) length = room;
    memcpy(to, from, length);
    x->out_at += length;
    if (x->out_at == x->out.length) {
        byte_buffer_cut(&x->out, 0);
        x->out_at = 0;
    }
    return (ssize_t)length;
}

/* end_abruptly: libmicrohttpd 0.9.75 closes a connection that ends here only once no other has been
 * silent for longer; with a timeout of its own it is closed within a second. */
static ssize_t end_abruptly(exchange *x) {
    (void)MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 1u);
    return MHD_CONTENT_READER_END_WITH_ERROR;
}

static ssize_t read_stream(void *cookie, uint64_t position, char *to, size_t room) {
    exchange *const x = cookie;
    (void)position;
    for (;;) {
        if (x->out.failed) return end_abruptly(x);
        if (x->out.length > 0) return copy_event(x, to, room);
        if (x->stream_ended) return MHD_CONTENT_READER_END_OF_STREAM;
        if (generation_is_hung_up(x->generation)) return end_abruptly(x);
        if (!stream_more(x) && sleep_now(x)) return 0;
    }
}

static void begin_stream(exchange *x) {
    struct MHD_Response *const response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_stream, x, NULL);
    if (response != NULL) {
        (void)MHD_add_response_header(response, "Content-Type", "text/event-stream; charset=utf-8");
        (void)MHD_add_response_header(response, "Cache-Control", "no-cache");
        (void)MHD_add_response_header(response, "X-Accel-Buffering", "no");
    }
    reply_with(x, 200, response);
}

/* --- both --- */

/* Returns true when the answer can begin: a stream with its first event, a whole one with its last,
 * an error at once. */
static bool collect(exchange *x) {
    generation *const g = x->generation;
    while (g->error.status == 0 && g->num_open > 0) {
        generation_choice *const spoken = generation_next(g);
        if (spoken == NULL) return false;
        if (!g->request.stream) continue;
        if (g->error.status != 0) break;
        x->route->kind->stream_begin(&x->answer, &x->out);
        x->route->kind->stream_choice(&x->answer, spoken, &x->out);
        return true;
    }
    return true;
}

enum MHD_Result continue_generation(exchange *x) {
    generation *const g = x->generation;
    while (!collect(x)) {
        if (generation_is_hung_up(g)) return MHD_NO;
        if (sleep_now(x)) return MHD_YES;
    }
    if (g->error.status != 0)
        reply_error(x, &g->error);
    else if (g->request.stream)
        begin_stream(x);
    else
        reply_json(x, 200, x->route->kind->whole(&x->answer));
    return x->status == 0 ? MHD_NO : MHD_YES;
}

void handle_generate(exchange *x, json_t *body) {
    server *const s = x->server;
    const answer_kind *const kind = x->route->kind;
    api_request request;
    api_error error = {0};
    if (!kind->read(&request, &s->model, body, &error)) {
        api_request_free(&request);
        reply_error(x, &error);
        return;
    }
    const choice_kind text = kind->is_chat && s->model.harmony ? CHOICE_HARMONY : CHOICE_TEXT;
    if (!generation_create(&x->generation, &request, &s->model, s->model_given.service, &s->metrics,
                           text, x->arrived_ns, &error)) {
        reply_error(x, &error);
        return;
    }
    const char *const named =
        json_string_value(json_object_get(x->generation->request.body, "model"));
    x->answer = (answer){.generation = x->generation,
                         .created = (int64_t)time(NULL),
                         .model = named != NULL ? named : s->model.name};
    snprintf(x->answer.id, sizeof x->answer.id, "%s%.80s", kind->id_prefix, x->request_id);
    if (!watch_add(x)) {
        generation_release(x->generation);
        x->generation = NULL;
        api_fail(&error, 503, "shutting_down", NULL, "the server is shutting down");
        reply_error(x, &error);
        return;
    }
    if (!generation_submit(x->generation, wake, x, s->options.max_waiting_ns))
        reply_error(x, &x->generation->error);
}

static double seconds(uint64_t from, uint64_t to) {
    return to > from ? (double)(to - from) * 1e-9 : 0;
}

static void count(exchange *x) {
    const generation *const g = x->generation;
    const generation_times *const t = &g->times;
    metrics *const m = &x->server->metrics;
    if (g->num_open > 0 && g->error.status == 0) metrics_count_abort(m, g->num_open);
    if (t->first_token == 0) return;
    metrics_observe(m, METRIC_FIRST_TOKEN, seconds(t->arrived, t->first_token));
    metrics_observe(m, METRIC_QUEUE, seconds(t->arrived, t->begun));
    metrics_observe(m, METRIC_PREFILL, seconds(t->begun, t->first_token));
    metrics_observe(m, METRIC_DECODE, seconds(t->first_token, t->last_token));
    metrics_observe(m, METRIC_INFERENCE, seconds(t->begun, t->last_token));
    metrics_observe(m, METRIC_WHOLE, seconds(t->arrived, monotonic_ns()));
    const generation_usage usage = generation_get_usage(g);
    metrics_observe(m, METRIC_PROMPT_TOKENS, (double)usage.prompt_tokens);
    metrics_observe(m, METRIC_GENERATION_TOKENS, (double)usage.completion_tokens);
}

void end_generation(exchange *x) {
    watch_remove(x);
    count(x);
    free(x->answer.state);
    generation_release(x->generation);
    x->generation = NULL;
}
