/* test_ops_matmul.c - matrix products of every weight kind and rung against f64 sums over the
 * decoded weights, and the promise that an output's bits depend on its own row alone.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ops_impl.h>

#include "testing.h"

/* One product: weights in a buffer that ends at a guard page, `misalign` bytes into it. */
typedef struct product {
    kv8_matmul_job job;
    guarded weights, scales, bias, x, x_rows, y;
    double *decoded; /* [rows, cols] */
} product;

static size_t weight_size(kv8_weight_kind kind, size_t count) {
    return kind == KV8_WEIGHT_F32 ? 4 * count : kind == KV8_WEIGHT_BF16 ? 2 * count : count / 2;
}

static double e2m1_value(int code) {
    static const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}

/* Random weights and their values, computed here from the formats' definitions. */
static void fill_weights(product *p, test_rng *rng) {
    const kv8_weight *const w = &p->job.w;
    const size_t count = (size_t)(w->rows * w->cols);
    uint8_t *const data = (uint8_t *)p->weights.data;
    for (size_t i = 0; i < count; i++) {
        const float value = rng_normal(rng);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (w->kind == KV8_WEIGHT_F32) memcpy(data + 4 * i, &value, 4);
        if (w->kind == KV8_WEIGHT_BF16) {
            const uint16_t upper = (uint16_t)(bits >> 16);
            memcpy(data + 2 * i, &upper, 2);
            bits &= 0xffff0000u;
        }
        float kept;
        memcpy(&kept, &bits, 4);
        p->decoded[i] = (double)kept;
    }
    if (w->kind != KV8_WEIGHT_MXFP4) return;
    uint8_t *const scales = p->scales.data;
    for (size_t i = 0; i < count / 32; i++) scales[i] = (uint8_t)rng_range(rng, 118, 127);
    for (size_t i = 0; i < count / 2; i++) {
        data[i] = (uint8_t)rng_u64(rng);
        const double scale = ldexp(1, scales[i / 16] - 127);
        p->decoded[2 * i] = e2m1_value(data[i] & 15) * scale;
        p->decoded[2 * i + 1] = e2m1_value(data[i] >> 4) * scale;
    }
}

enum { NUM_X_SOURCES = 5 }; /* with a gather, rows come from this many activations */

static product product_create(kv8_weight_kind kind, int64_t rows, int64_t cols, int64_t num_rows,
                              bool gather, bool bias, uint64_t seed) {
    test_rng rng = {seed};
    product p = {0};
    const size_t count = (size_t)(rows * cols);
    const int64_t x_stride = cols + 3, y_stride = rows + 2;
    const int64_t num_x = gather ? NUM_X_SOURCES : num_rows;
    p.weights = guarded_alloc(weight_size(kind, count)); /* odd sizes end odd: any alignment */
    p.scales = guarded_alloc(count / 32);
    p.bias = guarded_alloc(2 * (size_t)rows);
    p.x = guarded_alloc((size_t)((num_x - 1) * x_stride + cols) * 4);
    p.x_rows = guarded_alloc((size_t)num_rows * 4);
    p.y = guarded_alloc((size_t)((num_rows - 1) * y_stride + rows) * 4);
    p.decoded = malloc(count * sizeof(double) + 1);
    assert_non_null(p.decoded);
    p.job.w = (kv8_weight){kind, p.weights.data, kind == KV8_WEIGHT_MXFP4 ? p.scales.data : NULL,
                           rows, cols};
    fill_weights(&p, &rng);
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t code = kv8_bf16_from_f32(rng_normal(&rng)).bits;
        memcpy((uint8_t *)p.bias.data + 2 * r, &code, 2);
    }
    float *const x = p.x.data; /* what lies between the rows stays NaN */
    for (int64_t i = 0; i < num_x; i++) {
        for (int64_t c = 0; c < cols; c++) x[i * x_stride + c] = rng_normal(&rng);
    }
    int32_t *const x_rows = p.x_rows.data;
    for (int64_t i = 0; i < num_rows; i++) x_rows[i] = rng_range(&rng, 0, NUM_X_SOURCES - 1);
    p.job.bias = bias ? p.bias.data : NULL;
    p.job.x = x;
    p.job.x_stride = x_stride;
    p.job.x_rows = gather ? x_rows : NULL;
    p.job.y = p.y.data;
    p.job.y_stride = y_stride;
    p.job.num_rows = num_rows;
    return p;
}

