/* live_calibration.c - the states of a calibration on live traffic.
 *
 *   off -> warming-up -> counting -> writing -> written or failed, and from these again
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "live_calibration.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fits.h"

typedef enum live_state { OFF, WARMING_UP, COUNTING, WRITING, WRITTEN, FAILED } live_state;

struct live_calibration {
    cli_model *model;
    kv8_service *service; /* NULL before live_calibration_serve */
    const char *path;
    int64_t warmup, max_tokens;
    kv8_observer *observer; /* the service's thread's, the writer's while writing */
    pthread_t writer;
    bool has_writer;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    live_state state;
    int64_t num_tokens; /* in this state */
    bool closes;
};

/* --- states, under the lock, on the service's thread or while there is none --- */

static void enter(live_calibration *live, live_state state) {
    live->state = state;
    live->num_tokens = 0;
    pthread_cond_broadcast(&live->changed);
}

/* The first counts of a run are an observer's of its own. */
static kv8_status begin_counting(live_calibration *live) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_observer_destroy(live->observer);
    kv8_model_observer_options(live->model->model, &options);
    options.num_qo_heads = 0;
    kv8_status status = kv8_observer_create(&live->observer, &options);
    if (status == KV8_OK) status = kv8_model_set_observer(live->model->model, live->observer);
    if (status == KV8_OK) kv8_observer_start(live->observer);
    enter(live, status == KV8_OK ? COUNTING : FAILED);
    return status;
}

static void end_counting(live_calibration *live) {
    kv8_observer_stop(live->observer);
    const kv8_status status = kv8_model_set_observer(live->model->model, NULL);
    enter(live, status == KV8_OK ? WRITING : FAILED);
    if (status != KV8_OK) (void)cli_fail_status(status);
}

static kv8_status begin(live_calibration *live) {
    if (live->warmup == 0) return begin_counting(live);
    enter(live, WARMING_UP);
    return KV8_OK;
}

static void take_tokens(live_calibration *live, int32_t num) {
    live->num_tokens += num;
    if (live->state == WARMING_UP && live->num_tokens >= live->warmup) {
        const kv8_status status = begin_counting(live);
        if (status != KV8_OK) (void)cli_fail_status(status);
    } else if (live->state == COUNTING && live->num_tokens >= live->max_tokens) {
        end_counting(live);
    }
}

void live_calibration_on_event(void *cookie, const kv8_event *event) {
    live_calibration *const live = cookie;
    pthread_mutex_lock(&live->lock);
    take_tokens(live, event->num_taken);
    pthread_mutex_unlock(&live->lock);
    server_on_event(NULL, event);
}

/* --- the writer --- */

static int write_file(live_calibration *live) {
    fits f = {0};
    kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    options.margin = 1;
    int status = fits_make(&f, live->observer, &options, false);
    if (status == CLI_OK && f.num_tokens == 0)
        status = cli_fail("%s: not written, no token was counted", live->path);
    if (status == CLI_OK) status = fits_write(&f, live->model, NULL, live->path, KV8_SCALES_KV8, 1);
    if (status == CLI_OK)
        fprintf(stderr, "calibrate  %s written, of %llu tokens\n", live->path,
                (unsigned long long)f.num_tokens);
    fits_free(&f);
    return status;
}

static void *run_writer(void *cookie) {
    live_calibration *const live = cookie;
    pthread_mutex_lock(&live->lock);
    for (;;) {
        while (live->state != WRITING && !live->closes)
            pthread_cond_wait(&live->changed, &live->lock);
        if (live->state != WRITING) break;
        pthread_mutex_unlock(&live->lock);
        const int status = write_file(live);
        pthread_mutex_lock(&live->lock);
        enter(live, status == CLI_OK ? WRITTEN : FAILED);
    }
    pthread_mutex_unlock(&live->lock);
    return NULL;
}

/* --- what the server asks --- */

/* A question and its answer, for the service's thread. */
typedef struct question {
    live_calibration *live;
    const char *refused;
} question;

