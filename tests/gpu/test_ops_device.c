/* test_ops_device.c - the dense products and the rows of a step on a GPU against their definitions
 * in f64, element by element; every output begins as NaN, what follows it must stay as it was, and
 * rows past the last token hold NaN.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/rope.h>

#include "device_ops.h"
#include "gpu_testing.h"

typedef struct side {
    const gpu *g;
    kv8_device_ops *ops;
} side;
static side open_side(void **state) {
    side s = {.g = gpu_get_with_kernels(state)};
    assert_ok(kv8_device_ops_create(&s.ops, s.g->device));
    return s;
}

enum { AFTER = 256 }; /* bytes behind every output */
static void *make_output(const side *s, size_t bytes) {
    void *const at = gpu_alloc(s->g, bytes + AFTER);
    assert_ok(kv8_stream_fill(s->g->stream, at, 0xff, bytes + AFTER));
    return at;
}
/* The output to the host; frees it. */
static void *take_output(const side *s, void *from, size_t bytes) {
    uint8_t *const got = malloc(bytes + AFTER);
    assert_non_null(got);
    gpu_download(s->g, got, from, bytes + AFTER);
    kv8_device_free(s->g->device, from);
    for (int i = 0; i < AFTER; i++) assert_int_equal(got[bytes + (size_t)i], 0xff);
    return got;
}
/* Uniform, of variance scale^2. */
static float draw(test_rng *rng, float scale) {
    return scale * (float)(3.464 * (rng_unit(rng) - 0.5));
}
static kv8_bf16 *random_bf16(test_rng *rng, size_t n, float scale) {
    kv8_bf16 *const x = malloc(n * sizeof *x + 16);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = kv8_bf16_from_f32(draw(rng, scale));
    return x;
}
static kv8_f16 *random_f16(test_rng *rng, size_t n, float scale) {
    kv8_f16 *const x = malloc(n * sizeof *x + 16);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = kv8_f16_from_f32(draw(rng, scale));
    return x;
}
static float *random_f32(test_rng *rng, size_t n, float scale) {
    float *const x = malloc(n * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = draw(rng, scale);
    return x;
}

/* --- dense products --- */

typedef enum product_kind { TO_F32, TO_BF16, ADDED } product_kind;
typedef struct product {
    int32_t rows, cols, n;
    product_kind kind;
    bool has_bias;
} product;

/* |y - ref| <= what f32 sums of exact products lose, and rounding to bf16. */
static void check_product(const product *p, const kv8_f16 *w, const kv8_bf16 *bias,
                          const kv8_f16 *x, const float *before, const void *y, int32_t step) {
    for (int32_t i = 0; i < p->n; i++) {
        for (int32_t r = i % step; r < p->rows; r += step) {
            const size_t at = (size_t)i * (size_t)p->rows + (size_t)r;
            double sum = bias == NULL ? 0 : (double)kv8_bf16_to_f32(bias[r]), size = fabs(sum);
            for (int32_t c = 0; c < p->cols; c++) {
                const double term = (double)kv8_f16_to_f32(w[(size_t)r * (size_t)p->cols + c]) *
                                    (double)kv8_f16_to_f32(x[(size_t)i * (size_t)p->cols + c]);
                sum += term;
                size += fabs(term);
            }
            if (p->kind == ADDED) {
                sum += (double)before[at];
                size += fabs((double)before[at]);
            }
            const bool is_bf16 = p->kind == TO_BF16;
            const double got = (double)(is_bf16 ? kv8_bf16_to_f32(((const kv8_bf16 *)y)[at])
                                                : ((const float *)y)[at]);
            const double bound = 4e-6 * size + (is_bf16 ? 0x1p-8 * fabs(sum) : 0);
            if (!(fabs(got - sum) <= bound))
                fail_msg("%d x %d, %d tokens, kind %d: y[%d, %d] is %g, not %g +- %g", p->rows,
                         p->cols, p->n, (int)p->kind, i, r, got, sum, bound);
        }
    }
}

/* NULL: bits of this product; else they must be equal. */
static void *run_product(const side *s, const kv8_device_linear *w, const product *p, const void *x,
                         const float *before) {
    const size_t elements = (size_t)p->n * (size_t)p->rows;
    const size_t bytes = elements * (p->kind == TO_BF16 ? 2 : 4);
    void *const y = make_output(s, bytes);
    if (p->kind == ADDED) assert_ok(kv8_stream_copy(s->g->stream, y, before, bytes));
    assert_ok(kv8_device_linear_run(s->ops, s->g->stream, w, x, p->n, y,
                                    p->kind == TO_BF16 ? KV8_BF16 : KV8_F32, p->kind == ADDED));
    return take_output(s, y, bytes);
}

/* `step`: every so many rows of w are compared with f64. */
static void check_case(const side *s, const product *p, int32_t step) {
    test_rng rng = {(uint64_t)(p->rows * 31 + p->cols * 7 + p->n)};
    const size_t weights = (size_t)p->rows * (size_t)p->cols,
                 inputs = (size_t)p->n * (size_t)p->cols;
    kv8_f16 *const w = random_f16(&rng, weights, 1), *const x = random_f16(&rng, inputs, 1);
    kv8_bf16 *const bias = random_bf16(&rng, (size_t)p->rows, 4);
    float *const before = random_f32(&rng, (size_t)p->n * (size_t)p->rows, 4);
    const size_t padding = 130 * (size_t)p->cols * 2; /* rows that a tile could read */
    void *const x_on_gpu = gpu_alloc(s->g, inputs * 2 + padding);
    assert_ok(kv8_stream_fill(s->g->stream, x_on_gpu, 0xff, inputs * 2 + padding));
    assert_ok(kv8_stream_copy(s->g->stream, x_on_gpu, x, inputs * 2));
    void *const w_on_gpu = gpu_alloc(s->g, weights * 2 + padding);
    assert_ok(kv8_stream_fill(s->g->stream, w_on_gpu, 0xff, weights * 2 + padding));
    assert_ok(kv8_stream_copy(s->g->stream, w_on_gpu, w, weights * 2));
    void *const bias_on_gpu = gpu_upload(s->g, bias, (size_t)p->rows * 2);
    const kv8_device_linear linear = {w_on_gpu, p->has_bias ? bias_on_gpu : NULL, p->rows, p->cols};
    void *const y = run_product(s, &linear, p, x_on_gpu, before);
    void *const again = run_product(s, &linear, p, x_on_gpu, before);
    const size_t bytes = (size_t)p->n * (size_t)p->rows * (p->kind == TO_BF16 ? 2 : 4);
    assert_memory_equal(y, again, bytes);
    check_product(p, w, p->has_bias ? bias : NULL, x, before, y, step);
    void *const on_gpu[] = {x_on_gpu, w_on_gpu, bias_on_gpu};
    for (int i = 0; i < 3; i++) kv8_device_free(s->g->device, on_gpu[i]);
    void *const on_host[] = {w, x, bias, before, y, again};
    for (int i = 0; i < 6; i++) free(on_host[i]);
}

/* Under a fixed order a row's bits are those of the row alone, whatever their number. */
static void a_fixed_order_knows_no_number_of_rows(void **state) {
    side s = open_side(state);
    kv8_device_ops_fix_order(s.ops);
    /* kind TO_F32, ADDED, TO_BF16; n: the most rows */
    static const product most[] = {
        {32, 72, 600, TO_F32, false},       {128, 2880, 600, TO_F32, true},
        {2880, 4096, 2100, ADDED, true},    {5120, 1000, 2100, TO_F32, true},
        {5120, 2880, 1300, TO_BF16, false}, {67000, 520, 129, TO_F32, false}};
    static const int32_t counts[] = {1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 257, 513, 1025};
    for (size_t i = 0; i < sizeof most / sizeof *most; i++) {
        const size_t rows = (size_t)most[i].rows, cols = (size_t)most[i].cols;
        const size_t n = (size_t)most[i].n, y_bytes = rows * (most[i].kind == TO_BF16 ? 2 : 4);
        test_rng rng = {(uint64_t)rows};
        kv8_f16 *const w = random_f16(&rng, rows * cols, 1), *const x =
                                                                 random_f16(&rng, n * cols, 1);
        kv8_bf16 *const bias = random_bf16(&rng, rows, 4);
        float *const before = random_f32(&rng, n * rows, 4);
        void *const w_on_gpu = gpu_upload(s.g, w, rows * cols * 2);
        void *const x_on_gpu = gpu_upload(s.g, x, n * cols * 2);
        void *const bias_on_gpu = gpu_upload(s.g, bias, rows * 2);
        const kv8_device_linear linear = {w_on_gpu, most[i].has_bias ? bias_on_gpu : NULL,
                                          most[i].rows, most[i].cols};
        uint8_t *const want = run_product(&s, &linear, &most[i], x_on_gpu, before);
        for (size_t k = 0; k < sizeof counts / sizeof *counts && counts[k] < most[i].n; k++) {
            product p = most[i];
            p.n = counts[k];
            const size_t first = (n - (size_t)p.n) / 2;
            void *const got = run_product(&s, &linear, &p, (kv8_f16 *)x_on_gpu + first * cols,
                                          before + first * rows);
            if (memcmp(got, want + first * y_bytes, (size_t)p.n * y_bytes) != 0)
                fail_msg("%d x %d: rows %zu to %zu of %zu have other bits alone", p.rows, p.cols,
                         first, first + (size_t)p.n - 1, n);
            free(got);
        }
        void *const on_host[] = {w, x, bias, before, want};
        for (int k = 0; k < 5; k++) free(on_host[k]);
        void *const on_gpu[] = {w_on_gpu, x_on_gpu, bias_on_gpu};
        for (int k = 0; k < 3; k++) kv8_device_free(s.g->device, on_gpu[k]);
    }
    kv8_device_ops_destroy(s.ops);
}

static void products_equal_their_definition(void **state) {
    const side s = open_side(state);
    static const int32_t counts[] = {1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 129, 257, 512};
    static const int32_t sizes[][2] = {{1, 8},    {17, 40},   {32, 72},   {65, 288},
                                       {130, 64}, {257, 520}, {384, 1096}};
    int num_cases = 0;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            const product p = {sizes[j][0], sizes[j][1], counts[i], (product_kind)(num_cases % 3),
                               num_cases % 4 != 0};
            check_case(&s, &p, p.n > 64 ? 7 : 1);
            num_cases++;
        }
    }
    printf("%d cases\n", num_cases);
    kv8_device_ops_destroy(s.ops);
}

