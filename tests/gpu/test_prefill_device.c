/* test_prefill_device.c - the prefill kernels against the f64 oracle on the same bytes: a walk over
 * formats, layouts, page sizes, windows, sinks, caps, scales and ragged batches in which everything
 * that nobody may see is NaN; splits; graphs whose lengths change; refusals. All of it on both
 * paths, wgmma and mma.sync, and on the latter what it alone takes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_device_case.h"

static void every_edge_of_a_tile(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t lens[] = {1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 385};
    for (int i = 0; i < num_formats(); i++) {
        for (int32_t head_dim = 64; head_dim <= 128; head_dim += 64) {
            attention_case c = prefill_case(i, head_dim);
            c.batch = sizeof lens / sizeof lens[0];
            for (int b = 0; b < c.batch; b++) {
                c.kv_len[b] = lens[b];
                c.qo_len[b] = b % 3 == 0 ? 1 : b % 3 == 1 ? (lens[b] + 1) / 2 : lens[b] / 8;
            }
            c.seed = (uint64_t)(10 * i + head_dim);
            check(g, &c, 0);
        }
    }
}

static int32_t pick(test_rng *rng, const int32_t *values, int32_t n) {
    return values[rng_range(rng, 0, n - 1)];
}

static void options_at_random(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t pages[] = {1, 2, 7, 16, 64}, windows[] = {-1, -1, 0, 1, 127, 128, 300};
    static const int32_t groups[] = {1, 3, 4, 8, 64};
    test_rng rng = {2026};
    for (int i = 0; i < 156; i++) {
        attention_case c = prefill_case(i % num_formats(), rng_range(&rng, 1, 2) * 64);
        c.group_size = pick(&rng, groups, 5);
        c.num_kv_heads = c.group_size > 8 ? 1 : rng_range(&rng, 1, 3);
        if (c.q_dtype == KV8_BF16 && c.k_dtype != KV8_BF16 && rng_range(&rng, 0, 1))
            c.q_dtype = KV8_F16;
        if (rng_range(&rng, 0, 2) == 0) c.o_dtype = KV8_F16;
        if (i % 6 == 1) c.o_dtype = i % 12 == 1 ? KV8_E4M3 : KV8_E5M2;
        c.key_ranges = i % 5 == 2;
        c.mask = i % 7 == 3 ? MASK_TREE : i % 7 == 5 ? MASK_RANDOM : MASK_NONE;
        c.page_size = pick(&rng, pages, 5);
        c.window_left = pick(&rng, windows, 7);
        c.causal = rng_range(&rng, 0, 4) != 0 && c.mask != MASK_TREE;
        c.right = c.causal ? 0 : rng_range(&rng, 0, 1) * 40;
        c.soft_cap = rng_range(&rng, 0, 3) == 0 ? 20 : 0;
        c.sm_scale = rng_range(&rng, 0, 5) == 0 ? -0.2f : 0;
        c.sink = (sink_kind)rng_range(&rng, 0, SINK_KINDS - 1);
        c.scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1);
        if (case_o_is_fp8(&c)) c.scale = SCALE_NONE; /* values of about 1 fit o_scale */
        c.layout = (layout_kind)rng_range(&rng, 0, 1);
        c.dense_table = rng_range(&rng, 0, 1);
        c.batch_invariant = rng_range(&rng, 0, 2) == 0;
        c.batch = rng_range(&rng, 1, 6);
        for (int b = 0; b < c.batch; b++) {
            c.kv_len[b] =
                rng_range(&rng, 0, 4) == 0 ? rng_range(&rng, 0, 3) : rng_range(&rng, 1, 420);
            c.qo_len[b] =
                rng_range(&rng, 0, 2) == 0 ? rng_range(&rng, 0, 1) : rng_range(&rng, 1, 60);
        }
        c.seed = (uint64_t)i;
        check(g, &c, rng_range(&rng, 0, 2));
    }
}

