/* test_scheduler.c - the scheduler's decisions one by one: its order, its budgets, who makes room,
 * who rests and whose pages are found.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "scheduler_world.h"

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

/* What those just admitted will still take is kept for them as well: of 3 free pages one request
 * takes 1 and will take 2 more, so that another waits until it has ended. */
static void those_just_admitted_still_grow(void **state) {
    (void)state;
    static const int32_t resting[] = {512, 512, 512, 448};
    world w;
    kv8_scheduler_options options = small;
    options.max_running = 8;
    options.max_step_tokens = options.max_step_logits = 512;
    open_world(&w, 128, &options);
    kv8_schedule schedule;
    kv8_request_id rests[4];
    for (int i = 0; i < 4; i++) {
        rests[i] = submit(&w, resting[i], 1, 0, 0);
        step(&w, 0, &schedule);
        kv8_scheduler_rest(w.scheduler, rests[i]);
    }
    const kv8_request_id small_one = submit(&w, 1, 14, 0, 0);
    step(&w, 0, &schedule);
    assert_int_equal(kv8_pages_num_free(w.pages, 0), 3);
    const kv8_request_id a = submit(&w, 16, 33, 0, 1), b = submit(&w, 16, 33, 0, 2);
    const kv8_request_id order[] = {a, b};
    for (int i = 0; i < 2; i++) {
        step(&w, 3, &schedule);
        assert_int_equal(schedule.num_rows, 2);
        assert_int_equal(schedule.rows[0].request, small_one);
        assert_int_equal(schedule.rows[1].request, order[i]);
        assert_ok(kv8_scheduler_end(w.scheduler, order[i]));
    }
    assert_ok(kv8_scheduler_end(w.scheduler, small_one));
    for (int i = 0; i < 4; i++) assert_ok(kv8_scheduler_end(w.scheduler, rests[i]));
    close_world(&w);
}

/* --- chunks, rows of logits, rest --- */

static kv8_request_id submit_arrival(world *w, const kv8_arrival *arrival) {
    kv8_request_id request;
    assert_ok(kv8_scheduler_check(w->scheduler, arrival));
    assert_ok(kv8_scheduler_submit(w->scheduler, arrival, 0, &request));
    return request;
}

static void chunks_and_rows_of_logits_have_their_bounds(void **state) {
    (void)state;
    world w;
    kv8_scheduler_options options = small;
    options.max_step_logits = 4;
    open_world(&w, 64, &options);
    kv8_schedule schedule;
    const kv8_request_id decoding = submit(&w, 1, 30, 0, 0);
    step(&w, 0, &schedule);
    const kv8_arrival seen = {.tokens = text_of(&w, 0, 1, 8), .prompt_len = 8, .all_logits = true};
    const kv8_arrival slow = {
        .tokens = text_of(&w, 50, 1, 6), .prompt_len = 6, .max_new_tokens = 2, .max_chunk = 3};
    const kv8_request_id a = submit_arrival(&w, &seen), b = submit_arrival(&w, &slow);
    /* The last token of `slow` waits for a row of logits, and is then a decode row. */
    static const struct {
        int32_t seen, slow, seen_logits, slow_logits;
    } wanted[3] = {{3, 3, 3, 0}, {3, 2, 3, 0}, {2, 1, 2, 1}};
    for (int i = 0; i < 3; i++) {
        step(&w, 0, &schedule);
        assert_int_equal(schedule.num_rows, 3);
        const kv8_scheduled_row *const of_seen = &schedule.rows[i < 2 ? 1 : 2];
        const kv8_scheduled_row *const of_slow = &schedule.rows[i < 2 ? 2 : 1];
        assert_int_equal(schedule.rows[0].request, decoding);
        assert_int_equal(schedule.rows[0].num_logits, 1);
        assert_int_equal(of_seen->request, a);
        assert_int_equal(of_slow->request, b);
        assert_int_equal(of_seen->num_tokens, wanted[i].seen);
        assert_int_equal(of_slow->num_tokens, wanted[i].slow);
        assert_int_equal(of_seen->num_logits, wanted[i].seen_logits);
        assert_int_equal(of_slow->num_logits, wanted[i].slow_logits);
        assert_false(of_seen->samples); /* it has no new tokens */
        assert_int_equal(of_slow->samples, i == 2);
    }
    close_world(&w);
}