/* gpt-oss' shapes, where tiles of every size come in numbers. */
static void products_of_the_true_shapes(void **state) {
    const side s = open_side(state);
    static const product products[] = {
        {5120, 2880, 1, TO_BF16, true},    {2880, 4096, 1, ADDED, true},
        {128, 2880, 4, TO_F32, true},      {2880, 4096, 12, ADDED, true},
        {5120, 2880, 32, TO_BF16, true},   {2880, 4096, 61, ADDED, true},
        {5120, 2880, 100, TO_BF16, true},  {2880, 4096, 500, ADDED, true},
        {5120, 2880, 1000, TO_BF16, true}, {20108, 2880, 3, TO_F32, false},
        {5120, 2880, 2048, TO_BF16, true}, {2880, 4096, 2048, ADDED, true},
        {5120, 2880, 1300, TO_F32, true},  {2880, 4096, 2500, ADDED, true},
        {1000, 200, 4500, ADDED, false},   {1000, 200, 700, ADDED, true},
        {5120, 2880, 500, TO_BF16, true},  {5120, 2880, 600, TO_F32, false},
        {33000, 200, 128, TO_F32, false},  {33760, 2880, 127, ADDED, true},
        {67000, 72, 65, ADDED, true},      {67000, 520, 100, TO_BF16, true},
    };
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        check_case(&s, &products[i], products[i].n > 64 ? 509 : products[i].n > 8 ? 61 : 17);
    kv8_device_ops_destroy(s.ops);
}

