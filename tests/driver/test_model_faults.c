/* test_model_faults.c - a model on a GPU whose driver fails, on the stand-in: open leaves nothing
 * behind, whichever call is refused; a step then says so, leaves its sequences as they were, and
 * succeeds when it is made again. What a step launches, and that a graph launches the same.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "experts_args.h"
#include "model_fixture.h"
#include "model_profile.h"
#include "rowwise_args.h"

/* What opening and stepping call, beside what asks, ends, or makes a context current. */
static const char *const calls[] = {"cuMemAlloc_v2",
                                    "cuMemHostAlloc",
                                    "cuMemGetInfo_v2",
                                    "cuMemcpyAsync",
                                    "cuMemsetD8Async",
                                    "cuModuleLoadData",
                                    "cuModuleGetFunction",
                                    "cuStreamCreate",
                                    "cuStreamSynchronize",
                                    "cuStreamBeginCapture_v2",
                                    "cuStreamEndCapture",
                                    "cuEventCreate",
                                    "cuEventRecord",
                                    "cuEventSynchronize",
                                    "cuGraphInstantiateWithFlags",
                                    "cuGraphLaunch",
                                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                                    "cuLaunchKernelEx"};
enum { NUM_CALLS = sizeof calls / sizeof calls[0] };

/* As if the fourth matrix, a layer's O, had a value that f16 does not hold. */
static void find_bad_weight(const stand_in_launch *launch) {
    if (strcmp(launch->name, "kv8_to_f16_bf16__sm80") != 0) return;
    const kv8_to_f16_args *const args = launch->args;
    if (args->tensor == 3) *args->first_bad = UINT64_C(3) << KV8_TO_F16_ELEMENT_BITS | 5;
}

static void a_weight_that_f16_does_not_hold_is_refused_by_name(void **state) {
    (void)state;
    fixture f;
    open_device(&f);
    stand_in_on_launch(find_bad_weight);
    assert_refused(try_model(&f, KV8_PATH_AUTO), KV8_ERR_UNSUPPORTED,
                   "model.layers.0.self_attn.o_proj.weight\"[5] is ");
    close_fixture(&f);
}

/* Every use of the call while a model is opened is refused once, every third in a short run;
 * returns how many there are. */
static int64_t refuse_uses(fixture *f, const char *call) {
    const int64_t step = test_is_short() ? 3 : 1;
    const stand_in_live before = stand_in_get_live();
    for (int64_t nth = 1;; nth += step) {
        stand_in_fail(call, nth, UNKNOWN);
        const kv8_status status = try_model(f, KV8_PATH_AUTO);
        const bool failed = stand_in_failed_call() != NULL;
        stand_in_fail(NULL, 0, 0);
        if (failed != (status == KV8_ERR_DEVICE) || (failed && f->model != NULL))
            fail_msg("%s failed, and open gave %d", call, (int)status);
        kv8_model_close(f->model);
        f->model = NULL;
        const stand_in_live live = stand_in_get_live();
        assert_int_equal(live.memory, before.memory);
        assert_int_equal(live.host_memory, before.host_memory);
        assert_int_equal(live.streams, before.streams);
        assert_int_equal(live.events, before.events);
        if (!failed) return nth - 1;
    }
}

static void open_leaves_nothing_behind(void **state) {
    (void)state;
    fixture f;
    int64_t refused = 0;
    open_device(&f);
    for (int i = 0; i < NUM_CALLS; i++) refused += refuse_uses(&f, calls[i]);
    print_message("%lld calls of open refused\n", (long long)refused);
    assert_true(refused > 100);
    close_fixture(&f);
}

