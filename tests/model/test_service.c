/* test_service.c - the thread that steps an engine: many callers at once, every request told to its
 * one end, whatever is cancelled, refused, drained, stopped or fails.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>

#include "engine_runs.h"
#include "model.h"

/* --- what became of the requests --- */

enum { MAX_ANSWER = 64 };

/* A request as its caller sees it; the lock guards all of them. */
typedef struct ticket {
    uint64_t id;
    int32_t tokens[MAX_ANSWER], num_tokens;
    kv8_finish finish;
    int32_t num_ends;
    char message[100];
} ticket;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;

static void take_event(void *cookie, const kv8_event *event) {
    (void)cookie;
    ticket *const t = event->user;
    pthread_mutex_lock(&lock);
    assert_int_equal(t->num_ends, 0);
    if (event->token >= 0) t->tokens[t->num_tokens++] = event->token;
    if (event->message != NULL) snprintf(t->message, sizeof t->message, "%s", event->message);
    t->finish = event->finish;
    t->num_ends += event->finish != KV8_FINISH_NONE;
    if (t->num_ends > 0) pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&lock);
}

static void wait_for(const ticket *t) {
    pthread_mutex_lock(&lock);
    while (t->num_ends == 0) pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
}

typedef struct hall {
    bench b;
    kv8_service *service;
} hall;

static hall open_hall(int32_t num_pages, int32_t max_requests) {
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.share_prefixes = 1;
    options.step_tokens = 128;
    hall h = {.b = open_pool_bench(num_pages, max_requests, &options)};
    kv8_service_options service = KV8_SERVICE_OPTIONS_INIT;
    service.on_event = take_event;
    assert_ok(kv8_service_start(&h.service, h.b.engine, &service));
    return h;
}

static void close_hall(hall *h) {
    kv8_service_stop(h->service);
    close_bench(&h->b);
}

static kv8_status try_submit(hall *h, kv8_request request, ticket *t) {
    *t = (ticket){0};
    request.user = t;
    return kv8_service_submit(h->service, &request, &t->id);
}

/* --- models that compute nothing --- */

/* What the quick model answers to a token at a position. */
static int32_t next_of(int32_t token, int32_t position) {
    return (int32_t)(((uint32_t)token * 2654435761u ^ (uint32_t)position * 40503u) % 3000);
}

/* The service's thread's own, so it needs no lock: kv8_service_call never meets a step. */
static bool is_computing;

static kv8_status answer_at_once(kv8_model *m, kv8_cache *cache, const kv8_step *step) {
    (void)cache;
    is_computing = true;
    for (int32_t i = 0; i < step->num_logit_rows; i++) {
        const int32_t row = step->logit_rows[i];
        float *const logits = step->logits_out + (size_t)i * (size_t)info.vocab_size;
        memset(logits, 0, (size_t)info.vocab_size * sizeof *logits);
        logits[next_of(step->token_ids[row], m->positions[row])] = 1;
    }
    is_computing = false;
    return KV8_OK;
}

static kv8_status refuse(kv8_model *m, kv8_cache *cache, const kv8_step *step) {
    (void)m, (void)cache, (void)step;
    return kv8_fail(KV8_ERR_DEVICE, "the model refuses");
}

static const kv8_architecture *sound;
static kv8_architecture stub;

/* The model's steps are `compute` until the test ends. */
static void set_stub(kv8_status (*compute)(kv8_model *, kv8_cache *, const kv8_step *)) {
    sound = model->architecture;
    stub = *sound;
    stub.compute = compute;
    model->architecture = &stub;
}
static int drop_stub(void **state) {
    (void)state;
    if (model->architecture == &stub) model->architecture = sound;
    return 0;
}

/* --- tests --- */

