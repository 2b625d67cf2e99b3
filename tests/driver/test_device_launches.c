/* test_device_launches.c - prepare and run of attention's device plans on the stand-in driver:
 * launches and workspaces on GPUs of many sizes, one cut of the work for many runs, directly and
 * from graphs, and launches that fail.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_plan_case.h"
#include "prefill_schedule_args.h"

/* --- launches and workspaces --- */

static void check_within(const stand_plan *p, const void *begin, size_t bytes) {
    const uint8_t *const at = begin;
    assert_true(at >= p->workspace && (uintptr_t)at % sizeof(float) == 0);
    assert_true((size_t)(at - p->workspace) + bytes <= p->workspace_size);
}

/* The partial results of every block lie in the workspace, apart from each other. */
static void check_decode_workspace(const stand_plan *p, const stand_in_launch *launch) {
    const kv8_kernel_args *const a = launch->args;
    const kv8_decode_tail *const t = &a->decode;
    const size_t grid = launch->grid[0], warps = launch->block[0] / 32;
    const size_t fragments = (size_t)t->heads_per_block * (size_t)a->v_head_dim / 16;
    const size_t splits = 2 * grid * fragments;
    const size_t streams = (size_t)a->batch * (size_t)t->head_blocks;
    check_within(p, t->arrivals, (2 * grid + streams) * (warps - 1) * sizeof(uint32_t));
    check_within(p, t->partial_sums, splits * 16 * sizeof(float));
    check_within(p, t->partials, splits * 128 * sizeof(float));
    assert_true((const void *)t->arrivals < (const void *)t->partial_sums);
    assert_true(t->partial_sums + splits * 16 <= t->partials);
}

static void decode_fills_the_gpu_and_stays_in_its_workspace(void **state) {
    (void)state;
    static const int32_t sms[] = {1, 78, 132, 148};
    for (size_t i = 0; i < sizeof sms / sizeof sms[0]; i++) {
        stand s = stand_open(90, sms[i]);
        for (int32_t batch = 2; batch <= 256; batch *= 2) {
            kv8_attention_spec spec = stand_spec();
            spec.max_batch = spec.max_total_q = batch;
            stand_plan p;
            stand_args a;
            assert_ok(stand_plan_open(&p, &s, &spec));
            stand_args_make(&a, &s, &spec, batch);
            const stand_in_launch *const launch = stand_run(&s, &p, &a);
            assert_int_equal(launch->grid[0] % (uint32_t)sms[i], 0);
            assert_true(launch->grid[0] > 0 && launch->grid[0] <= 4u * (uint32_t)sms[i]);
            assert_int_equal(launch->grid[1] * launch->grid[2], 1);
            assert_true(launch->overlaps_previous);
            const kv8_kernel_args *const args = launch->args;
            assert_int_equal(args->decode.heads_per_block * args->decode.head_blocks, 8);
            check_decode_workspace(&p, launch);
            stand_plan_close(&p, &s);
        }
        stand_close(&s);
    }
}

/* Prefill's work list and partial results: arrays of known lengths within the workspace, in places
 * of their own; the others begin there too. */
static void check_prefill_workspace(const stand_plan *p, const stand_in_launch *launch) {
    const kv8_kernel_args *const a = launch->args;
    const kv8_prefill_tail *const t = &a->prefill;
    const size_t groups = (size_t)t->max_slots * (size_t)t->block_rows / 64;
    const struct {
        const void *at;
        size_t bytes;
    } arrays[] = {
        {t->queue, sizeof(int32_t)},
        {t->arrivals, groups * sizeof(uint32_t)},
        {t->block_indptr, ((size_t)a->batch + 1) * sizeof(int32_t)},
        {t->partial_sums, groups * 2 * 128 * 2 * sizeof(float)},
        {t->partials, groups * (size_t)(a->v_head_dim / 2) * 128 * sizeof(float)},
        {t->items, 1},
        {t->blocks, 1},
        {t->broken, 1},
    };
    enum { NUM_ARRAYS = sizeof arrays / sizeof arrays[0] };
    for (int i = 0; i < NUM_ARRAYS; i++) {
        const uint8_t *const at = arrays[i].at;
        if (arrays[i].bytes == 0) continue; /* rows are never split */
        check_within(p, at, arrays[i].bytes);
        for (int j = 0; j < NUM_ARRAYS; j++) {
            const uint8_t *const other = arrays[j].at;
            assert_true(i == j || other < at || other >= at + arrays[i].bytes);
        }
    }
    assert_int_equal(t->block_rows % 64, 0);
    assert_int_equal(t->num_blocks, launch->grid[0] * launch->grid[1] * launch->grid[2]);
    assert_true(t->max_tiles * 128 >= 8192 && t->max_tiles * 128 < 8192 + 3 * 128);
}