static void what_does_not_fit_is_told_by_part(void **state) {
    (void)state;
    fixture f;
    const stand_in_gpu small = {90, 132, 6 << 20};
    open_device(&f);
    kv8_stream_destroy(f.stream);
    kv8_device_close(f.device);
    stand_in_set_gpus(&small, 1);
    assert_ok(kv8_device_open(&f.device, 0));
    assert_ok(kv8_stream_create(&f.stream, f.device));
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = f.device;
    options.stream = f.stream;
    options.max_step_seqs = 4096; /* a row of logits each */
    assert_refused(kv8_model_open(&f.model, directory, &options), KV8_ERR_NO_MEMORY, "logits 0.0");
    kv8_model_memory counted = KV8_MODEL_MEMORY_INIT;
    assert_ok(kv8_model_count_memory(directory, &options, &counted));
    assert_int_equal(counted.logits, 4096 * (VOCAB + VOCAB / 64) * sizeof(float)); /* maxima too */
    assert_true(counted.workspaces > 4096 * 2 * 64 * sizeof(float));
    assert_int_equal(counted.total, counted.dense + counted.experts + counted.activations +
                                        counted.logits + counted.workspaces);
    assert_true(counted.total + counted.loading > counted.available);
    close_fixture(&f);
}

/* Beside it the tables of a few kernels. */
static void what_is_counted_is_what_open_takes(void **state) {
    enum { TABLES = 1 << 20 };
    (void)state;
    fixture f;
    uint64_t before = 0, after = 0;
    open_device(&f);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = f.device;
    options.stream = f.stream;
    kv8_model_memory counted = KV8_MODEL_MEMORY_INIT;
    assert_ok(kv8_model_count_memory(directory, &options, &counted));
    assert_ok(kv8_device_available(f.device, &before));
    assert_in_range(before - counted.available, 0, TABLES);
    assert_ok(kv8_model_open(&f.model, directory, &options));
    assert_ok(kv8_device_available(f.device, &after));
    assert_in_range(before - after, counted.total, counted.total + TABLES);
    options.device = NULL;
    assert_refused(kv8_model_count_memory(directory, &options, &counted), KV8_ERR_INVALID,
                   "device is NULL");
    close_fixture(&f);
}

/* --- steps --- */

static int32_t length_of(const fixture *f) {
    int32_t length = 0;
    assert_ok(kv8_cache_seq_length(f->cache, f->seqs[0], &length));
    return length;
}

/* The same for a step; the model is new each time, or has stepped. */
static int64_t refuse_in_steps(const char *call, int32_t count, bool is_first) {
    const int64_t step = test_is_short() ? 3 : 1;
    for (int64_t nth = 1;; nth += step) {
        fixture f;
        open_fixture(&f, KV8_PATH_AUTO);
        if (!is_first) assert_ok(run_step(&f, 2, count));
        const int32_t before = length_of(&f);
        stand_in_fail(call, nth, UNKNOWN);
        const kv8_status status = run_step(&f, 2, count);
        const bool failed = stand_in_failed_call() != NULL;
        stand_in_fail(NULL, 0, 0);
        if (failed != (status == KV8_ERR_DEVICE))
            fail_msg("%s failed, and the step gave %d", call, (int)status);
        if (failed) {
            assert_int_equal(length_of(&f), before);
            assert_ok(run_step(&f, 2, count));
        }
        assert_int_equal(length_of(&f), before + count);
        close_fixture(&f);
        if (!failed) return nth - 1;
    }
}
static void refuse_steps(int32_t count, bool is_first) {
    int64_t refused = 0;
    for (int i = 0; i < NUM_CALLS; i++) refused += refuse_in_steps(calls[i], count, is_first);
    print_message("%lld calls of a step of %d refused\n", (long long)refused, count);
    assert_true(refused > 4);
}
static void a_step_that_fails_changes_nothing(void **state) {
    (void)state;
    refuse_steps(PROMPT, false);
    refuse_steps(1, false); /* a graph's replay */
    refuse_steps(1, true);  /* plans, and a graph's recording */
}

/* Launches of a step, without those of page tables, which go out when lists change;
 * *is_replayed_out: by a graph. */
