/* test_scheduler.c - the scheduler against a stub of a model, a shadow of every page's bytes and a
 * simulated clock: its order, its budget, and a million requests of which none is lost, mixed up,
 * left waiting or short of its tokens.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "scheduler.h"

#include "testing.h"

enum { PAGE = 16, WINDOW = 24, SLACK = 64, MAX_LEN = 512, GROUPS = 2 };

/* --- a pool whose pages hold the tokens that were written there --- */

typedef struct world {
    kv8_pages *pages;
    kv8_scheduler *scheduler;
    int32_t num_pages;
    int32_t *bytes[GROUPS];         /* [num_pages, PAGE] tokens: what K and V would be made of */
    int32_t texts[16][MAX_LEN + 1]; /* of requests that no client keeps */
    int32_t num_texts;
    uint64_t random;
} world;

static kv8_status copy_page(void *cookie, int32_t group, int32_t to, int32_t from) {
    world *const w = cookie;
    memcpy(w->bytes[group] + to * PAGE, w->bytes[group] + from * PAGE, PAGE * sizeof(int32_t));
    return KV8_OK;
}

static uint32_t draw(world *w, uint32_t below) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % below);
}

static void open_world(world *w, int32_t num_pages, const kv8_scheduler_options *wanted) {
    *w = (world){.num_pages = num_pages, .random = 7};
    const kv8_page_group_options groups[GROUPS] = {{-1, num_pages, 0}, {WINDOW, num_pages, 1}};
    const kv8_pages_options options = {.page_size = PAGE,
                                       .max_seqs = wanted->max_running + 1,
                                       .max_seq_len = MAX_LEN,
                                       .window_slack = SLACK,
                                       .num_groups = GROUPS,
                                       .groups = groups,
                                       .copy_page = copy_page,
                                       .cookie = w};
    assert_ok(kv8_pages_create(&w->pages, &options));
    for (int g = 0; g < GROUPS; g++) {
        w->bytes[g] = calloc((size_t)num_pages * PAGE, sizeof(int32_t));
        assert_non_null(w->bytes[g]);
    }
    kv8_scheduler_options o = *wanted;
    o.pages = w->pages;
    assert_ok(kv8_scheduler_create(&w->scheduler, &o));
}
static void close_world(world *w) {
    kv8_scheduler_destroy(w->scheduler);
    for (int g = 0; g < GROUPS; g++) {
        assert_int_equal(kv8_pages_num_free(w->pages, g), w->num_pages);
        free(w->bytes[g]);
    }
    assert_int_equal(kv8_pages_num_seqs(w->pages), 0);
    kv8_pages_destroy(w->pages);
}

/* The stub's step: writes the row's tokens where its K and V would go, in pages that nobody else
 * holds. */
static void write_row(world *w, const kv8_scheduled_row *row) {
    int32_t idx;
    assert_ok(kv8_pages_find(w->pages, row->seq, &idx));
    assert_int_equal(kv8_pages_length(w->pages, idx), row->first + row->num_tokens);
    for (int32_t g = 0; g < GROUPS; g++) {
        assert_ok(kv8_pages_check_writable(w->pages, idx, g, row->num_tokens));
        const int32_t *const list = kv8_pages_list(w->pages, idx, g);
        for (int32_t t = row->first; t < row->first + row->num_tokens; t++)
            w->bytes[g][list[t / PAGE] * PAGE + t % PAGE] = row->token_ids[t - row->first];
    }
}
/* What the row's last query sees is the request's own text. */
static void check_seen(world *w, const kv8_scheduled_row *row, const int32_t *tokens) {
    int32_t idx;
    assert_ok(kv8_pages_find(w->pages, row->seq, &idx));
    const int32_t length = row->first + row->num_tokens;
    for (int32_t g = 0; g < GROUPS; g++) {
        const int32_t *const list = kv8_pages_list(w->pages, idx, g);
        const int32_t from = g == 0 || length - 1 < WINDOW ? 0 : length - 1 - WINDOW;
        for (int32_t t = from; t < length; t++)
            assert_int_equal(w->bytes[g][list[t / PAGE] * PAGE + t % PAGE], tokens[t]);
    }
}
/* The token that the stub chooses after `length` tokens of a text. */
static int32_t next_token(const int32_t *tokens, int32_t length) {
    uint32_t x = 2166136261u;
    for (int32_t t = length < 8 ? 0 : length - 8; t < length; t++)
        x = (x ^ (uint32_t)tokens[t]) * 16777619u;
    return (int32_t)((x ^ (uint32_t)length) % 50000);
}

