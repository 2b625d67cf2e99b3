/* test_attention_device.c - the grid no peer runs, on the GPU: every case as it is, which is mostly
 * the general kernel's, and again with the nearest shapes and formats that the tensor core kernels
 * take.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_device_case.h"
#include "attention_options.h"
#include "attention_sweeps.h"
#include "device_impl.h"

static gpu *device;

/* The nearest case that a tensor core kernel takes. */
static attention_case fitted(const attention_case *c) {
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_F16, KV8_E5M2};
    static const int32_t dims[] = {64, 128, 64, 80, 256, 96};
    attention_case f = *c;
    const uint64_t n = c->seed;
    f.k_dtype = f.v_dtype = dtypes[n % 5];
    f.q_dtype = n % 3 == 0 && f.k_dtype != KV8_BF16 ? KV8_F16 : KV8_BF16;
    f.head_dim =
        f.k_dtype == KV8_E4M3 && c->page_size % 16 == 0 ? dims[n / 5 % 6] : dims[n / 5 % 2];
    f.v_head_dim = 0;
    f.layout = n % 2 ? LAYOUT_NHD : LAYOUT_HND;
    f.score_shift = 0;
    /* Row scales are copied in words of two. */
    if (f.k_dtype == KV8_INT8 && !f.ragged && f.page_size * f.num_kv_heads % 2 != 0) f.page_size++;
    return f;
}

/* The kernel of whole pages is for so many requests: those without rows or keys join. */
static void fill_batch(attention_case *c) {
    enum { LEAST = 16 };
    for (; c->batch < LEAST; c->batch++) c->qo_len[c->batch] = c->kv_len[c->batch] = 0;
}

/* The nearest case that the kernel of whole pages takes. */
static attention_case paged(const attention_case *c) {
    static const int32_t sizes[] = {16, 32, 64, 48};
    attention_case f = *c;
    const uint64_t n = c->seed;
    f.k_dtype = f.v_dtype = n % 4 == 1 ? KV8_E5M2 : KV8_E4M3;
    f.q_dtype = n % 3 == 0 ? KV8_F16 : KV8_BF16;
    f.head_dim = f.k_dtype == KV8_E4M3 && n % 5 == 2 ? 80 : 64;
    f.v_head_dim = 0;
    f.num_kv_heads = 8;
    if (f.group_size > 100) f.group_size = 100; /* a case has 1024 query heads at most */
    f.layout = LAYOUT_NHD;
    f.page_size = sizes[n / 3 % 4];
    f.score_shift = 0;
    fill_batch(&f);
    return f;
}

static void sweep_check(const attention_case *c, bool many_threads) {
    (void)many_threads;
    void *state = device;
    const gpu *const g = gpu_get_with_kernels(&state);
    (void)device_case_check(g, c);
    const attention_case f = fitted(c);
    if (!device_case_check(g, &f)) fail_msg("not on tensor cores: %s", case_text(&f, KV8_ISA_BEST));
    const attention_case p = paged(c);
    if (!device_case_check(g, &p)) fail_msg("not on tensor cores: %s", case_text(&p, KV8_ISA_BEST));
}

/* Every third of the walk, in shapes that reach the tensor core kernels too. */
static void every_combination_is_right_or_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    uint64_t n = 0;
    for (int pair = 0; pair < OPTION_PAIRS; pair++) {
        for (int q = KV8_F32; q < KV8_DTYPE_COUNT; q++) {
            for (unsigned bits = (unsigned)(n % 3); bits < OPTION_BITS; bits += 3) {
                attention_case c = option_case(++n, pair, q, bits);
                c.group_size = 1 + (int32_t)(n % 9);
                c.num_kv_heads = 1 + (int32_t)(n % 2);
                if (pair % 8 == 0) c.head_dim = 64; /* one format */
                c.page_size = n % 2 ? 16 : 1 + (int32_t)(n % 5);
                c.kv_len[0] = 3 + (int32_t)(n % 40);
                if (option_q_is_supported(q)) {
                    (void)device_case_check(g, &c);
                    continue;
                }
                static attention_inputs in;
                case_make(&in, &c);
                in.spec.q_dtype = (kv8_dtype)q;
                kv8_attention_device_plan *plan = NULL;
                assert_refused(kv8_attention_device_plan_create(&plan, g->device, &in.spec, NULL),
                               KV8_ERR_UNSUPPORTED, "supported: f32, bf16, f16, e4m3");
                assert_null(plan);
                case_free(&in);
            }
        }
    }
}

