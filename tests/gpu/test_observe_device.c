/* test_observe_device.c - an observer on the GPU holds what an observer of the host holds after the
 * same rows: every source format, dims, ranks, rotations and strides, any f32 bits; through graphs,
 * starts and stops; rows that are not in use are not looked at.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/calibrate_device.h>

#include "gpu_testing.h"

enum { LAYERS = 2, KV_HEADS = 4, QO_HEADS = 8, MAX_ROWS = 700 };

typedef struct observe_case {
    kv8_dtype source;
    int32_t k_dim, v_dim, num_rows, gap; /* gap: unused elements behind a row's heads */
    int32_t rank, num_ranks;
    bool rotates, interleaved, with_q;
} observe_case;

/* --- rows --- */

/* Any bits: NaN, infinities, zeros and subnormal numbers among magnitudes of every kind; none that
 * is subnormal where rows are rotated, which on x86-64 would count as 0. */
static float any_value(test_rng *rng, bool rotates) {
    switch (rng_range(rng, 0, 40)) {
        case 0: return 0;
        case 1: return -0.0f;
        case 2: return (float)NAN;
        case 3: return -INFINITY;
        case 4: return rotates ? 1e-15f : 1e-42f;
        case 5: return -3e38f;
        case 6:
        case 7: return rng_normal(rng) * exp2f((float)rng_range(rng, -40, 36));
        default: return rng_normal(rng);
    }
}

/* Rows of one tensor in both memories. */
typedef struct rows {
    void *host, *device;
    int64_t stride_row;
} rows;

static rows make_rows(const gpu *g, test_rng *rng, kv8_dtype source, bool rotates, int32_t num_rows,
                      int32_t num_heads, int32_t head_dim, int32_t gap) {
    const int64_t stride = (int64_t)num_heads * head_dim + gap;
    const size_t num = (size_t)(num_rows * stride) + 1, size = kv8_dtype_size(source);
    float *const values = malloc(num * sizeof *values);
    for (size_t i = 0; i < num; i++) values[i] = any_value(rng, rotates);
    rows r = {.host = malloc(num * size), .stride_row = stride};
    assert_ok(kv8_narrow(KV8_ISA_SCALAR, source, values, num, 1, r.host, NULL));
    for (size_t i = 5; source != KV8_F32 && i < num; i += 37) /* narrowing makes none */
        ((uint16_t *)r.host)[i] = source == KV8_BF16 ? 0x7f80 : 0xfc00;
    r.device = gpu_upload(g, r.host, num * size);
    free(values);
    return r;
}

static void free_rows(const gpu *g, rows *r) {
    free(r->host);
    kv8_device_free(g->device, r->device);
}

typedef struct inputs {
    rows k, v, q, cos_sin;
    int32_t *rows_in_use;
} inputs;

static inputs make_inputs(const gpu *g, const observe_case *c, uint64_t seed) {
    test_rng rng = {seed};
    inputs in;
    in.k = make_rows(g, &rng, c->source, c->rotates, c->num_rows, KV_HEADS, c->k_dim, c->gap);
    in.v = make_rows(g, &rng, c->source, false, c->num_rows, KV_HEADS, c->v_dim, c->gap);
    in.q = make_rows(g, &rng, c->source, false, c->num_rows, QO_HEADS, c->k_dim, c->gap);
    in.cos_sin = make_rows(g, &rng, KV8_F32, true, c->num_rows, 1, c->k_dim, 0); /* any factors */
    in.rows_in_use = gpu_upload(g, &c->num_rows, sizeof c->num_rows);
    return in;
}

static void free_inputs(const gpu *g, inputs *in) {
    free_rows(g, &in->k);
    free_rows(g, &in->v);
    free_rows(g, &in->q);
    free_rows(g, &in->cos_sin);
    kv8_device_free(g->device, in->rows_in_use);
}

static kv8_observe_args args_of(const observe_case *c, const inputs *in, bool on_device) {
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = c->num_rows;
    args.src_dtype = c->source;
    args.k = on_device ? in->k.device : in->k.host;
    args.v = on_device ? in->v.device : in->v.host;
    args.k_stride_row = in->k.stride_row;
    args.v_stride_row = in->v.stride_row;
    args.k_stride_head = args.q_stride_head = c->k_dim;
    args.v_stride_head = c->v_dim;
    if (c->with_q) args.q = on_device ? in->q.device : in->q.host;
    args.q_stride_row = in->q.stride_row;
    if (c->rotates) args.cos_sin = on_device ? in->cos_sin.device : in->cos_sin.host;
    args.interleaved = c->interleaved;
    return args;
}

/* --- observers --- */

