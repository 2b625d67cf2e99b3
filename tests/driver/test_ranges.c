/* test_ranges.c - what an outside profiler sees of a model on a GPU, on the stand-in: the ranges of
 * opening and stepping, which lie within one another as the work does, and all end, also where a
 * call of the driver fails in the middle.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_fixture.h"
#include "range_recorder.h"

/* How many ranges of these words were opened within one of `parent`'s, NULL: within none. */
static int count_within(const char *parent, const char *words) {
    int num = 0;
    const char *open[16] = {NULL};
    for (int i = 0; i < recorder_num_ranges(); i++) {
        const recorder_range *const r = recorder_get_range(i);
        assert_in_range(r->depth, 0, 14);
        open[r->depth + 1] = r->words;
        const bool fits =
            parent == NULL ? r->depth == 0 : r->depth > 0 && strcmp(open[r->depth], parent) == 0;
        num += fits && strcmp(r->words, words) == 0;
    }
    return num;
}

static void assert_all_ended(void) {
    assert_int_equal(recorder_num_open(), 0);
    assert_int_equal(recorder_num_extra(), 0);
}

static void opening_is_one_range(void **state) {
    (void)state;
    fixture f;
    char words[300];
    recorder_reset();
    open_fixture(&f, KV8_PATH_AUTO);
    snprintf(words, sizeof words, "load %.120s", directory);
    assert_int_equal(count_within(NULL, words), 1);
    assert_int_equal(recorder_num_ranges(), 1);
    assert_all_ended();
    close_fixture(&f);
}

/* Of so many layers, within `parent`. */
static void assert_layers(const char *parent, int num_layers) {
    for (int i = 0; i < num_layers; i++) {
        char layer[16];
        snprintf(layer, sizeof layer, "layer %d", i);
        assert_int_equal(count_within(parent, layer), 1);
        assert_int_equal(count_within(layer, "attention"), 1);
        assert_int_equal(count_within(layer, "experts"), 1);
        assert_int_equal(count_within(layer, "dense"), 2); /* Q, K and V; O */
    }
    assert_int_equal(count_within("experts", "routing and gather"), num_layers);
    assert_int_equal(count_within(parent, "head"), 1);
    assert_int_equal(count_within("head", "dense"), 1);
}

static void an_eager_step_is_told_by_layer_and_kind(void **state) {
    (void)state;
    static const char step[] = "step of 2 rows, 2 requests";
    fixture f;
    open_fixture(&f, KV8_PATH_EAGER);
    for (int i = 0; i < 2; i++) {
        recorder_reset();
        assert_ok(run_step(&f, 2, 1));
        assert_int_equal(count_within(NULL, step), 1);
        assert_layers(step, 2);
        assert_int_equal(count_within(step, "wait"), 1);
    }
    assert_all_ended();
    close_fixture(&f);
}

static void a_graph_is_captured_once_and_launched_each_step(void **state) {
    (void)state;
    static const char step[] = "step of 2 rows, 2 requests";
    fixture f;
    open_fixture(&f, KV8_PATH_GRAPH);
    for (int i = 0; i < 3; i++) {
        recorder_reset();
        assert_ok(run_step(&f, 2, 1));
        assert_int_equal(count_within(step, "graph of 2 rows"), 1);
        assert_int_equal(count_within(step, "capture of 2 rows"), i == 0);
        if (i == 0) assert_layers("capture of 2 rows", 2);
        if (i > 0) assert_int_equal(recorder_num_ranges(), 3); /* step, graph, wait */
    }
    assert_all_ended();
    close_fixture(&f);
}

/* Each use of every call of the driver in a step fails once. */
static void what_fails_leaves_no_range_open(void **state) {
    (void)state;
    static const kv8_step_path paths[] = {KV8_PATH_GRAPH, KV8_PATH_EAGER};
    int num_failed = 0;
    for (int p = 0; p < 2; p++) {
        fixture f;
        open_fixture(&f, paths[p]);
        bool was_hit = true;
        for (int64_t nth = 1; was_hit; nth++) {
            recorder_reset();
            stand_in_fail(NULL, nth, UNKNOWN);
            num_failed += run_step(&f, 2, 1) != KV8_OK;
            was_hit = stand_in_failed_call() != NULL;
            stand_in_fail(NULL, 0, 0);
            assert_all_ended();
        }
        close_fixture(&f);
    }
    print_message("%d steps failed\n", num_failed);
    assert_true(num_failed > 50);
}

static void the_draw_is_a_range(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, KV8_PATH_AUTO);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_destroy(f.cache, f.seqs[i]));
    kv8_engine *engine = NULL;
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    kv8_request request = KV8_REQUEST_INIT;
    uint64_t id = 0;
    int32_t num_events = 0;
    request.token_ids = ids;
    request.num_tokens = PROMPT;
    request.max_tokens = 2;
    options.max_requests = SEQS;
    options.step_tokens = 64;
    assert_ok(kv8_engine_create(&engine, f.model, f.cache, &options));
    assert_ok(kv8_engine_submit(engine, &request, &id));
    recorder_reset();
    assert_ok(kv8_engine_step(engine, &num_events));
    assert_int_equal(count_within(NULL, "step of 5 rows, 1 requests"), 1);
    assert_int_equal(count_within(NULL, "draw of 1 rows"), 1);
    assert_all_ended();
    kv8_engine_destroy(engine);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opening_is_one_range),
        cmocka_unit_test(an_eager_step_is_told_by_layer_and_kind),
        cmocka_unit_test(a_graph_is_captured_once_and_launched_each_step),
        cmocka_unit_test(what_fails_leaves_no_range_open),
        cmocka_unit_test(the_draw_is_a_range),
    };
    setenv("NVTX_INJECTION64_PATH", KV8_RANGE_RECORDER, 1); /* read by the first range */
    return cmocka_run_group_tests_name("ranges", tests, make_model, drop_model);
}
