/* matmul.c - weights times activations, scalar.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ops_impl.h"

static float load_bf16(const void *data, int64_t i) {
    kv8_bf16 code;
    memcpy(&code, (const uint8_t *)data + (size_t)i * sizeof code, sizeof code);
    return kv8_bf16_to_f32(code);
}

static float load_weight(const kv8_weight *w, int64_t i) {
    if (w->kind == KV8_WEIGHT_BF16) return load_bf16(w->data, i);
    if (w->kind == KV8_WEIGHT_F32) {
        float value;
        memcpy(&value, (const uint8_t *)w->data + (size_t)i * sizeof value, sizeof value);
        return value;
    }
    const uint8_t byte = ((const uint8_t *)w->data)[i / 2];
    const kv8_e2m1 code = {(uint8_t)(i % 2 == 0 ? byte & 15 : byte >> 4)};
    const kv8_e8m0 scale = {((const uint8_t *)w->scales)[i / KV8_MXFP4_BLOCK]};
    return kv8_e2m1_to_f32(code) * kv8_e8m0_to_f32(scale);
}

enum { TASK_ROWS = 16 };

typedef struct matmul_run {
    const kv8_matmul_job *jobs;
    size_t num_jobs;
} matmul_run;

static void matmul_task(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const matmul_run *const run = cookie;
    const kv8_matmul_job *job = run->jobs;
    for (;; job++) {
        const size_t tiles = (size_t)kv8_ceil_div(job->w.rows, TASK_ROWS);
        if (index < tiles) break;
        index -= tiles;
    }
    const int64_t begin = (int64_t)index * TASK_ROWS;
    const int64_t end = kv8_min_i64(begin + TASK_ROWS, job->w.rows);
    float weights[256];
    for (int64_t r = begin; r < end; r++) {
        const float bias = job->bias != NULL ? load_bf16(job->bias, r) : 0.0f;
        for (int64_t i = 0; i < job->num_rows; i++) job->y[i * job->y_stride + r] = bias;
        for (int64_t from = 0; from < job->w.cols; from += 256) {
            const int64_t count = kv8_min_i64(256, job->w.cols - from);
            for (int64_t c = 0; c < count; c++)
                weights[c] = load_weight(&job->w, r * job->w.cols + from + c);
            for (int64_t i = 0; i < job->num_rows; i++) {
                const int64_t row = job->x_rows != NULL ? job->x_rows[i] : i;
                const float *const x = job->x + row * job->x_stride + from;
                float sum = 0;
                for (int64_t c = 0; c < count; c++) sum += weights[c] * x[c];
                job->y[i * job->y_stride + r] += sum;
            }
        }
    }
}

void kv8_matmul_run(kv8_isa isa, kv8_threads *threads, const kv8_matmul_job *jobs,
                    size_t num_jobs) {
    (void)isa;
    matmul_run run = {.jobs = jobs, .num_jobs = num_jobs};
    size_t tasks = 0;
    for (size_t i = 0; i < num_jobs; i++) tasks += (size_t)kv8_ceil_div(jobs[i].w.rows, TASK_ROWS);
    kv8_threads_run(threads, tasks, matmul_task, &run);
}
