/* bench_linear.c - a model's dense products on a GPU: microseconds by number of rows, and the share
 * of what memory and tensor cores permit. The floor is the larger of two times: weights read once,
 * activations read and results written, at the read ceiling that is measured in the same run, and
 * the products at 800e12 operations a second, which a H200 reaches on words of 16 bits of any size
 * at best.
 *
 * "layer" is QKV as a layer runs it: of normed rows, heads rotated behind it, K and V in f32.
 *
 * Weights change from launch to launch, so that the L2 has none of them; launches follow one
 * another in a graph, as in a model's step.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpu_replay.h"
#include "ops_impl.h"

enum { MAX_N = 8192, MAX_COLS = 4096 };
static const size_t weight_bytes = (size_t)201088 * 2880 * 2;
static const double operations_per_s = 800e12;

typedef struct machine {
    bench_gpu gpu;
    kv8_device_ops *ops;
    uint8_t *w, *x, *y;
    void *residual, *rotated;
} machine;

/* Device memory of random f16 in (-1, 1), of as many bits as bf16 has, which weights were: repeats
 * of a piece that is no multiple of any row. */
static uint8_t *random_f16(const bench_gpu *g, size_t bytes) {
    enum { PIECE = 999983 };
    uint16_t *const piece = malloc(PIECE * sizeof *piece);
    uint8_t *const at = gpu_take(g, bytes);
    uint32_t state = 1;
    for (size_t i = 0; piece != NULL && i < PIECE; i++) {
        state = state * 1664525u + 1013904223u;
        piece[i] = (uint16_t)((state >> 16 & 0x83f8u) | 0x3800u);
    }
    for (size_t done = 0; done < bytes; done += PIECE * sizeof *piece)
        TRY(kv8_stream_copy(
            g->stream, at + done, piece,
            bytes - done < PIECE * sizeof *piece ? bytes - done : PIECE * sizeof *piece));
    TRY(kv8_stream_synchronize(g->stream));
    free(piece);
    return at;
}

static machine open_machine(void) {
    machine m = {.gpu = gpu_open()};
    TRY(kv8_device_ops_create(&m.ops, m.gpu.device));
    m.w = random_f16(&m.gpu, weight_bytes);
    m.x = random_f16(&m.gpu, (size_t)MAX_N * MAX_COLS * 2);
    m.y = gpu_take(&m.gpu, (size_t)MAX_N * 5120 * 4 + (size_t)512 * 201088 * 4);
    m.residual = random_f16(&m.gpu, (size_t)MAX_N * MAX_COLS * 4);
    m.rotated = gpu_take(&m.gpu, (size_t)MAX_N * 5120 * 2);
    return m;
}
static void close_machine(machine *m) {
    void *const taken[] = {m->w, m->x, m->y, m->residual, m->rotated};
    for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++)
        kv8_device_free(m->gpu.device, taken[i]);
    kv8_device_ops_destroy(m->ops);
    gpu_close(&m->gpu);
}

typedef struct product {
    const char *name;
    int32_t rows, cols, max_n;
    kv8_dtype to;
    bool accumulates;
    bool in_layer; /* 64 heads of 64 rotated behind */
} product;

static kv8_status run_product(const machine *m, const product *p, const uint8_t *w, int32_t n) {
    const kv8_device_linear linear = {w, m->x, p->rows, p->cols};
    if (!p->in_layer)
        return kv8_device_linear_run(m->ops, m->gpu.stream, &linear, m->x, n, m->y, p->to,
                                     p->accumulates);
    const kv8_device_norm_linear layer = {.w = linear,
                                          .x = m->residual,
                                          .gain = m->x,
                                          .normed = m->x,
                                          .is_normed = true,
                                          .num_rotated = 64,
                                          .head_dim = 64,
                                          .cos_sin = m->residual,
                                          .rotated = m->rotated,
                                          .rotated_dtype = KV8_F16,
                                          .y = m->y,
                                          .y_dtype = p->to};
    return kv8_device_norm_linear_run(m->ops, m->gpu.stream, &layer, n);
}

/* Seconds of one launch: the best replay of a graph of them. */
static double time_product(const machine *m, const product *p, int32_t n) {
    const size_t bytes = (size_t)p->rows * (size_t)p->cols * 2;
    const size_t copies = weight_bytes / bytes;
    const int launches = copies == 1 || n > 1024 ? 4 : 20;
    TRY(kv8_stream_capture_begin(m->gpu.stream));
    for (int i = 0; i < launches; i++) {
        const uint8_t *const w = m->w + (size_t)i % copies * bytes;
        TRY(run_product(m, p, w, n));
    }
    return gpu_replay(&m->gpu).best / launches;
}

static void print_product(const machine *m, const product *p) {
    static const int32_t counts[] = {1,  2,  4,   8,   9,   16,   17,   32,
                                     64, 65, 128, 256, 512, 1024, 2048, 8192};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0] && counts[i] <= p->max_n; i++) {
        const double n = counts[i], rows = p->rows, cols = p->cols;
        const double result_bytes = (p->to == KV8_F32 ? 4 : 2) * (p->accumulates ? 2 : 1);
        const double bytes = 2 * rows * cols + 2 * n * cols + result_bytes * n * rows;
        const double by_bytes = bytes / (m->gpu.ceilings.read_gb_s * 1e9);
        const double by_products = 2 * n * rows * cols / operations_per_s;
        const double seconds = time_product(m, p, counts[i]);
        printf("%-7s %6d %9.1f us  %5.0f GB/s  %5.0f TFLOP/s  %3.0f %% of the floor\n", p->name,
               counts[i], seconds * 1e6, bytes / seconds * 1e-9,
               2 * n * rows * cols / seconds * 1e-12,
               100 * (by_bytes > by_products ? by_bytes : by_products) / seconds);
    }
}

int main(void) {
    machine m = open_machine();
    printf("%s, read ceiling %.0f GB/s\n", kv8_device_get_info(m.gpu.device)->name,
           m.gpu.ceilings.read_gb_s);
    static const product products[] = {
        {"qkv", 5120, 2880, MAX_N, KV8_BF16, false, false},
        {"layer", 5120, 2880, MAX_N, KV8_F32, false, true},
        {"o", 2880, 4096, MAX_N, KV8_F32, true, false},
        {"router", 128, 2880, MAX_N, KV8_F32, false, false},
        {"head", 201088, 2880, 512, KV8_F32, false, false},
    };
    for (size_t i = 0; i < sizeof products / sizeof products[0]; i++)
        print_product(&m, &products[i]);
    close_machine(&m);
}
