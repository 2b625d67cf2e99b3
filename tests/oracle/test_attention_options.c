/* test_attention_options.c - walks every combination of the options: each is right or refused,
 * there is no third. And what must hold bit by bit: batch invariance, equal scores.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "attention_options.h"

/* A refused spec must be refused by the oracle too, and for a stated reason. */
static void refused_everywhere(const attention_inputs *in, kv8_dtype q_dtype) {
    kv8_attention_spec spec = in->spec;
    spec.q_dtype = q_dtype;
    kv8_attention_plan *plan = NULL;
    assert_refused(kv8_attention_plan_create(&plan, &spec, NULL, NULL), KV8_ERR_UNSUPPORTED,
                   "supported: f32, bf16, f16, e4m3");
    assert_refused(kv8_attention_reference(&spec, &in->args, in->ref_o, in->ref_lse),
                   KV8_ERR_UNSUPPORTED, "supported");
}

static void every_combination_is_right_or_refused(void **state) {
    (void)state;
    const unsigned step = test_is_short() ? 11 : 1; /* another eleventh each time */
    uint64_t n = 0;
    for (int pair = 0; pair < OPTION_PAIRS; pair++) {
        for (int q = KV8_F32; q < KV8_DTYPE_COUNT; q++) {
            for (unsigned bits = (unsigned)(n % step); bits < OPTION_BITS; bits += step) {
                const attention_case c = option_case(++n, pair, q, bits);
                if (option_q_is_supported(q)) {
                    case_check(&c, NULL);
                } else if (bits / step % 16 == 0) {
                    static attention_inputs in;
                    case_make(&in, &c);
                    refused_everywhere(&in, (kv8_dtype)q);
                    case_free(&in);
                }
            }
        }
    }
}

/* --- bits --- */

/* Request b of the inputs, alone, under a plan of other bounds. Its rows must have these bits. */
static void same_bits_alone(const attention_inputs *in, kv8_isa isa, kv8_threads *threads,
                            int32_t b, const float *o, const float *lse) {
    const attention_case *const c = in->c;
    kv8_attention_spec spec = in->spec;
    spec.isa = isa;
    spec.max_batch = 1;
    spec.max_total_q = c->qo_len[b];
    spec.max_kv_len = c->kv_len[b];
    const int32_t qo_indptr[] = {0, c->qo_len[b]};
    const int64_t first = in->args.qo_indptr[b], dim = in->v_head_dim;
    kv8_attention_args args = in->args;
    args.batch = 1;
    args.qo_indptr = qo_indptr;
    args.q =
        (const uint8_t *)args.q + first * args.q_stride_row * (int64_t)kv8_dtype_size(spec.q_dtype);
    kv8_page_table pages = *args.pages;
    pages.page_indptr += b;
    pages.last_page_len += b;
    args.pages = &pages;
    if (args.k_scale != NULL) args.k_scale += b * args.k_scale_stride_batch;
    if (args.v_scale != NULL) args.v_scale += b * args.v_scale_stride_batch;
    const size_t rows = (size_t)(c->qo_len[b] * in->num_qo_heads);
    float *const own_o = calloc(rows * (size_t)dim, sizeof *own_o);
    float *const own_lse = calloc(rows, sizeof *own_lse);
    args.o = own_o;
    args.o_stride_head = dim;
    args.o_stride_row = in->num_qo_heads * dim;
    args.lse = own_lse;
    kv8_attention_plan *plan = NULL;
    assert_ok(kv8_attention_plan_create(&plan, &spec, threads, NULL));
    const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
    assert_ok(kv8_attention_prepare(plan, &args, workspace.data));
    assert_ok(kv8_attention_run(plan, &args, workspace.data));
    assert_memory_equal(own_o, o + first * in->num_qo_heads * dim, rows * (size_t)dim * sizeof *o);
    assert_memory_equal(own_lse, lse + first * in->num_qo_heads, rows * sizeof *lse);
    guarded_free(workspace);
    kv8_attention_plan_destroy(plan);
    free(own_o);
    free(own_lse);
}

