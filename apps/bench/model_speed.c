/* model_speed.c - kv8 bench model: prefill (pp) and decode (tg) tokens per second at given depths,
 * per KV setting; columns and JSON fields as llama-bench has them.
 *
 * A depth is filled once and every repetition forks it. Tokens are random.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>
#include <time.h>

#include "bench.h"

enum { MAX_DEPTHS = 16, MAX_SETTINGS = 16, MAX_BATCHES = 16, MAX_REPETITIONS = 100 };

typedef struct model_args {
    const char *model, *kv, *depth, *batch, *device, *path;
    int32_t num_prompt, num_gen, chunk, repetitions, threads;
    int32_t batches[MAX_BATCHES], num_batches, max_batch;
    bool json;
} model_args;

/* One test of the result. */
typedef struct test_row {
    const kv8_kv_setting *setting;
    int32_t num_prompt, num_gen, depth; /* one of the first two is 0 */
    int32_t batch;                      /* sequences at once */
    uint64_t bytes_per_token;           /* of KV, in the layers that keep every token */
    double step_bytes;                  /* that a step of decode reads: the floor of its time */
    double ns[MAX_REPETITIONS];
    int32_t num;
} test_row;

typedef struct stats {
    double mean, deviation;
} stats;

static stats mean_of(const double *values, int32_t num) {
    double sum = 0, squares = 0;
    for (int32_t i = 0; i < num; i++) sum += values[i];
    const double mean = sum / num;
    for (int32_t i = 0; i < num; i++) squares += (values[i] - mean) * (values[i] - mean);
    return (stats){mean, num > 1 ? sqrt(squares / (num - 1)) : 0};
}

/* Of one sequence. */
static int32_t tokens_of(const test_row *row) {
    return row->num_prompt + row->num_gen;
}

static stats speed_of(const test_row *row) {
    double speeds[MAX_REPETITIONS];
    for (int32_t i = 0; i < row->num; i++)
        speeds[i] = row->batch * tokens_of(row) * 1e9 / row->ns[i];
    return mean_of(speeds, row->num);
}

/* --- running --- */

typedef struct bench_session {
    cli_model model;
    kv8_cache *cache;
    kv8_engine *engine;
    int32_t *token_ids; /* of the request being made */
    uint64_t random;
    double read_gb_s; /* of the GPU's memory, measured before the tests; 0 on the host */
} bench_session;

/* Weights and KV that a step of decode reads: dense ones, the experts that so many tokens choose if
 * each chooses by chance, and every token in reach. */
static double step_bytes(const kv8_model_info *info, const kv8_cache_stats *cache,
                         const test_row *row) {
    const double chosen = (double)info->num_experts_per_token / info->num_experts;
    const double row_bytes = 2.0 * info->hidden_size;
    const double per_token = (double)info->bytes_per_decoded_token;
    const double others =
        (double)info->bytes - row_bytes * info->vocab_size - per_token + row_bytes;
    const double experts = chosen < 1 ? others / (1 - chosen) : 0;
    const double read = experts * (1 - pow(1 - chosen, row->batch));
    const double length = row->depth + row->num_gen / 2.0;
    const double window = length < info->window_left + 1 ? length : info->window_left + 1;
    const double whole = (double)cache->bytes_per_token_unwindowed;
    const double kv = whole * length + ((double)cache->bytes_per_token - whole) * window;
    return per_token - experts * chosen + read + row->batch * kv;
}

/* Room for a sequence of max_len tokens, and for one fork of a prompt or a batch that decodes. */
static kv8_status open_engine(bench_session *s, const model_args *args,
                              const kv8_kv_setting *setting, int32_t max_len, int32_t longest) {
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    const int64_t forks = (int64_t)args->max_batch * args->num_gen;
    cache_options.max_seqs = engine_options.max_requests = args->max_batch + 1;
    cache_options.max_seq_len = max_len;
    cache_options.num_tokens = max_len + (forks > longest ? forks : longest);
    cache_options.step_tokens = engine_options.step_tokens = args->chunk;
    const kv8_status status =
        kv8_kv_setting_cache_create(&s->cache, s->model.model, setting, &cache_options);
    if (status != KV8_OK) return status;
    return kv8_engine_create(&s->engine, s->model.model, s->cache, &engine_options);
}

