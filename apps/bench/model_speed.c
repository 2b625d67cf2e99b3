/* model_speed.c - kv8 bench model: prefill (pp) and decode (tg) tokens per second at given depths,
 * per KV setting.
 *
 * A depth is filled once and every repetition forks it. Several sequences have as many tokens each
 * of their own, whose keys and values are noise but for the last few's, so that no two read the
 * same memory. Tokens are random.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "model_bench.h"

/* --- running --- */

/* Weights and KV that a step of decode reads, and the seconds it takes at least: dense weights, the
 * experts that its tokens choose, as counted on a GPU, on the host as if each token chose by
 * chance, and every token in reach. */
static void count_step(const bench_session *s, const kv8_cache_stats *cache, test_row *row) {
    const kv8_model_info *const info = &s->model.info;
    const double length = row->depth + row->num_gen / 2.0;
    const double window = length < info->window_left + 1 ? length : info->window_left + 1;
    const double whole = (double)cache->bytes_per_token_unwindowed;
    const double kv =
        row->batch * (whole * length + ((double)cache->bytes_per_token - whole) * window);
    row->step_bytes = kv8_model_step_bytes(info, row->batch, row->experts_read) + kv;
    if (s->product_tflop_s > 0)
        row->step_seconds = kv8_model_step_seconds(info, row->batch, row->experts_read,
                                                   s->read_gb_s, s->product_tflop_s) +
                            kv * 1e-9 / s->read_gb_s;
}

static int32_t longest_test(const model_args *args) {
    return args->num_prompt > args->num_gen ? args->num_prompt : args->num_gen;
}

/* Room for the sequences of a batch at the depth, and what a test adds to them: tokens of each, or
 * one's prompt. */