static void many_at_once_equal_each_alone(void **state) {
    (void)state;
    enum { NUM = 64, ANSWER = 6 };
    static ticket tickets[NUM];
    hall h = open_hall(40, 16);
    for (int i = 0; i < NUM; i++)
        assert_ok(try_submit(&h, request_of(ids + 10 * i, 17 + i % 7, ANSWER), &tickets[i]));
    kv8_service_drain(h.service);
    ticket late;
    assert_refused(try_submit(&h, request_of(ids, 5, 5), &late), KV8_ERR_CANCELLED, "no more");
    close_hall(&h);
    for (int i = 0; i < NUM; i++) {
        int32_t alone[ANSWER];
        continue_by_hand(ids + 10 * i, 17 + i % 7, alone, ANSWER);
        assert_int_equal(tickets[i].num_ends, 1);
        assert_int_equal(tickets[i].finish, KV8_FINISH_LENGTH);
        assert_int_equal(tickets[i].num_tokens, ANSWER);
        assert_memory_equal(tickets[i].tokens, alone, sizeof alone);
    }
}

/* Callers that submit, cancel and look, more than the queue and the pool hold. */
enum { CALLERS = 8, EACH = 150 };
typedef struct caller {
    hall *h;
    uint64_t seed;
    ticket tickets[EACH];
    int32_t num_prompt[EACH], last[EACH]; /* how many tokens the prompts have, and the last */
    int32_t num_calls, num_called;
} caller;

/* The tokens that a request got are the quick model's. */
static void check_tokens(const caller *c, int32_t i) {
    int32_t token = c->last[i];
    for (int32_t t = 0; t < c->tickets[i].num_tokens; t++) {
        token = next_of(token, c->num_prompt[i] + t - 1);
        assert_int_equal(c->tickets[i].tokens[t], token);
    }
}

static void look_between_steps(void *cookie) {
    *(int32_t *)cookie += is_computing ? -1000000 : 1;
}

static void *call(void *opaque) {
    caller *const c = opaque;
    test_rng rng = {c->seed};
    for (int i = 0; i < EACH; i++) {
        ticket *const t = &c->tickets[i];
        kv8_request request =
            request_of(ids + rng_range(&rng, 0, 3), rng_range(&rng, 1, 60), rng_range(&rng, 0, 30));
        request.priority = rng_range(&rng, -1, 1);
        request.cache_salt = (uint64_t)rng_range(&rng, 0, 1);
        request.deadline_ns = rng_range(&rng, 0, 5) == 0 ? 1000000 : 0;
        c->num_prompt[i] = request.num_tokens;
        c->last[i] = request.token_ids[request.num_tokens - 1];
        const kv8_status status = try_submit(c->h, request, t);
        if (status != KV8_OK) {
            t->num_ends = status == KV8_ERR_FULL;
            continue;
        }
        kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
        if (rng_range(&rng, 0, 3) == 0 && kv8_service_cancel(c->h->service, t->id) != KV8_OK)
            wait_for(t);
        if (rng_range(&rng, 0, 5) == 0 && kv8_service_get_stats(c->h->service, &stats) != KV8_OK)
            t->num_ends = -9;
        if (rng_range(&rng, 0, 5) == 0) {
            const kv8_status called =
                kv8_service_call(c->h->service, look_between_steps, &c->num_called);
            c->num_calls += called == KV8_OK;
        }
        if (rng_range(&rng, 0, 2) == 0) wait_for(t);
    }
    return NULL;
}

static void callers_at_random_get_one_end_each(void **state) {
    (void)state;
    static caller callers[CALLERS];
    pthread_t threads[CALLERS];
    set_stub(answer_at_once);
    hall h = open_hall(14, 6);
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (caller){.h = &h, .seed = (uint64_t)i};
        assert_int_equal(pthread_create(&threads[i], NULL, call, &callers[i]), 0);
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    kv8_service_drain(h.service);
    int32_t finishes[8] = {0};
    for (int i = 0; i < CALLERS; i++) {
        assert_true(callers[i].num_calls > 0);
        assert_int_equal(callers[i].num_called, callers[i].num_calls);
        for (int k = 0; k < EACH; k++) {
            assert_int_equal(callers[i].tickets[k].num_ends, 1);
            finishes[callers[i].tickets[k].finish]++;
            check_tokens(&callers[i], k);
        }
    }
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    assert_ok(kv8_service_get_stats(h.service, &stats));
    assert_int_equal(stats.num_running + stats.num_waiting, 0);
    assert_int_equal(stats.pages_used, 0);
    assert_int_equal(finishes[KV8_FINISH_FAILED], 0);
    assert_true(finishes[KV8_FINISH_LENGTH] > 500 && finishes[KV8_FINISH_CANCELLED] > 0);
    print_message("%d at length, %d cancelled, %d expired, %llu preempted\n",
                  finishes[KV8_FINISH_LENGTH], finishes[KV8_FINISH_CANCELLED],
                  finishes[KV8_FINISH_EXPIRED], (unsigned long long)stats.num_preemptions);
    close_hall(&h);
}

