/* generation.c - one request under way in the engine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "generation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A kv8_event with what it borrows. */
struct generation_event {
    generation_event *next;
    kv8_event event;
    uint64_t at_ns;
    char message[256];
    kv8_logprob top[]; /* the token's, then the prompt's; then float logprobs of the prompt */
};

uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* --- on the service's thread --- */

static generation_event *copy_event(const kv8_event *event, const api_request *request) {
    const size_t num_top = event->top == NULL ? 0 : (size_t)request->num_logprobs;
    const size_t num_prompt = (size_t)event->num_prompt_logprobs;
    const size_t num_prompt_top = num_prompt * (size_t)request->prompt_top;
    const size_t num_bytes = (num_top + num_prompt_top) * sizeof(kv8_logprob);
    generation_event *const copy = malloc(sizeof *copy + num_bytes + num_prompt * sizeof(float));
    if (copy == NULL) return NULL;
    copy->next = NULL;
    copy->event = *event;
    copy->at_ns = monotonic_ns();
    snprintf(copy->message, sizeof copy->message, "%s",
             event->message == NULL ? "" : event->message);
    copy->event.message = copy->message;
    copy->event.top = copy->top;
    copy->event.prompt_top = copy->top + num_top;
    float *const logprobs = (float *)(copy->top + num_top + num_prompt_top);
    copy->event.prompt_logprob = logprobs;
    if (num_top > 0) memcpy(copy->top, event->top, num_top * sizeof *copy->top);
    if (num_prompt_top > 0)
        memcpy(copy->top + num_top, event->prompt_top, num_prompt_top * sizeof *copy->top);
    if (num_prompt > 0) memcpy(logprobs, event->prompt_logprob, num_prompt * sizeof *logprobs);
    return copy;
}

