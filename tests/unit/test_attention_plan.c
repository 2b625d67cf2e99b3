/* test_attention_plan.c - what a plan promises before any number is computed: refusals that name
 * value and limit, one kernel by name, a workspace that depends on nothing but spec and threads.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_case.h"
#include "base_impl.h"

static kv8_attention_spec good_spec(void) {
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = 8;
    spec.num_kv_heads = 2;
    spec.head_dim = 64;
    spec.q_dtype = KV8_BF16;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    spec.page_size = 16;
    spec.window_left = -1;
    spec.causal = 1;
    spec.max_batch = 4;
    spec.max_total_q = 32;
    spec.max_kv_len = 1000;
    return spec;
}

#define REFUSED(member, value, status, part)                                                 \
    do {                                                                                     \
        kv8_attention_spec spec_ = good_spec();                                              \
        spec_.member = (value);                                                              \
        kv8_attention_plan *plan_ = (kv8_attention_plan *)(void *)&spec_;                    \
        assert_refused(kv8_attention_plan_create(&plan_, &spec_, NULL, NULL), status, part); \
        assert_null(plan_);                                                                  \
    } while (0)

static void every_bad_option_is_named(void **state) {
    (void)state;
    REFUSED(struct_size, 3, KV8_ERR_INVALID, "struct_size is 3");
    REFUSED(num_qo_heads, 0, KV8_ERR_INVALID, "num_qo_heads is 0");
    REFUSED(num_qo_heads, 9, KV8_ERR_INVALID, "multiple of num_kv_heads 2");
    REFUSED(num_kv_heads, -1, KV8_ERR_INVALID, "num_kv_heads is -1");
    REFUSED(head_dim, 0, KV8_ERR_INVALID, "head_dim is 0");
    REFUSED(head_dim, 577, KV8_ERR_UNSUPPORTED, "head_dim is 577; supported: up to 576");
    REFUSED(v_head_dim, 640, KV8_ERR_UNSUPPORTED, "v_head_dim is 640");
    REFUSED(v_head_dim, -1, KV8_ERR_INVALID, "v_head_dim is -1");
    REFUSED(q_dtype, KV8_DTYPE_NONE, KV8_ERR_INVALID, "q_dtype");
    REFUSED(q_dtype, KV8_E5M2, KV8_ERR_UNSUPPORTED, "q_dtype is e5m2; supported: f32, bf16");
    REFUSED(q_dtype, KV8_INT8, KV8_ERR_UNSUPPORTED, "q_dtype is int8");
    REFUSED(q_dtype, KV8_E4M3FNUZ, KV8_ERR_UNSUPPORTED, "q_dtype is e4m3fnuz");
    REFUSED(k_dtype, KV8_DTYPE_NONE, KV8_ERR_INVALID, "k_dtype");
    REFUSED(v_dtype, KV8_DTYPE_COUNT, KV8_ERR_INVALID, "v_dtype");
    REFUSED(o_dtype, KV8_INT8, KV8_ERR_UNSUPPORTED, "o_dtype is int8; supported: f32, bf16, f16");
    REFUSED(o_dtype, (kv8_dtype)77, KV8_ERR_INVALID, "o_dtype is 77");
    REFUSED(page_size, -1, KV8_ERR_INVALID, "page_size is -1");
    REFUSED(window_left, -2, KV8_ERR_INVALID, "window_left is -2");
    REFUSED(window_right, -2, KV8_ERR_INVALID, "window_right is -2");
    REFUSED(window_right, 1, KV8_ERR_INVALID, "window_right is 1 and causal 1");
    REFUSED(causal, 2, KV8_ERR_INVALID, "causal is 2");
    REFUSED(has_mask, -1, KV8_ERR_INVALID, "has_mask is -1");
    REFUSED(batch_invariant, 5, KV8_ERR_INVALID, "batch_invariant is 5");
    REFUSED(max_batch, 0, KV8_ERR_INVALID, "max_batch is 0");
    REFUSED(max_total_q, 0, KV8_ERR_INVALID, "max_total_q is 0");
    REFUSED(max_total_q, INT32_MAX - 1, KV8_ERR_INVALID, "times num_qo_heads 8 is 17179869168");
    REFUSED(max_kv_len, 0, KV8_ERR_INVALID, "max_kv_len is 0");
    REFUSED(isa, (kv8_isa)99, KV8_ERR_INVALID, "isa is 99");
    kv8_attention_plan *plan = NULL;
    assert_refused(kv8_attention_plan_create(&plan, NULL, NULL, NULL), KV8_ERR_INVALID, "NULL");
}

static void a_rung_that_is_not_here_is_refused(void **state) {
    (void)state;
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (kv8_machine_has_isa((kv8_isa)isa)) continue;
        REFUSED(isa, (kv8_isa)isa, KV8_ERR_UNSUPPORTED, kv8_isa_name((kv8_isa)isa));
    }
}

/* One request of 100 keys: 7 pages of 16, the last with 4. */
static kv8_attention_args one_request(void) {
    static const int32_t qo_indptr[] = {0, 3}, page_indptr[] = {0, 7}, last[] = {4};
    static const int32_t pages[] = {0, 1, 2, 3, 4, 5, 6};
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = 1;
    args.qo_indptr = qo_indptr;
    static kv8_page_table table;
    table = case_csr_table(page_indptr, pages, last);
    args.pages = &table;
    return args;
}