/* A step that lasts as long as the test wants. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int num_at_gate;

static kv8_status answer_behind_the_gate(kv8_model *m, kv8_cache *cache, const kv8_step *step) {
    num_at_gate++;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    return answer_at_once(m, cache, step);
}

static void figures_wait_for_no_step(void **state) {
    (void)state;
    ticket t;
    set_stub(answer_behind_the_gate);
    hall h = open_hall(64, 2);
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    kv8_page_map map = KV8_PAGE_MAP_INIT;
    pthread_mutex_lock(&gate);
    assert_ok(try_submit(&h, request_of(ids, 40, 1), &t));
    while (num_at_gate == 0) sched_yield();
    assert_ok(kv8_service_get_stats(h.service, &stats)); /* while the step stands still */
    assert_ok(kv8_service_get_page_map(h.service, &map));
    assert_int_equal(stats.num_running + stats.num_waiting, 1);
    assert_int_equal(stats.num_steps, 0);
    pthread_mutex_unlock(&gate);
    wait_for(&t);
    assert_ok(kv8_service_get_stats(h.service, &stats));
    assert_int_equal(stats.num_steps, 1);
    assert_int_equal(stats.pages_used, 0);
    close_hall(&h);
}

static void a_full_line_refuses_and_stop_ends_everybody(void **state) {
    (void)state;
    enum { NUM = 66 }; /* two run, 64 wait */
    static ticket tickets[NUM];
    ticket one_more;
    hall h = open_hall(64, 2);
    for (int i = 0; i < NUM; i++)
        assert_ok(try_submit(&h, request_of(ids, 100, MAX_ANSWER), &tickets[i]));
    assert_refused(try_submit(&h, request_of(ids, 10, 1), &one_more), KV8_ERR_FULL,
                   "66 requests are alive");
    assert_ok(kv8_service_cancel(h.service, tickets[40].id));
    wait_for(&tickets[40]);
    assert_int_equal(tickets[40].finish, KV8_FINISH_CANCELLED);
    assert_refused(kv8_service_cancel(h.service, tickets[40].id), KV8_ERR_NOT_FOUND, "request 41");
    assert_refused(kv8_service_cancel(h.service, 1000), KV8_ERR_NOT_FOUND, "request 1000");
    kv8_service_stop(h.service);
    int32_t num_cancelled = 0;
    for (int i = 0; i < NUM; i++) {
        assert_int_equal(tickets[i].num_ends, 1);
        num_cancelled += tickets[i].finish == KV8_FINISH_CANCELLED;
    }
    assert_true(num_cancelled > 50);
    close_bench(&h.b);
}

static void a_step_that_fails_ends_its_requests_by_name(void **state) {
    (void)state;
    static ticket tickets[5];
    set_stub(refuse);
    hall h = open_hall(64, 2);
    for (int i = 0; i < 5; i++) assert_ok(try_submit(&h, request_of(ids, 9, 3), &tickets[i]));
    for (int i = 0; i < 5; i++) {
        wait_for(&tickets[i]);
        assert_int_equal(tickets[i].finish, KV8_FINISH_FAILED);
        assert_string_equal(tickets[i].message, "the model refuses");
    }
    close_hall(&h);
}

/* A chain: each request's end submits the next, from the service's own thread. */
typedef struct chain {
    kv8_service *service;
    pthread_mutex_t begun; /* held until `service` is set */
    int32_t links, num_ended, num_running;
} chain;

static void submit_link(chain *c) {
    kv8_request request = request_of(ids, 5, 2);
    uint64_t id = 0;
    request.user = c;
    assert_ok(kv8_service_submit(c->service, &request, &id));
    c->links--;
}

