/* test_paths.c - how a step of a model on a GPU is launched, on the stand-in: what is told of it
 * before, and why it is not one kernel, is what then happens.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_fixture.h"
#include "token_args.h"

static const char token_kernel[] = "kv8_gpt_oss_token";

/* The published widths, as the kernel of a token has them. */
static void open_wide(fixture *f, kv8_step_path path, int32_t page_size, kv8_dtype dtype) {
    open_device(f);
    const kv8_model_options options = options_of(f, path);
    f->model = open_published(4, &options);
    f->cache = open_cache(f->model, dtype, page_size, SEQS, 64, false);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_create(f->cache, &f->seqs[i]));
}

/* What ran since the launch of this number. */
static kv8_step_path path_since(int32_t first, int64_t graphs) {
    for (int32_t i = first; i < stand_in_num_launches(); i++) {
        if (strncmp(stand_in_get_launch(i)->name, token_kernel, sizeof token_kernel - 1) == 0)
            return KV8_PATH_PERSISTENT;
    }
    return stand_in_num_calls("cuGraphLaunch") > graphs ? KV8_PATH_GRAPH : KV8_PATH_EAGER;
}

/* What is told, and then done; why: a part of the reason, NULL: there is none. */
static void assert_path(fixture *f, int32_t num_seqs, int32_t count, kv8_step_path path,
                        const char *why) {
    kv8_step_plan told = KV8_STEP_PLAN_INIT;
    assert_ok(kv8_model_plan_step(f->model, f->cache, NULL, num_seqs, num_seqs * count, &told));
    assert_string_equal(kv8_step_path_name(told.path), kv8_step_path_name(path));
    if (why == NULL)
        assert_null(told.why_not_persistent);
    else if (told.why_not_persistent == NULL || strstr(told.why_not_persistent, why) == NULL)
        fail_msg("why is %s, must say %s", told.why_not_persistent, why);
    const int32_t first = stand_in_num_launches();
    const int64_t graphs = stand_in_num_calls("cuGraphLaunch");
    assert_ok(run_step(f, num_seqs, count));
    assert_int_equal(path_since(first, graphs), path);
}

static void a_plan_is_what_happens(void **state) {
    (void)state;
    fixture f;
    open_wide(&f, KV8_PATH_AUTO, 16, KV8_E4M3);
    assert_path(&f, 1, 1, KV8_PATH_PERSISTENT, NULL);
    for (int n = 2; n <= 8; n++) assert_path(&f, n, 1, KV8_PATH_PERSISTENT, NULL);
    assert_path(&f, 9, 1, KV8_PATH_GRAPH, "more rows than a kernel takes");
    assert_path(&f, 1, PROMPT, KV8_PATH_EAGER, "a sequence has more than one row");
    assert_path(&f, 2, 2, KV8_PATH_EAGER, "a sequence has more than one row");
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_observer *observer = NULL;
    kv8_model_observer_options(f.model, &options);
    assert_ok(kv8_observer_create(&observer, &options));
    assert_ok(kv8_model_set_observer(f.model, observer));
    assert_path(&f, 1, 1, KV8_PATH_GRAPH, "an observer counts");
    assert_ok(kv8_model_set_observer(f.model, NULL));
    assert_path(&f, 1, 1, KV8_PATH_PERSISTENT, NULL);
    kv8_observer_destroy(observer);
    kv8_cache_destroy(f.cache);
    f.cache = open_cache(f.model, KV8_F32, 16, SEQS, 64, false);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[i]));
    assert_path(&f, 1, 1, KV8_PATH_GRAPH, "e5m2 or int8");
    close_fixture(&f);
    open_wide(&f, KV8_PATH_GRAPH, 16, KV8_E4M3);
    assert_path(&f, 1, 1, KV8_PATH_GRAPH, "path is graph");
    close_fixture(&f);
    open_wide(&f, KV8_PATH_AUTO, 8, KV8_E4M3);
    assert_path(&f, 1, 1, KV8_PATH_GRAPH, "16 tokens");
    close_fixture(&f);
    open_fixture(&f, KV8_PATH_AUTO);
    assert_path(&f, 1, 1, KV8_PATH_GRAPH, "widths of gpt-oss");
    close_fixture(&f);
    open_fixture(&f, KV8_PATH_EAGER);
    assert_path(&f, 1, 1, KV8_PATH_EAGER, "path is eager");
    close_fixture(&f);
}