static kv8_observer_options options_of(const observe_case *c) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    options.num_layers = LAYERS;
    options.num_kv_heads = KV_HEADS;
    options.num_qo_heads = c->with_q ? QO_HEADS : 0;
    options.k_head_dim = c->k_dim;
    options.v_head_dim = c->v_dim;
    options.rank = c->rank;
    options.num_ranks = c->num_ranks;
    return options;
}

static kv8_observer *make_host(const observe_case *c) {
    const kv8_observer_options options = options_of(c);
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    kv8_observer_start(observer);
    return observer;
}

static kv8_device_observer *make_device(const gpu *g, const observe_case *c) {
    const kv8_observer_options options = options_of(c);
    kv8_device_observer *observer = NULL;
    assert_ok(kv8_device_observer_create(&observer, g->stream, &options));
    return observer;
}

static void assert_same(kv8_observer *a, kv8_observer *b) {
    size_t num_a = 0, num_b = 0;
    const uint64_t *const sums_a = kv8_observer_sums(a, &num_a);
    const uint64_t *const sums_b = kv8_observer_sums(b, &num_b);
    assert_int_equal(num_a, num_b);
    for (size_t i = 0; i < num_a; i++) {
        if (sums_a[i] != sums_b[i])
            fail_msg("sum %zu is %llu, the host's %llu", i, (unsigned long long)sums_a[i],
                     (unsigned long long)sums_b[i]);
    }
    const float *const most_a = kv8_observer_maxima(a, &num_a);
    const float *const most_b = kv8_observer_maxima(b, &num_b);
    assert_int_equal(num_a, num_b);
    assert_memory_equal(most_a, most_b, num_a * sizeof *most_a);
}

static void assert_empty(kv8_observer *observer) {
    size_t num = 0;
    const uint64_t *const sums = kv8_observer_sums(observer, &num);
    for (size_t i = 0; i < num; i++) assert_int_equal(sums[i], 0);
}

/* --- the tests --- */

static void check_case(const gpu *g, const observe_case *c, uint64_t seed) {
    inputs in = make_inputs(g, c, seed);
    kv8_observer *const want = make_host(c), *const got = make_host(c);
    kv8_device_observer *const observer = make_device(g, c);
    assert_ok(kv8_device_observer_start(observer, g->stream));
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        kv8_observe_args args = args_of(c, &in, false);
        assert_ok(kv8_observer_add(want, layer, &args));
        args = args_of(c, &in, true);
        assert_ok(kv8_device_observer_add(observer, g->stream, layer, &args));
    }
    assert_ok(kv8_device_observer_read(observer, g->stream, got));
    assert_same(got, want);
    kv8_device_observer_destroy(observer);
    kv8_observer_destroy(want);
    kv8_observer_destroy(got);
    free_inputs(g, &in);
}

static void counts_equal_the_hosts(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t dims[][2] = {{64, 64},  {128, 64}, {24, 40}, {45, 10},
                                      {10, 576}, {576, 8},  {1, 1},   {16, 300}};
    static const int32_t num_rows[] = {MAX_ROWS, 1, 33, 0, 97};
    int count = 0;
    for (int source = KV8_F32; source <= KV8_F16; source++) {
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
            for (int rotation = 0; rotation < 3; rotation++) {
                if (rotation > 0 && dims[d][0] % 2 != 0) continue;
                const observe_case c = {.source = (kv8_dtype)source,
                                        .k_dim = dims[d][0],
                                        .v_dim = dims[d][1],
                                        .num_rows = num_rows[count % 5],
                                        .gap = count % 4 == 0 ? 3 : 8 * (count % 3),
                                        .num_ranks = count % 3 == 1 ? 2 : 0,
                                        .rank = count % 3 == 1 ? count % 2 : 0,
                                        .rotates = rotation > 0,
                                        .interleaved = rotation == 2,
                                        .with_q = count % 2 == 0};
                check_case(g, &c, (uint64_t)count + 1);
                count++;
            }
        }
    }
    printf("%d cases\n", count);
}

static const observe_case usual = {
    .source = KV8_BF16, .k_dim = 64, .v_dim = 64, .num_rows = 97, .rotates = true, .with_q = true};

