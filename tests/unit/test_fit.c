/* test_fit.c - fitted scales and their costs beside values really stored and read back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/calibrate.h>

#include "testing.h"

enum { DIM = 64, ROWS = 512, NUM = DIM * ROWS };

static float values[NUM]; /* [ROWS, DIM] */

/* K's head 0 holds values, V's head 0 half of them; K's head 1 and V's head 1 stay empty rows. */
static kv8_observer *observe_values(void) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    options.num_layers = 1;
    options.num_kv_heads = 2;
    options.k_head_dim = DIM;
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    kv8_observer_start(observer);
    static float k[ROWS][2][DIM], v[ROWS][2][DIM];
    for (int row = 0; row < ROWS; row++) {
        for (int d = 0; d < DIM; d++) {
            k[row][0][d] = values[row * DIM + d];
            v[row][0][d] = values[row * DIM + d] * 0.5f;
        }
    }
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = ROWS;
    args.src_dtype = KV8_F32;
    args.k = k;
    args.v = v;
    args.k_stride_row = args.v_stride_row = 2 * DIM;
    args.k_stride_head = args.v_stride_head = DIM;
    assert_ok(kv8_observer_add(observer, 0, &args));
    return observer;
}

static void fill_normal(float sigma, uint64_t seed) {
    test_rng rng = {seed};
    for (int i = 0; i < NUM; i++) values[i] = rng_normal(&rng) * sigma;
}

static kv8_fit fit_with(const kv8_observer *observer, const kv8_fit_options *options) {
    kv8_fit fit = KV8_FIT_INIT;
    assert_ok(kv8_observer_fit(observer, KV8_OBSERVED_K, 0, 0, options, &fit));
    return fit;
}

static float absmax_of(void) {
    float most = 0;
    for (int i = 0; i < NUM; i++) most = fmaxf(most, fabsf(values[i]));
    return most;
}

/* What storing the values themselves gives. */
typedef struct measured {
    double sqnr_db, clip_rate, flushed_rate;
} measured;
static measured store(kv8_dtype dtype, float scale) {
    static uint8_t codes[NUM];
    static float back[NUM];
    kv8_narrow_counts counts = {0};
    assert_ok(kv8_narrow(KV8_ISA_SCALAR, dtype, values, NUM, scale, codes, &counts));
    assert_ok(kv8_widen(KV8_ISA_SCALAR, dtype, codes, NUM, back));
    double signal = 0, noise = 0;
    int64_t flushed = 0, nonzero = 0;
    for (int i = 0; i < NUM; i++) {
        const double x = (double)values[i], error = (double)back[i] * (double)scale - x;
        signal += x * x;
        noise += error * error;
        nonzero += x != 0;
        flushed += x != 0 && back[i] == 0;
    }
    return (measured){10 * log10(signal / noise), (double)counts.clips / NUM,
                      (double)flushed / (double)nonzero};
}

static void costs_are_those_of_storing(void **state) {
    (void)state;
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_E4M3FNUZ, KV8_E5M2};
    /* amax about 4.3 sigma: from far below e4m3's smallest step to far beyond its largest value */
    static const float sigmas[] = {1e-4f, 0.002f, 0.02f, 1, 60, 150, 400, 3e4f};
    for (size_t s = 0; s < sizeof sigmas / sizeof sigmas[0]; s++) {
        fill_normal(sigmas[s], s + 1);
        kv8_observer *const observer = observe_values();
        for (int t = 0; t < 3; t++) {
            kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
            options.dtype = dtypes[t];
            const kv8_fit fit = fit_with(observer, &options);
            const measured with = store(dtypes[t], fit.scale), plain = store(dtypes[t], 1);
            if (!(fabs(fit.sqnr_db - with.sqnr_db) <= 0.3) ||
                !(fabs(fit.sqnr_at_1_db - plain.sqnr_db) <= 0.3))
                fail_msg("%s, sigma %g: %g dB and %g at 1, measured %g and %g",
                         kv8_dtype_name(dtypes[t]), (double)sigmas[s], fit.sqnr_db,
                         fit.sqnr_at_1_db, with.sqnr_db, plain.sqnr_db);
            assert_true(fit.clip_rate == 0 && with.clip_rate == 0);
            assert_true(fabs(fit.clip_rate_at_1 - plain.clip_rate) <= 0.01);
            assert_true(fabs(fit.flushed_rate - with.flushed_rate) <= 0.01);
            assert_true(fabs(fit.flushed_rate_at_1 - plain.flushed_rate) <= 0.01);
            assert_true(fit.amax == absmax_of());
            /* absmax / max, or one step more where that would clip */
            const float least = absmax_of() / kv8_dtype_max(dtypes[t]);
            assert_true(fit.scale >= least && fit.scale <= nextafterf(least, INFINITY));
            assert_true(fabs(fit.headroom - 1) < 1e-6);
        }
        kv8_observer_destroy(observer);
    }
}

