/* test_rope.c - the rotary embedding against gpt-oss' published constants, against long double
 * angles up to the last position, and its refusals.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/rope.h>

#include "testing.h"

static kv8_rope_options gpt_oss_options(void) {
    kv8_rope_options o = KV8_ROPE_OPTIONS_INIT;
    o.kind = KV8_ROPE_YARN;
    o.head_dim = 64;
    o.theta = 150000;
    o.factor = 32;
    o.beta_fast = 32;
    o.beta_slow = 1;
    o.original_max_position = 4096;
    return o;
}

static void assert_near(double value, double wanted, double relative) {
    if (!(fabs(value - wanted) <= relative * fabs(wanted)))
        fail_msg("%.12g, wanted %.12g", value, wanted);
}

static void yarn_matches_gpt_oss(void **state) {
    (void)state;
    const kv8_rope_options options = gpt_oss_options();
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    float factor = 0;
    const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
    assert_near((double)factor, 1.3465735902799727, 1e-7);
    const struct {
        int index;
        double value;
    } wanted[] = {{0, 1},
                  {1, 0.689044306},
                  {8, 0.0508132748},
                  {9, 0.0317056962},
                  {12, 0.00679495949},
                  {17, 1.29318701e-4},
                  {18, 3.83088124e-5},
                  {31, 3.02351143e-7}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        assert_near((double)inv_freq[wanted[i].index], wanted[i].value, 3e-7);
    kv8_rope_destroy(rope);
}

/* With truncate the fade runs from floor(8.09) to ceil(17.40): at pair 12 it keeps 1 - 4/10. */
static void truncate_rounds_the_bounds(void **state) {
    (void)state;
    kv8_rope_options options = gpt_oss_options();
    options.truncate = 1;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    float factor;
    const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
    for (int i = 0; i < 32; i++) {
        const double original = pow(150000, -i / 32.0);
        const double ramp = fmin(fmax((i - 8) / 10.0, 0), 1);
        assert_near((double)inv_freq[i], original * (1 - ramp) + original / 32 * ramp, 5e-7);
    }
    kv8_rope_destroy(rope);
}

static void default_rope_is_plain(void **state) {
    (void)state;
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.head_dim = 10;
    options.theta = 10000;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    float factor = 0;
    const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
    assert_true(factor == 1.0f);
    /* The f32 exponent i/5 is off by up to 3e-8, times ln 10000. */
    for (int i = 0; i < 5; i++) assert_near((double)inv_freq[i], pow(10000, -i / 5.0), 5e-7);
    kv8_rope_destroy(rope);
}

static void linear_rope_slows_every_pair(void **state) {
    (void)state;
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.kind = KV8_ROPE_LINEAR;
    options.head_dim = 64;
    options.theta = 10000;
    options.factor = 4;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    float factor = 0;
    const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
    assert_true(factor == 1.0f);
    for (int i = 0; i < 32; i++) assert_near((double)inv_freq[i], pow(10000, -i / 32.0) / 4, 1e-6);
    kv8_rope_destroy(rope);
}

/* Llama 3.1's: waves of up to 8192 / 4 tokens as they were, from 8192 on slowed eightfold. */
static void llama3_slows_long_waves(void **state) {
    (void)state;
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.kind = KV8_ROPE_LLAMA3;
    options.head_dim = 128;
    options.theta = 500000;
    options.factor = 8;
    options.low_freq_factor = 1;
    options.high_freq_factor = 4;
    options.original_max_position = 8192;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    float factor = 0;
    const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
    assert_true(factor == 1.0f);
    int num[3] = {0};
    for (int i = 0; i < 64; i++) {
        const double plain = pow(500000, -i / 64.0), wave = 2 * 3.14159265358979323846 / plain;
        double wanted = plain;
        if (wave > 8192) {
            wanted = plain / 8;
        } else if (wave > 2048) {
            const double keep = (8192 / wave - 1) / (4 - 1);
            wanted = keep * plain + (1 - keep) * plain / 8;
        }
        num[wave > 8192 ? 2 : wave > 2048 ? 1 : 0]++;
        assert_near((double)inv_freq[i], wanted, 4e-6);
    }
    assert_true(num[0] > 0 && num[1] > 0 && num[2] > 0);
    kv8_rope_destroy(rope);
}