static const char *describe(const kv8_attention_spec *spec, kv8_threads *threads,
                            const kv8_attention_args *args) {
    static char text[512];
    kv8_attention_plan *plan = NULL;
    assert_ok(kv8_attention_plan_create(&plan, spec, threads, NULL));
    const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
    assert_ok(kv8_attention_prepare(plan, args, workspace.data));
    assert_ok(kv8_attention_describe(plan, args, workspace.data, text, sizeof text));
    guarded_free(workspace);
    kv8_attention_plan_destroy(plan);
    return text;
}

static void describe_names_kernel_splits_and_bytes(void **state) {
    (void)state;
    kv8_attention_spec spec = good_spec();
    spec.isa = KV8_ISA_SCALAR;
    const kv8_attention_args args = one_request();
    const char *const text = describe(&spec, NULL, &args);
    assert_non_null(strstr(text, "kv8_attention_f32_any_dany_pany__scalar"));
    assert_non_null(strstr(text, "at most 1 splits"));
    /* 100 keys x 2 heads x (64 + 64) bytes, and 3 rows x 8 heads x (64 + 64) x 2 bytes */
    assert_non_null(strstr(text, "0.032 MB to move"));
    /* rows see 98, 99, 100 keys: 297 x 8 heads x 128 */
    assert_non_null(strstr(text, "0.304 M products"));
}

/* bf16 math only where nothing but P is rounded by it; asked for elsewhere, it is refused. */
static void kernels_are_chosen_by_dtype_and_rung(void **state) {
    (void)state;
    const kv8_attention_args args = one_request();
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        attention_case c = {0};
        for (int k = KV8_F32; k < KV8_DTYPE_COUNT; k++) {
            for (int q = KV8_F32; q <= KV8_F16; q++) {
                kv8_attention_spec spec = good_spec();
                spec.isa = isa;
                c.q_dtype = spec.q_dtype = (kv8_dtype)q;
                c.k_dtype = spec.k_dtype = (kv8_dtype)k;
                c.v_dtype = spec.v_dtype;
                const bool possible = case_may_be_bf16(&c, isa);
                const bool pays = isa != KV8_ISA_AVX512_BF16 || kv8_machine_bf16_dots_pay();
                const char *text = describe(&spec, NULL, &args);
                const bool bf16 = strstr(text, "kv8_attention_bf16_any") != NULL;
                assert_int_equal(bf16, possible && pays);
                spec.math = KV8_MATH_F32;
                assert_null(strstr(describe(&spec, NULL, &args), "kv8_attention_bf16_any"));
                spec.math = KV8_MATH_BF16;
                if (possible) {
                    assert_non_null(strstr(describe(&spec, NULL, &args), "kv8_attention_bf16_any"));
                } else {
                    kv8_attention_plan *plan = NULL;
                    assert_refused(kv8_attention_plan_create(&plan, &spec, NULL, NULL),
                                   KV8_ERR_UNSUPPORTED, "math is bf16");
                }
            }
        }
    }
}

