/* test_append_device.c - rows appended on the GPU leave the bytes and the counts that the CPU's
 * append leaves: every source and cache format, layouts, dims, page sizes and scales, values from
 * the whole range of f32; a whole pool is compared, so that a stray write shows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/attention.h>

#include "cache_testing.h"
#include "gpu_testing.h"

enum { BATCH = 5, MAX_HEADS = 3, MAX_DIM = 576, MAX_ROWS = 80, MAX_PAGES = 172 };

/* Rows of each request: those there before, and those that are compared. One request adds none. */
static const int32_t num_before[BATCH] = {5, 0, 17, 3, 31};
static const int32_t indptr[BATCH + 1] = {0, 7, 8, 8, 41, MAX_ROWS};

typedef enum scale_kind { SCALES_NONE, SCALES_HEAD, SCALES_REQUEST, SCALES_WILD } scale_kind;

typedef struct append_case {
    kv8_dtype source, k, v;
    kv8_layout layout;
    int32_t num_heads, k_dim, v_dim, page_size;
    scale_kind scales;
    bool rotates, dense, wild; /* wild: any f32 bits */
} append_case;

/* Enough for 136 tokens of BATCH requests. */
static int32_t num_pages(const append_case *c) {
    return 160 / c->page_size + 12;
}

static const char *case_name(const append_case *c) {
    static char text[160];
    snprintf(text, sizeof text, "%s to %s, %s; %s, heads %d, dims %d, %d, page %d, scales %d%s%s",
             kv8_dtype_name(c->source), kv8_dtype_name(c->k), kv8_dtype_name(c->v),
             c->layout == KV8_LAYOUT_HND ? "HND" : "NHD", c->num_heads, c->k_dim, c->v_dim,
             c->page_size, (int)c->scales, c->rotates ? ", rotated" : "", c->wild ? ", wild" : "");
    return text;
}

/* --- inputs --- */

