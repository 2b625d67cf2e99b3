/* cmd_serve.c - kv8 serve: model, cache, engine, service and server, put together and taken apart.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "live_calibration.h"
#include "prefix_files.h"
#include "serve_args.h"
#include "server.h"

enum { DEFAULT_SEQS = 64, STEP_TOKENS_CPU = 512, STEP_TOKENS_GPU = 2048, DEFAULT_WAITING = 4096 };

typedef struct running {
    const serve_args *args;
    server *server;
    cli_model model;
    cli_scales scales;
    kv8_kv_setting setting;
    kv8_cache *cache;
    kv8_engine *engine;
    kv8_service *service;
    live_calibration *live; /* NULL without --calibrate */
    int32_t max_seqs, step_tokens, max_model_len;
    int64_t num_tokens; /* that the cache holds */
    kv8_cache_stats pool;
    kv8_model_memory memory; /* of a GPU */
    double memory_speed;     /* bytes a second; 0 on the host */
    double started;
    pthread_t signal_thread;
    bool takes_signals;
} running;

/* --- signals: the first asks the server to stop, the second ends the process --- */

static _Atomic(server *) signalled_server; /* NULL while the model loads */
static atomic_bool all_is_over;

static void *take_signals(void *opaque) {
    const sigset_t *const ends = opaque;
    int number = 0;
    sigwait(ends, &number);
    server *const s = atomic_load(&signalled_server);
    if (s != NULL) {
        server_request_stop(s);
        sigwait(ends, &number);
    }
    if (!atomic_load(&all_is_over)) _exit(128 + number);
    return NULL;
}

/* A thread waits for them, no other takes any: those that are started from here on inherit that. */
static int start_taking_signals(running *r) {
    static sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, NULL);
    const int refused = pthread_create(&r->signal_thread, NULL, take_signals, &ends);
    r->takes_signals = refused == 0;
    return refused == 0 ? CLI_OK : cli_fail("the thread for signals: %s", strerror(refused));
}

static void stop_taking_signals(const running *r) {
    if (!r->takes_signals) return;
    atomic_store(&all_is_over, true);
    pthread_kill(r->signal_thread, SIGTERM);
    pthread_join(r->signal_thread, NULL);
}

/* --- memory --- */

static uint64_t memory_bytes(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGE_SIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : 0;
}

/* What the KV cache may take: bytes, a share of the host's memory or of what the model leaves of a
 * GPU's, or what it leaves of a share. */
static int count_budget(const running *r, uint64_t *bytes_out) {
    const serve_args *const args = r->args;
    uint64_t available = memory_bytes();
    if (r->model.device != NULL) {
        const kv8_status status = kv8_device_available(r->model.device, &available);
        if (status != KV8_OK) return cli_fail_status(status);
    }
    *bytes_out = (uint64_t)(args->kv_fraction * (double)available);
    if (args->kv_bytes > 0) *bytes_out = args->kv_bytes;
    if (args->gpu_share > 0) {
        const double total = (double)kv8_device_get_info(r->model.device)->memory_bytes;
        const double left = (double)available - (1 - args->gpu_share) * total;
        *bytes_out = left > 0 ? (uint64_t)left : 0;
    }
    return CLI_OK;
}

static kv8_kv_cache_options cache_options(const running *r) {
    kv8_kv_cache_options options = KV8_KV_CACHE_OPTIONS_INIT;
    options.k_scale = r->scales.k;
    options.v_scale = r->scales.v;
    options.scale_dtype = r->scales.dtype;
    options.max_seq_len = 1;
    return options;
}

/* What one token takes, from a cache of one. */
static kv8_status measure_token(const running *r, kv8_cache_stats *stats) {
    const kv8_kv_cache_options options = cache_options(r);
    kv8_cache *cache = NULL;
    *stats = (kv8_cache_stats)KV8_CACHE_STATS_INIT;
    kv8_status status = kv8_kv_setting_cache_create(&cache, r->model.model, &r->setting, &options);
    if (status == KV8_OK) status = kv8_cache_get_stats(cache, stats);
    kv8_cache_destroy(cache);
    return status;
}