/* e4m3's error is flat between amax 0.1 and 600: that is what the warnings say. */
static void warns_of_what_scale_1_breaks(void **state) {
    (void)state;
    static const struct {
        float sigma;
        uint32_t warnings;
    } cases[] = {
        {0.004f, KV8_FIT_FADES_AT_1}, {1e-5f, KV8_FIT_FADES_AT_1}, {0.05f, 0}, {1, 0}, {90, 0},
        {300, KV8_FIT_CLIPS_AT_1}};
    const kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fill_normal(cases[i].sigma, i + 20);
        kv8_observer *const observer = observe_values();
        const kv8_fit fit = fit_with(observer, &options);
        assert_int_equal(fit.warnings, cases[i].warnings);
        assert_true(fit.sqnr_db > 31 && fit.channel == -1);
        kv8_observer_destroy(observer);
    }
}

static void names_what_no_scale_mends(void **state) {
    (void)state;
    const kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    fill_normal(1, 30);
    for (int row = 0; row < ROWS; row += 7) values[row * DIM + 41] = (float)NAN;
    kv8_observer *observer = observe_values();
    kv8_fit fit = fit_with(observer, &options);
    assert_int_equal(fit.warnings, KV8_FIT_HAS_NAN);
    assert_int_equal(fit.channel, 41);
    assert_true(fit.sqnr_db > 31);
    /* the empty head: zeros, scale 1 */
    assert_ok(kv8_observer_fit(observer, KV8_OBSERVED_V, 0, 1, &options, &fit));
    assert_true(fit.scale == 1 && fit.amax == 0 && isnan(fit.sqnr_db) && isnan(fit.headroom));
    assert_int_equal(fit.warnings, KV8_FIT_ALL_ZERO);
    assert_string_equal(kv8_fit_warning_text(KV8_FIT_ALL_ZERO), "all zero");
    assert_null(kv8_fit_warning_text(3));
    kv8_observer_destroy(observer);

    fill_normal(1, 31);
    for (int row = 0; row < ROWS; row++) values[row * DIM + 17] *= 40;
    values[3 * DIM + 5] = -INFINITY;
    observer = observe_values();
    fit = fit_with(observer, &options);
    assert_int_equal(fit.warnings, KV8_FIT_HAS_INF);
    assert_int_equal(fit.channel, 5);
    kv8_observer_destroy(observer);
    values[3 * DIM + 5] = 0;
    observer = observe_values();
    fit = fit_with(observer, &options);
    assert_int_equal(fit.warnings, KV8_FIT_OUTLIER);
    assert_int_equal(fit.channel, 17);
    kv8_observer_destroy(observer);
}

static void margin_and_rounding_only_raise(void **state) {
    (void)state;
    fill_normal(3, 40);
    kv8_observer *const observer = observe_values();
    kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    const kv8_fit plain = fit_with(observer, &options);
    options.margin = 1.25;
    const kv8_fit wide = fit_with(observer, &options);
    assert_true(fabs((double)wide.scale / (double)plain.scale - 1.25) < 1e-6);
    assert_true(fabs(wide.headroom - 1.25) < 1e-5);
    options.power_of_two = 1;
    const kv8_fit rounded = fit_with(observer, &options);
    int exponent = 0;
    assert_true(frexpf(rounded.scale, &exponent) == 0.5f);
    assert_true(rounded.scale >= wide.scale && rounded.scale < 2 * wide.scale);
    /* A scale that is one already stays. */
    options.margin = 1;
    for (int i = 0; i < NUM; i++) values[i] = i % 2 == 0 ? 448 * 0.25f : 1;
    kv8_observer *const exact = observe_values();
    assert_true(fit_with(exact, &options).scale == 0.25f);
    kv8_observer_destroy(exact);
    kv8_observer_destroy(observer);
}

/* One value in a thousand 64 times as large: the percentile leaves them out. e4m3's own range is
 * wide enough that least squares does not. */