/* Of tokens that were computed before a preemption no logits are wanted again. */
static void rows_of_logits_come_once(void **state) {
    (void)state;
    world w;
    open_world(&w, 6, &small);
    kv8_schedule schedule;
    const kv8_request_id first = submit(&w, 16, 60, 0, 0);
    const kv8_arrival seen = {.tokens = text_of(&w, 0, 1, 30),
                              .prompt_len = 30,
                              .max_new_tokens = 20,
                              .all_logits = true};
    const kv8_request_id a = submit_arrival(&w, &seen);
    int32_t num_logits = 0, num = 0;
    kv8_scheduler_stats stats;
    for (int i = 0; i < 200 && num < 50; i++) {
        step(&w, 0, &schedule);
        for (int32_t k = 0; k < schedule.num_rows; k++)
            if (schedule.rows[k].request == a) num_logits += schedule.rows[k].num_logits;
        kv8_scheduler_tokens(w.scheduler, first, &num);
        if (num == 76) assert_ok(kv8_scheduler_end(w.scheduler, first));
        kv8_scheduler_tokens(w.scheduler, a, &num);
    }
    kv8_scheduler_get_stats(w.scheduler, &stats);
    assert_true(stats.num_preemptions > 0);
    assert_int_equal(num_logits, 49);
    close_world(&w);
}

/* Parents are forked while they rest; what they hold is nobody's to take. */
static void children_begin_where_their_parent_rests(void **state) {
    (void)state;
    world w;
    open_world(&w, 8, &small);
    kv8_schedule schedule;
    kv8_arrival stem = {.tokens = text_of(&w, 0, 1, 40), .prompt_len = 40};
    const kv8_request_id parent = submit_arrival(&w, &stem);
    for (int i = 0; i < 2; i++) step(&w, 0, &schedule);
    kv8_scheduler_rest(w.scheduler, parent);
    kv8_arrival child = {
        .tokens = text_of(&w, 0, 1, 45), .prompt_len = 45, .max_new_tokens = 3, .parent = parent};
    const kv8_request_id a = submit_arrival(&w, &child);
    step(&w, 0, &schedule);
    assert_int_equal(schedule.rows[0].request, a);
    assert_int_equal(schedule.rows[0].first, 40);
    assert_int_equal(schedule.rows[0].num_cached, 40);
    assert_int_equal(schedule.rows[0].num_tokens, 5);
    assert_ok(kv8_scheduler_end(w.scheduler, a));
    const kv8_request_id big = submit(&w, 100, 1, 0, 0); /* seven pages of eight; three are held */
    for (int i = 0; i < 2; i++) step(&w, 0, &schedule);
    assert_refused(kv8_scheduler_plan(w.scheduler, 0, &schedule), KV8_ERR_FULL,
                   "1 requests, and 1 at rest: extend: 32 tokens need 2 pages");
    assert_int_equal(schedule.num_rows, 0);
    child.tokens = text_of(&w, 0, 1, 45);
    const kv8_request_id orphan = submit_arrival(&w, &child);
    assert_ok(kv8_scheduler_end(w.scheduler, parent));
    for (int i = 0; i < 2; i++) step(&w, 0, &schedule);
    assert_ok(kv8_scheduler_end(w.scheduler, big));
    for (int i = 0; i < 2; i++) step(&w, 0, &schedule);
    assert_int_equal(schedule.rows[0].request, orphan);
    assert_int_equal(schedule.rows[0].first, 32); /* read anew, in steps of 32 */
    close_world(&w);
}

/* Pages that decode has filled are there for whoever is admitted next: of one that runs on, of one
 * that has ended and of one that rests. */