static kv8_status open_engine(bench_session *s, const model_args *args,
                              const kv8_kv_setting *setting, int32_t depth) {
    enum { ROUNDED = 4 * BENCH_PAGE }; /* up to whole pages, and a fork copies one that is begun */
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    cache_options.max_seqs = engine_options.max_requests = 2 * args->max_batch;
    cache_options.max_seq_len = depth + longest_test(args);
    cache_options.num_tokens =
        args->max_batch * ((int64_t)depth + args->num_gen + ROUNDED) + args->num_prompt;
    engine_options.share_prefixes = args->max_batch > 1;
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

static void draw_tokens(bench_session *s, int32_t num) {
    for (int32_t i = 0; i < num; i++)
        s->token_ids[i] = (int32_t)(bench_random(&s->random) % (uint64_t)s->model.info.vocab_size);
}

/* Submits the request with `num` random tokens. */
static kv8_status submit(bench_session *s, kv8_request *request, int32_t num, uint64_t *id_out) {
    draw_tokens(s, num);
    request->token_ids = s->token_ids;
    request->num_tokens = num;
    return kv8_engine_submit(s->engine, request, id_out);
}

/* A step of the engine, in which no request may fail: a test of fewer steps has no speed. */
static kv8_status run_step(bench_session *s, int32_t *num_events_out) {
    const kv8_status status = kv8_engine_step(s->engine, num_events_out);
    for (int32_t i = 0; status == KV8_OK && i < *num_events_out; i++) {
        const kv8_event *const event = kv8_engine_event(s->engine, i);
        if (event->finish != KV8_FINISH_FAILED) continue;
        snprintf(s->failure, sizeof s->failure, "%s", event->message);
        return KV8_ERR_INVALID;
    }
    return status;
}

/* Steps until nothing is left to do. */
static kv8_status run_engine(bench_session *s) {
    int32_t num_events = 1;
    kv8_status status = KV8_OK;
    while (status == KV8_OK && num_events > 0 && cli_interrupted() == 0)
        status = run_step(s, &num_events);
    return status;
}

/* A request of `num` tokens for each sequence of the row: a prompt, which ends with the first token
 * drawn, or one token and what is drawn after it, by chance, so that sequences stay apart. */
static kv8_status submit_batch(bench_session *s, const test_row *row, int32_t num) {
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.repetition_penalty = sampling.temperature = sampling.top_p = 1;
    kv8_status status = KV8_OK;
    uint64_t id = 0;
    for (int32_t b = 0; status == KV8_OK && b < row->batch; b++) {
        kv8_request request = KV8_REQUEST_INIT;
        sampling.seed = bench_random(&s->random);
        request.parent = s->filled[b];
        request.max_tokens = row->num_prompt > 0 ? 1 : num;
        request.sampling = row->num_prompt > 0 ? NULL : &sampling;
        request.ignore_eos = 1;
        status = submit(s, &request, row->num_prompt > 0 ? num : 1, &id);
    }
    return status;
}

static kv8_status run_test(bench_session *s, int32_t repetitions, test_row *row) {
    kv8_status status = KV8_OK;
    /* The first run warms up and is not counted. */
    for (int32_t i = -1; status == KV8_OK && i < repetitions && cli_interrupted() == 0; i++) {
        status = submit_batch(s, row, model_test_tokens(row));
        const double begin = cli_seconds();
        if (status == KV8_OK) status = run_engine(s);
        if (i >= 0) row->ns[row->num++] = (cli_seconds() - begin) * 1e9;
    }
    return status;
}

/* How the test's steps, a token of each sequence or a piece of the prompt, would be launched now.
 */
static kv8_status plan_steps(const bench_session *s, const model_args *args, const test_row *row,
                             kv8_step_plan *out) {
    const int32_t piece = row->num_prompt < args->chunk ? row->num_prompt : args->chunk;
    const int32_t num_rows = row->num_prompt > 0 ? piece : row->batch;
    *out = (kv8_step_plan)KV8_STEP_PLAN_INIT;
    if (s->model.device == NULL) return KV8_OK;
    return kv8_model_plan_step(s->model.model, s->cache, NULL, row->batch, num_rows, out);
}

/* Runs the test once for its profile: by kernel a few tokens of it, for what they read and where
 * the time goes; else all of it, for what lies between the steps, of decode those behind the first,
 * which admits its requests. */
static kv8_status profile_test(bench_session *s, const model_args *args, bool by_kernel,
                               test_row *row, kv8_profile *profile_out, double *seconds_out) {
    enum { FEW_TOKENS = 8 };
    int32_t num = model_test_tokens(row);
    if (by_kernel && row->num_gen > FEW_TOKENS) num = FEW_TOKENS;
    kv8_status status = submit_batch(s, row, num);
    int32_t num_events = 0;
    if (status == KV8_OK && !by_kernel && num > 1 && row->num_gen > 0)
        status = run_step(s, &num_events);
    if (status == KV8_OK) status = kv8_model_begin_profile(s->model.model, by_kernel);
    if (status != KV8_OK) return status;
    kv8_step_plan plan;
    status = plan_steps(s, args, row, &plan);
    if (by_kernel) row->profile.path = plan.path;
    const double begin = cli_seconds();
    if (status == KV8_OK) status = run_engine(s);
    *seconds_out = cli_seconds() - begin;
    const kv8_status ended = kv8_model_end_profile(s->model.model, profile_out);
    return status == KV8_OK ? ended : status;
}

static kv8_status look_into(bench_session *s, const model_args *args, test_row *row) {
    kv8_profile profile = KV8_PROFILE_INIT;
    double seconds = 0;
    kv8_status status = profile_test(s, args, true, row, &profile, &seconds);
    if (status != KV8_OK) return status;
    row->experts_read = profile.experts_read;
    if (!args->profile) return KV8_OK;
    row->profile.kernels = json_object();
    for (int32_t i = 0; i < profile.num_rows; i++) {
        const kv8_profile_row *const r = &profile.rows[i];
        row->profile.seconds[r->work] += r->seconds;
        /* A kernel may do two kinds of work, the head's among the dense products. */
        const double before = json_number_value(json_object_get(row->profile.kernels, r->name));
        json_object_set_new(row->profile.kernels, r->name, json_real(before + r->seconds));
    }
    status = profile_test(s, args, false, row, &profile, &seconds); /* records the graphs */
    if (status == KV8_OK) status = profile_test(s, args, false, row, &profile, &seconds);
    row->profile.idle_share = 1 - profile.busy_seconds / seconds;
    row->profile.host_us = (seconds - profile.busy_seconds) / (double)profile.num_steps * 1e6;
    return status;
}

/* --- depth --- */

enum { NOISE_TOKENS = 512, NOISE_STARTS = 1024 }; /* written at once; that they may begin at */

static size_t noise_row(const bench_session *s) {
    return (size_t)s->model.info.num_kv_heads * (size_t)s->model.info.head_dim;
}

/* Rows of noise to append, where the model computes. */
static kv8_status open_noise(bench_session *s) {
    const size_t num = (NOISE_STARTS + NOISE_TOKENS) * noise_row(s);
    float *const values = bench_random_values(num);
    if (values == NULL) return KV8_ERR_NO_MEMORY;
    if (s->model.device == NULL) {
        s->noise = values;
        return KV8_OK;
    }
    void *memory = NULL;
    kv8_status status = kv8_device_alloc(s->model.device, num * sizeof *values, &memory);
    s->noise = memory;
    if (status == KV8_OK)
        status = kv8_stream_copy(s->model.stream, memory, values, num * sizeof *values);
    if (status == KV8_OK) status = kv8_stream_synchronize(s->model.stream);
    free(values);
    return status;
}

static void close_noise(bench_session *s) {
    if (s->model.device == NULL)
        free(s->noise);
    else
        kv8_device_free(s->model.device, s->noise);
    s->noise = NULL;
}

static const float *draw_noise(bench_session *s) {
    return s->noise + bench_random(&s->random) % NOISE_STARTS * noise_row(s);
}

/* Keys and values of the sequence's last `num` tokens, in all layers. */
static kv8_status append_noise(bench_session *s, kv8_seq seq, int32_t num) {
    const int32_t indptr[2] = {0, num}, head_dim = s->model.info.head_dim;
    kv8_status status = KV8_OK;
    for (int32_t layer = 0; status == KV8_OK && layer < s->model.info.num_layers; layer++) {
        const kv8_append append = {.struct_size = sizeof append,
                                   .num_seqs = 1,
                                   .seqs = &seq,
                                   .indptr = indptr,
                                   .src_dtype = KV8_F32,
                                   .k = draw_noise(s),
                                   .k_stride_row = (int64_t)noise_row(s),
                                   .k_stride_head = head_dim,
                                   .v = draw_noise(s),
                                   .v_stride_row = (int64_t)noise_row(s),
                                   .v_stride_head = head_dim};
        status = kv8_cache_append(s->cache, layer, &append);
    }
    return status;
}

/* Random tokens with noise for keys and values, whose pages the engine then finds as if a request
 * had computed them: all but the last few, which it does compute. */
static kv8_status publish_depth(bench_session *s, int32_t depth, int32_t chunk) {
    enum { COMPUTED = 16 };
    const int32_t num_found = depth > COMPUTED ? depth - COMPUTED : 0;
    const int32_t most = chunk < NOISE_TOKENS ? chunk : NOISE_TOKENS;
    kv8_seq seq = KV8_SEQ_NONE;
    draw_tokens(s, depth);
    kv8_status status = kv8_cache_seq_create(s->cache, &seq);
    for (int32_t at = 0; status == KV8_OK && at < num_found; at += most) {
        const int32_t num = num_found - at < most ? num_found - at : most;
        status = kv8_cache_extend(s->cache, seq, num, s->token_ids + at);
        if (status == KV8_OK) status = append_noise(s, seq, num);
        if (status == KV8_OK) status = kv8_cache_publish(s->cache, seq);
    }
    const kv8_status ended = kv8_cache_seq_destroy(s->cache, seq);
    return status == KV8_OK ? ended : status;
}

/* Fills the depth: requests at rest that the tests fork, one for each sequence of the largest
 * batch; none where the depth is 0. */
static kv8_status fill_depth(bench_session *s, const model_args *args, int32_t depth) {
    memset(s->filled, 0, sizeof s->filled);
    if (depth == 0) return KV8_OK;
    kv8_request request = KV8_REQUEST_INIT;
    request.hold = 1;
    request.num_tokens = depth;
    request.token_ids = s->token_ids;
    kv8_status status = args->max_batch > 1 ? open_noise(s) : KV8_OK;
    for (int32_t b = 0; status == KV8_OK && b < args->max_batch && cli_interrupted() == 0; b++) {
        if (b == 0) draw_tokens(s, depth);
        if (args->max_batch > 1) status = publish_depth(s, depth, args->chunk);
        if (status == KV8_OK) status = kv8_engine_submit(s->engine, &request, &s->filled[b]);
        if (status == KV8_OK) status = run_engine(s);
    }
    close_noise(s);
    return status;
}

/* A test and its row. */
static kv8_status add_test(bench_session *s, const model_args *args, test_row row, test_row *rows,
                           int32_t *num_rows) {
    kv8_cache_stats cache = KV8_CACHE_STATS_INIT;
    kv8_status status = kv8_cache_get_stats(s->cache, &cache);
    row.bytes_per_token = cache.bytes_per_token_unwindowed;
    if (model_test_tokens(&row) == 0 || status != KV8_OK) return status;
    if (s->model.device != NULL && (row.num_gen > 0 || args->profile))
        status = look_into(s, args, &row);
    if (status == KV8_OK) status = plan_steps(s, args, &row, &row.plan);
    if (status != KV8_OK) return status;
    if (row.num_gen > 0) count_step(s, &cache, &row);
    const kv8_status ran = run_test(s, args->repetitions, &row);
    rows[(*num_rows)++] = row;
    return ran;
}

/* All tests at one depth: prefill of one sequence, decode of each batch. */
static kv8_status run_depth(bench_session *s, const model_args *args, const kv8_kv_setting *setting,
                            int32_t depth, test_row *rows, int32_t *num_rows) {
    kv8_status status = open_engine(s, args, setting, depth);
    if (status == KV8_OK) status = fill_depth(s, args, depth);
    test_row row = {.setting = setting, .depth = depth, .batch = 1};
    row.num_prompt = args->num_prompt;
    if (status == KV8_OK) status = add_test(s, args, row, rows, num_rows);
    row.num_prompt = 0;
    row.num_gen = args->num_gen;
    for (int32_t i = 0; status == KV8_OK && i < args->num_batches && cli_interrupted() == 0; i++) {
        row.batch = args->batches[i];
        status = add_test(s, args, row, rows, num_rows);
    }
    close_engine(s);
    return status;
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
        {"path", "NAME",
         "steps of a token a request on a GPU: persistent, graph or eager (the first that can be)",
         CLI_TEXT, &args->path},
        {"observe", NULL, "an observer counts K and V, as calibration has it", CLI_FLAG,
         &args->observe},
        {"batch-invariant", NULL, "no token's bits depend on what else runs", CLI_FLAG,
         &args->batch_invariant},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"profile", NULL, "of a GPU: where its time goes, by kind of work", CLI_FLAG,
         &args->profile},
        {"plot", "FILE", "draw tokens per second as SVG (needs gnuplot)", CLI_OUTPUT, &args->plot},
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
    const int status = cli_parse(&command, argc, argv, &args->model);
    if (status >= 0) return status;
    if (args->num_prompt == 0 && args->num_gen == 0)
        return cli_fail("--prompt 0 and --gen 0 leave nothing to measure");
    if (!args->profile) return -1;
    int32_t device_idx = -1;
    const int named = cli_device(args->device, &device_idx);
    if (named != CLI_OK) return named;
    return device_idx < 0 ? cli_fail("--profile is of a model on a GPU: --device cuda") : -1;
}