/* Every fifth page has an id beyond the pool: its keys are skipped, as a mask would. */
static void pages_that_are_not_there_are_skipped(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < 2 * num_formats(); i++) {
        attention_case c = prefill_case(i / 2, i % 2 == 0 ? 64 : 128);
        c.seed = 1; /* num_pages is known */
        c.kv_len[0] = i % 3 == 0 ? 2000 : 300;
        c.window_left = i % 4 == 3 ? 150 : -1;
        c.page_size = i % 5 == 4 ? 7 : 16;
        static attention_inputs in;
        case_make(&in, &c);
        union {
            const int32_t *in;
            int32_t *out;
        } ids = {.in = in.pages.page_indices};
        const int32_t num_keys = c.kv_len[0], num_rows = c.qo_len[0];
        const size_t num_bits = (size_t)num_keys * (size_t)num_rows;
        uint8_t *const bits = malloc(num_bits / 8 + 1);
        memset(bits, 0xff, num_bits / 8 + 1);
        uint32_t num_missing = 0;
        for (int32_t key = 0; key < num_keys; key++) {
            const int32_t page = key / c.page_size;
            if (page % 5 != 2) continue;
            ids.out[page] = page % 2 ? in.num_pages + page : KV8_NO_PAGE;
            const int32_t seen = c.window_left < 0 ? 0 : num_keys - num_rows - c.window_left;
            num_missing += key % c.page_size == 0 && key >= seen;
            for (int32_t bit = key; bit < num_keys * num_rows; bit += num_keys)
                bits[bit / 8] &= (uint8_t) ~(1u << (bit % 8));
        }
        const int64_t indptr[2] = {0, (int64_t)num_bits / 8 + 1};
        kv8_attention_spec masked = in.spec;
        kv8_attention_args args = in.args;
        masked.has_mask = 1;
        args.mask_bits = bits;
        args.mask_indptr = indptr;
        assert_ok(kv8_attention_reference(&masked, &args, in.ref_o, in.ref_lse));
        free(bits);
        const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
        float *const o = calloc(rows * (size_t)c.head_dim, sizeof *o);
        float *const lse = calloc(rows, sizeof *lse);
        uint32_t *const bad_pages = gpu_alloc(g, sizeof *bad_pages), count = 0;
        assert_ok(kv8_stream_fill(g->stream, bad_pages, 0, sizeof *bad_pages));
        in.args.bad_pages = bad_pages;
        run_once(g, &in, 0, o, lse);
        compare(&in, o, lse);
        gpu_download(g, &count, bad_pages, sizeof count);
        assert_true(count >= num_missing && num_missing > 0);
        kv8_device_free(g->device, bad_pages);
        free(o);
        free(lse);
        case_free(&in);
    }
}

/* Few rows over many keys: every row is split, on any GPU. */
static void few_rows_are_split(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats(); i++) {
        attention_case c = prefill_case(i, i % 2 == 0 ? 64 : 128);
        c.batch = 3;
        c.qo_len[0] = 9, c.kv_len[0] = 5000;
        c.qo_len[1] = 1, c.kv_len[1] = 3001;
        c.qo_len[2] = 2, c.kv_len[2] = 2;
        c.sink = SINK_WITH_INFINITIES;
        check(g, &c, 0);
        c.batch_invariant = true;
        check(g, &c, 0);
        c.window_left = 1500;
        check(g, &c, 0);
    }
}

/* Fewer items than blocks, of which equal splits would leave many idle; more; so many that blocks
 * take most of them whole, from the queue. */
static void items_fewer_and_more_than_blocks(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const struct {
        int32_t heads, batch, kv_len;
    } cases[] = {{68, 1, 2200}, {64, 3, 1300}, {64, 40, 150}};
    for (int i = 0; i < 3 * num_formats(); i += 5) {
        attention_case c = prefill_case(i / 3, i % 4 == 0 ? 64 : 128);
        c.group_size = 1;
        c.num_kv_heads = cases[i % 3].heads;
        c.batch = cases[i % 3].batch;
        for (int b = 0; b < c.batch; b++) {
            c.qo_len[b] = 2 + b % 2;
            c.kv_len[b] = cases[i % 3].kv_len - 3 * b;
        }
        check(g, &c, 0);
    }
}

