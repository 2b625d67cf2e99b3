/* test_attention_runs.c - what callers pass beside plain causal rows over pages: windows to the
 * right, a range of keys for each row, keys without pages, rows not in use, output in 8 bits, other
 * forms of lse, alone and all together, on every rung against the oracle.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_case.h"

static kv8_threads *threads;

static int start_threads(void **state) {
    (void)state;
    return kv8_threads_create(&threads, 3) == KV8_OK ? 0 : -1;
}
static int stop_threads(void **state) {
    (void)state;
    kv8_threads_destroy(threads);
    return 0;
}

/* A batch of several lengths, drawn; of few keys and of many. */
static attention_case drawn_case(uint64_t seed, test_rng *rng) {
    static const kv8_dtype q[] = {KV8_F32, KV8_BF16, KV8_E4M3, KV8_F16, KV8_BF16};
    static const kv8_dtype kv[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_F32, KV8_E5M2, KV8_F16};
    static const int32_t dims[] = {64, 40, 128, 13, 64}, groups[] = {1, 8, 3, 4, 16};
    static const int32_t pages[] = {16, 1, 7, 64, 5};
    attention_case c = {.seed = seed,
                        .group_size = groups[seed % 5],
                        .num_kv_heads = rng_range(rng, 1, 3),
                        .head_dim = dims[seed / 5 % 5],
                        .q_dtype = q[seed % 5],
                        .k_dtype = kv[seed % 6],
                        .v_dtype = kv[seed / 6 % 6],
                        .o_dtype = KV8_F32,
                        .page_size = pages[rng_range(rng, 0, 4)],
                        .window_left = -1,
                        .sink = (sink_kind)rng_range(rng, 0, SINK_KINDS - 1),
                        .scale = (scale_kind)rng_range(rng, 0, SCALE_KINDS - 1),
                        .layout = (layout_kind)rng_range(rng, 0, LAYOUTS - 1),
                        .dense_table = rng_range(rng, 0, 1),
                        .batch = rng_range(rng, 1, 4)};
    for (int32_t b = 0; b < c.batch; b++) {
        c.qo_len[b] = rng_range(rng, 0, 3) == 0 ? rng_range(rng, 20, 70) : rng_range(rng, 0, 5);
        c.kv_len[b] = rng_range(rng, 0, 4) == 0 ? rng_range(rng, 0, 900) : rng_range(rng, 0, 130);
    }
    if (c.layout == LAYOUT_INTERLEAVED && c.k_dtype != c.v_dtype) c.layout = LAYOUT_NHD;
    return c;
}

static void a_right_window_hides_what_comes_later(void **state) {
    (void)state;
    test_rng rng = {1};
    for (uint64_t seed = 0; seed < test_cases(40); seed++) {
        attention_case c = drawn_case(seed, &rng);
        c.right = rng_range(&rng, 1, 40);
        c.window_left = seed % 3 == 0 ? rng_range(&rng, 0, 50) : -1;
        c.mask = seed % 7 == 0 ? MASK_RANDOM : MASK_NONE;
        case_check(&c, seed % 2 ? threads : NULL);
    }
}

static void every_row_has_its_range_of_keys(void **state) {
    (void)state;
    test_rng rng = {2};
    for (uint64_t seed = 0; seed < test_cases(60); seed++) {
        attention_case c = drawn_case(seed, &rng);
        c.key_ranges = true;
        c.causal = seed % 2;
        c.window_left = seed % 5 == 0 ? rng_range(&rng, 0, 50) : -1;
        c.mask = seed % 6 == 0 ? MASK_RANDOM : MASK_NONE;
        c.batch_invariant = seed % 4 == 1;
        c.nan_newest = seed % 8 == 3;
        c.nonfinite_q = seed % 8 == 5;
        case_check(&c, seed % 3 ? threads : NULL);
    }
}

static void keys_lie_without_pages(void **state) {
    (void)state;
    test_rng rng = {3};
    for (uint64_t seed = 0; seed < test_cases(60); seed++) {
        attention_case c = drawn_case(seed, &rng);
        c.ragged = true;
        c.page_size = 1;
        c.causal = seed % 2;
        c.window_left = seed % 5 == 0 ? rng_range(&rng, 0, 50) : -1;
        c.mask = seed % 6 == 0 ? MASK_RANDOM : MASK_NONE;
        case_check(&c, seed % 3 ? threads : NULL);
    }
}

static void rows_not_in_use_are_left_alone(void **state) {
    (void)state;
    test_rng rng = {4};
    for (uint64_t seed = 0; seed < test_cases(40); seed++) {
        attention_case c = drawn_case(seed, &rng);
        c.unused_rows = true;
        c.causal = seed % 3 != 0;
        c.mask = seed % 6 == 0 ? MASK_TREE : MASK_NONE;
        case_check(&c, seed % 2 ? threads : NULL);
    }
}

