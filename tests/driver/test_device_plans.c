/* test_device_plans.c - attention's host code for GPUs on the stand-in driver: which kernel a spec
 * gets on GPUs of four generations, launches and workspaces on GPUs of many sizes, the argument
 * block against what was passed, graphs, and failures of the driver while plans are made and run.
 * What a run's args change is test_attention_choice's, what kernels compute tests/gpu's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fnmatch.h>

#include "device_plan_case.h"

static int reset(void **state) {
    (void)state;
    stand_in_reset();
    return 0;
}
static int check_nothing_lives(void **state) {
    (void)state;
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
    return 0;
}

/* --- the choice --- */

enum { DECODE = 1, PREFILL = 64 }; /* rows of a request */
#define GENERIC "kv8_attention_*_generic__sm80"

/* What a spec gets on compute capability 8.0, 9.0, 10.0 and 12.0, where a block has 163, 227, 227
 * and 99 KiB of shared memory. */
static const int32_t machines[] = {80, 90, 100, 120};
typedef struct choice {
    const char *what;
    kv8_dtype q, k, v;
    int32_t head_dim, v_head_dim, rows, batch;
    const char *names[4]; /* patterns; NULL: as on the machine before */
} choice;
#define MMA                "kv8_prefill_*__sm80"
#define WGMMA(format, dim) "kv8_prefill_*" format "_d" dim "*__sm90"
#define ROWS(format, dim)  "kv8_decode_*_" format "_d" dim "_rows__sm90"
static const choice choices[] = {
    {"decode, e4m3",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     64,
     64,
     DECODE,
     64,
     {MMA, "kv8_decode_*_e4m3_d64_bulk8__sm90", NULL, MMA}},
    {"decode, few requests",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     64,
     64,
     DECODE,
     8,
     {MMA, ROWS("e4m3", "64"), NULL, MMA}},
    {"decode, one request",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     64,
     64,
     DECODE,
     1,
     {MMA, "kv8_decode_*_e4m3_d64_cluster__sm90", NULL, MMA}},
    {"decode, f16 Q over int8",
     KV8_F16,
     KV8_INT8,
     KV8_INT8,
     128,
     128,
     DECODE,
     64,
     {MMA, ROWS("int8", "128"), NULL, MMA}},
    {"decode, bf16",
     KV8_BF16,
     KV8_BF16,
     KV8_BF16,
     128,
     128,
     DECODE,
     64,
     {MMA, ROWS("bf16", "128"), NULL, MMA}},
    {"decode, head_dim 256",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     256,
     256,
     DECODE,
     64,
     {MMA, ROWS("e4m3", "256"), NULL, MMA}},
    {"decode, two formats",
     KV8_BF16,
     KV8_E4M3,
     KV8_INT8,
     64,
     64,
     DECODE,
     64,
     {MMA, NULL, NULL, NULL}},
    {"decode, f32 pages",
     KV8_BF16,
     KV8_F32,
     KV8_F32,
     64,
     64,
     DECODE,
     64,
     {GENERIC, NULL, NULL, NULL}},
    {"decode, f32 Q", KV8_F32, KV8_E4M3, KV8_E4M3, 64, 64, DECODE, 64, {GENERIC, NULL, NULL, NULL}},
    {"decode, head_dim 72",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     72,
     72,
     DECODE,
     64,
     {GENERIC, NULL, NULL, NULL}},
    {"decode, f16 Q over bf16",
     KV8_F16,
     KV8_BF16,
     KV8_BF16,
     64,
     64,
     DECODE,
     64,
     {GENERIC, NULL, NULL, NULL}},
    {"prefill, e4m3",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     64,
     64,
     PREFILL,
     4,
     {MMA, WGMMA("e4m3", "64"), MMA, NULL}},
    {"prefill, e5m2",
     KV8_BF16,
     KV8_E5M2,
     KV8_E5M2,
     128,
     128,
     PREFILL,
     4,
     {MMA, WGMMA("e5m2", "128"), MMA, NULL}},
    {"prefill, e4m3 Q",
     KV8_E4M3,
     KV8_E4M3,
     KV8_E4M3,
     64,
     64,
     PREFILL,
     4,
     {GENERIC, WGMMA("e4m3_e4m3", "64"), GENERIC, NULL}},
    {"prefill, two head_dims",
     KV8_BF16,
     KV8_E4M3,
     KV8_E4M3,
     192,
     128,
     PREFILL,
     4,
     {MMA, NULL, NULL, NULL}},
    {"prefill, e4m3 Q over int8",
     KV8_E4M3,
     KV8_INT8,
     KV8_INT8,
     64,
     64,
     PREFILL,
     4,
     {GENERIC, NULL, NULL, NULL}},
};