static void pages_filled_token_by_token_are_found(void **state) {
    (void)state;
    kv8_scheduler_options options = small;
    options.share_prefixes = true;
    for (int kind = 0; kind < 3; kind++) {
        world w;
        open_world(&w, 64, &options);
        int32_t *const text = text_of(&w, 0, 1, 30);
        const kv8_arrival first = {.tokens = text, .prompt_len = 30, .max_new_tokens = 60};
        kv8_schedule schedule;
        const kv8_request_id request = submit_arrival(&w, &first);
        for (int i = 0; i < 20; i++) step(&w, 0, &schedule); /* 49 tokens are computed */
        if (kind == 1) assert_ok(kv8_scheduler_end(w.scheduler, request));
        if (kind == 2) kv8_scheduler_rest(w.scheduler, request);
        const kv8_arrival second = {.tokens = text_of(&w, 0, 1, 30), .prompt_len = 50};
        memcpy(second.tokens, text, 50 * sizeof *text);
        submit_arrival(&w, &second);
        step(&w, 0, &schedule);
        assert_int_equal(schedule.rows[schedule.num_rows - 1].num_cached, 48);
        close_world(&w);
    }
}

static void pages_of_a_row_that_failed_are_not_found(void **state) {
    (void)state;
    world w;
    kv8_scheduler_options options = small;
    options.share_prefixes = true;
    open_world(&w, 64, &options);
    static const int32_t failed[] = {KV8_ROW_FAILED};
    kv8_schedule schedule;
    for (int i = 0; i < 3; i++) {
        const kv8_arrival arrival = {
            .tokens = text_of(&w, 0, 1, 30), .prompt_len = 30, .max_new_tokens = 2};
        const kv8_request_id request = submit_arrival(&w, &arrival);
        if (i == 0) {
            assert_ok(kv8_scheduler_plan(w.scheduler, 0, &schedule));
            kv8_scheduler_commit(w.scheduler, failed);
        } else {
            step(&w, 0, &schedule);
        }
        assert_int_equal(schedule.rows[0].num_cached, i == 2 ? 16 : 0);
        assert_ok(kv8_scheduler_end(w.scheduler, request));
    }
    close_world(&w);
}

/* Rows of one token filled a page, and the row after them fails. */
static void pages_of_rows_before_the_one_that_failed_are_found(void **state) {
    (void)state;
    world w;
    kv8_scheduler_options options = small;
    options.share_prefixes = true;
    open_world(&w, 64, &options);
    static const int32_t computed[] = {1, -1}, failed[] = {2, KV8_ROW_FAILED};
    kv8_schedule schedule;
    const kv8_arrival long_one = {.tokens = text_of(&w, 0, 1, 16 * 31),
                                  .prompt_len = 16 * 31,
                                  .max_chunk = 31, /* of a step's 32 */
                                  .max_new_tokens = 9};
    (void)submit_arrival(&w, &long_one);
    kv8_arrival arrival = {.tokens = text_of(&w, 500, 1, 40), .prompt_len = 40};
    const kv8_request_id request = submit_arrival(&w, &arrival);
    for (int i = 0; i < PAGE; i++) {
        assert_ok(kv8_scheduler_plan(w.scheduler, 0, &schedule));
        assert_int_equal(schedule.rows[1].num_tokens, 1);
        kv8_scheduler_commit(w.scheduler, computed);
    }
    assert_ok(kv8_scheduler_plan(w.scheduler, 0, &schedule));
    assert_int_equal(schedule.rows[1].num_tokens, 40 - PAGE);
    kv8_scheduler_commit(w.scheduler, failed);
    assert_ok(kv8_scheduler_end(w.scheduler, request));
    arrival.tokens = text_of(&w, 500, 1, 40);
    (void)submit_arrival(&w, &arrival);
    assert_ok(kv8_scheduler_plan(w.scheduler, 0, &schedule));
    assert_int_equal(schedule.rows[1].num_cached, PAGE);
    close_world(&w);
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
        cmocka_unit_test(those_just_admitted_still_grow),
        cmocka_unit_test(chunks_and_rows_of_logits_have_their_bounds),
        cmocka_unit_test(rows_of_logits_come_once),
        cmocka_unit_test(children_begin_where_their_parent_rests),
        cmocka_unit_test(pages_filled_token_by_token_are_found),
        cmocka_unit_test(pages_of_a_row_that_failed_are_not_found),
        cmocka_unit_test(pages_of_rows_before_the_one_that_failed_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
