/* test_service_ahead.c - a service whose model computes on a GPU, on the stand-in driver: events of
 * a step are told while the next is under way, and what they and their callers see is as ever.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>

#include "engine_impl.h"
#include "model_fixture.h"
#include "sampler_args.h"

enum { NEW_TOKENS = 6, MAX_EVENTS = 16 };

/* What a request's events were, and what its driver had been given when each was told. */
typedef struct witness {
    fixture f;
    kv8_engine *engine;
    kv8_service *service;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int32_t cancel_at; /* the event that cancels the request; -1 = none */
    int32_t num_events;
    int32_t tokens[MAX_EVENTS];
    int64_t num_graphs[MAX_EVENTS];
    int32_t told_at_mask[MAX_EVENTS], num_masks;
    kv8_finish finish;
    char message[256];
} witness;

static void draw_positions(const stand_in_launch *launch) {
    static int32_t num_drawn;
    if (strncmp(launch->name, "kv8_draw_", 9) != 0) return;
    const kv8_draw_args *const args = launch->args;
    for (uint32_t i = 0; i < launch->grid[0] / launch->cluster[0]; i++)
        args->drawn[i] = (kv8_drawn_row){.token = num_drawn++ % VOCAB, .bad_id = -1};
}

static void note_event(void *cookie, const kv8_event *event) {
    witness *const w = cookie;
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    pthread_mutex_lock(&w->lock);
    assert_true(w->num_events < MAX_EVENTS);
    w->tokens[w->num_events] = event->token;
    w->num_graphs[w->num_events] = stand_in_num_calls("cuGraphLaunch");
    assert_ok(kv8_service_get_stats(w->service, &stats));
    if (event->token >= 0) assert_int_equal(stats.generated_tokens, w->num_events + 1);
    if (w->num_events++ == w->cancel_at) assert_ok(kv8_service_cancel(w->service, event->request));
    w->finish = event->finish;
    if (event->message != NULL) snprintf(w->message, sizeof w->message, "%s", event->message);
    if (event->finish != KV8_FINISH_NONE) pthread_cond_signal(&w->ended);
    pthread_mutex_unlock(&w->lock);
}

static void allow_all(void *cookie, uint32_t *words) {
    witness *const w = cookie;
    pthread_mutex_lock(&w->lock);
    assert_true(w->num_masks < MAX_EVENTS);
    w->told_at_mask[w->num_masks++] = w->num_events;
    pthread_mutex_unlock(&w->lock);
    memset(words, 0xff, (VOCAB + 31) / 32 * sizeof *words);
}

static void open_witness(witness *w, int32_t cancel_at) {
    *w = (witness){.lock = PTHREAD_MUTEX_INITIALIZER,
                   .ended = PTHREAD_COND_INITIALIZER,
                   .cancel_at = cancel_at};
    open_fixture(&w->f, KV8_PATH_GRAPH);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_destroy(w->f.cache, w->f.seqs[i]));
    stand_in_on_launch(draw_positions);
    const kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    const kv8_service_options service = {
        .struct_size = sizeof service, .on_event = note_event, .cookie = w};
    assert_ok(kv8_engine_create(&w->engine, w->f.model, w->f.cache, &options));
    assert_ok(kv8_service_start(&w->service, w->engine, &service));
}

/* One request to its last event. */
static void run_request(witness *w, bool masked) {
    kv8_request request = KV8_REQUEST_INIT;
    uint64_t id = 0;
    request.token_ids = ids;
    request.num_tokens = PROMPT;
    request.max_tokens = NEW_TOKENS;
    request.ignore_eos = 1;
    request.mask = masked ? allow_all : NULL;
    request.mask_cookie = w;
    pthread_mutex_lock(&w->lock);
    assert_ok(kv8_service_submit(w->service, &request, &id));
    while (w->finish == KV8_FINISH_NONE) pthread_cond_wait(&w->ended, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static void close_witness(witness *w) {
    stand_in_fail(NULL, 0, 0);
    kv8_service_stop(w->service);
    kv8_engine_destroy(w->engine);
    close_fixture(&w->f);
}

static void events_are_told_beside_the_next_step(void **state) {
    (void)state;
    for (int masked = 0; masked < 2; masked++) {
        witness w;
        open_witness(&w, -1);
        run_request(&w, masked);
        assert_int_equal(w.finish, KV8_FINISH_LENGTH);
        assert_int_equal(w.num_events, NEW_TOKENS);
        for (int i = 0; i < NEW_TOKENS; i++) {
            assert_int_equal(w.tokens[i], (w.tokens[0] + i) % VOCAB);
            assert_int_equal(w.num_graphs[i], i + 1 < NEW_TOKENS ? i + 1 : i);
        }
        /* A mask knows every token before. */
        assert_int_equal(w.num_masks, masked ? NEW_TOKENS : 0);
        for (int i = 0; i < w.num_masks; i++) assert_int_equal(w.told_at_mask[i], i);
        close_witness(&w);
    }
}

/* The step under way has one token more, told before the end. */
static void a_cancelled_request_ends_behind_the_step(void **state) {
    (void)state;
    witness w;
    open_witness(&w, 1);
    run_request(&w, false);
    assert_int_equal(w.finish, KV8_FINISH_CANCELLED);
    assert_int_equal(w.num_events, 4);
    for (int i = 0; i < 3; i++) assert_int_equal(w.tokens[i], (w.tokens[0] + i) % VOCAB);
    assert_int_equal(w.tokens[3], -1);
    close_witness(&w);
}

/* What was drawn is told before what failed, which is a step's beginning or its end. */
static void a_step_that_fails_takes_no_event(void **state) {
    (void)state;
    static const char *const calls[] = {"cuGraphLaunch", "cuStreamSynchronize"};
    for (int i = 0; i < 2; i++) {
        witness w;
        open_witness(&w, -1);
        stand_in_fail(calls[i], 3, UNKNOWN);
        run_request(&w, false);
        assert_int_equal(w.finish, KV8_FINISH_FAILED);
        assert_true(w.num_events > 2 && w.num_events < NEW_TOKENS);
        for (int k = 0; k + 1 < w.num_events; k++)
            assert_int_equal(w.tokens[k], (w.tokens[0] + k) % VOCAB);
        assert_int_equal(w.tokens[w.num_events - 1], -1);
        assert_true(w.message[0] != 0);
        close_witness(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_are_told_beside_the_next_step),
        cmocka_unit_test(a_cancelled_request_ends_behind_the_step),
        cmocka_unit_test(a_step_that_fails_takes_no_event),
    };
    return cmocka_run_group_tests_name("service ahead", tests, make_model, drop_model);
}
