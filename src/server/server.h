/* server.h - the server as the program sees it: a listening socket that answers /health from the
 * first moment, and the whole of the API once a model is there.
 *
 * HTTP is libmicrohttpd's: a few threads, each with its epoll set, serve all connections. A
 * connection that waits for the engine is suspended, and woken by the engine's events; nothing here
 * runs on the engine's thread but the copy of an event.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_H
#define KV8_SERVER_H

#include <stdbool.h>

#include <kv8/engine.h>
#include <kv8/tokenizer.h>

typedef struct server server;

typedef enum server_log { SERVER_LOG_TEXT, SERVER_LOG_JSON, SERVER_LOG_NONE } server_log;

typedef struct server_options {
    const char *host;            /* an address or name to listen at */
    int port;                    /* 0 = any free one */
    const char *const *names;    /* that requests may call the model; the first is the answers' */
    size_t num_names;            /* at least one */
    const char *const *api_keys; /* one of them is asked for; num_api_keys 0 = none is */
    size_t num_api_keys;
    server_log log;          /* one line a request, on stderr */
    size_t max_body_bytes;   /* of a request; 0 = 32 MiB */
    uint64_t max_waiting_ns; /* a request that has not begun by then is refused; 0 = it waits */
    int num_threads;         /* of HTTP; 0 = 2 */
} server_options;

/* Borrows the strings. On failure NULL, and `error` says why in one line. */
server *server_start(const server_options *options, char *error, size_t error_size);
int server_port(const server *s);

/* Scales fitted to what is served: behind POST /calibration/start and /stop, GET /calibration. From
 * any thread; a call waits for a step of the engine, not for a file. */
typedef struct server_calibration_state {
    const char *state; /* one word */
    const char *path;
    uint64_t num_tokens, max_tokens; /* counted in this state, and of how many */
} server_calibration_state;
typedef struct server_calibration {
    void *cookie;
    /* NULL, or why not, in one line that stays. */
    const char *(*start)(void *cookie);
    const char *(*stop)(void *cookie);
    server_calibration_state (*look)(void *cookie);
} server_calibration;

/* What is served. All borrowed; the service's on_event is server_on_event. */
typedef struct server_model {
    kv8_service *service;
    const kv8_tokenizer *tokenizer;
    int32_t vocab_size, max_model_len;
    const int32_t *eos; /* the model's end-of-text ids */
    int32_t num_eos;
    bool harmony;                          /* chat output is parsed by channel */
    const char *current_date;              /* in a chat's system message; NULL = none */
    const char *kv_format;                 /* as /metrics calls it */
    uint64_t kv_bytes, kv_tokens;          /* of the pool */
    int32_t kv_page_size;                  /* tokens */
    double memory_speed;                   /* bytes a second of a GPU's memory; 0 = not measured */
    const server_calibration *calibration; /* NULL = not asked for */
} server_model;
void server_on_event(void *cookie, const kv8_event *event);
/* From now on requests are taken. false: no memory. */
bool server_open(server *s, const server_model *model);

/* Waits for server_request_stop(); then answers new requests with 503, and returns when the answers
 * under way are sent, the socket is closed and the service is called no more. */
void server_run(server *s);
/* From any thread, and from a signal handler. */
void server_request_stop(server *s);
/* After the service has stopped. NULL is fine. */
void server_stop(server *s);

#endif