/* int8 codes go into tiles as they are where K and V are both int8, in whole tiles. */
static void int8_on_tiles_has_a_kernel_of_its_own(void **state) {
    (void)state;
    if (!kv8_machine_has_isa(KV8_ISA_AMX)) skip();
    const kv8_attention_args args = one_request();
    kv8_attention_spec spec = good_spec();
    spec.isa = KV8_ISA_AMX;
    spec.q_dtype = KV8_BF16;
    spec.k_dtype = spec.v_dtype = KV8_INT8;
    const char *const own = "kv8_attention_bf16_int8_d64n_pany__amx";
    assert_non_null(strstr(describe(&spec, NULL, &args), own));
    spec.v_dtype = KV8_E4M3;
    assert_null(strstr(describe(&spec, NULL, &args), own));
    spec.v_dtype = KV8_INT8;
    spec.v_head_dim = 48;
    assert_null(strstr(describe(&spec, NULL, &args), own));
    spec.v_head_dim = 0;
    spec.q_dtype = KV8_F16;
    assert_null(strstr(describe(&spec, NULL, &args), own));
}

static void plans_are_pure(void **state) {
    (void)state;
    const kv8_attention_args args = one_request();
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 3));
    for (int i = 0; i < 2; i++) {
        kv8_attention_spec spec = good_spec();
        spec.batch_invariant = i;
        kv8_attention_plan *a = NULL, *b = NULL;
        assert_ok(kv8_attention_plan_create(&a, &spec, threads, NULL));
        assert_ok(kv8_attention_plan_create(&b, &spec, threads, NULL));
        assert_int_equal(kv8_attention_workspace_size(a), kv8_attention_workspace_size(b));
        char text[512];
        snprintf(text, sizeof text, "%s", describe(&spec, threads, &args));
        assert_string_equal(text, describe(&spec, threads, &args));
        kv8_attention_plan_destroy(a);
        kv8_attention_plan_destroy(b);
    }
    kv8_threads_destroy(threads);
}

static void long_requests_are_split_over_threads(void **state) {
    (void)state;
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 4));
    kv8_attention_spec spec = good_spec();
    spec.num_qo_heads = 1;
    spec.num_kv_heads = 1;
    spec.max_kv_len = 1600000;
    static int32_t pages[100000], lens[] = {1600000};
    static const int32_t qo_indptr[] = {0, 1};
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = 1;
    args.qo_indptr = qo_indptr;
    const kv8_page_table table = case_dense_table(pages, 100000, lens);
    args.pages = &table;
    assert_non_null(strstr(describe(&spec, threads, &args), "at most 16 splits"));
    assert_non_null(strstr(describe(&spec, NULL, &args), "at most 1 splits"));
    spec.batch_invariant = 1; /* the same on any number of threads */
    assert_non_null(strstr(describe(&spec, threads, &args), "at most 13 splits (batch invariant)"));
    assert_non_null(strstr(describe(&spec, NULL, &args), "at most 13 splits (batch invariant)"));
    spec.batch_invariant = 0;
    lens[0] = 10000; /* little work: a part for each thread */
    assert_non_null(strstr(describe(&spec, threads, &args), "at most 4 splits"));
    kv8_threads_destroy(threads);
}

static void failed_allocations_leave_nothing(void **state) {
    (void)state;
    kv8_attention_spec spec = good_spec();
    int64_t fail_at = 0;
    for (;; fail_at++) {
        failing_heap heap = {.fail_at = fail_at};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_attention_plan *plan = NULL;
        const kv8_status status = kv8_attention_plan_create(&plan, &spec, NULL, &allocator);
        if (status == KV8_OK) {
            kv8_attention_plan_destroy(plan);
            assert_int_equal(heap.live, 0);
            break;
        }
        assert_int_equal(status, KV8_ERR_NO_MEMORY);
        assert_null(plan);
        assert_int_equal(heap.live, 0);
    }
    assert_int_equal(fail_at, 1);
    kv8_attention_plan_destroy(NULL);
}

/* --- wrong arguments of a run: refused, and nothing written --- */