static void prefill_fills_the_gpu_and_stays_in_its_workspace(void **state) {
    (void)state;
    static const stand_in_gpu gpus[] = {{80, 108, 0}, {90, 1, 0}, {90, 132, 0}, {120, 170, 0}};
    for (size_t i = 0; i < sizeof gpus / sizeof gpus[0]; i++) {
        stand s = stand_open(gpus[i].sm_version, gpus[i].num_sms);
        for (int32_t batch = 1; batch <= 64; batch *= 8) {
            kv8_attention_spec spec = stand_spec();
            spec.max_batch = batch;
            spec.max_total_q = batch * PREFILL;
            stand_plan p;
            stand_args a;
            assert_ok(stand_plan_open(&p, &s, &spec));
            stand_args_make(&a, &s, &spec, batch);
            const stand_in_launch *const launch = stand_run(&s, &p, &a);
            assert_int_equal(launch->grid[0] % (uint32_t)gpus[i].num_sms, 0);
            assert_int_equal(launch->args_bytes, sizeof(kv8_kernel_args));
            check_block(launch->args, &spec, &a);
            check_prefill_workspace(&p, launch);
            stand_plan_close(&p, &s);
        }
        stand_close(&s);
    }
}

/* Of one row of one request, and of several, whose tile is one whatever their number. */
static void a_cluster_serves_a_head_of_one_request(void **state) {
    (void)state;
    static const struct {
        int32_t rows;
        const char *name;
    } cases[] = {{1, "kv8_decode_f16_e4m3_d64_cluster__sm90"},
                 {3, "kv8_decode_f16_e4m3_d64_wide64__sm90"},
                 {8, "kv8_decode_f16_e4m3_d64_wide64__sm90"},
                 {16, "kv8_decode_f16_e4m3_d64_wide128__sm90"}};
    stand s = stand_open(90, H200_SMS);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kv8_attention_spec spec = stand_spec();
        spec.max_batch = 1;
        spec.max_total_q = cases[i].rows;
        spec.max_kv_len = 1024;
        stand_plan p;
        stand_args a;
        assert_ok(stand_plan_open(&p, &s, &spec));
        stand_args_make(&a, &s, &spec, 1);
        const stand_in_launch *const launch = stand_run(&s, &p, &a);
        assert_string_equal(launch->name, cases[i].name);
        assert_int_equal(launch->cluster[0], launch->grid[0]);
        assert_int_equal(launch->cluster[0], 16);
        assert_int_equal(launch->grid[1], 8);
        assert_int_equal(launch->grid[2], 1);
        assert_int_equal(launch->block[0], 256);
        check_block(launch->args, &spec, &a);
        stand_plan_close(&p, &s);
    }
    stand_close(&s);
}

/* --- prepare once, run often; graphs --- */

static kv8_attention_spec prefill_spec(void) {
    kv8_attention_spec spec = stand_spec();
    spec.max_total_q = spec.max_batch * PREFILL;
    return spec;
}
static int32_t num_scheduled(int32_t first) {
    int32_t count = 0;
    for (int32_t i = first; i < stand_in_num_launches(); i++)
        count += strcmp(stand_in_get_launch(i)->name, "kv8_prefill_schedule__sm80") == 0;
    return count;
}

/* Prepare and the runs of a few layers. */
enum { RUNS = 3 };
static void prepare_and_run(const stand *s, const stand_plan *p, stand_args *a) {
    a->args.o = s->memory + 0x40000;
    assert_ok(kv8_attention_device_prepare(p->plan, s->stream, &a->args, p->workspace));
    for (int i = 0; i < RUNS; i++) {
        a->args.o = s->memory + 0x40000 + 0x1000 * i; /* a layer's own */
        assert_ok(kv8_attention_device_run(p->plan, s->stream, &a->args, p->workspace));
    }
}

/* One launch a run, two where decode goes beside prefill, and one of prefill's prepare; recorded
 * and replayed, the same. */