enum { NORM_ROWS = 12 };

/* The error of a sum of terms that are rounded to f16, each its own way: random signs stay far
 * below this many times the root of their squares. */
static const double of_terms = 6 * 0x1p-12;

/* Row r of norm(x) w^T: its value, and the root of its terms' squares. */
static double normed_product(const float *x, double scale, const kv8_bf16 *gain, const kv8_f16 *w,
                             int32_t cols, double *size_out) {
    double sum = 0, squared = 0;
    for (int32_t c = 0; c < cols; c++) {
        const double term =
            (double)x[c] * scale * (double)kv8_bf16_to_f32(gain[c]) * (double)kv8_f16_to_f32(w[c]);
        sum += term;
        squared += term * term;
    }
    *size_out = sqrt(squared);
    return sum;
}

/* One token's results; cos_sin: of the rotated heads, NULL = none. `step`: rows of w that are left
 * out between two that are looked at. */
static void check_normed(const kv8_device_norm_linear *p, const float *x, const kv8_bf16 *gain,
                         const kv8_f16 *w, const float *cos_sin, const uint16_t *rotated,
                         const kv8_bf16 *y, int32_t step) {
    double squares = 0;
    const int32_t cols = p->w.cols, half = p->head_dim / 2;
    for (int32_t c = 0; c < cols; c++) squares += (double)x[c] * (double)x[c];
    const double scale = 1 / sqrt(squares / cols + 1e-5);
    for (int32_t r = 0; r < p->w.rows; r += step) {
        double size, other_size = 0;
        double wanted = normed_product(x, scale, gain, w + (size_t)r * (size_t)cols, cols, &size);
        if (r < p->num_rotated * p->head_dim) {
            const int32_t pair = r % half, is_second = r / half % 2;
            const int32_t other_row = is_second ? r - half : r + half;
            const double other = normed_product(
                x, scale, gain, w + (size_t)other_row * (size_t)cols, cols, &other_size);
            const double sine = (double)cos_sin[half + pair] * (is_second ? 1 : -1);
            wanted = wanted * (double)cos_sin[pair] + other * sine;
        }
        const bool is_rotated = r < p->num_rotated * p->head_dim;
        const bool is_f16 = is_rotated && p->rotated_dtype == KV8_F16;
        const double got = (double)(is_f16       ? kv8_f16_to_f32((kv8_f16){rotated[r]})
                                    : is_rotated ? kv8_bf16_to_f32((kv8_bf16){rotated[r]})
                                                 : kv8_bf16_to_f32(y[r]));
        const double rounding = is_f16 ? 0x1p-10 : 0x1p-7;
        if (!(fabs(got - wanted) <= of_terms * (size + other_size) + rounding * fabs(wanted)))
            fail_msg("%d x %d: y[%d] is %g, not %g", p->w.rows, cols, r, got, wanted);
    }
}

