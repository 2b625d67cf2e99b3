/* test_experts_device.c - the experts on the GPU against their definition in f64 on the
 * checkpoint's bytes: routing, every row and every value of the sum, from one row to hundreds, with
 * rows spread, all of one expert, and padded; scales over their whole range, and NaN.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/formats.h>

#include "device_experts.h"
#include "experts_args.h"
#include "gpu_testing.h"

typedef enum { RANDOM, SKEWED, DISTINCT, ALIKE } spread; /* ALIKE: of one sequence */

typedef struct experts_case {
    kv8_experts_shape shape;
    int32_t n, live; /* live 0: no padding */
    spread spread;
    bool wide; /* scales of all sizes */
} experts_case;

/* --- one part's weights: the checkpoint's bytes, and what they mean --- */

typedef struct part {
    int64_t rows, cols;
    uint8_t *blocks, *scales;
    uint16_t *bias;
    float *values; /* [experts, rows, cols] */
} part;

static const float e2m1[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                               -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static float bf16_value(uint16_t bits) {
    return kv8_bf16_to_f32((kv8_bf16){bits});
}

static void widen_part(part *p, int32_t experts) {
    for (int64_t i = 0; i < experts * p->rows * p->cols; i++) {
        const uint8_t byte = p->blocks[i / 2];
        const uint8_t scale = p->scales[i / 32];
        const float code = e2m1[i % 2 == 0 ? byte & 15 : byte >> 4];
        p->values[i] = scale == 255 ? NAN : ldexpf(code, scale - 127);
    }
}

/* Wide: a row's scales lie around a level of its own, some of them far below. */
static part make_part(test_rng *rng, int32_t experts, int32_t rows, int32_t cols, bool wide) {
    part p = {.rows = rows, .cols = cols};
    const size_t values = (size_t)experts * (size_t)rows * (size_t)cols;
    p.blocks = malloc(values / 2);
    p.scales = malloc(values / 32);
    p.bias = malloc((size_t)experts * (size_t)rows * sizeof *p.bias);
    p.values = malloc(values * sizeof *p.values);
    for (size_t i = 0; i < values / 2; i++) p.blocks[i] = (uint8_t)rng_u64(rng);
    for (int64_t r = 0; r < (int64_t)experts * rows; r++) {
        const int32_t level = wide ? rng_range(rng, 100, 140) : 122;
        for (int32_t b = 0; b < cols / 32; b++) {
            const int32_t below = wide && rng_range(rng, 0, 3) == 0 ? rng_range(rng, 0, 255) : 0;
            const int32_t scale = level - rng_range(rng, 0, 3) - below;
            p.scales[r * (cols / 32) + b] = (uint8_t)(scale < 0 ? 0 : scale);
        }
        p.bias[r] = kv8_bf16_from_f32(rng_normal(rng)).bits;
    }
    widen_part(&p, experts);
    return p;
}
static void free_part(part *p) {
    free(p->blocks);
    free(p->scales);
    free(p->bias);
    free(p->values);
}

/* --- a run's inputs, and what must come out --- */

typedef struct inputs {
    part gate_up, down;
    float *logits, *residual;
    kv8_f16 *x;
} inputs;

static inputs make_inputs(const experts_case *c, uint64_t seed) {
    test_rng rng = {seed};
    const kv8_experts_shape *const s = &c->shape;
    inputs in = {
        .gate_up = make_part(&rng, s->num_experts, 2 * s->intermediate, s->hidden, c->wide),
        .down = make_part(&rng, s->num_experts, s->hidden, s->intermediate, c->wide)};
    const size_t n = (size_t)c->n, hidden = (size_t)s->hidden, experts = (size_t)s->num_experts;
    in.logits = malloc(n * experts * sizeof *in.logits);
    in.residual = malloc(n * hidden * sizeof *in.residual);
    in.x = malloc(n * hidden * sizeof *in.x);
    for (size_t i = 0; i < n * experts; i++) {
        const size_t row = i / experts, e = i % experts;
        in.logits[i] = rng_normal(&rng);
        if (c->spread == SKEWED) in.logits[i] += e % 2 == 1 ? 20.0f : 0.0f;
        if (c->spread == ALIKE) in.logits[i] += 6.0f * (float)e / (float)experts;
        if (c->spread == DISTINCT && e / (size_t)s->top_k == row % (experts / (size_t)s->top_k))
            in.logits[i] += 20.0f;
    }
    for (size_t i = 0; i < n * hidden; i++) {
        in.x[i] = kv8_f16_from_f32(rng_normal(&rng));
        in.residual[i] = rng_normal(&rng);
    }
    return in;
}
static void free_inputs(inputs *in) {
    free_part(&in->gate_up);
    free_part(&in->down);
    free(in->logits);
    free(in->residual);
    free(in->x);
}

/* The best experts of a row and their weights, by the definition. */
static void route_row(const float *logits, const kv8_experts_shape *s, int32_t *ids,
                      double *weight) {
    double sum = 0;
    for (int32_t k = 0; k < s->top_k; k++) {
        ids[k] = -1;
        for (int32_t e = 0; e < s->num_experts; e++) {
            bool taken = false;
            for (int32_t j = 0; j < k; j++) taken = taken || ids[j] == e;
            if (!taken && (ids[k] < 0 || logits[e] > logits[ids[k]])) ids[k] = e;
        }
        weight[k] = exp((double)logits[ids[k]] - (double)logits[ids[0]]);
        sum += weight[k];
    }
    for (int32_t k = 0; k < s->top_k; k++) weight[k] /= sum;
}

/* One row's gated values of one expert, and how far the GPU's may be off: it keeps them as f16. */
static void gate_row(const inputs *in, const experts_case *c, int32_t row, int32_t expert,
                     double *gated, double *error) {
    const kv8_experts_shape *const s = &c->shape;
    for (int32_t i = 0; i < s->intermediate; i++) {
        double u[2], size = 0;
        for (int h = 0; h < 2; h++) {
            const int64_t r = (int64_t)expert * in->gate_up.rows + 2 * i + h;
            u[h] = (double)bf16_value(in->gate_up.bias[r]);
            for (int32_t k = 0; k < s->hidden; k++) {
                const double term = (double)in->gate_up.values[r * s->hidden + k] *
                                    (double)kv8_f16_to_f32(in->x[(int64_t)row * s->hidden + k]);
                u[h] += term;
                size += fabs(term);
            }
        }
        const double limit = (double)s->limit, g = fmin(u[0], limit);
        const double up = fmax(-limit, fmin(u[1], limit));
        gated[i] =
            isnan(u[0] + u[1]) ? (double)NAN : g / (1 + exp(-(double)s->alpha * g)) * (up + 1);
        error[i] = fabs(gated[i]) * 0x1.1p-11 + 0x1p-24 + fmin(size * 0x1p-16, 64);
    }
}

/* wanted += the experts' sum for one row; bound: how far each value may be off. */
static void add_experts(const inputs *in, const experts_case *c, int32_t row, double *wanted,
                        double *bound) {
    const kv8_experts_shape *const s = &c->shape;
    int32_t ids[KV8_EXPERTS_MAX_TOP_K];
    double weight[KV8_EXPERTS_MAX_TOP_K];
    double *const gated = malloc(2 * (size_t)s->intermediate * sizeof *gated);
    double *const error = gated + s->intermediate;
    route_row(in->logits + (int64_t)row * s->num_experts, s, ids, weight);
    for (int32_t k = 0; k < s->top_k; k++) {
        gate_row(in, c, row, ids[k], gated, error);
        for (int32_t h = 0; h < s->hidden; h++) {
            const int64_t r = (int64_t)ids[k] * in->down.rows + h;
            double sum = (double)bf16_value(in->down.bias[r]), off = fabs(sum) * 0x1p-20;
            for (int32_t i = 0; i < s->intermediate; i++) {
                const double w = (double)in->down.values[r * s->intermediate + i];
                sum += w * gated[i];
                off += fabs(w) * (error[i] + fabs(gated[i]) * 0x1p-20);
            }
            wanted[h] += weight[k] * sum;
            bound[h] += weight[k] * off + fabs(weight[k] * sum) * 0x1p-20;
        }
    }
    free(gated);
}

/* --- the GPU's side --- */

typedef struct on_gpu {
    const gpu *g;
    kv8_device_experts *experts;
    uint8_t *weights[2];
    void *ptr[12];
    int count;
    kv8_experts_args args;
    float *residual;
} on_gpu;

static void *keep(on_gpu *on, void *ptr) {
    assert_true(on->count < 12);
    return on->ptr[on->count++] = ptr;
}

/* All experts of a part but the last in one call, the last in another. */
static void load_part(on_gpu *on, const part *p, const kv8_experts_shape *s,
                      kv8_experts_part which) {
    const size_t bytes = kv8_experts_part_bytes(s, which);
    on->weights[which] = keep(on, gpu_alloc(on->g, bytes * (size_t)s->num_experts));
    const int32_t counts[2] = {s->num_experts - 1, 1};
    for (int32_t call = 0, first = 0; call < 2; first += counts[call++]) {
        const size_t rows = (size_t)counts[call] * (size_t)p->rows;
        const size_t before = (size_t)first * (size_t)p->rows;
        if (rows == 0) continue;
        const size_t values = rows * (size_t)p->cols, skip = before * (size_t)p->cols;
        void *const parts[] = {gpu_upload(on->g, p->blocks + skip / 2, values / 2),
                               gpu_upload(on->g, p->scales + skip / 32, values / 32),
                               gpu_upload(on->g, p->bias + before, rows * sizeof *p->bias)};
        const kv8_experts_source from = {parts[0], parts[1], parts[2], counts[call]};
        assert_ok(kv8_device_experts_load(on->experts, on->g->stream, which, &from,
                                          on->weights[which] + (size_t)first * bytes));
        assert_ok(kv8_stream_synchronize(on->g->stream));
        for (int i = 0; i < 3; i++) kv8_device_free(on->g->device, parts[i]);
    }
}

static on_gpu open_on_gpu(const gpu *g, const experts_case *c, const inputs *in) {
    on_gpu on = {.g = g};
    const size_t n = (size_t)c->n, hidden = (size_t)c->shape.hidden;
    assert_ok(kv8_device_experts_create(&on.experts, g->device, &c->shape, c->n));
    load_part(&on, &in->gate_up, &c->shape, KV8_EXPERTS_GATE_UP);
    load_part(&on, &in->down, &c->shape, KV8_EXPERTS_DOWN);
    on.residual = keep(&on, gpu_alloc(g, n * hidden * sizeof(float)));
    on.args = (kv8_experts_args){
        .gate_up = on.weights[KV8_EXPERTS_GATE_UP],
        .down = on.weights[KV8_EXPERTS_DOWN],
        .logits = keep(
            &on, gpu_upload(g, in->logits, n * (size_t)c->shape.num_experts * sizeof *in->logits)),
        .x = keep(&on, gpu_upload(g, in->x, n * hidden * sizeof *in->x)),
        .residual = on.residual,
        .live_rows = c->live == 0 ? NULL : keep(&on, gpu_upload(g, &c->live, sizeof c->live)),
        .n = c->n,
        .seq_rows = c->spread == ALIKE ? c->n : 1};
    return on;
}
static void run_on_gpu(const on_gpu *on, const experts_case *c, const inputs *in, float *out) {
    const size_t bytes = (size_t)c->n * (size_t)c->shape.hidden * sizeof *out;
    assert_ok(kv8_stream_copy(on->g->stream, on->residual, in->residual, bytes));
    assert_ok(kv8_device_experts_run(on->experts, on->g->stream, &on->args));
    gpu_download(on->g, out, on->residual, bytes);
}
static void close_on_gpu(on_gpu *on) {
    for (int i = 0; i < on->count; i++) kv8_device_free(on->g->device, on->ptr[i]);
    kv8_device_experts_destroy(on->experts);
}

/* --- checks --- */

/* Ids, weights, and places by expert. */
static void check_routing(const on_gpu *on, const experts_case *c, const inputs *in) {
    const kv8_experts_shape *const s = &c->shape;
    const kv8_experts_routing *const r = kv8_device_experts_get_routing(on->experts);
    const int32_t places = c->n * s->top_k, live = c->live == 0 ? c->n : c->live;
    uint8_t *const got_ids = malloc((size_t)places);
    float *const got_weights = malloc((size_t)places * sizeof(float));
    int32_t *const sorted = malloc((size_t)places * sizeof(int32_t));
    int32_t offsets[KV8_EXPERTS_MAX + 1];
    gpu_download(on->g, got_ids, r->ids, (size_t)places);
    gpu_download(on->g, got_weights, r->weights, (size_t)places * sizeof(float));
    gpu_download(on->g, sorted, r->sorted, (size_t)places * sizeof(int32_t));
    gpu_download(on->g, offsets, r->offsets, ((size_t)s->num_experts + 1) * sizeof(int32_t));
    for (int32_t row = 0; row < live; row++) {
        int32_t ids[KV8_EXPERTS_MAX_TOP_K];
        double weight[KV8_EXPERTS_MAX_TOP_K];
        route_row(in->logits + (int64_t)row * s->num_experts, s, ids, weight);
        for (int32_t k = 0; k < s->top_k; k++) {
            assert_int_equal(got_ids[row * s->top_k + k], ids[k]);
            assert_true(fabs((double)got_weights[row * s->top_k + k] - weight[k]) <= 1e-6);
        }
    }
    int32_t at = 0;
    for (int32_t e = 0; e < s->num_experts; e++) {
        assert_int_equal(offsets[e], at);
        for (int32_t i = 0; i < live * s->top_k; i++)
            if (got_ids[i] == e) assert_int_equal(sorted[at++], i);
    }
    assert_int_equal(offsets[s->num_experts], at);
    free(got_ids);
    free(got_weights);
    free(sorted);
}

static void check_rows(const experts_case *c, const inputs *in, const float *out) {
    const size_t hidden = (size_t)c->shape.hidden;
    double *const wanted = malloc(3 * hidden * sizeof *wanted);
    double *const bound = wanted + hidden, *const added = bound + hidden;
    float *const got = malloc(hidden * sizeof *got);
    for (int32_t row = 0; row < (c->live == 0 ? c->n : c->live); row++) {
        const float *const before = in->residual + (size_t)row * hidden;
        const float *const after = out + (size_t)row * hidden;
        for (size_t h = 0; h < hidden; h++) wanted[h] = bound[h] = 0;
        add_experts(in, c, row, wanted, bound);
        for (size_t h = 0; h < hidden; h++) {
            const double sum = (double)before[h] + wanted[h],
                         slack = 1e-6 * fabs((double)before[h]);
            if (!(fabs((double)after[h] - sum) <= bound[h] + slack) &&
                !(isnan(sum) && isnan(after[h])))
                fail_msg("%d rows of %d x %d, %d experts: row %d, value %zu is %g, wanted %g +- %g",
                         c->n, c->shape.hidden, c->shape.intermediate, c->shape.num_experts, row, h,
                         (double)after[h], sum, bound[h] + slack);
            added[h] = sum;
            got[h] = after[h];
        }
        if (!c->wide) assert_true(relative_error(got, added, hidden) <= 1e-3);
    }
    free(wanted);
    free(got);
}

/* The rows that come out, normed by the definition: padding too. */
static void check_normed(const experts_case *c, const float *out, const kv8_bf16 *gain,
                         const kv8_f16 *normed, double eps) {
    const size_t hidden = (size_t)c->shape.hidden;
    for (size_t row = 0; row < (size_t)c->n; row++) {
        double squares = 0;
        for (size_t h = 0; h < hidden; h++)
            squares += (double)out[row * hidden + h] * (double)out[row * hidden + h];
        for (size_t h = 0; h < hidden; h++) {
            const double wanted = (double)out[row * hidden + h] /
                                  sqrt(squares / (double)hidden + eps) *
                                  (double)kv8_bf16_to_f32(gain[h]);
            const double got = (double)kv8_f16_to_f32(normed[row * hidden + h]);
            if (!(fabs(got - wanted) <= fabs(wanted) * 0x1.01p-11 + 0x1p-25) &&
                !(isnan(got) && isnan(wanted)))
                fail_msg("%d rows of %d: normed row %zu, value %zu is %g, wanted %g", c->n,
                         c->shape.hidden, row, h, got, wanted);
        }
    }
}

/* The same run with the norm of its rows: the same bits, and their norm. */
static void check_norm(const on_gpu *on, const experts_case *c, const inputs *in,
                       const float *out) {
    const size_t hidden = (size_t)c->shape.hidden, values = (size_t)c->n * hidden;
    test_rng rng = {77};
    kv8_bf16 *const gain = malloc(hidden * sizeof *gain);
    kv8_f16 *const normed = malloc(values * sizeof *normed);
    float *const again = malloc(values * sizeof *again);
    for (size_t h = 0; h < hidden; h++) gain[h] = kv8_bf16_from_f32(rng_normal(&rng));
    void *const gain_on_gpu = gpu_upload(on->g, gain, hidden * sizeof *gain);
    on_gpu with = *on;
    with.args.next_gain = gain_on_gpu;
    with.args.normed = gpu_alloc(on->g, values * sizeof *normed);
    with.args.eps = 1e-5f;
    run_on_gpu(&with, c, in, again);
    assert_memory_equal(again, out, values * sizeof *out);
    gpu_download(on->g, normed, with.args.normed, values * sizeof *normed);
    check_normed(c, out, gain, normed, 1e-5);
    kv8_device_free(on->g->device, with.args.normed);
    kv8_device_free(on->g->device, gain_on_gpu);
    free(gain);
    free(normed);
    free(again);
}

static void check_case(const gpu *g, const experts_case *c, uint64_t seed) {
    inputs in = make_inputs(c, seed);
    on_gpu on = open_on_gpu(g, c, &in);
    const size_t values = (size_t)c->n * (size_t)c->shape.hidden;
    float *const out = malloc(2 * values * sizeof *out);
    run_on_gpu(&on, c, &in, out);
    check_routing(&on, c, &in);
    check_rows(c, &in, out);
    if (c->live != 0) { /* padding stays as it was */
        const size_t from = (size_t)c->live * (size_t)c->shape.hidden;
        assert_memory_equal(out + from, in.residual + from, (values - from) * sizeof *out);
    }
    run_on_gpu(&on, c, &in, out + values);
    assert_memory_equal(out, out + values, values * sizeof *out);
    check_norm(&on, c, &in, out);
    free(out);
    close_on_gpu(&on);
    free_inputs(&in);
}

/* --- the tests --- */

static kv8_experts_shape shape_of(int32_t experts, int32_t top_k, int32_t hidden,
                                  int32_t intermediate) {
    return (kv8_experts_shape){experts, top_k, hidden, intermediate, 1.702f, 7.0f};
}

static void any_number_of_rows(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t rows[] = {1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 100, 512, 700};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int how = RANDOM; how <= ALIKE; how++) {
            const experts_case c = {
                .shape = shape_of(16, 4, 160, 96), .n = rows[i], .spread = (spread)how};
            check_case(g, &c, 100 + i);
        }
    }
}
static void shapes_large_and_small(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const kv8_experts_shape shapes[] = {shape_of(8, 4, 256, 256),  shape_of(1, 1, 32, 32),
                                        shape_of(255, 8, 32, 64),  shape_of(33, 3, 64, 32),
                                        shape_of(4, 2, 2880, 480), shape_of(4, 2, 96, 2880),
                                        shape_of(2, 1, 4640, 64),  shape_of(128, 4, 192, 224)};
    static const int32_t rows[] = {1, 5, 40, 130};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t cost = (int64_t)shapes[i].hidden * shapes[i].intermediate * shapes[i].top_k;
        for (size_t j = 0; j < sizeof rows / sizeof *rows; j++) {
            if (cost * rows[j] > 40 << 20 && j > 1) continue;
            check_case(g, &(experts_case){.shape = shapes[i], .n = rows[j]}, 200 + i);
        }
    }
}
/* A multiprocessor's rings of rows and of weights turn more than once, for strips of one tile too.
 */