static kv8_kv_cache_options pool_options(const running *r) {
    kv8_kv_cache_options options = cache_options(r);
    options.max_seqs = r->max_seqs;
    options.max_seq_len = r->max_model_len;
    options.num_tokens = r->num_tokens;
    options.step_tokens = r->step_tokens;
    options.share_prefixes = r->args->share_prefixes;
    return options;
}

static kv8_status tokens_of(const running *r, uint64_t bytes, int64_t *num_out) {
    const kv8_kv_cache_options options = pool_options(r);
    return kv8_kv_setting_count_tokens(r->model.model, &r->setting, &options, bytes, num_out);
}

/* The KV memory does not hold `num` tokens; says how much would, to some percent. */
static int fail_budget(const running *r, uint64_t budget, int64_t num) {
    uint64_t low = budget, least = budget + (1 << 20); /* what is needed lies between them */
    int64_t held = 0;
    kv8_status status = tokens_of(r, least, &held);
    for (; status == KV8_OK && held < num; status = tokens_of(r, least, &held)) {
        low = least;
        least *= 2;
    }
    while (status == KV8_OK && least - low > least / 64) {
        const uint64_t middle = low + (least - low) / 2;
        status = tokens_of(r, middle, &held);
        if (held >= num)
            least = middle;
        else
            low = middle;
    }
    if (status != KV8_OK) return cli_fail_status(status);
    return cli_fail(
        "the KV memory is %.3g MB, must be at least %.4g MB for the windows of %d requests, a step "
        "of %d tokens and %lld more: --kv-memory, --max-num-seqs",
        (double)budget * 1e-6, ceil((double)least * 1e-6), r->max_seqs, r->step_tokens,
        (long long)num);
}

/* Tokens that fit into the KV memory, and no more than can be in use. */
static int count_tokens(running *r) {
    const int64_t most = (int64_t)r->max_seqs * r->max_model_len, least = most < 256 ? most : 256;
    uint64_t budget = 0;
    if (count_budget(r, &budget) != CLI_OK) return CLI_FAILED;
    const kv8_status status = tokens_of(r, budget, &r->num_tokens);
    if (status != KV8_OK) return cli_fail_status(status);
    if (r->num_tokens < least) return fail_budget(r, budget, least);
    if (r->args->max_model_len > r->num_tokens)
        return cli_fail("--max-model-len is %d, the KV memory holds %lld tokens: --kv-memory",
                        r->args->max_model_len, (long long)r->num_tokens);
    if (r->max_model_len > r->num_tokens) r->max_model_len = (int32_t)r->num_tokens;
    return CLI_OK;
}

/* --- building --- */

/* What a GPU's memory holds of the model, and how fast it is, while there is room for a look. */
static kv8_status measure_memory(running *r, const kv8_model_options *opened) {
    enum { CEILING_BYTES = 1 << 28 };
    kv8_model_options options = *opened;
    kv8_device_ceilings ceilings = {0};
    r->memory = (kv8_model_memory)KV8_MODEL_MEMORY_INIT;
    if (r->model.device == NULL) return KV8_OK;
    options.threads = r->model.threads;
    options.device = r->model.device;
    options.stream = r->model.stream;
    kv8_status status = kv8_model_count_memory(r->args->model, &options, &r->memory);
    if (status != KV8_OK) return status;
    status = kv8_device_measure_ceilings(r->model.device, CEILING_BYTES, &ceilings);
    r->memory_speed = ceilings.read_gb_s * 1e9;
    return status == KV8_ERR_NO_MEMORY ? KV8_OK : status;
}

