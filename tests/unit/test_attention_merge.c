/* test_attention_merge.c - merge and sink on finished rows: exact over any split of the keys,
 * robust against parts without keys.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/attention.h>

#include "testing.h"

enum { DIM = 5, KEYS = 40 };

/* A row over keys [begin, end) in f64, from the definition. */
static void row_of(const double *score, const double *value, int begin, int end, double sink,
                   double *o, double *lse) {
    double sum = 0, with_sink = exp(sink);
    for (int d = 0; d < DIM; d++) o[d] = 0;
    for (int j = begin; j < end; j++) {
        sum += exp(score[j]);
        for (int d = 0; d < DIM; d++) o[d] += exp(score[j]) * value[j * DIM + d];
    }
    for (int d = 0; d < DIM; d++) o[d] = begin < end ? o[d] / (sum + with_sink) : 0;
    *lse = log(sum);
}

static void any_split_merges_to_the_whole(void **state) {
    (void)state;
    test_rng rng = {5};
    for (int round = 0; round < 300; round++) {
        double score[KEYS], value[KEYS * DIM], whole[DIM], whole_lse;
        for (int j = 0; j < KEYS; j++) score[j] = 10 * (double)rng_normal(&rng);
        for (int i = 0; i < KEYS * DIM; i++) value[i] = (double)rng_normal(&rng);
        const double sink = round % 3 == 0 ? (double)-INFINITY : 8 * (double)rng_normal(&rng);
        row_of(score, value, 0, KEYS, sink, whole, &whole_lse);
        float o[DIM] = {0}, lse = -INFINITY;
        for (int begin = 0; begin < KEYS;) {
            const int end = begin + rng_range(&rng, 0, KEYS - begin); /* empty parts too */
            double part[DIM], part_lse;
            row_of(score, value, begin, end, (double)-INFINITY, part, &part_lse);
            float part_f32[DIM];
            const float part_lse_f32 = (float)part_lse;
            for (int d = 0; d < DIM; d++) part_f32[d] = (float)part[d];
            kv8_attention_merge(o, &lse, part_f32, &part_lse_f32, 1, DIM);
            begin = end;
        }
        assert_true(fabs((double)lse - whole_lse) <= 1e-5);
        const float sink_f32 = (float)sink;
        kv8_attention_apply_sink(o, &lse, &sink_f32, 1, DIM);
        assert_true(relative_error(o, whole, DIM) <= 1e-5);
    }
}

static void empty_parts_count_nothing(void **state) {
    (void)state;
    float a[2] = {1, 2}, lse_a = 0.5f;
    const float garbage[2] = {NAN, INFINITY}, empty = -INFINITY;
    kv8_attention_merge(a, &lse_a, garbage, &empty, 1, 2);
    assert_true(a[0] == 1 && a[1] == 2 && lse_a == 0.5f);
    float b[2] = {NAN, NAN}, lse_b = -INFINITY;
    kv8_attention_merge(b, &lse_b, a, &lse_a, 1, 2);
    assert_true(b[0] == 1 && b[1] == 2 && lse_b == 0.5f);
    float c[2] = {NAN, 3}, lse_c = -INFINITY;
    kv8_attention_merge(c, &lse_c, garbage, &empty, 1, 2);
    assert_true(c[0] == 0 && c[1] == 0 && lse_c == -INFINITY);
}

/* Some libraries say so with +inf. */
static void plus_infinity_is_empty_too(void **state) {
    (void)state;
    float a[2] = {1, 2}, lse_a = 0.5f;
    const float garbage[2] = {NAN, 7}, empty = INFINITY;
    kv8_attention_merge(a, &lse_a, garbage, &empty, 1, 2);
    assert_true(a[0] == 1 && a[1] == 2 && lse_a == 0.5f);
    float b[2] = {NAN, 3}, lse_b = INFINITY;
    kv8_attention_merge(b, &lse_b, a, &lse_a, 1, 2);
    assert_true(b[0] == 1 && b[1] == 2 && lse_b == 0.5f);
    float c[2] = {NAN, 3}, lse_c = INFINITY;
    kv8_attention_merge(c, &lse_c, garbage, &empty, 1, 2);
    assert_true(c[0] == 0 && c[1] == 0 && lse_c == -INFINITY);
    float d[2] = {NAN, 3};
    const float sink = 1;
    kv8_attention_apply_sink(d, &empty, &sink, 1, 2);
    assert_true(d[0] == 0 && d[1] == 0);
}

static void nan_parts_stay_nan(void **state) {
    (void)state;
    float a[1] = {1}, lse_a = 0;
    const float b[1] = {NAN}, lse_b = NAN;
    kv8_attention_merge(a, &lse_a, b, &lse_b, 1, 1);
    assert_true(isnan(a[0]) && isnan(lse_a));
}

static void rows_are_merged_apart(void **state) {
    (void)state;
    float a[4] = {0, 0, 4, 4}, lse_a[2] = {0, 0};
    const float b[4] = {2, 2, 8, 8}, lse_b[2] = {0, logf(3)};
    kv8_attention_merge(a, lse_a, b, lse_b, 2, 2);
    assert_true(fabsf(a[0] - 1) < 1e-6f && fabsf(a[3] - 7) < 1e-6f);
    assert_true(fabsf(lse_a[0] - logf(2)) < 1e-6f && fabsf(lse_a[1] - logf(4)) < 1e-6f);
}

static void scores_far_apart_do_not_overflow(void **state) {
    (void)state;
    float a[1] = {1}, lse_a = -5000;
    const float b[1] = {2}, lse_b = 5000;
    kv8_attention_merge(a, &lse_a, b, &lse_b, 1, 1);
    assert_true(a[0] == 2 && lse_a == 5000);
    const float sinks[] = {9000, -9000, INFINITY, -INFINITY};
    const float wanted[] = {0, 2, 0, 2};
    for (int i = 0; i < 4; i++) {
        float o[1] = {2};
        kv8_attention_apply_sink(o, &lse_a, &sinks[i], 1, 1);
        assert_true(o[0] == wanted[i]);
    }
}

static void a_sink_over_no_keys_gives_zero(void **state) {
    (void)state;
    const float lse = -INFINITY, sinks[] = {0, INFINITY, -INFINITY};
    for (int i = 0; i < 3; i++) {
        float o[2] = {NAN, 1};
        kv8_attention_apply_sink(o, &lse, &sinks[i], 1, 2);
        assert_true(o[0] == 0 && o[1] == 0);
    }
    float o[1] = {1};
    const float some = 0, nan = NAN;
    kv8_attention_apply_sink(o, &some, &nan, 1, 1);
    assert_true(isnan(o[0]));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_split_merges_to_the_whole),
        cmocka_unit_test(empty_parts_count_nothing),
        cmocka_unit_test(plus_infinity_is_empty_too),
        cmocka_unit_test(nan_parts_stay_nan),
        cmocka_unit_test(rows_are_merged_apart),
        cmocka_unit_test(scores_far_apart_do_not_overflow),
        cmocka_unit_test(a_sink_over_no_keys_gives_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
