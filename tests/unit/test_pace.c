/* test_pace.c - tokens of prompts beside decode, on machines made here: whoever decodes waits less
 * than twice as long as usual, and prompts get on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/simulate.h>

#include "pace.h"

#include "testing.h"

/* A machine: a step takes base + slow * sqrt(requests) + fixed (with prompts) + each * tokens of
 * prompts + deep * tokens of prompts read so far, ms. */
typedef struct machine {
    double base, slow, fixed, each, deep;
} machine;

static double time_of(const machine *m, int32_t decoding, int32_t tokens, double read) {
    const double prompts = tokens == 0 ? 0 : m->fixed + tokens * (m->each + m->deep * read);
    return 1e6 * (m->base + m->slow * sqrt(decoding) + prompts);
}

/* 32 decode, a prompt of 32768 comes: steps beyond twice the usual time are fewer than one in a
 * hundred, and the prompt takes at most half of all the time there is, or least steps. */
static void a_long_prompt_holds_nobody_up(void **state) {
    (void)state;
    static const machine machines[] = {{3, 1, 1, 0.02, 0},
                                       {2, 0.3, 0, 0.1, 4e-6},
                                       {0.5, 2, 3, 0.05, 0},
                                       {1, 1, 0, 0.01, 1e-6},
                                       {0, 10, 0, 2, 1e-4}};
    enum { DECODING = 32, PROMPT = 32768, MOST = 2048 };
    for (size_t i = 0; i < sizeof machines / sizeof machines[0]; i++) {
        const machine *const m = &machines[i];
        kv8_pace pace = {0};
        const double usual = time_of(m, DECODING, 0, 0);
        for (int step = 0; step < 10; step++) kv8_pace_learn(&pace, DECODING, 0, usual);
        int32_t read = 0, steps = 0, late = 0;
        double all = 0, own = 0;
        while (read < PROMPT) {
            const int32_t most = PROMPT - read < MOST ? PROMPT - read : MOST;
            const int32_t tokens = kv8_pace_tokens(&pace, DECODING, 1, most);
            const double ns = time_of(m, DECODING, tokens, read);
            kv8_pace_learn(&pace, DECODING, tokens, ns);
            assert_true(tokens <= most && ++steps < PROMPT);
            late += ns >= 2 * usual;
            all += ns;
            own += ns - usual;
            read += tokens;
        }
        if (late * 100 > steps) fail_msg("machine %zu: %d of %d steps are late", i, late, steps);
        if (own < 0.3 * all) fail_msg("machine %zu: the prompt has %.3f of the time", i, own / all);
    }
}

/* Nobody decodes, or nobody else is there: all there is room for. Nothing known: nothing, once. */
static void what_is_not_known_is_measured(void **state) {
    (void)state;
    kv8_pace pace = {0};
    assert_int_equal(kv8_pace_tokens(&pace, 0, 5, 512), 512);
    assert_int_equal(kv8_pace_tokens(&pace, 3, 0, 512), 512);
    assert_int_equal(kv8_pace_tokens(&pace, 3, 1, 512), 0);
    kv8_pace_learn(&pace, 3, 0, 1e6);
    assert_in_range(kv8_pace_tokens(&pace, 3, 1, 512), 1, 511);
    assert_int_equal(kv8_pace_tokens(&pace, 4096, 1, 512), 0);
    /* Old knowledge is renewed, one step in some sixty. */
    int32_t renewals = 0;
    for (int step = 0; step < 650; step++) {
        const int32_t tokens = kv8_pace_tokens(&pace, 3, 1, 512);
        renewals += tokens == 0;
        kv8_pace_learn(&pace, 3, tokens, 1e6 + tokens * 1e4);
    }
    assert_in_range(renewals, 9, 11);
}

/* The more requests read, the more a step has of their tokens. */
static void readers_count_by_their_number(void **state) {
    (void)state;
    kv8_pace pace = {0};
    kv8_pace_learn(&pace, 4, 0, 1e6);
    kv8_pace_learn(&pace, 4, 16, 1e6 + 16 * 1e3);
    const int32_t one = kv8_pace_tokens(&pace, 4, 1, 1 << 20);
    assert_in_range(one, 8 * 560, 8 * 640);
    assert_in_range(kv8_pace_tokens(&pace, 4, 4, 1 << 20), 4 * one, 4 * one + 64);
    assert_int_equal(kv8_pace_tokens(&pace, 4, 40, 100), 100);
    assert_int_equal(kv8_pace_tokens(&pace, 4, 1, 10), 10);
    /* Of 32 and more, each waits as long; a token that takes very long leaves the least there is.
     */
    for (int32_t crowd = 32; crowd <= 128; crowd *= 2) kv8_pace_learn(&pace, crowd, 0, 1e6);
    const int32_t crowded = kv8_pace_tokens(&pace, 32, 1, 1 << 20);
    assert_in_range(crowded, 560, 640);
    assert_int_equal(kv8_pace_tokens(&pace, 128, 1, 1 << 20), crowded);
    kv8_pace_learn(&pace, 32, 16, 1e9);
    assert_int_equal(kv8_pace_tokens(&pace, 32, 1, 2048), 8);
}

/* The simulated server, with and without: prompts of 4096 tokens and answers of 256. */
static void a_server_keeps_its_pace(void **state) {
    (void)state;
    const kv8_step_time time = {.struct_size = sizeof time,
                                .num_sizes = 4,
                                .sizes = {1, 64, 512, 2048},
                                .ns = {3e6, 9e6, 30e6, 80e6},
                                .decode_key_ns = 2,
                                .prefill_key_ns = 0.01};
    kv8_simulation_options options = {.struct_size = sizeof options,
                                      .time = &time,
                                      .requests_per_s = 2,
                                      .num_requests = 300,
                                      .prompt_len = 4096,
                                      .max_tokens = 256,
                                      .max_requests = 64};
    kv8_simulation fixed = KV8_SIMULATION_INIT, paced = KV8_SIMULATION_INIT;
    assert_ok(kv8_simulate(&options, &fixed));
    options.paced = 1;
    assert_ok(kv8_simulate(&options, &paced));
    print_message(
        "p99 %.1f and %.1f ms between tokens, TTFT %.0f and %.0f ms, %.0f and %.0f tokens/s\n",
        fixed.itl.p99, paced.itl.p99, fixed.ttft.mean, paced.ttft.mean, fixed.tokens_per_s,
        paced.tokens_per_s);
    assert_true(paced.itl.p99 < 0.5 * fixed.itl.p99);
    assert_true(paced.tokens_per_s > 0.95 * fixed.tokens_per_s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_prompt_holds_nobody_up),
        cmocka_unit_test(what_is_not_known_is_measured),
        cmocka_unit_test(readers_count_by_their_number),
        cmocka_unit_test(a_server_keeps_its_pace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