static void product_destroy(product *p) {
    guarded_free(p->weights);
    guarded_free(p->scales);
    guarded_free(p->bias);
    guarded_free(p->x);
    guarded_free(p->x_rows);
    guarded_free(p->y);
    free(p->decoded);
}

static void clear_output(product *p) {
    memset(p->y.data, 0xff, (size_t)((p->job.num_rows - 1) * p->job.y_stride + p->job.w.rows) * 4);
}

/* |y - exact| <= 1e-5 * (||w_r|| ||x_i|| + |bias|) for every output; gaps keep their bytes. */
static void assert_product(const product *p, kv8_isa isa) {
    const kv8_matmul_job *const job = &p->job;
    for (int64_t i = 0; i < job->num_rows; i++) {
        const float *const x = job->x + (job->x_rows != NULL ? job->x_rows[i] : i) * job->x_stride;
        for (int64_t r = 0; r < job->w.rows; r++) {
            const double *const w = p->decoded + r * job->w.cols;
            double sum = 0, ww = 0, xx = 0, bias = 0;
            for (int64_t c = 0; c < job->w.cols; c++) {
                sum += w[c] * (double)x[c];
                ww += w[c] * w[c];
                xx += (double)x[c] * (double)x[c];
            }
            if (job->bias != NULL) {
                uint16_t code;
                memcpy(&code, (const uint8_t *)job->bias + 2 * r, 2);
                bias = (double)kv8_bf16_to_f32((kv8_bf16){code});
            }
            const double error = fabs((double)job->y[i * job->y_stride + r] - (sum + bias));
            if (!(error <= 1e-5 * (sqrt(ww * xx) + fabs(bias))))
                fail_msg("%s: kind %d [%d, %d] x %d rows: y[%d, %d] is off by %g",
                         kv8_isa_name(isa), (int)job->w.kind, (int)job->w.rows, (int)job->w.cols,
                         (int)job->num_rows, (int)i, (int)r, error);
        }
        if (i + 1 == job->num_rows) continue;
        for (int64_t gap = job->w.rows; gap < job->y_stride; gap++) {
            uint32_t bits;
            memcpy(&bits, &job->y[i * job->y_stride + gap], 4);
            assert_int_equal(bits, 0xffffffffu);
        }
    }
}

static void check_shape(kv8_weight_kind kind, int64_t rows, int64_t cols, int64_t num_rows,
                        bool gather, bool bias) {
    product p = product_create(kind, rows, cols, num_rows, gather, bias,
                               (uint64_t)(rows * 1000003 + cols * 1009 + num_rows));
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (!kv8_machine_has_isa((kv8_isa)isa)) continue;
        clear_output(&p);
        kv8_matmul_run((kv8_isa)isa, NULL, &p.job, 1);
        assert_product(&p, (kv8_isa)isa);
    }
    product_destroy(&p);
}

static const int64_t plain_cols[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 100};
static const int64_t row_counts[] = {1, 2, 3, 4, 5, 6, 7, 13, 67};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static void plain_weights_of_every_tail(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(plain_cols); i++) {
        for (size_t k = 0; k < COUNT(row_counts); k++) {
            const int64_t rows = 1 + (int64_t)(i * 5 + k) % 19;
            check_shape(KV8_WEIGHT_BF16, rows, plain_cols[i], row_counts[k], k % 2 == 0,
                        k % 3 == 0);
            check_shape(KV8_WEIGHT_F32, rows, plain_cols[i], row_counts[k], k % 2 == 1, k % 3 == 1);
        }
    }
}

static void mxfp4_of_every_row_count(void **state) {
    (void)state;
    for (int64_t blocks = 1; blocks <= 5; blocks++) {
        for (size_t k = 0; k < COUNT(row_counts); k++)
            check_shape(KV8_WEIGHT_MXFP4, 1 + (blocks * 7 + (int64_t)k) % 21, 32 * blocks,
                        row_counts[k], k % 2 == 0, k % 3 != 0);
    }
}