static void works_by_the_hundred(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const experts_case c = {.shape = shape_of(20, 1, 64, 8192), .n = 490};
    check_case(g, &c, 250);
}
/* So many strips, of gate and up and then of down, that warps have whole ones, in chunks that are
 * not all of as many tiles; items of one tile of rows and of two, some experts with more than one
 * item.
 */
static void whole_strips(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const experts_case cases[] = {
        {.shape = shape_of(255, 8, 352, 512), .n = 50},
        {.shape = shape_of(255, 8, 352, 512), .n = 100, .wide = true},
        {.shape = shape_of(255, 8, 352, 512), .n = 200, .spread = ALIKE},
        {.shape = shape_of(255, 8, 1024, 352), .n = 330},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(g, &cases[i], 260 + i);
}
/* Streams of single rows, of 8 and of 16, and all sizes of works give a row the same bits. */
static void a_fixed_order_knows_no_number_of_rows(void **state) {
    enum { MOST = 700 };
    static const int32_t rows[] = {1, 2, 9, 20, 40, 90, 200, 450, MOST};
    const gpu *const g = gpu_get_with_kernels(state);
    const experts_case cases[] = {{.shape = shape_of(16, 4, 160, 96), .n = MOST},
                                  {.shape = shape_of(16, 4, 160, 96), .n = MOST, .wide = true},
                                  {.shape = shape_of(8, 2, 2880, 64), .n = MOST},
                                  {.shape = shape_of(8, 2, 64, 2880), .n = MOST}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const experts_case *const c = &cases[i];
        const size_t hidden = (size_t)c->shape.hidden;
        inputs in = make_inputs(c, 280 + i);
        on_gpu on = open_on_gpu(g, c, &in);
        kv8_device_experts_fix_order(on.experts);
        float *const all = malloc(2 * MOST * hidden * sizeof *all);
        float *const some = all + MOST * hidden;
        run_on_gpu(&on, c, &in, all);
        check_rows(c, &in, all);
        for (size_t k = 0; k < 2 * sizeof rows / sizeof *rows; k++) {
            on.args.n = rows[k / 2];
            on.args.seq_rows = k % 2 == 0 ? 1 : on.args.n;
            run_on_gpu(&on, c, &in, some);
            for (int32_t row = 0; row < on.args.n; row++)
                if (memcmp(all + (size_t)row * hidden, some + (size_t)row * hidden,
                           hidden * sizeof *all) != 0)
                    fail_msg("row %d of %d has other bits than of %d", row, on.args.n, MOST);
        }
        free(all);
        close_on_gpu(&on);
        free_inputs(&in);
    }
}
static void padding_is_left_alone(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t rows[][2] = {{2, 1}, {16, 9}, {512, 300}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const experts_case c = {
            .shape = shape_of(8, 4, 64, 64), .n = rows[i][0], .live = rows[i][1]};
        check_case(g, &c, 300 + i);
    }
}
static void scales_of_all_sizes(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t rows[] = {1, 20, 300};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const experts_case c = {.shape = shape_of(4, 2, 128, 96), .n = rows[i], .wide = true};
        check_case(g, &c, 400 + i);
    }
}

