/* metrics.c - what the server counts, as Prometheus reads it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "metrics.h"

#include <string.h>

/* --- histograms --- */

static const double short_times[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25,
                                     .5,   .75,  1,   2.5, 5,   7.5, 10,  20, 40};
static const double token_times[] = {.001, .0025, .005, .01, .025, .05, .075, .1,
                                     .15,  .2,    .3,   .4,  .5,   .75, 1,    2.5};
static const double long_times[] = {.3, .5, .8, 1,  1.5, 2,  2.5, 5,   10,
                                    15, 20, 30, 40, 50,  60, 120, 240, 480};
static const double token_counts[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                      1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};

#define BOUNDS(list) list, sizeof list / sizeof list[0]
static const struct {
    const char *name, *about;
    const double *bounds;
    size_t num_bounds;
} shapes[NUM_METRICS] = {
    [METRIC_FIRST_TOKEN] = {"vllm:time_to_first_token_seconds", "Time to the first token",
                            BOUNDS(short_times)},
    [METRIC_INTER_TOKEN] = {"vllm:inter_token_latency_seconds", "Time between two tokens",
                            BOUNDS(token_times)},
    [METRIC_WHOLE] = {"vllm:e2e_request_latency_seconds", "Time of a whole request",
                      BOUNDS(long_times)},
    [METRIC_QUEUE] = {"vllm:request_queue_time_seconds", "Time until the first step",
                      BOUNDS(long_times)},
    [METRIC_PREFILL] = {"vllm:request_prefill_time_seconds", "First step to first token",
                        BOUNDS(long_times)},
    [METRIC_DECODE] = {"vllm:request_decode_time_seconds", "First token to last",
                       BOUNDS(long_times)},
    [METRIC_INFERENCE] = {"vllm:request_inference_time_seconds", "First step to last token",
                          BOUNDS(long_times)},
    [METRIC_PROMPT_TOKENS] = {"vllm:request_prompt_tokens", "Tokens of a prompt",
                              BOUNDS(token_counts)},
    [METRIC_GENERATION_TOKENS] = {"vllm:request_generation_tokens", "Tokens generated",
                                  BOUNDS(token_counts)},
};