/* Plans, runs and commits one step; schedule_out's rows stay readable. */
static void step(world *w, uint64_t now, kv8_schedule *schedule_out) {
    static int32_t chosen[4096];
    assert_ok(kv8_scheduler_plan(w->scheduler, now, schedule_out));
    for (int32_t i = 0; i < schedule_out->num_rows; i++) {
        const kv8_scheduled_row *const row = &schedule_out->rows[i];
        int32_t num = 0;
        const int32_t *const tokens = kv8_scheduler_tokens(w->scheduler, row->request, &num);
        write_row(w, row);
        if (row->samples) check_seen(w, row, tokens);
        chosen[i] = row->samples ? next_token(tokens, num) : -1;
    }
    assert_ok(kv8_scheduler_commit(w->scheduler, chosen));
}

/* A request's own memory of text that begins with first, first + stride, .. */
static int32_t *text_of(world *w, int32_t first, int32_t stride, int32_t prompt_len) {
    assert_true(w->num_texts < 16);
    int32_t *const text = w->texts[w->num_texts++];
    for (int32_t i = 0; i < prompt_len; i++) text[i] = first + stride * i;
    return text;
}

static kv8_request_id submit(world *w, int32_t prompt_len, int32_t max_new, int32_t priority,
                             uint64_t now) {
    static int32_t first = 0;
    first += 1000;
    const kv8_arrival arrival = {.tokens = text_of(w, first, 1, prompt_len),
                                 .prompt_len = prompt_len,
                                 .max_new_tokens = max_new,
                                 .priority = priority};
    kv8_request_id request;
    assert_ok(kv8_scheduler_submit(w->scheduler, &arrival, now, &request));
    return request;
}

static const kv8_scheduler_options small = {.max_running = 4,
                                            .max_waiting = 8,
                                            .max_step_tokens = 32,
                                            .max_step_logits = 32,
                                            .patience_ns = 1000};

/* --- order and budget --- */

static void the_first_to_come_goes_first_within_a_priority(void **state) {
    (void)state;
    world w;
    kv8_scheduler_options options = small;
    options.max_running = 1;
    open_world(&w, 64, &options);
    /* Arrivals at 0, 10, 20 and 30; priority 1 is worth 1000 of waiting. */
    const kv8_request_id a = submit(&w, 8, 1, 0, 0), b = submit(&w, 8, 1, 1, 10),
                         c = submit(&w, 8, 1, 0, 20), d = submit(&w, 8, 1, -1, 30),
                         late = submit(&w, 8, 1, 0, 1011);
    const kv8_request_id order[] = {d, a, c, b, late};
    for (int i = 0; i < 5; i++) {
        kv8_schedule schedule;
        step(&w, 2000, &schedule);
        assert_int_equal(schedule.num_rows, 1);
        assert_int_equal(schedule.rows[0].request, order[i]);
        assert_ok(kv8_scheduler_end(w.scheduler, order[i]));
    }
    close_world(&w);
}

static void decode_rows_enter_before_chunks(void **state) {
    (void)state;
    world w;
    open_world(&w, 64, &small);
    const kv8_request_id a = submit(&w, 8, 20, 0, 0), b = submit(&w, 3, 20, 0, 1);
    kv8_schedule schedule;
    step(&w, 2, &schedule);
    assert_int_equal(schedule.num_tokens, 11);
    const kv8_request_id big = submit(&w, 100, 4, -5, 3); /* before both in the order */
    int32_t done = 0;
    for (int i = 0; i < 4; i++) {
        step(&w, 4, &schedule);
        assert_int_equal(schedule.num_rows, 3);
        assert_true(schedule.num_tokens <= small.max_step_tokens);
        assert_int_equal(schedule.rows[0].request, a);
        assert_int_equal(schedule.rows[0].num_tokens, 1);
        assert_int_equal(schedule.rows[1].request, b);
        assert_int_equal(schedule.rows[2].request, big);
        assert_int_equal(schedule.rows[2].first, done);
        done += schedule.rows[2].num_tokens;
        assert_int_equal(schedule.rows[2].samples, done == 100);
    }
    assert_int_equal(done, 100); /* 30 + 30 + 30 + 10 */
    assert_ok(kv8_scheduler_end(w.scheduler, b));
    close_world(&w);
}

