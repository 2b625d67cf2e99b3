/* metrics.h - what the server counts, as Prometheus reads it: under the names that dashboards and
 * gateways know from vLLM, and kv8's own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_METRICS_H
#define KV8_SERVER_METRICS_H

#include <pthread.h>

#include <kv8/engine.h>

#include "byte_buffer.h"

typedef enum metric {
    METRIC_FIRST_TOKEN, /* seconds since the request was received */
    METRIC_INTER_TOKEN,
    METRIC_WHOLE,
    METRIC_QUEUE,     /* received to first step */
    METRIC_PREFILL,   /* first step to first token */
    METRIC_DECODE,    /* first token to last */
    METRIC_INFERENCE, /* first step to last token */
    METRIC_PROMPT_TOKENS,
    METRIC_GENERATION_TOKENS,
    NUM_METRICS
} metric;

enum { METRIC_MAX_BUCKETS = 20 };

typedef struct histogram {
    uint64_t counts[METRIC_MAX_BUCKETS + 1]; /* the last: beyond all bounds */
    double sum;
} histogram;

typedef struct metrics {
    pthread_mutex_t lock;
    histogram histograms[NUM_METRICS];
    uint64_t ended_stop, ended_length, ended_abort, ended_error;
} metrics;

void metrics_init(metrics *m);
void metrics_destroy(metrics *m);
void metrics_observe(metrics *m, metric which, double value);
/* A choice ended: why by the API and why by the engine. */
void metrics_count_end(metrics *m, const char *finish_reason, kv8_finish finish);
/* A choice ended because its client went. */
void metrics_count_abort(metrics *m, uint64_t num);
/* What is said of the engine beside its statistics. */
typedef struct metrics_engine {
    const char *model, *kv_format;
    uint64_t kv_bytes, kv_tokens; /* as of a server_model */
    int32_t kv_page_size;
    double memory_speed;
    kv8_engine_stats stats;
} metrics_engine;
/* The text that /metrics answers. */
void metrics_write(metrics *m, const metrics_engine *engine, byte_buffer *out);

#endif