static void percentile_cuts_the_tail(void **state) {
    (void)state;
    fill_normal(1, 50);
    for (int i = 0; i < NUM; i += 1000) values[i] = i % 2000 == 0 ? 300 : -300;
    kv8_observer *const observer = observe_values();
    kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    options.method = KV8_FIT_PERCENTILE;
    options.percentile = 99.8;
    kv8_fit fit = fit_with(observer, &options);
    const double range = (double)fit.scale * 448;
    assert_true(range >= 3 && range <= 6);
    assert_true(fit.clip_rate >= 0.001 && fit.clip_rate <= 0.002);
    options.percentile = 100;
    fit = fit_with(observer, &options);
    assert_true(fit.clip_rate == 0 && fabs((double)fit.scale * 448 - 300) < 0.01);
    options.method = KV8_FIT_SQUARED_ERROR;
    const kv8_fit least = fit_with(observer, &options);
    const measured a = store(KV8_E4M3, least.scale), b = store(KV8_E4M3, fit.scale);
    assert_true(a.sqnr_db >= b.sqnr_db - 0.05);
    assert_true(least.clip_rate < 0.0001);
    kv8_observer_destroy(observer);
}

/* Values beyond e4m3's 17 binades below one giant: clipping it saves more than it costs. */
static void least_squares_beats_absmax(void **state) {
    (void)state;
    for (int i = 0; i < NUM; i++) values[i] = 1e-4f * (float)(1 + i % 7);
    values[7] = 20;
    values[9] = -14;
    kv8_observer *const observer = observe_values();
    kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    const measured absmax = store(KV8_E4M3, fit_with(observer, &options).scale);
    options.method = KV8_FIT_SQUARED_ERROR;
    const measured least = store(KV8_E4M3, fit_with(observer, &options).scale);
    assert_true(least.sqnr_db >= absmax.sqnr_db);
    kv8_observer_destroy(observer);
}

static void one_scale_for_all_heads(void **state) {
    (void)state;
    fill_normal(2, 60);
    kv8_observer *const observer = observe_values();
    const kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    kv8_fit k = KV8_FIT_INIT, v = KV8_FIT_INIT;
    assert_ok(kv8_observer_fit(observer, KV8_OBSERVED_K, 0, -1, &options, &k));
    assert_ok(kv8_observer_fit(observer, KV8_OBSERVED_V, 0, -1, &options, &v));
    assert_true(k.amax == absmax_of() && v.amax == absmax_of() * 0.5f);
    assert_true(k.scale == fit_with(observer, &options).scale);
    assert_int_equal(k.num_rows, ROWS);
    kv8_observer_destroy(observer);
}

static void refuses_by_name(void **state) {
    (void)state;
    kv8_observer *const observer = observe_values();
    kv8_fit fit = KV8_FIT_INIT;
    kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    options.dtype = KV8_INT8;
    assert_refused(kv8_observer_fit(observer, KV8_OBSERVED_K, 0, 0, &options, &fit),
                   KV8_ERR_UNSUPPORTED, "int8");
    options.dtype = KV8_E4M3;
    options.method = KV8_FIT_PERCENTILE;
    assert_refused(kv8_observer_fit(observer, KV8_OBSERVED_K, 0, 0, &options, &fit),
                   KV8_ERR_INVALID, "percentile is 0");
    options.percentile = (double)NAN;
    assert_refused(kv8_observer_fit(observer, KV8_OBSERVED_K, 0, 0, &options, &fit),
                   KV8_ERR_INVALID, "percentile");
    options.method = KV8_FIT_ABSMAX;
    options.margin = 0.5;
    assert_refused(kv8_observer_fit(observer, KV8_OBSERVED_K, 0, 0, &options, &fit),
                   KV8_ERR_INVALID, "margin is 0.5");
    options.margin = 1;
    assert_refused(kv8_observer_fit(observer, KV8_OBSERVED_K, 1, 0, &options, &fit),
                   KV8_ERR_INVALID, "layer 1");
    assert_refused(kv8_observer_fit(observer, KV8_OBSERVED_Q, 0, -1, &options, &fit),
                   KV8_ERR_INVALID, "Q was not observed");
    kv8_observer_destroy(observer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(costs_are_those_of_storing),
        cmocka_unit_test(warns_of_what_scale_1_breaks),
        cmocka_unit_test(names_what_no_scale_mends),
        cmocka_unit_test(margin_and_rounding_only_raise),
        cmocka_unit_test(percentile_cuts_the_tail),
        cmocka_unit_test(least_squares_beats_absmax),
        cmocka_unit_test(one_scale_for_all_heads),
        cmocka_unit_test(refuses_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