static void close_engine(bench_session *s) {
    kv8_engine_destroy(s->engine);
    kv8_cache_destroy(s->cache);
    s->engine = NULL;
    s->cache = NULL;
}

/* Submits the request with `num` random tokens. */
static kv8_status submit(bench_session *s, kv8_request *request, int32_t num, uint64_t *id_out) {
    for (int32_t i = 0; i < num; i++)
        s->token_ids[i] = (int32_t)(bench_random(&s->random) % (uint64_t)s->model.info.vocab_size);
    request->token_ids = s->token_ids;
    request->num_tokens = num;
    return kv8_engine_submit(s->engine, request, id_out);
}

/* Steps until nothing is left to do. */
static kv8_status run_engine(const bench_session *s) {
    int32_t num_events = 1;
    while (num_events > 0 && cli_interrupted() == 0) {
        const kv8_status status = kv8_engine_step(s->engine, &num_events);
        if (status != KV8_OK) return status;
    }
    return KV8_OK;
}

/* A kv8_logits_visitor: that logits are looked at makes the engine compute them. */
static void look_away(void *cookie, int32_t first, int32_t num_rows, const float *logits) {
    (void)cookie;
    (void)first;
    (void)num_rows;
    (void)logits;
}

/* Prefill ends with the first token; decode takes given tokens one by one, logits of each. */
static kv8_request request_of(const test_row *row, uint64_t depth) {
    kv8_request request = KV8_REQUEST_INIT;
    request.parent = depth;
    if (row->num_prompt > 0) {
        request.max_tokens = 1;
    } else {
        request.max_chunk = 1;
        request.visit = look_away;
    }
    return request;
}

static kv8_status run_test(bench_session *s, uint64_t depth, int32_t repetitions, test_row *row) {
    kv8_request request = request_of(row, depth);
    kv8_status status = KV8_OK;
    /* The first run warms up and is not counted. */
    for (int32_t i = -1; status == KV8_OK && i < repetitions && cli_interrupted() == 0; i++) {
        uint64_t id = 0;
        for (int32_t b = 0; status == KV8_OK && b < row->batch; b++)
            status = submit(s, &request, tokens_of(row), &id);
        const double begin = cli_seconds();
        if (status == KV8_OK) status = run_engine(s);
        if (i >= 0) row->ns[row->num++] = (cli_seconds() - begin) * 1e9;
    }
    return status;
}

/* Fills the depth: a request at rest that the tests fork. *id_out is 0 without one. */
static kv8_status fill_depth(bench_session *s, int32_t depth, uint64_t *id_out) {
    *id_out = 0;
    if (depth == 0) return KV8_OK;
    kv8_request request = KV8_REQUEST_INIT;
    request.hold = 1;
    const kv8_status status = submit(s, &request, depth, id_out);
    return status == KV8_OK ? run_engine(s) : status;
}

/* A test and its row. */
static kv8_status add_test(bench_session *s, const model_args *args, uint64_t filled, test_row row,
                           test_row *rows, int32_t *num_rows) {
    kv8_cache_stats cache = KV8_CACHE_STATS_INIT;
    const kv8_status status = kv8_cache_get_stats(s->cache, &cache);
    row.bytes_per_token = cache.bytes_per_token_unwindowed;
    row.step_bytes = row.num_gen > 0 ? step_bytes(&s->model.info, &cache, &row) : 0;
    if (tokens_of(&row) == 0 || status != KV8_OK) return status;
    const kv8_status ran = run_test(s, filled, args->repetitions, &row);
    rows[(*num_rows)++] = row;
    return ran;
}

