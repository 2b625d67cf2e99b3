/* server_state.h - what the files of the server share: the server, and one HTTP request of it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_STATE_H
#define KV8_SERVER_STATE_H

#include <microhttpd.h>
#include <stdatomic.h>

#include "answer.h"
#include "server.h"

typedef enum server_phase { SERVER_LOADING, SERVER_OPEN, SERVER_DRAINING } server_phase;

typedef struct exchange exchange;

/* How long a connection may neither send nor take. */
enum {
    IDLE_SECONDS = 600, /* between requests, and while it is answered */
    BODY_SECONDS = 30   /* within the body of one */
};

struct server {
    server_options options;
    server_model model_given; /* from SERVER_OPEN on */
    api_model model;
    vocabulary *vocabulary;
    constraint_store *constraints;
    _Atomic int phase; /* server_phase */
    metrics metrics;
    int64_t started; /* Unix time */

    struct MHD_Daemon *daemon;
    int listen_fd;
    int stop_fd;  /* eventfd: stop was asked for, or the last answer is sent */
    int wake_fd;  /* rings when there is somebody in `awake` */
    int watch_fd; /* epoll set: sockets of suspended connections, stop_fd and wake_fd */

    pthread_mutex_t lock; /* of the list */
    exchange *first;      /* requests with a generation */
    uint64_t last_watch_id;
    pthread_mutex_t wake_lock; /* of the list */
    exchange *awake;           /* suspended, with something to tell */
};

/* A path and a method. */
typedef struct route {
    const char *method, *path;
    bool versioned;                            /* reached as /v1/path too */
    bool open;                                 /* without a key, and while the model loads */
    bool is_prefix;                            /* what follows the path is the handler's */
    void (*handle)(exchange *x, json_t *body); /* takes the body: an object, or NULL for GET */
    const answer_kind *kind;                   /* of generating routes */
} route;

/* One HTTP request, from its headers to its last byte. */
struct exchange {
    server *server;
    struct MHD_Connection *connection;
    const route *route;
    const char *method;
    char *path;            /* as requested */
    const char *bare_path; /* without /v1 */
    char request_id[132];
    uint64_t arrived_ns;
    byte_buffer body;
    size_t num_taken;    /* of the body's bytes, kept or not */
    uint64_t refused_ns; /* when the answer came within the body; 0 = it has not */
    size_t num_awaited;  /* bytes that Content-Length announces and that have not come */
    bool is_chunked;     /* the body, whose length nobody knows before its end */
    api_error error;     /* of the headers; told when the body has passed */
    const char *allow;   /* methods, for 405 and OPTIONS */
    bool handled;
    bool closes; /* the answer ends the connection */
    int status;  /* of the answer; 0 = none yet */

    /* What is generated for it. */
    generation *generation; /* NULL = nothing */
    answer answer;
    bool stream_ended;
    byte_buffer out; /* events of the stream */
    size_t out_at;
    uint64_t watch_id;
    exchange *next, *previous; /* in server.first */
    exchange *next_awake;      /* in server.awake */
};

/* --- http_reply.c --- */

/* Each answers the request. */
void reply_json(exchange *x, int status, json_t *value); /* takes it */
void reply_text(exchange *x, int status, const char *type, const byte_buffer *text);
void reply_error(exchange *x, const api_error *error);
void reply_empty(exchange *x, int status);
/* Adds what every answer has, queues and releases the response; NULL = no memory. */
void reply_with(exchange *x, int status, struct MHD_Response *response);

/* --- http_routes.c --- */

/* Finds the route and checks the key; else sets x->error. */
void find_route(exchange *x, const char *url);

/* --- http_generate.c --- */

void handle_generate(exchange *x, json_t *body);
/* Goes on with a generation: after its events, or at first. */
enum MHD_Result continue_generation(exchange *x);
/* The connection is done with it. */
void end_generation(exchange *x);

/* --- http_pages.c: routes answered at once --- */

void handle_health(exchange *x, json_t *body);
void handle_version(exchange *x, json_t *body);
void handle_models(exchange *x, json_t *body);
void handle_model(exchange *x, json_t *body);
void handle_metrics(exchange *x, json_t *body);
void handle_stats(exchange *x, json_t *body);
void handle_tokenize(exchange *x, json_t *body);
void handle_detokenize(exchange *x, json_t *body);
void handle_page(exchange *x, json_t *body);
void handle_calibration(exchange *x, json_t *body);
void handle_calibration_start(exchange *x, json_t *body);
void handle_calibration_stop(exchange *x, json_t *body);

/* --- watch.c: clients that go while they wait, and those that have waited --- */

bool watch_begin(server *s);
/* false: the server ends. */
bool watch_add(exchange *x);
void watch_remove(exchange *x);
/* Resumes the suspended connection, soon and on another thread. */
void watch_wake(exchange *x);
/* Waits until stop was asked for; then until no generation is left. */
void watch_run(server *s);
void watch_end(server *s);

/* --- request_log.c --- */

void log_request(const exchange *x);

#endif
