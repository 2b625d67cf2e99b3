/* server.c - the server's life: the listening socket, libmicrohttpd's threads, the model, the end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "server.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "http_connection.h"

enum {
    DEFAULT_BODY_BYTES = 32 << 20,
    DEFAULT_THREADS = 2,
    BACKLOG = 4096,
    CONNECTION_BYTES = 32768, /* headers and one event */
    RESERVED_FILES = 64       /* of the process, that are no connections */
};

/* --- the socket --- */

static int open_socket(const struct addrinfo *address) {
    const int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    const int on = 1;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    close(fd);
    return -1;
}

static int listen_at(const char *host, int port, char *error, size_t error_size) {
    const struct addrinfo hints = {.ai_family = AF_UNSPEC,
                                   .ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    const int code = getaddrinfo(host, service, &hints, &list);
    if (code != 0) {
        snprintf(error, error_size, "--host %.128s: %s", host, gai_strerror(code));
        return -1;
    }
    int fd = -1;
    for (const struct addrinfo *at = list; at != NULL && fd < 0; at = at->ai_next)
        fd = open_socket(at);
    if (fd < 0)
        snprintf(error, error_size, "cannot listen at %.128s, port %d: %s", host, port,
                 strerror(errno));
    freeaddrinfo(list);
    return fd;
}

int server_port(const server *s) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    if (getsockname(s->listen_fd, (struct sockaddr *)&address, &length) != 0) return 0;
    if (address.ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)&address)->sin6_port);
    return ntohs(((const struct sockaddr_in *)&address)->sin_port);
}

/* --- life --- */

/* Connections that the process has file descriptors for; raises the limit as far as it may. */
static unsigned count_connections(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024 - RESERVED_FILES;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) getrlimit(RLIMIT_NOFILE, &limit);
    const rlim_t most = 65536;
    const rlim_t files = limit.rlim_cur < most ? limit.rlim_cur : most;
    return files > 2 * RESERVED_FILES ? (unsigned)files - RESERVED_FILES : RESERVED_FILES;
}

static struct MHD_Daemon *start_daemon(server *s) {
    const unsigned num_threads =
        s->options.num_threads > 0 ? (unsigned)s->options.num_threads : DEFAULT_THREADS;
    return MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, http_answer, s,
        MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_THREAD_POOL_SIZE, num_threads,
        MHD_OPTION_CONNECTION_LIMIT, count_connections(), MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_SECONDS, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES,
        MHD_OPTION_STRICT_FOR_CLIENT, http_strictness(), MHD_OPTION_URI_LOG_CALLBACK,
        http_look_at_target, s, MHD_OPTION_NOTIFY_COMPLETED, http_completed, s, MHD_OPTION_END);
}

server *server_start(const server_options *options, char *error, size_t error_size) {
    server *const s = calloc(1, sizeof *s);
    if (s == NULL) {
        snprintf(error, error_size, "no memory for a server");
        return NULL;
    }
    s->options = *options;
    if (s->options.max_body_bytes == 0) s->options.max_body_bytes = DEFAULT_BODY_BYTES;
    s->started = (int64_t)time(NULL);
    s->watch_fd = s->stop_fd = s->wake_fd = -1;
    metrics_init(&s->metrics);
    const bool watches = watch_begin(s);
    if (!watches) snprintf(error, error_size, "no file descriptors left: %s", strerror(errno));
    s->listen_fd = watches ? listen_at(options->host, options->port, error, error_size) : -1;
    if (s->listen_fd >= 0 && (s->daemon = start_daemon(s)) == NULL) {
        snprintf(error, error_size, "the HTTP server does not start: %s", strerror(errno));
        close(s->listen_fd);
    }
    if (s->daemon != NULL) return s;
    server_stop(s);
    return NULL;
}

void server_on_event(void *cookie, const kv8_event *event) {
    generation_on_event(cookie, event);
}

static size_t longest_token(const server_model *model) {
    size_t longest = 0;
    for (int32_t id = 0; id < kv8_tokenizer_vocab_size(model->tokenizer); id++) {
        size_t length = 0;
        if (kv8_tokenizer_token_bytes(model->tokenizer, id, &length) != NULL && length > longest)
            longest = length;
    }
    return longest;
}

bool server_open(server *s, const server_model *model) {
    s->vocabulary =
        vocabulary_create(model->tokenizer, model->vocab_size, model->eos, model->num_eos);
    s->constraints = constraint_store_create();
    if (s->vocabulary == NULL || s->constraints == NULL) return false;
    s->model_given = *model;
    s->model = (api_model){.name = s->options.names[0],
                           .names = s->options.names,
                           .num_names = s->options.num_names,
                           .tokenizer = model->tokenizer,
                           .vocabulary = s->vocabulary,
                           .constraints = s->constraints,
                           .vocab_size = model->vocab_size,
                           .max_model_len = model->max_model_len,
                           .max_prompt_bytes = longest_token(model) * (size_t)model->max_model_len,
                           .harmony = model->harmony,
                           .current_date = model->current_date};
    atomic_store(&s->phase, SERVER_OPEN);
    return true;
}

/* The threads of HTTP end here: behind it nobody asks the service for figures, and it may end. */
void server_run(server *s) {
    watch_run(s);
    MHD_stop_daemon(s->daemon);
    s->daemon = NULL;
}

void server_stop(server *s) {
    if (s == NULL) return;
    if (s->daemon != NULL) MHD_stop_daemon(s->daemon);
    watch_end(s);
    constraint_store_destroy(s->constraints);
    vocabulary_destroy(s->vocabulary);
    metrics_destroy(&s->metrics);
    free(s);
}