static void products_of_normed_rows(void **state) {
    const side s = open_side(state);
    static const struct {
        int32_t rows, cols, num_rotated, head_dim;
    } sizes[] = {{1, 8, 0, 0},         {33, 72, 2, 16},   {130, 2880, 0, 0},
                 {5120, 2880, 64, 64}, {96, 4096, 1, 64}, {24, 4104, 1, 16}};
    test_rng rng = {5};
    float *const cos_sin = random_f32(&rng, NORM_ROWS * 64, 1);
    float *const cos_sin_on_gpu = gpu_upload(s.g, cos_sin, NORM_ROWS * 64 * sizeof *cos_sin);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int32_t rows = sizes[i].rows, cols = sizes[i].cols;
        const size_t inputs = (size_t)(NORM_ROWS * cols), weights = (size_t)rows * (size_t)cols;
        float *const x = random_f32(&rng, inputs, 20);
        kv8_bf16 *const gain = random_bf16(&rng, (size_t)cols, 2);
        kv8_f16 *const w = random_f16(&rng, weights, 1);
        float *const x_on_gpu = gpu_upload(s.g, x, inputs * 4);
        void *const gain_on_gpu = gpu_upload(s.g, gain, (size_t)cols * 2);
        void *const w_on_gpu = gpu_upload(s.g, w, weights * 2);
        for (int32_t n = 1; n <= NORM_ROWS; n++) {
            const size_t y_bytes = (size_t)(n * rows) * 2, x_bytes = (size_t)(n * cols) * 2;
            const int32_t q_width = sizes[i].num_rotated * sizes[i].head_dim;
            const size_t q_bytes = (size_t)(n * q_width) * 2;
            kv8_device_norm_linear p = {.w = {w_on_gpu, NULL, rows, cols},
                                        .x = x_on_gpu,
                                        .gain = gain_on_gpu,
                                        .eps = 1e-5f,
                                        .normed = make_output(&s, x_bytes),
                                        .num_rotated = sizes[i].num_rotated,
                                        .head_dim = sizes[i].head_dim,
                                        .cos_sin = cos_sin_on_gpu,
                                        .rotated = q_bytes == 0 ? NULL : make_output(&s, q_bytes),
                                        .rotated_dtype = n % 4 < 2 ? KV8_F16 : KV8_BF16,
                                        .y = make_output(&s, y_bytes),
                                        .y_dtype = KV8_BF16};
            assert_ok(kv8_device_norm_linear_run(s.ops, s.g->stream, &p, n));
            kv8_bf16 *const y = take_output(&s, p.y, y_bytes);
            uint16_t *const q = q_bytes == 0 ? NULL : take_output(&s, p.rotated, q_bytes);
            free(take_output(&s, p.normed, x_bytes));
            for (int32_t row = 0; row < n; row++) {
                check_normed(&p, x + row * cols, gain, w, cos_sin + row * p.head_dim,
                             q_bytes == 0 ? NULL : q + row * q_width, y + row * rows,
                             rows > 1000 ? 97 : 1);
            }
            free(y);
            free(q);
        }
        void *const on_gpu[] = {x_on_gpu, gain_on_gpu, w_on_gpu};
        for (int j = 0; j < 3; j++) kv8_device_free(s.g->device, on_gpu[j]);
        free(x);
        free(gain);
        free(w);
    }
    free(cos_sin);
    kv8_device_free(s.g->device, cos_sin_on_gpu);
    kv8_device_ops_destroy(s.ops);
}