static void a_prompt_seen_before_is_taken_from_the_cache(void **state) {
    (void)state;
    world w;
    kv8_scheduler_options options = small;
    options.share_prefixes = true;
    open_world(&w, 64, &options);
    kv8_arrival arrival = {.tokens = text_of(&w, 0, 9, 40), .prompt_len = 40, .max_new_tokens = 2};
    kv8_request_id request;
    kv8_schedule schedule;
    assert_ok(kv8_scheduler_submit(w.scheduler, &arrival, 0, &request));
    step(&w, 0, &schedule);
    step(&w, 0, &schedule);
    assert_ok(kv8_scheduler_end(w.scheduler, request));
    static const struct {
        bool whole;
        uint64_t salt;
        int32_t cached;
    } cases[] = {{false, 0, 32}, {true, 0, 0}, {false, 5, 0}, {false, 5, 32}, {false, 0, 32}};
    for (int i = 0; i < 5; i++) { /* a step computes two pages */
        arrival.tokens = text_of(&w, 0, 9, 40);
        arrival.all_logits = cases[i].whole, arrival.salt = cases[i].salt;
        assert_ok(kv8_scheduler_submit(w.scheduler, &arrival, 0, &request));
        step(&w, 0, &schedule);
        assert_int_equal(schedule.rows[0].num_cached, cases[i].cached);
        assert_int_equal(schedule.rows[0].num_tokens, cases[i].cached == 0 ? 32 : 8);
        assert_ok(kv8_scheduler_end(w.scheduler, request));
    }
    kv8_scheduler_stats stats;
    kv8_scheduler_get_stats(w.scheduler, &stats);
    assert_int_equal(stats.prefix_queries, 240);
    assert_int_equal(stats.prefix_hits, 96);
    close_world(&w);
}

/* --- limits --- */

static void what_can_never_run_is_refused(void **state) {
    (void)state;
    world w;
    open_world(&w, 8, &small);
    kv8_arrival arrival = {
        .tokens = text_of(&w, 0, 1, 100), .prompt_len = 100, .max_new_tokens = 30};
    assert_refused(kv8_scheduler_check(w.scheduler, &arrival), KV8_ERR_INVALID,
                   "a request of 129 tokens needs 9 pages of 16 tokens, the pool has 8");
    arrival.max_new_tokens = 29; /* the last of which is never stored */
    assert_ok(kv8_scheduler_check(w.scheduler, &arrival));
    arrival.max_new_tokens = 0;
    assert_ok(kv8_scheduler_check(w.scheduler, &arrival));
    arrival.max_new_tokens = -1;
    assert_refused(kv8_scheduler_check(w.scheduler, &arrival), KV8_ERR_INVALID,
                   "max_new_tokens is -1");
    arrival.max_new_tokens = INT32_MAX;
    assert_refused(kv8_scheduler_check(w.scheduler, &arrival), KV8_ERR_INVALID,
                   "more than the 512 tokens of a sequence");
    arrival.prompt_len = 0;
    assert_refused(kv8_scheduler_check(w.scheduler, &arrival), KV8_ERR_INVALID,
                   "the prompt is empty");
    close_world(&w);
}

static void a_full_queue_refuses_and_a_deadline_ends_waiting(void **state) {
    (void)state;
    world w;
    kv8_scheduler_options options = small;
    options.max_running = 1, options.max_waiting = 2;
    open_world(&w, 64, &options);
    kv8_schedule schedule;
    submit(&w, 4, 20, 0, 0);
    step(&w, 0, &schedule);
    int owner = 0;
    kv8_arrival arrival = {.tokens = text_of(&w, 1, 1, 3), /* of all three: none is computed */
                           .prompt_len = 3,
                           .max_new_tokens = 1,
                           .deadline_ns = 50,
                           .owner = &owner};
    kv8_request_id request, expired;
    assert_ok(kv8_scheduler_submit(w.scheduler, &arrival, 1, &expired));
    arrival.deadline_ns = 0;
    assert_ok(kv8_scheduler_submit(w.scheduler, &arrival, 1, &request));
    assert_refused(kv8_scheduler_submit(w.scheduler, &arrival, 1, &request), KV8_ERR_FULL,
                   "2 requests wait, the limit of the queue is 2");
    step(&w, 49, &schedule);
    assert_int_equal(schedule.num_expired, 0);
    step(&w, 50, &schedule);
    assert_int_equal(schedule.num_expired, 1);
    assert_ptr_equal(schedule.expired[0], &owner);
    assert_refused(kv8_scheduler_end(w.scheduler, expired), KV8_ERR_NOT_FOUND, "gone");
    assert_ok(kv8_scheduler_submit(w.scheduler, &arrival, 51, &request));
    close_world(&w);
}