/* The kernel of a run with these args: the description's first word. */
static void kernel_of(const kv8_attention_device_plan *plan, const kv8_attention_args *args,
                      char name[128]) {
    char text[512];
    assert_ok(kv8_attention_device_describe(plan, args, text, sizeof text));
    snprintf(name, 128, "%.*s", (int)strcspn(text, " "), text);
}

/* One plan, three kernels: whole pages of many requests, heads outside of slots, a single request.
 */
static void check_kernels_of_args(const kv8_attention_device_plan *plan, kv8_attention_args args,
                                  const char *by_pages, int64_t page_size, int64_t dim) {
    char usual[128], outside[128], single[128];
    kernel_of(plan, &args, usual);
    assert_string_equal(usual, by_pages);
    kv8_paged k = *args.k, v = *args.v;
    k.stride_head = v.stride_head = page_size * dim;
    k.stride_slot = v.stride_slot = dim;
    args.k = &k;
    args.v = &v;
    kernel_of(plan, &args, outside);
    assert_string_not_equal(outside, by_pages);
    assert_non_null(strstr(outside, "kv8_decode_f16_e4m3_d64_rows"));
    args.batch = 1;
    kernel_of(plan, &args, single);
    assert_non_null(strstr(single, "kv8_decode_f16_e4m3_d64_cluster"));
}

/* A captured run, replayed after other lengths, pages and queries were copied in. */
static void check_graph(const gpu *g, bool whole_pages) {
    static attention_inputs in, other;
    attention_case c = {.group_size = 8,
                        .num_kv_heads = whole_pages ? 8 : 4,
                        .head_dim = 64,
                        .q_dtype = KV8_BF16,
                        .k_dtype = KV8_E4M3,
                        .v_dtype = KV8_E4M3,
                        .page_size = 16,
                        .window_left = -1,
                        .causal = 1,
                        .sink = SINK_FINITE,
                        .batch = 3,
                        .qo_len = {1, 1, 1},
                        .kv_len = {40, 2000, 7},
                        .seed = 11};
    if (whole_pages) fill_batch(&c);
    attention_case c2 = c;
    c2.kv_len[0] = 1900, c2.kv_len[1] = 100, c2.kv_len[2] = 47; /* the same number of pages */
    case_make(&in, &c);
    case_make(&other, &c2);
    assert_int_equal(in.num_buffers, other.num_buffers);
    memcpy(other.sinks, in.sinks, (size_t)in.num_qo_heads * sizeof *in.sinks);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    assert_ok(kv8_attention_reference(&other.spec, &other.args, other.ref_o, other.ref_lse));
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create(&plan, g->device, &in.spec, NULL));
    char text[512];
    assert_ok(kv8_attention_device_describe(plan, NULL, text, sizeof text));
    static const char by_pages[] = "kv8_decode_f16_e4m3_d64_bulk8__sm90";
    if (kv8_kernel_exists(g->device, by_pages))
        assert_int_equal(strncmp(text, by_pages, sizeof by_pages - 1) == 0, whole_pages);
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads), dim = (size_t)in.v_head_dim;
    const size_t o_bytes = rows * dim * sizeof(float), lse_bytes = rows * sizeof(float);
    device_inputs d = device_inputs_make(g, &in, device_round(o_bytes) + device_round(lse_bytes));
    kv8_attention_args args = device_case_args(&d);
    args.o = d.ends;
    args.o_stride_head = (int64_t)dim;
    args.o_stride_row = in.num_qo_heads * args.o_stride_head;
    args.lse = (float *)(void *)(d.ends + device_round(o_bytes));
    if (whole_pages && kv8_kernel_exists(g->device, by_pages))
        check_kernels_of_args(plan, args, by_pages, in.spec.page_size, (int64_t)dim);
    void *const workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
    assert_ok(kv8_attention_device_workspace_init(plan, g->stream, workspace));
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(kv8_attention_device_prepare(plan, g->stream, &args, workspace));
    assert_ok(kv8_attention_device_run(plan, g->stream, &args, workspace));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    float *const o = malloc(o_bytes), *const lse = malloc(lse_bytes);
    for (int replay = 0; replay < 6; replay++) {
        const attention_inputs *const now = replay % 2 ? &other : &in;
        for (int i = 0; i < now->num_buffers; i++) {
            assert_true(buffer_bytes(&now->buffers[i]) <= buffer_bytes(&in.buffers[i]));
            assert_ok(kv8_stream_copy(g->stream, d.copies[i], now->buffers[i].data,
                                      buffer_bytes(&now->buffers[i])));
        }
        assert_ok(kv8_stream_fill(g->stream, args.o, 0xff, o_bytes));
        assert_ok(kv8_graph_launch(graph, g->stream));
        gpu_download(g, o, args.o, o_bytes);
        gpu_download(g, lse, args.lse, lse_bytes);
        case_compare_within(now, case_f16_bounds, KV8_ISA_BEST, o, lse);
    }
    free(o);
    free(lse);
    kv8_graph_destroy(graph);
    kv8_device_free(g->device, workspace);
    kv8_device_free(g->device, d.memory);
    kv8_attention_device_plan_destroy(plan);
    case_free(&in);
    case_free(&other);
}