static kv8_attention_spec spec_of(const choice *c) {
    kv8_attention_spec spec = stand_spec();
    spec.q_dtype = c->q;
    spec.k_dtype = c->k;
    spec.v_dtype = c->v;
    spec.head_dim = c->head_dim;
    spec.v_head_dim = c->v_head_dim;
    spec.max_batch = c->batch;
    spec.max_total_q = c->batch * c->rows;
    return spec;
}

/* What was launched is what describe says, and fits the GPU's table of kernels. */
static void check_choice(const stand *s, const choice *c, const char *pattern) {
    const kv8_attention_spec spec = spec_of(c);
    stand_plan p;
    stand_args a;
    char text[512];
    assert_ok(stand_plan_open(&p, s, &spec));
    stand_args_make(&a, s, &spec, c->batch);
    const stand_in_launch *const launch = stand_run(s, &p, &a);
    if (fnmatch(pattern, launch->name, 0) != 0)
        fail_msg("%s on %s: %s, must be %s", c->what, kv8_device_get_info(s->device)->name,
                 launch->name, pattern);
    assert_ok(kv8_attention_device_describe(p.plan, &a.args, text, sizeof text));
    assert_non_null(strstr(text, launch->name));
    assert_null(strchr(text, '\n'));
    assert_ok(kv8_attention_device_describe(p.plan, NULL, text, sizeof text));
    assert_non_null(strstr(text, launch->name)); /* of the usual pages and the most requests */
    stand_plan_close(&p, s);
}

static void the_kernel_is_that_of_the_table(void **state) {
    (void)state;
    for (size_t m = 0; m < sizeof machines / sizeof machines[0]; m++) {
        stand s = stand_open(machines[m], H200_SMS);
        for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
            size_t at = m;
            while (choices[i].names[at] == NULL) at--;
            check_choice(&s, &choices[i], choices[i].names[at]);
        }
        stand_close(&s);
    }
}

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

static void a_cluster_serves_a_head_of_one_request(void **state) {
    (void)state;
    stand s = stand_open(90, H200_SMS);
    kv8_attention_spec spec = stand_spec();
    spec.max_batch = spec.max_total_q = 1;
    stand_plan p;
    stand_args a;
    assert_ok(stand_plan_open(&p, &s, &spec));
    stand_args_make(&a, &s, &spec, 1);
    const stand_in_launch *const launch = stand_run(&s, &p, &a);
    assert_int_equal(launch->cluster[0], launch->grid[0]);
    assert_int_equal(launch->cluster[0], 16);
    assert_int_equal(launch->grid[1], 8);
    stand_plan_close(&p, &s);
    stand_close(&s);
}

/* --- the argument block --- */

static int32_t divide(kv8_divisor by, int32_t n) {
    if (by.factor == 0) return n;
    return (int32_t)((uint64_t)n * by.factor >> 32 >> by.shift);
}
static void check_divisor(kv8_divisor by, int32_t d) {
    const int32_t ns[] = {0,     1,        d - 1,         d,        d + 1, 7 * d - 1,
                          7 * d, 12345679, INT32_MAX - 1, INT32_MAX};
    for (size_t i = 0; i < sizeof ns / sizeof ns[0]; i++)
        assert_int_equal(divide(by, ns[i]), ns[i] / d);
}

static void check_pages(const kv8_kernel_pages *got, const kv8_paged *paged, int64_t size) {
    assert_ptr_equal(got->data, paged->data);
    assert_int_equal(got->stride_page, paged->stride_page * size);
    assert_int_equal(got->stride_slot, paged->stride_slot * size);
    assert_int_equal(got->stride_head, paged->stride_head * size);
    assert_ptr_equal(got->row_scale, paged->row_scale);
    assert_int_equal(got->scale_stride_page, paged->row_scale_stride_page);
    assert_int_equal(got->scale_stride_slot, paged->row_scale_stride_slot);
    assert_int_equal(got->scale_stride_head, paged->row_scale_stride_head);
}