/* Heads that the product's kernel rotates, of a few rows or many, have the bits of the product,
 * rotated apart. */
static void rows_are_rotated_as_they_leave(void **state) {
    enum { ROWS = 5120, COLS = 2880, Q_WIDTH = 4096, MOST = 2048 };
    const side s = open_side(state);
    static const int32_t counts[] = {5, 16, 17, 64, 100, 129, 500, 1000, 1300, MOST};
    test_rng rng = {9};
    kv8_f16 *const w = random_f16(&rng, (size_t)ROWS * COLS, 1);
    kv8_bf16 *const small = random_bf16(&rng, ROWS, 1);
    float *const x = random_f32(&rng, (size_t)MOST * COLS, 4);
    float *const cos_sin = random_f32(&rng, MOST * 64, 1);
    void *const w_on_gpu = gpu_upload(s.g, w, (size_t)ROWS * COLS * 2);
    void *const small_on_gpu = gpu_upload(s.g, small, ROWS * 2);
    float *const x_on_gpu = gpu_upload(s.g, x, (size_t)MOST * COLS * 4);
    float *const cos_sin_on_gpu = gpu_upload(s.g, cos_sin, MOST * 64 * 4);
    void *const normed = gpu_alloc(s.g, (size_t)MOST * COLS * 2);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const int32_t n = counts[i];
        const size_t y_bytes = (size_t)n * ROWS * 4, q_bytes = (size_t)n * Q_WIDTH * 2;
        void *const plain = make_output(&s, y_bytes), *const apart = make_output(&s, q_bytes);
        kv8_device_norm_linear p = {.w = {w_on_gpu, small_on_gpu, ROWS, COLS},
                                    .x = x_on_gpu,
                                    .gain = small_on_gpu,
                                    .eps = 1e-5f,
                                    .normed = normed,
                                    .rotated_dtype = i % 2 == 0 ? KV8_F16 : KV8_BF16,
                                    .y = plain,
                                    .y_dtype = KV8_F32};
        assert_ok(kv8_device_norm_linear_run(s.ops, s.g->stream, &p, n));
        assert_ok(kv8_device_rope(s.ops, s.g->stream, cos_sin_on_gpu, n, 64, 64, plain, KV8_F32,
                                  ROWS, apart, p.rotated_dtype, Q_WIDTH));
        p.num_rotated = 64;
        p.head_dim = 64;
        p.cos_sin = cos_sin_on_gpu;
        p.rotated = make_output(&s, q_bytes);
        p.y = make_output(&s, y_bytes);
        assert_ok(kv8_device_norm_linear_run(s.ops, s.g->stream, &p, n));
        float *const want = take_output(&s, plain, y_bytes);
        float *const y = take_output(&s, p.y, y_bytes);
        uint16_t *const want_q = take_output(&s, apart, q_bytes);
        uint16_t *const q = take_output(&s, p.rotated, q_bytes);
        assert_memory_equal(q, want_q, q_bytes);
        for (size_t row = 0; row < (size_t)n; row++)
            assert_memory_equal(y + row * ROWS + Q_WIDTH, want + row * ROWS + Q_WIDTH,
                                (ROWS - Q_WIDTH) * sizeof *y);
        void *const on_host[] = {want, y, want_q, q};
        for (int j = 0; j < 4; j++) free(on_host[j]);
    }
    void *const on_gpu[] = {w_on_gpu, small_on_gpu, x_on_gpu, cos_sin_on_gpu, normed};
    for (int j = 0; j < 5; j++) kv8_device_free(s.g->device, on_gpu[j]);
    void *const on_host[] = {w, small, x, cos_sin};
    for (int j = 0; j < 4; j++) free(on_host[j]);
    kv8_device_ops_destroy(s.ops);
}

