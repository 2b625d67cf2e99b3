/* bench_step.c - the host's own time of a step of a model on a GPU, without one: the driver is the
 * stand-in of tests/driver, whose calls are counted and whose time is taken off. Microseconds by
 * requests at a depth, of an engine's step and of its parts, and of kv8_model_step alone;
 * the model has the layers, heads and widths of gpt-oss, 4 experts and a small vocabulary, which
 * the host's work does not depend on.
 *
 *   bench_step [layers [requests [depth [cold]]]]     24 and 36, 1 to 512, 1024 and 0, without
 *
 * "cold": so many MiB of other memory are written with each draw, as the caches forget requests
 * while a GPU computes. "admit": a step that admits as many requests, which fork others that rest.
 *
 * A figure is the mean of 16 steps, in which each request fills a page, the best of all blocks of
 * 16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base_impl.h"
#include "engine_impl.h"
#include "sampler_args.h"
#include "stand_in.h"

#define TRY(call)                                                      \
    do {                                                               \
        if ((call) != KV8_OK) {                                        \
            fprintf(stderr, "bench_step: %s\n", kv8_status_message()); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

enum {
    VOCAB = 512,
    OWN = 64, /* tokens of a prompt that no other has */
    MAX_SEQS = 512,
    BLOCK = 16, /* steps */
    BLOCKS = 12,
    ROUNDS = 5, /* of engines */
    GENERATED = (BLOCKS + 2) * BLOCK,
    STEP_TOKENS = 2048,
    MAX_DEPTH = 1 << 17
};

static int depth = 1024; /* tokens of a prompt */
static uint8_t *cold;    /* [cold_bytes] */
static size_t cold_bytes;
static int32_t prompt[MAX_DEPTH];

typedef struct machine {
    kv8_device *device;
    kv8_stream *stream;
    kv8_model *model;
    kv8_cache *cache;
} machine;

/* What the host spent, in seconds, and calls of the driver. */
typedef struct spent {
    double step, schedule, model, draw, tables, admit;
    double calls;
} spent;

/* --- the model --- */

static void open_model(machine *m, int layers) {
    char path[] = "/tmp/bench_step.XXXXXX", name[64];
    const int fd = mkstemp(path);
    FILE *const file = fd < 0 ? NULL : fdopen(fd, "w");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    fprintf(file,
            "{\"architectures\": [\"GptOssForCausalLM\"], \"model_type\": \"gpt_oss\", "
            "\"num_hidden_layers\": %d, \"num_local_experts\": 4, \"num_experts_per_tok\": 4, "
            "\"hidden_size\": 2880, \"intermediate_size\": 2880, \"num_attention_heads\": 64, "
            "\"num_key_value_heads\": 8, \"head_dim\": 64, \"vocab_size\": %d, "
            "\"sliding_window\": 128, \"max_position_embeddings\": 131072, "
            "\"rms_norm_eps\": 1e-05, \"swiglu_limit\": 7.0, \"hidden_act\": \"silu\", "
            "\"attention_bias\": true, \"tie_word_embeddings\": false, \"rope_theta\": 150000, "
            "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, "
            "\"beta_slow\": 1.0, \"truncate\": false, "
            "\"original_max_position_embeddings\": 4096}, "
            "\"quantization_config\": {\"quant_method\": \"mxfp4\"}, \"eos_token_id\": [0]}",
            layers, VOCAB);
    fclose(file);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = m->device;
    options.stream = m->stream;
    options.max_step_tokens = STEP_TOKENS;
    options.max_step_seqs = MAX_SEQS;
    snprintf(name, sizeof name, KV8_RANDOM_PREFIX "%s", path);
    TRY(kv8_model_open(&m->model, name, &options));
    remove(path);
}

/* Pages for what the requests do not share; twice as many sequences, for those that rest. */
static void open_cache(machine *m, int num) {
    kv8_kv_setting setting;
    kv8_kv_cache_options options = KV8_KV_CACHE_OPTIONS_INIT;
    options.max_seqs = 2 * num;
    options.max_seq_len = depth + GENERATED;
    options.num_tokens = options.max_seq_len + (int64_t)num * (OWN + GENERATED);
    options.step_tokens = STEP_TOKENS;
    TRY(kv8_kv_setting_parse("e4m3", &setting));
    TRY(kv8_kv_setting_cache_create(&m->cache, m->model, &setting, &options));
}

/* The sampler draws id 1 in every row; no other kernel computes. What this takes is the driver's.
 */
static void draw_ones(const stand_in_launch *launch) {
    if (strncmp(launch->name, "kv8_draw_", 9) != 0) return;
    for (size_t i = 0; i < cold_bytes; i += 64) cold[i]++;
    const kv8_draw_args *const args = launch->args;
    const uint32_t rows = launch->grid[0] / (launch->cluster[0] == 0 ? 1 : launch->cluster[0]);
    for (uint32_t i = 0; i < rows; i++) args->drawn[i] = (kv8_drawn_row){.token = 1, .bad_id = -1};
}

