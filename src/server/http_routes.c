/* http_routes.c - the table of routes, and who may use them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server_state.h"

static const route routes[] = {
    {"POST", "/chat/completions", .versioned = true, .handle = handle_generate,
     .kind = &chat_answer},
    {"POST", "/completions", .versioned = true, .handle = handle_generate,
     .kind = &completion_answer},
    {"POST", "/responses", .versioned = true, .handle = handle_generate, .kind = &responses_answer},
    {"GET", "/models", .versioned = true, .handle = handle_models},
    {"GET", "/models/", .versioned = true, .is_prefix = true, .handle = handle_model},
    {"POST", "/tokenize", .versioned = true, .handle = handle_tokenize},
    {"POST", "/detokenize", .versioned = true, .handle = handle_detokenize},
    {"GET", "/calibration", .handle = handle_calibration},
    {"POST", "/calibration/start", .handle = handle_calibration_start},
    {"POST", "/calibration/stop", .handle = handle_calibration_stop},
    {"GET", "/health", .open = true, .handle = handle_health},
    {"GET", "/ping", .open = true, .handle = handle_health},
    {"POST", "/ping", .open = true, .handle = handle_health},
    {"GET", "/version", .open = true, .handle = handle_version},
    {"GET", "/metrics", .open = true, .handle = handle_metrics},
    {"GET", "/stats", .open = true, .handle = handle_stats},
    {"GET", "/", .open = true, .handle = handle_page},
};
enum { NUM_ROUTES = sizeof routes / sizeof routes[0] };

static bool matches(const route *r, const char *path) {
    const size_t length = strlen(r->path);
    if (r->is_prefix) return strncmp(path, r->path, length) == 0 && path[length] != '\0';
    return strcmp(path, r->path) == 0;
}

/* Takes as long for every key that is wrong. */
static bool equal_keys(const char *given, const char *key) {
    const size_t length = strlen(key), given_length = strlen(given);
    unsigned difference = length != given_length;
    for (size_t i = 0; i < length; i++)
        difference |= (unsigned)(given[i < given_length ? i : 0] ^ key[i]);
    return difference == 0;
}

static bool has_key(const exchange *x) {
    const server_options *const options = &x->server->options;
    const char *given =
        MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Authorization");
    if (options->num_api_keys == 0) return true;
    if (given == NULL || strncasecmp(given, "Bearer ", 7) != 0) return false;
    bool found = false;
    for (size_t i = 0; i < options->num_api_keys; i++)
        found |= equal_keys(given + 7, options->api_keys[i]);
    return found;
}

static const char *methods_of(const char *path, bool versioned) {
    bool get = false, post = false;
    for (int i = 0; i < NUM_ROUTES; i++) {
        if (!matches(&routes[i], path) || (versioned && !routes[i].versioned)) continue;
        get |= strcmp(routes[i].method, "GET") == 0;
        post |= strcmp(routes[i].method, "POST") == 0;
    }
    return get && post ? "GET, HEAD, POST, OPTIONS"
           : get       ? "GET, HEAD, OPTIONS"
           : post      ? "POST, OPTIONS"
                       : NULL;
}

static void check_phase(exchange *x) {
    const int phase = atomic_load(&x->server->phase);
    if (phase == SERVER_LOADING)
        api_fail(&x->error, 503, "loading", NULL, "the model is being loaded");
    else if (phase == SERVER_DRAINING && x->route->kind != NULL)
        api_fail(&x->error, 503, "shutting_down", NULL, "the server is shutting down");
}

void find_route(exchange *x, const char *url) {
    const bool versioned = strncmp(url, "/v1/", 4) == 0;
    const char *const path = versioned ? url + 3 : url;
    const bool whole_server = strcmp(x->method, "OPTIONS") == 0 && strcmp(url, "*") == 0;
    x->path = strdup(url);
    x->allow = whole_server ? "GET, HEAD, POST, OPTIONS" : methods_of(path, versioned);
    if (x->path == NULL) {
        api_fail_memory(&x->error);
        return;
    }
    x->bare_path = x->path + (path - url);
    if (x->allow == NULL) {
        api_fail(&x->error, 404, "not_found", NULL, "there is no %.200s here", url);
        return;
    }
    if (strcmp(x->method, "OPTIONS") == 0) return;
    const char *const method = strcmp(x->method, "HEAD") == 0 ? "GET" : x->method;
    for (int i = 0; i < NUM_ROUTES; i++) {
        if (matches(&routes[i], path) && (!versioned || routes[i].versioned) &&
            strcmp(method, routes[i].method) == 0)
            x->route = &routes[i];
    }
    if (x->route == NULL)
        api_fail(&x->error, 405, "method_not_allowed", NULL, "%.32s is not for %.200s, %s are",
                 x->method, url, x->allow);
    else if (!x->route->open && !has_key(x))
        api_fail(&x->error, 401, "invalid_api_key", NULL,
                 "this server asks for a key: Authorization: Bearer KEY");
    else if (!x->route->open)
        check_phase(x);
}