/* Scores that grow along the keys: the running maximum rises far beyond what P may lag behind. */
static void maxima_rise(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats(); i++) {
        attention_case c = prefill_case(i, 64);
        c.sm_scale = 4;
        c.kv_len[0] = 900;
        c.qo_len[0] = 70;
        check(g, &c, 0);
    }
}

/* NaN in K or V of the newest token, which the last row alone may see; infinities anywhere. */
static void what_is_not_finite_stays_where_it_is_seen(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats(); i++) {
        attention_case c = prefill_case(i, i % 2 == 0 ? 128 : 64);
        c.nan_newest = true;
        c.batch = 5;
        c.qo_len[1] = 20, c.kv_len[1] = 150;
        c.qo_len[2] = 2, c.kv_len[2] = 2;
        c.qo_len[3] = 5, c.kv_len[3] = 2000;
        c.qo_len[4] = 1, c.kv_len[4] = 1;
        check(g, &c, 0);
        c.sink = SINK_WITH_INFINITIES;
        check(g, &c, 0);
        c.sink = SINK_NONE;
        c.qo_len[3] = 9, c.kv_len[3] = 4; /* rows without a key beside one that sees NaN */
        check(g, &c, 0);
        c.nan_newest = false;
        c.infinities = c.k_dtype == KV8_E5M2;
        c.qo_len[0] = 17;
        check(g, &c, 0);
    }
}

/* Writes K's and V's rows of every key, by value(rng, key, d, is_v). */
static void plant(attention_inputs *in, float (*value)(test_rng *, int32_t, int32_t, bool)) {
    const attention_case *const c = in->c;
    union {
        const void *in;
        uint8_t *out;
    } data[2] = {{.in = in->k.data}, {.in = in->v.data}};
    test_rng rng = {11};
    for (int32_t key = 0; key < c->kv_len[0]; key++) {
        const int64_t page = in->pages.page_indices[key / c->page_size];
        for (int v = 0; v < 2; v++) {
            const kv8_paged *const p = v ? &in->v : &in->k;
            const int64_t at = page * p->stride_page + key % c->page_size * p->stride_slot;
            for (int32_t d = 0; d < c->head_dim; d++)
                case_store(c->k_dtype, data[v].out, at + d, value(&rng, key, d, v));
        }
    }
}

static float values_of_one(test_rng *rng, int32_t key, int32_t d, bool is_v) {
    (void)key, (void)d;
    return is_v ? 1.0f : rng_normal(rng);
}
/* The sum that divides is of the P that multiply, whatever they were rounded to. */
static void fp8_means_of_ones_are_one(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < 4; i++) {
        attention_case c = prefill_case(FP8 + i % 2, i < 2 ? 64 : 128);
        c.num_kv_heads = 1;
        c.kv_len[0] = 1900;
        c.sm_scale = 1;
        c.sink = SINK_NONE;
        c.scale = SCALE_NONE;
        c.batch_invariant = i % 2;
        static attention_inputs in;
        case_make(&in, &c);
        plant(&in, values_of_one);
        const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
        float *const o = calloc(rows * (size_t)c.head_dim, sizeof *o);
        float *const lse = calloc(rows, sizeof *lse);
        run_once(g, &in, i / 2, o, lse);
        for (size_t at = 0; at < rows * (size_t)c.head_dim; at++)
            if (!(fabsf(o[at] - 1.0f) <= 1e-6f))
                fail_msg("o[%zu] is %.9g, not 1", at, (double)o[at]);
        free(o);
        free(lse);
        case_free(&in);
    }
}

