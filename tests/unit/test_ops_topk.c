/* test_ops_topk.c - top-k with its softmax against a sort: ties, NaN, infinities.
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(topk_matches_a_sort),
        cmocka_unit_test(topk_of_ties_takes_the_first),
    };
    return cmocka_run_group_tests_name("ops_topk", tests, NULL, NULL);
}