/* A scale of 255 makes its row NaN: a value of those who chose the expert, or all of them. */
static void a_scale_of_255_is_nan(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int which = 0; which < 2; which++) {
        const experts_case c = {.shape = shape_of(4, 1, 64, 64), .n = 12};
        inputs in = make_inputs(&c, 500);
        part *const p = which == 0 ? &in.gate_up : &in.down;
        const int64_t row = p->rows + 5; /* of expert 1 */
        p->scales[row * (p->cols / 32) + 1] = 255;
        memset(p->blocks + (row * (p->cols / 32) + 1) * 16, 0, 16); /* even of zeros */
        widen_part(p, c.shape.num_experts);
        on_gpu on = open_on_gpu(g, &c, &in);
        float out[12 * 64];
        run_on_gpu(&on, &c, &in, out);
        check_rows(&c, &in, out);
        close_on_gpu(&on);
        free_inputs(&in);
    }
}

/* Ties go to the lower id, NaN is below everything, an infinite logit takes all. */
static void routing_at_its_edges(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    enum { EXPERTS = 40, ROWS = 4 };
    const experts_case c = {.shape = shape_of(EXPERTS, 4, 32, 32), .n = ROWS};
    inputs in = make_inputs(&c, 600);
    for (int i = 0; i < EXPERTS; i++) {
        in.logits[i] = 0.0f * (i % 2 == 0 ? -1.0f : 1.0f); /* both zeros are one value */
        in.logits[EXPERTS + i] = NAN;
        in.logits[2 * EXPERTS + i] = i == 35 || i == 7 ? INFINITY : 1.0f;
        in.logits[3 * EXPERTS + i] = i == 39 ? -5.0f : i == 2 ? NAN : -INFINITY;
    }
    on_gpu on = open_on_gpu(g, &c, &in);
    float out[ROWS * 32];
    run_on_gpu(&on, &c, &in, out);
    const kv8_experts_routing *const r = kv8_device_experts_get_routing(on.experts);
    uint8_t ids[ROWS * 4];
    float weights[ROWS * 4];
    gpu_download(g, ids, r->ids, sizeof ids);
    gpu_download(g, weights, r->weights, sizeof weights);
    static const uint8_t wanted_ids[ROWS * 4] = {0, 1, 2, 3, 0, 1, 2, 3, 7, 35, 0, 1, 39, 0, 1, 2};
    static const float wanted_weights[ROWS * 4] = {.25f, .25f, .25f, .25f, .25f, .25f, .25f, .25f,
                                                   .5f,  .5f,  0,    0,    1,    0,    0,    0};
    assert_memory_equal(ids, wanted_ids, sizeof ids);
    for (int i = 0; i < ROWS * 4; i++) assert_true(weights[i] == wanted_weights[i]);
    close_on_gpu(&on);
    free_inputs(&in);
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_device_experts *experts = (kv8_device_experts *)1;
    const struct {
        kv8_experts_shape shape;
        int32_t max_rows;
        const char *words;
    } wrong[] = {{shape_of(256, 4, 64, 64), 1, "num_experts is 256"},
                 {shape_of(0, 4, 64, 64), 1, "num_experts is 0"},
                 {shape_of(16, 9, 64, 64), 1, "top_k is 9"},
                 {shape_of(2, 4, 64, 64), 1, "top_k is 4, there are 2 experts"},
                 {shape_of(8, 4, 48, 64), 1, "hidden is 48"},
                 {shape_of(8, 4, 64, 0), 1, "intermediate is 0"},
                 {shape_of(8, 4, 64, 64), 0, "max_rows is 0"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_refused(
            kv8_device_experts_create(&experts, g->device, &wrong[i].shape, wrong[i].max_rows),
            KV8_ERR_INVALID, wrong[i].words);
        assert_null(experts);
    }
    const kv8_experts_shape large = shape_of(8, 4, 64, 1 << 16);
    assert_refused(kv8_device_experts_create(&experts, g->device, &large, 1), KV8_ERR_UNSUPPORTED,
                   "intermediate is 65536");
    const kv8_experts_shape shape = shape_of(8, 4, 64, 64);
    assert_ok(kv8_device_experts_create(&experts, g->device, &shape, 4));
    kv8_experts_args args = {.n = 5};
    assert_refused(kv8_device_experts_run(experts, g->stream, &args), KV8_ERR_INVALID, "5 rows");
    args.n = 0;
    assert_ok(kv8_device_experts_run(experts, g->stream, &args));
    kv8_experts_source from = {.blocks = (void *)8, .count = 1};
    assert_refused(kv8_device_experts_load(experts, g->stream, KV8_EXPERTS_DOWN, &from, (void *)64),
                   KV8_ERR_INVALID, "blocks");
    from.blocks = (void *)16;
    assert_refused(kv8_device_experts_load(experts, g->stream, KV8_EXPERTS_DOWN, &from, (void *)16),
                   KV8_ERR_INVALID, "weights");
    kv8_device_experts_destroy(experts);
    kv8_device_experts_destroy(NULL);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_rows),
        cmocka_unit_test(shapes_large_and_small),
        cmocka_unit_test(works_by_the_hundred),
        cmocka_unit_test(whole_strips),
        cmocka_unit_test(a_fixed_order_knows_no_number_of_rows),
        cmocka_unit_test(padding_is_left_alone),
        cmocka_unit_test(scales_of_all_sizes),
        cmocka_unit_test(a_scale_of_255_is_nan),
        cmocka_unit_test(routing_at_its_edges),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("experts_device", tests, gpu_open, gpu_close);
}
