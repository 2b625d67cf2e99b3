/* test_simulate.c - the simulated server against cases that a page of paper holds, and against what
 * queueing theory says; the fit of a step's time against rows made from known terms.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/simulate.h>

#include "step_time.h"

#include "testing.h"

/* Milliseconds. */
static kv8_step_time time_of(double step, double token, double decode_key, double prefill_key) {
    return (kv8_step_time){.struct_size = sizeof(kv8_step_time),
                           .num_sizes = 2,
                           .sizes = {1, 2},
                           .ns = {(step + token) * 1e6, (step + 2 * token) * 1e6},
                           .decode_key_ns = decode_key * 1e6,
                           .prefill_key_ns = prefill_key * 1e6};
}

static kv8_simulation simulate(const kv8_step_time *time, kv8_simulation_options options) {
    kv8_simulation result = KV8_SIMULATION_INIT;
    options.struct_size = sizeof options;
    options.time = time;
    assert_ok(kv8_simulate(&options, &result));
    return result;
}

static void assert_near(double got, double wanted) {
    if (!(fabs(got - wanted) <= 1e-9 * fabs(wanted))) fail_msg("got %.12g, not %.12g", got, wanted);
}

/* --- by hand --- */

/* Eight tokens in two steps of four: 2 x 10 + 8 x 1 ms; then 11 ms a token. */
static void one_request_pays_steps_and_tokens(void **state) {
    (void)state;
    const kv8_step_time time = time_of(10, 1, 0, 0);
    const kv8_simulation s =
        simulate(&time, (kv8_simulation_options){
                            .num_requests = 1, .prompt_len = 8, .max_tokens = 5, .step_tokens = 4});
    assert_near(s.ttft.mean, 28);
    assert_near(s.itl.mean, 11);
    assert_near(s.itl.p99, 11);
    assert_near(s.seconds, 0.072);
    assert_near(s.tokens_per_s, 5 / 0.072);
    assert_near(s.mean_running, 1);
    assert_int_equal(s.num_steps, 6);
}

/* Prompt: 4 x 5 / 2 and 4 x 4 + 4 x 5 / 2 pairs. Decode: 9 and 10 keys. */
static void keys_are_paid_by_length(void **state) {
    (void)state;
    const kv8_step_time time = time_of(1, 0, 0.5, 0.25);
    const kv8_simulation s =
        simulate(&time, (kv8_simulation_options){
                            .num_requests = 1, .prompt_len = 8, .max_tokens = 3, .step_tokens = 4});
    assert_near(s.ttft.mean, 2 + 0.25 * (10 + 26));
    assert_near(s.itl.mean, 1 + 0.5 * 9.5);
    assert_near(s.itl.p50, 1 + 0.5 * 9);
    assert_near(s.itl.p99, 1 + 0.5 * 10);
}

/* Four at once: steps of 10 + 4 ms for all; five, when four run at most: the fifth comes last. */
static void requests_at_once_share_their_steps(void **state) {
    (void)state;
    const kv8_step_time time = time_of(10, 1, 0, 0);
    kv8_simulation_options options = {.num_requests = 4, .prompt_len = 1, .max_tokens = 10};
    kv8_simulation s = simulate(&time, options);
    assert_near(s.ttft.p99, 14);
    assert_near(s.itl.p99, 14);
    assert_near(s.mean_running, 4);
    assert_near(s.tokens_per_s, 4 / 0.014);
    options.num_requests = 5;
    options.max_requests = 4;
    s = simulate(&time, options);
    assert_near(s.ttft.p50, 14);
    assert_near(s.ttft.p99, 140 + 11);
    assert_near(s.seconds, 0.140 + 0.110);
}

/* Two pages hold one request of 16 + 16 tokens: one after the other. Three hold none more, but let
 * a second begin that is sent away again. */
static void a_pool_for_one_serves_one(void **state) {
    (void)state;
    const kv8_step_time time = time_of(10, 1, 0, 0);
    kv8_simulation_options options = {
        .num_requests = 3, .prompt_len = 16, .max_tokens = 17, .pool_tokens = 32};
    kv8_simulation s = simulate(&time, options);
    const double one = 26 + 16 * 11;
    assert_near(s.seconds, 3 * one * 1e-3);
    assert_near(s.ttft.p50, one + 26);
    assert_near(s.ttft.p99, 2 * one + 26);
    assert_near(s.mean_running, 1);
    assert_int_equal(s.num_preemptions, 0);
    options.pool_tokens = 48;
    s = simulate(&time, options);
    assert_near(s.ttft.p50, 10 + 2 * 16);
    assert_int_equal(s.num_preemptions, 1); /* the second; then it keeps the third waiting */
    options.pool_tokens = 16;
    kv8_simulation untouched = KV8_SIMULATION_INIT;
    options.struct_size = sizeof options;
    options.time = &time;
    assert_refused(kv8_simulate(&options, &untouched), KV8_ERR_INVALID, "the pool has 1");
}

