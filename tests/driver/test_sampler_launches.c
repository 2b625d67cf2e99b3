/* test_sampler_launches.c - the host's part of the draw on a GPU on the stand-in driver: what goes
 * over and what is launched, what does not fit, calls that fail.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_plan_case.h"
#include "sampler_args.h"
#include "sampler_device.h"

enum { OUT_OF_MEMORY = 2, UNKNOWN = 999, VOCAB = 201088, ROWS = 3, MOST_CHANGES = 1 << 18 };

/* What the kernel finds. */
static kv8_draw_args seen;
static kv8_draw_row rows[ROWS];
static kv8_draw_change changes[8];
static uint32_t mask_word;

static void answer(const stand_in_launch *launch) {
    memcpy(&seen, launch->args, sizeof seen);
    memcpy(rows, seen.rows, sizeof rows);
    memcpy(changes, seen.changes, sizeof changes);
    mask_word = seen.masks[seen.vocab_size / 32];
    for (int i = 0; i < ROWS; i++) {
        seen.drawn[i] = (kv8_drawn_row){.token = 7 + i, .bad_id = -1, .high = 3, .logit = 2};
        seen.drawn[i].sum = 1ull << 37; /* twice the largest's weight */
        seen.tops[i][0] = (kv8_drawn_top){5, 3};
    }
    seen.drawn[1].bad_id = 11;
    seen.drawn[1].bad = -INFINITY;
}

typedef struct scene {
    stand s;
    kv8_device_sampler *sampler;
    kv8_sampling sampling;
    int32_t history[6], bias_ids[1];
    float bias[1];
    kv8_draw draws[ROWS];
} scene;

/* The middle row has a bias, penalties and the second mask. */
static void open_scene(scene *c, int32_t sm_version, int32_t vocab) {
    static const kv8_sampling greedy = KV8_SAMPLING_INIT;
    *c = (scene){.s = stand_open(sm_version, H200_SMS),
                 .sampling = KV8_SAMPLING_INIT,
                 .history = {4, 9, 4, 9, 9, 2},
                 .bias_ids = {9},
                 .bias = {1.5f}};
    assert_ok(kv8_device_sampler_create(&c->sampler, c->s.device, c->s.stream, NULL, vocab, ROWS,
                                        MOST_CHANGES, NULL));
    c->sampling.temperature = 0.5f;
    c->sampling.top_p = 0.25f;
    c->sampling.min_p = 0.5f;
    c->sampling.presence_penalty = 1;
    c->sampling.bias_ids = c->bias_ids;
    c->sampling.bias = c->bias;
    c->sampling.num_bias = 1;
    for (int i = 0; i < ROWS; i++)
        c->draws[i] = (kv8_draw){.sampling = &greedy, .mask = -1, .token = -1};
    c->draws[1].sampling = &c->sampling;
    c->draws[1].history = (kv8_history){c->history, 3, 6};
    c->draws[1].mask = 1;
    c->draws[2].num_logprobs = 1;
    memset(kv8_device_sampler_mask(c->sampler, 0), 0, (size_t)(vocab + 31) / 32 * 4);
    memset(kv8_device_sampler_mask(c->sampler, 1), 0, (size_t)(vocab + 31) / 32 * 4);
    kv8_device_sampler_mask(c->sampler, 1)[0] = 0xabcd;
}
static bool takes(const scene *c) {
    int64_t num_changes = 0;
    for (int i = 0; i < ROWS; i++)
        num_changes += kv8_device_sampler_changes(c->sampler, c->draws[i].sampling,
                                                  c->draws[i].history.num_tokens);
    return kv8_device_sampler_takes(c->sampler, ROWS, num_changes);
}
static void close_scene(scene *c) {
    kv8_device_sampler_destroy(c->sampler);
    stand_close(&c->s);
}

