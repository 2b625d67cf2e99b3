/* test_experts_router.c - few rows from the residual stream to their experts in one kernel: normed
 * rows against f64, and against the product of what it normed the experts, their weights, and the
 * places in their order.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/formats.h>

#include "device_experts.h"
#include "experts_args.h"
#include "gpu_testing.h"

static const double eps = 1e-5;

typedef struct router_case {
    int32_t num_experts, top_k, hidden, n, live; /* live 0: no padding */
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
    uint8_t ids[KV8_ROUTER_ROWS * KV8_EXPERTS_MAX_TOP_K];
    float weights[KV8_ROUTER_ROWS * KV8_EXPERTS_MAX_TOP_K];
    int32_t sorted[KV8_ROUTER_ROWS * KV8_EXPERTS_MAX_TOP_K], offsets[KV8_EXPERTS_MAX + 1];
    gpu_download(g, ids, r->ids, places);
    gpu_download(g, weights, r->weights, places * sizeof *weights);
    gpu_download(g, sorted, r->sorted, places * sizeof *sorted);
    gpu_download(g, offsets, r->offsets, ((size_t)c->num_experts + 1) * sizeof *offsets);
    double *const logits = malloc((size_t)c->num_experts * sizeof *logits);
    for (int32_t row = 0; row < (c->live == 0 ? c->n : c->live); row++) {
        multiply_row(c, in, normed + (int64_t)row * c->hidden, logits);
        check_row(c, logits, ids + row * c->top_k, weights + row * c->top_k);
    }
    free(logits);
    check_places(c, ids, offsets, sorted);
}

/* Experts whose bytes are all zero add nothing: the residual stream comes out as it went in. */
static void check_case(const gpu *g, const router_case *c) {
    const kv8_experts_shape shape = {c->num_experts, c->top_k, c->hidden, 32, 1.702f, 7.0f};
    kv8_device_experts *experts = NULL;
    assert_ok(kv8_device_experts_create(&experts, g->device, &shape, KV8_ROUTER_ROWS));
    assert_true(kv8_device_experts_has_router(experts, c->n));
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
        {32, 4, 2880, 1, 0},  {32, 4, 2880, 2, 0},  {128, 4, 2880, 4, 0}, {128, 4, 2880, 8, 0},
        {128, 4, 2880, 8, 5}, {33, 4, 4096, 3, 0},  {1, 1, 32, 8, 0},     {5, 2, 64, 7, 0},
        {100, 8, 1056, 8, 1}, {128, 8, 4096, 8, 0}, {17, 3, 96, 5, 0},    {20, 4, 2880, 6, 2}};
    const gpu *const g = gpu_get_with_kernels(state);
    if (!kv8_kernel_exists(g->device, "kv8_experts_router__sm90")) skip();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) check_case(g, &cases[i]);
}

static void more_rows_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const kv8_experts_shape shape = {32, 4, 64, 32, 1.702f, 7.0f};
    kv8_device_experts *experts = NULL;
    assert_ok(kv8_device_experts_create(&experts, g->device, &shape, 64));
    const kv8_experts_router router = {NULL};
    const kv8_experts_args args = {.router = &router, .n = KV8_ROUTER_ROWS + 1};
    assert_false(kv8_device_experts_has_router(experts, args.n));
    assert_refused(kv8_device_experts_run(experts, g->stream, &args), KV8_ERR_UNSUPPORTED,
                   "no kernel routes 9 rows");
    kv8_device_experts_destroy(experts);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_are_normed_and_routed),
                                       cmocka_unit_test(more_rows_are_refused)};
    return cmocka_run_group_tests_name("experts_router", tests, gpu_open, gpu_close);
}