static void given_attention_factor_is_used(void **state) {
    (void)state;
    kv8_rope_options options = gpt_oss_options();
    options.attention_factor = 0.75;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    float factor = 0, row[64];
    kv8_rope_inv_freq(rope, &factor);
    assert_true(factor == 0.75f);
    const int32_t origin = 0;
    kv8_rope_angles(rope, &origin, 1, row);
    for (int i = 0; i < 32; i++) {
        assert_true(row[i] == 0.75f);
        assert_true(row[32 + i] == 0.0f);
    }
    kv8_rope_destroy(rope);
}

static void angles_are_exact_at_long_positions(void **state) {
    (void)state;
    const kv8_rope_options options = gpt_oss_options();
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    const int32_t positions[] = {0, 1, 127, 4095, 4096, 65537, 131070, 131071};
    enum { ROWS = sizeof positions / sizeof positions[0] };
    const guarded out = guarded_alloc((size_t)ROWS * 64 * sizeof(float));
    float *const cos_sin = out.data;
    kv8_rope_angles(rope, positions, ROWS, cos_sin);
    float factor = 0;
    const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < 32; i++) {
            const volatile float angle = (float)positions[row] * inv_freq[i];
            const long double cosine = cosl((long double)angle) * (long double)factor;
            const long double sine = sinl((long double)angle) * (long double)factor;
            /* Two roundings to f32 of a value of at most 1.35. */
            assert_true(fabsl((long double)cos_sin[row * 64 + i] - cosine) <= 1.7e-7L);
            assert_true(fabsl((long double)cos_sin[row * 64 + 32 + i] - sine) <= 1.7e-7L);
        }
    }
    guarded_free(out);
    kv8_rope_destroy(rope);
}

/* Pairs are (i, i + half), strides are honoured, nothing between the heads is touched. */
static void apply_rotates_strided_heads(void **state) {
    (void)state;
    enum { DIM = 6, HEADS = 3, ROWS = 2, HEAD = 8, ROW = HEADS * HEAD + 5 };
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.head_dim = DIM;
    options.theta = 100;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    const int32_t positions[ROWS] = {3, 1000};
    float cos_sin[ROWS * DIM], x[ROWS * ROW], before[ROWS * ROW];
    kv8_rope_angles(rope, positions, ROWS, cos_sin);
    test_rng rng = {7};
    for (int i = 0; i < ROWS * ROW; i++) before[i] = x[i] = rng_normal(&rng);
    kv8_rope_apply(rope, cos_sin, ROWS, x, HEADS, ROW, HEAD);
    bool touched[ROWS * ROW] = {false};
    for (int row = 0; row < ROWS; row++) {
        for (int head = 0; head < HEADS; head++) {
            for (int i = 0; i < DIM / 2; i++) {
                const int a = row * ROW + head * HEAD + i, b = a + DIM / 2;
                const double angle = positions[row] * pow(100, -2.0 * i / DIM);
                const double wanted_a =
                    (double)before[a] * cos(angle) - (double)before[b] * sin(angle);
                const double wanted_b =
                    (double)before[b] * cos(angle) + (double)before[a] * sin(angle);
                assert_true(fabs((double)x[a] - wanted_a) <= 2e-4);
                assert_true(fabs((double)x[b] - wanted_b) <= 2e-4);
                touched[a] = touched[b] = true;
            }
        }
    }
    for (int i = 0; i < ROWS * ROW; i++) assert_true(touched[i] || x[i] == before[i]);
    kv8_rope_destroy(rope);
}

