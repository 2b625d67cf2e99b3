/* bench_matmul.c - matrix products beside the ceilings of this machine, measured in the same run.
 *
 *   bench_matmul [threads [isa]]          CSV on stdout
 *
 * Decode reads the weights once: GB/s of packed weights against the read ceiling, over sets of
 * matrices of 200 MB and more. Prefill reuses them: GMAC/s against the FMA ceiling. Rates are those
 * of the best job, as the ceilings are of the best pass; the median says how quiet the machine was.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ops_impl.h>
#include <stdlib.h>
#include <string.h>

static const char *const kind_names[] = {"bf16", "f32", "mxfp4"};

typedef struct setup {
    kv8_isa isa;
    kv8_threads *threads;
    kv8_ceilings ceilings;
} setup;

static size_t weight_size(kv8_weight_kind kind, int64_t count) {
    return (size_t)(kind == KV8_WEIGHT_F32    ? 4 * count
                    : kind == KV8_WEIGHT_BF16 ? 2 * count
                                              : count / 2 + count / KV8_MXFP4_BLOCK);
}

static void *must_alloc(size_t size) {
    void *ptr;
    if (kv8_alloc(NULL, size, 1, "bench", &ptr) != KV8_OK) {
        fprintf(stderr, "%s\n", kv8_status_message());
        exit(1);
    }
    return ptr;
}

static int by_time(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

typedef struct timings {
    double best_ns, median_ns;
} timings;

/* Every job on its own, several times around: with enough copies none finds its weights in a
 * cache, and a job is short enough that some run undisturbed on a busy machine. */
static timings time_jobs(const setup *s, const kv8_matmul_job *jobs, int64_t num_jobs) {
    enum { MIN_SAMPLES = 40, MAX_SAMPLES = 400 };
    static uint64_t times[MAX_SAMPLES];
    int count = 0;
    kv8_matmul_run(s->isa, s->threads, &jobs[0], 1);
    while (count < MIN_SAMPLES) {
        for (int64_t i = 0; i < num_jobs && count < MAX_SAMPLES; i++) {
            const uint64_t begin = kv8_time_ns();
            kv8_matmul_run(s->isa, s->threads, &jobs[i], 1);
            times[count++] = kv8_time_ns() - begin;
        }
    }
    qsort(times, (size_t)count, sizeof times[0], by_time);
    return (timings){(double)times[0], (double)times[count / 2]};
}

/* `copies` matrices [rows, cols], each times the same num_rows activations. */
static void measure(const setup *s, kv8_weight_kind kind, int64_t rows, int64_t cols,
                    int64_t num_rows, int64_t copies) {
    const size_t size = weight_size(kind, rows * cols);
    uint8_t *const data = must_alloc(size * (size_t)copies);
    memset(data, 0x3c, size * (size_t)copies); /* every format: small ordinary numbers */
    float *const x = must_alloc((size_t)(num_rows * cols) * sizeof(float));
    for (int64_t i = 0; i < num_rows * cols; i++) x[i] = (float)(i % 17) * 0.125f - 1.0f;
    float *const y = must_alloc((size_t)(num_rows * rows) * sizeof(float));
    kv8_matmul_job *const jobs = must_alloc((size_t)copies * sizeof *jobs);
    for (int64_t i = 0; i < copies; i++) {
        const uint8_t *const w = data + size * (size_t)i;
        jobs[i] = (kv8_matmul_job){
            .w = {kind, w, kind == KV8_WEIGHT_MXFP4 ? w + rows * cols / 2 : NULL, rows, cols},
            .x = x,
            .x_stride = cols,
            .y = y,
            .y_stride = rows,
            .num_rows = num_rows};
    }
    const timings t = time_jobs(s, jobs, copies);
    const double gb_s = (double)size / t.best_ns;
    const double gmac_s = (double)(rows * cols) * (double)num_rows / t.best_ns;
    printf("%s,%s,%lld,%lld,%lld,%.1f,%.1f,%.2f,%.0f%%,%.1f,%.0f%%\n", kv8_isa_name(s->isa),
           kind_names[kind], (long long)rows, (long long)cols, (long long)num_rows,
           t.best_ns * 1e-3, t.median_ns * 1e-3, gb_s, 100 * gb_s / s->ceilings.read_gb_s, gmac_s,
           100 * gmac_s / s->ceilings.f32_gmac_s);
    fflush(stdout);
    kv8_release(NULL, data, size * (size_t)copies, 1);
    kv8_release(NULL, x, (size_t)(num_rows * cols) * sizeof(float), 1);
    kv8_release(NULL, y, (size_t)(num_rows * rows) * sizeof(float), 1);
    kv8_release(NULL, jobs, (size_t)copies * sizeof *jobs, 1);
}

/* The best of several calls: the ceilings, too, want a quiet moment. */
static kv8_status measure_ceilings(setup *s) {
    for (int i = 0; i < 3; i++) {
        kv8_ceilings now;
        KV8_TRY(kv8_machine_measure_ceilings(s->threads, s->isa, &now));
        if (now.read_gb_s > s->ceilings.read_gb_s) s->ceilings.read_gb_s = now.read_gb_s;
        if (now.f32_gmac_s > s->ceilings.f32_gmac_s) s->ceilings.f32_gmac_s = now.f32_gmac_s;
    }
    return KV8_OK;
}

int main(int argc, char **argv) {
    setup s = {.isa = KV8_ISA_BEST};
    for (int isa = KV8_ISA_SCALAR; argc > 2 && isa < KV8_ISA_COUNT; isa++) {
        if (strcmp(argv[2], kv8_isa_name((kv8_isa)isa)) == 0) s.isa = (kv8_isa)isa;
    }
    if (kv8_machine_resolve_isa(s.isa, &s.isa) != KV8_OK ||
        kv8_threads_create(&s.threads, argc > 1 ? atoi(argv[1]) : 0) != KV8_OK ||
        measure_ceilings(&s) != KV8_OK) {
        fprintf(stderr, "%s\n", kv8_status_message());
        return 1;
    }
    printf("# %s, %d threads: read %.1f GB/s, f32 %.1f GMAC/s\n", kv8_isa_name(s.isa),
           kv8_threads_count(s.threads), s.ceilings.read_gb_s, s.ceilings.f32_gmac_s);
    printf("isa,weights,rows,cols,num_rows,best_us,median_us,gb_s,of_read,gmac_s,of_fma\n");
    const int64_t num_rows[] = {1, 4, 12, 96};
    for (int kind = KV8_WEIGHT_BF16; kind <= KV8_WEIGHT_MXFP4; kind++) {
        const int64_t copies = kind == KV8_WEIGHT_MXFP4 ? 96 : kind == KV8_WEIGHT_BF16 ? 32 : 16;
        for (size_t i = 0; i < sizeof num_rows / sizeof num_rows[0]; i++)
            measure(&s, (kv8_weight_kind)kind, 1440, 2880, num_rows[i], copies);
        measure(&s, (kv8_weight_kind)kind, 512, 256, 1, 1); /* a small model's, in the cache */
        measure(&s, (kv8_weight_kind)kind, 256, 256, 20, 1);
        measure(&s, (kv8_weight_kind)kind, 512, 256, 512, 1);
    }
    kv8_threads_destroy(s.threads);
    return 0;
}
