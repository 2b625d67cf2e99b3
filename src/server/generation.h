/* generation.h - one request under way in the engine: its choices, and the events that the
 * service's thread hands to the HTTP thread of its connection.
 *
 * The service's thread copies an event into the queue and wakes the connection; all else happens on
 * the HTTP thread. A generation lives until its connection is done with it and every choice has had
 * its last event.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_GENERATION_H
#define KV8_SERVER_GENERATION_H

#include <pthread.h>

#include "choice.h"
#include "metrics.h"

typedef struct generation generation;

typedef struct generation_choice {
    generation *owner;
    choice said;
    constraint_place place; /* the service's: where the answer is in what it may be */
    uint64_t engine_id;     /* 0 = was not submitted */
    uint64_t last_token;    /* ns */
    bool ended;             /* nothing the engine still says counts */
    bool told;              /* the stream has its finish reason */
    bool greeted;           /* the stream has its role */
} generation_choice;

/* When things happened: nanoseconds, monotonic; 0 = not yet. */
typedef struct generation_times {
    uint64_t arrived, begun, first_token, last_token;
} generation_times;

typedef struct generation_event generation_event;

struct generation {
    api_request request;
    kv8_service *service;
    metrics *metrics;
    const api_model *model;
    generation_choice *choices;
    size_t num_choices, num_open; /* not ended */
    generation_times times;
    api_error error; /* status 0, or why it failed after it began */
    bool cancelled;

    /* Under the lock: the service's thread and the HTTP thread. */
    pthread_mutex_t lock;
    generation_event *first, **last;
    uint64_t begun_ns;  /* the first step of all */
    bool hung_up;       /* the client has closed its side */
    size_t num_alive;   /* choices whose last event is still to come, and 1 for the connection */
    bool asleep;        /* the HTTP thread wants to be woken */
    bool sparing;       /* but only by last events */
    bool out_of_memory; /* an event was lost */
    void (*wake)(void *cookie);
    void *wake_cookie;
};

/* Takes the request. On failure *out is NULL, the error set, the request freed. */
bool generation_create(generation **out, api_request *request, const api_model *model,
                       kv8_service *service, metrics *counters, choice_kind kind,
                       uint64_t arrived_ns, api_error *error);
/* Submits all choices, or none: then the error is set. */
bool generation_submit(generation *g, void (*wake)(void *cookie), void *wake_cookie,
                       uint64_t deadline_ns);
/* The next choice that an event spoke for; NULL = none is there. */
generation_choice *generation_next(generation *g);
/* Under no event: wake() is called once there is one (`sparing`: once a choice has ended). Returns
 * false when one is there already. `suspend` is called before, under the lock. */
bool generation_sleep(generation *g, bool sparing, void (*suspend)(void *cookie), void *cookie);
/* Ends what still runs. Its events still come, and count no more. */
void generation_cancel(generation *g);
/* From any thread that knows it to live: the client is gone. Wakes the HTTP thread. */
void generation_hang_up(generation *g);
bool generation_is_hung_up(generation *g);
/* The connection is done with it. */
void generation_release(generation *g);

/* A kv8_service_options.on_event. */
void generation_on_event(void *cookie, const kv8_event *event);

/* Sums over all choices. */
typedef struct generation_usage {
    int64_t prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens;
} generation_usage;
generation_usage generation_get_usage(const generation *g);

uint64_t monotonic_ns(void);

#endif