/* All that args say of rows, scales and tables is in the block as it is. */
static void check_block(const kv8_kernel_args *got, const kv8_attention_spec *spec,
                        const stand_args *a) {
    const kv8_attention_args *const args = &a->args;
#define SAME_POINTER(field) assert_ptr_equal(got->field, args->field)
#define SAME(field)         assert_int_equal(got->field, args->field)
    SAME_POINTER(q), SAME(q_stride_row), SAME(q_stride_head);
    SAME_POINTER(o), SAME(o_stride_row), SAME(o_stride_head), SAME_POINTER(lse);
    SAME_POINTER(qo_indptr), SAME(batch), SAME_POINTER(sink_logit);
    SAME_POINTER(k_scale), SAME(k_scale_stride_batch), SAME(k_scale_stride_head);
    SAME_POINTER(v_scale), SAME(v_scale_stride_batch), SAME(v_scale_stride_head);
    SAME_POINTER(q_scale), SAME(q_scale_stride_batch), SAME(q_scale_stride_row);
    SAME(q_scale_stride_kv_head), SAME(q_scale_stride_group);
    SAME_POINTER(mask_bits), SAME_POINTER(mask_indptr);
#undef SAME
#undef SAME_POINTER
    check_pages(&got->k, &a->k, (int64_t)kv8_dtype_size(spec->k_dtype));
    check_pages(&got->v, &a->v, (int64_t)kv8_dtype_size(spec->v_dtype));
    const kv8_page_table *const t = &a->pages;
    assert_ptr_equal(got->table, t->page_indptr != NULL ? t->page_indices : t->block_table);
    if (t->block_table != NULL) assert_int_equal(got->table_stride, t->block_table_stride);
    assert_ptr_equal(got->page_indptr, t->page_indptr);
    assert_ptr_equal(got->last_page_len, t->last_page_len);
    assert_ptr_equal(got->seq_lens, t->seq_lens);
    assert_int_equal(got->num_qo_heads, spec->num_qo_heads);
    assert_int_equal(got->num_kv_heads, spec->num_kv_heads);
    assert_int_equal(got->group_size, spec->num_qo_heads / spec->num_kv_heads);
    assert_int_equal(got->head_dim, spec->head_dim);
    assert_int_equal(got->v_head_dim, spec->v_head_dim == 0 ? spec->head_dim : spec->v_head_dim);
    assert_int_equal(got->page_size, spec->page_size);
    assert_int_equal(got->q_dtype, spec->q_dtype);
    assert_int_equal(got->k_dtype, spec->k_dtype);
    assert_int_equal(got->v_dtype, spec->v_dtype);
    assert_int_equal(got->window_left, spec->window_left);
    assert_int_equal(got->window_right, spec->causal ? 0 : spec->window_right);
    check_divisor(got->by_group, got->group_size);
    check_divisor(got->by_page, spec->page_size);
}

