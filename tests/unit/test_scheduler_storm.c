/* test_scheduler_storm.c - a million requests through the scheduler, of which none is lost, mixed
 * up, left waiting or short of its tokens.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "scheduler_world.h"

typedef struct client {
    kv8_request_id request;
    bool alive, begun;
    int32_t prompt_len, limit;
    int32_t priority; /* -1, 0 or 1 */
    uint64_t arrived, serial;
    int32_t text[MAX_LEN + 1];
} client;

enum { CLIENTS = 256, TEMPLATES = 20, SYSTEM = 96 };

typedef struct storm {
    world w;
    client clients[CLIENTS];
    int32_t system[TEMPLATES][SYSTEM];
    uint64_t latest_begun[3]; /* serial of the last that began, by priority + 1 */
    uint64_t now, submitted, ended, cancelled, expired, refused, abandoned, longest_stay;
} storm;

static void arrive(storm *s) {
    client *c = NULL;
    for (int i = 0; i < CLIENTS && c == NULL; i++)
        if (!s->clients[i].alive) c = &s->clients[i];
    if (c == NULL) return;
    world *const w = &s->w;
    int32_t *const prompt = c->text;
    const int32_t shared = draw(w, 3) == 0 ? 0 : (int32_t)draw(w, SYSTEM) + 1;
    memcpy(prompt, s->system[draw(w, TEMPLATES)], (size_t)shared * sizeof prompt[0]);
    int32_t length = shared;
    for (int32_t own = (int32_t)draw(w, draw(w, 50) == 0 ? 300 : 24) + 1; own > 0; own--)
        prompt[length++] = (int32_t)draw(w, 50000);
    const int32_t priority = (int32_t)draw(w, 3) - 1;
    const kv8_arrival arrival = {.tokens = prompt,
                                 .prompt_len = length,
                                 .max_new_tokens = (int32_t)draw(w, 60) + 1,
                                 .priority = priority,
                                 .salt = draw(w, 2),
                                 .deadline_ns = draw(w, 8) == 0 ? s->now + draw(w, 400) : 0,
                                 .owner = c};
    kv8_request_id request;
    const kv8_status status = kv8_scheduler_submit(w->scheduler, &arrival, s->now, &request);
    s->submitted++;
    if (status == KV8_ERR_FULL) {
        s->refused++;
        return;
    }
    assert_ok(status);
    c->request = request;
    c->alive = true;
    c->begun = false;
    c->prompt_len = length;
    c->limit = length + arrival.max_new_tokens;
    c->priority = priority;
    c->arrived = s->now;
    c->serial = s->submitted;
}

/* Within a priority, requests begin in the order in which they came. */
static void check_order(storm *s, const kv8_schedule *schedule) {
    for (int32_t i = 0; i < schedule->num_rows; i++) {
        client *const c = schedule->rows[i].owner;
        if (c->begun) continue;
        c->begun = true;
        assert_true(c->serial > s->latest_begun[c->priority + 1]);
        s->latest_begun[c->priority + 1] = c->serial;
    }
}

/* The client is gone, however it ended. */
static void forget(storm *s, client *c) {
    if (s->now - c->arrived > s->longest_stay) s->longest_stay = s->now - c->arrived;
    c->alive = false;
}

/* Ends requests that have all their tokens, checking every one of them; drops some at random. */
static void leave(storm *s, const kv8_schedule *schedule) {
    world *const w = &s->w;
    for (int32_t i = 0; i < schedule->num_expired; i++) {
        client *const c = schedule->expired[i];
        assert_true(c->alive);
        forget(s, c);
        s->expired++;
    }
    for (int32_t i = 0; i < schedule->num_rows; i++) {
        if (!schedule->rows[i].samples) continue;
        client *const c = schedule->rows[i].owner;
        int32_t num = 0;
        const int32_t *const tokens = kv8_scheduler_tokens(w->scheduler, c->request, &num);
        assert_non_null(tokens);
        assert_true(num <= c->limit);
        if (num < c->limit) continue;
        for (int32_t t = c->prompt_len; t < num; t++)
            assert_int_equal(tokens[t], next_token(tokens, t));
        assert_ok(kv8_scheduler_end(w->scheduler, c->request));
        forget(s, c);
        s->ended++;
    }
    if (draw(w, 20) == 0) {
        client *const c = &s->clients[draw(w, CLIENTS)];
        if (!c->alive) return;
        assert_ok(kv8_scheduler_end(w->scheduler, c->request));
        forget(s, c);
        s->cancelled++;
    }
}

static void a_million_requests_each_end_once_with_their_own_tokens(void **state) {
    (void)state;
    const uint64_t total = test_is_short() ? 20000 : 1000000;
    const kv8_scheduler_options options = {.max_running = 32,
                                           .max_waiting = 160,
                                           .max_step_tokens = 256,
                                           .max_step_logits = 256,
                                           .share_prefixes = true,
                                           .patience_ns = 100};
    storm *const s = calloc(1, sizeof *s);
    assert_non_null(s);
    open_world(&s->w, 128, &options);
    for (int t = 0; t < TEMPLATES; t++)
        for (int i = 0; i < SYSTEM; i++) s->system[t][i] = 60000 + 1000 * t + i;
    kv8_schedule schedule = {.num_rows = 0};
    bool idle = false;
    while (s->submitted < total || !idle) {
        s->now++;
        const bool burst = draw(&s->w, 40) == 0;
        for (uint32_t n = burst ? draw(&s->w, 60) : draw(&s->w, 3); n > 0; n--)
            if (s->submitted < total) arrive(s);
        if (draw(&s->w, 500) == 0) { /* the model failed */
            assert_ok(kv8_scheduler_plan(s->w.scheduler, s->now, &schedule));
            check_order(s, &schedule);
            schedule.num_rows = 0;
            kv8_scheduler_abandon(s->w.scheduler);
            s->abandoned++;
        } else {
            step(&s->w, s->now, &schedule);
            check_order(s, &schedule);
        }
        leave(s, &schedule);
        kv8_scheduler_stats stats;
        kv8_scheduler_get_stats(s->w.scheduler, &stats);
        idle = stats.num_running == 0 && stats.num_waiting == 0;
    }
    kv8_scheduler_stats stats;
    kv8_scheduler_get_stats(s->w.scheduler, &stats);
    print_message(
        "%llu requests in %llu steps: %llu ended, %llu cancelled, %llu expired, %llu "
        "refused; %llu preemptions; longest stay %llu steps\n",
        (unsigned long long)s->submitted, (unsigned long long)s->now, (unsigned long long)s->ended,
        (unsigned long long)s->cancelled, (unsigned long long)s->expired,
        (unsigned long long)s->refused, (unsigned long long)stats.num_preemptions,
        (unsigned long long)s->longest_stay);
    assert_int_equal(s->submitted, s->ended + s->cancelled + s->expired + s->refused);
    /* Nobody is left waiting: ahead are 160 at most and, of a higher priority, those that come
     * within 200 steps, some 350; 32 run at once and take 60 steps at most. */
    assert_true(s->longest_stay <= (160 + 350) * 60 / 32 + 60);
    /* Nothing of this was idle talk: */
    assert_true(s->ended > total / 4 && s->cancelled > 0 && s->expired > 0 && s->refused > 0);
    assert_true(stats.num_preemptions > total / 1000 && s->abandoned > 0);
    assert_true(stats.prefix_hits > stats.prefix_queries / 10);
    close_world(&s->w);
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_million_requests_each_end_once_with_their_own_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