static void rows_go_over_and_tokens_come_back(void **state) {
    (void)state;
    scene c;
    open_scene(&c, 90, VOCAB);
    float *const logits = (void *)c.s.memory;
    kv8_drawn drawn[ROWS];
    kv8_logprob tops[ROWS];
    stand_in_on_launch(answer);
    assert_true(takes(&c));
    assert_ok(kv8_device_sampler_begin(c.sampler, logits, NULL, c.draws, ROWS));
    assert_ok(kv8_device_sampler_end(c.sampler, c.draws, ROWS, drawn, tops, 1));
    stand_in_on_launch(NULL);
    assert_ptr_equal(seen.logits, logits);
    assert_true(rows[0].factor == 0 && rows[1].factor == 2);
    assert_true(rows[1].top_p == 1ull << 62 && rows[1].least == 1ull << 35);
    assert_true(rows[0].num_changes == 0 && rows[2].num_changes == 0 && rows[0].num_tops == -1);
    assert_true(rows[2].num_tops == 1 && rows[2].mask == -1 && rows[1].mask == 1);
    assert_int_equal(mask_word, 0xabcd);
    /* Id 9: biased, in the prompt, generated twice; 4 in the prompt alone; 2 generated. */
    assert_int_equal(rows[1].num_changes, 3);
    const kv8_draw_change *const of = changes + rows[1].first_change;
    assert_true(of[0].id == 9 && of[0].count == 2 && of[0].bias == 1.5f);
    assert_true(of[1].id == 4 && of[1].count == KV8_SEEN_IN_PROMPT && of[1].bias == 0);
    assert_true(of[2].id == 2 && of[2].count == 1);
    assert_true(drawn[0].token == 7 && drawn[0].bad_id == -1);
    assert_true(drawn[1].bad_id == 11 && drawn[1].bad == -INFINITY);
    assert_true(fabs((double)drawn[2].logprob + 1 + log(2)) < 1e-6);
    assert_true(tops[2].token == 5 && fabs((double)tops[2].logprob + log(2)) < 1e-6);
    close_scene(&c);
}

/* Settings are read, and what is found is written, where the host has them. */
static void nothing_is_copied(void **state) {
    (void)state;
    scene c;
    open_scene(&c, 90, VOCAB);
    const int64_t before = stand_in_num_calls("cuMemcpyAsync");
    assert_ok(kv8_device_sampler_begin(c.sampler, (void *)c.s.memory, NULL, c.draws, 1));
    assert_int_equal(stand_in_num_calls("cuMemcpyAsync"), before);
    assert_ok(kv8_stream_synchronize(c.s.stream));
    close_scene(&c);
}

/* Every id is some warp's, and a block's ids fit its shared memory where a cluster has a row. */
static void a_row_takes_a_cluster_or_a_block(void **state) {
    (void)state;
    static const struct {
        int32_t sm_version, vocab;
        uint32_t blocks;
    } cases[] = {{90, VOCAB, 8}, {100, VOCAB, 8}, {90, 33, 8}, {80, VOCAB, 1}, {90, 600000, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        scene c;
        const int32_t before = stand_in_num_launches();
        open_scene(&c, cases[i].sm_version, cases[i].vocab);
        assert_ok(kv8_device_sampler_begin(c.sampler, (void *)c.s.memory, NULL, c.draws, ROWS));
        assert_ok(kv8_stream_synchronize(c.s.stream));
        assert_int_equal(stand_in_num_launches(), before + 1);
        const stand_in_launch *const launch = stand_in_get_launch(before);
        const kv8_draw_args *const args = launch->args;
        const int64_t warps = (int64_t)cases[i].blocks * KV8_DRAW_WARPS;
        assert_int_equal(launch->grid[0], ROWS * cases[i].blocks);
        assert_int_equal(launch->cluster[0], cases[i].blocks == 1 ? 0 : cases[i].blocks);
        assert_int_equal(args->warp_ids % 32, 0);
        assert_true(args->warp_ids * warps >= cases[i].vocab);
        if (cases[i].blocks > 1)
            assert_int_equal(launch->dynamic_bytes, args->warp_ids * KV8_DRAW_WARPS * 4);
        close_scene(&c);
    }
}

/* So many that blocks keep nearly all places for them busy, two a multiprocessor. */
static void many_rows_take_a_block_each(void **state) {
    (void)state;
    enum { MOST = 528 };
    static const struct {
        int32_t num;
        uint32_t blocks; /* of a row */
    } cases[] = {{1, 8},   {132, 8}, {231, 8}, {232, 1}, {264, 1},
                 {265, 8}, {462, 8}, {463, 1}, {MOST, 1}};
    static const kv8_sampling greedy = KV8_SAMPLING_INIT;
    static kv8_draw draws[MOST];
    for (int i = 0; i < MOST; i++)
        draws[i] = (kv8_draw){.sampling = &greedy, .mask = -1, .token = -1};
    stand s = stand_open(90, H200_SMS);
    kv8_device_sampler *sampler = NULL;
    assert_ok(kv8_device_sampler_create(&sampler, s.device, s.stream, NULL, VOCAB, MOST,
                                        MOST_CHANGES, NULL));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int32_t before = stand_in_num_launches();
        assert_ok(kv8_device_sampler_begin(sampler, (void *)s.memory, NULL, draws, cases[i].num));
        assert_ok(kv8_stream_synchronize(s.stream));
        const stand_in_launch *const launch = stand_in_get_launch(before);
        const kv8_draw_args *const args = launch->args;
        assert_int_equal(launch->grid[0], (uint32_t)cases[i].num * cases[i].blocks);
        assert_true(args->warp_ids * (int64_t)cases[i].blocks * KV8_DRAW_WARPS >= VOCAB);
    }
    kv8_device_sampler_destroy(sampler);
    stand_close(&s);
}