static float random_value(test_rng *rng, bool wild) {
    if (wild) {
        const uint32_t bits = (uint32_t)rng_u64(rng);
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    static const float odd[] = {NAN,   -NAN, INFINITY, -INFINITY, 0.0f,   -0.0f,
                                1e30f, 448,  449,      -464,      1e-38f, 1e-45f};
    if (rng_range(rng, 0, 399) == 0) return odd[rng_range(rng, 0, 11)];
    return rng_normal(rng) * 30;
}

/* Rows [MAX_ROWS, heads, dim] with gaps behind each head and row, as they come and as f32. */
typedef struct rows {
    float f32[MAX_ROWS * (MAX_HEADS * (MAX_DIM + 8) + 8)];
    uint8_t codes[sizeof(float) * MAX_ROWS * (MAX_HEADS * (MAX_DIM + 8) + 8)];
    int64_t stride_row, stride_head, size;
} rows;
static rows k_rows, v_rows;

static void fill_rows(rows *r, const append_case *c, int32_t dim, test_rng *rng) {
    r->stride_head = dim + 8;
    r->stride_row = c->num_heads * r->stride_head + 8;
    r->size = MAX_ROWS * r->stride_row;
    for (int64_t i = 0; i < r->size; i++) r->f32[i] = random_value(rng, c->wild);
    if (c->source == KV8_F32) {
        memcpy(r->codes, r->f32, (size_t)r->size * 4);
        return;
    }
    for (int64_t i = 0; i < r->size; i++) {
        uint16_t code = (uint16_t)rng_u64(rng);
        if (!c->wild)
            code = c->source == KV8_BF16 ? kv8_bf16_from_f32(r->f32[i]).bits
                                         : kv8_f16_from_f32(r->f32[i]).bits;
        memcpy(r->codes + 2 * i, &code, 2);
    }
    assert_ok(kv8_widen(KV8_ISA_SCALAR, c->source, r->codes, (size_t)r->size, r->f32));
}

static float random_scale(const append_case *c, test_rng *rng) {
    const float some = 0.01f + (float)rng_unit(rng);
    if (c->scales == SCALES_WILD) return ldexpf(some, rng_range(rng, -100, 100));
    return rng_range(rng, 0, 3) == 0 ? 0.25f : some;
}

/* --- the CPU's side --- */

typedef struct cpu_side {
    kv8_cache *cache;
    kv8_seq seqs[BATCH];
    kv8_paged view[2];
    size_t pool_bytes;
    int32_t page_indptr[BATCH + 1], page_indices[MAX_PAGES * BATCH], last_page_len[BATCH];
    int32_t block_table[BATCH * MAX_PAGES], seq_lens[BATCH];
    float scales[2][BATCH * MAX_HEADS];
} cpu_side;
static cpu_side cpu;

static void open_cpu(const append_case *c, test_rng *rng) {
    float scales[2][MAX_HEADS];
    for (int i = 0; i < 2 * MAX_HEADS; i++)
        scales[i / MAX_HEADS][i % MAX_HEADS] = random_scale(c, rng);
    kv8_cache_layer layer = {.k_dtype = c->k, .v_dtype = c->v, .window_left = -1};
    if (c->scales != SCALES_NONE) layer.k_scale = scales[0], layer.v_scale = scales[1];
    kv8_cache_options options = small_options(&layer, 1);
    options.isa = KV8_ISA_SCALAR;
    options.num_kv_heads = c->num_heads;
    options.k_head_dim = c->k_dim;
    options.v_head_dim = c->v_dim;
    options.layout = c->layout;
    options.page_size = c->page_size;
    options.num_pages = num_pages(c);
    assert_ok(kv8_cache_create(&cpu.cache, &options));
    for (int i = 0; i < BATCH; i++) {
        cpu.seqs[i] = new_seq(cpu.cache);
        if (c->scales != SCALES_REQUEST) continue;
        for (int h = 0; h < c->num_heads; h++) scales[0][h] = random_scale(c, rng);
        assert_ok(kv8_cache_seq_set_scales(cpu.cache, cpu.seqs[i], 0, scales[0], NULL));
    }
    /* Page by page in turn, so that neighbours in a sequence are no neighbours in the pool. */
    for (int32_t t = 0; t < 64; t++) {
        for (int i = 0; i < BATCH; i++) {
            const int32_t total = num_before[i] + indptr[i + 1] - indptr[i];
            if (t < total) assert_ok(kv8_cache_extend(cpu.cache, cpu.seqs[i], 1, NULL));
        }
    }
    cpu.view[0] = cpu.view[1] = (kv8_paged)KV8_PAGED_INIT;
    assert_ok(kv8_cache_layer_kv(cpu.cache, 0, &cpu.view[0], &cpu.view[1]));
    cpu.pool_bytes = (size_t)(num_pages(c) * cpu.view[0].stride_page) * kv8_dtype_size(c->k);
    memset((void *)(uintptr_t)cpu.view[0].data, 0xa5, cpu.pool_bytes);
    assert_ok(kv8_cache_page_table(cpu.cache, 0, cpu.seqs, BATCH, cpu.page_indptr, cpu.page_indices,
                                   MAX_PAGES * BATCH, cpu.last_page_len));
    assert_ok(kv8_cache_block_table(cpu.cache, 0, cpu.seqs, BATCH, cpu.block_table, MAX_PAGES,
                                    cpu.seq_lens));
    assert_ok(kv8_cache_scales(cpu.cache, 0, cpu.seqs, BATCH, cpu.scales[0], cpu.scales[1]));
}

static void append_on_cpu(const append_case *c, const float *cos_sin) {
    kv8_append append = {.num_seqs = BATCH,
                         .seqs = cpu.seqs,
                         .indptr = indptr,
                         .src_dtype = c->source,
                         .k = k_rows.codes,
                         .k_stride_row = k_rows.stride_row,
                         .k_stride_head = k_rows.stride_head,
                         .v = v_rows.codes,
                         .v_stride_row = v_rows.stride_row,
                         .v_stride_head = v_rows.stride_head};
    if (!c->rotates) {
        assert_ok(kv8_cache_append(cpu.cache, 0, &append));
        return;
    }
    kv8_rope_options options = KV8_ROPE_OPTIONS_INIT;
    options.kind = KV8_ROPE_DEFAULT;
    options.head_dim = c->k_dim;
    options.theta = 10000;
    kv8_rope *rope = NULL;
    assert_ok(kv8_rope_create(&rope, &options));
    append.src_dtype = KV8_F32;
    append.k = k_rows.f32;
    append.v = v_rows.f32;
    assert_ok(kv8_attention_append_rope(cpu.cache, 0, &append, rope, cos_sin));
    kv8_rope_destroy(rope);
}

/* --- the GPU's side --- */

enum { MAX_ON_GPU = 24 };
typedef struct gpu_side {
    void *ptr[MAX_ON_GPU];
    int count;
    uint8_t *pool;
    uint64_t *counters;
    kv8_append_plan *plan;
    kv8_append_args args;
    float *cos_sin;
} gpu_side;

static void *keep(gpu_side *on, void *ptr) {
    assert_true(on->count < MAX_ON_GPU);
    return on->ptr[on->count++] = ptr;
}
static void close_gpu_side(const gpu *g, gpu_side *on) {
    for (int i = 0; i < on->count; i++) kv8_device_free(g->device, on->ptr[i]);
    kv8_append_plan_destroy(on->plan);
}

/* The same view of the pool's copy. */
static kv8_paged moved(const kv8_paged *view, const uint8_t *pool) {
    const uint8_t *const base = cpu.view[0].data;
    kv8_paged there = *view;
    there.data = pool + ((const uint8_t *)view->data - base);
    if (view->row_scale != NULL)
        there.row_scale =
            (const void *)(pool + ((const uint8_t *)(const void *)view->row_scale - base));
    return there;
}

static void open_gpu_side(const gpu *g, gpu_side *on, const append_case *c, const float *cos_sin) {
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = c->num_heads;
    spec.k_head_dim = c->k_dim;
    spec.v_head_dim = c->v_dim;
    spec.page_size = c->page_size;
    spec.src_dtype = c->source;
    spec.k_dtype = c->k;
    spec.v_dtype = c->v;
    if (c->rotates)
        assert_ok(kv8_attention_append_rope_plan_create(&on->plan, g->device, &spec));
    else
        assert_ok(kv8_append_plan_create(&on->plan, g->device, &spec));
    on->pool = keep(on, gpu_upload(g, cpu.view[0].data, cpu.pool_bytes));
    const size_t counters_bytes = (size_t)(4 * c->num_heads) * sizeof(uint64_t);
    on->counters = keep(on, gpu_alloc(g, counters_bytes));
    assert_ok(kv8_stream_fill(g->stream, on->counters, 0, counters_bytes));
    if (c->rotates)
        on->cos_sin =
            keep(on, gpu_upload(g, cos_sin, sizeof(float) * (size_t)(MAX_ROWS * c->k_dim)));
    kv8_append_args *const a = &on->args;
    *a = (kv8_append_args)KV8_APPEND_ARGS_INIT;
#define UP(array) keep(on, gpu_upload(g, array, sizeof array))
    const size_t size = kv8_dtype_size(c->source);
    a->batch = BATCH;
    a->max_rows = MAX_ROWS + 3; /* a bound */
    a->indptr = UP(indptr);
    if (c->dense) {
        a->pages.block_table = UP(cpu.block_table);
        a->pages.block_table_stride = MAX_PAGES;
        a->pages.seq_lens = UP(cpu.seq_lens);
    } else {
        a->pages.page_indptr = UP(cpu.page_indptr);
        a->pages.page_indices = UP(cpu.page_indices);
        a->pages.last_page_len = UP(cpu.last_page_len);
    }
    a->k = keep(on, gpu_upload(g, k_rows.codes, (size_t)k_rows.size * size));
    a->k_stride_row = k_rows.stride_row;
    a->k_stride_head = k_rows.stride_head;
    a->v = keep(on, gpu_upload(g, v_rows.codes, (size_t)v_rows.size * size));
    a->v_stride_row = v_rows.stride_row;
    a->v_stride_head = v_rows.stride_head;
    a->k_pages = moved(&cpu.view[0], on->pool);
    a->v_pages = moved(&cpu.view[1], on->pool);
    if (c->scales != SCALES_NONE) {
        a->k_scale = UP(cpu.scales[0]);
        a->v_scale = UP(cpu.scales[1]);
        a->scale_stride_request = c->num_heads;
        a->scale_stride_head = 1;
    }
    a->counters = on->counters;
#undef UP
}

static kv8_status run(const gpu *g, const gpu_side *on) {
    return on->cos_sin != NULL
               ? kv8_attention_append_rope_plan_run(on->plan, g->stream, &on->args, on->cos_sin)
               : kv8_append_plan_run(on->plan, g->stream, &on->args);
}

/* --- comparing --- */

static uint8_t got_pool[15 * 64 * MAX_HEADS * (2 * MAX_DIM + 8) * 4];

/* A rotated NaN has any sign: element by element then, else all bytes of the pool. */
static void compare_pools(const gpu *g, const gpu_side *on, const append_case *c) {
    assert_true(cpu.pool_bytes <= sizeof got_pool);
    gpu_download(g, got_pool, on->pool, cpu.pool_bytes);
    const uint8_t *const want = cpu.view[0].data;
    const size_t size = kv8_dtype_size(c->k);
    for (size_t i = 0; i < cpu.pool_bytes; i++) {
        if (got_pool[i] == want[i]) continue;
        const size_t page_bytes = (size_t)cpu.view[0].stride_page * size;
        const size_t k_bytes = (size_t)(c->page_size * c->num_heads * c->k_dim) * size;
        if (c->rotates && c->k != KV8_INT8 && i % page_bytes < k_bytes) {
            float pair[2];
            const size_t at = i / size * size;
            assert_ok(kv8_widen(KV8_ISA_SCALAR, c->k, got_pool + at, 1, &pair[0]));
            assert_ok(kv8_widen(KV8_ISA_SCALAR, c->k, want + at, 1, &pair[1]));
            if (isnan(pair[0]) && isnan(pair[1])) continue;
        }
        fail_msg("%s: byte %zu of the pool (page %zu, %zu) is 0x%02x, must be 0x%02x", case_name(c),
                 i, i / page_bytes, i % page_bytes, got_pool[i], want[i]);
    }
}

static void compare_counters(const gpu *g, const gpu_side *on, const append_case *c) {
    uint64_t got[4 * MAX_HEADS];
    gpu_download(g, got, on->counters, (size_t)(4 * c->num_heads) * sizeof(uint64_t));
    for (int h = 0; h < c->num_heads; h++) {
        kv8_cache_counters want;
        assert_ok(kv8_cache_get_counters(cpu.cache, 0, h, &want));
        const uint64_t *const k = got + 2 * h, *const v = got + 2 * (c->num_heads + h);
        if (k[0] != want.k_clips || k[1] != want.k_nans || v[0] != want.v_clips ||
            v[1] != want.v_nans)
            fail_msg("%s: head %d counts %llu %llu %llu %llu, must be %llu %llu %llu %llu",
                     case_name(c), h, (unsigned long long)k[0], (unsigned long long)k[1],
                     (unsigned long long)v[0], (unsigned long long)v[1],
                     (unsigned long long)want.k_clips, (unsigned long long)want.k_nans,
                     (unsigned long long)want.v_clips, (unsigned long long)want.v_nans);
    }
}

static void fill_cos_sin(float *cos_sin, const append_case *c, test_rng *rng) {
    for (int32_t i = 0; i < MAX_ROWS * c->k_dim; i++)
        cos_sin[i] = (float)(2 * rng_unit(rng) - 1); /* any factors: the rotation is arithmetic */
}

static void check_case(const gpu *g, const append_case *c, uint64_t seed) {
    static float cos_sin[MAX_ROWS * MAX_DIM];
    test_rng rng = {seed};
    fill_rows(&k_rows, c, c->k_dim, &rng);
    fill_rows(&v_rows, c, c->v_dim, &rng);
    fill_cos_sin(cos_sin, c, &rng);
    open_cpu(c, &rng);
    gpu_side on = {0};
    open_gpu_side(g, &on, c, cos_sin);
    append_on_cpu(c, cos_sin);
    assert_ok(run(g, &on));
    compare_pools(g, &on, c);
    compare_counters(g, &on, c);
    close_gpu_side(g, &on);
    kv8_cache_destroy(cpu.cache);
}

/* --- the tests --- */

static int walk(const gpu *g, bool rotates, bool wild) {
    static const int32_t dims[][2] = {{64, 64},  {128, 128}, {80, 48},   {96, 128},
                                      {512, 16}, {45, 10},   {576, 512}, {10, 576}};
    static const int32_t page_sizes[] = {16, 1, 7, 64};
    int count = 0;
    for (int source = KV8_F32; source <= KV8_F16; source++) {
        for (int k = KV8_F32; k < KV8_DTYPE_COUNT; k++) {
            for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
                if (rotates && dims[d][0] % 2 != 0) continue;
                const append_case c = {
                    .source = (kv8_dtype)source,
                    .k = (kv8_dtype)k,
                    .v = (kv8_dtype)(KV8_F32 + (k + 2 + count) % (KV8_DTYPE_COUNT - KV8_F32)),
                    .layout = count % 2 == 0 ? KV8_LAYOUT_NHD : KV8_LAYOUT_HND,
                    .num_heads = 1 + count % MAX_HEADS,
                    .k_dim = dims[d][0],
                    .v_dim = dims[d][1],
                    .page_size = page_sizes[(count + k) % 4],
                    .scales = wild ? SCALES_WILD : (scale_kind)(count / 2 % 3),
                    .rotates = rotates,
                    .dense = count % 3 == 0,
                    .wild = wild,
                };
                check_case(g, &c, (uint64_t)(count + 1));
                count++;
            }
        }
    }
    return count;
}