/* One server of a fixed time T at half its load: a request waits T * (1/2) / (2 * (1 - 1/2)) on
 * average (Pollaczek and Khinchine), and then takes T. */
static void waiting_is_what_theory_says(void **state) {
    (void)state;
    const kv8_step_time time = time_of(10, 0, 0, 0);
    kv8_simulation_options options = {.requests_per_s = 50,
                                      .num_requests = 200000,
                                      .prompt_len = 1,
                                      .max_tokens = 1,
                                      .max_requests = 1,
                                      .seed = 5};
    const kv8_simulation s = simulate(&time, options), again = simulate(&time, options);
    assert_true(fabs(s.ttft.mean - 15) < 0.03 * 15);
    assert_true(fabs(s.requests_per_s - 50) < 0.02 * 50);
    assert_true(s.itl.mean == 0 && s.itl.p99 == 0);
    assert_memory_equal(&s, &again, sizeof s);
    options.seed = 6;
    assert_true(simulate(&time, options).ttft.mean != s.ttft.mean);
}

/* --- the fit --- */

/* Tests of a bench whose machine has exactly these terms: prompts of 512 and tokens one by one. */
static int32_t make_rows(const kv8_step_time *t, const int32_t *depths, int32_t num,
                         kv8_speed_row *rows) {
    int32_t n = 0;
    for (int32_t i = 0; i < num; i++) {
        const double depth = depths[i];
        kv8_speed_row row = {.struct_size = sizeof row, .depth = depths[i], .chunk = 200};
        row.num_prompt = 512;
        row.ns = 2 * kv8_step_time_of(t, 200) + kv8_step_time_of(t, 112) +
                 (512 * depth + 512 * 513 / 2) * t->prefill_key_ns;
        rows[n++] = row;
        row.num_prompt = 0;
        row.num_gen = 32;
        for (row.num_seqs = 1; row.num_seqs <= 64; row.num_seqs *= 64) {
            row.ns = 32 * kv8_step_time_of(t, row.num_seqs) +
                     (32 * depth + 32 * 33 / 2) * row.num_seqs * t->decode_key_ns;
            rows[n++] = row;
        }
        row.num_seqs = 0;
    }
    return n;
}

/* Steps of 1, 64 and 200 tokens, which need not lie on a line, and keys. */
static kv8_step_time measured_time(double one, double many, double most, double decode_key,
                                   double prefill_key) {
    kv8_step_time time = time_of(0, 0, decode_key, prefill_key);
    time.num_sizes = 3;
    memcpy(time.sizes, (const int32_t[]){1, 64, 200}, 3 * sizeof time.sizes[0]);
    memcpy(time.ns, (const double[]){one * 1e6, many * 1e6, most * 1e6}, 3 * sizeof time.ns[0]);
    return time;
}

static void the_fit_finds_the_terms(void **state) {
    (void)state;
    static const int32_t depths[] = {0, 4096, 32768};
    static const double terms[][5] = {
        {3, 13, 15, 6e-6, 3e-8}, {0.1, 2, 9, 1e-3, 1e-4}, {3, 3, 3, 1e-5, 0}};
    for (int i = 0; i < 3; i++) {
        const double *const of = terms[i];
        const kv8_step_time wanted = measured_time(of[0], of[1], of[2], of[3], of[4]);
        kv8_speed_row rows[9];
        kv8_step_time got = KV8_STEP_TIME_INIT;
        assert_ok(kv8_step_time_fit(rows, make_rows(&wanted, depths, 3, rows), &got));
        assert_int_equal(got.num_sizes, 3);
        for (int k = 0; k < 3; k++) {
            assert_int_equal(got.sizes[k], wanted.sizes[k]);
            assert_true(fabs(got.ns[k] - wanted.ns[k]) <= 1e-4 * wanted.ns[k]);
        }
        const double pairs[2][2] = {{got.decode_key_ns, wanted.decode_key_ns},
                                    {got.prefill_key_ns, wanted.prefill_key_ns}};
        for (int k = 0; k < 2; k++) {
            assert_true(pairs[k][0] >= 0);
            assert_true(fabs(pairs[k][0] - pairs[k][1]) <= 1e-4 * (pairs[k][1] + 1e-3));
        }
    }
}