/* Before any work: does every depth leave room for the tests? */
static int check_depths(const bench_session *s, const model_args *args, const int32_t *depths,
                        int32_t num_depths) {
    const int32_t longest = longest_test(args);
    const int32_t context = s->model.info.max_seq_len;
    for (int32_t i = 0; i < num_depths; i++) {
        if ((int64_t)depths[i] + longest > context)
            return cli_fail("--depth %d and a test of %d tokens: the model's context holds %d",
                            depths[i], longest, context);
    }
    return CLI_OK;
}

static kv8_status measure_ceilings(bench_session *s) {
    enum { CEILING_BYTES = 1 << 30 };
    kv8_device_ceilings ceilings = {0};
    if (s->model.device == NULL) return KV8_OK;
    kv8_status status = kv8_device_measure_ceilings(s->model.device, CEILING_BYTES, &ceilings);
    if (status != KV8_OK) return status;
    s->read_gb_s = ceilings.read_gb_s;
    status = kv8_device_measure_products(s->model.device, &s->product_tflop_s);
    return status == KV8_ERR_UNSUPPORTED ? KV8_OK : status; /* the report says so */
}

/* --observe: counts from here on. */
static kv8_status observe(bench_session *s, const model_args *args) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    if (!args->observe) return KV8_OK;
    kv8_model_observer_options(s->model.model, &options);
    options.num_qo_heads = 0;
    kv8_status status = kv8_observer_create(&s->observer, &options);
    if (status == KV8_OK) status = kv8_model_set_observer(s->model.model, s->observer);
    if (status == KV8_OK) kv8_observer_start(s->observer);
    return status;
}

