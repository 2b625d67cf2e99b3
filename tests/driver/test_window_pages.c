/* test_window_pages.c - a cache as an engine opens it: layers with a window have pages for the
 * windows of all requests and for one step, and those are enough, whatever the prompts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "engine_impl.h"
#include "model_fixture.h"
#include "sampler_args.h"

enum { PAGE_SIZE = 16, STEP_TOKENS = 192, MAX_LEN = 240, NEW_TOKENS = 12 };

static void draw_ones(const stand_in_launch *launch) {
    if (strncmp(launch->name, "kv8_draw_", 9) != 0) return;
    const kv8_draw_args *const args = launch->args;
    for (uint32_t i = 0; i < launch->grid[0] / launch->cluster[0]; i++)
        args->drawn[i] = (kv8_drawn_row){.token = 1, .bad_id = -1};
}

static int32_t pages_of(const fixture *f) {
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    assert_ok(kv8_cache_get_stats(f->cache, &stats));
    return stats.pages_total;
}

static void open_setting(fixture *f, int32_t step_tokens, int32_t share_prefixes) {
    kv8_kv_setting setting;
    kv8_kv_cache_options options = KV8_KV_CACHE_OPTIONS_INIT;
    options.max_seqs = SEQS;
    options.max_seq_len = MAX_LEN;
    options.num_tokens = SEQS * MAX_LEN;
    options.step_tokens = step_tokens;
    options.share_prefixes = share_prefixes;
    assert_ok(kv8_kv_setting_parse("e4m3", &setting));
    kv8_cache_destroy(f->cache);
    f->cache = NULL;
    assert_ok(kv8_kv_setting_cache_create(&f->cache, f->model, &setting, &options));
}

/* Prompts of all lengths at once, some longer than a step, that decode in the end; or all of a
 * step, at rest then. */
static void run_requests(fixture *f, bool rest, kv8_engine_stats *stats_out) {
    kv8_engine *engine = NULL;
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.max_requests = SEQS;
    options.step_tokens = STEP_TOKENS;
    assert_ok(kv8_engine_create(&engine, f->model, f->cache, &options));
    for (int32_t i = 0; i < SEQS; i++) {
        int32_t prompt[MAX_LEN], num = 20 + 53 * i % (MAX_LEN - NEW_TOKENS - 20);
        if (rest) num = STEP_TOKENS;
        uint64_t id = 0;
        for (int32_t t = 0; t < num; t++) prompt[t] = (i + t) % VOCAB;
        kv8_request request = KV8_REQUEST_INIT;
        request.token_ids = prompt;
        request.num_tokens = num;
        request.hold = rest;
        request.max_tokens =
            rest ? 1 : NEW_TOKENS + (SEQS - i) * 7 % (MAX_LEN - NEW_TOKENS - num + 1);
        request.ignore_eos = 1;
        assert_ok(kv8_engine_submit(engine, &request, &id));
    }
    for (int32_t events = 1; events > 0;) assert_ok(kv8_engine_step(engine, &events));
    assert_ok(kv8_engine_get_stats(engine, stats_out));
    kv8_engine_destroy(engine);
}

static void windows_and_one_step_are_enough(void **state) {
    (void)state;
    fixture f;
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    open_device(&f);
    kv8_model_options options = options_of(&f, KV8_PATH_AUTO);
    options.max_step_tokens = STEP_TOKENS;
    assert_ok(kv8_model_open(&f.model, directory, &options));
    stand_in_on_launch(draw_ones);
    const int32_t all = SEQS * MAX_LEN / PAGE_SIZE + 2 * SEQS;
    open_setting(&f, 0, 1);
    assert_int_equal(pages_of(&f), 2 * all);
    for (int32_t shares = 1; shares >= 0; shares--) {
        const int32_t prefixes = shares ? SEQS * MAX_LEN / 8 : 0;
        const int32_t window_tokens = SEQS * (7 + PAGE_SIZE) + STEP_TOKENS + prefixes;
        open_setting(&f, STEP_TOKENS, shares);
        assert_int_equal(pages_of(&f),
                         all + (window_tokens + PAGE_SIZE - 1) / PAGE_SIZE + 2 * SEQS);
    }
    for (int rest = 0; rest < 2; rest++) {
        run_requests(&f, rest, &stats);
        assert_int_equal(stats.num_preemptions, 0);
        assert_int_equal(stats.num_running + stats.num_waiting, 0);
        assert_int_equal(stats.num_resting, rest ? SEQS : 0);
    }
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(windows_and_one_step_are_enough)};
    return cmocka_run_group_tests_name("window pages", tests, make_model, drop_model);
}
