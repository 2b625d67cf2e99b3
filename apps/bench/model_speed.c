/* model_speed.c - kv8 bench model: prefill (pp) and decode (tg) tokens per second at given depths,
 * per KV setting; columns and JSON fields as llama-bench has them.
 *
 * A depth is filled once and every repetition forks it. Tokens are random, nothing is sampled.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>
#include <time.h>

#include "bench.h"

enum { MAX_DEPTHS = 16, MAX_SETTINGS = 16, MAX_REPETITIONS = 100, STEP = 512 };

typedef struct model_args {
    const char *model, *kv, *depth;
    int32_t num_prompt, num_gen, repetitions, threads;
    bool json;
} model_args;

/* One test of the result. */
typedef struct test_row {
    const kv8_kv_setting *setting;
    int32_t num_prompt, num_gen, depth; /* one of the first two is 0 */
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

static int32_t tokens_of(const test_row *row) {
    return row->num_prompt + row->num_gen;
}

static stats speed_of(const test_row *row) {
    double speeds[MAX_REPETITIONS];
    for (int32_t i = 0; i < row->num; i++) speeds[i] = tokens_of(row) * 1e9 / row->ns[i];
    return mean_of(speeds, row->num);
}

/* --- running --- */

typedef struct bench_session {
    cli_model model;
    kv8_cache *cache;
    float *logits; /* of one row */
    uint64_t random;
} bench_session;

/* Room for a sequence of max_len tokens and for a fork that adds `longest` of its own. */
static kv8_status open_cache(bench_session *s, const kv8_kv_setting *setting, int32_t max_len,
                             int32_t longest) {
    kv8_kv_cache_options options = KV8_KV_CACHE_OPTIONS_INIT;
    options.max_seqs = 2;
    options.max_seq_len = max_len;
    options.num_tokens = (int64_t)max_len + longest;
    options.step_tokens = STEP;
    return kv8_kv_setting_cache_create(&s->cache, s->model.model, setting, &options);
}

/* `num` random tokens in steps of at most `step`; logits of the last row of each step. */
static kv8_status run_tokens(bench_session *s, kv8_seq seq, int32_t num, int32_t step) {
    int32_t ids[STEP];
    kv8_status status = KV8_OK;
    for (int32_t done = 0; status == KV8_OK && done < num && cli_interrupted() == 0;) {
        const int32_t n = num - done < step ? num - done : step;
        for (int32_t i = 0; i < n; i++)
            ids[i] = (int32_t)(bench_random(&s->random) % (uint64_t)s->model.info.vocab_size);
        const int32_t indptr[2] = {0, n}, last = n - 1;
        const kv8_step work = {.num_seqs = 1,
                               .seqs = &seq,
                               .indptr = indptr,
                               .token_ids = ids,
                               .num_logit_rows = 1,
                               .logit_rows = &last,
                               .logits_out = s->logits};
        status = kv8_model_step(s->model.model, s->cache, &work);
        done += n;
    }
    return status;
}

static kv8_status run_test(bench_session *s, kv8_seq depth, int32_t repetitions, test_row *row) {
    kv8_status status = KV8_OK;
    /* The first run warms up and is not counted. */
    for (int32_t i = -1; status == KV8_OK && i < repetitions && cli_interrupted() == 0; i++) {
        kv8_seq seq = KV8_SEQ_NONE;
        status = kv8_cache_seq_fork(s->cache, depth, &seq);
        if (status != KV8_OK) break;
        const double begin = cli_seconds();
        status = run_tokens(s, seq, tokens_of(row), row->num_prompt > 0 ? STEP : 1);
        if (i >= 0) row->ns[row->num++] = (cli_seconds() - begin) * 1e9;
        const kv8_status gone = kv8_cache_seq_destroy(s->cache, seq);
        if (status == KV8_OK) status = gone;
    }
    return status;
}

/* Both tests at one depth. */
static kv8_status run_depth(bench_session *s, const model_args *args, const kv8_kv_setting *setting,
                            int32_t depth, test_row *rows, int32_t *num_rows) {
    const int32_t longest = args->num_prompt > args->num_gen ? args->num_prompt : args->num_gen;
    kv8_seq seq = KV8_SEQ_NONE;
    kv8_status status = open_cache(s, setting, depth + longest, longest);
    if (status == KV8_OK) status = kv8_cache_seq_create(s->cache, &seq);
    if (status == KV8_OK) status = run_tokens(s, seq, depth, STEP);
    for (int test = 0; status == KV8_OK && test < 2; test++) {
        test_row row = {.setting = setting, .depth = depth};
        *(test == 0 ? &row.num_prompt : &row.num_gen) =
            test == 0 ? args->num_prompt : args->num_gen;
        if (tokens_of(&row) == 0) continue;
        status = run_test(s, seq, args->repetitions, &row);
        rows[(*num_rows)++] = row;
    }
    kv8_cache_destroy(s->cache);
    s->cache = NULL;
    return status;
}

/* --- the results --- */

static void test_name(const test_row *row, char *out, size_t size) {
    const int used = row->num_prompt > 0 ? snprintf(out, size, "pp%d", row->num_prompt)
                                         : snprintf(out, size, "tg%d", row->num_gen);
    if (row->depth > 0 && used > 0) snprintf(out + used, size - (size_t)used, " @ d%d", row->depth);
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
               params, kv8_isa_name(s->model.isa), kv8_threads_count(s->model.threads),
               rows[i].setting->name, test, speed);
    }
}