static int run(bench_session *s, const model_args *args, const kv8_kv_setting *settings,
               int32_t num_settings, const int32_t *depths, int32_t num_depths, cli_output *plot) {
    static test_row rows[(1 + MAX_BATCHES) * MAX_SETTINGS * MAX_DEPTHS];
    int32_t num_rows = 0;
    if (check_depths(s, args, depths, num_depths) != CLI_OK) return CLI_FAILED;
    s->token_ids = malloc((size_t)s->model.info.max_seq_len * sizeof *s->token_ids);
    if (s->token_ids == NULL) return cli_fail("no memory for tokens");
    cli_progress progress;
    cli_progress_begin(&progress);
    kv8_status status = measure_ceilings(s);
    if (status == KV8_OK) status = observe(s, args);
    const uint64_t total = (uint64_t)num_settings * (uint64_t)num_depths;
    for (uint64_t i = 0; status == KV8_OK && i < total && cli_interrupted() == 0; i++) {
        const kv8_kv_setting *const setting = &settings[i / (uint64_t)num_depths];
        cli_progress_show(&progress, setting->name, i, total);
        status = run_depth(s, args, setting, depths[i % (uint64_t)num_depths], rows, &num_rows);
    }
    cli_progress_end(&progress);
    if (s->failure[0] != '\0') return cli_fail("a sequence of the test failed: %s", s->failure);
    if (status != KV8_OK) return cli_fail_status(status);
    if (cli_interrupted() != 0) return cli_interrupted();
    int shown = model_report(s, args, rows, num_rows);
    if (shown == CLI_OK && args->plot != NULL) {
        shown = model_plot(args, rows, num_rows, plot->file);
        if (shown == CLI_OK) shown = cli_output_commit(plot);
    }
    for (int32_t i = 0; i < num_rows; i++) json_decref(rows[i].profile.kernels);
    return shown;
}

