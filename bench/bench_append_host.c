/* bench_append_host.c - rows into pages in host memory by one thread: microseconds for clean rows,
 * the least of many runs, and how many times as long rows take that are all subnormal, from the
 * same memory and by turns.
 *
 * usage: bench_append_host [rows [runs]]   (512, 100; what the caches do not hold spreads far)
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "base_impl.h"

#include <kv8/append.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRY(call)                                                     \
    do {                                                              \
        if ((call) != KV8_OK) {                                       \
            fprintf(stderr, "%s: %s\n", #call, kv8_status_message()); \
            exit(1);                                                  \
        }                                                             \
    } while (0)

enum { HEADS = 8, DIM = 64, PAGE = 16 };

static void *take(size_t bytes) {
    void *const memory = calloc(1, bytes);
    if (memory == NULL) {
        perror("bench_append_host");
        exit(1);
    }
    return memory;
}

typedef struct rows {
    int32_t count;
    void *values[2]; /* [count, HEADS, DIM] of the source's dtype: clean, subnormal */
    void *source;    /* what is appended: one or the other */
    size_t bytes;
    float *cos_sin; /* [count, DIM] */
} rows;

static rows new_rows(kv8_dtype source, int32_t count) {
    const size_t n = (size_t)count * HEADS * DIM;
    rows r = {.count = count,
              .bytes = n * kv8_dtype_size(source),
              .cos_sin = take((size_t)count * DIM * sizeof(float))};
    r.source = take(r.bytes);
    for (int32_t i = 0; i < count; i++) {
        for (int32_t d = 0; d < DIM / 2; d++) {
            r.cos_sin[i * DIM + d] = cosf(0.01f * (float)i * (float)d);
            r.cos_sin[i * DIM + DIM / 2 + d] = sinf(0.01f * (float)i * (float)d);
        }
    }
    for (int kind = 0; kind < 2; kind++) {
        float *const values = take(n * sizeof *values);
        for (size_t i = 0; i < n; i++)
            values[i] = (sinf(1.37f * (float)i) + 0.3f) * (kind == 0 ? 1.0f : 1e-40f);
        r.values[kind] = values;
        if (source == KV8_F32) continue;
        kv8_narrow_counts ignored = {0};
        r.values[kind] = take(r.bytes);
        TRY(kv8_narrow(KV8_ISA_BEST, source, values, n, 1.0f, r.values[kind], &ignored));
        free(values);
    }
    return r;
}

typedef struct pool {
    kv8_paged view;
    void *codes, *row_scales;
} pool;

static pool new_pool(kv8_dtype dtype, int32_t num_pages) {
    const size_t slots = (size_t)num_pages * PAGE;
    pool p = {.view = KV8_PAGED_INIT, .row_scales = take(slots * HEADS * sizeof(kv8_f16))};
    p.view.data = p.codes = take(slots * HEADS * DIM * kv8_dtype_size(dtype));
    p.view.num_pages = num_pages;
    p.view.stride_page = PAGE * HEADS * DIM;
    p.view.stride_slot = HEADS * DIM;
    p.view.stride_head = DIM;
    if (dtype != KV8_INT8) return p;
    p.view.row_scale = p.row_scales;
    p.view.row_scale_stride_page = PAGE * HEADS;
    p.view.row_scale_stride_slot = HEADS;
    p.view.row_scale_stride_head = 1;
    return p;
}

static void run_shape(const rows *r, kv8_dtype source, kv8_dtype cache, int rotates, int runs) {
    const int32_t num_pages = (r->count + PAGE - 1) / PAGE;
    const int32_t indptr[] = {0, r->count}, page_indptr[] = {0, num_pages};
    const int32_t last_page_len[] = {(r->count - 1) % PAGE + 1};
    int32_t *const page_indices = take((size_t)num_pages * sizeof *page_indices);
    for (int32_t i = 0; i < num_pages; i++) page_indices[i] = i;
    pool k = new_pool(cache, num_pages), v = new_pool(cache, num_pages);
    const float scales[HEADS] = {0.01f, 0.02f, 0.03f, 0.04f, 0.05f, 0.06f, 0.07f, 0.08f};
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = HEADS;
    spec.k_head_dim = DIM;
    spec.page_size = PAGE;
    spec.src_dtype = source;
    spec.k_dtype = spec.v_dtype = cache;
    kv8_append_plan *plan = NULL;
    TRY(kv8_append_plan_create(&plan, &spec, NULL, NULL));
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    pages.page_indptr = page_indptr;
    pages.page_indices = page_indices;
    pages.last_page_len = last_page_len;
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = 1;
    args.max_rows = r->count;
    args.indptr = indptr;
    args.pages = &pages;
    args.k_stride_row = args.v_stride_row = HEADS * DIM;
    args.k_stride_head = args.v_stride_head = DIM;
    args.k_pages = &k.view;
    args.v_pages = &v.view;
    args.cos_sin = rotates ? r->cos_sin : NULL;
    if (cache == KV8_E4M3 || cache == KV8_E5M2) {
        args.k_scale = args.v_scale = scales;
        args.scale_stride_head = 1;
    }
    args.k = args.v = r->source;
    double best[2] = {HUGE_VAL, HUGE_VAL};
    for (int run = 0; run < 2 * runs; run++) {
        memcpy(r->source, r->values[run % 2], r->bytes);
        const uint64_t begin = kv8_time_ns();
        TRY(kv8_append_run(plan, &args));
        best[run % 2] = fmin(best[run % 2], 1e-3 * (double)(kv8_time_ns() - begin));
    }
    printf("%-5s %-5s %-7s %9.2f us, subnormal %.2f\n", kv8_dtype_name(source),
           kv8_dtype_name(cache), rotates ? "rotated" : "", best[0], best[1] / best[0]);
    kv8_append_plan_destroy(plan);
    free(k.codes);
    free(v.codes);
    free(k.row_scales);
    free(v.row_scales);
    free(page_indices);
}

int main(int argc, char **argv) {
    static const kv8_dtype sources[] = {KV8_F32, KV8_BF16};
    static const kv8_dtype caches[] = {KV8_E4M3, KV8_E5M2, KV8_INT8, KV8_BF16, KV8_F16};
    const int count = argc > 1 ? atoi(argv[1]) : 512, runs = argc > 2 ? atoi(argv[2]) : 100;
    if (count < 1 || runs < 1) {
        fprintf(stderr, "usage: bench_append_host [rows [runs]]\n");
        return 2;
    }
    for (size_t s = 0; s < sizeof sources / sizeof *sources; s++) {
        rows r = new_rows(sources[s], count);
        for (size_t c = 0; c < sizeof caches / sizeof *caches; c++) {
            for (int rotates = 0; rotates < 2; rotates++)
                run_shape(&r, sources[s], caches[c], rotates, runs);
        }
        free(r.values[0]);
        free(r.values[1]);
        free(r.source);
        free(r.cos_sin);
    }
    return 0;
}