static void forge(void *cookie, const kv8_event *event) {
    chain *const c = cookie;
    assert_ptr_equal(event->user, c);
    if (event->finish == KV8_FINISH_NONE) return;
    pthread_mutex_lock(&c->begun);
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    assert_ok(kv8_service_get_stats(c->service, &stats));
    assert_int_equal(stats.num_running, 0);
    if (event->finish == KV8_FINISH_LENGTH)
        assert_refused(kv8_service_cancel(c->service, event->request), KV8_ERR_NOT_FOUND, "no");
    int32_t num_called = 0;
    assert_refused(kv8_service_call(c->service, look_between_steps, &num_called), KV8_ERR_INVALID,
                   "from on_event");
    assert_int_equal(num_called, 0);
    c->num_ended++;
    if (c->links > 0) submit_link(c);
    pthread_mutex_unlock(&c->begun);
}

static void events_may_submit_and_look(void **state) {
    (void)state;
    set_stub(answer_at_once);
    chain c = {.begun = PTHREAD_MUTEX_INITIALIZER, .links = 20};
    bench b = open_pool_bench(64, 2, &(kv8_engine_options)KV8_ENGINE_OPTIONS_INIT);
    const kv8_service_options options = {
        .struct_size = sizeof options, .on_event = forge, .cookie = &c};
    pthread_mutex_lock(&c.begun);
    assert_ok(kv8_service_start(&c.service, b.engine, &options));
    submit_link(&c);
    pthread_mutex_unlock(&c.begun);
    for (bool done = false; !done;) {
        pthread_mutex_lock(&c.begun);
        done = c.num_ended == 20;
        pthread_mutex_unlock(&c.begun);
        usleep(1000);
    }
    kv8_service_stop(c.service);
    close_bench(&b);
}

static void what_a_service_does_not_take_is_refused_by_name(void **state) {
    (void)state;
    hall h = open_hall(64, 2);
    ticket t;
    kv8_request request = request_of(ids, 5, 5);
    request.hold = 1;
    assert_refused(try_submit(&h, request, &t), KV8_ERR_UNSUPPORTED, "hold is 1");
    request.hold = 0;
    request.parent = 3;
    assert_refused(try_submit(&h, request, &t), KV8_ERR_UNSUPPORTED, "parent 3");
    request = request_of(ids, 500, 50);
    assert_refused(try_submit(&h, request, &t), KV8_ERR_INVALID, "max_seq_len is 512");
    close_hall(&h);
    bench b = open_pool_bench(64, 2, &(kv8_engine_options)KV8_ENGINE_OPTIONS_INIT);
    kv8_service *service = NULL;
    kv8_service_options options = KV8_SERVICE_OPTIONS_INIT;
    assert_refused(kv8_service_start(&service, b.engine, &options), KV8_ERR_INVALID, "on_event");
    options.on_event = take_event;
    request = request_of(ids, 5, 5);
    uint64_t id = 0;
    assert_ok(kv8_engine_submit(b.engine, &request, &id));
    assert_refused(kv8_service_start(&service, b.engine, &options), KV8_ERR_INVALID,
                   "has 1 requests already");
    assert_ok(kv8_engine_cancel(b.engine, id));
    int64_t failures = 0;
    for (kv8_status status = KV8_ERR_NO_MEMORY; status != KV8_OK; failures++) {
        failing_heap heap = {.fail_at = failures};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        options.allocator = &allocator;
        status = kv8_service_start(&service, b.engine, &options);
        if (status != KV8_OK) assert_int_equal(status, KV8_ERR_NO_MEMORY);
        assert_true((status == KV8_OK) == (service != NULL));
        kv8_service_stop(service);
        assert_int_equal(heap.live, 0);
    }
    assert_int_equal(failures, 4);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(many_at_once_equal_each_alone, drop_stub),
        cmocka_unit_test_teardown(callers_at_random_get_one_end_each, drop_stub),
        cmocka_unit_test_teardown(figures_wait_for_no_step, drop_stub),
        cmocka_unit_test_teardown(a_full_line_refuses_and_stop_ends_everybody, drop_stub),
        cmocka_unit_test_teardown(a_step_that_fails_ends_its_requests_by_name, drop_stub),
        cmocka_unit_test_teardown(events_may_submit_and_look, drop_stub),
        cmocka_unit_test_teardown(what_a_service_does_not_take_is_refused_by_name, drop_stub),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