/* With maxima plain rows take a block each, of any number; where one is cut they are of no use. */
static void plain_rows_with_maxima_take_blocks(void **state) {
    (void)state;
    static const kv8_sampling greedy = KV8_SAMPLING_INIT;
    kv8_sampling cut = KV8_SAMPLING_INIT, changed = KV8_SAMPLING_INIT;
    scene c;
    open_scene(&c, 90, VOCAB);
    const float *const maxima = (void *)(c.s.memory + 4096);
    static const float bias = 1;
    static const int32_t biased = 5;
    cut.temperature = changed.temperature = 1;
    cut.top_p = 0.5f;
    changed.num_bias = 1;
    changed.bias = &bias;
    changed.bias_ids = &biased;
    const struct {
        kv8_draw last;
        bool by_block, by_maxima;
    } cases[] = {{{.sampling = &greedy, .mask = -1, .token = -1}, true, true},
                 {{.sampling = &cut, .mask = -1, .token = -1}, false, false},
                 {{.sampling = &changed, .mask = -1, .token = -1}, false, true},
                 {{.sampling = &greedy, .mask = 0, .token = -1}, false, true},
                 {{.sampling = &greedy, .mask = -1, .token = -1, .num_logprobs = 1}, false, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int32_t before = stand_in_num_launches();
        kv8_draw draws[ROWS];
        for (int r = 0; r < ROWS; r++) draws[r] = cases[0].last;
        draws[ROWS - 1] = cases[i].last;
        assert_ok(kv8_device_sampler_begin(c.sampler, (void *)c.s.memory, maxima, draws, ROWS));
        assert_ok(kv8_stream_synchronize(c.s.stream));
        const stand_in_launch *const launch = stand_in_get_launch(before);
        const kv8_draw_args *const args = launch->args;
        assert_int_equal(launch->grid[0], ROWS * (cases[i].by_block ? 1 : KV8_DRAW_BLOCKS));
        assert_ptr_equal(args->maxima, cases[i].by_maxima ? maxima : NULL);
    }
    close_scene(&c);
}

static void more_changes_than_fit_are_not_taken(void **state) {
    (void)state;
    enum { LONG = 90000 };
    static int32_t history[LONG];
    scene c;
    open_scene(&c, 90, VOCAB);
    for (int i = 0; i < ROWS; i++) c.draws[i].sampling = &c.sampling;
    for (int i = 0; i < ROWS; i++) c.draws[i].history = (kv8_history){history, 1, LONG - 5000};
    assert_true(takes(&c));
    for (int i = 0; i < ROWS; i++) c.draws[i].history.num_tokens = LONG;
    assert_false(takes(&c));
    c.sampling.presence_penalty = 0;
    assert_true(takes(&c));
    close_scene(&c);
}

/* What goes over of rows with long histories and others without, whoever lists it. */
enum { MANY = 40, LONG_HISTORY = 3000, LISTED = 1 << 17 };
static kv8_draw_change listed[2][LISTED];
static kv8_draw_row listed_rows[2][MANY];
static int whose;
static void keep_lists(const stand_in_launch *launch) {
    const kv8_draw_args *const args = launch->args;
    memcpy(listed_rows[whose], args->rows, sizeof listed_rows[whose]);
    const kv8_draw_row *const last = &args->rows[MANY - 1];
    assert_in_range(last->first_change + last->num_changes, 1, LISTED);
    memcpy(listed[whose], args->changes,
           (size_t)(last->first_change + last->num_changes) * sizeof listed[0][0]);
}

static void threads_list_as_one_does(void **state) {
    (void)state;
    static int32_t history[MANY][LONG_HISTORY];
    kv8_threads *threads[2] = {NULL};
    kv8_sampling penalised = KV8_SAMPLING_INIT;
    const kv8_sampling greedy = KV8_SAMPLING_INIT;
    kv8_draw draws[MANY];
    penalised.frequency_penalty = 1;
    for (int i = 0; i < MANY; i++) {
        for (int k = 0; k < LONG_HISTORY; k++) history[i][k] = (k * (i + 3) + i) % (700 + 90 * i);
        draws[i] =
            (kv8_draw){.sampling = i % 5 == 2 ? &greedy : &penalised, .mask = -1, .token = -1};
        draws[i].history = (kv8_history){history[i], 40 * i, LONG_HISTORY};
    }
    assert_ok(kv8_threads_create(&threads[1], 3));
    for (whose = 0; whose < 2; whose++) {
        stand s = stand_open(90, H200_SMS);
        kv8_device_sampler *sampler = NULL;
        assert_ok(kv8_device_sampler_create(&sampler, s.device, s.stream, threads[whose], VOCAB,
                                            MANY, MOST_CHANGES, NULL));
        stand_in_on_launch(keep_lists);
        assert_ok(kv8_device_sampler_begin(sampler, (void *)s.memory, NULL, draws, MANY));
        assert_ok(kv8_stream_synchronize(s.stream));
        stand_in_on_launch(NULL);
        kv8_device_sampler_destroy(sampler);
        stand_close(&s);
    }
    kv8_threads_destroy(threads[1]);
    assert_memory_equal(listed_rows[0], listed_rows[1], sizeof listed_rows[0]);
    assert_memory_equal(listed[0], listed[1], sizeof listed[0]);
    int32_t end = 0;
    for (int i = 0; i < MANY; i++) {
        const kv8_draw_row *const row = &listed_rows[1][i];
        assert_int_equal(row->first_change, end);
        end += row->num_changes;
        int64_t count = 0; /* of tokens generated */
        for (int32_t k = row->first_change; k < end; k++)
            if (listed[1][k].count > 0) count += listed[1][k].count;
        assert_int_equal(count, i % 5 == 2 ? 0 : LONG_HISTORY - 40 * i);
    }
}

static void calls_that_fail_leave_nothing_behind(void **state) {
    (void)state;
    stand s = stand_open(90, H200_SMS);
    const stand_in_live before = stand_in_get_live();
    int64_t nth = 1;
    for (;; nth++) {
        kv8_device_sampler *sampler = NULL;
        stand_in_fail(NULL, nth, OUT_OF_MEMORY);
        const kv8_status status = kv8_device_sampler_create(&sampler, s.device, s.stream, NULL,
                                                            VOCAB, ROWS, MOST_CHANGES, NULL);
        const char *const failed = stand_in_failed_call();
        stand_in_fail(NULL, 0, 0);
        assert_true(status == KV8_OK ? sampler != NULL : sampler == NULL && failed != NULL);
        kv8_device_sampler_destroy(sampler);
        const stand_in_live live = stand_in_get_live();
        assert_int_equal(live.memory, before.memory);
        assert_int_equal(live.host_memory, before.host_memory);
        if (failed == NULL) break;
    }
    assert_true(nth > 8);
    stand_close(&s);
    scene c;
    open_scene(&c, 90, VOCAB);
    stand_in_fail("cuLaunchKernelEx", 1, UNKNOWN);
    assert_refused(kv8_device_sampler_begin(c.sampler, (void *)c.s.memory, NULL, c.draws, ROWS),
                   KV8_ERR_DEVICE, "kv8_draw_cluster");
    close_scene(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(rows_go_over_and_tokens_come_back, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(nothing_is_copied, reset, check_nothing_lives),
        cmocka_unit_test_setup_teardown(a_row_takes_a_cluster_or_a_block, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(many_rows_take_a_block_each, reset, check_nothing_lives),
        cmocka_unit_test_setup_teardown(plain_rows_with_maxima_take_blocks, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(more_changes_than_fit_are_not_taken, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(threads_list_as_one_does, reset, check_nothing_lives),
        cmocka_unit_test_setup_teardown(calls_that_fail_leave_nothing_behind, reset,
                                        check_nothing_lives),
    };
    return cmocka_run_group_tests_name("sampler_launches", tests, NULL, NULL);
}