/* All tests at one depth: prefill of one sequence, decode of each batch. */
static kv8_status run_depth(bench_session *s, const model_args *args, const kv8_kv_setting *setting,
                            int32_t depth, test_row *rows, int32_t *num_rows) {
    const int32_t longest = args->num_prompt > args->num_gen ? args->num_prompt : args->num_gen;
    uint64_t filled = 0;
    kv8_status status = open_engine(s, args, setting, depth + longest, longest);
    if (status == KV8_OK) status = fill_depth(s, depth, &filled);
    test_row row = {.setting = setting, .depth = depth, .batch = 1};
    row.num_prompt = args->num_prompt;
    if (status == KV8_OK) status = add_test(s, args, filled, row, rows, num_rows);
    row.num_prompt = 0;
    row.num_gen = args->num_gen;
    for (int32_t i = 0; status == KV8_OK && i < args->num_batches && cli_interrupted() == 0; i++) {
        row.batch = args->batches[i];
        status = add_test(s, args, filled, row, rows, num_rows);
    }
    close_engine(s);
    return status;
}

/* --- the results --- */

static const char *backend_name(const bench_session *s) {
    return s->model.device != NULL ? "CUDA" : kv8_isa_name(s->model.isa);
}

static void test_name(const test_row *row, char *out, size_t size) {
    char batch[16] = "", depth[24] = "";
    if (row->batch > 1) snprintf(batch, sizeof batch, " x %d", row->batch);
    if (row->depth > 0) snprintf(depth, sizeof depth, " @ d%d", row->depth);
    snprintf(out, size, "%s%d%s%s", row->num_prompt > 0 ? "pp" : "tg", tokens_of(row), batch,
             depth);
}

/* Of the speed that reading a step's bytes allows; 0 where that is not known. */
static double share_of_floor(const bench_session *s, const test_row *row) {
    if (s->read_gb_s <= 0 || row->step_bytes <= 0) return 0;
    return speed_of(row).mean / row->batch * row->step_bytes / (s->read_gb_s * 1e9);
}

static void print_shares(const bench_session *s, const test_row *rows, int32_t num) {
    printf("\nread ceiling %.0f GB/s; decode at so much of what the bytes of its steps allow:\n",
           s->read_gb_s);
    for (int32_t i = 0; i < num; i++) {
        char test[48];
        test_name(&rows[i], test, sizeof test);
        if (rows[i].num_gen > 0)
            printf("%-14s %-18s %8.3f GB  %5.1f %%\n", rows[i].setting->name, test,
                   rows[i].step_bytes * 1e-9, 100 * share_of_floor(s, &rows[i]));
    }
}

static void print_table(const bench_session *s, const model_args *args, const test_row *rows,
                        int32_t num) {
    printf("| %-24s | %10s | %10s | %-11s | %7s | %-14s | %-16s | %20s |\n", "model", "size",
           "params", "backend", "threads", "kv", "test", "t/s");
    printf("| %.24s | ---------: | ---------: | ----------- | ------: | %.14s | %.16s | %.19s: |\n",
           "------------------------", "--------------", "----------------", "-------------------");
    for (int32_t i = 0; i < num; i++) {
        char test[48], size[32], params[32], speed[48];
        const stats t = speed_of(&rows[i]);
        test_name(&rows[i], test, sizeof test);
        snprintf(size, sizeof size, "%.2f MiB", (double)s->model.info.bytes / 1048576.0);
        snprintf(params, sizeof params, "%.2f M", (double)s->model.info.num_parameters / 1e6);
        snprintf(speed, sizeof speed, "%.2f +- %.2f", t.mean, t.deviation);
        printf("| %-24s | %10s | %10s | %-11s | %7d | %-14s | %-16s | %20s |\n", args->model, size,
               params, backend_name(s), kv8_threads_count(s->model.threads), rows[i].setting->name,
               test, speed);
    }
    if (s->read_gb_s > 0) print_shares(s, rows, num);
}

static json_t *samples_json(const test_row *row, bool speeds) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < row->num; i++) {
        json_t *const value = speeds ? json_real(row->batch * tokens_of(row) * 1e9 / row->ns[i])
                                     : json_integer((json_int_t)row->ns[i]);
        json_array_append_new(list, value);
    }
    return list;
}