/* Where needles lie among 131072 keys, and which way Q looks for them. */
enum { HAYSTACK = 131072 };
static bool is_needle(int32_t key) {
    return key % 13001 == 777;
}
static float direction(int32_t d) {
    return d * 7 % 13 < 6 ? 1.0f : -1.0f;
}
/* V of other keys drifts from 0.5 to 1.5: sums that lose what comes late show it. */
static float haystack(test_rng *rng, int32_t key, int32_t d, bool is_v) {
    if (!is_v) return is_needle(key) ? direction(d) : 0.9f * rng_normal(rng);
    if (is_needle(key)) return d % 2 ? 3.0f : -2.0f;
    return 0.5f + (float)key / HAYSTACK + 0.3f * rng_normal(rng);
}
/* A dozen needles that together weigh about as much as all the other keys, in one piece and in
 * many. */
static void fp8_finds_needles_among_131072_keys(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < 4; i++) {
        attention_case c = prefill_case(FP8 + i % 2, i < 2 ? 128 : 64);
        c.num_kv_heads = 1;
        c.group_size = 2;
        c.qo_len[0] = 4;
        c.kv_len[0] = HAYSTACK;
        c.sm_scale = c.head_dim == 64 ? 0.16f : 0.08f;
        c.sink = SINK_NONE;
        c.scale = SCALE_NONE;
        c.batch_invariant = i % 2 == 0;
        static attention_inputs in;
        case_make(&in, &c);
        union {
            const void *in;
            uint8_t *out;
        } q = {.in = in.args.q};
        for (int64_t row = 0; row < in.total_q; row++) {
            for (int64_t h = 0; h < in.num_qo_heads; h++) {
                for (int32_t d = 0; d < c.head_dim; d++)
                    case_store(KV8_E4M3, q.out,
                               row * in.args.q_stride_row + h * in.args.q_stride_head + d,
                               direction(d) * (1.0f + 0.125f * (float)((d + row) % 2)));
            }
        }
        for (int32_t r = 0; r < in.total_q * in.num_qo_heads; r++)
            ((union {
                const float *in;
                float *out;
            }){.in = in.args.q_scale})
                .out[r] = 0.96f;
        plant(&in, haystack);
        check_made(g, &in, 0);
        case_free(&in);
    }
}

/* The public plan takes these kernels where its bounds speak of many rows, and says so. */
static void the_plan_chooses(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    attention_case c = prefill_case(E4M3_PAGES, 64);
    static attention_inputs in;
    case_make(&in, &c);
    char text[256];
    for (int many = 0; many < 2; many++) {
        kv8_attention_spec spec = in.spec;
        if (!many) spec.max_batch = spec.max_total_q;
        kv8_attention_device_plan *plan = NULL;
        assert_ok(kv8_attention_device_plan_create(&plan, g->device, &spec, NULL));
        assert_ok(kv8_attention_device_describe(plan, NULL, text, sizeof text));
        assert_int_equal(strstr(text, "kv8_prefill_f16_e4m3_d64__sm90") != NULL, many);
        kv8_attention_device_plan_destroy(plan);
    }
    case_free(&in);
}