static void a_graph_follows_the_lengths(void **state) {
    check_graph(gpu_get_with_kernels(state), false);
}
static void a_graph_of_whole_pages_follows_them(void **state) {
    check_graph(gpu_get_with_kernels(state), true);
}

/* A launch for one request cuts its keys among the blocks of a cluster: none, fewer than blocks,
 * one more than full. */
static void one_request(const gpu *g, uint64_t from, uint64_t to) {
    static const int32_t lengths[] = {0,   1,   15,  16,   17,   127,  128,  129,
                                      255, 256, 257, 2047, 2048, 2049, 4100, 9001};
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_F16, KV8_E5M2};
    for (uint64_t n = from; n < to; n++) {
        const kv8_dtype dtype = dtypes[n % 5];
        const int32_t kv_len = lengths[n % 16];
        const attention_case c = {.seed = n,
                                  .group_size = 1 + (int32_t)(n * 7 % 12),
                                  .num_kv_heads = 1 + (int32_t)(n % 3),
                                  .head_dim = n / 2 % 2 ? 64 : 128,
                                  .q_dtype = n % 3 && dtype != KV8_BF16 ? KV8_F16 : KV8_BF16,
                                  .k_dtype = dtype,
                                  .v_dtype = dtype,
                                  .page_size = n % 4 == 3 ? 32 : 16,
                                  .window_left = n % 7 == 6 ? 100 : -1,
                                  .causal = n % 5 != 4,
                                  .sink = n % 2 ? SINK_FINITE : SINK_NONE,
                                  .scale = (scale_kind)(n / 5 % SCALE_KINDS),
                                  .layout = n / 4 % 2 ? LAYOUT_NHD : LAYOUT_HND,
                                  .dense_table = n / 3 % 2,
                                  .batch = 1,
                                  .qo_len = {kv_len == 0 ? 1 : 1 + (int32_t)(n / 16)},
                                  .kv_len = {kv_len}};
        if (c.qo_len[0] > kv_len && c.causal && kv_len > 0) continue;
        if (!device_case_check(g, &c))
            fail_msg("not on tensor cores: %s", case_text(&c, KV8_ISA_BEST));
    }
}

static void one_request_of_few_lengths(void **state) {
    one_request(gpu_get_with_kernels(state), 0, 16);
}
static void one_request_of_every_length(void **state) {
    one_request(gpu_get_with_kernels(state), 16, 64);
}

/* V is 0 of the first keys, of all but one, and of all: they have a weight, and give nothing. */
static void zeros_in_v_have_a_weight(void **state) {
    static const kv8_dtype dtypes[] = {KV8_INT8, KV8_E4M3, KV8_BF16};
    const gpu *const g = gpu_get_with_kernels(state);
    for (int32_t n = 0; n < 90; n++) {
        const attention_case c = {.seed = 7700 + (uint64_t)n,
                                  .group_size = n % 2 == 0 ? 8 : 3,
                                  .num_kv_heads = 2,
                                  .head_dim = n / 2 % 2 == 0 ? 64 : 128,
                                  .q_dtype = KV8_BF16,
                                  .k_dtype = dtypes[n / 3 % 3],
                                  .v_dtype = dtypes[n % 3],
                                  .page_size = 16,
                                  .window_left = n % 5 == 4 ? 127 : -1,
                                  .causal = 1,
                                  .sink = (sink_kind)(n % SINK_KINDS),
                                  .zero_v = 1 + n * 17,
                                  .batch = 3,
                                  .qo_len = {1, 1 + n / 9 % 5 * 4, 1},
                                  .kv_len = {2000, 20 + n * 17, 2 + n * 17}};
        device_case_check(g, &c);
    }
}

