/* test_ops_rowwise.c - rmsnorm, SwiGLU and axpy of every rung, at every tail, against f64.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ops_impl.h>

#include "testing.h"

enum { MAX_DIM = 70 };

static void fill_normal(float *x, size_t n, uint64_t seed) {
    test_rng rng = {seed};
    for (size_t i = 0; i < n; i++) x[i] = rng_normal(&rng);
}

#define FOR_EACH_ISA(isa)                                      \
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) \
        if (kv8_machine_has_isa((kv8_isa)isa))

static void check_rmsnorm(kv8_isa isa, size_t n, size_t dim, kv8_dtype gain_dtype, float eps) {
    const size_t gain_size = kv8_dtype_size(gain_dtype) * dim;
    guarded x = guarded_alloc(n * dim * 4), y = guarded_alloc(n * dim * 4);
    guarded gain = guarded_alloc(gain_size), odd = guarded_alloc(gain_size + 1);
    double *const wanted = calloc(n * dim, sizeof(double));
    assert_non_null(wanted);
    fill_normal(x.data, n * dim, dim);
    float gains[MAX_DIM * 50];
    fill_normal(gains, dim, dim + 1);
    assert_ok(kv8_narrow(KV8_ISA_SCALAR, gain_dtype, gains, dim, 1, gain.data, NULL));
    assert_ok(kv8_widen(KV8_ISA_SCALAR, gain_dtype, gain.data, dim, gains));
    memcpy(odd.data, gain.data, gain_size);
    for (size_t row = 0; row < n; row++) {
        const float *const in = (const float *)x.data + row * dim;
        double sum = 0;
        for (size_t i = 0; i < dim; i++) sum += (double)in[i] * (double)in[i];
        const double scale = 1 / sqrt(sum / (double)dim + (double)eps);
        for (size_t i = 0; i < dim; i++)
            wanted[row * dim + i] = (double)in[i] * scale * (double)gains[i];
    }
    kv8_rmsnorm(isa, x.data, n, dim, gain.data, gain_dtype, eps, y.data);
    assert_true(relative_error(y.data, wanted, n * dim) <= 1e-6);
    memset(y.data, 0xff, n * dim * 4);
    kv8_rmsnorm(isa, x.data, n, dim, odd.data, gain_dtype, eps, y.data);
    assert_true(relative_error(y.data, wanted, n * dim) <= 1e-6);
    kv8_rmsnorm(isa, x.data, n, dim, odd.data, gain_dtype, eps, x.data); /* in place */
    assert_true(relative_error(x.data, wanted, n * dim) <= 1e-6);
    guarded_free(x);
    guarded_free(y);
    guarded_free(gain);
    guarded_free(odd);
    free(wanted);
}

static void rmsnorm_matches_f64(void **state) {
    (void)state;
    FOR_EACH_ISA(isa) {
        for (size_t dim = 1; dim <= MAX_DIM; dim++) {
            check_rmsnorm((kv8_isa)isa, 1, dim, KV8_BF16, 1e-5f);
            check_rmsnorm((kv8_isa)isa, 2, dim, KV8_F32, 0.5f);
        }
        check_rmsnorm((kv8_isa)isa, 3, 2880, KV8_BF16, 1e-5f);
    }
}

static void rmsnorm_of_zeros_and_nan(void **state) {
    (void)state;
    const float zeros[20] = {0};
    float gain[20], x[20], y[20];
    for (int i = 0; i < 20; i++) gain[i] = x[i] = 1;
    x[13] = NAN;
    FOR_EACH_ISA(isa) {
        kv8_rmsnorm((kv8_isa)isa, zeros, 1, 20, gain, KV8_F32, 1e-5f, y);
        for (int i = 0; i < 20; i++) assert_true(y[i] == 0.0f);
        kv8_rmsnorm((kv8_isa)isa, x, 1, 20, gain, KV8_F32, 1e-5f, y);
        for (int i = 0; i < 20; i++) assert_true(isnan(y[i]));
    }
}

static double swiglu_f64(double gate, double up, double alpha, double limit) {
    const double g = gate > limit ? limit : gate; /* from above only */
    const double l = up > limit ? limit : up < -limit ? -limit : up;
    return g / (1 + exp(-alpha * g)) * (l + 1);
}