static int open_model(running *r) {
    const serve_args *const args = r->args;
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    r->max_seqs = args->max_num_seqs > 0 ? args->max_num_seqs : DEFAULT_SEQS;
    const bool on_cpu = strcmp(args->device, "cpu") == 0;
    r->step_tokens = on_cpu ? STEP_TOKENS_CPU : STEP_TOKENS_GPU;
    if (r->step_tokens < r->max_seqs) r->step_tokens = r->max_seqs;
    if (args->step_tokens > 0) r->step_tokens = args->step_tokens;
    if (r->step_tokens < r->max_seqs)
        return cli_fail("--max-num-batched-tokens is %d, must be at least --max-num-seqs, %d",
                        r->step_tokens, r->max_seqs);
    options.max_step_seqs = r->max_seqs;
    options.max_step_tokens = r->step_tokens;
    if (args->batch_invariant) options.batch_invariant = 1;
    options.path = args->eager ? KV8_PATH_EAGER : KV8_PATH_AUTO;
    int status = cli_model_open(&r->model, &(cli_opening){.directory = args->model,
                                                          .device = args->device,
                                                          .options = &options,
                                                          .threads = args->threads,
                                                          .with_tokenizer = true});
    if (status != CLI_OK) return status;
    const kv8_status measured = measure_memory(r, &options);
    if (measured != KV8_OK) return cli_fail_status(measured);
    status = cli_scales_open(&r->scales, args->scales, &r->model);
    r->setting = args->setting;
    if (args->kv == NULL && r->scales.layers != NULL)
        r->setting = (kv8_kv_setting){.name = "mix", .layers = r->scales.layers};
    else if (status == CLI_OK && args->kv == NULL &&
             kv8_kv_setting_parse("e4m3", &r->setting) != KV8_OK)
        return cli_fail_kv("e4m3");
    if (args->max_model_len > r->model.info.max_seq_len)
        return cli_fail("--max-model-len is %d, the model's context holds %d", args->max_model_len,
                        r->model.info.max_seq_len);
    r->max_model_len = args->max_model_len > 0 ? args->max_model_len : r->model.info.max_seq_len;
    return status;
}

static prefix_files prefix_files_of(const running *r) {
    return (prefix_files){.directory = r->args->snapshot_dir,
                          .model = r->args->model,
                          .scales = r->args->scales,
                          .setting = r->setting.name};
}

static kv8_status make_cache(running *r) {
    const kv8_kv_cache_options cache = pool_options(r);
    r->pool = (kv8_cache_stats)KV8_CACHE_STATS_INIT;
    const kv8_status status =
        kv8_kv_setting_cache_create(&r->cache, r->model.model, &r->setting, &cache);
    return status == KV8_OK ? kv8_cache_get_stats(r->cache, &r->pool) : status;
}

static kv8_status make_engine(running *r) {
    kv8_engine_options engine = KV8_ENGINE_OPTIONS_INIT;
    engine.max_requests = r->max_seqs;
    engine.step_tokens = r->step_tokens;
    engine.max_waiting = r->args->max_waiting > 0 ? r->args->max_waiting : DEFAULT_WAITING;
    engine.share_prefixes = r->args->share_prefixes;
    engine.paced = r->args->step_tokens == 0;
    kv8_service_options service = KV8_SERVICE_OPTIONS_INIT;
    service.on_event = r->live == NULL ? server_on_event : live_calibration_on_event;
    service.cookie = r->live;
    kv8_status status = kv8_engine_create(&r->engine, r->model.model, r->cache, &engine);
    if (status == KV8_OK) status = kv8_service_start(&r->service, r->engine, &service);
    return status;
}