typedef struct runner {
    attention_case c;
    attention_inputs in;
    kv8_attention_plan *plan;
    guarded workspace, o;
} runner;

static void runner_init(runner *r) {
    memset(r, 0, sizeof *r);
    r->c = (attention_case){.group_size = 2,
                            .num_kv_heads = 2,
                            .head_dim = 8,
                            .page_size = 4,
                            .q_dtype = KV8_F32,
                            .k_dtype = KV8_E4M3,
                            .v_dtype = KV8_INT8,
                            .window_left = 5,
                            .causal = 1,
                            .batch = 2,
                            .qo_len = {2, 3},
                            .kv_len = {9, 11}};
    case_make(&r->in, &r->c);
    assert_ok(kv8_attention_plan_create(&r->plan, &r->in.spec, NULL, NULL));
    r->workspace = guarded_alloc(kv8_attention_workspace_size(r->plan));
    r->o = guarded_alloc(5 * 4 * 8 * sizeof(float));
    r->in.args.o = r->o.data;
    r->in.args.o_stride_head = 8;
    r->in.args.o_stride_row = 32;
}
static void runner_free(runner *r) {
    kv8_attention_plan_destroy(r->plan);
    guarded_free(r->workspace);
    guarded_free(r->o);
    case_free(&r->in);
}
static void run_refused(runner *r, const kv8_attention_args *args, const char *part) {
    kv8_status status = kv8_attention_prepare(r->plan, args, r->workspace.data);
    if (status == KV8_OK) status = kv8_attention_run(r->plan, args, r->workspace.data);
    assert_refused(status, KV8_ERR_INVALID, part);
    const uint8_t *const bytes = r->o.data;
    for (size_t i = 0; i < 5 * 4 * 8 * sizeof(float); i++) assert_int_equal(bytes[i], 0xff);
}
#define RUN_REFUSED(member, value, part)      \
    do {                                      \
        kv8_attention_args args_ = r.in.args; \
        args_.member = (value);               \
        run_refused(&r, &args_, part);        \
    } while (0)
/* A member of one of the structs that args point to. */
#define RUN_REFUSED_IN(what, member, value, part)      \
    do {                                               \
        const __typeof__(r.in.what) kept_ = r.in.what; \
        r.in.what.member = (value);                    \
        run_refused(&r, &r.in.args, part);             \
        r.in.what = kept_;                             \
    } while (0)