static int32_t count_launches(fixture *f, int32_t num, int32_t count, bool *is_replayed_out) {
    const int32_t before = stand_in_num_launches();
    const int64_t graphs = stand_in_num_calls("cuGraphLaunch");
    assert_ok(run_step(f, num, count));
    *is_replayed_out = stand_in_num_calls("cuGraphLaunch") > graphs;
    int32_t launches = 0;
    for (int32_t i = before; i < stand_in_num_launches(); i++)
        launches += strncmp(stand_in_get_launch(i)->name, "kv8_page_lists_", 15) != 0;
    return launches;
}

static void a_graph_launches_what_a_step_does(void **state) {
    (void)state;
    fixture graph, eager;
    bool is_replayed = false;
    open_fixture(&eager, KV8_PATH_EAGER);
    const int32_t single = count_launches(&eager, 1, 1, &is_replayed);
    assert_false(is_replayed);
    close_fixture(&eager);
    open_fixture(&graph, KV8_PATH_GRAPH);
    count_launches(&graph, 2, PROMPT, &is_replayed);
    assert_false(is_replayed);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(count_launches(&graph, 1, 1, &is_replayed), single);
        assert_true(is_replayed);
    }
    assert_int_equal(stand_in_num_calls("cuStreamBeginCapture_v2"), 1);
    /* 17 and 20 rows share one of 20: as many as a step has. */
    for (int i = 0; i < 2; i++) {
        count_launches(&graph, i == 0 ? 17 : 20, 1, &is_replayed);
        assert_true(is_replayed);
        assert_int_equal(stand_in_num_calls("cuStreamBeginCapture_v2"), 2);
    }
    close_fixture(&graph);
}

/* Rows whose logits are wanted of a step of two prompts, and the rows of each layer's experts. */
static void check_rows_of_layers(const int32_t *rows, int32_t num, int32_t in_first,
                                 int32_t in_last) {
    static const int32_t indptr[] = {0, PROMPT, 2 * PROMPT};
    int32_t of_layers[4] = {0}, num_layers = 0, num_gathers = 0;
    float logits[2 * PROMPT * VOCAB];
    fixture f;
    open_fixture(&f, KV8_PATH_AUTO);
    const int32_t before = stand_in_num_launches();
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = 2,
                           .seqs = f.seqs,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = num,
                           .logit_rows = rows,
                           .logits_out = logits};
    assert_ok(kv8_model_step(f.model, f.cache, &step));
    for (int32_t i = before; i < stand_in_num_launches(); i++) {
        const stand_in_launch *const launch = stand_in_get_launch(i);
        num_gathers += strcmp(launch->name, "kv8_gather_rows__sm80") == 0;
        if (strncmp(launch->name, "kv8_experts_router", 18) != 0) continue;
        const kv8_experts_router_args *const args = launch->args;
        assert_in_range(num_layers, 0, 3);
        of_layers[num_layers++] = args->route.n;
    }
    assert_int_equal(num_layers, in_last > 0 ? 2 : 1);
    assert_int_equal(of_layers[0], in_first);
    assert_int_equal(of_layers[1], in_last);
    assert_int_equal(num_gathers, in_last > 0 && in_last < in_first ? 2 : 0);
    close_fixture(&f);
}
static void the_last_layer_has_the_rows_of_logits_alone(void **state) {
    (void)state;
    static const int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, last[] = {4, 8, 9},
                         others[] = {3, 9};
    check_rows_of_layers(all, 10, 10, 10);
    check_rows_of_layers(last, 3, 10, 3);
    check_rows_of_layers(last, 1, 10, 1);
    check_rows_of_layers(others, 2, 10, 10); /* not the last of their sequences */
    check_rows_of_layers(NULL, 0, 10, 0);
}

/* An observer's launches, of K and V and of Q in each layer, are in the graphs of its time alone.
 */