static void forget_launches(void) {
    stand_in_reset();
    stand_in_on_launch(draw_ones);
}

/* --- prompts --- */

static void write_prompt(int i) {
    for (int t = 0; t < depth; t++)
        prompt[t] = 1 + (t < depth - OWN ? t : t * (i + 7)) % (VOCAB - 1);
}

/* --- an engine's steps --- */

static kv8_engine_stats stats_of(const kv8_engine *engine) {
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    TRY(kv8_engine_get_stats(engine, &stats));
    return stats;
}

static kv8_engine *open_engine(const machine *m, int num) {
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.max_requests = num;
    options.share_prefixes = 1;
    kv8_engine *engine = NULL;
    TRY(kv8_engine_create(&engine, m->model, m->cache, &options));
    for (int i = 0; i < num; i++) {
        int32_t events = 0;
        uint64_t id = 0;
        kv8_sampling sampling = KV8_SAMPLING_INIT;
        sampling.temperature = 1;
        sampling.top_p = 0.9f;
        sampling.seed = (uint64_t)i;
        kv8_request request = KV8_REQUEST_INIT;
        request.token_ids = prompt;
        request.num_tokens = depth;
        request.max_tokens = GENERATED;
        request.sampling = &sampling;
        write_prompt(i);
        TRY(kv8_engine_submit(engine, &request, &id));
        for (int t = 0; i == 0 && t < depth; t += STEP_TOKENS) /* others find its pages */
            TRY(kv8_engine_step(engine, &events));
    }
    return engine;
}

static spent run_block(kv8_engine *engine) {
    int32_t events = 0;
    spent took = {0};
    forget_launches();
    const kv8_engine_stats before = stats_of(engine);
    const int64_t calls = stand_in_num_calls(NULL);
    const double in_driver = stand_in_seconds();
    const uint64_t begin = kv8_time_ns();
    for (int i = 0; i < BLOCK; i++) TRY(kv8_engine_step(engine, &events));
    took.step = (double)(kv8_time_ns() - begin) * 1e-9;
    const double driver = stand_in_seconds() - in_driver;
    took.calls = (double)(stand_in_num_calls(NULL) - calls);
    const kv8_engine_stats after = stats_of(engine);
    took.step -= driver;
    took.schedule = (double)(after.schedule_ns - before.schedule_ns) * 1e-9;
    took.model = (double)(after.model_ns - before.model_ns) * 1e-9 - driver;
    took.draw = (double)(after.sample_ns - before.sample_ns) * 1e-9;
    return took;
}

static void time_engine(const machine *m, int num, spent *best) {
    int32_t events = 0;
    kv8_engine *const engine = open_engine(m, num);
    while (stats_of(engine).generated_tokens < (uint64_t)num) TRY(kv8_engine_step(engine, &events));
    for (int i = 0; i < BLOCKS; i++) {
        spent took = run_block(engine);
        took.admit = best->admit;
        if (took.step < best->step) *best = took;
    }
    kv8_engine_destroy(engine);
}

/* Steps until nobody is left. */
static void run_out(kv8_engine *engine) {
    int32_t events = 1;
    while (events > 0) TRY(kv8_engine_step(engine, &events));
}

static void time_admission(const machine *m, int num, spent *best) {
    static uint64_t resting[MAX_SEQS];
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.max_requests = 2 * num;
    options.share_prefixes = 1;
    kv8_engine *engine = NULL;
    TRY(kv8_engine_create(&engine, m->model, m->cache, &options));
    for (int i = 0; i < num; i++) {
        kv8_request request = KV8_REQUEST_INIT;
        request.token_ids = prompt;
        request.num_tokens = depth;
        request.hold = 1;
        write_prompt(i);
        TRY(kv8_engine_submit(engine, &request, &resting[i]));
        run_out(engine);
    }
    for (int round = 0; round < ROUNDS; round++) {
        int32_t events = 0;
        forget_launches();
        for (int i = 0; i < num; i++) {
            const int32_t id = 1 + (i * 31 + round) % (VOCAB - 1);
            kv8_request request = KV8_REQUEST_INIT;
            request.parent = resting[i];
            request.token_ids = &id;
            request.num_tokens = 1;
            request.max_tokens = BLOCK;
            TRY(kv8_engine_submit(engine, &request, &(uint64_t){0}));
        }
        const double in_driver = stand_in_seconds();
        const uint64_t begin = kv8_time_ns();
        TRY(kv8_engine_step(engine, &events));
        const double took = (double)(kv8_time_ns() - begin) * 1e-9;
        const double own = took - (stand_in_seconds() - in_driver);
        if (own < best->admit) best->admit = own;
        run_out(engine);
    }
    kv8_engine_destroy(engine);
}