/* What a step of the tests takes at most. */
static int take_batches(model_args *args, kv8_model_options *options) {
    const int status = bench_list("batch", args->batch, 1, MAX_BATCH, args->batches, MAX_BATCHES,
                                  &args->num_batches);
    if (status != CLI_OK) return status;
    for (int32_t i = 0; i < args->num_batches; i++)
        args->max_batch = args->batches[i] > args->max_batch ? args->batches[i] : args->max_batch;
    if (args->chunk < args->max_batch) args->chunk = args->max_batch;
    options->max_step_seqs = args->max_batch;
    options->max_step_tokens = args->chunk;
    if (args->batch_invariant) options->batch_invariant = 1;
    return cli_path(args->path, args->device, options);
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
    static bench_session session;
    session = (bench_session){.random = 1};
    cli_output plot = {0};
    if (args.plot != NULL) status = cli_plot_check();
    if (status == CLI_OK && args.plot != NULL) status = cli_output_open(&plot, args.plot);
    if (status != CLI_OK) return status;
    status = cli_model_open(&session.model, &(cli_opening){.directory = args.model,
                                                           .device = args.device,
                                                           .options = &options,
                                                           .threads = args.threads});
    if (status == CLI_OK)
        status = run(&session, &args, settings, num_settings, depths, num_depths, &plot);
    cli_output_abort(&plot);
    free(session.token_ids);
    cli_model_close(&session.model);
    kv8_observer_destroy(session.observer);
    return status;
}