static void observers_come_and_go_with_their_graphs(void **state) {
    (void)state;
    fixture f;
    bool is_replayed = false;
    open_fixture(&f, KV8_PATH_GRAPH);
    count_launches(&f, 2, PROMPT, &is_replayed);
    const int32_t plain = count_launches(&f, 1, 1, &is_replayed);
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_model_observer_options(f.model, &options);
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    for (int round = 0; round < 2; round++) {
        assert_ok(kv8_model_set_observer(f.model, observer));
        for (int i = 0; i < 3; i++) { /* off, on, off */
            if (i == 1) kv8_observer_start(observer);
            if (i == 2) kv8_observer_stop(observer);
            const int64_t fills = stand_in_num_calls("cuMemsetD8Async");
            assert_int_equal(count_launches(&f, 1, 1, &is_replayed),
                             plain + 2 * options.num_layers);
            assert_true(is_replayed);
            assert_int_equal(stand_in_num_calls("cuMemsetD8Async") - fills, i > 0);
        }
        assert_ok(kv8_model_set_observer(f.model, NULL));
        assert_int_equal(count_launches(&f, 1, 1, &is_replayed), plain);
    }
    assert_ok(kv8_model_set_observer(f.model, observer));
    stand_in_fail("cuMemcpyAsync", 1, UNKNOWN); /* the counts stay unread, and it is gone */
    assert_int_equal(kv8_model_set_observer(f.model, NULL), KV8_ERR_DEVICE);
    stand_in_fail(NULL, 0, 0);
    assert_int_equal(count_launches(&f, 1, 1, &is_replayed), plain);
    assert_ok(kv8_model_set_observer(f.model, observer));
    close_fixture(&f); /* takes it away */
    kv8_observer_destroy(observer);
}

/* Plans and graphs of caches that take turns stay; of many, the oldest go. */
static void caches_that_take_turns_keep_plans_and_graphs(void **state) {
    enum { CACHES = 10, KEPT = 8 };
    (void)state;
    fixture f;
    bool is_replayed = false;
    kv8_cache *caches[CACHES];
    open_fixture(&f, KV8_PATH_AUTO);
    kv8_cache_destroy(f.cache);
    for (int c = 0; c < CACHES; c++) {
        caches[c] = f.cache = open_cache(f.model, KV8_E4M3, 16, SEQS, 64, false);
        for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[i]));
        count_launches(&f, 1, 1, &is_replayed);
        assert_true(is_replayed);
        assert_int_equal(stand_in_num_calls("cuStreamBeginCapture_v2"), c + 1);
        assert_int_equal(stand_in_get_live().graphs, c < KEPT ? c + 1 : KEPT);
    }
    const int64_t taken = stand_in_num_calls("cuMemAlloc_v2");
    for (int turn = 0; turn < 3; turn++) {
        for (int c = CACHES - KEPT; c < CACHES; c++) {
            f.cache = caches[c];
            count_launches(&f, 1, 1, &is_replayed);
            assert_true(is_replayed);
        }
    }
    assert_int_equal(stand_in_num_calls("cuStreamBeginCapture_v2"), CACHES);
    assert_int_equal(stand_in_num_calls("cuMemAlloc_v2"), taken);
    f.cache = caches[0]; /* its set was given away */
    count_launches(&f, 1, 1, &is_replayed);
    assert_int_equal(stand_in_num_calls("cuStreamBeginCapture_v2"), CACHES + 1);
    assert_int_equal(stand_in_get_live().graphs, KEPT);
    for (int c = 1; c < CACHES; c++) kv8_cache_destroy(caches[c]);
    close_fixture(&f);
}

/* --- profiles --- */

/* Kernels of every image by the beginning of their names; those of measurements are in no step. */
static void every_kernel_is_of_a_kind(void **state) {
    (void)state;
    int num = 0;
    for (int32_t i = 0; i < kv8_device_num_images(); i++) {
        const char *at = kv8_device_get_image(i)->kernels;
        for (; *at != '\0'; at += strcspn(at, " "), at += strspn(at, " ")) {
            char name[128];
            snprintf(name, sizeof name, "%.*s", (int)strcspn(at, " "), at);
            if (strstr(name, "_ceiling__") != NULL) continue;
            if (kv8_work_of_kernel(name) == KV8_WORK_COUNT) fail_msg("%s is of no kind", name);
            num++;
        }
    }
    assert_true(num > 50);
}