/* Decode that is measured faster at a depth than without: no key costs less than nothing. */
static void no_term_is_negative(void **state) {
    (void)state;
    static const int32_t depths[] = {0, 4096};
    const kv8_step_time base = measured_time(2, 5, 9, 0, 1e-8);
    kv8_speed_row rows[6];
    kv8_step_time got = KV8_STEP_TIME_INIT;
    const int32_t num = make_rows(&base, depths, 2, rows);
    rows[4].ns *= 0.98;
    rows[5].ns *= 0.98;
    assert_ok(kv8_step_time_fit(rows, num, &got));
    assert_true(got.decode_key_ns == 0);
    assert_true(fabs(got.ns[0] - 0.99 * 2e6) < 0.01e6);
}

static void what_says_too_little_is_refused(void **state) {
    (void)state;
    static const int32_t depths[] = {100, 4096};
    const kv8_step_time base = measured_time(2, 5, 9, 1e-6, 1e-8);
    kv8_speed_row rows[6];
    kv8_step_time got = KV8_STEP_TIME_INIT;
    make_rows(&base, depths, 2, rows);
    assert_refused(kv8_step_time_fit(rows, 3, &got), KV8_ERR_INVALID, "3 rows do not tell");
    assert_refused(kv8_step_time_fit(rows, 0, &got), KV8_ERR_INVALID, "0 rows do not tell");
    rows[1].num_prompt = 3;
    assert_refused(kv8_step_time_fit(rows, 6, &got), KV8_ERR_INVALID, "row 1: 3 tokens of prompt");
    rows[1].num_prompt = 0;
    rows[1].ns = (double)NAN;
    assert_refused(kv8_step_time_fit(rows, 6, &got), KV8_ERR_INVALID, "row 1");
    kv8_simulation result = KV8_SIMULATION_INIT;
    kv8_simulation_options options = KV8_SIMULATION_OPTIONS_INIT;
    kv8_step_time bad = base;
    options.time = &bad;
    assert_refused(kv8_simulate(&options, &result), KV8_ERR_INVALID, "num_requests is 0");
    bad.ns[1] = (double)NAN;
    assert_refused(kv8_simulate(&options, &result), KV8_ERR_INVALID, "a step's time is nan");
    bad = time_of(0, 0, 1, 1);
    assert_refused(kv8_simulate(&options, &result), KV8_ERR_INVALID,
                   "a step of 1 tokens must take time");
    bad = base;
    bad.sizes[1] = 1;
    assert_refused(kv8_simulate(&options, &result), KV8_ERR_INVALID, "a size of steps is 1");
    bad.num_sizes = 0;
    assert_refused(kv8_simulate(&options, &result), KV8_ERR_INVALID, "num_sizes is 0");
    bad = base;
    options.requests_per_s = -1;
    assert_refused(kv8_simulate(&options, &result), KV8_ERR_INVALID, "requests_per_s is -1");
    assert_true(result.seconds == 0);
}

static void allocation_failures_leak_nothing(void **state) {
    (void)state;
    const kv8_step_time time = time_of(1, 1, 0, 0);
    kv8_simulation_options options = KV8_SIMULATION_OPTIONS_INIT;
    kv8_status status = KV8_ERR_NO_MEMORY;
    options.time = &time;
    options.num_requests = options.prompt_len = options.max_tokens = 3;
    for (int64_t failures = 0; status != KV8_OK; failures++) {
        failing_heap heap = {.fail_at = failures};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_simulation result = KV8_SIMULATION_INIT;
        options.allocator = &allocator;
        status = kv8_simulate(&options, &result);
        assert_true(status == KV8_OK || status == KV8_ERR_NO_MEMORY);
        assert_int_equal(heap.live, 0);
        assert_true(failures < 100);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_request_pays_steps_and_tokens),
        cmocka_unit_test(keys_are_paid_by_length),
        cmocka_unit_test(requests_at_once_share_their_steps),
        cmocka_unit_test(a_pool_for_one_serves_one),
        cmocka_unit_test(waiting_is_what_theory_says),
        cmocka_unit_test(the_fit_finds_the_terms),
        cmocka_unit_test(no_term_is_negative),
        cmocka_unit_test(what_says_too_little_is_refused),
        cmocka_unit_test(allocation_failures_leak_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