/* Memory by part: on the CPU weights as the checkpoint's files hold them, on a GPU all of it. */
static void print_memory(const running *r) {
    const kv8_model_memory *const m = &r->memory;
    if (r->model.device == NULL) {
        fprintf(stderr, "memory     GB: weights %.2f, KV %.2f\n",
                (double)r->model.info.bytes * 1e-9, (double)r->pool.bytes * 1e-9);
        return;
    }
    fprintf(stderr,
            "memory     GB: dense weights %.2f, experts %.2f, activations %.2f, logits %.2f, "
            "workspaces %.2f, KV %.2f\n",
            (double)m->dense * 1e-9, (double)m->experts * 1e-9, (double)m->activations * 1e-9,
            (double)m->logits * 1e-9, (double)m->workspaces * 1e-9, (double)r->pool.bytes * 1e-9);
    if (r->memory_speed > 0)
        fprintf(stderr, "           read at %.0f GB/s, measured\n", r->memory_speed * 1e-9);
    else
        fprintf(stderr, "           too full for a measurement of its speed\n");
}

/* How steps of decode are launched on a GPU: of one request, and of as many as a step has. */
static kv8_status print_paths(const running *r) {
    kv8_step_plan one = KV8_STEP_PLAN_INIT, many = KV8_STEP_PLAN_INIT;
    if (r->model.device == NULL) return KV8_OK;
    kv8_status status = kv8_model_plan_step(r->model.model, r->cache, NULL, 1, 1, &one);
    if (status == KV8_OK)
        status =
            kv8_model_plan_step(r->model.model, r->cache, NULL, r->max_seqs, r->max_seqs, &many);
    if (status != KV8_OK) return status;
    fprintf(stderr, "steps      of decode: 1 request %s, %d %s\n", kv8_step_path_name(one.path),
            r->max_seqs, kv8_step_path_name(many.path));
    if (one.why_not_persistent != NULL)
        fprintf(stderr, "           1 request not persistent: %s\n", one.why_not_persistent);
    return KV8_OK;
}