static void every_bad_argument_is_named(void **state) {
    (void)state;
    static runner r;
    runner_init(&r);
    const float scale = 1, sinks[4] = {0, 0, 0, NAN};
    const uint8_t bits[8] = {0};
    const int32_t falling[] = {0, 3, 2}, late[] = {1, 2, 5}, many[] = {0, 2, 6};
    const int32_t pages_falling[] = {0, 3, 2}, last_zero[] = {0, 3}, last_long[] = {1, 5};
    const int32_t lens[] = {9, 11}, too_long[] = {9, 12}, negative[] = {-1, 11};
    RUN_REFUSED(struct_size, 1, "struct_size is 1");
    RUN_REFUSED(batch, 3, "batch is 3, must be 0 to 2");
    RUN_REFUSED(batch, -1, "batch is -1");
    RUN_REFUSED(qo_indptr, NULL, "qo_indptr is NULL");
    RUN_REFUSED(qo_indptr, falling, "qo_indptr[2] is 2, must be at least 3");
    RUN_REFUSED(qo_indptr, late, "qo_indptr[0] is 1");
    RUN_REFUSED(qo_indptr, many, "qo_indptr[2] is 6, max_total_q is 5");
    RUN_REFUSED(q, NULL, "q is NULL");
    RUN_REFUSED(o, NULL, "o is NULL");
    RUN_REFUSED(q_scale, &scale, "q_scale is set");
    RUN_REFUSED(k, NULL, "k is NULL");
    RUN_REFUSED(pages, NULL, "pages is NULL");
    RUN_REFUSED(sm_scale, NAN, "sm_scale is nan");
    RUN_REFUSED(logits_soft_cap, -1, "logits_soft_cap is -1");
    RUN_REFUSED(logits_soft_cap, INFINITY, "logits_soft_cap is inf");
    RUN_REFUSED(sink_logit, sinks, "sink_logit[3] is NaN");
    RUN_REFUSED_IN(k, struct_size, 0, "kv8_paged.struct_size is 0");
    RUN_REFUSED_IN(pages, struct_size, 8, "kv8_page_table.struct_size is 8");
    RUN_REFUSED_IN(k, data, NULL, "k.data is NULL");
    RUN_REFUSED_IN(v, data, NULL, "v.data is NULL");
    RUN_REFUSED_IN(k, row_scale, r.in.v.row_scale, "k.row_scale is set");
    RUN_REFUSED_IN(v, row_scale, NULL, "v.row_scale is NULL");
    RUN_REFUSED(mask_bits, bits, "has_mask is 0");
    RUN_REFUSED(key_begin, falling, "has_key_range is 0");
    RUN_REFUSED(qo_lens, too_long, "qo_lens[0] is 9, must be 0 to 2");
    RUN_REFUSED(lse_base2, 2, "lse_base2 is 2");
    RUN_REFUSED(o_scale, &scale, "o_scale is set and o_dtype f32");
    RUN_REFUSED_IN(k, num_pages, 3, "k.num_pages is 3");
    RUN_REFUSED_IN(v, num_pages, -1, "v.num_pages is -1");
    RUN_REFUSED_IN(pages, kv_indptr, late, "2 of page_indptr, block_table and kv_indptr");
    RUN_REFUSED_IN(pages, block_table, lens, "2 of page_indptr, block_table and kv_indptr are set");
    RUN_REFUSED_IN(pages, page_indptr, NULL, "0 of page_indptr");
    RUN_REFUSED_IN(pages, page_indptr, pages_falling, "page_indptr[2] is 2 after 3");
    RUN_REFUSED_IN(pages, last_page_len, NULL, "last_page_len is NULL");
    RUN_REFUSED_IN(pages, last_page_len, last_zero, "last_page_len[0] is 0, must be 1 to 4");
    RUN_REFUSED_IN(pages, last_page_len, last_long, "last_page_len[1] is 5");
    RUN_REFUSED_IN(pages, page_indices, NULL, "page_indices is NULL");
    const kv8_page_table csr = r.in.pages;
    r.in.pages = case_dense_table(csr.page_indices, 3, lens);
    RUN_REFUSED_IN(pages, block_table_stride, 2, "block_table_stride 2 holds 8");
    RUN_REFUSED_IN(pages, seq_lens, NULL, "seq_lens is NULL");
    RUN_REFUSED_IN(pages, seq_lens, too_long, "request 1 has 12 keys, max_kv_len is 11");
    RUN_REFUSED_IN(pages, seq_lens, negative, "seq_lens[0] is -1");
    r.in.pages = csr;
    int32_t holes[6];
    memcpy(holes, csr.page_indices, sizeof holes);
    holes[4] = KV8_NO_PAGE; /* keys 4..7 of request 1, whose first row sees 3..8 */
    RUN_REFUSED_IN(pages, page_indices, holes, "request 1: table entry 1 is -1");
    const kv8_attention_args *const args = &r.in.args;
    void *const workspace = r.workspace.data;
    kv8_status (*const calls[])(const kv8_attention_plan *, const kv8_attention_args *, void *) = {
        kv8_attention_prepare, kv8_attention_run};
    for (int i = 0; i < 2; i++) {
        assert_refused(calls[i](r.plan, args, NULL), KV8_ERR_INVALID, "workspace");
        assert_refused(calls[i](r.plan, args, (char *)workspace + 4), KV8_ERR_INVALID,
                       "aligned to 64");
        assert_refused(calls[i](NULL, args, workspace), KV8_ERR_INVALID, "plan");
    }
    assert_ok(kv8_attention_prepare(r.plan, args, workspace));
    char text[8];
    assert_refused(kv8_attention_describe(r.plan, args, workspace, NULL, 8), KV8_ERR_INVALID,
                   "text");
    assert_ok(kv8_attention_describe(r.plan, args, workspace, text, sizeof text)); /* cut off */
    assert_int_equal(text[7], 0);
    assert_ok(kv8_attention_run(r.plan, args, workspace)); /* and as it was: right */
    runner_free(&r);
}

