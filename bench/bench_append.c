/* bench_append.c - rows into pages on a GPU, beside the driver's own copy of as many bytes in the
 * same run: bytes read (rows, cosines) and written (codes, row scales) over the time of the median
 * replay of a graph. The last line of each shape is one decode step's few rows, in microseconds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/append.h>

#include "gpu_replay.h"

enum { PAGE = 16, NUM_HEADS = 8 };

typedef struct shape {
    const char *name;
    kv8_dtype source, cache;
    int32_t head_dim, num_rows;
    int rotates;
    float scale;
    kv8_layout layout;
} shape;

typedef struct pool {
    uint8_t *codes, *scales;
    kv8_paged view;
} pool;

static pool new_pool(const bench_gpu *g, const shape *s, int64_t num_pages) {
    const int64_t slots = num_pages * PAGE, size = (int64_t)kv8_dtype_size(s->cache);
    pool p = {.codes = gpu_take(g, (size_t)(slots * NUM_HEADS * s->head_dim * size)),
              .scales = gpu_take(g, (size_t)(slots * NUM_HEADS * 2))};
    const int64_t slot = s->layout == KV8_LAYOUT_NHD ? NUM_HEADS : 1;
    const int64_t head = s->layout == KV8_LAYOUT_NHD ? 1 : PAGE;
    p.view = (kv8_paged){.struct_size = sizeof p.view,
                         .data = p.codes,
                         .stride_page = PAGE * NUM_HEADS * s->head_dim,
                         .stride_slot = slot * s->head_dim,
                         .stride_head = head * s->head_dim};
    if (s->cache == KV8_INT8) {
        p.view.row_scale = (const void *)p.scales;
        p.view.row_scale_stride_page = PAGE * NUM_HEADS;
        p.view.row_scale_stride_slot = slot;
        p.view.row_scale_stride_head = head;
    }
    return p;
}

/* 64 requests of equal length whose pages lie anywhere in the pool. */
static void run_shape(const bench_gpu *g, const shape *s) {
    enum { BATCH = 64 };
    const int64_t per_request = s->num_rows / BATCH;
    const int32_t pages_each = (int32_t)((per_request + PAGE - 1) / PAGE);
    int32_t *const indices = malloc(sizeof(int32_t) * (size_t)(BATCH * pages_each));
    int32_t indptr[BATCH + 1], seq_lens[BATCH];
    for (int32_t i = 0; i < BATCH * pages_each; i++) indices[i] = i;
    for (int32_t i = BATCH * pages_each - 1; i > 0; i--) {
        const int32_t j = (int32_t)((uint64_t)i * 2654435761u % (uint64_t)(i + 1)), t = indices[i];
        indices[i] = indices[j];
        indices[j] = t;
    }
    for (int32_t b = 0; b <= BATCH; b++) indptr[b] = (int32_t)(b * per_request);
    for (int32_t b = 0; b < BATCH; b++) seq_lens[b] = (int32_t)per_request;

    const size_t elements = (size_t)s->num_rows * NUM_HEADS * (size_t)s->head_dim;
    const size_t source_bytes = elements * kv8_dtype_size(s->source);
    /* Values of a normal kind, as the source's codes: bytes of about 1 in f32, bf16 and f16. */
    uint16_t *const words = malloc(source_bytes);
    for (size_t i = 0; i < source_bytes / 2; i++)
        words[i] = (uint16_t)(0x3c00 + (i * 2654435761u >> 12 & 0x83ff));
    void *const k = gpu_upload(g, words, source_bytes);
    void *const v = gpu_upload(g, words, source_bytes);
    free(words);
    const size_t angles = (size_t)s->num_rows * (size_t)s->head_dim * sizeof(float);
    float *const cos_sin = gpu_take(g, angles);
    TRY(kv8_stream_fill(g->stream, cos_sin, 0x3c, angles));
    pool pools[2] = {new_pool(g, s, (int64_t)BATCH * pages_each),
                     new_pool(g, s, (int64_t)BATCH * pages_each)};

    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = NUM_HEADS;
    spec.k_head_dim = s->head_dim;
    spec.page_size = PAGE;
    spec.src_dtype = s->source;
    spec.k_dtype = spec.v_dtype = s->cache;
    kv8_append_device_plan *plan;
    TRY(kv8_append_device_plan_create(&plan, g->device, &spec));
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = BATCH;
    args.max_rows = s->num_rows;
    args.indptr = gpu_upload(g, indptr, sizeof indptr);
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    pages.block_table = gpu_upload(g, indices, sizeof(int32_t) * (size_t)(BATCH * pages_each));
    pages.block_table_stride = pages_each;
    pages.seq_lens = gpu_upload(g, seq_lens, sizeof seq_lens);
    args.pages = &pages;
    args.k = k;
    args.v = v;
    args.k_stride_row = args.v_stride_row = NUM_HEADS * s->head_dim;
    args.k_stride_head = args.v_stride_head = s->head_dim;
    args.k_pages = &pools[0].view;
    args.v_pages = &pools[1].view;
    if (s->rotates) args.cos_sin = cos_sin;
    args.k_scale = args.v_scale = gpu_upload(g, &s->scale, sizeof s->scale);
    const uint64_t zeros[4 * NUM_HEADS] = {0};
    args.counters = gpu_upload(g, zeros, sizeof zeros);

    TRY(kv8_stream_capture_begin(g->stream));
    TRY(kv8_append_device_run(plan, g->stream, &args));
    const double seconds = gpu_replay(g).median;
    double bytes =
        2.0 * (double)elements * (double)(kv8_dtype_size(s->source) + kv8_dtype_size(s->cache));
    if (s->cache == KV8_INT8) bytes += 2.0 * s->num_rows * NUM_HEADS * 2;
    if (s->rotates) bytes += (double)angles;
    printf("%-8s %-5s %-5s %s %9d %6d %6g %9.1f %9.0f %6.1f%%\n", s->name,
           kv8_dtype_name(s->source), kv8_dtype_name(s->cache),
           s->layout == KV8_LAYOUT_NHD ? "NHD" : "HND", s->num_rows, s->rotates, (double)s->scale,
           seconds * 1e6, bytes / seconds * 1e-9,
           100 * bytes / seconds * 1e-9 / g->ceilings.copy_gb_s);

    kv8_append_device_plan_destroy(plan);
    void *const all[] = {k,
                         v,
                         cos_sin,
                         pools[0].codes,
                         pools[0].scales,
                         pools[1].codes,
                         pools[1].scales,
                         (void *)(uintptr_t)args.indptr,
                         (void *)(uintptr_t)pages.block_table,
                         (void *)(uintptr_t)pages.seq_lens,
                         (void *)(uintptr_t)args.k_scale,
                         args.counters};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) kv8_device_free(g->device, all[i]);
    free(indices);
}