/* Decode and the generic kernel over a dense table and over CSR, every value another. */
static void the_argument_block_says_what_was_passed(void **state) {
    (void)state;
    const kv8_dtype formats[] = {KV8_E4M3, KV8_INT8, KV8_F32};
    stand s = stand_open(90, H200_SMS);
    for (size_t i = 0; i < 2 * sizeof formats / sizeof formats[0]; i++) {
        kv8_attention_spec spec = stand_spec();
        spec.k_dtype = spec.v_dtype = formats[i / 2];
        spec.num_qo_heads = 24;
        spec.page_size = 48;
        spec.window_left = 127;
        spec.o_dtype = KV8_F32;
        spec.causal = i % 2 == 0;
        stand_plan p;
        stand_args a;
        assert_ok(stand_plan_open(&p, &s, &spec));
        stand_args_make(&a, &s, &spec, 5);
        a.args.q_stride_row += 8;
        a.args.o_stride_row += 24;
        a.args.k_scale = (const float *)(const void *)(s.memory + 0x20000);
        a.args.v_scale = (const float *)(const void *)(s.memory + 0x21000);
        a.args.sink_logit = (const float *)(const void *)(s.memory + 0x22000);
        a.args.k_scale_stride_batch = 11, a.args.k_scale_stride_head = 3;
        a.args.v_scale_stride_batch = 13, a.args.v_scale_stride_head = 5;
        a.args.sm_scale = 0.25f;
        a.args.logits_soft_cap = 30;
        if (i % 2 == 1) {
            a.pages.block_table = a.pages.seq_lens = NULL;
            a.pages.page_indptr = (const int32_t *)(const void *)(s.memory + 0x23000);
            a.pages.page_indices = (const int32_t *)(const void *)(s.memory + 0x24000);
            a.pages.last_page_len = (const int32_t *)(const void *)(s.memory + 0x25000);
        }
        const stand_in_launch *const launch = stand_run(&s, &p, &a);
        assert_int_equal(launch->args_bytes, sizeof(kv8_kernel_args));
        const kv8_kernel_args *const got = launch->args;
        check_block(got, &spec, &a);
        assert_int_equal(got->o_dtype, KV8_F32);
        const double log2_e = 1.4426950408889634;
        assert_true(fabs((double)got->score_scale - 0.25 * log2_e) < 1e-6);
        assert_true(fabs((double)got->soft_cap - 30 * log2_e) < 1e-4);
        assert_true(fabs((double)got->lse_scale - 0.6931471805599453) < 1e-7);
        a.args.sm_scale = a.args.logits_soft_cap = 0; /* 1/sqrt(head_dim), off */
        const kv8_kernel_args *const usual = stand_run(&s, &p, &a)->args;
        assert_true(fabs((double)usual->score_scale - log2_e / 8) < 1e-7);
        assert_true(usual->soft_cap == 0);
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

/* One launch a run and those that cut prefill's work; recorded and replayed, the same. */
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
        assert_int_equal(launches, RUNS + cuts);
        assert_true(prefill ? cuts >= 1 : cuts == 0);
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

/* --- failures --- */

/* Questions whose refusal is an answer: no such clusters, no second argument. */
static bool is_an_answer(const char *call) {
    return strcmp(call, "cuOccupancyMaxActiveClusters") == 0 ||
           strcmp(call, "cuFuncSetAttribute") == 0 || strcmp(call, "cuFuncGetParamInfo") == 0 ||
           strcmp(call, "cuMemGetAddressRange_v2") == 0 || strstr(call, "Pop") != NULL;
}

static void a_failure_at_any_call_of_a_plan_is_told(void **state) {
    (void)state;
    for (int32_t rows = DECODE; rows <= PREFILL; rows += PREFILL - DECODE) {
        kv8_attention_spec spec = stand_spec();
        spec.max_total_q = spec.max_batch * rows;
        int64_t told = 0;
        for (int64_t nth = 1;; nth++) {
            stand s = stand_open(90, H200_SMS); /* its kernels are loaded by the plan */
            stand_in_fail(NULL, nth, 999);
            kv8_attention_device_plan *plan = NULL;
            const kv8_status status =
                kv8_attention_device_plan_create(&plan, s.device, &spec, NULL);
            const char *const call = stand_in_failed_call();
            stand_in_fail(NULL, 0, 0);
            if (status != KV8_OK) {
                assert_int_equal(status, KV8_ERR_DEVICE);
                assert_non_null(strstr(kv8_status_message(), "unknown error (CUDA_ERROR_UNKNOWN)"));
                assert_null(plan);
                told++;
            } else if (call != NULL && !is_an_answer(call)) {
                if (strcmp(call, "cuCtxPushCurrent_v2") != 0) fail_msg("%s: nobody was told", call);
            }
            kv8_attention_device_plan_destroy(plan);
            assert_ok(kv8_attention_device_plan_create(&plan, s.device, &spec, NULL));
            kv8_attention_device_plan_destroy(plan);
            stand_close(&s);
            check_nothing_lives(state);
            if (call == NULL) break;
        }
        assert_true(told >= 10);
    }
}

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

static void a_gpu_without_kernels_is_refused_by_name(void **state) {
    (void)state;
    stand s = stand_open(75, 40);
    const kv8_attention_spec spec = stand_spec();
    kv8_attention_device_plan *plan = NULL;
    assert_refused(kv8_attention_device_plan_create(&plan, s.device, &spec, NULL),
                   KV8_ERR_UNSUPPORTED, "sm_75");
    assert_null(plan);
    stand_close(&s);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, reset, check_nothing_lives)
    const struct CMUnitTest tests[] = {
        TEST(the_kernel_is_that_of_the_table),
        TEST(decode_fills_the_gpu_and_stays_in_its_workspace),
        TEST(a_cluster_serves_a_head_of_one_request),
        TEST(the_argument_block_says_what_was_passed),
        TEST(work_is_cut_once_for_all_runs),
        TEST(a_failure_at_any_call_of_a_plan_is_told),
        TEST(a_launch_that_fails_is_named_and_the_plan_stays),
        TEST(a_gpu_without_kernels_is_refused_by_name),
    };
    return cmocka_run_group_tests_name("device_plans", tests, NULL, NULL);
}