/* The step's one launch beside its page tables, which is of this kernel. */
static const kv8_tokens_args *run_tokens(fixture *f, int32_t num_seqs, const char *kernel) {
    int32_t first = stand_in_num_launches();
    assert_ok(run_step(f, num_seqs, 1));
    first += strcmp(stand_in_get_launch(first)->name, "kv8_page_lists__sm80") == 0;
    assert_int_equal(stand_in_num_launches(), first + 1);
    const stand_in_launch *const launch = stand_in_get_launch(first);
    assert_string_equal(launch->name, kernel);
    assert_true(launch->cooperative);
    assert_int_equal(launch->grid[0], 132);
    return launch->args;
}

/* Blocks of the layers that see all keys, and of those with a window, by tokens' lengths: eight for
 * who has few, of the others one for about as many keys each. */
static void tokens_share_blocks_by_their_keys(void **state) {
    enum { NUM = 5, WINDOW_BLOCKS = 8 };
    static const int32_t lengths[NUM] = {19, 4000, 201, 12000, 144};
    static const int32_t granules[NUM] = {0, 251, 13, 751, 10};
    static int32_t tokens[12000];
    (void)state;
    fixture f;
    open_device(&f);
    const kv8_model_options options = options_of(&f, KV8_PATH_AUTO);
    f.model = open_published(4, &options);
    f.cache = open_cache(f.model, KV8_E4M3, 16, SEQS, 12100, false);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_create(f.cache, &f.seqs[i]));
    for (int i = 0; i < NUM; i++)
        assert_ok(kv8_cache_extend(f.cache, f.seqs[i], lengths[i], tokens));
    const kv8_tokens_args *a = run_tokens(&f, NUM, "kv8_gpt_oss_tokens_e4m3_d64_x8__sm90a");
    assert_int_equal(a->num_tokens, NUM);
    assert_int_equal(a->window_left[0], -1);
    assert_int_equal(a->window_left[1], 127);
    for (int i = 0; i < NUM; i++) {
        const int32_t num = a->first_block[0][i + 1] - a->first_block[0][i];
        const int32_t want = WINDOW_BLOCKS + (132 - NUM * WINDOW_BLOCKS) * granules[i] / 1025;
        assert_int_equal(a->positions[i], lengths[i]);
        assert_int_equal(a->first_block[1][i], WINDOW_BLOCKS * i);
        if (num < want || num > want + 1) fail_msg("token %d: %d blocks of %d", i, num, want);
    }
    assert_int_equal(a->first_block[0][NUM], 132);
    assert_int_equal(a->first_block[1][NUM], WINDOW_BLOCKS * NUM);
    a = run_tokens(&f, 2, "kv8_gpt_oss_tokens_e4m3_d64_x4__sm90a");
    assert_int_equal(a->num_tokens, 2);
    assert_int_equal(a->first_block[0][1], WINDOW_BLOCKS);
    assert_int_equal(a->first_block[0][2], 132);
    close_fixture(&f);
}

/* The first layer's experts: rows of one sequence choose alike, those of several as if by chance.
 */