static void output_takes_8_bits_and_lse_other_forms(void **state) {
    (void)state;
    static const kv8_dtype o[] = {KV8_E4M3, KV8_E4M3FNUZ, KV8_E5M2};
    test_rng rng = {5};
    for (uint64_t seed = 0; seed < test_cases(30); seed++) {
        attention_case c = drawn_case(seed, &rng);
        c.o_dtype = o[seed % 3];
        c.lse_transposed = seed % 2;
        c.causal = 1;
        case_check(&c, seed % 2 ? threads : NULL);
    }
}

static void all_of_it_together(void **state) {
    (void)state;
    test_rng rng = {6};
    for (uint64_t seed = 0; seed < test_cases(80); seed++) {
        attention_case c = drawn_case(seed, &rng);
        c.causal = rng_range(&rng, 0, 1);
        c.right = c.causal ? rng_range(&rng, 0, 1) : rng_range(&rng, 0, 30);
        c.window_left = rng_range(&rng, 0, 1) ? rng_range(&rng, 0, 60) : -1;
        c.key_ranges = rng_range(&rng, 0, 1);
        c.ragged = rng_range(&rng, 0, 1);
        if (c.ragged) c.page_size = 1;
        c.unused_rows = rng_range(&rng, 0, 1);
        c.lse_transposed = rng_range(&rng, 0, 1);
        c.mask = rng_range(&rng, 0, 3) == 0 ? MASK_RANDOM : MASK_NONE;
        c.soft_cap = rng_range(&rng, 0, 3) == 0 ? 3.0f : 0;
        c.batch_invariant = rng_range(&rng, 0, 3) == 0;
        case_check(&c, seed % 2 ? threads : NULL);
    }
}

/* No copy of the keys: one page per request and no pages give the same bits. */
static void ragged_keys_give_the_bits_of_one_page(void **state) {
    (void)state;
    const attention_case c = {.seed = 9,
                              .group_size = 8,
                              .num_kv_heads = 2,
                              .head_dim = 64,
                              .q_dtype = KV8_BF16,
                              .k_dtype = KV8_E4M3,
                              .v_dtype = KV8_E4M3,
                              .page_size = 1,
                              .window_left = -1,
                              .causal = 1,
                              .ragged = true,
                              .batch = 3,
                              .qo_len = {1, 9, 2},
                              .kv_len = {700, 320, 65}};
    static attention_inputs in;
    case_make(&in, &c);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads), floats = rows * 64;
    float *const o = calloc(2 * (floats + rows), sizeof *o);
    float *const o_page = o + floats, *const lse = o_page + floats, *const lse_page = lse + rows;
    static const int32_t indptr[] = {0, 1, 2, 3}, pages[] = {0, 1, 2}, last[] = {700, 320, 65};
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        case_run(&in, isa, threads, o, lse);
        case_compare(&in, isa, o, lse);
        const kv8_page_table ragged = in.pages;
        for (int32_t b = 0; b < 3; b++) { /* request b alone, as a page at its first slot */
            const int32_t qo_indptr[] = {0, c.qo_len[b]};
            attention_inputs one = in;
            attention_case own = c;
            own.batch = 1;
            own.qo_len[0] = c.qo_len[b];
            own.ragged = false;
            one.c = &own;
            one.total_q = c.qo_len[b];
            one.args.batch = 1;
            one.args.qo_indptr = qo_indptr;
            one.args.q = (const uint16_t *)in.args.q + in.args.qo_indptr[b] * in.args.q_stride_row;
            one.spec.page_size = 1024;
            one.spec.batch_invariant = 1;
            one.k.data = (const uint8_t *)in.k.data + ragged.kv_indptr[b] * in.k.stride_slot;
            one.v.data = (const uint8_t *)in.v.data + ragged.kv_indptr[b] * in.v.stride_slot;
            one.num_pages = 1;
            one.pages = case_csr_table(indptr, pages, last + b);
            one.args.k = &one.k;
            one.args.v = &one.v;
            one.args.pages = &one.pages;
            case_run(&one, isa, threads, o_page, lse_page);
            one.spec.page_size = 0;
            one.pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
            const int32_t slots[] = {0, c.kv_len[b]};
            one.pages.kv_indptr = slots;
            case_run(&one, isa, threads, o, lse);
            const size_t own_rows = (size_t)(c.qo_len[b] * in.num_qo_heads);
            assert_memory_equal(o, o_page, own_rows * 64 * sizeof *o);
            assert_memory_equal(lse, lse_page, own_rows * sizeof *lse);
        }
    }
    free(o);
    case_free(&in);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_right_window_hides_what_comes_later),
        cmocka_unit_test(every_row_has_its_range_of_keys),
        cmocka_unit_test(keys_lie_without_pages),
        cmocka_unit_test(rows_not_in_use_are_left_alone),
        cmocka_unit_test(output_takes_8_bits_and_lse_other_forms),
        cmocka_unit_test(all_of_it_together),
        cmocka_unit_test(ragged_keys_give_the_bits_of_one_page),
    };
    return cmocka_run_group_tests(tests, start_threads, stop_threads);
}