static void destroy(generation *g) {
    while (g->first != NULL) {
        generation_event *const next = g->first->next;
        free(g->first);
        g->first = next;
    }
    for (size_t i = 0; i < g->num_choices; i++) choice_free(&g->choices[i].said);
    free(g->choices);
    api_request_free(&g->request);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* One of num_alive is gone. Unlocks, and frees what nobody needs. */
static void unlock_one_less(generation *g) {
    const bool last = --g->num_alive == 0;
    pthread_mutex_unlock(&g->lock);
    if (last) destroy(g);
}

void generation_on_event(void *cookie, const kv8_event *event) {
    (void)cookie;
    generation_choice *const spoken = event->user;
    generation *const g = spoken->owner;
    const bool ends = event->finish != KV8_FINISH_NONE;
    if (spoken->place.constraint != NULL && event->token >= 0)
        constraint_take(&spoken->place, event->token);
    pthread_mutex_lock(&g->lock);
    const bool says = ends || event->token >= 0 || event->num_prompt_logprobs > 0;
    generation_event *const copy = says ? copy_event(event, &g->request) : NULL;
    g->out_of_memory |= says && copy == NULL;
    if (copy != NULL) {
        *g->last = copy;
        g->last = &copy->next;
    }
    if (g->begun_ns == 0) g->begun_ns = monotonic_ns() - event->step_ns;
    if (g->asleep && says && (ends || !g->sparing)) {
        g->asleep = false;
        g->wake(g->wake_cookie);
    }
    if (ends)
        unlock_one_less(g);
    else
        pthread_mutex_unlock(&g->lock);
}

/* --- on the HTTP thread --- */

bool generation_create(generation **out, api_request *request, const api_model *model,
                       kv8_service *service, metrics *counters, choice_kind kind,
                       uint64_t arrived_ns, api_error *error) {
    *out = NULL;
    generation *const g = calloc(1, sizeof *g);
    const size_t num = request->num_prompts * (size_t)request->n;
    generation_choice *const choices = calloc(num, sizeof *choices);
    if (g == NULL || choices == NULL) {
        free(g);
        free(choices);
        api_request_free(request);
        return api_fail_memory(error);
    }
    *g = (generation){.request = *request,
                      .service = service,
                      .metrics = counters,
                      .model = model,
                      .choices = choices,
                      .num_choices = num,
                      .num_open = num,
                      .times.arrived = arrived_ns,
                      .num_alive = 1};
    g->last = &g->first;
    pthread_mutex_init(&g->lock, NULL);
    for (size_t i = 0; i < num; i++) {
        choices[i].owner = g;
        if (!choice_begin(&choices[i].said, &g->request, model, kind, (int32_t)i,
                          (int32_t)(i / (size_t)request->n), error)) {
            destroy(g);
            return false;
        }
    }
    *out = g;
    return true;
}

static kv8_status submit_choice(generation *g, generation_choice *spoken, uint64_t deadline_ns) {
    const api_request *const wanted = &g->request;
    const api_prompt *const prompt = &wanted->prompts[spoken->said.prompt_idx];
    kv8_sampling sampling = wanted->sampling;
    sampling.stream = (uint64_t)spoken->said.index;
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = prompt->ids;
    request.num_tokens = (int32_t)prompt->num;
    request.max_tokens = wanted->max_tokens;
    request.sampling = &sampling;
    request.stop_ids = wanted->stop_ids;
    request.num_stop_ids = (int32_t)wanted->num_stop_ids;
    request.ignore_eos = wanted->ignore_eos;
    if (wanted->wants_logprobs)
        request.num_logprobs = wanted->num_logprobs == 0 ? 1 : wanted->num_logprobs;
    request.priority = wanted->priority;
    request.min_tokens = wanted->min_tokens;
    request.deadline_ns = deadline_ns;
    request.cache_salt = wanted->cache_salt;
    request.prompt_logprobs = wanted->prompt_top;
    request.user = spoken;
    if (wanted->constraint != NULL) {
        spoken->place = constraint_begin(wanted->constraint);
        request.mask = constraint_mask;
        request.mask_cookie = &spoken->place;
    }
    pthread_mutex_lock(&g->lock);
    g->num_alive++;
    pthread_mutex_unlock(&g->lock);
    const kv8_status status = kv8_service_submit(g->service, &request, &spoken->engine_id);
    if (status == KV8_OK) return KV8_OK;
    pthread_mutex_lock(&g->lock);
    g->num_alive--; /* the connection's is left */
    pthread_mutex_unlock(&g->lock);
    return status;
}

bool generation_submit(generation *g, void (*wake)(void *cookie), void *wake_cookie,
                       uint64_t deadline_ns) {
    g->wake = wake;
    g->wake_cookie = wake_cookie;
    for (size_t i = 0; i < g->num_choices; i++) {
        const kv8_status status = submit_choice(g, &g->choices[i], deadline_ns);
        if (status == KV8_OK) continue;
        if (status == KV8_ERR_CANCELLED)
            api_fail(&g->error, 503, "shutting_down", NULL, "the server is shutting down");
        else
            api_fail_library(&g->error, status, NULL);
        generation_cancel(g);
        return false;
    }
    if (g->request.constraint != NULL) constraint_prepare(g->request.constraint);
    return true;
}

/* One that has ended meanwhile is not found, which is as good. */
static void cancel_choice(generation *g, const generation_choice *spoken) {
    const kv8_status status = kv8_service_cancel(g->service, spoken->engine_id);
    (void)status;
}

/* Why a choice ended without an answer. */
static void note_failure(generation *g, const generation_event *given) {
    if (g->error.status != 0 || g->cancelled) return;
    switch (given->event.finish) {
        case KV8_FINISH_FAILED: api_fail(&g->error, 500, NULL, NULL, "%s", given->message); break;
        case KV8_FINISH_EXPIRED:
            api_fail(&g->error, 503, "overloaded", NULL,
                     "the request waited longer than this server lets requests wait");
            break;
        case KV8_FINISH_CANCELLED:
            api_fail(&g->error, 503, "shutting_down", NULL, "the server is shutting down");
            break;
        default: break;
    }
}

static void take(generation *g, generation_choice *spoken, const generation_event *given) {
    if (spoken->ended) return;
    if (given->event.token >= 0) {
        if (g->times.first_token == 0) g->times.first_token = given->at_ns;
        if (spoken->last_token != 0)
            metrics_observe(g->metrics, METRIC_INTER_TOKEN,
                            (double)(given->at_ns - spoken->last_token) * 1e-9);
        spoken->last_token = g->times.last_token = given->at_ns;
    }
    note_failure(g, given);
    spoken->ended = choice_take(&spoken->said, &given->event);
    if (spoken->said.failed_memory || spoken->said.text.text.failed) api_fail_memory(&g->error);
    if (!spoken->ended) return;
    g->num_open--;
    metrics_count_end(g->metrics, spoken->said.finish_reason, given->event.finish);
    /* A stop string ended it: the engine does not know yet. */
    if (given->event.finish == KV8_FINISH_NONE) cancel_choice(g, spoken);
}

generation_choice *generation_next(generation *g) {
    pthread_mutex_lock(&g->lock);
    generation_event *const given = g->first;
    if (given != NULL) {
        g->first = given->next;
        if (g->first == NULL) g->last = &g->first;
    }
    const bool lost = g->out_of_memory;
    g->times.begun = g->begun_ns;
    pthread_mutex_unlock(&g->lock);
    if (lost) api_fail_memory(&g->error);
    if (given == NULL) return NULL;
    generation_choice *const spoken = given->event.user;
    take(g, spoken, given);
    free(given);
    return spoken;
}

bool generation_sleep(generation *g, bool sparing, void (*suspend)(void *cookie), void *cookie) {
    pthread_mutex_lock(&g->lock);
    g->asleep = g->first == NULL && !g->out_of_memory && !g->hung_up;
    g->sparing = sparing;
    const bool asleep = g->asleep;
    if (asleep) suspend(cookie);
    pthread_mutex_unlock(&g->lock);
    return asleep;
}

void generation_hang_up(generation *g) {
    pthread_mutex_lock(&g->lock);
    g->hung_up = true;
    if (g->asleep) {
        g->asleep = false;
        g->wake(g->wake_cookie);
    }
    pthread_mutex_unlock(&g->lock);
}

bool generation_is_hung_up(generation *g) {
    pthread_mutex_lock(&g->lock);
    const bool hung_up = g->hung_up;
    pthread_mutex_unlock(&g->lock);
    return hung_up;
}

void generation_cancel(generation *g) {
    g->cancelled = true;
    for (size_t i = 0; i < g->num_choices; i++) {
        if (!g->choices[i].ended && g->choices[i].engine_id != 0) cancel_choice(g, &g->choices[i]);
    }
}

void generation_release(generation *g) {
    if (g->num_open > 0) generation_cancel(g);
    pthread_mutex_lock(&g->lock);
    g->asleep = false;
    unlock_one_less(g);
}

generation_usage generation_get_usage(const generation *g) {
    generation_usage usage = {0};
    for (size_t i = 0; i < g->request.num_prompts; i++)
        usage.prompt_tokens += (int64_t)g->request.prompts[i].num;
    for (size_t i = 0; i < g->num_choices; i++) {
        const choice *const said = &g->choices[i].said;
        usage.completion_tokens += (int64_t)said->num_tokens;
        usage.reasoning_tokens += said->num_reasoning_tokens;
        /* A prompt's first choice looked for it; the others share with that one. */
        if (i % (size_t)g->request.n == 0) usage.cached_tokens += said->num_cached;
    }
    return usage;
}
