/* test_experts_router.c - rows from the residual stream to their experts, few in one kernel, more
 * in two: normed rows against f64, and against the product of what was normed the experts, their
 * weights, and the places in their order.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/formats.h>

#include "device_experts.h"
#include "experts_args.h"
#include "gpu_testing.h"

static const double eps = 1e-5;

typedef struct router_case {
    int32_t num_experts, top_k, hidden, n, live; /* live 0: no padding */
    bool has_fixed_order;
} router_case;

typedef struct router_inputs {
    float *residual;
    kv8_f16 *w;
    kv8_bf16 *bias, *gain;
} router_inputs;

static router_inputs make_inputs(const router_case *c) {
    test_rng rng = {17};
    const size_t rows = (size_t)c->n, hidden = (size_t)c->hidden, experts = (size_t)c->num_experts;
    router_inputs in = {.residual = malloc(rows * hidden * sizeof *in.residual),
                        .w = malloc(experts * hidden * sizeof *in.w),
                        .bias = malloc(experts * sizeof *in.bias),
                        .gain = malloc(hidden * sizeof *in.gain)};
    for (size_t i = 0; i < rows * hidden; i++)
        in.residual[i] = rng_normal(&rng) * (float)(1 + 1000 * (i / hidden % 2));
    for (size_t i = 0; i < experts * hidden; i++)
        in.w[i] = kv8_f16_from_f32(rng_normal(&rng) / sqrtf((float)hidden));
    for (size_t i = 0; i < experts; i++) in.bias[i] = kv8_bf16_from_f32(rng_normal(&rng));
    for (size_t i = 0; i < hidden; i++) in.gain[i] = kv8_bf16_from_f32(1 + rng_normal(&rng) / 4);
    return in;
}
static void free_inputs(router_inputs *in) {
    free(in->residual);
    free(in->w);
    free(in->bias);
    free(in->gain);
}

static void check_normed(const router_case *c, const router_inputs *in, const kv8_f16 *normed) {
    for (int64_t row = 0; row < c->n; row++) {
        const float *const x = in->residual + row * c->hidden;
        double squares = 0;
        for (int32_t h = 0; h < c->hidden; h++) squares += (double)x[h] * (double)x[h];
        const double root = sqrt(squares / c->hidden + eps);
        for (int32_t h = 0; h < c->hidden; h++) {
            const double wanted = (double)x[h] / root * (double)kv8_bf16_to_f32(in->gain[h]);
            const double got = (double)kv8_f16_to_f32(normed[row * c->hidden + h]);
            if (!(fabs(got - wanted) <= fabs(wanted) * 0x1.01p-11 + 0x1p-24))
                fail_msg("row %d, value %d is %g, wanted %g", (int)row, h, got, wanted);
        }
    }
}

/* The logits of a row as it was normed, by the definition. */
static void multiply_row(const router_case *c, const router_inputs *in, const kv8_f16 *normed,
                         double *logits) {
    for (int64_t e = 0; e < c->num_experts; e++) {
        logits[e] = (double)kv8_bf16_to_f32(in->bias[e]);
        for (int32_t h = 0; h < c->hidden; h++)
            logits[e] += (double)kv8_f16_to_f32(in->w[e * c->hidden + h]) *
                         (double)kv8_f16_to_f32(normed[h]);
    }
}

/* The ids are the best in order, as far as f32 sums tell, and the weights their softmax. */
static void check_row(const router_case *c, double *logits, const uint8_t *ids,
                      const float *weights) {
    const double none = (double)-INFINITY, near = 2e-5, most = logits[ids[0]];
    double sum = 0, weight[KV8_EXPERTS_MAX_TOP_K];
    for (int32_t k = 0; k < c->top_k; k++) sum += weight[k] = exp(logits[ids[k]] - most);
    for (int32_t k = 0; k < c->top_k; k++) {
        double best = none;
        for (int32_t e = 0; e < c->num_experts; e++) best = fmax(best, logits[e]);
        assert_true(logits[ids[k]] >= best - near);
        logits[ids[k]] = none;
        assert_true(fabs((double)weights[k] - weight[k] / sum) <= near);
    }
}

