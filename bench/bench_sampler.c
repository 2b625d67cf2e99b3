/* bench_sampler.c - the draw of tokens on a GPU over logits in its memory: microseconds by rows and
 * settings, of all that a step has of it (settings over, the kernel, results back) and beside the
 * time in which memory is read once. Logits are those of a sharp distribution, as a model's.
 *
 *   bench_sampler [--maxima]     with the largest of every 64 logits, as the head leaves them of
 *                                many rows
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "engine_impl.h"
#include "gpu_replay.h"

enum { VOCAB = 201088, PIECE = KV8_MAXIMUM_IDS, MAX_ROWS = 512, LAUNCHES = 10, HISTORY = 256 };

typedef struct machine {
    bench_gpu gpu;
    kv8_device_sampler *sampler;
    float *logits, *maxima; /* maxima: as kv8_model_device_maxima, or NULL */
} machine;

static machine open_machine(bool has_maxima) {
    machine m = {.gpu = gpu_open()};
    const size_t bytes = (size_t)VOCAB * sizeof(float);
    TRY(kv8_device_sampler_create(&m.sampler, m.gpu.device, m.gpu.stream, NULL, VOCAB, MAX_ROWS,
                                  MAX_ROWS * HISTORY, NULL));
    m.logits = gpu_take(&m.gpu, bytes * MAX_ROWS);
    if (has_maxima) m.maxima = gpu_take(&m.gpu, bytes / PIECE * MAX_ROWS);
    float *const row = malloc(bytes), maxima[VOCAB / PIECE];
    uint32_t state = 1;
    for (int r = 0; row != NULL && r < MAX_ROWS; r++) {
        for (int i = 0; i < VOCAB; i++) {
            double sum = 0;
            for (int k = 0; k < 4; k++) {
                state = state * 1664525u + 1013904223u;
                sum += (state >> 8) * 0x1p-24 - 0.5;
            }
            row[i] = (float)(4.5 * sum);
        }
        for (int i = 0; i < 20; i++)
            row[(state >> 4) % VOCAB / 20 * (i + 1)] = 16 - 0.5f * (float)i;
        for (int i = 0; i < VOCAB; i++) {
            float *const most = &maxima[i / PIECE];
            *most = i % PIECE == 0 || row[i] > *most ? row[i] : *most;
        }
        TRY(kv8_stream_copy(m.gpu.stream, m.logits + (size_t)r * VOCAB, row, bytes));
        if (has_maxima)
            TRY(kv8_stream_copy(m.gpu.stream, m.maxima + (size_t)r * (VOCAB / PIECE), maxima,
                                sizeof maxima));
        TRY(kv8_stream_synchronize(m.gpu.stream));
    }
    free(row);
    return m;
}

/* Seconds of one draw: the best replay of a graph of them. */
static double time_draw(const machine *m, const kv8_sampling *sampling, int32_t num,
                        int32_t num_logprobs) {
    static kv8_draw draws[MAX_ROWS];
    static int32_t history[HISTORY];
    for (int i = 0; i < HISTORY; i++) history[i] = i * 97 % VOCAB;
    for (int32_t i = 0; i < num; i++)
        draws[i] = (kv8_draw){.sampling = sampling,
                              .history = {history, HISTORY / 2, HISTORY},
                              .mask = -1,
                              .token = -1,
                              .num_logprobs = num_logprobs};
    TRY(kv8_stream_capture_begin(m->gpu.stream));
    for (int i = 0; i < LAUNCHES; i++)
        TRY(kv8_device_sampler_begin(m->sampler, m->logits, m->maxima, draws, num));
    return gpu_replay(&m->gpu).best / LAUNCHES;
}

int main(int argc, char **argv) {
    const struct {
        const char *name;
        kv8_sampling sampling;
        int32_t num_logprobs;
    } cases[] = {
        {"greedy", {.struct_size = sizeof(kv8_sampling)}, 0},
        {"greedy, 20 logprobs", {.struct_size = sizeof(kv8_sampling)}, 20},
        {"T 1", {.struct_size = sizeof(kv8_sampling), .temperature = 1}, 0},
        {"T 0.7, top-k 50",
         {.struct_size = sizeof(kv8_sampling), .temperature = 0.7f, .top_k = 50},
         0},
        {"T 1, top-p 0.9",
         {.struct_size = sizeof(kv8_sampling), .temperature = 1, .top_p = 0.9f},
         0},
        {"T 1.5, top-p 0.999",
         {.struct_size = sizeof(kv8_sampling), .temperature = 1.5f, .top_p = 0.999f},
         0},
        {"T 1, min-p 0.05",
         {.struct_size = sizeof(kv8_sampling), .temperature = 1, .min_p = 0.05f},
         0},
        {"all, penalties, 20 logprobs",
         {.struct_size = sizeof(kv8_sampling),
          .temperature = 0.8f,
          .top_k = 100,
          .top_p = 0.95f,
          .min_p = 0.01f,
          .repetition_penalty = 1.1f,
          .presence_penalty = 0.5f},
         20},
    };
    static const int32_t rows[] = {1, 4, 16, 64, 96, 128, 192, 256, 384, 512};
    enum { NUM_ROWS = sizeof rows / sizeof rows[0] };
    machine m = open_machine(argc > 1 && strcmp(argv[1], "--maxima") == 0);
    printf("%s, read ceiling %.0f GB/s, %d ids; us by rows\n%-28s",
           kv8_device_get_info(m.gpu.device)->name, m.gpu.ceilings.read_gb_s, VOCAB, "");
    for (int r = 0; r < NUM_ROWS; r++) printf(" %7d", rows[r]);
    printf("\n%-28s", "read once");
    for (int r = 0; r < NUM_ROWS; r++)
        printf(" %7.1f", rows[r] * VOCAB * 4e-3 / m.gpu.ceilings.read_gb_s);
    printf("\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        printf("%-28s", cases[i].name);
        for (int r = 0; r < NUM_ROWS; r++)
            printf(" %7.1f",
                   1e6 * time_draw(&m, &cases[i].sampling, rows[r], cases[i].num_logprobs));
        printf("\n");
    }
    kv8_device_free(m.gpu.device, m.logits);
    kv8_device_free(m.gpu.device, m.maxima);
    kv8_device_sampler_destroy(m.sampler);
    gpu_close(&m.gpu);
}
