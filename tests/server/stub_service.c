/* stub_service.c - a kv8_service without a model: a thread that gives every request, in turn, its
 * next token until max_tokens. Token i of a request is prompt[i % num_tokens], so that a client can
 * tell its own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <kv8/engine.h>

typedef struct stub_request {
    struct stub_request *next;
    uint64_t id;
    void *user;
    int32_t *prompt, num_prompt, num_given, max_tokens;
    bool cancelled;
} stub_request;

struct kv8_service {
    kv8_service_options options;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    stub_request *first;
    uint64_t last_id, num_tokens;
    int32_t num_running;
    bool stops;
};

static void tell(kv8_service *s, stub_request *request) {
    kv8_event event = {.request = request->id, .token = -1, .user = request->user};
    if (request->cancelled || s->stops) {
        event.finish = KV8_FINISH_CANCELLED;
    } else {
        event.token = request->prompt[request->num_given++ % request->num_prompt];
        s->num_tokens++;
        if (request->num_given >= request->max_tokens) event.finish = KV8_FINISH_LENGTH;
    }
    if (event.finish != KV8_FINISH_NONE) request->max_tokens = 0;
    s->options.on_event(s->options.cookie, &event);
}

/* One token for everybody; those that ended go. */
static void step(kv8_service *s) {
    for (stub_request **at = &s->first; *at != NULL;) {
        stub_request *const request = *at;
        tell(s, request);
        if (request->max_tokens > 0) {
            at = &request->next;
            continue;
        }
        *at = request->next;
        s->num_running--;
        free(request->prompt);
        free(request);
    }
}

static void *run(void *cookie) {
    kv8_service *const s = cookie;
    pthread_mutex_lock(&s->lock);
    while (!s->stops || s->first != NULL) {
        if (s->first == NULL) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        step(s);
        pthread_mutex_unlock(&s->lock); /* a moment for those that submit */
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

kv8_status kv8_service_start(kv8_service **out, kv8_engine *engine,
                             const kv8_service_options *options) {
    (void)engine;
    kv8_service *const s = calloc(1, sizeof *s);
    if (s == NULL) return KV8_ERR_NO_MEMORY;
    s->options = *options;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, run, s) != 0) abort();
    *out = s;
    return KV8_OK;
}

void kv8_service_stop(kv8_service *s) {
    if (s == NULL) return;
    pthread_mutex_lock(&s->lock);
    s->stops = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

kv8_status kv8_service_submit(kv8_service *s, const kv8_request *request, uint64_t *id_out) {
    stub_request *const taken = calloc(1, sizeof *taken);
    const size_t size = (size_t)request->num_tokens * sizeof *taken->prompt;
    if (taken == NULL || (taken->prompt = malloc(size)) == NULL) abort();
    memcpy(taken->prompt, request->token_ids, size);
    taken->num_prompt = request->num_tokens;
    taken->max_tokens = request->max_tokens;
    taken->user = request->user;
    pthread_mutex_lock(&s->lock);
    *id_out = taken->id = ++s->last_id;
    taken->next = s->first;
    s->first = taken;
    s->num_running++;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return KV8_OK;
}

kv8_status kv8_service_cancel(kv8_service *s, uint64_t id) {
    bool found = false;
    pthread_mutex_lock(&s->lock);
    for (stub_request *at = s->first; at != NULL; at = at->next) {
        if (at->id != id) continue;
        at->cancelled = found = true;
    }
    pthread_mutex_unlock(&s->lock);
    return found ? KV8_OK : KV8_ERR_NOT_FOUND;
}

kv8_status kv8_service_get_page_map(kv8_service *s, kv8_page_map *map) {
    (void)s;
    map->num_cells = 0;
    return KV8_OK;
}

kv8_status kv8_service_get_stats(kv8_service *s, kv8_engine_stats *stats) {
    pthread_mutex_lock(&s->lock);
    stats->num_running = s->num_running;
    stats->generated_tokens = s->num_tokens;
    pthread_mutex_unlock(&s->lock);
    return KV8_OK;
}