/* Around the chunk of 1024 columns, and gpt-oss' widths. */
static void wide_weights_stay_accurate(void **state) {
    (void)state;
    const int64_t cols[] = {1023, 1024, 1025, 2880, 4096};
    for (size_t i = 0; i < COUNT(cols); i++) {
        for (int64_t num_rows = 1; num_rows <= 7; num_rows += 3) {
            check_shape(KV8_WEIGHT_BF16, 11, cols[i], num_rows, false, true);
            check_shape(KV8_WEIGHT_F32, 9, cols[i], num_rows, true, true);
            if (cols[i] % 32 == 0) check_shape(KV8_WEIGHT_MXFP4, 10, cols[i], num_rows, true, true);
        }
    }
    check_shape(KV8_WEIGHT_BF16, 3, 20000, 2, false, false);
    check_shape(KV8_WEIGHT_MXFP4, 3, 20000, 5, false, false);
}

static void more_rows_than_a_tile(void **state) {
    (void)state;
    check_shape(KV8_WEIGHT_BF16, 70, 70, 200, false, true);
    check_shape(KV8_WEIGHT_MXFP4, 40, 64, 97, true, true);
}

/* Byte-odd addresses of weights, scales and bias, each ending at a guard page. */
static void weights_of_any_alignment(void **state) {
    (void)state;
    for (int kind = KV8_WEIGHT_BF16; kind <= KV8_WEIGHT_MXFP4; kind++) {
        for (int64_t num_rows = 1; num_rows <= 4; num_rows += 3) {
            product p = product_create((kv8_weight_kind)kind, 9, 96, num_rows, false, true, 5);
            const size_t size = weight_size((kv8_weight_kind)kind, 9 * 96);
            guarded shifted = guarded_alloc(size + 1), bias = guarded_alloc(19);
            memcpy(shifted.data, p.weights.data, size); /* the spare byte lies behind */
            memcpy(bias.data, p.bias.data, 18);
            p.job.w.data = shifted.data;
            p.job.bias = bias.data;
            for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
                if (!kv8_machine_has_isa((kv8_isa)isa)) continue;
                clear_output(&p);
                kv8_matmul_run((kv8_isa)isa, NULL, &p.job, 1);
                assert_product(&p, (kv8_isa)isa);
            }
            guarded_free(shifted);
            guarded_free(bias);
            product_destroy(&p);
        }
    }
}

/* Every code under every scale, one activation at a time: the weight itself comes back. (From
 * scale 253 on, 4 and 6 overflow to infinity, and infinity times the other activations is NaN.) */
static void every_mxfp4_code_and_scale(void **state) {
    (void)state;
    uint8_t block[16], scale;
    for (int i = 0; i < 16; i++) block[i] = (uint8_t)((i % 8 * 2) | (i % 8 * 2 + 1) << 4);
    float x[4 * 32] = {0}, y[4];
    kv8_matmul_job job = {.w = {KV8_WEIGHT_MXFP4, block, &scale, 1, 32},
                          .x = x,
                          .x_stride = 32,
                          .y = y,
                          .y_stride = 1};
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (!kv8_machine_has_isa((kv8_isa)isa)) continue;
        for (int s = 0; s < 256; s++) {
            scale = (uint8_t)s;
            for (int c = 0; c < 32; c++) {
                for (int i = 0; i < 4; i++) x[i * 32 + c] = 1;
                const double wanted = e2m1_value(c % 16) * ldexp(1, s - 127);
                for (job.num_rows = 1; job.num_rows <= 4; job.num_rows += 3) {
                    kv8_matmul_run((kv8_isa)isa, NULL, &job, 1);
                    if (s == 255) assert_true(isnan(y[0]));
                    if (s < 253) assert_true((double)y[job.num_rows - 1] == (double)(float)wanted);
                }
                for (int i = 0; i < 4; i++) x[i * 32 + c] = 0;
            }
        }
    }
}

