/* watch.c - clients that go while they wait. libmicrohttpd does not look at a suspended connection,
 * so the sockets of those lie in an epoll set of ours, which the program's main thread waits on:
 * for the other side to close, and for the server's end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* EPOLLRDHUP */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "server_state.h"

bool watch_begin(server *s) {
    pthread_mutex_init(&s->lock, NULL);
    s->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->watch_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event stop = {.events = EPOLLIN}; /* data 0; exchanges count from 1 */
    return s->stop_fd >= 0 && s->watch_fd >= 0 &&
           epoll_ctl(s->watch_fd, EPOLL_CTL_ADD, s->stop_fd, &stop) == 0;
}

static int socket_of(const exchange *x) {
    const union MHD_ConnectionInfo *const info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    return info == NULL ? -1 : info->connect_fd;
}

void watch_add(exchange *x) {
    server *const s = x->server;
    pthread_mutex_lock(&s->lock);
    x->watch_id = ++s->last_watch_id;
    x->next = s->first;
    if (s->first != NULL) s->first->previous = x;
    s->first = x;
    /* A socket that cannot be watched is found closed when it is written to. */
    struct epoll_event gone = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = x->watch_id};
    (void)epoll_ctl(s->watch_fd, EPOLL_CTL_ADD, socket_of(x), &gone);
    pthread_mutex_unlock(&s->lock);
}

static void ring(server *s) {
    const uint64_t one = 1;
    const ssize_t written = write(s->stop_fd, &one, sizeof one);
    (void)written; /* full: it rings already */
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
    if (s->first == NULL && atomic_load(&s->phase) == SERVER_DRAINING) ring(s);
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
    bool rang = false;
    for (int i = 0; i < num; i++) {
        if (events[i].data.u64 != 0)
            hang_up(s, events[i].data.u64);
        else
            rang = true;
    }
    uint64_t count;
    if (rang) rang = read(s->stop_fd, &count, sizeof count) == (ssize_t)sizeof count;
    return rang;
}

static bool is_idle(server *s) {
    pthread_mutex_lock(&s->lock);
    const bool idle = s->first == NULL;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

void watch_run(server *s) {
    while (!wait_once(s)) continue;
    atomic_store(&s->phase, SERVER_DRAINING);
    const int fd = MHD_quiesce_daemon(s->daemon);
    if (fd >= 0) close(fd);
    while (!is_idle(s)) wait_once(s);
}

void watch_end(server *s) {
    if (s->watch_fd >= 0) close(s->watch_fd);
    if (s->stop_fd >= 0) close(s->stop_fd);
    pthread_mutex_destroy(&s->lock);
}

void server_request_stop(server *s) {
    ring(s);
}