static json_t *samples_json(const test_row *row, bool speeds) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < row->num; i++) {
        json_t *const value = speeds ? json_real(tokens_of(row) * 1e9 / row->ns[i])
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
        "{s:s, s:s, s:o, s:s, s:I, s:I, s:i, s:i, s:i, s:s, s:s, s:s, s:i, s:i, s:i, s:s, s:I, s:I,"
        " s:f, s:f, s:o, s:o}",
        "version", kv8_version(), "backends", kv8_isa_name(s->model.isa), "model_filename",
        cli_json_text(args->model), "model_type", s->model.info.architecture, "model_size",
        (json_int_t)s->model.info.bytes, "model_n_params", (json_int_t)s->model.info.num_parameters,
        "n_batch", (int)STEP, "n_ubatch", (int)STEP, "n_threads",
        (int)kv8_threads_count(s->model.threads), "kv", row->setting->name, "type_k",
        kv8_dtype_name(row->setting->full_k), "type_v", kv8_dtype_name(row->setting->full_v),
        "n_prompt", (int)row->num_prompt, "n_gen", (int)row->num_gen, "n_depth", (int)row->depth,
        "test_time", test_time, "avg_ns", (json_int_t)ns.mean, "stddev_ns",
        (json_int_t)ns.deviation, "avg_ts", speed.mean, "stddev_ts", speed.deviation, "samples_ns",
        samples_json(row, false), "samples_ts", samples_json(row, true));
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
        {"depth", "LIST", "tokens already in the cache (0,4096,32768)", CLI_TEXT, &args->depth},
        {"kv", "LIST", "KV settings (bf16,e4m3,int8)", CLI_TEXT, &args->kv},
        {"repetitions", "N", "of every test (5)", CLI_INT, &args->repetitions, 1, MAX_REPETITIONS},
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

static int run(bench_session *s, const model_args *args, const kv8_kv_setting *settings,
               int32_t num_settings, const int32_t *depths, int32_t num_depths) {
    static test_row rows[2 * MAX_SETTINGS * MAX_DEPTHS];
    int32_t num_rows = 0;
    s->logits = malloc((size_t)s->model.info.vocab_size * sizeof *s->logits);
    if (s->logits == NULL) return cli_fail("no memory for logits");
    cli_progress progress;
    cli_progress_begin(&progress);
    kv8_status status = KV8_OK;
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

int bench_model(int argc, char **argv) {
    model_args args = {.kv = "bf16,e4m3,int8",
                       .depth = "0,4096,32768",
                       .num_prompt = 512,
                       .num_gen = 32,
                       .repetitions = 5};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    int32_t depths[MAX_DEPTHS], num_depths = 0, num_settings = 0;
    kv8_kv_setting settings[MAX_SETTINGS];
    status = bench_list("depth", args.depth, 0, 1 << 24, depths, MAX_DEPTHS, &num_depths);
    if (status != CLI_OK) return status;
    status = cli_parse_kv(args.kv, settings, MAX_SETTINGS, &num_settings);
    if (status != CLI_OK) return status;
    cli_catch_interrupt();
    bench_session session = {.random = 1};
    status = cli_model_open(&session.model, args.model, args.threads, false);
    if (status == CLI_OK) status = run(&session, &args, settings, num_settings, depths, num_depths);
    kv8_cache_destroy(session.cache);
    free(session.logits);
    cli_model_close(&session.model);
    return status;
}