/* All values alike meet in one bin, in one channel's word, or in NaN's. */
static void equal_values_are_all_counted(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const uint16_t codes[] = {0, 0x3fc0, 0xffc0, 0x7f80}; /* 0, 1.5, NaN, infinity */
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        observe_case c = usual;
        c.num_rows = MAX_ROWS;
        c.rotates = false;
        inputs in = make_inputs(g, &c, 1);
        const size_t num = (size_t)MAX_ROWS * KV_HEADS * 64;
        for (size_t j = 0; j < num; j++) ((uint16_t *)in.k.host)[j] = codes[i];
        assert_ok(kv8_stream_copy(g->stream, in.k.device, in.k.host, num * sizeof codes[i]));
        kv8_observer *const got = make_host(&c);
        kv8_device_observer *const observer = make_device(g, &c);
        const kv8_observe_args args = args_of(&c, &in, true);
        assert_ok(kv8_device_observer_start(observer, g->stream));
        assert_ok(kv8_device_observer_add(observer, g->stream, 0, &args));
        assert_ok(kv8_device_observer_read(observer, g->stream, got));
        kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
        assert_ok(kv8_observer_get(got, KV8_OBSERVED_K, 0, KV_HEADS - 1, &seen));
        const uint64_t counts[] = {seen.zeros, seen.histogram[32 * 8 + 4], seen.nans, seen.infs};
        for (size_t j = 0; j < 4; j++) assert_int_equal(counts[j], j == i ? MAX_ROWS * 64 : 0);
        assert_int_equal(seen.channel_nonfinite[63], i >= 2 ? MAX_ROWS : 0);
        assert_true(seen.channel_absmax[63] == (i == 1 ? 1.5f : 0));
        kv8_device_observer_destroy(observer);
        kv8_observer_destroy(got);
        free_inputs(g, &in);
    }
}

/* A recorded add counts as many rows as are in use at replay, and none while stopped. */
static void a_graph_follows_rows_and_stops(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    inputs in = make_inputs(g, &usual, 2);
    kv8_observer *const want = make_host(&usual), *const got = make_host(&usual);
    kv8_device_observer *const observer = make_device(g, &usual);
    kv8_observe_args args = args_of(&usual, &in, true);
    args.rows_in_use = in.rows_in_use;
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(kv8_device_observer_add(observer, g->stream, 1, &args));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    assert_ok(kv8_graph_launch(graph, g->stream)); /* stopped */
    assert_ok(kv8_device_observer_read(observer, g->stream, got));
    assert_empty(got);
    static const int32_t in_use[] = {97, 0, 40, 1, 1000, -1};
    for (size_t i = 0; i < sizeof in_use / sizeof in_use[0]; i++) {
        assert_ok(kv8_stream_copy(g->stream, in.rows_in_use, &in_use[i], sizeof in_use[i]));
        assert_ok(kv8_device_observer_start(observer, g->stream));
        assert_ok(kv8_graph_launch(graph, g->stream));
        assert_ok(kv8_device_observer_stop(observer, g->stream));
        assert_ok(kv8_graph_launch(graph, g->stream));
        kv8_observe_args host = args_of(&usual, &in, false);
        host.rows_in_use = &in_use[i];
        assert_ok(kv8_observer_add(want, 1, &host));
        if (i == 2) assert_ok(kv8_device_observer_read(observer, g->stream, got));
    }
    assert_ok(kv8_device_observer_read(observer, g->stream, got));
    assert_same(got, want);
    assert_ok(kv8_device_observer_read(observer, g->stream, got)); /* nothing since */
    assert_same(got, want);
    kv8_graph_destroy(graph);
    kv8_device_observer_destroy(observer);
    kv8_observer_destroy(want);
    kv8_observer_destroy(got);
    free_inputs(g, &in);
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_device_observer *observer = (kv8_device_observer *)1;
    kv8_observer_options options = options_of(&usual);
    assert_refused(kv8_device_observer_create(&observer, NULL, &options), KV8_ERR_INVALID,
                   "stream is NULL");
    assert_null(observer);
    options.num_qo_heads = 65536;
    assert_refused(kv8_device_observer_create(&observer, g->stream, &options), KV8_ERR_UNSUPPORTED,
                   "65544 heads");
    observer = make_device(g, &usual);
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.src_dtype = KV8_BF16;
    args.num_rows = 1;
    assert_ok(kv8_device_observer_add(observer, g->stream, 0, &args)); /* no tensor */
    assert_refused(kv8_device_observer_add(observer, g->stream, LAYERS, &args), KV8_ERR_INVALID,
                   "layer 2");
    args.num_rows = (int64_t)1 << 31;
    assert_refused(kv8_device_observer_add(observer, g->stream, 0, &args), KV8_ERR_INVALID,
                   "num_rows is 2147483648");
    assert_refused(kv8_device_observer_add(observer, NULL, 0, &args), KV8_ERR_INVALID,
                   "stream is NULL");
    observe_case other = usual;
    other.with_q = false;
    kv8_observer *const into = make_host(&other);
    assert_refused(kv8_device_observer_read(observer, g->stream, into), KV8_ERR_INVALID,
                   "num_qo_heads 0 and 8");
    kv8_observer_destroy(into);
    kv8_device_observer_destroy(observer);
    kv8_device_observer_destroy(NULL);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_equal_the_hosts),
        cmocka_unit_test(equal_values_are_all_counted),
        cmocka_unit_test(a_graph_follows_rows_and_stops),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("observe_device", tests, gpu_open, gpu_close);
}