/* Neighbours turn by the angles that the halves' pairs turn by. */
static void interleaved_pairs_are_neighbours(void **state) {
    (void)state;
    enum { DIM = 8, ROWS = 3, HEADS = 2 };
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.head_dim = DIM;
    options.theta = 100;
    options.interleaved = 1;
    kv8_rope *rope;
    assert_ok(kv8_rope_create(&rope, &options));
    const int32_t positions[ROWS] = {0, 5, 77};
    float cos_sin[ROWS * DIM], x[ROWS * HEADS * DIM], before[ROWS * HEADS * DIM];
    kv8_rope_angles(rope, positions, ROWS, cos_sin);
    test_rng rng = {3};
    for (int i = 0; i < ROWS * HEADS * DIM; i++) before[i] = x[i] = rng_normal(&rng);
    kv8_rope_apply(rope, cos_sin, ROWS, x, HEADS, HEADS * DIM, DIM);
    for (int i = 0; i < ROWS * HEADS * DIM; i += 2) {
        const double angle = positions[i / (HEADS * DIM)] * pow(100, -(double)(i % DIM) / DIM);
        const double a = (double)before[i], b = (double)before[i + 1];
        assert_true(fabs((double)x[i] - (a * cos(angle) - b * sin(angle))) <= 2e-5);
        assert_true(fabs((double)x[i + 1] - (b * cos(angle) + a * sin(angle))) <= 2e-5);
    }
    kv8_rope_destroy(rope);
}

static void bad_options_are_refused(void **state) {
    (void)state;
    kv8_rope *rope = (kv8_rope *)state;
    assert_refused(kv8_rope_create(&rope, NULL), KV8_ERR_INVALID, "NULL");
    assert_null(rope);
#define REFUSED(change, part)                                              \
    do {                                                                   \
        kv8_rope_options o = gpt_oss_options();                            \
        change;                                                            \
        assert_refused(kv8_rope_create(&rope, &o), KV8_ERR_INVALID, part); \
        assert_null(rope);                                                 \
    } while (0)
    REFUSED(o.struct_size = 8, "struct_size is 8");
    REFUSED(o.kind = (kv8_rope_kind)9, "kind is 9");
    REFUSED(o.head_dim = 45, "head_dim is 45");
    REFUSED(o.head_dim = 0, "head_dim is 0");
    REFUSED(o.head_dim = 578, "head_dim is 578");
    REFUSED(o.theta = 1, "theta is 1");
    REFUSED(o.theta = (double)NAN, "theta is");
    REFUSED(o.theta = (double)INFINITY, "theta is inf");
    REFUSED(o.factor = 0.5, "factor is 0.5");
    REFUSED(o.factor = (double)NAN, "factor is");
    REFUSED(o.beta_slow = 0, "beta_slow is 0");
    REFUSED(o.beta_fast = 0.5, "beta_fast is 0.5");
    REFUSED(o.beta_fast = (double)INFINITY, "beta_fast is inf");
    REFUSED(o.truncate = 2, "truncate is 2");
    REFUSED(o.original_max_position = 0, "original_max_position is 0");
    REFUSED(o.attention_factor = -1, "attention_factor is -1");
    REFUSED(o.kind = KV8_ROPE_DEFAULT, "factor is 32"); /* never dropped in silence */
    REFUSED(o.kind = KV8_ROPE_LLAMA3, "beta_fast is 32, must be 0 for llama3 rope");
    REFUSED(o.kind = KV8_ROPE_LINEAR, "original_max_position is 4096, must be 0 for linear rope");
    REFUSED(o.interleaved = 2, "interleaved is 2");
    REFUSED(o.low_freq_factor = 1, "low_freq_factor is 1, must be 0 for YaRN rope");
#define LLAMA3                                                               \
    o.kind = KV8_ROPE_LLAMA3, o.beta_fast = o.beta_slow = 0, o.truncate = 0, \
    o.low_freq_factor = 1, o.high_freq_factor = 4
    REFUSED((LLAMA3, o.low_freq_factor = 0), "low_freq_factor is 0");
    REFUSED((LLAMA3, o.high_freq_factor = 1), "high_freq_factor is 1, must be finite and > low");
    REFUSED((LLAMA3, o.factor = 0), "factor is 0");
#undef LLAMA3
#undef REFUSED
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yarn_matches_gpt_oss),
        cmocka_unit_test(truncate_rounds_the_bounds),
        cmocka_unit_test(default_rope_is_plain),
        cmocka_unit_test(linear_rope_slows_every_pair),
        cmocka_unit_test(llama3_slows_long_waves),
        cmocka_unit_test(given_attention_factor_is_used),
        cmocka_unit_test(angles_are_exact_at_long_positions),
        cmocka_unit_test(apply_rotates_strided_heads),
        cmocka_unit_test(interleaved_pairs_are_neighbours),
        cmocka_unit_test(bad_options_are_refused),
    };
    return cmocka_run_group_tests_name("rope", tests, NULL, NULL);
}
