/* bench_experts.c - one layer's mixture of experts on a GPU, of the shapes of gpt-oss-120b and 20b
 * with random weights, by rows: microseconds of the median replay of a graph over several layers,
 * routing to residual, bytes of the experts that were chosen over that time beside a plain read in
 * the same run, and TFLOP/s. Routing is random, then (the last lines) all rows to four experts.
 * With --zeros the rows are 0: what switches nothing leaves the GPU its clock, so that the
 * difference is what power costs. Usage: bench_experts [--zeros] [rows...]
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "gpu_replay.h"
#include "ops_impl.h"

enum { LAYERS = 4, RUNS = 8, MAX_ROWS = 16384, HIDDEN = 2880, TOP_K = 4 };

typedef struct bench {
    bench_gpu gpu;
    kv8_experts_shape shape;
    kv8_device_experts *experts;
    bool zeros;
    uint8_t *gate_up[LAYERS], *down[LAYERS];
    float *logits[RUNS], *residual;
    void *x;
} bench;

static uint64_t random_u64(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
/* --- inputs --- */

/* One expert's random checkpoint bytes serve as every expert's. */
static uint8_t *make_part(const bench *b, kv8_experts_part part, int layer) {
    const size_t rows =
        part == KV8_EXPERTS_GATE_UP ? 2 * (size_t)b->shape.intermediate : (size_t)b->shape.hidden;
    const size_t cols =
        part == KV8_EXPERTS_GATE_UP ? (size_t)b->shape.hidden : (size_t)b->shape.intermediate;
    const size_t blocks = rows * cols / 32, bytes = kv8_experts_part_bytes(&b->shape, part);
    uint8_t *const host = malloc(blocks * 17 + rows * 2);
    uint64_t state = (uint64_t)(2 * layer + (int)part);
    for (size_t i = 0; i < blocks * 16; i++) host[i] = (uint8_t)random_u64(&state);
    for (size_t i = 0; i < blocks; i++)
        host[blocks * 16 + i] = (uint8_t)(116 + random_u64(&state) % 4);
    memset(host + blocks * 17, 0, rows * 2);
    uint8_t *const source = gpu_upload(&b->gpu, host, blocks * 17 + rows * 2);
    uint8_t *const to = gpu_take(&b->gpu, bytes * (size_t)b->shape.num_experts);
    const kv8_experts_source from = {source, source + blocks * 16, source + blocks * 17, 1};
    for (int32_t e = 0; e < b->shape.num_experts; e++)
        TRY(kv8_device_experts_load(b->experts, b->gpu.stream, part, &from,
                                    to + (size_t)e * bytes));
    TRY(kv8_stream_synchronize(b->gpu.stream));
    kv8_device_free(b->gpu.device, source);
    free(host);
    return to;
}

/* Logits of MAX_ROWS rows; skewed: all rows choose the first experts. */
static void fill_logits(const bench *b, bool skewed) {
    const size_t experts = (size_t)b->shape.num_experts, count = MAX_ROWS * experts;
    float *const host = malloc(count * sizeof *host);
    for (int run = 0; run < RUNS; run++) {
        uint64_t state = (uint64_t)(1000 + run);
        for (size_t i = 0; i < count; i++) {
            host[i] = (float)(random_u64(&state) >> 40) * 0x1p-24f;
            if (skewed && i % experts < TOP_K) host[i] += 2;
        }
        TRY(kv8_stream_copy(b->gpu.stream, b->logits[run], host, count * sizeof *host));
        TRY(kv8_stream_synchronize(b->gpu.stream));
    }
    free(host);
}

static void open_shape(bench *b, int32_t num_experts) {
    b->shape = (kv8_experts_shape){num_experts, TOP_K, HIDDEN, HIDDEN, 1.702f, 7.0f};
    TRY(kv8_device_experts_create(&b->experts, b->gpu.device, &b->shape, MAX_ROWS));
    for (int i = 0; i < LAYERS; i++) {
        b->gate_up[i] = make_part(b, KV8_EXPERTS_GATE_UP, i);
        b->down[i] = make_part(b, KV8_EXPERTS_DOWN, i);
    }
    const size_t values = (size_t)MAX_ROWS * HIDDEN;
    kv8_f16 *const host = malloc(values * sizeof *host);
    uint64_t state = 7;
    for (size_t i = 0; i < values; i++)
        host[i].bits = b->zeros ? 0 : (uint16_t)(0x3400 | (random_u64(&state) & 0x87ff));
    b->x = gpu_upload(&b->gpu, host, values * sizeof *host);
    free(host);
    b->residual = gpu_take(&b->gpu, values * sizeof(float));
    TRY(kv8_stream_fill(b->gpu.stream, b->residual, 0, values * sizeof(float)));
    for (int i = 0; i < RUNS; i++)
        b->logits[i] = gpu_take(&b->gpu, (size_t)MAX_ROWS * (size_t)num_experts * sizeof(float));
    fill_logits(b, false);
}
static void close_shape(bench *b) {
    for (int i = 0; i < LAYERS; i++) {
        kv8_device_free(b->gpu.device, b->gate_up[i]);
        kv8_device_free(b->gpu.device, b->down[i]);
    }
    for (int i = 0; i < RUNS; i++) kv8_device_free(b->gpu.device, b->logits[i]);
    kv8_device_free(b->gpu.device, b->x);
    kv8_device_free(b->gpu.device, b->residual);
    kv8_device_experts_destroy(b->experts);
}