/* Rows of decode under windows of few keys, which have kernels of their own; requests without keys,
 * with fewer than the window, of unequal lengths. */
static void windows_of_few_keys(void **state) {
    static const kv8_dtype formats[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_E5M2};
    static const int32_t windows[] = {0, 7, 127, 128, 500};
    const gpu *const g = gpu_get_with_kernels(state);
    test_rng rng = {31};
    for (int i = 0; i < 40; i++) {
        attention_case c = {.group_size = 1 + i % 8,
                            .num_kv_heads = 1 << i % 4,
                            .head_dim = 64,
                            .q_dtype = KV8_BF16,
                            .k_dtype = formats[i / 2 % 4],
                            .v_dtype = formats[i / 2 % 4],
                            .page_size = i % 3 == 2 ? 32 : 16,
                            .window_left = windows[i % 5],
                            .causal = 1,
                            .sink = i % 2 ? SINK_FINITE : SINK_NONE,
                            .scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1),
                            .layout = i / 4 % 2 ? LAYOUT_NHD : LAYOUT_HND,
                            .dense_table = i % 2,
                            .batch = formats[i / 2 % 4] == KV8_E4M3 ? rng_range(&rng, 2, 5) : 17,
                            .seed = (uint64_t)i};
        for (int b = 0; b < c.batch; b++) {
            c.qo_len[b] = 1;
            c.kv_len[b] = b == 1 ? 0 : rng_range(&rng, 1, b == 2 ? 20 : b < 5 ? 2000 : 300);
        }
        if (!device_case_check(g, &c))
            fail_msg("not on tensor cores: %s", case_text(&c, KV8_ISA_BEST));
    }
}

/* K and V choose their formats apart: every mix of three, whatever rows and masks. */
static void k_and_v_of_two_formats(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype formats[] = {KV8_E4M3, KV8_INT8, KV8_BF16};
    test_rng rng = {29};
    for (int i = 0; i < 144; i++) {
        const int k = i % 3, v = (k + 1 + i / 3 % 2) % 3;
        attention_case c = {.group_size = rng_range(&rng, 1, 9),
                            .num_kv_heads = rng_range(&rng, 1, 6),
                            .head_dim = i / 6 % 2 ? 128 : 64,
                            .q_dtype = k != 2 && i % 5 == 0 ? KV8_F16 : KV8_BF16,
                            .k_dtype = formats[k],
                            .v_dtype = formats[v],
                            .page_size = i % 4 ? 16 : 48,
                            .window_left = i % 7 == 0 ? 40 : -1,
                            .soft_cap = i % 9 == 4 ? 3.0f : 0.0f,
                            .sink = (sink_kind)rng_range(&rng, 0, SINK_KINDS - 1),
                            .mask = i % 8 == 5 ? MASK_RANDOM : MASK_NONE,
                            .scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1),
                            .layout = i / 2 % 2 ? LAYOUT_NHD : LAYOUT_HND,
                            .dense_table = i % 2,
                            .causal = 1,
                            .nan_newest = i % 11 == 7,
                            .ragged = i % 13 == 3,
                            .batch = i % 6 == 0 ? 1 : rng_range(&rng, 2, 5),
                            .seed = (uint64_t)i};
        for (int b = 0; b < c.batch; b++) {
            c.qo_len[b] = rng_range(&rng, 1, 3);
            c.kv_len[b] = rng_range(&rng, c.qo_len[b], 700);
        }
        if (c.ragged) c.page_size = 1, c.num_kv_heads = 2, c.layout = LAYOUT_NHD;
        if (!device_case_check(g, &c))
            fail_msg("not on tensor cores: %s", case_text(&c, KV8_ISA_BEST));
    }
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static attention_inputs in;
    const attention_case c = {.group_size = 2,
                              .num_kv_heads = 1,
                              .head_dim = 64,
                              .q_dtype = KV8_BF16,
                              .k_dtype = KV8_E4M3,
                              .v_dtype = KV8_E4M3,
                              .page_size = 16,
                              .window_left = -1,
                              .causal = 1,
                              .batch = 1,
                              .qo_len = {1},
                              .kv_len = {40},
                              .seed = 3};
    case_make(&in, &c);
    kv8_attention_device_plan *plan = NULL;
    assert_refused(kv8_attention_device_plan_create(&plan, NULL, &in.spec, NULL), KV8_ERR_INVALID,
                   "device is NULL");
    kv8_attention_spec spec = in.spec;
    spec.isa = KV8_ISA_SCALAR;
    assert_refused(kv8_attention_device_plan_create(&plan, g->device, &spec, NULL),
                   KV8_ERR_UNSUPPORTED, "isa is scalar");
    spec = in.spec;
    spec.head_dim = 577;
    assert_refused(kv8_attention_device_plan_create(&plan, g->device, &spec, NULL),
                   KV8_ERR_UNSUPPORTED, "head_dim is 577");
    assert_ok(kv8_attention_device_plan_create(&plan, g->device, &in.spec, NULL));
    void *const memory = gpu_alloc(g, kv8_attention_device_workspace_size(plan) + 4096);
    kv8_attention_args fine = in.args; /* never read */
    fine.o = memory;