static void start_now(void *cookie) {
    question *const q = cookie;
    live_calibration *const live = q->live;
    pthread_mutex_lock(&live->lock);
    if (live->state == WARMING_UP || live->state == COUNTING || live->state == WRITING)
        q->refused = "a calibration is under way";
    else if (begin(live) != KV8_OK)
        q->refused = "the model takes no observer";
    pthread_mutex_unlock(&live->lock);
}

static void stop_now(void *cookie) {
    question *const q = cookie;
    live_calibration *const live = q->live;
    pthread_mutex_lock(&live->lock);
    if (live->state == WARMING_UP)
        enter(live, OFF);
    else if (live->state == COUNTING)
        end_counting(live);
    else
        q->refused = "no calibration is under way";
    pthread_mutex_unlock(&live->lock);
}

static const char *ask(void *cookie, void (*call)(void *cookie)) {
    live_calibration *const live = cookie;
    question q = {.live = live};
    return kv8_service_call(live->service, call, &q) == KV8_OK ? q.refused : kv8_status_message();
}
static const char *start(void *cookie) {
    return ask(cookie, start_now);
}
static const char *stop(void *cookie) {
    return ask(cookie, stop_now);
}

static server_calibration_state look(void *cookie) {
    static const char *const words[] = {"off",     "warming-up", "counting",
                                        "writing", "written",    "failed"};
    live_calibration *const live = cookie;
    pthread_mutex_lock(&live->lock);
    const bool counts = live->state == WARMING_UP || live->state == COUNTING;
    const server_calibration_state state = {
        .state = words[live->state],
        .path = live->path,
        .num_tokens = counts ? (uint64_t)live->num_tokens : 0,
        .max_tokens = (uint64_t)(live->state == WARMING_UP ? live->warmup : live->max_tokens)};
    pthread_mutex_unlock(&live->lock);
    return state;
}

server_calibration live_calibration_serve(live_calibration *live, kv8_service *service) {
    if (live == NULL) return (server_calibration){0};
    live->service = service;
    return (server_calibration){.cookie = live, .start = start, .stop = stop, .look = look};
}

/* --- life --- */

int live_calibration_open(live_calibration **out, cli_model *model, const char *path,
                          int32_t warmup, int32_t max_tokens) {
    cli_output probe; /* a path that cannot be written is known before the first request */
    int status = cli_output_open(&probe, path);
    cli_output_abort(&probe);
    if (status != CLI_OK) return status;
    live_calibration *const live = calloc(1, sizeof *live);
    if (live == NULL) return cli_fail("no memory for a calibration");
    *live = (live_calibration){
        .model = model, .path = path, .warmup = warmup, .max_tokens = max_tokens};
    pthread_mutex_init(&live->lock, NULL);
    pthread_cond_init(&live->changed, NULL);
    *out = live;
    const kv8_status begun = begin(live);
    if (begun != KV8_OK) return cli_fail_status(begun);
    const int refused = pthread_create(&live->writer, NULL, run_writer, live);
    live->has_writer = refused == 0;
    return refused == 0 ? CLI_OK : cli_fail("the calibration's thread: %s", strerror(refused));
}

int live_calibration_close(live_calibration *live) {
    if (live == NULL) return CLI_OK;
    pthread_mutex_lock(&live->lock);
    if (live->state == COUNTING) end_counting(live);
    if (live->state == WARMING_UP) {
        (void)cli_fail("%s: not written, it was warming up", live->path);
        enter(live, FAILED);
    }
    live->closes = true;
    pthread_cond_broadcast(&live->changed);
    pthread_mutex_unlock(&live->lock);
    if (live->has_writer) pthread_join(live->writer, NULL);
    const int status = live->state == FAILED ? CLI_FAILED : CLI_OK;
    pthread_mutex_destroy(&live->lock);
    pthread_cond_destroy(&live->changed);
    kv8_observer_destroy(live->observer);
    free(live);
    return status;
}