static void work_is_cut_once_for_all_runs(void **state) {
    (void)state;
    stand s = stand_open(90, H200_SMS);
    for (int prefill = 0; prefill < 2; prefill++) {
        const kv8_attention_spec spec = prefill ? prefill_spec() : stand_spec();
        stand_plan p;
        stand_args a;
        kv8_graph *graph = NULL;
        assert_ok(stand_plan_open(&p, &s, &spec));
        stand_args_make(&a, &s, &spec, 64);
        int32_t first = stand_in_num_launches();
        prepare_and_run(&s, &p, &a);
        assert_ok(kv8_stream_synchronize(s.stream));
        const int32_t direct = first;
        const int32_t launches = stand_in_num_launches() - first, cuts = num_scheduled(first);
        assert_int_equal(launches, RUNS * (1 + prefill) + cuts);
        assert_int_equal(cuts, prefill);
        assert_ok(kv8_stream_capture_begin(s.stream));
        prepare_and_run(&s, &p, &a);
        assert_ok(kv8_stream_capture_end(s.stream, &graph));
        memset(&a, 0, sizeof a); /* the caller's structs may go */
        for (int replay = 0; replay < 2; replay++) {
            first = stand_in_num_launches();
            assert_ok(kv8_graph_launch(graph, s.stream));
            assert_ok(kv8_stream_synchronize(s.stream));
            assert_int_equal(stand_in_num_launches() - first, launches);
            for (int32_t i = 0; i < launches; i++) {
                const stand_in_launch *const again = stand_in_get_launch(first + i);
                const stand_in_launch *const was = stand_in_get_launch(direct + i);
                assert_string_equal(again->name, was->name);
                assert_memory_equal(again->grid, was->grid, sizeof was->grid);
                assert_memory_equal(again->args, was->args, was->args_bytes);
            }
        }
        kv8_graph_destroy(graph);
        stand_plan_close(&p, &s);
    }
    stand_close(&s);
}

/* Where masks begin to hide keys is found before the work is cut, a row a warp. */
static void masks_are_looked_at_before_work_is_cut(void **state) {
    (void)state;
    stand s = stand_open(90, H200_SMS);
    kv8_attention_spec spec = prefill_spec();
    spec.has_mask = 1;
    stand_plan p;
    stand_args a;
    assert_ok(stand_plan_open(&p, &s, &spec));
    stand_args_make(&a, &s, &spec, 64);
    a.args.mask_bits = s.memory;
    a.args.mask_indptr = (const int64_t *)(const void *)s.memory;
    const int32_t first = stand_in_num_launches();
    assert_ok(kv8_attention_device_prepare(p.plan, s.stream, &a.args, p.workspace));
    assert_ok(kv8_stream_synchronize(s.stream));
    assert_int_equal(stand_in_num_launches() - first, 2);
    const stand_in_launch *const masks = stand_in_get_launch(first);
    assert_string_equal(masks->name, "kv8_prefill_masks__sm80");
    assert_int_equal(masks->grid[0] * masks->block[0] / 32, spec.max_total_q);
    assert_int_equal(num_scheduled(first + 1), 1);
    const kv8_prefill_schedule_args *const cut = stand_in_get_launch(first + 1)->args;
    assert_memory_equal(masks->args, cut, sizeof *cut);
    check_within(&p, cut->unmasked_to, (size_t)spec.max_total_q * sizeof(int32_t));
    stand_plan_close(&p, &s);
    stand_close(&s);
}

/* --- failures --- */

static kv8_status prepare_then_run(const stand *s, const stand_plan *p, const stand_args *a) {
    KV8_TRY(kv8_attention_device_prepare(p->plan, s->stream, &a->args, p->workspace));
    return kv8_attention_device_run(p->plan, s->stream, &a->args, p->workspace);
}
static void a_launch_that_fails_is_named_and_the_plan_stays(void **state) {
    (void)state;
    stand s = stand_open(90, H200_SMS);
    for (int prefill = 0; prefill < 2; prefill++) {
        const kv8_attention_spec spec = prefill ? prefill_spec() : stand_spec();
        stand_plan p;
        stand_args a;
        assert_ok(stand_plan_open(&p, &s, &spec));
        stand_args_make(&a, &s, &spec, 64);
        int32_t num_failed = 0;
        for (;; num_failed++) {
            stand_in_fail("cuLaunchKernelEx", num_failed + 1, 701);
            const kv8_status status = prepare_then_run(&s, &p, &a);
            if (stand_in_failed_call() == NULL) break;
            assert_int_equal(status, KV8_ERR_DEVICE);
            assert_non_null(strstr(kv8_status_message(), "launch of kv8_"));
            assert_non_null(strstr(kv8_status_message(), "too many resources requested"));
            stand_run(&s, &p, &a);
        }
        stand_in_fail(NULL, 0, 0);
        assert_true(num_failed > prefill);
        stand_plan_close(&p, &s);
    }
    stand_close(&s);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, reset, check_nothing_lives)
    const struct CMUnitTest tests[] = {
        TEST(decode_fills_the_gpu_and_stays_in_its_workspace),
        TEST(prefill_fills_the_gpu_and_stays_in_its_workspace),
        TEST(a_cluster_serves_a_head_of_one_request),
        TEST(work_is_cut_once_for_all_runs),
        TEST(masks_are_looked_at_before_work_is_cut),
        TEST(a_launch_that_fails_is_named_and_the_plan_stays),
    };
    return cmocka_run_group_tests_name("device_launches", tests, NULL, NULL);
}