static void a_step_that_was_not_computed_leaves_everything_as_it_was(void **state) {
    (void)state;
    world w;
    open_world(&w, 64, &small);
    const kv8_request_id a = submit(&w, 40, 20, 0, 0);
    kv8_schedule schedule;
    for (int i = 0; i < 3; i++) { /* a chunk, the rest, a decode row: each refused once */
        assert_ok(kv8_scheduler_plan(w.scheduler, 0, &schedule));
        const kv8_scheduled_row first = schedule.rows[0];
        kv8_scheduler_abandon(w.scheduler);
        step(&w, 0, &schedule);
        assert_int_equal(schedule.rows[0].first, first.first);
        assert_int_equal(schedule.rows[0].num_tokens, first.num_tokens);
    }
    int32_t num = 0;
    const int32_t *const tokens = kv8_scheduler_tokens(w.scheduler, a, &num);
    assert_int_equal(num, 42);
    assert_int_equal(tokens[41], next_token(tokens, 41));
    close_world(&w);
}

static void the_last_of_the_order_makes_room(void **state) {
    (void)state;
    world w;
    open_world(&w, 6, &small); /* 96 tokens */
    const kv8_request_id a = submit(&w, 16, 60, 0, 0), b = submit(&w, 16, 60, 0, 1);
    kv8_schedule schedule;
    kv8_scheduler_stats stats;
    int32_t num_a = 0, num_b = 0;
    do {
        step(&w, 2, &schedule);
        kv8_scheduler_get_stats(w.scheduler, &stats);
        kv8_scheduler_tokens(w.scheduler, a, &num_a);
    } while (num_a < 76);
    assert_true(stats.num_preemptions > 0);
    kv8_scheduler_tokens(w.scheduler, b, &num_b);
    assert_true(num_b > 16 && num_b < 76); /* kept what it had chosen */
    assert_ok(kv8_scheduler_end(w.scheduler, a));
    for (const int32_t *tokens = NULL; num_b < 76;) {
        step(&w, 2, &schedule);
        assert_int_equal(schedule.rows[0].request, b);
        tokens = kv8_scheduler_tokens(w.scheduler, b, &num_b);
        assert_int_equal(tokens[num_b - 1], next_token(tokens, num_b - 1));
    }
    close_world(&w);
}

/* --- a million requests --- */

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
    uint64_t now, submitted, ended, cancelled, expired, refused, abandoned, longest_wait;
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

/* Ends requests that have all their tokens, checking every one of them; drops some at random. */
static void leave(storm *s, const kv8_schedule *schedule) {
    world *const w = &s->w;
    for (int32_t i = 0; i < schedule->num_expired; i++) {
        client *const c = schedule->expired[i];
        assert_true(c->alive);
        c->alive = false;
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
        if (s->now - c->arrived > s->longest_wait) s->longest_wait = s->now - c->arrived;
        assert_ok(kv8_scheduler_end(w->scheduler, c->request));
        c->alive = false;
        s->ended++;
    }
    if (draw(w, 20) == 0) {
        client *const c = &s->clients[draw(w, CLIENTS)];
        if (!c->alive) return;
        assert_ok(kv8_scheduler_end(w->scheduler, c->request));
        c->alive = false;
        s->cancelled++;
    }
}

static void a_million_requests_each_end_once_with_their_own_tokens(void **state) {
    (void)state;
    const uint64_t total = getenv("KV8_TEST_SHORT") != NULL ? 20000 : 1000000;
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
        (unsigned long long)s->longest_wait);
    assert_int_equal(s->submitted, s->ended + s->cancelled + s->expired + s->refused);
    /* Nothing of this was idle talk: */
    assert_true(s->ended > total / 4 && s->cancelled > 0 && s->expired > 0 && s->refused > 0);
    assert_true(stats.num_preemptions > total / 1000 && s->abandoned > 0);
    assert_true(stats.prefix_hits > stats.prefix_queries / 10);
    close_world(&s->w);
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_to_come_goes_first_within_a_priority),
        cmocka_unit_test(decode_rows_enter_before_chunks),
        cmocka_unit_test(a_prompt_seen_before_is_taken_from_the_cache),
        cmocka_unit_test(what_can_never_run_is_refused),
        cmocka_unit_test(a_full_queue_refuses_and_a_deadline_ends_waiting),
        cmocka_unit_test(a_step_that_was_not_computed_leaves_everything_as_it_was),
        cmocka_unit_test(the_last_of_the_order_makes_room),
        cmocka_unit_test(a_million_requests_each_end_once_with_their_own_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
