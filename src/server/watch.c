/* watch.c - clients that go while they wait, and those that have waited. libmicrohttpd does not
 * look at a suspended connection, so the sockets of those lie in an epoll set of ours, which the
 * program's main thread waits on: for the other side to close, and for the server's end.
 *
 * The same thread resumes connections. A step tells events to many at once, and each resumption is
 * a call of the system: the thread that steps makes one for all of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* EPOLLRDHUP */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "server_state.h"

/* Beside the exchanges' ids, which count from 1. */
static const uint64_t STOP = 0, WAKE = UINT64_MAX;

static bool watch_bell(server *s, int *fd, uint64_t name) {
    struct epoll_event rings = {.events = EPOLLIN, .data.u64 = name};
    *fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return *fd >= 0 && epoll_ctl(s->watch_fd, EPOLL_CTL_ADD, *fd, &rings) == 0;
}

bool watch_begin(server *s) {
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->wake_lock, NULL);
    s->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    return s->watch_fd >= 0 && watch_bell(s, &s->stop_fd, STOP) && watch_bell(s, &s->wake_fd, WAKE);
}

static int socket_of(const exchange *x) {
    const union MHD_ConnectionInfo *const info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    return info == NULL ? -1 : info->connect_fd;
}

bool watch_add(exchange *x) {
    server *const s = x->server;
    pthread_mutex_lock(&s->lock);
    if (atomic_load(&s->phase) == SERVER_DRAINING) {
        pthread_mutex_unlock(&s->lock);
        return false;
    }
    x->watch_id = ++s->last_watch_id;
    x->next = s->first;
    if (s->first != NULL) s->first->previous = x;
    s->first = x;
    /* A socket that cannot be watched is found closed when it is written to. */
    struct epoll_event gone = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = x->watch_id};
    (void)epoll_ctl(s->watch_fd, EPOLL_CTL_ADD, socket_of(x), &gone);
    pthread_mutex_unlock(&s->lock);
    return true;
}

static void ring(int fd) {
    const uint64_t one = 1;
    const ssize_t written = write(fd, &one, sizeof one);
    (void)written; /* full: it rings already */
}

static bool has_rung(int fd) {
    uint64_t count;
    return read(fd, &count, sizeof count) == (ssize_t)sizeof count;
}

void watch_wake(exchange *x) {
    server *const s = x->server;
    pthread_mutex_lock(&s->wake_lock);
    const bool is_first = s->awake == NULL;
    x->next_awake = s->awake;
    s->awake = x;
    pthread_mutex_unlock(&s->wake_lock);
    if (is_first) ring(s->wake_fd);
}

static void resume_all(server *s) {
    pthread_mutex_lock(&s->wake_lock);
    exchange *x = s->awake;
    s->awake = NULL;
    pthread_mutex_unlock(&s->wake_lock);
    while (x != NULL) { /* once resumed, it may end */
        exchange *const next = x->next_awake;
        MHD_resume_connection(x->connection);
        x = next;
    }
}

void watch_remove(exchange *x) {
    server *const s = x->server;
    pthread_mutex_lock(&s->lock);
    struct epoll_event unused = {0};
    (void)epoll_ctl(s->watch_fd, EPOLL_CTL_DEL, socket_of(x), &unused);
    if (x->previous != NULL)
        x->previous->next = x->next;
    else
        s->first = x->next;
    if (x->next != NULL) x->next->previous = x->previous;
    if (s->first == NULL && atomic_load(&s->phase) == SERVER_DRAINING) ring(s->stop_fd);
    pthread_mutex_unlock(&s->lock);
}

static void hang_up(server *s, uint64_t watch_id) {
    pthread_mutex_lock(&s->lock);
    for (exchange *x = s->first; x != NULL; x = x->next) {
        if (x->watch_id == watch_id) generation_hang_up(x->generation);
    }
    pthread_mutex_unlock(&s->lock);
}

/* Returns true when stop_fd rang. */
static bool wait_once(server *s) {
    struct epoll_event events[64];
    const int num = epoll_wait(s->watch_fd, events, 64, -1);
    bool stops = false;
    for (int i = 0; i < num; i++) {
        if (events[i].data.u64 == STOP)
            stops = has_rung(s->stop_fd);
        else if (events[i].data.u64 != WAKE)
            hang_up(s, events[i].data.u64);
        else if (has_rung(s->wake_fd))
            resume_all(s);
    }
    return stops;
}

static bool is_idle(server *s) {
    pthread_mutex_lock(&s->lock);
    const bool idle = s->first == NULL;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

void watch_run(server *s) {
    while (!wait_once(s)) continue;
    /* Whoever is in the list by now is waited for, nobody else enters. New connections are taken
     * and answered with 503: MHD_quiesce_daemon(), to refuse them, may abort the process when a
     * thread of libmicrohttpd's is awake (0.9.75 and 1.0.1, as both take the socket from epoll). */
    pthread_mutex_lock(&s->lock);
    atomic_store(&s->phase, SERVER_DRAINING);
    pthread_mutex_unlock(&s->lock);
    while (!is_idle(s)) wait_once(s);
}

void watch_end(server *s) {
    if (s->watch_fd >= 0) close(s->watch_fd);
    if (s->stop_fd >= 0) close(s->stop_fd);
    if (s->wake_fd >= 0) close(s->wake_fd);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->wake_lock);
}

void server_request_stop(server *s) {
    ring(s->stop_fd);
}