static kv8_profile profile_steps(fixture *f, int32_t by_kernel, int32_t count) {
    kv8_profile profile = KV8_PROFILE_INIT;
    assert_ok(kv8_model_begin_profile(f->model, by_kernel));
    for (int i = 0; i < 3; i++) assert_ok(run_step(f, 2, count));
    assert_ok(kv8_model_end_profile(f->model, &profile));
    assert_int_equal(profile.num_steps, 3);
    assert_true(profile.busy_seconds > 0 && profile.idle_seconds >= 0);
    double sum = 0;
    for (int32_t i = 0; i < profile.num_rows; i++) sum += profile.rows[i].seconds;
    assert_true(fabs(sum - profile.busy_seconds) < 1e-9);
    return profile;
}

/* The stand-in's kernels write nothing: its offsets are garbage, the same of every expert. */
static void a_profile_tells_kernels_apart(void **state) {
    (void)state;
    static const kv8_step_path paths[] = {KV8_PATH_GRAPH, KV8_PATH_EAGER};
    fixture f;
    for (int p = 0; p < 2; p++) {
        open_fixture(&f, paths[p]);
        const kv8_profile profile = profile_steps(&f, 1, 1);
        int32_t launches[KV8_WORK_COUNT] = {0};
        for (int32_t i = 0; i < profile.num_rows; i++)
            launches[profile.rows[i].work] += profile.rows[i].num_launches;
        assert_int_equal(launches[KV8_WORK_HEAD], 3);
        assert_int_equal(launches[KV8_WORK_EXPERTS], 3 * 2 * 2); /* steps, layers, parts */
        assert_true(launches[KV8_WORK_ATTENTION] >= 3 * 2 * 2);
        assert_int_equal(launches[KV8_WORK_WHOLE], 0);
        assert_true(profile.experts_read == 0);
        assert_int_equal(stand_in_get_live().graphs, 0);
        close_fixture(&f);
    }
    open_fixture(&f, KV8_PATH_GRAPH);
    const kv8_profile whole = profile_steps(&f, 0, 1);
    bool has_graph = false;
    for (int32_t i = 0; i < whole.num_rows; i++)
        has_graph = has_graph || strcmp(whole.rows[i].name, "graph") == 0;
    assert_true(has_graph);
    profile_steps(&f, 1, PROMPT);
    assert_ok(run_step(&f, 2, 1)); /* and none goes on */
    assert_refused(kv8_model_end_profile(f.model, NULL), KV8_ERR_INVALID, "no profile has begun");
    close_fixture(&f);
}

/* --- options --- */

static void wrong_options_are_refused(void **state) {
    (void)state;
    fixture f;
    open_device(&f);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.stream = f.stream;
    assert_refused(kv8_model_open(&f.model, directory, &options), KV8_ERR_INVALID,
                   "device is NULL");
    options.stream = NULL;
    options.device = f.device;
    assert_refused(kv8_model_open(&f.model, directory, &options), KV8_ERR_INVALID,
                   "stream is NULL");
    options.stream = f.stream;
    options.path = (kv8_step_path)7;
    assert_refused(kv8_model_open(&f.model, directory, &options), KV8_ERR_INVALID, "path is 7");
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(open_leaves_nothing_behind),
        cmocka_unit_test(what_does_not_fit_is_told_by_part),
        cmocka_unit_test(what_is_counted_is_what_open_takes),
        cmocka_unit_test(a_weight_that_f16_does_not_hold_is_refused_by_name),
        cmocka_unit_test(a_step_that_fails_changes_nothing),
        cmocka_unit_test(a_graph_launches_what_a_step_does),
        cmocka_unit_test(the_last_layer_has_the_rows_of_logits_alone),
        cmocka_unit_test(observers_come_and_go_with_their_graphs),
        cmocka_unit_test(caches_that_take_turns_keep_plans_and_graphs),
        cmocka_unit_test(every_kernel_is_of_a_kind),
        cmocka_unit_test(a_profile_tells_kernels_apart),
        cmocka_unit_test(wrong_options_are_refused),
    };
    return cmocka_run_group_tests_name("model_faults", tests, make_model, drop_model);
}