static void a_graph_follows_the_lengths(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    attention_case c = prefill_case(E4M3_PAGES, 64);
    c.batch = 2;
    c.qo_len[0] = 30, c.kv_len[0] = 700;
    c.qo_len[1] = 50, c.kv_len[1] = 290;
    c.dense_table = true;
    static attention_inputs in;
    case_make(&in, &c);
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &in.spec, kernels, NULL));
    gpu_case on_gpu;
    upload(g, &in, plan, 0, &on_gpu);
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(kv8_attention_device_prepare(plan, g->stream, &on_gpu.args, on_gpu.workspace));
    assert_ok(kv8_attention_device_run(plan, g->stream, &on_gpu.args, on_gpu.workspace));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
    float *const o = calloc(rows * (size_t)in.v_head_dim + 1, sizeof *o);
    float *const lse = calloc(rows + 1, sizeof *lse);
    union {
        const int32_t *in;
        int32_t *out;
    } lens = {.in = in.pages.seq_lens};
    for (int step = 0; step < 3; step++) {
        lens.out[0] = 700 - 131 * step;
        lens.out[1] = 290 - 40 * step;
        assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
        assert_ok(kv8_stream_copy(g->stream, device_pointer(&on_gpu.inputs, lens.in), lens.in, 8));
        poison(g, &in, plan, &on_gpu);
        assert_ok(kv8_graph_launch(graph, g->stream));
        fetch(g, &in, &on_gpu, o, lse);
        compare(&in, o, lse);
    }
    kv8_graph_destroy(graph);
    free(o);
    free(lse);
    gpu_case_free(g, &in, &on_gpu);
    kv8_attention_device_plan_destroy(plan);
    case_free(&in);
}

/* batch_invariant: the bits of a request do not depend on its company. */
static void company_changes_no_bit(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    attention_case c = prefill_case(E4M3_PAGES, 128);
    c.batch_invariant = true;
    c.kv_len[0] = 1500;
    float *results[2] = {NULL, NULL};
    for (int company = 0; company < 2; company++) {
        c.batch = 1 + 5 * company;
        for (int b = 1; b < c.batch; b++) c.qo_len[b] = 1 + b * 7, c.kv_len[b] = 333 * b;
        c.scale = SCALE_NONE;
        static attention_inputs in;
        case_make(&in, &c);
        /* The first request's bytes, wherever the case put them. */
        kv8_attention_device_plan *plan = NULL;
        assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &in.spec, kernels, NULL));
        union {
            const void *in;
            uint8_t *out;
        } k = {.in = in.k.data}, v = {.in = in.v.data}, q = {.in = in.args.q};
        test_rng rng = {5};
        for (int32_t key = 0; key < c.kv_len[0]; key++) {
            const int64_t page = in.pages.page_indices[key / c.page_size];
            const int64_t at = page * in.k.stride_page + key % c.page_size * in.k.stride_slot;
            for (int64_t i = 0; i < c.num_kv_heads * c.head_dim; i++) {
                case_store(KV8_E4M3, k.out, at + i, rng_normal(&rng));
                case_store(KV8_E4M3, v.out, at + i, rng_normal(&rng));
            }
        }
        for (int64_t i = 0; i < c.qo_len[0] * in.args.q_stride_row; i++)
            case_store(KV8_BF16, q.out, i, rng_normal(&rng));
        for (int32_t h = 0; h < in.num_qo_heads; h++) in.sinks[h] = (float)h / 4;
        gpu_case on_gpu;
        upload(g, &in, plan, 0, &on_gpu);
        const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
        results[company] = calloc(rows * (size_t)in.v_head_dim, sizeof(float));
        float *const lse = calloc(rows, sizeof *lse);
        assert_ok(kv8_attention_device_prepare(plan, g->stream, &on_gpu.args, on_gpu.workspace));
        assert_ok(kv8_attention_device_run(plan, g->stream, &on_gpu.args, on_gpu.workspace));
        fetch(g, &in, &on_gpu, results[company], lse);
        free(lse);
        gpu_case_free(g, &in, &on_gpu);
        kv8_attention_device_plan_destroy(plan);
        case_free(&in);
    }
    assert_memory_equal(results[0], results[1],
                        sizeof(float) * (size_t)(c.qo_len[0] * 16 * c.head_dim));
    free(results[0]);
    free(results[1]);
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    const attention_case c = prefill_case(E4M3_PAGES, 64);
    static attention_inputs in;
    case_make(&in, &c);
    kv8_attention_device_plan *plan = NULL;