static json_t *test_json(const bench_session *s, const model_args *args, const test_row *row) {
    const stats ns = mean_of(row->ns, row->num), speed = speed_of(row);
    char test_time[32] = "";
    const time_t now = time(NULL);
    strftime(test_time, sizeof test_time, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    return json_pack(
        "{s:s, s:s, s:o, s:s, s:I, s:I, s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:I, s:i, s:i, s:i, "
        "s:s, "
        "s:I, s:I,"
        " s:f, s:f, s:o, s:o, s:f, s:f}",
        "version", kv8_version(), "backends", backend_name(s), "model_filename",
        cli_json_text(args->model), "model_type", s->model.info.architecture, "model_size",
        (json_int_t)s->model.info.bytes, "model_n_params", (json_int_t)s->model.info.num_parameters,
        "n_batch", (int)args->chunk, "n_ubatch", (int)args->chunk, "n_parallel", (int)row->batch,
        "n_threads", (int)kv8_threads_count(s->model.threads), "kv", row->setting->name, "type_k",
        kv8_dtype_name(row->setting->full_k), "type_v", kv8_dtype_name(row->setting->full_v),
        "kv_bytes_per_token", (json_int_t)row->bytes_per_token, "n_prompt", (int)row->num_prompt,
        "n_gen", (int)row->num_gen, "n_depth", (int)row->depth, "test_time", test_time, "avg_ns",
        (json_int_t)ns.mean, "stddev_ns", (json_int_t)ns.deviation, "avg_ts", speed.mean,
        "stddev_ts", speed.deviation, "samples_ns", samples_json(row, false), "samples_ts",
        samples_json(row, true), "step_bytes", row->step_bytes, "share_of_floor",
        share_of_floor(s, row));
}

static int print_json(const bench_session *s, const model_args *args, const test_row *rows,
                      int32_t num) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < num; i++) json_array_append_new(list, test_json(s, args, &rows[i]));
    return cli_write_json(json_pack("{s:s, s:o}", "version", kv8_version(), "rows", list), stdout,
                          "stdout");
}

/* --- the verb --- */

static int parse(model_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"prompt", "N", "tokens of the prefill test (512); 0 = none", CLI_INT, &args->num_prompt, 0,
         1 << 20},
        {"gen", "N", "tokens of the decode test (32); 0 = none", CLI_INT, &args->num_gen, 0,
         1 << 20},
        {"batch", "LIST", "sequences that decode at once (1)", CLI_TEXT, &args->batch},
        {"chunk", "N", "most tokens of a step of prefill (512)", CLI_INT, &args->chunk, 1, 1 << 17},
        {"depth", "LIST", "tokens already in the cache (0,4096,32768)", CLI_TEXT, &args->depth},
        {"kv", "LIST", "KV settings (bf16,e4m3,int8)", CLI_TEXT, &args->kv},
        {"repetitions", "N", "of every test (5)", CLI_INT, &args->repetitions, 1, MAX_REPETITIONS},
        {"device", "DEVICE", "what computes: cpu, cuda or cuda:N, the Nth GPU (cpu)", CLI_TEXT,
         &args->device},
        {"path", "NAME", "steps of one token on a GPU: graph or eager (graph)", CLI_TEXT,
         &args->path},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"json", NULL, "print one JSON object", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 bench model MODEL [options]",
        .about =
            "Prefill (pp) and decode (tg) speed in tokens per second, one sequence, random\n"
            "tokens, with so many tokens already in the cache.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    return cli_parse(&command, argc, argv, &args->model);
}

/* Before any work: does every depth leave room for the tests? */
static int check_depths(const bench_session *s, const model_args *args, const int32_t *depths,
                        int32_t num_depths) {
    const int32_t longest = args->num_prompt > args->num_gen ? args->num_prompt : args->num_gen;
    const int32_t context = s->model.info.max_seq_len;
    for (int32_t i = 0; i < num_depths; i++) {
        if ((int64_t)depths[i] + longest > context)
            return cli_fail("--depth %d and a test of %d tokens: the model's context holds %d",
                            depths[i], longest, context);
    }
    return CLI_OK;
}