void metrics_init(metrics *m) {
    memset(m, 0, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
}

void metrics_destroy(metrics *m) {
    pthread_mutex_destroy(&m->lock);
}

void metrics_observe(metrics *m, metric which, double value) {
    size_t bucket = 0;
    while (bucket < shapes[which].num_bounds && value > shapes[which].bounds[bucket]) bucket++;
    pthread_mutex_lock(&m->lock);
    m->histograms[which].counts[bucket]++;
    m->histograms[which].sum += value;
    pthread_mutex_unlock(&m->lock);
}

void metrics_count_end(metrics *m, const char *finish_reason, kv8_finish finish) {
    const bool failed = finish == KV8_FINISH_FAILED || finish == KV8_FINISH_EXPIRED;
    uint64_t *const counter = failed                                 ? &m->ended_error
                              : finish == KV8_FINISH_CANCELLED       ? &m->ended_abort
                              : strcmp(finish_reason, "length") == 0 ? &m->ended_length
                                                                     : &m->ended_stop;
    pthread_mutex_lock(&m->lock);
    ++*counter;
    pthread_mutex_unlock(&m->lock);
}

void metrics_count_abort(metrics *m, uint64_t num) {
    pthread_mutex_lock(&m->lock);
    m->ended_abort += num;
    pthread_mutex_unlock(&m->lock);
}

/* --- the text --- */

typedef struct writer {
    byte_buffer *out;
    byte_buffer label; /* model_name="..." */
} writer;

/* The name as a label's value: \, " and line feeds are escaped. */
static void write_label(byte_buffer *label, const char *model) {
    byte_buffer_add_string(label, "model_name=\"");
    for (const char *c = model; *c != '\0'; c++) {
        if (*c == '\\' || *c == '"') byte_buffer_add_string(label, "\\");
        byte_buffer_add(label, *c == '\n' ? "\\n" : c, *c == '\n' ? 2 : 1);
    }
    byte_buffer_add_string(label, "\"");
}

static void write_head(writer *w, const char *name, const char *type, const char *about) {
    byte_buffer_printf(w->out, "# HELP %s %s\n# TYPE %s %s\n", name, about, name, type);
}

/* `more`: further labels, with a comma before, or "". */
static void write_value(writer *w, const char *name, const char *more, double value) {
    byte_buffer_printf(w->out, "%s{%s%s} %.17g\n", name, w->label.data, more, value);
}

static void write_one(writer *w, const char *name, const char *type, const char *about,
                      double value) {
    write_head(w, name, type, about);
    write_value(w, name, "", value);
}

static void write_histogram(writer *w, metric which, const histogram *h) {
    const char *const name = shapes[which].name;
    uint64_t total = 0;
    write_head(w, name, "histogram", shapes[which].about);
    for (size_t i = 0; i < shapes[which].num_bounds; i++) {
        total += h->counts[i];
        byte_buffer_printf(w->out, "%s_bucket{%s,le=\"%.10g\"} %llu\n", name, w->label.data,
                           shapes[which].bounds[i], (unsigned long long)total);
    }
    total += h->counts[shapes[which].num_bounds];
    byte_buffer_printf(w->out, "%s_bucket{%s,le=\"+Inf\"} %llu\n", name, w->label.data,
                       (unsigned long long)total);
    byte_buffer_printf(w->out, "%s_sum{%s} %.17g\n", name, w->label.data, h->sum);
    byte_buffer_printf(w->out, "%s_count{%s} %llu\n", name, w->label.data,
                       (unsigned long long)total);
}

static void write_requests(writer *w, const metrics *m) {
    static const char name[] = "vllm:request_success_total";
    write_head(w, name, "counter", "Choices that ended, by reason");
    write_value(w, name, ",finished_reason=\"stop\"", (double)m->ended_stop);
    write_value(w, name, ",finished_reason=\"length\"", (double)m->ended_length);
    write_value(w, name, ",finished_reason=\"abort\"", (double)m->ended_abort);
    write_value(w, name, ",finished_reason=\"error\"", (double)m->ended_error);
}

/* What the pool is; the first of these as gateways read it. */
static void write_pool(writer *w, const metrics_engine *engine) {
    static const char config[] = "vllm:cache_config_info";
    const uint64_t size = (uint64_t)engine->kv_page_size;
    const uint64_t num_pages = size == 0 ? 0 : engine->kv_tokens / size;
    write_head(w, config, "gauge", "The KV pool in pages");
    byte_buffer_printf(
        w->out, "%s{%s,block_size=\"%d\",num_gpu_blocks=\"%llu\",cache_dtype=\"%s\"} 1\n", config,
        w->label.data, engine->kv_page_size, (unsigned long long)num_pages, engine->kv_format);
    write_head(w, "kv8:kv_pool_bytes", "gauge", "Bytes of the KV pool");
    byte_buffer_printf(w->out, "kv8:kv_pool_bytes{%s,format=\"%s\"} %.17g\n", w->label.data,
                       engine->kv_format, (double)engine->kv_bytes);
    write_head(w, "kv8:kv_pool_tokens", "gauge", "Tokens that the KV pool holds");
    byte_buffer_printf(w->out, "kv8:kv_pool_tokens{%s,format=\"%s\"} %.17g\n", w->label.data,
                       engine->kv_format, (double)engine->kv_tokens);
}

/* Steps of decode are bound by it, those of long prompts are not. */
static void write_memory_speed(writer *w, const metrics_engine *engine) {
    const double seconds = (double)engine->stats.model_ns * 1e-9;
    const double read = (double)engine->stats.read_bytes, speed = engine->memory_speed;
    write_one(w, "kv8:step_read_bytes_total", "counter", "Weights and KV that steps had to read",
              read);
    if (speed == 0) return;
    write_one(w, "kv8:memory_bytes_per_second", "gauge", "Speed of the GPU's memory, measured",
              speed);
    write_one(w, "kv8:memory_speed_share", "gauge",
              "Share of that speed at which the model's steps read, of all steps",
              seconds > 0 ? read / seconds / speed : 0);
}

static void write_engine(writer *w, const metrics_engine *engine) {
    const kv8_engine_stats *const s = &engine->stats;
    const double used = s->pages_total == 0 ? 0 : (double)s->pages_used / (double)s->pages_total;
    write_one(w, "vllm:num_requests_running", "gauge", "Requests in the batch", s->num_running);
    write_one(w, "vllm:num_requests_waiting", "gauge", "Requests that wait", s->num_waiting);
    write_one(w, "vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1", used);
    write_one(w, "vllm:prompt_tokens_total", "counter", "Prompt tokens computed",
              (double)s->prompt_tokens);
    write_one(w, "vllm:generation_tokens_total", "counter", "Tokens generated",
              (double)s->generated_tokens);
    write_one(w, "vllm:num_preemptions_total", "counter", "Requests that gave their pages back",
              (double)s->num_preemptions);
    write_one(w, "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked for",
              (double)s->prefix_queries);
    write_one(w, "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found",
              (double)s->prefix_hits);
    write_one(w, "kv8:steps_total", "counter", "Steps of the model", (double)s->num_steps);
    static const char phases[] = "kv8:step_seconds_total";
    write_head(w, phases, "counter", "Time of steps by phase");
    write_value(w, phases, ",phase=\"schedule\"", (double)s->schedule_ns * 1e-9);
    write_value(w, phases, ",phase=\"model\"", (double)s->model_ns * 1e-9);
    write_value(w, phases, ",phase=\"sample\"", (double)s->sample_ns * 1e-9);
    static const char pages[] = "kv8:kv_pages";
    write_head(w, pages, "gauge", "KV pages by state");
    write_value(w, pages, ",state=\"total\"", s->pages_total);
    write_value(w, pages, ",state=\"used\"", s->pages_used);
    write_value(w, pages, ",state=\"shared\"", s->pages_shared);
    write_one(w, "kv8:kv_clip_total", "counter", "Values clipped to the KV format's range",
              (double)s->kv_clips);
    write_one(w, "kv8:kv_nan_total", "counter", "NaN stored in the KV cache", (double)s->kv_nans);
    write_memory_speed(w, engine);
    write_pool(w, engine);
}

void metrics_write(metrics *m, const metrics_engine *engine, byte_buffer *out) {
    writer w = {.out = out};
    write_label(&w.label, engine->model);
    if (w.label.failed) out->failed = true;
    if (!w.label.failed) {
        write_engine(&w, engine);
        pthread_mutex_lock(&m->lock);
        write_requests(&w, m);
        for (int i = 0; i < NUM_METRICS; i++) write_histogram(&w, (metric)i, &m->histograms[i]);
        pthread_mutex_unlock(&m->lock);
    }
    byte_buffer_free(&w.label);
}