static void batch_invariant_bits_know_no_batch_and_no_threads(void **state) {
    (void)state;
    static const int32_t counts[] = {1, 2, 5};
    kv8_threads *pools[3];
    for (int i = 0; i < 3; i++) assert_ok(kv8_threads_create(&pools[i], counts[i]));
    for (uint64_t round = 0; round < 11; round++) {
        const bool gpt_oss = round >= 6; /* its group and head_dim, where kernels have fast paths */
        const bool codes = round >= 9;
        attention_case c = {.seed = 70 + round,
                            .group_size = gpt_oss ? 8 : 4,
                            .num_kv_heads = gpt_oss && round != 10 ? 1 : 2,
                            .head_dim = gpt_oss ? 64 : 40,
                            .q_dtype = round % 2 && !codes ? KV8_F32 : KV8_BF16,
                            .k_dtype = codes ? KV8_INT8 : KV8_E4M3,
                            .v_dtype = round % 3 && !codes ? KV8_E4M3 : KV8_INT8,
                            .page_size = 16,
                            .sink = SINK_FINITE,
                            .scale = SCALE_REQUEST_HEAD,
                            .window_left = round == 8  ? 127
                                           : round < 4 ? 2200
                                                       : -1,
                            .causal = 1,
                            .batch_invariant = true,
                            .batch = 5,
                            .qo_len = {1, 3, 20, 40, 1},
                            .kv_len = {5000, 1500, 1100, 300, 7}};
        static attention_inputs in;
        case_make(&in, &c);
        assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
        const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
        const size_t floats = rows * (size_t)in.v_head_dim;
        float *const o = calloc(2 * (floats + rows), sizeof *o);
        float *const lse = o + floats, *const o2 = lse + rows, *const lse2 = o2 + floats;
        for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
            in.spec.math = case_may_be_bf16(&c, isa) ? KV8_MATH_BF16 : KV8_MATH_F32;
            case_run(&in, isa, NULL, o, lse);
            case_compare(&in, isa, o, lse);
            for (int i = test_is_short() ? 2 : 0; i < 3; i++) {
                case_run(&in, isa, pools[i], o2, lse2);
                assert_memory_equal(o2, o, floats * sizeof *o);
                assert_memory_equal(lse2, lse, rows * sizeof *lse);
                for (int32_t b = 0; b < c.batch; b++)
                    same_bits_alone(&in, isa, pools[i], b, o, lse);
            }
        }
        free(o);
        case_free(&in);
    }
    for (int i = 0; i < 3; i++) kv8_threads_destroy(pools[i]);
}

/* int8 keys and values where a rung multiplies their codes: rows that fill lanes in every way and
 * more than it takes, pages that hold a tile's rows in one piece or not, scales of 8 heads side by
 * side or not, everything that scores and weights can meet. */
static void int8_codes_in_every_shape(void **state) {
    (void)state;
    static const int32_t groups[] = {8, 1, 4, 2, 7, 3, 16, 5, 6}, heads[] = {1, 8, 3, 16, 2};
    static const int32_t dims[][2] = {{64, 64}, {128, 128}, {192, 128}, {64, 128}, {256, 64}};
    static const int32_t pages[] = {16, 64, 7, 32, 1, 48};
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    for (int i = 0; i < (int)test_cases(90); i++) {
        const attention_case c = {.seed = 7000 + (uint64_t)i,
                                  .group_size = groups[i % 9],
                                  .num_kv_heads = heads[i % 5],
                                  .head_dim = dims[i / 2 % 5][0],
                                  .v_head_dim = dims[i / 2 % 5][1],
                                  .q_dtype = KV8_BF16,
                                  .k_dtype = KV8_INT8,
                                  .v_dtype = KV8_INT8,
                                  .page_size = pages[i / 3 % 6],
                                  .window_left = i % 4 == 1 ? 100 : -1,
                                  .causal = 1,
                                  .soft_cap = i % 7 == 2 ? 3 : 0,
                                  .sink = (sink_kind)(i % SINK_KINDS),
                                  .scale = (scale_kind)(i % SCALE_KINDS),
                                  .layout = (layout_kind)(i / 4 % LAYOUTS),
                                  .mask = i % 11 == 5 ? MASK_RANDOM : MASK_NONE,
                                  .batch_invariant = i % 6 == 3,
                                  .extremes = i % 8 == 6,
                                  .wide_q = i % 2 == 1,
                                  .nonfinite_q = i % 7 == 4,
                                  .nan_newest = i % 13 == 8,
                                  .batch = 3,
                                  .qo_len = {1, i % 3 + 1, 1},
                                  .kv_len = {64 * (i % 5 + 1), 300 + i, 1 + i}};
        case_check(&c, i % 2 == 0 ? threads : NULL);
    }
    kv8_threads_destroy(threads);
}