static void bytes_equal_the_cpus(void **state) {
    printf("%d cases\n", walk(gpu_get_with_kernels(state), false, false));
}
static void bytes_equal_the_cpus_over_all_of_f32(void **state) {
    walk(gpu_get_with_kernels(state), false, true);
}
static void rotated_bytes_equal_the_cpus(void **state) {
    walk(gpu_get_with_kernels(state), true, false);
}
static void rotated_bytes_equal_the_cpus_over_all_of_f32(void **state) {
    walk(gpu_get_with_kernels(state), true, true);
}

/* A recorded run takes lengths, tables and rows as they are at replay. */
static void a_graph_follows_the_lengths(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = 1;
    spec.k_head_dim = 16;
    spec.page_size = 2;
    spec.src_dtype = KV8_F32;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    kv8_append_plan *plan = NULL;
    assert_ok(kv8_append_plan_create(&plan, g->device, &spec));
    enum { PAGES = 4, POOL = PAGES * 2 * 16 };
    struct {
        int32_t indptr[3], block_table[2 * 2], seq_lens[2];
    } table = {{0, 1, 3}, {2, KV8_NO_PAGE, 1, 3}, {2, 3}};
    float source[3 * 16];
    for (int i = 0; i < 3 * 16; i++) source[i] = (float)(1 + i / 16);
    uint8_t *const pool = gpu_alloc(g, 2 * POOL);
    int32_t *const on_gpu = gpu_upload(g, &table, sizeof table);
    float *const source_on_gpu = gpu_upload(g, source, sizeof source);
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = 2;
    args.max_rows = 3;
    args.indptr = on_gpu;
    args.pages.block_table = on_gpu + 3;
    args.pages.block_table_stride = 2;
    args.pages.seq_lens = on_gpu + 7;
    args.k = args.v = source_on_gpu;
    args.k_stride_row = args.k_stride_head = args.v_stride_row = args.v_stride_head = 16;
    args.k_pages =
        (kv8_paged){.data = pool, .stride_page = 32, .stride_slot = 16, .stride_head = 16};
    args.v_pages = args.k_pages;
    args.v_pages.data = pool + POOL;
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(kv8_stream_fill(g->stream, pool, 0, 2 * POOL));
    assert_ok(kv8_append_plan_run(plan, g->stream, &args));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    const uint8_t code[4] = {0, 0x38, 0x40, 0x44}; /* 0, 1, 2, 3 in e4m3 */
    /* Row of (page, slot): request 0 has page 2, request 1 pages 1 and 3. */
    static const uint8_t wanted[3][PAGES * 2] = {
        {0, 0, 0, 2, 0, 1, 3, 0}, /* lengths 2, 3: rows 1 and 2 are positions 1 and 2 */
        {0, 0, 2, 0, 1, 0, 0, 0}, /* lengths 1, 1, one row each */
        {0, 0, 0, 0, 0, 0, 0, 2}, /* lengths 3, 4: position 2 of request 0 has no page */
    };
    for (int step = 0; step < 3; step++) {
        if (step >= 1) table.indptr[2] = 2;
        table.seq_lens[0] = step == 0 ? 2 : step == 1 ? 1 : 3;
        table.seq_lens[1] = step == 0 ? 3 : step == 1 ? 1 : 4;
        assert_ok(kv8_stream_copy(g->stream, on_gpu, &table, sizeof table));
        assert_ok(kv8_graph_launch(graph, g->stream));
        uint8_t got[2 * POOL];
        gpu_download(g, got, pool, sizeof got);
        for (int i = 0; i < 2 * POOL; i++) {
            if (got[i] != code[wanted[step][i % POOL / 16]])
                fail_msg("step %d: byte %d is 0x%02x", step, i, got[i]);
        }
    }
    kv8_graph_destroy(graph);
    kv8_device_free(g->device, pool);
    kv8_device_free(g->device, on_gpu);
    kv8_device_free(g->device, source_on_gpu);
    kv8_append_plan_destroy(plan);
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_append_spec good = KV8_APPEND_SPEC_INIT, spec;
    good.num_kv_heads = 2;
    good.k_head_dim = 63;
    good.page_size = 16;
    good.src_dtype = KV8_BF16;
    good.k_dtype = KV8_E4M3;
    good.v_dtype = KV8_INT8;
    kv8_append_plan *plan = (kv8_append_plan *)1;
#define SPEC_REFUSED(change, status, part)                                                   \
    spec = good;                                                                             \
    change;                                                                                  \
    assert_refused(kv8_append_plan_create(&plan, g->device, &spec), KV8_ERR_##status, part); \
    assert_null(plan)
    SPEC_REFUSED(spec.struct_size = 8, INVALID, "struct_size is 8");
    SPEC_REFUSED(spec.src_dtype = KV8_E4M3, UNSUPPORTED, "src_dtype is e4m3");
    SPEC_REFUSED(spec.k_dtype = KV8_DTYPE_NONE, INVALID, "k_dtype is 0");
    SPEC_REFUSED(spec.num_kv_heads = 0, INVALID, "num_kv_heads is 0");
    SPEC_REFUSED(spec.page_size = 0, INVALID, "page_size 0");
    SPEC_REFUSED(spec.k_head_dim = 577, INVALID, "k_head_dim is 577");
    SPEC_REFUSED(spec.v_head_dim = -1, INVALID, "v_head_dim -1");
#undef SPEC_REFUSED
    assert_refused(kv8_append_plan_create(&plan, NULL, &good), KV8_ERR_INVALID, "device is NULL");
    assert_refused(kv8_attention_append_rope_plan_create(&plan, g->device, &good), KV8_ERR_INVALID,
                   "k_head_dim is 63, must be even");
    assert_ok(kv8_append_plan_create(&plan, g->device, &good));
    float *const some = gpu_alloc(g, 1024); /* never read: every call is refused */
    const int32_t *const table = (const void *)some;
    kv8_append_args fine = KV8_APPEND_ARGS_INIT, args;
    fine.batch = fine.max_rows = 1;
    fine.indptr = table;
    fine.pages.page_indptr = fine.pages.page_indices = fine.pages.last_page_len = table;
    fine.k = fine.v = fine.k_pages.data = fine.v_pages.data = some;
    fine.v_pages.row_scale = (const void *)some;
#define ARGS_REFUSED(change, part) \
    args = fine;                   \
    change;                        \
    assert_refused(kv8_append_plan_run(plan, g->stream, &args), KV8_ERR_INVALID, part)
    ARGS_REFUSED(args.struct_size = 8, "struct_size is 8");
    ARGS_REFUSED(args.batch = -1, "batch is -1");
    ARGS_REFUSED(args.max_rows = -1, "max_rows -1");
    ARGS_REFUSED(args.indptr = NULL, "indptr is NULL");
    ARGS_REFUSED(args.pages.page_indptr = NULL, "both NULL");
    ARGS_REFUSED(args.pages.block_table = table, "both set");
    ARGS_REFUSED(args.pages.last_page_len = NULL, "last_page_len is NULL");
    ARGS_REFUSED(args.k = NULL, "k is NULL");
    ARGS_REFUSED(args.v_pages.data = NULL, "v_pages.data is NULL");
    ARGS_REFUSED(args.v_pages.row_scale = NULL, "v_pages.row_scale is NULL");
#undef ARGS_REFUSED
    assert_refused(kv8_append_plan_run(NULL, g->stream, &fine), KV8_ERR_INVALID, "plan is NULL");
    assert_refused(kv8_append_plan_run(plan, NULL, &fine), KV8_ERR_INVALID, "stream is NULL");
    assert_refused(kv8_attention_append_rope_plan_run(plan, g->stream, &fine, some),
                   KV8_ERR_INVALID, "does not rotate K");
    assert_refused(kv8_attention_append_rope_plan_run(plan, g->stream, &fine, NULL),
                   KV8_ERR_INVALID, "cos_sin is NULL");
    args = fine;
    args.batch = 0;
    assert_ok(kv8_append_plan_run(plan, g->stream, &args));
    kv8_append_plan_destroy(plan);
    kv8_append_plan_destroy(NULL);
    good.k_head_dim = 64;
    assert_ok(kv8_attention_append_rope_plan_create(&plan, g->device, &good));
    assert_refused(kv8_append_plan_run(plan, g->stream, &fine), KV8_ERR_INVALID, "rotates K");
    kv8_append_plan_destroy(plan);
    kv8_device_free(g->device, some);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_equal_the_cpus),
        cmocka_unit_test(bytes_equal_the_cpus_over_all_of_f32),
        cmocka_unit_test(rotated_bytes_equal_the_cpus),
        cmocka_unit_test(rotated_bytes_equal_the_cpus_over_all_of_f32),
        cmocka_unit_test(a_graph_follows_the_lengths),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("append_device", tests, gpu_open, gpu_close);
}