static void check_experts(int32_t num_seqs, int32_t count, const char *kernel) {
    fixture f;
    open_fixture(&f, KV8_PATH_AUTO);
    int32_t i = stand_in_num_launches();
    assert_ok(run_step(&f, num_seqs, count));
    while (i < stand_in_num_launches() &&
           strncmp(stand_in_get_launch(i)->name, "kv8_experts_gate_up", 19) != 0)
        i++;
    assert_true(i < stand_in_num_launches());
    assert_string_equal(stand_in_get_launch(i)->name, kernel);
    close_fixture(&f);
}
static void experts_follow_the_sequences_of_a_step(void **state) {
    (void)state;
    check_experts(1, 15, "kv8_experts_gate_up_x16__sm90");
    check_experts(1, 16, "kv8_experts_gate_up_x48__sm90a");
    check_experts(1, 40, "kv8_experts_gate_up_x192__sm90a");
    check_experts(2, 20, "kv8_experts_gate_up_x192__sm90a");
    check_experts(4, 10, "kv8_experts_gate_up_x48__sm90a");
}

/* A chunk beside decode: the last layer has a row of each sequence, of which none is like another.
 */
static void experts_of_the_last_layer_see_no_chunk(void **state) {
    enum { NUM = 11, CHUNK = 40 };
    (void)state;
    int32_t indptr[NUM + 1] = {0};
    const char *last = NULL;
    fixture f;
    open_fixture(&f, KV8_PATH_AUTO);
    for (int32_t i = 0; i < NUM; i++) indptr[i + 1] = CHUNK + i;
    int32_t i = stand_in_num_launches();
    assert_ok(run_rows(&f, NUM, indptr));
    for (; i < stand_in_num_launches(); i++) {
        const char *const name = stand_in_get_launch(i)->name;
        if (strncmp(name, "kv8_experts_gate_up", 19) != 0) continue;
        if (last == NULL) assert_string_equal(name, "kv8_experts_gate_up_x192__sm90a");
        last = name;
    }
    assert_non_null(last);
    assert_string_equal(last, "kv8_experts_gate_up_x8__sm90");
    close_fixture(&f);
}

/* Also where the persistent path was asked for: a profile looks into the graph in its place. */
static void a_profile_by_kernel_is_of_the_graph(void **state) {
    (void)state;
    static const kv8_step_path paths[] = {KV8_PATH_AUTO, KV8_PATH_PERSISTENT};
    for (int p = 0; p < 2; p++) {
        fixture f;
        open_wide(&f, paths[p], 16, KV8_E4M3);
        assert_path(&f, 1, 1, KV8_PATH_PERSISTENT, NULL);
        assert_ok(kv8_model_begin_profile(f.model, 1));
        assert_path(&f, 1, 1, KV8_PATH_GRAPH, "a profile tells kernels apart");
        assert_ok(kv8_model_end_profile(f.model, NULL));
        assert_ok(kv8_model_begin_profile(f.model, 0));
        assert_path(&f, 1, 1, KV8_PATH_PERSISTENT, NULL);
        assert_ok(kv8_model_end_profile(f.model, NULL));
        close_fixture(&f);
    }
}

/* A step whose logits stay on the GPU, as the engine makes them; how often it is waited for. */
static int64_t waits_of_step(fixture *f) {
    const int32_t indptr[] = {0, 1, 2}, rows[] = {0, 1};
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = 2,
                           .seqs = f->seqs,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = 2,
                           .logit_rows = rows};
    bool draws = true;
    const int64_t before = stand_in_num_calls("cuStreamSynchronize");
    for (int i = 0; i < 2; i++) assert_ok(kv8_cache_extend(f->cache, f->seqs[i], 1, &ids[i]));
    assert_ok(kv8_model_step_extended(f->model, f->cache, &step, NULL, &draws));
    return stand_in_num_calls("cuStreamSynchronize") - before;
}

/* What lies between steps is not the profile's. */
static void a_profile_of_graphs_waits_for_no_step(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, KV8_PATH_GRAPH);
    assert_ok(run_step(&f, 2, 1));
    assert_ok(kv8_model_begin_profile(f.model, 1));
    assert_int_equal(waits_of_step(&f), 1);
    assert_ok(kv8_model_end_profile(f.model, NULL));
    assert_int_equal(waits_of_step(&f), 0);
    assert_ok(kv8_model_begin_profile(f.model, 0));
    for (int i = 0; i < 3; i++) assert_int_equal(waits_of_step(&f), 0);
    kv8_profile profile = KV8_PROFILE_INIT;
    assert_ok(kv8_model_end_profile(f.model, &profile));
    assert_int_equal(profile.num_steps, 3);
    close_fixture(&f);
}

