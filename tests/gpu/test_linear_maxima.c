/* test_linear_maxima.c - the maxima that a product leaves of every 64 rows of w are those of what
 * it wrote beside them, of pairs of blocks with whole, cut and tall tiles.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_ops.h"
#include "gpu_testing.h"

enum { AFTER = 64 }; /* values behind every output, which stay as they were */

/* f16 between -1 and 1 on the device; `spoil` changes some of them first. */
static void *random_f16(const gpu *g, test_rng *rng, size_t n, void (*spoil)(kv8_f16 *, size_t n)) {
    kv8_f16 *const x = malloc(n * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = kv8_f16_from_f32((float)(2 * rng_unit(rng) - 1));
    spoil(x, n);
    void *const at = gpu_upload(g, x, n * sizeof *x);
    free(x);
    return at;
}
static void spoil_weights(kv8_f16 *w, size_t n) {
    w[n - n / 300] = kv8_f16_from_f32(NAN);
    w[n / 5] = kv8_f16_from_f32(INFINITY);
}
static void spoil_tokens(kv8_f16 *x, size_t n) {
    x[n / 2] = kv8_f16_from_f32(-INFINITY);
}

static float *make_output(const gpu *g, size_t n) {
    float *const at = gpu_alloc(g, (n + AFTER) * sizeof *at);
    assert_ok(kv8_stream_fill(g->stream, at, 0xff, (n + AFTER) * sizeof *at));
    return at;
}
/* To the host; frees it. */
static float *take_output(const gpu *g, float *from, size_t n) {
    uint32_t kept;
    float *const got = malloc((n + AFTER) * sizeof *got);
    assert_non_null(got);
    gpu_download(g, got, from, (n + AFTER) * sizeof *got);
    kv8_device_free(g->device, from);
    for (size_t i = n; i < n + AFTER; i++) {
        memcpy(&kept, &got[i], sizeof kept);
        assert_int_equal(kept, 0xffffffff);
    }
    return got;
}

/* The largest of 64 values, NaN where one is NaN. */
static float largest_of(const float *y) {
    float most = y[0];
    for (int r = 0; r < KV8_DEVICE_MAXIMA_ROWS; r++) {
        if (isnan(y[r])) return NAN;
        if (y[r] > most) most = y[r];
    }
    return most;
}

/* Few tokens, a number of rows that is no multiple, and products whose tiles are better cut
 * otherwise have none. */
static void maxima_are_those_of_the_product(void **state) {
    static const struct {
        int32_t rows, cols, n;
        bool has;
    } cases[] = {{67072, 520, 100, true}, {67072, 136, 129, true}, {67072, 64, 500, true},
                 {5120, 2880, 512, true}, {5184, 72, 2050, true},  {5120, 2880, 384, false},
                 {67072, 520, 64, false}, {5100, 72, 2050, false}, {5120, 72, 1, false}};
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_device_ops *ops = NULL;
    assert_ok(kv8_device_ops_create(&ops, g->device));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t rows = (size_t)cases[i].rows, cols = (size_t)cases[i].cols,
                     n = (size_t)cases[i].n, pieces = rows / KV8_DEVICE_MAXIMA_ROWS;
        test_rng rng = {rows + n};
        void *const w = random_f16(g, &rng, rows * cols, spoil_weights);
        void *const x = random_f16(g, &rng, n * cols, spoil_tokens);
        float *const y_on_gpu = make_output(g, n * rows), *const maxima_on_gpu =
                                                              make_output(g, n * pieces);
        const kv8_device_linear linear = {w, NULL, cases[i].rows, cases[i].cols};
        bool has = !cases[i].has;
        assert_ok(kv8_device_linear_maxima(ops, g->stream, &linear, x, cases[i].n, y_on_gpu,
                                           maxima_on_gpu, &has));
        assert_int_equal(has, cases[i].has);
        float *const y = take_output(g, y_on_gpu, n * rows), *const maxima = take_output(
                                                                 g, maxima_on_gpu, n * pieces);
        for (size_t k = 0; has && k < n * pieces; k++) {
            const float want =
                largest_of(y + k / pieces * rows + k % pieces * KV8_DEVICE_MAXIMA_ROWS);
            if (isnan(want) ? !isnan(maxima[k]) : maxima[k] != want)
                fail_msg("%zu x %zu, %zu tokens: maximum %zu of token %zu is %g, not %g", rows,
                         cols, n, k % pieces, k / pieces, (double)maxima[k], (double)want);
        }
        free(y);
        free(maxima);
        kv8_device_free(g->device, w);
        kv8_device_free(g->device, x);
    }
    kv8_device_ops_destroy(ops);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(maxima_are_those_of_the_product)};
    return cmocka_run_group_tests_name("linear_maxima", tests, gpu_open, gpu_close);
}
