/* test_sample.c - argmax, drawing by temperature, and logits that are no numbers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/engine.h>

#include "testing.h"

static void zero_temperature_takes_the_first_maximum(void **state) {
    (void)state;
    uint64_t rng = 0;
    assert_int_equal(kv8_sample((const float[]){-3, 2, 5, 5, 1}, 5, 0, &rng), 2);
    assert_int_equal(kv8_sample((const float[]){-3}, 1, 0, &rng), 0);
    assert_int_equal(kv8_sample((const float[]){NAN, -3, NAN, -2, NAN}, 5, 0, &rng), 3);
    assert_int_equal(kv8_sample((const float[]){NAN, NAN}, 2, 0, &rng), 0);
    assert_int_equal(kv8_sample((const float[]){-INFINITY, -INFINITY}, 2, 0, &rng), 0);
    assert_int_equal(kv8_sample((const float[]){1, INFINITY, 2}, 3, 0, &rng), 1);
}

/* Frequencies of 40000 draws against the softmax, within five standard deviations. */
static void draws_follow_the_softmax(void **state) {
    (void)state;
    enum { VOCAB = 5, DRAWS = 40000 };
    const float logits[VOCAB] = {1.0f, 2.0f, NAN, -INFINITY, 0.0f};
    const float temperatures[] = {0.5f, 1.0f, 3.0f, INFINITY};
    for (size_t t = 0; t < 4; t++) {
        double p[VOCAB] = {0}, total = 0;
        for (int i = 0; i < VOCAB; i++) {
            const double x = (double)logits[i] / (double)temperatures[t];
            if (i != 2 && i != 3) p[i] = exp(x);
            total += p[i];
        }
        int32_t count[VOCAB] = {0};
        uint64_t rng = 42 + t;
        for (int i = 0; i < DRAWS; i++) count[kv8_sample(logits, VOCAB, temperatures[t], &rng)]++;
        for (int i = 0; i < VOCAB; i++) {
            const double share = p[i] / total;
            const double spread = 5 * sqrt(share * (1 - share) * DRAWS);
            assert_true(fabs(count[i] - share * DRAWS) <= spread);
        }
    }
}

static void strange_logits_and_temperatures_do_not_crash(void **state) {
    (void)state;
    uint64_t rng = 7;
    assert_int_equal(kv8_sample((const float[]){NAN, NAN, NAN}, 3, 1, &rng), 0);
    assert_int_equal(kv8_sample((const float[]){0, INFINITY, INFINITY}, 3, 1, &rng), 1);
    assert_int_equal(kv8_sample((const float[]){0, 3, 1}, 3, -1, &rng), 1);
    assert_int_equal(kv8_sample((const float[]){0, 3, 1}, 3, NAN, &rng), 1);
    assert_int_equal(kv8_sample((const float[]){0, 3, 1}, 3, 1e-30f, &rng), 1);
}

static void a_seed_gives_one_sequence(void **state) {
    (void)state;
    const float logits[] = {0, 0, 0, 0, 0, 0, 0, 0};
    uint64_t a = 3, b = 3, c = 4;
    int same = 0;
    for (int i = 0; i < 64; i++) {
        const int32_t x = kv8_sample(logits, 8, 1, &a);
        assert_int_equal(x, kv8_sample(logits, 8, 1, &b));
        same += x == kv8_sample(logits, 8, 1, &c);
    }
    assert_true(same < 32);
    assert_true(a == b && a != 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(zero_temperature_takes_the_first_maximum),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(strange_logits_and_temperatures_do_not_crash),
        cmocka_unit_test(a_seed_gives_one_sequence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
