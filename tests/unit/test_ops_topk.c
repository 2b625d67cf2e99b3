/* test_ops_topk.c - top-k with its softmax against a sort, and log-sum-exp against long double:
 * ties, NaN, infinities.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ops_impl.h>

#include "testing.h"

typedef struct entry {
    double value; /* NaN already -inf */
    int32_t idx;
} entry;

static int by_value_then_index(const void *a, const void *b) {
    const entry *const x = a, *const y = b;
    if (x->value != y->value) return x->value > y->value ? -1 : 1;
    return x->idx < y->idx ? -1 : 1;
}

static void check_topk(const float *values, size_t n, size_t k) {
    enum { MAX_N = 200 };
    entry sorted[MAX_N];
    int32_t idx[MAX_N];
    float weight[MAX_N];
    double wanted[MAX_N], sum = 0;
    for (size_t i = 0; i < n; i++)
        sorted[i] = (entry){isnan(values[i]) ? -(double)INFINITY : (double)values[i], (int32_t)i};
    qsort(sorted, n, sizeof sorted[0], by_value_then_index);
    for (size_t i = 0; i < k; i++) {
        wanted[i] = sorted[i].value == sorted[0].value ? 1 : exp(sorted[i].value - sorted[0].value);
        sum += wanted[i];
    }
    for (size_t i = 0; i < k; i++) wanted[i] /= sum;
    idx[k] = 77;
    weight[k] = 77;
    kv8_topk_softmax(values, n, k, idx, weight);
    for (size_t i = 0; i < k; i++) assert_int_equal(idx[i], sorted[i].idx);
    /* exp and division round once each; the f32 sum adds up to half an ulp per term. */
    assert_true(relative_error(weight, wanted, k) <= 2e-7 + 6e-8 * (double)k);
    assert_true(idx[k] == 77 && weight[k] == 77.0f);
}

static void topk_matches_a_sort(void **state) {
    (void)state;
    test_rng rng = {3};
    float values[128];
    for (int round = 0; round < 300; round++) {
        const size_t n = (size_t)rng_range(&rng, 1, 128);
        /* Every third round from few values, so that ties are the rule. */
        for (size_t i = 0; i < n; i++)
            values[i] = round % 3 == 0 ? (float)rng_range(&rng, -2, 2) : 3 * rng_normal(&rng);
        if (round % 5 == 0) values[rng_range(&rng, 0, (int32_t)n - 1)] = NAN;
        if (round % 7 == 0) values[rng_range(&rng, 0, (int32_t)n - 1)] = -INFINITY;
        if (round % 11 == 0) values[rng_range(&rng, 0, (int32_t)n - 1)] = INFINITY;
        check_topk(values, n, (size_t)rng_range(&rng, 1, (int32_t)n));
        check_topk(values, n, n < 4 ? n : 4);
    }
}

static void topk_of_ties_takes_the_first(void **state) {
    (void)state;
    const float equal[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const float nans[6] = {NAN, NAN, NAN, NAN, NAN, NAN};
    const float mixed[6] = {NAN, -INFINITY, 2, NAN, 2, -5};
    check_topk(equal, 8, 4);
    check_topk(nans, 6, 4); /* all -inf: the first four, a quarter each */
    check_topk(mixed, 6, 4);
    check_topk(mixed, 6, 2);
}

static void check_log_sum_exp(const float *x, size_t n, size_t max_idx) {
    long double max = -(long double)INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++) max = fmaxl(max, (long double)x[i]);
    for (size_t i = 0; i < n; i++) sum += expl((long double)x[i] - max);
    size_t idx = 99;
    const double lse = kv8_log_sum_exp(x, n, &idx);
    assert_true(fabsl((long double)lse - (max + logl(sum))) <= 1e-7L);
    assert_int_equal(idx, max_idx);
    assert_true(kv8_log_sum_exp(x, n, NULL) == lse);
}

static void log_sum_exp_matches_long_double(void **state) {
    (void)state;
    test_rng rng = {9};
    static float x[5000];
    size_t max_idx = 0;
    for (size_t i = 0; i < 5000; i++) {
        x[i] = 4 * rng_normal(&rng);
        if (x[i] > x[max_idx]) max_idx = i;
    }
    check_log_sum_exp(x, 5000, max_idx);
    for (size_t i = 0; i < 5000; i++) x[i] += 1000; /* exp alone would overflow */
    check_log_sum_exp(x, 5000, max_idx);
    const float ties[5] = {-1, 3, 3, -INFINITY, 3};
    check_log_sum_exp(ties, 5, 1);
    check_log_sum_exp(ties, 1, 0);
}

static void log_sum_exp_at_the_extremes(void **state) {
    (void)state;
    const float none[3] = {-INFINITY, -INFINITY, -INFINITY}, all[3] = {1, INFINITY, 2};
    const float nan[3] = {1, NAN, 2}, huge[2] = {-3e38f, 3e38f};
    size_t idx = 0;
    assert_true(kv8_log_sum_exp(none, 3, NULL) == -(double)INFINITY);
    assert_true(kv8_log_sum_exp(none, 0, NULL) == -(double)INFINITY);
    assert_true(kv8_log_sum_exp(all, 3, &idx) == (double)INFINITY);
    assert_int_equal(idx, 1);
    assert_true(isnan(kv8_log_sum_exp(nan, 3, NULL)));
    assert_true(kv8_log_sum_exp(huge, 2, NULL) == (double)3e38f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(topk_matches_a_sort),
        cmocka_unit_test(topk_of_ties_takes_the_first),
        cmocka_unit_test(log_sum_exp_matches_long_double),
        cmocka_unit_test(log_sum_exp_at_the_extremes),
    };
    return cmocka_run_group_tests_name("ops_topk", tests, NULL, NULL);
}