static void swiglu_matches_f64(void **state) {
    (void)state;
    const float alpha = 1.702f, limit = 7.0f;
    FOR_EACH_ISA(isa) {
        for (size_t dim = 1; dim <= MAX_DIM; dim++) {
            const size_t n = dim % 3 + 1;
            guarded u = guarded_alloc(n * dim * 8), y = guarded_alloc(n * dim * 4);
            double wanted[3 * MAX_DIM];
            float *const in = u.data;
            fill_normal(in, 2 * n * dim, dim);
            for (size_t i = 0; i < 2 * n * dim; i++) in[i] *= 6; /* a quarter meets the clamps */
            for (size_t i = 0; i < n * dim; i++)
                wanted[i] = swiglu_f64((double)in[2 * i], (double)in[2 * i + 1], (double)alpha,
                                       (double)limit);
            kv8_swiglu_clamped((kv8_isa)isa, in, n, dim, alpha, limit, y.data);
            assert_true(relative_error(y.data, wanted, n * dim) <= 1e-6);
            guarded_free(u);
            guarded_free(y);
        }
    }
}

static void swiglu_at_the_extremes(void **state) {
    (void)state;
    /* At least a vector of each, so that no lane is a tail. */
    const struct {
        float gate, up;
        double wanted; /* by the definition, in the limit */
    } cases[] = {
        {1e30f, 1e30f, swiglu_f64(7, 7, 1.702, 7)},
        {INFINITY, -INFINITY, swiglu_f64(7, -7, 1.702, 7)},
        {7, 7, swiglu_f64(7, 7, 1.702, 7)},
        {-7.5f, 0, swiglu_f64(-7.5, 0, 1.702, 7)}, /* not clamped from below */
        {-40, 3, swiglu_f64(-40, 3, 1.702, 7)},
        {-60, 1, 0},
        {-1e3f, 5, 0},
        {-3e38f, 5, 0}, /* alpha * gate overflows */
        {0, 5, 0},
        {2, -1e30f, swiglu_f64(2, -7, 1.702, 7)},
        {3, -1, 0},
    };
    FOR_EACH_ISA(isa) {
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            float u[34], y[17];
            for (int i = 0; i < 17; i++) {
                u[2 * i] = cases[k].gate;
                u[2 * i + 1] = cases[k].up;
            }
            kv8_swiglu_clamped((kv8_isa)isa, u, 1, 17, 1.702f, 7.0f, y);
            for (int i = 0; i < 17; i++) {
                const double bound = 1e-5 * fabs(cases[k].wanted) + 1e-36;
                assert_true(fabs((double)y[i] - cases[k].wanted) <= bound);
            }
        }
        float u[34], y[17];
        for (int i = 0; i < 34; i++) u[i] = i % 4 == 0 ? NAN : 1.0f;
        u[3] = NAN; /* element 1: the other half */
        kv8_swiglu_clamped((kv8_isa)isa, u, 1, 17, 1.702f, 7.0f, y);
        for (int i = 0; i < 17; i++) assert_true((isnan(y[i]) != 0) == (i % 2 == 0 || i == 1));
    }
}

static void axpy_matches_f64(void **state) {
    (void)state;
    FOR_EACH_ISA(isa) {
        for (size_t n = 0; n <= MAX_DIM; n++) {
            guarded x = guarded_alloc(n * 4), y = guarded_alloc(n * 4);
            double wanted[MAX_DIM + 1];
            fill_normal(x.data, n, n);
            fill_normal(y.data, n, n + 100);
            for (size_t i = 0; i < n; i++)
                wanted[i] = (double)((float *)y.data)[i] - 0.3 * (double)((float *)x.data)[i];
            kv8_axpy((kv8_isa)isa, -0.3f, x.data, n, y.data);
            assert_true(relative_error(y.data, wanted, n) <= 2e-7);
            guarded_free(x);
            guarded_free(y);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_matches_f64), cmocka_unit_test(rmsnorm_of_zeros_and_nan),
        cmocka_unit_test(swiglu_matches_f64),  cmocka_unit_test(swiglu_at_the_extremes),
        cmocka_unit_test(axpy_matches_f64),
    };
    return cmocka_run_group_tests_name("ops_rowwise", tests, NULL, NULL);
}
