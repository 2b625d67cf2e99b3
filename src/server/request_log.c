/* request_log.c - one line a request on stderr, for people or as JSON.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "characters.h"
#include "server_state.h"

typedef struct request_line {
    char time[32];
    double seconds, first_token; /* since the headers; first_token 0 = none */
    generation_usage usage;
    const char *finish; /* of the first choice; "" = none */
} request_line;

static request_line describe(const exchange *x) {
    request_line line = {.finish = ""};
    struct timespec now;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    const size_t length = strftime(line.time, sizeof line.time, "%Y-%m-%dT%H:%M:%S", &parts);
    snprintf(line.time + length, sizeof line.time - length, ".%03dZ", (int)(now.tv_nsec / 1000000));
    line.seconds = (double)(monotonic_ns() - x->arrived_ns) * 1e-9;
    const generation *const g = x->generation;
    if (g == NULL) return line;
    line.usage = generation_get_usage(g);
    if (g->times.first_token > 0)
        line.first_token = (double)(g->times.first_token - g->times.arrived) * 1e-9;
    line.finish = g->error.status != 0                       ? "error"
                  : g->num_open > 0                          ? "abort"
                  : g->choices[0].said.finish_reason == NULL ? ""
                                                             : g->choices[0].said.finish_reason;
    return line;
}

/* Of a method or a path, which may hold any bytes. */
static json_t *sent_string(const char *sent) {
    byte_buffer text = {0};
    byte_buffer_add_string(&text, sent == NULL ? "" : sent);
    if (!text.failed) characters_mend(text.data, text.length);
    json_t *const string = json_string(text.data);
    byte_buffer_free(&text);
    return string;
}

static void write_json(const exchange *x, const request_line *line) {
    json_t *const object =
        json_pack("{s:s, s:s, s:o, s:o, s:i, s:f}", "time", line->time, "id", x->request_id,
                  "method", sent_string(x->method), "path", sent_string(x->path), "status",
                  x->status, "seconds", line->seconds);
    if (x->generation != NULL) {
        json_object_set_new(object, "prompt_tokens", json_integer(line->usage.prompt_tokens));
        json_object_set_new(object, "cached_tokens", json_integer(line->usage.cached_tokens));
        json_object_set_new(object, "completion_tokens",
                            json_integer(line->usage.completion_tokens));
        json_object_set_new(object, "first_token_seconds", json_real(line->first_token));
        json_object_set_new(object, "finish", json_string(line->finish));
    }
    byte_buffer text = {0};
    answer_add_json(&text, object);
    byte_buffer_add_string(&text, "\n");
    if (!text.failed) fwrite(text.data, 1, text.length, stderr);
    byte_buffer_free(&text);
}

static void write_text(const exchange *x, const request_line *line) {
    byte_buffer text = {0};
    byte_buffer_printf(&text, "%s %s %s %s %d %.3f s", line->time, x->request_id, x->method,
                       x->path == NULL ? "" : x->path, x->status, line->seconds);
    if (x->generation != NULL)
        byte_buffer_printf(
            &text, ", prompt %lld (cached %lld), generated %lld, first %.3f s, %s",
            (long long)line->usage.prompt_tokens, (long long)line->usage.cached_tokens,
            (long long)line->usage.completion_tokens, line->first_token, line->finish);
    for (size_t i = 0; i < text.length; i++) { /* a path may hold anything */
        if ((unsigned char)text.data[i] < 0x20 || text.data[i] == 0x7f) text.data[i] = '?';
    }
    if (!text.failed) characters_mend(text.data, text.length);
    byte_buffer_add_string(&text, "\n");
    if (!text.failed) fwrite(text.data, 1, text.length, stderr);
    byte_buffer_free(&text);
}

void log_request(const exchange *x) {
    const server_log form = x->server->options.log;
    if (form == SERVER_LOG_NONE) return;
    const request_line line = describe(x);
    if (form == SERVER_LOG_JSON)
        write_json(x, &line);
    else
        write_text(x, &line);
}