#define SPEC_REFUSED(change)                                                             \
    do {                                                                                 \
        kv8_attention_spec spec = in.spec;                                               \
        spec.change;                                                                     \
        assert_refused(                                                                  \
            kv8_attention_device_plan_create_of(&plan, g->device, &spec, kernels, NULL), \
            KV8_ERR_UNSUPPORTED, kernels);                                               \
    } while (0)
    SPEC_REFUSED(q_dtype = KV8_F32);
    if (kernels == on_wgmma) {
        SPEC_REFUSED(q_dtype = KV8_E4M3; spec.k_dtype = spec.v_dtype = KV8_INT8);
        SPEC_REFUSED(v_dtype = KV8_E5M2);
        SPEC_REFUSED(v_head_dim = 32);
        SPEC_REFUSED(head_dim = 80);
        SPEC_REFUSED(k_dtype = spec.v_dtype = KV8_E4M3FNUZ);
        SPEC_REFUSED(k_dtype = spec.v_dtype = KV8_BF16; spec.q_dtype = KV8_F16);
    } else {
        SPEC_REFUSED(q_dtype = KV8_E4M3);
        SPEC_REFUSED(v_dtype = KV8_F32);
        SPEC_REFUSED(v_head_dim = 40);
        SPEC_REFUSED(head_dim = 272);
        SPEC_REFUSED(k_dtype = KV8_BF16; spec.q_dtype = KV8_F16);
        SPEC_REFUSED(k_dtype = KV8_BF16; spec.v_dtype = KV8_F16);
    }
#undef SPEC_REFUSED
    assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &in.spec, kernels, NULL));
    gpu_case on_gpu;
    upload(g, &in, plan, 0, &on_gpu);
#define ARGS_REFUSED(change, status, part)                                                         \
    do {                                                                                           \
        kv8_attention_args args = on_gpu.args;                                                     \
        kv8_paged k = on_gpu.inputs.k, v = on_gpu.inputs.v;                                        \
        kv8_page_table pages = on_gpu.inputs.pages;                                                \
        args.k = &k, args.v = &v, args.pages = &pages;                                             \
        change;                                                                                    \
        assert_refused(kv8_attention_device_run(plan, g->stream, &args, on_gpu.workspace), status, \
                       part);                                                                      \
    } while (0)
    ARGS_REFUSED(args.batch = 2, KV8_ERR_INVALID, "batch is 2");
    ARGS_REFUSED(args.qo_indptr = NULL, KV8_ERR_INVALID, "qo_indptr is NULL");
    ARGS_REFUSED(pages.page_indptr = NULL, KV8_ERR_INVALID, "0 of page_indptr");
    ARGS_REFUSED(k.data = NULL, KV8_ERR_INVALID, "k.data is NULL");
    ARGS_REFUSED(args.q_scale = in.sinks, KV8_ERR_INVALID, "q_scale is set");
    ARGS_REFUSED(v.stride_head += 3, KV8_ERR_UNSUPPORTED, "no kernel");
    ARGS_REFUSED(k.stride_page *= -1, KV8_ERR_UNSUPPORTED, "no kernel");
    ARGS_REFUSED(k.data = (const uint8_t *)on_gpu.inputs.k.data + 1, KV8_ERR_UNSUPPORTED,
                 "no kernel");
#undef ARGS_REFUSED
    gpu_case_free(g, &in, &on_gpu);
    kv8_attention_device_plan_destroy(plan);
    case_free(&in);
}