int main(void) {
    bench_gpu gpu = gpu_open();
    printf("%s: copy %.0f GB/s (read and written), read %.0f GB/s, at 1 GiB\n",
           kv8_device_get_info(gpu.device)->name, gpu.ceilings.copy_gb_s, gpu.ceilings.read_gb_s);
    printf("%-8s %-5s %-5s %s %9s %6s %6s %9s %9s %7s\n", "shape", "from", "to", "   ", "rows",
           "rotate", "scale", "us", "GB/s", "of copy");
    const kv8_dtype caches[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_E5M2, KV8_E4M3FNUZ};
    for (int large = 0; large < 2; large++) {
        shape s = {.name = large ? "llama" : "gpt-oss", .head_dim = large ? 128 : 64};
        for (size_t c = 0; c < sizeof caches / sizeof caches[0]; c++) {
            s.source = KV8_BF16;
            s.cache = caches[c];
            s.num_rows = large ? 1 << 18 : 1 << 19;
            s.layout = KV8_LAYOUT_NHD;
            for (s.rotates = 0; s.rotates < 2; s.rotates++) {
                s.scale = 1;
                run_shape(&gpu, &s);
                s.scale = 0.7f;
                run_shape(&gpu, &s);
            }
        }
        s.rotates = 0;
        s.cache = KV8_E4M3;
        s.layout = KV8_LAYOUT_HND;
        run_shape(&gpu, &s);
        s.layout = KV8_LAYOUT_NHD;
        s.source = KV8_F32;
        run_shape(&gpu, &s);
        s.source = KV8_BF16;
        for (s.rotates = 0; s.rotates < 2; s.rotates++) {
            s.num_rows = 64;
            run_shape(&gpu, &s);
        }
    }
    gpu_close(&gpu);
}