#define ARGS_REFUSED(change, words)                                                 \
    do {                                                                            \
        kv8_attention_args args = fine;                                             \
        kv8_paged k = in.k, v = in.v;                                               \
        kv8_page_table pages = in.pages;                                            \
        args.k = &k, args.v = &v, args.pages = &pages;                              \
        void *workspace = memory;                                                   \
        change;                                                                     \
        assert_refused(kv8_attention_device_run(plan, g->stream, &args, workspace), \
                       KV8_ERR_INVALID, words);                                     \
    } while (0)
    ARGS_REFUSED(args.struct_size = 8, "struct_size");
    ARGS_REFUSED(args.batch = 2, "batch is 2");
    ARGS_REFUSED(args.q = NULL, "q is NULL");
    ARGS_REFUSED(args.o = NULL, "o is NULL");
    ARGS_REFUSED(v.data = NULL, "v.data is NULL");
    ARGS_REFUSED(pages.page_indptr = NULL, "0 of page_indptr");
    ARGS_REFUSED(pages.last_page_len = NULL, "last_page_len is NULL");
    ARGS_REFUSED(args.q_scale = memory, "e4m3 alone");
    ARGS_REFUSED(k.row_scale = memory, "int8 alone");
    ARGS_REFUSED(args.mask_bits = memory, "has_mask is 0");
    ARGS_REFUSED(workspace = (uint8_t *)memory + 8, "aligned to 256");
#undef ARGS_REFUSED
    fine.batch = 0;
    assert_ok(kv8_attention_device_run(plan, g->stream, &fine, memory));
    kv8_device_free(g->device, memory);
    kv8_attention_device_plan_destroy(plan);
    kv8_attention_device_plan_destroy(NULL);
    case_free(&in);
}

static int open_device(void **state) {
    const int status = gpu_open(state);
    device = *state;
    return status;
}

/* What a run may ask for, by every kernel that takes it: rows, whole pages, clusters, the general.
 */
static void whatever_a_run_asks(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype outputs[] = {KV8_BF16, KV8_E4M3, KV8_E5M2, KV8_F32, KV8_E4M3FNUZ};
    test_rng rng = {17};
    for (int i = 0; i < 120; i++) {
        attention_case c = {.group_size = rng_range(&rng, 1, 9),
                            .num_kv_heads = rng_range(&rng, 1, 4),
                            .page_size = i % 3 == 0 ? 7 : 16,
                            .window_left = i % 4 == 0 ? 40 : -1,
                            .sink = (sink_kind)rng_range(&rng, 0, SINK_KINDS - 1),
                            .scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1),
                            .dense_table = i % 2,
                            .o_dtype = outputs[i / 2 % 5],
                            .right = i % 3 == 1 ? rng_range(&rng, 1, 60) : 0,
                            .causal = i % 3 == 2,
                            .ragged = i % 5 == 1,
                            .unused_rows = i % 4 == 1,
                            .lse_transposed = i % 3 != 0,
                            .key_ranges = i % 8 == 7,
                            .batch = i % 6 == 0 ? 1 : rng_range(&rng, 2, 5),
                            .seed = (uint64_t)i};
        for (int b = 0; b < c.batch; b++) {
            c.qo_len[b] = rng_range(&rng, 1, 4);
            c.kv_len[b] = rng_range(&rng, c.qo_len[b], 600);
        }
        if (c.ragged) c.page_size = 1;
        if (case_o_is_fp8(&c)) c.scale = SCALE_NONE; /* values of about 1 fit o_scale */
        c = fitted(&c);
        (void)device_case_check(g, &c);
        if (c.ragged) continue;
        c = paged(&c);
        (void)device_case_check(g, &c);
    }
}