/* What the wgmma kernels do not take: any two formats, any two head_dims. */
static void any_formats_and_head_dims(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype all[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_F16, KV8_E5M2, KV8_E4M3FNUZ};
    static const int32_t dims[] = {16, 48, 64, 80, 96, 112, 128, 192, 256};
    static const int32_t pages[] = {1, 7, 16, 64}, windows[] = {-1, -1, 5, 127};
    test_rng rng = {1776};
    for (int i = 0; i < 180; i++) {
        attention_case c = prefill_case(E4M3_PAGES, dims[i % 9]);
        c.k_dtype = all[i % 6];
        c.v_dtype = all[i / 6 % 6];
        const bool bf16 = c.k_dtype == KV8_BF16 || c.v_dtype == KV8_BF16;
        if (bf16 && (c.k_dtype == KV8_F16 || c.v_dtype == KV8_F16)) continue;
        if (!bf16 && i % 4 == 0) c.q_dtype = KV8_F16;
        if (i % 3 == 0) c.v_head_dim = pick(&rng, dims, 9);
        c.group_size = rng_range(&rng, 1, 9);
        c.num_kv_heads = rng_range(&rng, 1, 2);
        c.page_size = pick(&rng, pages, 4);
        c.window_left = pick(&rng, windows, 4);
        c.mask = (mask_kind)rng_range(&rng, 0, MASK_KINDS - 1);
        c.causal = c.mask != MASK_TREE && i % 5 != 0;
        c.key_ranges = i % 4 == 1;
        c.soft_cap = i % 7 == 0 ? 20 : 0;
        c.sink = (sink_kind)rng_range(&rng, 0, SINK_KINDS - 1);
        c.scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1);
        c.layout = (layout_kind)(i % 2);
        c.dense_table = rng_range(&rng, 0, 1);
        c.nan_newest = i % 6 == 1;
        c.extremes = i % 8 == 1 && !c.nan_newest;
        c.batch = rng_range(&rng, 1, 4);
        for (int b = 0; b < c.batch; b++) {
            c.kv_len[b] = rng_range(&rng, 1, 300);
            c.qo_len[b] = rng_range(&rng, 1, 40);
        }
        c.seed = (uint64_t)i;
        check(g, &c, rng_range(&rng, 0, 2));
    }
}

/* The plan takes mma.sync where nothing else is better than the general kernel. */
static void the_plan_chooses_mma(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    attention_case c = prefill_case(E4M3_PAGES, 96);
    c.v_dtype = KV8_INT8;
    static attention_inputs in;
    case_make(&in, &c);
    for (int few = 0; few < 2; few++) {
        kv8_attention_spec spec = in.spec;
        if (few) spec.max_batch = spec.max_total_q;
        char text[256];
        kv8_attention_device_plan *plan = NULL;
        assert_ok(kv8_attention_device_plan_create(&plan, g->device, &spec, NULL));
        assert_ok(kv8_attention_device_describe(plan, NULL, text, sizeof text));
        assert_non_null(strstr(text, "kv8_prefill_f16_any_d96__sm80"));
        kv8_attention_device_plan_destroy(plan);
    }
    case_free(&in);
}

/* Named by group too, so that a pattern may choose one. */
#define ON(GROUP, TEST) \
    { #GROUP "." #TEST, TEST, NULL, NULL, NULL }
#define ON_BOTH(GROUP)                                                                            \
    ON(GROUP, every_edge_of_a_tile), ON(GROUP, options_at_random), ON(GROUP, few_rows_are_split), \
        ON(GROUP, items_fewer_and_more_than_blocks), ON(GROUP, maxima_rise),                      \
        ON(GROUP, a_graph_follows_the_lengths), ON(GROUP, company_changes_no_bit),                \
        ON(GROUP, wrong_inputs_are_refused), ON(GROUP, pages_that_are_not_there_are_skipped),     \
        ON(GROUP, what_is_not_finite_stays_where_it_is_seen)

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest wgmma[] = {ON_BOTH(wgmma), ON(wgmma, the_plan_chooses),
                                       ON(wgmma, fp8_means_of_ones_are_one),
                                       ON(wgmma, fp8_finds_needles_among_131072_keys)};
    const struct CMUnitTest mma[] = {ON_BOTH(mma), ON(mma, any_formats_and_head_dims),
                                     ON(mma, the_plan_chooses_mma)};
    const int failed =
        cmocka_run_group_tests_name("prefill_device_wgmma", wgmma, open_wgmma, gpu_close);
    return failed + cmocka_run_group_tests_name("prefill_device_mma", mma, open_mma, gpu_close);
}
