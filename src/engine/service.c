/* service.c - a thread that steps an engine, and requests that come to it from others.
 *
 * Callers never touch the engine: they put requests into `entries` and marks on them, under a lock
 * that is never held while the model computes or an event is told. Between steps the thread hands
 * the new ones to the engine and ends those that are marked; events are told when a GPU has its
 * next step. It sleeps when the engine has nothing to do.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <string.h>

#include "engine_state.h"

enum { LOOK_NS = 1000000000 }; /* between looks at what takes its time to read */

/* A request that has not been told to have ended. */
typedef struct entry {
    uint64_t id;
    kv8_running *running;
    kv8_finish finish; /* how it is to end after the step under way; NONE = it goes on */
} entry;

/* What the service tells about the engine, as of the last step that has ended. */
typedef struct figures {
    kv8_engine_stats stats;
    kv8_page_map map;
    uint64_t looked_ns; /* when the map and the cache's counters were read */
    kv8_status status;  /* of reading the counters */
    char message[KV8_ENGINE_MESSAGE];
} figures;

/* A call that waits for the thread, on its caller's stack. */
typedef struct waiting_call {
    void (*call)(void *cookie);
    void *cookie;
    bool done;
    struct waiting_call *next;
} waiting_call;

struct kv8_service {
    kv8_service_options options;
    kv8_engine *engine;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;  /* the thread: there is something to do */
    pthread_cond_t moved; /* who waits: all have ended, or figures are there */

    /* Under the lock. */
    entry
        *entries; /* [num_entries] of max_alive, by id; the last num_new are not the engine's yet */
    int32_t num_entries, num_new, num_marked;
    int32_t num_alive; /* those whose last event is being told, too */
    uint64_t last_id;
    bool drains, stops;
    bool sleeps;           /* the thread, until there is something to do */
    uint64_t asked, given; /* questions while it sleeps, and answered ones */
    figures figures;
    waiting_call *calls; /* the last that came is the first */

    /* The thread's. */
    entry *ending;      /* [max_alive] */
    int32_t num_events; /* of the last step, not told yet */
    char failure[KV8_ENGINE_MESSAGE];
};

/* --- events --- */

static void tell(kv8_service *s, const kv8_event *event) {
    s->options.on_event(s->options.cookie, event);
    if (event->finish == KV8_FINISH_NONE) return;
    pthread_mutex_lock(&s->lock);
    if (--s->num_alive == 0) pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
}