/* Infinities in Q over int8 keys so few that some rows' scores are all -inf, and over more, where
 * nearly all rows are NaN: eight heads of an item beside one another, masks, windows, caps. */
static void infinities_in_q_over_int8(void **state) {
    (void)state;
    static const int32_t groups[] = {8, 4, 2};
    for (int i = 0; i < (int)test_cases(40); i++) {
        const attention_case c = {.seed = 7900 + (uint64_t)i,
                                  .group_size = groups[i % 3],
                                  .num_kv_heads = i % 5 == 4 ? 3 : 8,
                                  .head_dim = i % 4 == 3 ? 128 : 64,
                                  .q_dtype = KV8_BF16,
                                  .k_dtype = KV8_INT8,
                                  .v_dtype = KV8_INT8,
                                  .page_size = i % 6 == 5 ? 7 : 16,
                                  .window_left = i % 4 == 1 ? 1 : -1,
                                  .causal = 1,
                                  .soft_cap = i % 9 == 7 ? 3 : 0,
                                  .sink = (sink_kind)(i % SINK_KINDS),
                                  .scale = (scale_kind)(i % SCALE_KINDS),
                                  .mask = i % 7 == 6 ? MASK_RANDOM : MASK_NONE,
                                  .nonfinite_q = true,
                                  .extremes = i % 2 == 1,
                                  .nan_newest = i % 8 == 5,
                                  .batch = 4,
                                  .qo_len = {1, i % 3 == 0 ? 1 : 2, 1, 1},
                                  .kv_len = {1, 2 + i % 3, 130 + i, 65}};
        case_check(&c, NULL);
    }
}

/* V is 0 of the first keys, of all but one, and of all. */
static void zeros_in_v_have_a_weight(void **state) {
    (void)state;
    static const kv8_dtype dtypes[] = {KV8_INT8, KV8_E4M3, KV8_BF16};
    for (int i = 0; i < (int)test_cases(36); i++) {
        const attention_case c = {.seed = 7700 + (uint64_t)i,
                                  .group_size = i % 2 == 0 ? 8 : 3,
                                  .num_kv_heads = 2,
                                  .head_dim = i / 2 % 2 == 0 ? 64 : 128,
                                  .q_dtype = KV8_BF16,
                                  .k_dtype = dtypes[i / 3 % 3],
                                  .v_dtype = dtypes[i % 3],
                                  .page_size = 16,
                                  .window_left = i % 5 == 4 ? 100 : -1,
                                  .causal = 1,
                                  .sink = (sink_kind)(i % SINK_KINDS),
                                  .zero_v = 1 + i * 17,
                                  .batch = 3,
                                  .qo_len = {1, i % 4 + 1, 1},
                                  .kv_len = {300, 1 + i * 17, 2 + i * 17}};
        case_check(&c, NULL);
    }
}

/* V holds NaN and infinities among many keys of few rows: each spoils its own column of the rows
 * that see it, and no other. */
static void sick_values_of_v_stay_in_their_columns(void **state) {
    (void)state;
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_BF16, KV8_E5M2, KV8_INT8, KV8_E4M3FNUZ};
    static const int32_t dims[] = {64, 128, 192, 64, 80};
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    for (int i = 0; i < (int)test_cases(60); i++) {
        const attention_case c = {.seed = 7500 + (uint64_t)i,
                                  .group_size = 1 + i % 5,
                                  .num_kv_heads = 1 + i / 2 % 3,
                                  .head_dim = 64,
                                  .v_head_dim = dims[i % 5],
                                  .q_dtype = KV8_BF16,
                                  .k_dtype = i % 3 == 0 ? KV8_INT8 : KV8_E4M3,
                                  .v_dtype = dtypes[i / 3 % 5],
                                  .page_size = 16,
                                  .window_left = i % 6 == 5 ? 300 : -1,
                                  .causal = 1,
                                  .sink = (sink_kind)(i % SINK_KINDS),
                                  .mask = i % 11 == 10 ? MASK_RANDOM : MASK_NONE,
                                  .nonfinite_q = i % 7 == 4,
                                  .nan_newest = i % 5 == 1,
                                  .sick_v = i % 4 == 0 ? 2 : 400,
                                  .batch = 3,
                                  .qo_len = {1, i % 3 + 1, 1},
                                  .kv_len = {1000 - i, 300 + i, 1 + 2 * i}};
        case_check(&c, i % 2 == 0 ? threads : NULL);
    }
    kv8_threads_destroy(threads);
}