static void check_places(const router_case *c, const uint8_t *ids, const int32_t *offsets,
                         const int32_t *sorted) {
    const int32_t live = c->live == 0 ? c->n : c->live;
    int32_t at = 0;
    for (int32_t e = 0; e < c->num_experts; e++) {
        assert_int_equal(offsets[e], at);
        for (int32_t i = 0; i < live * c->top_k; i++)
            if (ids[i] == e) assert_int_equal(sorted[at++], i);
    }
    assert_int_equal(offsets[c->num_experts], at);
    assert_int_equal(at, live * c->top_k);
}

static void check_routing(const gpu *g, const router_case *c, const router_inputs *in,
                          const kv8_device_experts *experts, const kv8_f16 *normed) {
    const kv8_experts_routing *const r = kv8_device_experts_get_routing(experts);
    const size_t places = (size_t)(c->n * c->top_k);
    uint8_t *const ids = malloc(places);
    float *const weights = malloc(places * sizeof *weights);
    int32_t *const sorted = malloc(places * sizeof *sorted), offsets[KV8_EXPERTS_MAX + 1];
    gpu_download(g, ids, r->ids, places);
    gpu_download(g, weights, r->weights, places * sizeof *weights);
    gpu_download(g, sorted, r->sorted, places * sizeof *sorted);
    gpu_download(g, offsets, r->offsets, ((size_t)c->num_experts + 1) * sizeof *offsets);
    double *const logits = malloc((size_t)c->num_experts * sizeof *logits);
    for (int32_t row = 0; row < (c->live == 0 ? c->n : c->live); row++) {
        multiply_row(c, in, normed + (int64_t)row * c->hidden, logits);
        check_row(c, logits, ids + row * c->top_k, weights + row * c->top_k);
    }
    check_places(c, ids, offsets, sorted);
    free(logits);
    free(ids);
    free(weights);
    free(sorted);
}

/* Experts whose bytes are all zero add nothing: the residual stream comes out as it went in. */
static void check_case(const gpu *g, const router_case *c) {
    const kv8_experts_shape shape = {c->num_experts, c->top_k, c->hidden, 32, 1.702f, 7.0f};
    kv8_device_experts *experts = NULL;
    assert_ok(kv8_device_experts_create(&experts, g->device, &shape, c->n));
    if (c->has_fixed_order) kv8_device_experts_fix_order(experts);
    router_inputs in = make_inputs(c);
    const size_t values = (size_t)c->n * (size_t)c->hidden, count = (size_t)c->num_experts;
    void *on_gpu[8];
    for (int part = 0; part < 2; part++) {
        const size_t bytes = kv8_experts_part_bytes(&shape, (kv8_experts_part)part) * count;
        void *const zeros = calloc(1, bytes);
        on_gpu[part] = gpu_upload(g, zeros, bytes);
        free(zeros);
    }
    on_gpu[2] = gpu_upload(g, in.w, count * (size_t)c->hidden * sizeof *in.w);
    on_gpu[3] = gpu_upload(g, in.bias, count * sizeof *in.bias);
    on_gpu[4] = gpu_upload(g, in.gain, (size_t)c->hidden * sizeof *in.gain);
    on_gpu[5] = gpu_upload(g, in.residual, values * sizeof *in.residual);
    on_gpu[6] = gpu_alloc(g, values * sizeof(kv8_f16));
    on_gpu[7] = gpu_upload(g, &c->live, sizeof c->live);
    const kv8_experts_router router = {on_gpu[2], on_gpu[3], on_gpu[4], (float)eps, on_gpu[6]};
    const kv8_experts_args args = {.gate_up = on_gpu[0],
                                   .down = on_gpu[1],
                                   .router = &router,
                                   .residual = on_gpu[5],
                                   .live_rows = c->live == 0 ? NULL : on_gpu[7],
                                   .n = c->n};
    assert_ok(kv8_device_experts_run(experts, g->stream, &args));
    kv8_f16 *const normed = malloc(values * sizeof *normed);
    float *const after = malloc(values * sizeof *after);
    gpu_download(g, normed, on_gpu[6], values * sizeof *normed);
    gpu_download(g, after, on_gpu[5], values * sizeof *after);
    assert_memory_equal(after, in.residual, values * sizeof *after);
    check_normed(c, &in, normed);
    check_routing(g, c, &in, experts, normed);
    for (int i = 0; i < 8; i++) kv8_device_free(g->device, on_gpu[i]);
    free(normed);
    free(after);
    free_inputs(&in);
    kv8_device_experts_destroy(experts);
}