/* Run takes what was prepared for its batch by a plan like its own, as often as asked. */
static void only_a_prepared_workspace_is_run(void **state) {
    (void)state;
    static runner r;
    runner_init(&r);
    void *const workspace = r.workspace.data;
    const kv8_attention_args *const args = &r.in.args;
    char text[8];
    assert_refused(kv8_attention_run(r.plan, args, workspace), KV8_ERR_INVALID, "not prepared");
    assert_refused(kv8_attention_describe(r.plan, args, workspace, text, 8), KV8_ERR_INVALID,
                   "not prepared");
    kv8_attention_args index = *args; /* no data is looked at */
    index.q = index.o = NULL;
    index.k = index.v = NULL;
    assert_ok(kv8_attention_prepare(r.plan, &index, workspace));
    assert_ok(kv8_attention_reference(&r.in.spec, args, r.in.ref_o, r.in.ref_lse));
    for (int i = 0; i < 3; i++) {
        memset(r.o.data, 0xff, 5 * 4 * 8 * sizeof(float));
        assert_ok(kv8_attention_run(r.plan, args, workspace));
        assert_true(relative_error(r.o.data, r.in.ref_o, 5 * 4 * 8) <= 1e-5);
    }
    kv8_attention_plan *twin = NULL, *other = NULL;
    kv8_attention_spec spec = r.in.spec;
    assert_ok(kv8_attention_plan_create(&twin, &spec, NULL, NULL));
    assert_ok(kv8_attention_run(twin, args, workspace));
    spec.max_kv_len++;
    assert_ok(kv8_attention_plan_create(&other, &spec, NULL, NULL));
    assert_refused(kv8_attention_run(other, args, workspace), KV8_ERR_INVALID, "another spec");
    kv8_attention_args one = *args;
    one.batch = 1;
    assert_refused(kv8_attention_run(r.plan, &one, workspace), KV8_ERR_INVALID, "another batch");
    const int32_t copy[] = {0, 2, 5};
    one = *args;
    one.qo_indptr = copy;
    assert_refused(kv8_attention_run(r.plan, &one, workspace), KV8_ERR_INVALID, "another batch");
    one.qo_indptr = NULL; /* a failed prepare leaves nothing prepared */
    assert_refused(kv8_attention_prepare(r.plan, &one, workspace), KV8_ERR_INVALID, "qo_indptr");
    assert_refused(kv8_attention_run(r.plan, args, workspace), KV8_ERR_INVALID, "not prepared");
    kv8_attention_plan_destroy(twin);
    kv8_attention_plan_destroy(other);
    runner_free(&r);
}

static void an_empty_batch_needs_nothing(void **state) {
    (void)state;
    static runner r;
    runner_init(&r);
    const kv8_attention_args none = KV8_ATTENTION_ARGS_INIT;
    assert_ok(kv8_attention_prepare(r.plan, &none, NULL));
    assert_ok(kv8_attention_run(r.plan, &none, NULL));
    const int32_t zeros[] = {0, 0, 0};
    kv8_attention_args args = r.in.args;
    args.qo_indptr = zeros;
    args.q = args.o = NULL;
    assert_ok(kv8_attention_prepare(r.plan, &args, r.workspace.data));
    assert_ok(kv8_attention_run(r.plan, &args, r.workspace.data));
    runner_free(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bad_option_is_named),
        cmocka_unit_test(a_rung_that_is_not_here_is_refused),
        cmocka_unit_test(describe_names_kernel_splits_and_bytes),
        cmocka_unit_test(kernels_are_chosen_by_dtype_and_rung),
        cmocka_unit_test(int8_on_tiles_has_a_kernel_of_its_own),
        cmocka_unit_test(plans_are_pure),
        cmocka_unit_test(long_requests_are_split_over_threads),
        cmocka_unit_test(failed_allocations_leave_nothing),
        cmocka_unit_test(every_bad_argument_is_named),
        cmocka_unit_test(only_a_prepared_workspace_is_run),
        cmocka_unit_test(an_empty_batch_needs_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