/* All scores equal and every value 1: o is exactly 1 at any length, or an accumulator is too
 * narrow. */
static void equal_scores_over_ones_give_one(void **state) {
    (void)state;
    enum { KEYS = 131072, PAGE = 64, DIM = 8 };
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    int32_t *const pages = calloc(KEYS / PAGE, sizeof *pages); /* all the same page */
    for (int k = KV8_F32; k < KV8_DTYPE_COUNT; k++) {
        uint8_t data[PAGE * DIM * 4];
        kv8_f16 row_scale[PAGE];
        for (int i = 0; i < PAGE * DIM; i++) case_store((kv8_dtype)k, data, i, 1.0f);
        if (k == KV8_INT8) memset(data, 64, sizeof data);
        for (int i = 0; i < PAGE; i++) row_scale[i] = kv8_f16_from_f32(1.0f / 64);
        kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
        spec.num_qo_heads = spec.num_kv_heads = 1;
        spec.head_dim = DIM;
        spec.q_dtype = KV8_BF16;
        spec.o_dtype = KV8_F32;
        spec.k_dtype = spec.v_dtype = (kv8_dtype)k;
        spec.page_size = PAGE;
        spec.window_left = -1;
        spec.max_batch = spec.max_total_q = 1;
        spec.max_kv_len = KEYS;
        const int32_t qo_indptr[] = {0, 1}, lens[] = {KEYS};
        kv8_bf16 q[DIM];
        for (int d = 0; d < DIM; d++) q[d] = kv8_bf16_from_f32(0.3f);
        float o[DIM], lse = 0;
        kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
        args.batch = 1;
        args.qo_indptr = qo_indptr;
        args.q = q;
        kv8_paged pool = KV8_PAGED_INIT;
        pool.data = data;
        pool.stride_slot = DIM;
        pool.row_scale_stride_slot = 1;
        if (k == KV8_INT8) pool.row_scale = row_scale;
        const kv8_page_table table = case_dense_table(pages, KEYS / PAGE, lens);
        args.k = args.v = &pool;
        args.pages = &table;
        args.o = o;
        args.lse = &lse;
        for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
            spec.isa = isa;
            for (int split = 0; split < 2; split++) {
                kv8_attention_plan *plan = NULL;
                assert_ok(kv8_attention_plan_create(&plan, &spec, split ? threads : NULL, NULL));
                const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
                assert_ok(kv8_attention_prepare(plan, &args, workspace.data));
                assert_ok(kv8_attention_run(plan, &args, workspace.data));
                for (int d = 0; d < DIM; d++) {
                    if (!(o[d] == 1))
                        fail_msg("%s %s: o is %.9g", kv8_isa_name(isa),
                                 kv8_dtype_name((kv8_dtype)k), (double)o[d]);
                }
                guarded_free(workspace);
                kv8_attention_plan_destroy(plan);
            }
        }
    }
    free(pages);
    kv8_threads_destroy(threads);
}

#if defined(__x86_64__)
/* Subnormal operands are 0 there, on every thread: scores of subnormal q are equal, and o of
 * subnormal v is 0. The caller's arithmetic stays what it was. */