/* Experts that the first n rows of all runs choose, on average. */
static double distinct_experts(const bench *b, int32_t n) {
    const size_t experts = (size_t)b->shape.num_experts;
    float *const host = malloc((size_t)n * experts * sizeof *host);
    double count = 0;
    for (int run = 0; run < RUNS; run++) {
        uint8_t chosen[256] = {0};
        TRY(kv8_stream_copy(b->gpu.stream, host, b->logits[run],
                            (size_t)n * experts * sizeof *host));
        TRY(kv8_stream_synchronize(b->gpu.stream));
        for (int32_t row = 0; row < n; row++) {
            int32_t ids[TOP_K];
            float weights[TOP_K];
            kv8_topk_softmax(host + (size_t)row * experts, experts, TOP_K, ids, weights);
            for (int k = 0; k < TOP_K; k++) {
                count += chosen[ids[k]] == 0;
                chosen[ids[k]] = 1;
            }
        }
    }
    free(host);
    return count / RUNS;
}

/* --- timing --- */

/* Seconds of one run, the median of replays. */
static double time_rows(const bench *b, int32_t n) {
    TRY(kv8_stream_capture_begin(b->gpu.stream));
    for (int run = 0; run < RUNS; run++) {
        const kv8_experts_args args = {.gate_up = b->gate_up[run % LAYERS],
                                       .down = b->down[run % LAYERS],
                                       .logits = b->logits[run],
                                       .x = b->x,
                                       .residual = b->residual,
                                       .n = n};
        TRY(kv8_device_experts_run(b->experts, b->gpu.stream, &args));
    }
    return gpu_replay(&b->gpu).median / RUNS;
}

static void print_rows(const bench *b, const char *name, int32_t n) {
    const double seconds = time_rows(b, n), distinct = distinct_experts(b, n);
    const double bytes =
        distinct * (double)(kv8_experts_part_bytes(&b->shape, KV8_EXPERTS_GATE_UP) +
                            kv8_experts_part_bytes(&b->shape, KV8_EXPERTS_DOWN));
    const double operations = 6.0 * n * TOP_K * HIDDEN * HIDDEN, gb_s = bytes / seconds * 1e-9;
    printf("%-12s %6d %8.1f %9.1f %8.0f %6.1f%% %8.1f\n", name, n, distinct, seconds * 1e6, gb_s,
           100 * gb_s / b->gpu.ceilings.read_gb_s, operations / seconds * 1e-12);
}

int main(int argc, char **argv) {
    static const int32_t all[] = {1,  2,   3,   4,   6,   8,   12,   16,   24,   32,   48,   64,
                                  96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384};
    bench b = {.gpu = gpu_open(), .zeros = argc > 1 && strcmp(argv[1], "--zeros") == 0};
    if (b.zeros) argc--, argv++;
    printf("%s: read %.0f GB/s at 1 GiB\n", kv8_device_get_info(b.gpu.device)->name,
           b.gpu.ceilings.read_gb_s);
    printf("%-12s %6s %8s %9s %8s %7s %8s\n", "shape", "rows", "experts", "us", "GB/s", "of read",
           "TFLOP/s");
    for (int large = 1; large >= 0; large--) {
        const char *const name = large ? "120b" : "20b";
        open_shape(&b, large ? 128 : 32);
        const int num_rows = argc > 1 ? argc - 1 : (int)(sizeof all / sizeof *all);
        for (int i = 0; i < num_rows; i++) {
            const int32_t n = argc > 1 ? (int32_t)atoi(argv[i + 1]) : all[i];
            if (n > 0 && n <= MAX_ROWS) print_rows(&b, name, n);
        }
        fill_logits(&b, true);
        for (int32_t n = 8; n <= 2048; n *= 16)
            print_rows(&b, large ? "120b skewed" : "20b skewed", n);
        close_shape(&b);
    }
    gpu_close(&b.gpu);
}