/* --- rows --- */

static void rows_are_those_asked_for_and_embeddings_widened(void **state) {
    const side s = open_side(state);
    enum { VOCAB = 50, N = 5 };
    static const int32_t ids[N] = {49, 0, 7, 7, 31}, hiddens[] = {8, 64, 2880};
    test_rng rng = {1};
    for (size_t h = 0; h < sizeof hiddens / sizeof *hiddens; h++) {
        const size_t hidden = (size_t)hiddens[h];
        kv8_bf16 *const table = random_bf16(&rng, VOCAB * hidden, 1);
        void *const table_on_gpu = gpu_upload(s.g, table, VOCAB * hidden * 2);
        int32_t *const ids_on_gpu = gpu_upload(s.g, ids, sizeof ids);
        float *const to = make_output(&s, N * hidden * 4);
        assert_ok(
            kv8_device_embed(s.ops, s.g->stream, table_on_gpu, ids_on_gpu, N, hiddens[h], to));
        float *const got = take_output(&s, to, N * hidden * 4);
        for (size_t i = 0; i < N * hidden; i++) {
            const kv8_bf16 wanted = table[(size_t)ids[i / hidden] * hidden + i % hidden];
            assert_true(got[i] == kv8_bf16_to_f32(wanted));
        }
        void *rows = make_output(&s, N * hidden * 2);
        assert_ok(kv8_device_gather(s.ops, s.g->stream, table_on_gpu, ids_on_gpu, N, 2 * hiddens[h],
                                    rows));
        rows = take_output(&s, rows, N * hidden * 2);
        for (size_t i = 0; i < N; i++)
            assert_memory_equal((kv8_bf16 *)rows + i * hidden, table + (size_t)ids[i] * hidden,
                                hidden * 2);
        free(rows);
        kv8_device_free(s.g->device, table_on_gpu);
        kv8_device_free(s.g->device, ids_on_gpu);
        free(table);
        free(got);
    }
    kv8_device_ops_destroy(s.ops);
}

static void check_norm(const float *x, const kv8_bf16 *gain, int32_t hidden, double eps,
                       const kv8_f16 *got) {
    double squares = 0;
    for (int32_t i = 0; i < hidden; i++) squares += (double)x[i] * (double)x[i];
    const double scale = 1 / sqrt(squares / hidden + eps);
    for (int32_t i = 0; i < hidden; i++) {
        const double wanted = (double)x[i] * scale * (double)kv8_bf16_to_f32(gain[i]);
        assert_true(fabs((double)kv8_f16_to_f32(got[i]) - wanted) <=
                    0x1.01p-11 * fabs(wanted) + 0x1p-25);
    }
}

static void norms_equal_their_definition(void **state) {
    const side s = open_side(state);
    enum { ROWS = 7, N = 5 };
    static const int32_t ids[N] = {6, 0, 3, 3, 1}, hiddens[] = {8, 72, 2880, 4104};
    test_rng rng = {2};
    for (size_t h = 0; h < sizeof hiddens / sizeof *hiddens; h++) {
        const size_t hidden = (size_t)hiddens[h];
        float *const x = random_f32(&rng, ROWS * hidden, 30);
        for (size_t i = 0; i < hidden; i++) x[3 * hidden + i] *= 1e-4f; /* eps counts */
        kv8_bf16 *const gain = random_bf16(&rng, hidden, 2);
        float *const x_on_gpu = gpu_upload(s.g, x, ROWS * hidden * 4);
        void *const gain_on_gpu = gpu_upload(s.g, gain, hidden * 2);
        int32_t *const ids_on_gpu = gpu_upload(s.g, ids, sizeof ids);
        for (int picked = 0; picked < 2; picked++) {
            void *const to = make_output(&s, N * hidden * 2);
            const int32_t *const row_ids = picked ? ids_on_gpu : NULL;
            assert_ok(kv8_device_rmsnorm(s.ops, s.g->stream, x_on_gpu, gain_on_gpu, 1e-5f, N,
                                         hiddens[h], row_ids, to));
            kv8_f16 *const got = take_output(&s, to, N * hidden * 2);
            for (size_t i = 0; i < N; i++)
                check_norm(x + (picked ? (size_t)ids[i] : i) * hidden, gain, hiddens[h], 1e-5,
                           got + i * hidden);
            free(got);
        }
        kv8_device_free(s.g->device, x_on_gpu);
        kv8_device_free(s.g->device, gain_on_gpu);
        kv8_device_free(s.g->device, ids_on_gpu);
        free(x);
        free(gain);
    }
    kv8_device_ops_destroy(s.ops);
}