static void rows_are_normed_and_routed(void **state) {
    static const router_case cases[] = {
        {32, 4, 2880, 1, 0, false},     {32, 4, 2880, 2, 0, false},
        {128, 4, 2880, 4, 0, false},    {128, 4, 2880, 8, 0, false},
        {128, 4, 2880, 8, 5, false},    {33, 4, 4096, 3, 0, false},
        {1, 1, 32, 8, 0, false},        {5, 2, 64, 7, 0, false},
        {100, 8, 1056, 8, 1, false},    {128, 8, 4096, 8, 0, false},
        {17, 3, 96, 5, 0, false},       {20, 4, 2880, 6, 2, false},
        {32, 4, 2880, 9, 0, false},     {32, 4, 2880, 64, 61, false},
        {128, 4, 2880, 65, 0, false},   {128, 4, 2880, 512, 1, false},
        {33, 4, 4096, 31, 0, false},    {1, 1, 32, 17, 0, false},
        {129, 8, 96, 40, 33, false},    {255, 4, 1056, 100, 0, false},
        {32, 4, 2880, 2050, 0, false},  {32, 4, 2880, 1, 0, true},
        {128, 4, 2880, 8, 3, true},     {200, 2, 64, 5, 0, true},
        {129, 4, 6144, 3, 0, false},    {32, 4, 2880, 512, 0, false},
        {20, 3, 96, 497, 0, false},     {128, 4, 2880, 257, 0, false},
        {100, 8, 1056, 300, 290, false}};
    const gpu *const g = gpu_get_with_kernels(state);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_case(g, &cases[i]);
}

/* With a fixed order a row has the bits that it has in any other number of rows. */
static void bits_are_those_of_the_row_alone(void **state) {
    enum { ROWS = 40 };
    const gpu *const g = gpu_get_with_kernels(state);
    const kv8_experts_shape shape = {128, 4, 2880, 32, 1.702f, 7.0f};
    const router_case c = {128, 4, 2880, ROWS, 0, true};
    router_inputs in = make_inputs(&c);
    const size_t bytes = kv8_experts_part_bytes(&shape, KV8_EXPERTS_DOWN) * 128; /* the larger */
    void *const zeros = calloc(1, bytes), *const strips = gpu_upload(g, zeros, bytes);
    void *const w = gpu_upload(g, in.w, (size_t)128 * 2880 * sizeof *in.w);
    void *const bias = gpu_upload(g, in.bias, 128 * sizeof *in.bias);
    void *const gain = gpu_upload(g, in.gain, 2880 * sizeof *in.gain);
    float *const residual = gpu_upload(g, in.residual, (size_t)ROWS * 2880 * sizeof *residual);
    void *const normed = gpu_alloc(g, (size_t)ROWS * 2880 * sizeof(kv8_f16));
    const kv8_experts_router router = {w, bias, gain, (float)eps, normed};
    kv8_device_experts *experts = NULL;
    assert_ok(kv8_device_experts_create(&experts, g->device, &shape, ROWS));
    kv8_device_experts_fix_order(experts);
    float all[ROWS * 4], alone[4];
    const kv8_experts_routing *const r = kv8_device_experts_get_routing(experts);
    kv8_experts_args args = {.gate_up = strips, .down = strips, .router = &router};
    args.residual = residual;
    args.n = ROWS;
    assert_ok(kv8_device_experts_run(experts, g->stream, &args));
    gpu_download(g, all, r->weights, sizeof all);
    args.n = 1;
    for (int row = 0; row < ROWS; row++) {
        args.residual = residual + row * 2880;
        assert_ok(kv8_device_experts_run(experts, g->stream, &args));
        gpu_download(g, alone, r->weights, sizeof alone);
        assert_memory_equal(alone, all + row * 4, sizeof alone);
    }
    void *const on_gpu[] = {strips, w, bias, gain, residual, normed};
    for (int i = 0; i < 6; i++) kv8_device_free(g->device, on_gpu[i]);
    free(zeros);
    free_inputs(&in);
    kv8_device_experts_destroy(experts);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_are_normed_and_routed),
                                       cmocka_unit_test(bits_are_those_of_the_row_alone)};
    return cmocka_run_group_tests_name("experts_router", tests, gpu_open, gpu_close);
}