static kv8_status measure_ceiling(bench_session *s) {
    enum { CEILING_BYTES = 1 << 30 };
    kv8_device_ceilings ceilings = {0};
    if (s->model.device == NULL) return KV8_OK;
    const kv8_status status =
        kv8_device_measure_ceilings(s->model.device, CEILING_BYTES, &ceilings);
    s->read_gb_s = ceilings.read_gb_s;
    return status;
}

static int run(bench_session *s, const model_args *args, const kv8_kv_setting *settings,
               int32_t num_settings, const int32_t *depths, int32_t num_depths) {
    static test_row rows[(1 + MAX_BATCHES) * MAX_SETTINGS * MAX_DEPTHS];
    int32_t num_rows = 0;
    if (check_depths(s, args, depths, num_depths) != CLI_OK) return CLI_FAILED;
    s->token_ids = malloc((size_t)s->model.info.max_seq_len * sizeof *s->token_ids);
    if (s->token_ids == NULL) return cli_fail("no memory for tokens");
    cli_progress progress;
    cli_progress_begin(&progress);
    kv8_status status = measure_ceiling(s);
    const uint64_t total = (uint64_t)num_settings * (uint64_t)num_depths;
    for (uint64_t i = 0; status == KV8_OK && i < total && cli_interrupted() == 0; i++) {
        const kv8_kv_setting *const setting = &settings[i / (uint64_t)num_depths];
        cli_progress_show(&progress, setting->name, i, total);
        status = run_depth(s, args, setting, depths[i % (uint64_t)num_depths], rows, &num_rows);
    }
    cli_progress_end(&progress);
    if (status != KV8_OK) return cli_fail_status(status);
    if (cli_interrupted() != 0) return cli_interrupted();
    if (args->json) {
        const int printed = print_json(s, args, rows, num_rows);
        return printed == CLI_OK ? cli_finish_stdout() : printed;
    }
    print_table(s, args, rows, num_rows);
    return cli_finish_stdout();
}

/* What a step of the tests takes at most. */
static int take_batches(model_args *args, kv8_model_options *options) {
    enum { LARGEST = 1 << 12 };
    const int status = bench_list("batch", args->batch, 1, LARGEST, args->batches, MAX_BATCHES,
                                  &args->num_batches);
    if (status != CLI_OK) return status;
    for (int32_t i = 0; i < args->num_batches; i++)
        args->max_batch = args->batches[i] > args->max_batch ? args->batches[i] : args->max_batch;
    if (args->chunk < args->max_batch) args->chunk = args->max_batch;
    options->max_step_seqs = args->max_batch;
    options->max_step_tokens = args->chunk;
    return cli_path(args->path, options);
}

int bench_model(int argc, char **argv) {
    model_args args = {.kv = "bf16,e4m3,int8",
                       .depth = "0,4096,32768",
                       .num_prompt = 512,
                       .num_gen = 32,
                       .batch = "1",
                       .chunk = 512,
                       .repetitions = 5};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    int32_t depths[MAX_DEPTHS], num_depths = 0, num_settings = 0;
    kv8_kv_setting settings[MAX_SETTINGS];
    status = bench_list("depth", args.depth, 0, 1 << 24, depths, MAX_DEPTHS, &num_depths);
    if (status != CLI_OK) return status;
    status = cli_parse_kv(args.kv, settings, MAX_SETTINGS, &num_settings);
    if (status != CLI_OK) return status;
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    status = take_batches(&args, &options);
    if (status != CLI_OK) return status;
    cli_catch_interrupt();
    bench_session session = {.random = 1};
    status = cli_model_open(&session.model, &(cli_opening){.directory = args.model,
                                                           .device = args.device,
                                                           .options = &options,
                                                           .threads = args.threads});
    if (status == CLI_OK) status = run(&session, &args, settings, num_settings, depths, num_depths);
    free(session.token_ids);
    cli_model_close(&session.model);
    return status;
}
