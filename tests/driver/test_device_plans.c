/* test_device_plans.c - attention's host code for GPUs on the stand-in driver: which kernel a spec
 * gets on GPUs of four generations, the argument block against what was passed, and failures of the
 * driver while a plan is made. What a run's args change is test_attention_choice's, launches and
 * workspaces test_device_launches', what kernels compute tests/gpu's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fnmatch.h>

#include "device_plan_case.h"

/* --- the choice --- */

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
     128,
     128,
     DECODE,
     64,
     {MMA, ROWS("e4m3_int8", "128"), NULL, MMA}},
    {"decode, two formats without a kernel",
     KV8_BF16,
     KV8_E4M3,
     KV8_E5M2,
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
    {"prefill, two formats",
     KV8_BF16,
     KV8_INT8,
     KV8_E4M3,
     64,
     64,
     PREFILL,
     4,
     {MMA, WGMMA("int8_e4m3", "64"), MMA, NULL}},
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

/* --- the argument block --- */

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
        TEST(the_argument_block_says_what_was_passed),
        TEST(a_failure_at_any_call_of_a_plan_is_told),
        TEST(a_gpu_without_kernels_is_refused_by_name),
    };
    return cmocka_run_group_tests_name("device_plans", tests, NULL, NULL);
}