/* --- the model's steps, and page tables, alone --- */

static double time_tables(const machine *m, const kv8_seq *seqs, int num) {
    const double in_driver = stand_in_seconds();
    const uint64_t begin = kv8_time_ns();
    for (int i = 0; i < 2 * BLOCK; i++) {
        kv8_page_table pages = KV8_PAGE_TABLE_INIT;
        TRY(kv8_cache_page_table_device(m->cache, i % 2, seqs, num, &pages));
        if (i % 2 == 1) TRY(kv8_stream_synchronize(m->stream));
    }
    return (double)(kv8_time_ns() - begin) * 1e-9 - (stand_in_seconds() - in_driver);
}

/* A step of the model, and in it the page tables of both kinds of layers. */
static void time_model(const machine *m, int num, spent *best) {
    static int32_t indptr[MAX_SEQS + 1], ids[MAX_SEQS], rows[MAX_SEQS];
    static float logits[MAX_SEQS * VOCAB];
    static kv8_seq seqs[MAX_SEQS];
    for (int i = 0; i < num; i++) {
        int32_t matched = 0;
        write_prompt(i);
        TRY(kv8_cache_prefix_match(m->cache, prompt, depth, &seqs[i], &matched));
        TRY(kv8_cache_extend(m->cache, seqs[i], depth - matched, prompt + matched));
        TRY(kv8_cache_publish(m->cache, seqs[i]));
    }
    for (int i = 0; i < num; i++) {
        indptr[i + 1] = i + 1;
        rows[i] = ids[i] = i;
    }
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = num,
                           .seqs = seqs,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = num,
                           .logit_rows = rows,
                           .logits_out = logits};
    TRY(kv8_model_step(m->model, m->cache, &step));
    for (int block = 0; block < BLOCKS; block++) {
        forget_launches();
        const double in_driver = stand_in_seconds();
        const uint64_t begin = kv8_time_ns();
        for (int i = 0; i < BLOCK; i++) TRY(kv8_model_step(m->model, m->cache, &step));
        const double took = (double)(kv8_time_ns() - begin) * 1e-9;
        const double own = took - (stand_in_seconds() - in_driver);
        if (own < best->step) best->step = own;
        const double tables = time_tables(m, seqs, num);
        if (tables < best->tables) best->tables = tables;
    }
    for (int i = 0; i < num; i++) TRY(kv8_cache_seq_destroy(m->cache, seqs[i]));
}

/* --- */

static double us(double seconds) {
    return seconds * 1e6 / BLOCK;
}

static void time_layers(machine *m, int layers, int asked) {
    static const int nums[] = {1, 8, 64, 256, 512};
    open_model(m, layers);
    for (size_t i = 0; i < sizeof nums / sizeof *nums; i++) {
        if (asked != 0 && asked != nums[i]) continue;
        open_cache(m, nums[i]);
        spent e = {.step = 1e9, .admit = 1e9};
        time_admission(m, nums[i], &e);
        for (int round = 0; round < ROUNDS; round++) time_engine(m, nums[i], &e);
        spent model = {.step = 1e9, .tables = 1e9};
        time_model(m, nums[i], &model);
        printf("%6d %9d %8.1f %8.1f %8.1f %8.1f %8.1f %12.1f %8.1f %7.1f %8.0f\n", layers, nums[i],
               us(e.step), us(e.schedule), us(e.model), us(e.draw),
               us(e.step - e.schedule - e.model - e.draw), us(model.step), us(model.tables),
               e.calls / BLOCK, e.admit * 1e6);
        kv8_cache_destroy(m->cache);
    }
    kv8_model_close(m->model);
}

int main(int argc, char **argv) {
    const int asked = argc > 1 ? atoi(argv[1]) : 0, requests = argc > 2 ? atoi(argv[2]) : 0;
    if (argc > 3) depth = atoi(argv[3]);
    if (argc > 4) cold_bytes = (size_t)atoi(argv[4]) << 20;
    if (depth < OWN || depth > MAX_DEPTH)
        return fprintf(stderr, "bench_step: depth is %d\n", depth), 2;
    cold = calloc(cold_bytes + 1, 1);
    if (cold == NULL) return perror("bench_step"), 1;
    machine m = {0};
    forget_launches();
    TRY(kv8_device_open(&m.device, 0));
    TRY(kv8_stream_create(&m.stream, m.device));
    printf("host's us of a step\n%6s %9s %8s %8s %8s %8s %8s %12s %8s %7s %8s\n", "layers",
           "requests", "engine", "schedule", "model", "choose", "tell", "model alone", "tables",
           "calls", "admit");
    for (int layers = 24; layers <= 36; layers += 12)
        if (asked == 0 || asked == layers) time_layers(&m, layers, requests);
    kv8_stream_destroy(m.stream);
    kv8_device_close(m.device);
    free(cold);
}