static void subnormals_count_as_0(void **state) {
    (void)state;
    enum { KEYS = 4096, PAGE = 16, DIM = 64, PAGES = KEYS / PAGE };
    static kv8_bf16 k[PAGE * DIM], v[PAGE * DIM], tiny[PAGE * DIM];
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    int32_t *const pages = calloc(PAGES, sizeof *pages); /* all the same page */
    kv8_bf16 q[DIM];
    for (int d = 0; d < DIM; d++) q[d] = kv8_bf16_from_f32(0x1p-130f);
    for (int i = 0; i < PAGE * DIM; i++) {
        k[i] = kv8_bf16_from_f32(i / DIM % 2 ? 0x1p126f : -0x1p126f);
        v[i] = kv8_bf16_from_f32((float)(i / DIM % 2));
        tiny[i] = q[0];
    }
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = spec.num_kv_heads = 1;
    spec.head_dim = DIM;
    spec.q_dtype = spec.k_dtype = spec.v_dtype = KV8_BF16;
    spec.o_dtype = KV8_F32;
    spec.page_size = PAGE;
    spec.window_left = -1;
    spec.max_batch = spec.max_total_q = 1;
    spec.max_kv_len = KEYS;
    const int32_t qo_indptr[] = {0, 1}, lens[] = {KEYS};
    const kv8_page_table table = case_dense_table(pages, PAGES, lens);
    kv8_paged k_pool = KV8_PAGED_INIT, v_pool = KV8_PAGED_INIT;
    k_pool.data = k;
    k_pool.stride_slot = v_pool.stride_slot = DIM;
    float o[DIM];
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = 1;
    args.qo_indptr = qo_indptr;
    args.q = q;
    args.k = &k_pool;
    args.v = &v_pool;
    args.pages = &table;
    args.o = o;
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        spec.isa = isa;
        kv8_attention_plan *plan = NULL;
        assert_ok(kv8_attention_plan_create(&plan, &spec, threads, NULL));
        const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
        for (int small = 0; small < 2; small++) {
            v_pool.data = small ? tiny : v;
            assert_ok(kv8_attention_prepare(plan, &args, workspace.data));
            assert_ok(kv8_attention_run(plan, &args, workspace.data));
            for (int d = 0; d < DIM; d++) {
                if (!(o[d] == (small ? 0 : 0.5f)))
                    fail_msg("%s: o is %.9g", kv8_isa_name(isa), (double)o[d]);
            }
        }
        volatile float least = 0x1p-130f;
        assert_true(least * 0.5f > 0);
        guarded_free(workspace);
        kv8_attention_plan_destroy(plan);
    }
    free(pages);
    kv8_threads_destroy(threads);
}
#endif

/* Partial results of kv8_attention_run over page ranges, merged by the public calls, sink last:
 * the same as all at once. */
static void parts_merge_to_the_whole(void **state) {
    (void)state;
    for (uint64_t round = 0; round < 12; round++) {
        attention_case c = {.seed = 90 + round,
                            .group_size = 2,
                            .num_kv_heads = 2,
                            .head_dim = 24,
                            .q_dtype = KV8_F32,
                            .k_dtype = KV8_E4M3,
                            .v_dtype = KV8_INT8,
                            .page_size = 8,
                            .window_left = -1,
                            .sink = SINK_WITH_INFINITIES,
                            .scale = SCALE_HEAD,
                            .batch = 1,
                            .qo_len = {3},
                            .kv_len = {150}};
        static attention_inputs in;
        case_make(&in, &c);
        assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
        const float *const sink_logit = in.args.sink_logit;
        in.args.sink_logit = NULL;
        enum { ROWS = 3 * 4, DIM = 24 };
        float o[ROWS * DIM] = {0}, lse[ROWS], part_o[ROWS * DIM], part_lse[ROWS], sinks[ROWS];
        for (int i = 0; i < ROWS; i++) {
            lse[i] = -INFINITY;
            sinks[i] = sink_logit[i % 4];
        }
        const kv8_page_table whole = in.pages;
        test_rng rng = {round};
        for (int32_t page = 0; page < 19;) {
            const int32_t pages = rng_range(&rng, 0, 19 - page);
            const int32_t indptr[] = {0, pages}, last[] = {page + pages == 19 ? 6 : 8};
            in.pages = case_csr_table(indptr, whole.page_indices + page, last);
            for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);)
                case_run(&in, isa, NULL, part_o, part_lse); /* the best rung's stays */
            kv8_attention_merge(o, lse, part_o, part_lse, ROWS, DIM);
            page += pages;
        }
        kv8_attention_apply_sink(o, lse, sinks, ROWS, DIM);
        case_compare(&in, KV8_ISA_SCALAR, o, lse);
        case_free(&in);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_combination_is_right_or_refused),
        cmocka_unit_test(batch_invariant_bits_know_no_batch_and_no_threads),
        cmocka_unit_test(int8_codes_in_every_shape),
        cmocka_unit_test(infinities_in_q_over_int8),
        cmocka_unit_test(zeros_in_v_have_a_weight),
        cmocka_unit_test(sick_values_of_v_stay_in_their_columns),
        cmocka_unit_test(equal_scores_over_ones_give_one),
        cmocka_unit_test(parts_merge_to_the_whole),
#if defined(__x86_64__)
        cmocka_unit_test(subnormals_count_as_0),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