enum { ROPE_N = 6, ROPE_HEADS = 5, MAX_ROPE_DIM = 64 };

/* Queries of x_dtype among other elements, rotated into a place of their own. */
static void check_rotation(const side *s, const kv8_rope *rope, int32_t dim, const float *cos_sin,
                           const float *cos_sin_on_gpu, kv8_dtype x_dtype, kv8_dtype y_dtype) {
    enum { STRIDE = ROPE_HEADS * MAX_ROPE_DIM + 24, Y_STRIDE = ROPE_HEADS * MAX_ROPE_DIM + 8 };
    test_rng rng = {3};
    static float wanted[ROPE_N * STRIDE];
    static kv8_bf16 codes[ROPE_N * STRIDE];
    for (int i = 0; i < ROPE_N * STRIDE; i++) {
        codes[i] = kv8_bf16_from_f32(rng_normal(&rng));
        wanted[i] = kv8_bf16_to_f32(codes[i]);
    }
    const bool is_f32 = x_dtype == KV8_F32;
    void *const x = gpu_upload(s->g, is_f32 ? (void *)wanted : (void *)codes,
                               is_f32 ? sizeof wanted : sizeof codes);
    void *const y = make_output(s, ROPE_N * Y_STRIDE * 2);
    assert_ok(kv8_device_rope(s->ops, s->g->stream, cos_sin_on_gpu, ROPE_N, ROPE_HEADS, dim, x,
                              x_dtype, STRIDE, y, y_dtype, Y_STRIDE));
    kv8_rope_apply(rope, cos_sin, ROPE_N, wanted, ROPE_HEADS, STRIDE, dim);
    uint16_t *const got = take_output(s, y, ROPE_N * Y_STRIDE * 2);
    for (int row = 0; row < ROPE_N; row++) {
        for (int i = 0; i < Y_STRIDE; i++) {
            const float rotated = i < ROPE_HEADS * dim ? wanted[row * STRIDE + i] : 0;
            const uint16_t bits = y_dtype == KV8_F16 ? kv8_f16_from_f32(rotated).bits
                                                     : kv8_bf16_from_f32(rotated).bits;
            assert_int_equal(got[row * Y_STRIDE + i], i < ROPE_HEADS * dim ? bits : 0xffff);
        }
    }
    free(got);
    kv8_device_free(s->g->device, x);
}

static void angles_and_rotation_are_the_cpus(void **state) {
    const side s = open_side(state);
    static const int32_t positions[ROPE_N] = {0, 1, 127, 4095, 65537, 131071}, dims[] = {16, 64};
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
        options.kind = KV8_ROPE_YARN;
        options.head_dim = dims[d];
        options.theta = 150000;
        options.factor = 32;
        options.original_max_position = 4096;
        options.beta_fast = 32;
        options.beta_slow = 1;
        kv8_rope *rope = NULL;
        assert_ok(kv8_rope_create(&rope, &options));
        float factor, cos_sin[ROPE_N * MAX_ROPE_DIM];
        const float *const inv_freq = kv8_rope_inv_freq(rope, &factor);
        kv8_rope_angles(rope, positions, ROPE_N, cos_sin);
        const size_t angles = (size_t)(ROPE_N * dims[d]);
        int32_t *const positions_on_gpu = gpu_upload(s.g, positions, sizeof positions);
        float *const inv_freq_on_gpu = gpu_upload(s.g, inv_freq, (size_t)dims[d] / 2 * 4);
        float *const to = make_output(&s, angles * 4);
        assert_ok(kv8_device_rope_angles(s.ops, s.g->stream, positions_on_gpu, ROPE_N,
                                         inv_freq_on_gpu, factor, dims[d], to));
        float *const got = take_output(&s, to, angles * 4);
        for (size_t i = 0; i < angles; i++)
            assert_true(fabs((double)got[i] - (double)cos_sin[i]) <=
                        0x1p-23 * fabs((double)factor));
        float *const cos_sin_on_gpu = gpu_upload(s.g, cos_sin, angles * 4);
        for (int is_f16 = 0; is_f16 < 2; is_f16++) {
            const kv8_dtype to_dtype = is_f16 ? KV8_F16 : KV8_BF16;
            check_rotation(&s, rope, dims[d], cos_sin, cos_sin_on_gpu, KV8_BF16, to_dtype);
            check_rotation(&s, rope, dims[d], cos_sin, cos_sin_on_gpu, KV8_F32, to_dtype);
        }
        kv8_device_free(s.g->device, positions_on_gpu);
        kv8_device_free(s.g->device, inv_freq_on_gpu);
        kv8_device_free(s.g->device, cos_sin_on_gpu);
        free(got);
        kv8_rope_destroy(rope);
    }
    kv8_device_ops_destroy(s.ops);
}