/* Kernel by kernel a step is one piece to such a profile, beside the copies ahead of it. */
static void a_profile_has_an_eager_step_as_a_whole(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f, KV8_PATH_EAGER);
    assert_ok(run_step(&f, 2, 1));
    assert_ok(kv8_model_begin_profile(f.model, 0));
    const int64_t before = stand_in_num_calls("cuEventRecord");
    for (int i = 0; i < 3; i++) assert_ok(run_step(&f, 2, 1));
    assert_true(stand_in_num_calls("cuEventRecord") - before <= 3 * 10);
    kv8_profile profile = KV8_PROFILE_INIT;
    assert_ok(kv8_model_end_profile(f.model, &profile));
    int32_t num_steps = 0;
    for (int32_t i = 0; i < profile.num_rows; i++) {
        const kv8_profile_row *const row = &profile.rows[i];
        assert_true(row->work == KV8_WORK_MOVEMENT || strcmp(row->name, "step") == 0);
        if (strcmp(row->name, "step") == 0) num_steps += row->num_launches;
        if (strcmp(row->name, "step") == 0) assert_int_equal(row->work, KV8_WORK_WHOLE);
    }
    assert_int_equal(num_steps, 3);
    close_fixture(&f);
}

static void what_cannot_be_planned_is_refused(void **state) {
    (void)state;
    fixture f;
    kv8_step_plan told = KV8_STEP_PLAN_INIT;
    open_fixture(&f, KV8_PATH_PERSISTENT);
    assert_refused(kv8_model_plan_step(f.model, f.cache, NULL, 1, 1, &told), KV8_ERR_UNSUPPORTED,
                   "widths of gpt-oss");
    assert_refused(run_step(&f, 1, 1), KV8_ERR_UNSUPPORTED, "widths of gpt-oss");
    assert_refused(kv8_model_plan_step(f.model, f.cache, NULL, 2, 1, &told), KV8_ERR_INVALID,
                   "2 requests and 1 rows");
    /* A model on the host is told of a GPU's steps. */
    kv8_model *const model = open_model(directory, KV8_ISA_BEST);
    kv8_cache *const cache = open_cache(model, KV8_E4M3, 16, SEQS, 64, false);
    assert_refused(kv8_model_plan_step(model, cache, NULL, 1, 1, &told), KV8_ERR_UNSUPPORTED,
                   "device is NULL");
    assert_ok(kv8_model_plan_step(model, cache, f.device, 1, 1, &told));
    assert_int_equal(told.path, KV8_PATH_GRAPH);
    assert_non_null(strstr(told.why_not_persistent, "widths of gpt-oss"));
    close_fixture(&f);
    /* No kernel attends to the cache's format: there is no path to tell. */
    const stand_in_gpu old = {75, 40, (size_t)16 << 30};
    kv8_device *device = NULL;
    stand_in_set_gpus(&old, 1);
    assert_ok(kv8_device_open(&device, 0));
    assert_refused(kv8_model_plan_step(model, cache, device, 1, 1, &told), KV8_ERR_UNSUPPORTED,
                   "takes the spec on");
    kv8_device_close(device);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_is_what_happens),
        cmocka_unit_test(tokens_share_blocks_by_their_keys),
        cmocka_unit_test(experts_follow_the_sequences_of_a_step),
        cmocka_unit_test(experts_of_the_last_layer_see_no_chunk),
        cmocka_unit_test(a_profile_by_kernel_is_of_the_graph),
        cmocka_unit_test(a_profile_has_an_eager_step_as_a_whole),
        cmocka_unit_test(a_profile_of_graphs_waits_for_no_step),
        cmocka_unit_test(what_cannot_be_planned_is_refused),
    };
    return cmocka_run_group_tests_name("paths", tests, make_model, drop_model);
}
