/* model_bench.h - what the files of kv8 bench model share: model_speed.c reads the options and runs
 * the tests, model_report.c prints them, model_plot.c draws them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_BENCH_H
#define KV8_MODEL_BENCH_H

#include "bench.h"

enum { MAX_BATCH = 1 << 12, BENCH_PAGE = 16 };
enum { MAX_DEPTHS = 16, MAX_SETTINGS = 16, MAX_BATCHES = 16, MAX_REPETITIONS = 100 };

typedef struct model_args {
    const char *model, *kv, *depth, *batch, *device, *path, *plot;
    int32_t num_prompt, num_gen, chunk, repetitions, threads;
    int32_t batches[MAX_BATCHES], num_batches, max_batch;
    bool observe, profile, json, batch_invariant;
} model_args;

/* Of --profile: shares of the GPU's time, and what the host costs. */
typedef struct test_profile {
    double seconds[KV8_WORK_COUNT]; /* by kind, of the steps looked into */
    double idle_share;              /* of the GPU while the test ran, beside its work */
    double host_us;                 /* of a step, in which the GPU had nothing to do */
    json_t *kernels;                /* seconds by kernel; NULL: there is no profile */
    kv8_step_path path;             /* of the steps looked into */
} test_profile;

/* One test of the result. */
typedef struct test_row {
    const kv8_kv_setting *setting;
    int32_t num_prompt, num_gen, depth; /* one of the first two is 0 */
    int32_t batch;                      /* sequences at once */
    uint64_t bytes_per_token;           /* of KV, in the layers that keep every token */
    double step_bytes;                  /* that a step of decode reads: the floor of its time */
    double step_seconds; /* of its parts, the longer of bytes and products each; 0: not known */
    double experts_read; /* distinct ones of a layer in a step, counted; 0: not */
    double ns[MAX_REPETITIONS];
    int32_t num;
    kv8_step_plan plan; /* of its steps on a GPU */
    test_profile profile;
} test_row;

typedef struct bench_session {
    cli_model model;
    kv8_cache *cache;
    kv8_engine *engine;
    kv8_observer *observer;     /* of --observe */
    int32_t *token_ids;         /* of the request being made */
    uint64_t filled[MAX_BATCH]; /* requests at rest, one for each sequence; 0: a depth of 0 */
    uint64_t random;
    float *noise; /* where the model computes, while depths are filled */
    /* Of the GPU, measured before the tests; 0 on the host, and where not measured. */
    double read_gb_s, product_tflop_s;
    char failure[256]; /* what a request failed of; "": none has */
} bench_session;

/* Tokens of one sequence. */
int32_t model_test_tokens(const test_row *row);

typedef struct model_speed {
    double mean, deviation; /* tokens per second */
    double variation;       /* deviation / mean */
} model_speed;
model_speed model_test_speed(const test_row *row);

/* Prints the rows as a table or JSON. */
int model_report(const bench_session *s, const model_args *args, const test_row *rows, int32_t num);

/* Tokens per second over depth by KV setting, and over batch, as SVG into `file`. */
int model_plot(const model_args *args, const test_row *rows, int32_t num, FILE *file);

#endif