/* --- weights --- */

/* codes in place to f16, and the first that it does not hold. */
static kv8_bad_weight narrow(const side *s, const kv8_bf16 *codes, int32_t n, int32_t tensor,
                             uint64_t *first_bad) {
    uint64_t word = 0;
    void *const at = make_output(s, (size_t)n * 2);
    assert_ok(kv8_stream_copy(s->g->stream, at, codes, (size_t)n * 2));
    assert_ok(kv8_device_to_f16(s->ops, s->g->stream, at, n, tensor, first_bad));
    kv8_f16 *const got = take_output(s, at, (size_t)n * 2);
    for (int32_t i = 0; i < n; i++) {
        const float value = kv8_bf16_to_f32(codes[i]);
        if (fabsf(value) <= 65504)
            assert_int_equal(got[i].bits, kv8_f16_from_f32(value).bits);
        else
            assert_false(fabsf(kv8_f16_to_f32(got[i])) < 65504);
    }
    free(got);
    gpu_download(s->g, &word, first_bad, sizeof word);
    return kv8_device_bad_weight(word);
}

static void weights_that_f16_does_not_hold_are_found(void **state) {
    enum { NUM = 1 << 16 };
    const side s = open_side(state);
    static kv8_bf16 codes[NUM];
    uint64_t *const first_bad = gpu_alloc(s.g, sizeof *first_bad);
    assert_ok(kv8_stream_fill(s.g->stream, first_bad, 0xff, sizeof *first_bad));
    for (int i = 0; i < NUM; i++) { /* every code but those */
        codes[i].bits = (uint16_t)i;
        if (!(fabsf(kv8_bf16_to_f32(codes[i])) <= 65504)) codes[i].bits = 0x3f80;
    }
    assert_int_equal(narrow(&s, codes, NUM, 0, first_bad).tensor, -1);
    assert_int_equal(narrow(&s, codes, 8, 1, first_bad).tensor, -1);
    codes[60000].bits = 0x4780; /* 65536 */
    codes[50001].bits = 0x7fc0; /* NaN */
    kv8_bad_weight bad = narrow(&s, codes, NUM, 7, first_bad);
    assert_true(bad.tensor == 7 && bad.element == 50001);
    bad = narrow(&s, codes + 50008, 10000, 3, first_bad);
    assert_true(bad.tensor == 3 && bad.element == 60000 - 50008);
    assert_refused(kv8_device_to_f16(s.ops, s.g->stream, first_bad, 12, 0, first_bad),
                   KV8_ERR_UNSUPPORTED, "multiple of 8");
    kv8_device_free(s.g->device, first_bad);
    kv8_device_ops_destroy(s.ops);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_equal_their_definition),
        cmocka_unit_test(a_fixed_order_knows_no_number_of_rows),
        cmocka_unit_test(products_of_the_true_shapes),
        cmocka_unit_test(products_of_normed_rows),
        cmocka_unit_test(rows_are_rotated_as_they_leave),
        cmocka_unit_test(rows_are_those_asked_for_and_embeddings_widened),
        cmocka_unit_test(norms_equal_their_definition),
        cmocka_unit_test(angles_and_rotation_are_the_cpus),
        cmocka_unit_test(weights_that_f16_does_not_hold_are_found),
    };
    return cmocka_run_group_tests(tests, gpu_open, gpu_close);
}