/* What a token takes in bf16, and how many the pool's bytes would hold. */
static int measure_bf16(const running *r, kv8_cache_stats *token, int64_t *num_tokens_out) {
    running other = *r;
    if (kv8_kv_setting_parse("bf16", &other.setting) != KV8_OK) return cli_fail_kv("bf16");
    other.scales = (cli_scales){0};
    const kv8_kv_cache_options options = pool_options(&other);
    kv8_status status = measure_token(&other, token);
    if (status == KV8_OK)
        status = kv8_kv_setting_count_tokens(r->model.model, &other.setting, &options,
                                             r->pool.bytes, num_tokens_out);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* What it will do, before the first request. */
static int print_plan(const running *r) {
    const kv8_model_info *const info = &r->model.info;
    kv8_cache_stats bf16;
    int64_t bf16_tokens = 0;
    const int measured = measure_bf16(r, &bf16, &bf16_tokens);
    if (measured != CLI_OK) return measured;
    const double saved = (double)bf16.bytes_per_token / (double)r->pool.bytes_per_token;
    fprintf(stderr,
            "model      %s (%s), %.3g GB of weights, %d layers, vocabulary %d\n"
            "device     %s, %s, %d threads\n"
            "kv         %s, %llu bytes a token (bf16: %llu), scales %s\n"
            "           %.3g GB: %lld tokens in pages, in bf16 they would take %.2f times as much\n"
            "           in bf16 the same memory would hold %lld tokens\n"
            "           %lld requests of %d tokens fit at once\n"
            "batch      %d requests and %d tokens a step%s, prefixes %s\n",
            r->args->model, info->architecture, (double)info->bytes * 1e-9, info->num_layers,
            info->vocab_size,
            r->model.device != NULL ? kv8_device_get_info(r->model.device)->name : "cpu",
            kv8_isa_name(r->model.isa), kv8_threads_count(r->model.threads), r->setting.name,
            (unsigned long long)r->pool.bytes_per_token, (unsigned long long)bf16.bytes_per_token,
            r->args->scales != NULL ? r->args->scales : "1", (double)r->pool.bytes * 1e-9,
            (long long)r->num_tokens, saved, (long long)bf16_tokens,
            (long long)(r->num_tokens / r->max_model_len), r->max_model_len, r->max_seqs,
            r->step_tokens, r->args->step_tokens == 0 ? ", fewer of prompts beside decode" : "",
            r->args->share_prefixes ? "shared" : "computed again");
    print_memory(r);
    const kv8_status planned = print_paths(r);
    return planned == KV8_OK ? CLI_OK : cli_fail_status(planned);
}

static int build(running *r) {
    int status = open_model(r);
    if (status == CLI_OK) status = count_tokens(r);
    if (status == CLI_OK && r->args->calibrate != NULL)
        status = live_calibration_open(&r->live, &r->model, r->args->calibrate,
                                       r->args->calibrate_warmup, r->args->calibrate_tokens);
    if (status != CLI_OK) return status;
    kv8_status made = make_cache(r);
    const prefix_files files = prefix_files_of(r);
    if (made == KV8_OK && files.directory != NULL) status = prefix_files_restore(&files, r->cache);
    if (status != CLI_OK) return status;
    if (made == KV8_OK) made = make_engine(r);
    return made == KV8_OK ? print_plan(r) : cli_fail_status(made);
}

/* --- the life of it --- */

static int start_server(running *r) {
    const serve_args *const args = r->args;
    const server_options options = {
        .host = args->host,
        .port = args->port,
        .names = args->names,
        .num_names = args->num_names,
        .api_keys = args->keys,
        .num_api_keys = args->num_keys,
        .log = args->log[0] == 't'   ? SERVER_LOG_TEXT
               : args->log[0] == 'j' ? SERVER_LOG_JSON
                                     : SERVER_LOG_NONE,
        .max_waiting_ns = (uint64_t)((double)args->max_waiting_seconds * 1e9),
        .num_threads = args->http_threads,
    };
    char error[256];
    const int status = start_taking_signals(r);
    if (status != CLI_OK) return status;
    r->server = server_start(&options, error, sizeof error);
    return r->server == NULL ? cli_fail("%s", error) : CLI_OK;
}

static int serve(running *r) {
    const server_calibration calibration = live_calibration_serve(r->live, r->service);
    const server_model model = {.service = r->service,
                                .tokenizer = r->model.tokenizer,
                                .vocab_size = r->model.info.vocab_size,
                                .max_model_len = r->max_model_len,
                                .eos = r->model.info.eos,
                                .num_eos = r->model.info.num_eos,
                                .harmony = r->args->harmony,
                                .current_date = r->args->date,
                                .kv_format = r->setting.name,
                                .kv_bytes = r->pool.bytes,
                                .kv_tokens = (uint64_t)r->num_tokens,
                                .kv_page_size = r->pool.page_size,
                                .memory_speed = r->memory_speed,
                                .calibration = r->live == NULL ? NULL : &calibration};
    if (!server_open(r->server, &model)) return cli_fail("no memory for the vocabulary");
    atomic_store(&signalled_server, r->server);
    fprintf(stderr, "serving    http://%s:%d as %s, ready in %.2f s\n", r->args->host,
            server_port(r->server), r->args->names[0], cli_seconds() - r->started);
    server_run(r->server);
    return CLI_OK;
}

int cmd_serve(int argc, char **argv) {
    serve_args args;
    int status = serve_args_parse(&args, argc, argv);
    running r = {.args = &args, .started = cli_seconds()};
    if (status < 0) status = start_server(&r);
    if (status == CLI_OK && r.server != NULL) {
        status = build(&r);
        if (status == CLI_OK) status = serve(&r);
    }
    kv8_service_stop(r.service);
    server_stop(r.server);
    const prefix_files files = prefix_files_of(&r);
    if (status == CLI_OK && r.service != NULL && files.directory != NULL)
        status = prefix_files_save(&files, r.cache);
    if (live_calibration_close(r.live) != CLI_OK && status == CLI_OK) status = CLI_FAILED;
    kv8_engine_destroy(r.engine);
    kv8_cache_destroy(r.cache);
    cli_scales_close(&r.scales);
    cli_model_close(&r.model);
    serve_args_free(&args);
    stop_taking_signals(&r);
    return status;
}