/* The index of the first entry whose id is not below `id`. */
static int32_t lower_bound(const kv8_service *s, uint64_t id) {
    int32_t low = 0, high = s->num_entries;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (s->entries[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* A request that the engine has ended takes no more marks. */
static void drop_entry(kv8_service *s, uint64_t id) {
    pthread_mutex_lock(&s->lock);
    const int32_t i = lower_bound(s, id);
    s->num_marked -= s->entries[i].finish != KV8_FINISH_NONE;
    s->num_entries--;
    memmove(&s->entries[i], &s->entries[i + 1], (size_t)(s->num_entries - i) * sizeof *s->entries);
    pthread_mutex_unlock(&s->lock);
}

/* --- the thread --- */

/* Marks everything that the engine has and that goes on. */
static void mark_all(kv8_service *s, kv8_finish finish) {
    for (int32_t i = 0; i < s->num_entries - s->num_new; i++) {
        if (s->entries[i].finish != KV8_FINISH_NONE) continue;
        s->entries[i].finish = finish;
        s->num_marked++;
    }
}

static void admit_new(kv8_service *s) {
    for (; s->num_new > 0; s->num_new--)
        kv8_engine_admit(s->engine, s->entries[s->num_entries - s->num_new].running);
}

/* Takes the marked entries out; how many are in `ending` then. */
static int32_t take_marked(kv8_service *s) {
    if (s->num_marked == 0) return 0;
    int32_t num = 0, kept = 0;
    for (int32_t i = 0; i < s->num_entries; i++) {
        if (s->entries[i].finish != KV8_FINISH_NONE)
            s->ending[num++] = s->entries[i];
        else
            s->entries[kept++] = s->entries[i];
    }
    s->num_entries = kept;
    s->num_marked = 0;
    return num;
}

/* --- figures --- */

/* The map and the cache's counters, which may lie on a device. Under the lock. */
static void look(kv8_service *s, uint64_t now_ns) {
    figures *const f = &s->figures;
    f->looked_ns = now_ns;
    f->map = (kv8_page_map)KV8_PAGE_MAP_INIT;
    f->stats = (kv8_engine_stats)KV8_ENGINE_STATS_INIT;
    KV8_MUST(kv8_engine_get_page_map(s->engine, &f->map));
    f->status = kv8_engine_get_stats(s->engine, &f->stats);
    if (f->status != KV8_OK) snprintf(f->message, sizeof f->message, "%s", kv8_status_message());
}

/* What the engine only counts. Under the lock. */
static void count(kv8_service *s) {
    const kv8_engine_stats before = s->figures.stats;
    kv8_engine_count(s->engine, &s->figures.stats);
    s->figures.stats.kv_clips = before.kv_clips;
    s->figures.stats.kv_nans = before.kv_nans;
}

static void note_figures(kv8_service *s) {
    pthread_mutex_lock(&s->lock);
    count(s);
    pthread_mutex_unlock(&s->lock);
}

/* Before a step, when somebody asks while the thread sleeps, or when the last look is old. */
static void look_again(kv8_service *s) {
    const uint64_t now_ns = kv8_time_ns();
    if (s->given == s->asked && now_ns - s->figures.looked_ns < LOOK_NS) return;
    look(s, now_ns);
    s->given = s->asked;
    pthread_cond_broadcast(&s->moved);
}

static void end_marked(kv8_service *s, int32_t num) {
    for (int32_t i = 0; i < num; i++) {
        const entry *const e = &s->ending[i];
        const kv8_event event = {.request = e->id,
                                 .token = -1,
                                 .finish = e->finish,
                                 .message = e->finish == KV8_FINISH_FAILED ? s->failure : NULL,
                                 .user = e->running->spec.user};
        KV8_MUST(kv8_engine_cancel(s->engine, e->id));
        note_figures(s);
        tell(s, &event);
    }
}

static void run_calls(kv8_service *s) {
    while (s->calls != NULL) {
        waiting_call *const first = s->calls;
        s->calls = first->next;
        pthread_mutex_unlock(&s->lock);
        first->call(first->cookie);
        pthread_mutex_lock(&s->lock);
        first->done = true;
        pthread_cond_broadcast(&s->moved);
    }
}

/* A step that fails would fail again: the requests that it was for end with its message. */
static void fail_step(kv8_service *s) {
    snprintf(s->failure, sizeof s->failure, "%s", kv8_status_message());
    pthread_mutex_lock(&s->lock);
    mark_all(s, KV8_FINISH_FAILED);
    pthread_mutex_unlock(&s->lock);
}

static bool begin_step(kv8_service *s) {
    if (kv8_engine_begin(s->engine) == KV8_OK) return true;
    fail_step(s);
    return false;
}

static void finish_step(kv8_service *s) {
    if (kv8_engine_finish(s->engine, &s->num_events) != KV8_OK) fail_step(s);
    note_figures(s);
    for (int32_t i = 0; i < s->num_events; i++) {
        const kv8_event *const event = kv8_engine_event(s->engine, i);
        if (event->finish != KV8_FINISH_NONE) drop_entry(s, event->request);
    }
}

static void tell_events(kv8_service *s) {
    for (int32_t i = 0; i < s->num_events; i++) tell(s, kv8_engine_event(s->engine, i));
    s->num_events = 0;
}

/* Events of the step before are told while a GPU computes this one; those of requests that were
 * marked come before their last. */
static void step(kv8_service *s, int32_t num_ending) {
    const bool tells_first = num_ending > 0 || s->engine->device_sampler == NULL;
    if (tells_first) tell_events(s);
    end_marked(s, num_ending);
    const bool begun = s->engine->num_requests > 0 && begin_step(s);
    tell_events(s);
    if (begun) finish_step(s);
}

static void *run(void *opaque) {
    kv8_service *const s = opaque;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        run_calls(s);
        admit_new(s);
        count(s);
        if (s->stops) mark_all(s, KV8_FINISH_CANCELLED);
        look_again(s);
        const int32_t num_ending = take_marked(s);
        const bool idle =
            s->num_entries == 0 && num_ending == 0 && s->num_events == 0 && s->calls == NULL;
        if (idle && s->stops) break;
        if (idle) {
            s->sleeps = true;
            pthread_cond_wait(&s->wake, &s->lock);
            s->sleeps = false;
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        step(s, num_ending);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* --- life --- */

static void release(kv8_service *s) {
    const size_t max_alive = (size_t)s->engine->max_alive;
    kv8_release(s->options.allocator, s->entries, max_alive, sizeof *s->entries);
    kv8_release(s->options.allocator, s->ending, max_alive, sizeof *s->ending);
    pthread_cond_destroy(&s->wake);
    pthread_cond_destroy(&s->moved);
    pthread_mutex_destroy(&s->lock);
    kv8_release(s->options.allocator, s, 1, sizeof *s);
}

static kv8_status start_thread(kv8_service *s) {
    const int refused = kv8_thread_start(&s->thread, run, s);
    if (refused != 0)
        return kv8_fail(KV8_ERR_NO_MEMORY, "the service's thread: %s", strerror(refused));
    return KV8_OK;
}

kv8_status kv8_service_start(kv8_service **out, kv8_engine *engine,
                             const kv8_service_options *options) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(engine, options);
    KV8_TAKE_STRUCT(kv8_service_options, options);
    if (options->on_event == NULL) return kv8_fail(KV8_ERR_INVALID, "on_event is NULL");
    if (engine->num_requests > 0)
        return kv8_fail(KV8_ERR_INVALID, "the engine has %d requests already, must have none",
                        engine->num_requests);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_service), "service", &memory));
    kv8_service *const s = memory;
    s->options = *options;
    s->engine = engine;
    s->last_id = engine->last_id;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    pthread_cond_init(&s->moved, NULL);
    const size_t max_alive = (size_t)engine->max_alive;
    kv8_status status =
        kv8_alloc(options->allocator, max_alive, sizeof *s->entries, "service", &memory);
    if (status == KV8_OK) {
        s->entries = memory;
        status = kv8_alloc(options->allocator, max_alive, sizeof *s->ending, "service", &memory);
    }
    if (status == KV8_OK) {
        s->ending = memory;
        look(s, kv8_time_ns());
        status = start_thread(s);
    }
    if (status == KV8_OK)
        *out = s;
    else
        release(s);
    return status;
}

void kv8_service_stop(kv8_service *service) {
    if (service == NULL) return;
    pthread_mutex_lock(&service->lock);
    service->drains = service->stops = true;
    pthread_cond_signal(&service->wake);
    pthread_mutex_unlock(&service->lock);
    pthread_join(service->thread, NULL);
    release(service);
}

/* --- calls from any thread --- */

/* Puts a request in line; its id is then set. */
static kv8_status enter(kv8_service *s, kv8_running *running) {
    if (s->drains) return kv8_fail(KV8_ERR_CANCELLED, "the service takes no more requests");
    if (s->num_alive == s->engine->max_alive)
        return kv8_fail(KV8_ERR_FULL,
                        "%d requests are alive, the limit of max_requests and max_waiting",
                        s->num_alive);
    running->id = ++s->last_id;
    s->entries[s->num_entries++] = (entry){.id = running->id, .running = running};
    s->num_new++;
    s->num_alive++;
    pthread_cond_signal(&s->wake);
    return KV8_OK;
}

kv8_status kv8_service_submit(kv8_service *service, const kv8_request *request, uint64_t *id_out) {
    KV8_REQUIRE(service, id_out);
    KV8_TAKE_STRUCT(kv8_request, request);
    if (request->hold != 0 || request->parent != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "a service holds no requests: hold is %d, parent %llu, both must be 0",
                        request->hold, (unsigned long long)request->parent);
    kv8_running *running = NULL;
    KV8_TRY(kv8_engine_prepare(service->engine, request, NULL, &running));
    pthread_mutex_lock(&service->lock);
    const kv8_status status = enter(service, running);
    if (status == KV8_OK) *id_out = service->last_id;
    pthread_mutex_unlock(&service->lock);
    if (status != KV8_OK) kv8_running_destroy(running, service->engine->allocator);
    return status;
}

kv8_status kv8_service_cancel(kv8_service *service, uint64_t id) {
    KV8_REQUIRE(service);
    pthread_mutex_lock(&service->lock);
    const int32_t i = lower_bound(service, id);
    const bool lives = i < service->num_entries && service->entries[i].id == id;
    if (lives && service->entries[i].finish == KV8_FINISH_NONE) {
        service->entries[i].finish = KV8_FINISH_CANCELLED;
        service->num_marked++;
        pthread_cond_signal(&service->wake);
    }
    pthread_mutex_unlock(&service->lock);
    if (lives) return KV8_OK;
    return kv8_fail(KV8_ERR_NOT_FOUND, "no request %llu", (unsigned long long)id);
}

/* The figures as they are, after a look if nothing runs: that is when a look waits for no step. */
static void read_figures(kv8_service *s, figures *out) {
    pthread_mutex_lock(&s->lock);
    const bool tells = pthread_equal(pthread_self(), s->thread); /* from on_event */
    if (tells && !s->engine->is_under_way) look(s, kv8_time_ns());
    if (s->sleeps) {
        const uint64_t question = ++s->asked;
        pthread_cond_signal(&s->wake);
        while (s->given < question) pthread_cond_wait(&s->moved, &s->lock);
    }
    *out = s->figures;
    out->stats.num_waiting += s->num_new;
    pthread_mutex_unlock(&s->lock);
}

kv8_status kv8_service_get_stats(kv8_service *service, kv8_engine_stats *stats_out) {
    KV8_REQUIRE(service, stats_out);
    figures f;
    read_figures(service, &f);
    if (f.status != KV8_OK) return kv8_fail(f.status, "%s", f.message);
    KV8_WRITE_STRUCT(kv8_engine_stats, stats_out, &f.stats);
    return KV8_OK;
}

kv8_status kv8_service_get_page_map(kv8_service *service, kv8_page_map *map_out) {
    KV8_REQUIRE(service, map_out);
    figures f;
    read_figures(service, &f);
    KV8_WRITE_STRUCT(kv8_page_map, map_out, &f.map);
    return KV8_OK;
}

kv8_status kv8_service_call(kv8_service *service, void (*call)(void *cookie), void *cookie) {
    KV8_REQUIRE(service, call);
    waiting_call own = {.call = call, .cookie = cookie};
    if (pthread_equal(pthread_self(), service->thread))
        return kv8_fail(KV8_ERR_INVALID, "kv8_service_call: from on_event, beside a step");
    pthread_mutex_lock(&service->lock);
    own.next = service->calls;
    service->calls = &own;
    pthread_cond_signal(&service->wake);
    while (!own.done) pthread_cond_wait(&service->moved, &service->lock);
    pthread_mutex_unlock(&service->lock);
    return KV8_OK;
}

void kv8_service_drain(kv8_service *service) {
    if (service == NULL) return;
    pthread_mutex_lock(&service->lock);
    service->drains = true;
    while (service->num_alive > 0) pthread_cond_wait(&service->moved, &service->lock);
    pthread_mutex_unlock(&service->lock);
}
