/* append_case.h - one append in every way that there is: what a cache stores for the rows, and the
 * args of a plan that must leave the same bytes in a copy of the cache's pool. The pool, the tables
 * and the rows lie where the test says, in host memory or a GPU's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_APPEND_CASE_H
#define KV8_APPEND_CASE_H

#include <kv8/append.h>

#include "cache_testing.h"

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
    bool rotates, interleaved, dense, mapped, wild; /* wild: any f32 bits */
} append_case;

/* Enough for 136 tokens of BATCH requests. */
static inline int32_t num_pages(const append_case *c) {
    return 160 / c->page_size + 12;
}

static const char *case_name(const append_case *c) {
    static char text[160];
    snprintf(text, sizeof text, "%s to %s, %s; %s, heads %d, dims %d, %d, page %d, scales %d%s%s%s",
             kv8_dtype_name(c->source), kv8_dtype_name(c->k), kv8_dtype_name(c->v),
             c->layout == KV8_LAYOUT_HND ? "HND" : "NHD", c->num_heads, c->k_dim, c->v_dim,
             c->page_size, (int)c->scales, c->rotates ? ", rotated" : "",
             c->mapped ? ", mapped" : "", c->wild ? ", wild" : "");
    return text;
}

/* --- inputs --- */

static inline float random_value(test_rng *rng, bool wild) {
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

static inline void fill_rows(rows *r, const append_case *c, int32_t dim, test_rng *rng) {
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

static inline float random_scale(const append_case *c, test_rng *rng) {
    const float some = 0.01f + (float)rng_unit(rng);
    if (c->scales == SCALES_WILD) return ldexpf(some, rng_range(rng, -100, 100));
    return rng_range(rng, 0, 3) == 0 ? 0.25f : some;
}

/* --- the cache's side --- */

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

static inline void open_cpu(const append_case *c, test_rng *rng) {
    float scales[2][MAX_HEADS];
    for (int i = 0; i < 2 * MAX_HEADS; i++)
        scales[i / MAX_HEADS][i % MAX_HEADS] = random_scale(c, rng);
    kv8_cache_layer layer = {
        .struct_size = sizeof layer, .k_dtype = c->k, .v_dtype = c->v, .window_left = -1};
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

static inline void append_on_cpu(const append_case *c, const float *cos_sin) {
    kv8_append append = {.struct_size = sizeof(kv8_append),
                         .num_seqs = BATCH,
                         .seqs = cpu.seqs,
                         .indptr = indptr,
                         .src_dtype = c->source,
                         .k = k_rows.codes,
                         .k_stride_row = k_rows.stride_row,
                         .k_stride_head = k_rows.stride_head,
                         .v = v_rows.codes,
                         .v_stride_row = v_rows.stride_row,
                         .v_stride_head = v_rows.stride_head};
    if (c->rotates) {
        append.src_dtype = KV8_F32;
        append.k = k_rows.f32;
        append.v = v_rows.f32;
        append.cos_sin = cos_sin;
        append.interleaved = c->interleaved;
    }
    assert_ok(kv8_cache_append(cpu.cache, 0, &append));
}

/* --- a plan's side --- */

/* Copies of host memory where the plan wants it; released by the test. */
typedef struct append_memory {
    void *(*copy)(void *cookie, const void *from, size_t bytes);
    void *cookie;
} append_memory;

typedef struct plan_side {
    uint8_t *pool;
    uint64_t *counters;
    kv8_append_args args;
    kv8_page_table pages;
    kv8_paged view[2];
} plan_side;

/* The same view of the pool's copy. */
static inline kv8_paged moved(const kv8_paged *view, const uint8_t *pool) {
    const uint8_t *const base = cpu.view[0].data;
    kv8_paged there = *view;
    there.data = pool + ((const uint8_t *)view->data - base);
    if (view->row_scale != NULL)
        there.row_scale =
            (const void *)(pool + ((const uint8_t *)(const void *)view->row_scale - base));
    return there;
}

static inline kv8_append_spec spec_of(const append_case *c) {
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = c->num_heads;
    spec.k_head_dim = c->k_dim;
    spec.v_head_dim = c->v_dim;
    spec.page_size = c->page_size;
    spec.src_dtype = c->source;
    spec.k_dtype = c->k;
    spec.v_dtype = c->v;
    return spec;
}

/* page * page_size + slot of every row, by the cache's tables. */
static inline void fill_slot_mapping(const append_case *c, int64_t *slots) {
    for (int b = 0; b < BATCH; b++) {
        for (int32_t row = indptr[b]; row < indptr[b + 1]; row++) {
            const int32_t position = cpu.seq_lens[b] - (indptr[b + 1] - row);
            const int32_t page = cpu.block_table[b * MAX_PAGES + position / c->page_size];
            slots[row] = (int64_t)page * c->page_size + position % c->page_size;
        }
    }
}

/* Before the cache's own append: the pool is copied as it is. */
static inline void open_plan_side(plan_side *on, const append_memory *m, const append_case *c,
                                  const float *cos_sin) {
    static const uint64_t zeros[4 * MAX_HEADS];
    static int64_t slots[MAX_ROWS + 3];
    *on = (plan_side){.args = KV8_APPEND_ARGS_INIT, .pages = KV8_PAGE_TABLE_INIT};
    kv8_append_args *const a = &on->args;
#define UP(array) m->copy(m->cookie, array, sizeof array)
    const size_t size = kv8_dtype_size(c->source);
    on->pool = m->copy(m->cookie, cpu.view[0].data, cpu.pool_bytes);
    on->counters = UP(zeros);
    a->batch = BATCH;
    a->max_rows = MAX_ROWS + 3; /* a bound */
    a->indptr = UP(indptr);
    if (c->mapped) {
        fill_slot_mapping(c, slots);
        a->slot_mapping = UP(slots);
    } else if (c->dense) {
        on->pages.block_table = UP(cpu.block_table);
        on->pages.block_table_stride = MAX_PAGES;
        on->pages.seq_lens = UP(cpu.seq_lens);
    } else {
        on->pages.page_indptr = UP(cpu.page_indptr);
        on->pages.page_indices = UP(cpu.page_indices);
        on->pages.last_page_len = UP(cpu.last_page_len);
    }
    if (!c->mapped) a->pages = &on->pages;
    a->k = m->copy(m->cookie, k_rows.codes, (size_t)k_rows.size * size);
    a->k_stride_row = k_rows.stride_row;
    a->k_stride_head = k_rows.stride_head;
    a->v = m->copy(m->cookie, v_rows.codes, (size_t)v_rows.size * size);
    a->v_stride_row = v_rows.stride_row;
    a->v_stride_head = v_rows.stride_head;
    for (int kv = 0; kv < 2; kv++) on->view[kv] = moved(&cpu.view[kv], on->pool);
    a->k_pages = &on->view[0];
    a->v_pages = &on->view[1];
    if (c->scales != SCALES_NONE) {
        a->k_scale = UP(cpu.scales[0]);
        a->v_scale = UP(cpu.scales[1]);
        a->scale_stride_request = c->num_heads;
        a->scale_stride_head = 1;
    }
    if (c->rotates)
        a->cos_sin = m->copy(m->cookie, cos_sin, sizeof(float) * (size_t)(MAX_ROWS * c->k_dim));
    a->interleaved = c->interleaved;
    a->counters = on->counters;
#undef UP
}

/* --- comparing --- */

/* The least K scale of the head that has element `at` of a page. */
static inline double least_scale(const append_case *c, size_t at) {
    const int32_t row = (int32_t)at / c->k_dim;
    const int32_t head = c->layout == KV8_LAYOUT_HND ? row / c->page_size : row % c->num_heads;
    double least = (double)cpu.scales[0][head];
    for (int b = 1; b < BATCH; b++)
        least = fmin(least, (double)cpu.scales[0][b * c->num_heads + head]);
    return least;
}

/* What K rotates to on two machines: a NaN has any sign, and on x86-64 what is subnormal counts as
 * 0 before the scale divides and behind. */
static inline bool rotates_alike(double a, double b, double scale) {
    const double tiny = 0x1p-125 / fmin(1, scale);
    if (isnan(a) && isnan(b)) return true;
    return fabs(a) < 0x1p25 * tiny && fabs(a - b) <= tiny + 0x1p-7 * fabs(a);
}

/* K that was rotated element by element, else all bytes of the pool. */
static inline void compare_pools(const uint8_t *got_pool, const append_case *c) {
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
            const double scale = least_scale(c, i % page_bytes / size);
            if (rotates_alike((double)pair[0], (double)pair[1], scale)) continue;
        }
        fail_msg("%s: byte %zu of the pool (page %zu, %zu) is 0x%02x, must be 0x%02x", case_name(c),
                 i, i / page_bytes, i % page_bytes, got_pool[i], want[i]);
    }
}

static inline void compare_counters(const uint64_t *got, const append_case *c) {
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

/* Rows, the cache and cos_sin of one case. */
static inline const float *open_append_case(const append_case *c, uint64_t seed) {
    static float cos_sin[MAX_ROWS * MAX_DIM];
    test_rng rng = {seed};
    fill_rows(&k_rows, c, c->k_dim, &rng);
    fill_rows(&v_rows, c, c->v_dim, &rng);
    for (int32_t i = 0; i < MAX_ROWS * c->k_dim; i++)
        cos_sin[i] = (float)(2 * rng_unit(&rng) - 1); /* any factors: the rotation is arithmetic */
    open_cpu(c, &rng);
    return cos_sin;
}

/* Calls `check` for cases of every kind; returns how many. */
static inline int walk_append_cases(bool rotates, bool wild,
                                    void (*check)(const append_case *c, uint64_t seed,
                                                  void *cookie),
                                    void *cookie) {
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
                    .interleaved = rotates && count / 3 % 2 == 0,
                    .dense = count % 3 == 0,
                    .mapped = count % 4 == 1,
                    .wild = wild,
                };
                check(&c, (uint64_t)(count + 1), cookie);
                count++;
            }
        }
    }
    return count;
}

#endif