/* A request's last pages have ids beyond the pool: it is as if it ended before them. */
static void pages_that_are_not_there_are_skipped(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    enum { KEPT = 5 };
    for (int i = 0; i < 4; i++) { /* clusters, whole pages, rows, tokens */
        attention_case c = {.group_size = 8,
                            .num_kv_heads = i == 1 ? 8 : 2,
                            .head_dim = 64,
                            .q_dtype = KV8_BF16,
                            .k_dtype = KV8_E4M3,
                            .v_dtype = KV8_E4M3,
                            .page_size = i == 3 ? 7 : 16,
                            .window_left = -1,
                            .dense_table = true,
                            .batch = i == 0 ? 1 : 2,
                            .qo_len = {1, 1},
                            .kv_len = {300, 90},
                            .seed = 3};
        if (i == 1) fill_batch(&c);
        static attention_inputs in;
        case_make(&in, &c);
        union {
            const int32_t *in;
            int32_t *out;
        } lens = {.in = in.pages.seq_lens}, table = {.in = in.pages.block_table};
        lens.out[0] = KEPT * c.page_size; /* not causal: rows see all there is */
        assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
        lens.out[0] = 300;
        for (int32_t page = KEPT; page * c.page_size < 300; page++)
            table.out[page] = in.num_pages + page * 1000;
        const size_t rows = (size_t)(in.total_q * in.num_qo_heads), dim = 64;
        device_inputs d =
            device_inputs_make(g, &in, device_round(rows * dim * 4) + device_round(rows * 4) + 256);
        kv8_attention_args args = device_case_args(&d);
        d.k.num_pages = d.v.num_pages = in.num_pages;
        args.o = d.ends;
        args.o_stride_head = (int64_t)dim, args.o_stride_row = in.num_qo_heads * (int64_t)dim;
        args.lse = (float *)(void *)(d.ends + device_round(rows * dim * 4));
        args.bad_pages =
            (uint32_t *)(void *)(d.ends + device_round(rows * dim * 4) + device_round(rows * 4));
        assert_ok(kv8_stream_fill(g->stream, args.bad_pages, 0, sizeof *args.bad_pages));
        kv8_attention_device_plan *plan = NULL;
        assert_ok(kv8_attention_device_plan_create(&plan, g->device, &in.spec, NULL));
        void *const workspace = gpu_alloc(g, kv8_attention_device_workspace_size(plan));
        assert_ok(kv8_attention_device_workspace_init(plan, g->stream, workspace));
        assert_ok(kv8_attention_device_prepare(plan, g->stream, &args, workspace));
        assert_ok(kv8_attention_device_run(plan, g->stream, &args, workspace));
        float *const o = calloc(rows * dim, sizeof *o), *const lse = calloc(rows, sizeof *lse);
        uint32_t bad_pages = 0;
        gpu_download(g, o, args.o, rows * dim * sizeof *o);
        gpu_download(g, lse, args.lse, rows * sizeof *lse);
        gpu_download(g, &bad_pages, args.bad_pages, sizeof bad_pages);
        case_compare_within(&in, case_f16_bounds, KV8_ISA_BEST, o, lse);
        assert_true(bad_pages >= (uint32_t)(300 / c.page_size + 1 - KEPT));
        free(o);
        free(lse);
        kv8_device_free(g->device, workspace);
        kv8_device_free(g->device, d.memory);
        kv8_attention_device_plan_destroy(plan);
        case_free(&in);
    }
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        SWEEPS,
        cmocka_unit_test(every_combination_is_right_or_refused),
        cmocka_unit_test(one_request_of_few_lengths),
        cmocka_unit_test(one_request_of_every_length),
        cmocka_unit_test(a_graph_follows_the_lengths),
        cmocka_unit_test(a_graph_of_whole_pages_follows_them),
        cmocka_unit_test(whatever_a_run_asks),
        cmocka_unit_test(zeros_in_v_have_a_weight),
        cmocka_unit_test(windows_of_few_keys),
        cmocka_unit_test(k_and_v_of_two_formats),
        cmocka_unit_test(pages_that_are_not_there_are_skipped),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("attention_device", tests, open_device, gpu_close);
}