static void assert_same_rows(const kv8_matmul_job *a, int64_t a_row, const kv8_matmul_job *b,
                             int64_t b_row, int64_t num_rows) {
    for (int64_t i = 0; i < num_rows; i++)
        assert_memory_equal(a->y + (a_row + i) * a->y_stride, b->y + (b_row + i) * b->y_stride,
                            (size_t)a->w.rows * sizeof(float));
}

/* The same row alone, with a few others, among many, beside another job and on other threads: the
 * same bits. The shape is large enough that even one row's work is shared out. */
static void bits_depend_on_the_row_alone(void **state) {
    (void)state;
    enum { ROWS = 410, COLS = 1120, NUM = 100 };
    kv8_threads *threads;
    assert_ok(kv8_threads_create(&threads, 3));
    for (int kind = KV8_WEIGHT_BF16; kind <= KV8_WEIGHT_MXFP4; kind++) {
        product p = product_create((kv8_weight_kind)kind, ROWS, COLS, NUM, false, true, 11);
        product q = product_create((kv8_weight_kind)kind, 37, 64, 5, true, true, 12);
        float *const other_y = calloc((size_t)NUM * ROWS, sizeof(float));
        assert_non_null(other_y);
        for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
            if (!kv8_machine_has_isa((kv8_isa)isa)) continue;
            clear_output(&p);
            kv8_matmul_run((kv8_isa)isa, NULL, &p.job, 1);
            kv8_matmul_job other = p.job;
            other.y = other_y;
            other.y_stride = ROWS;
            const int64_t counts[] = {1, 2, 3, 5, 13}; /* streamed, and the smallest panels */
            for (size_t k = 0; k < COUNT(counts); k++) {
                const int64_t first = 17 * (int64_t)k;
                other.x = p.job.x + first * other.x_stride;
                other.num_rows = counts[k];
                kv8_matmul_run((kv8_isa)isa, threads, &other, 1);
                assert_same_rows(&p.job, first, &other, 0, counts[k]);
            }
            other.x = p.job.x;
            other.num_rows = NUM;
            const kv8_matmul_job jobs[2] = {q.job, other};
            kv8_matmul_run((kv8_isa)isa, threads, jobs, 2);
            assert_same_rows(&p.job, 0, &other, 0, NUM);
            assert_product(&q, (kv8_isa)isa);
        }
        free(other_y);
        product_destroy(&p);
        product_destroy(&q);
    }
    kv8_threads_destroy(threads);
}

/* More jobs than one round of threads takes, some of them empty. */
static void many_jobs_and_empty_ones(void **state) {
    (void)state;
    enum { JOBS = 600 };
    static kv8_matmul_job jobs[JOBS];
    static float w[JOBS][2], y[JOBS];
    const float x[2] = {1, 10};
    for (int i = 0; i < JOBS; i++) {
        w[i][0] = (float)i;
        w[i][1] = 1;
        y[i] = -1;
        jobs[i] = (kv8_matmul_job){.w = {KV8_WEIGHT_F32, w[i], NULL, 1, 2},
                                   .x = x,
                                   .x_stride = 2,
                                   .y = &y[i],
                                   .y_stride = 1,
                                   .num_rows = i % 7 == 3 ? 0 : 1};
    }
    kv8_threads *threads;
    assert_ok(kv8_threads_create(&threads, 3));
    kv8_matmul_run(KV8_ISA_SCALAR, threads, jobs, JOBS);
    for (int i = 0; i < JOBS; i++) assert_true(y[i] == (i % 7 == 3 ? -1.0f : (float)(i + 10)));
    kv8_matmul_run(KV8_ISA_SCALAR, threads, jobs, 0);
    kv8_threads_destroy(threads);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_weights_of_every_tail),
        cmocka_unit_test(mxfp4_of_every_row_count),
        cmocka_unit_test(wide_weights_stay_accurate),
        cmocka_unit_test(more_rows_than_a_tile),
        cmocka_unit_test(weights_of_any_alignment),
        cmocka_unit_test(every_mxfp4_code_and_scale),
        cmocka_unit_test(bits_depend_on_the_row_alone),
        cmocka_unit_test(many_jobs_and_empty_ones),
    };
    return cmocka_run_group_tests_name("ops_matmul", tests, NULL, NULL);
}
