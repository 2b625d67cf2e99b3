/* cmd_simulate.c - kv8 simulate: what a server would do under load, from measured step times.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_LOADS = 32, MAX_SETTINGS = 16, MAX_ROWS = 512 };

typedef struct simulate_args {
    const char *speed, *load, *plot;
    int32_t prompt, gen, requests, max_requests, step_tokens, kv_tokens;
    float kv_memory; /* GiB */
    bool json;
} simulate_args;

/* What the file says of one KV setting. */
typedef struct setting {
    const char *kv;
    kv8_speed_row rows[MAX_ROWS];
    int32_t num_rows;
    double bytes_per_token; /* 0 = the file does not say */
    int64_t pool_tokens;    /* 0 = as many as the requests need */
    kv8_step_time time;
    kv8_simulation results[MAX_LOADS];
} setting;

typedef struct study {
    const simulate_args *args;
    double loads[MAX_LOADS]; /* requests per second */
    int32_t num_loads;
    json_t *file;
    setting *settings;
    int32_t num_settings;
} study;

static int parse(simulate_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"speed", "FILE", "what kv8 bench model --json printed, with two depths or more", CLI_TEXT,
         &args->speed},
        {"load", "LIST", "requests per second, arriving at random (0.5,1,2,4,8)", CLI_TEXT,
         &args->load},
        {"prompt", "N", "tokens of every prompt (1024)", CLI_INT, &args->prompt, 1, 1 << 20},
        {"gen", "N", "tokens that every request generates (256)", CLI_INT, &args->gen, 1, 1 << 20},
        {"requests", "N", "requests of each load (500)", CLI_INT, &args->requests, 1, 1 << 20},
        {"max-requests", "N", "requests that run at once (64)", CLI_INT, &args->max_requests, 1,
         1 << 16},
        {"step-tokens", "N",
         "most tokens of a step; without it 2048, and so many of prompts\n"
         "that those who decode wait less than twice as long as usual",
         CLI_INT, &args->step_tokens, 1, 1 << 20},
        {"kv-tokens", "N", "tokens that the KV cache holds (as many as they need)", CLI_INT,
         &args->kv_tokens, 16, INT32_MAX},
        {"kv-memory", "GIB", "the KV cache's size in its place: tokens by KV setting", CLI_FLOAT,
         &args->kv_memory, 1e-6, 1e6},
        {"plot", "FILE", "draw the times over the load as SVG", CLI_OUTPUT, &args->plot},
        {"json", NULL, "print one JSON object", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 simulate --speed FILE.json [options]",
        .about =
            "Predicts time to first token (TTFT), time between tokens (ITL) and throughput of a\n"
            "server by load, for every KV setting that was measured: its scheduler runs on a "
            "clock\n"
            "that moves by the time that a step took there.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    const int status = cli_parse(&command, argc, argv, NULL);
    if (status >= 0) return status;
    if (args->speed == NULL) return cli_fail("--speed FILE.json is missing");
    if (args->kv_tokens > 0 && args->kv_memory > 0)
        return cli_fail("--kv-tokens and --kv-memory: one of them");
    return -1;
}

static int parse_loads(study *s) {
    const char *at = s->args->load;
    for (;;) {
        char *end = NULL;
        const double load = strtod(at, &end);
        if (end == at || (*end != ',' && *end != '\0') || !(load > 0 && load <= 1e6))
            return cli_fail("--load is \"%s\", must be numbers above 0 with commas between",
                            s->args->load);
        if (s->num_loads == MAX_LOADS) return cli_fail("--load has more than %d", (int)MAX_LOADS);
        s->loads[s->num_loads++] = load;
        if (*end == '\0') return CLI_OK;
        at = end + 1;
    }
}

/* --- the file --- */

static setting *setting_of(study *s, const char *kv) {
    for (int32_t i = 0; i < s->num_settings; i++) {
        if (strcmp(s->settings[i].kv, kv) == 0) return &s->settings[i];
    }
    if (s->num_settings == MAX_SETTINGS) return NULL;
    s->settings[s->num_settings].kv = kv;
    return &s->settings[s->num_settings++];
}

/* The whole numbers of a row: what the library takes of each, it says. */
enum { PROMPT, GEN, DEPTH, CHUNK, SEQS, NUM_COUNTS };
static const char *const count_keys[] = {"n_prompt", "n_gen", "n_depth", "n_ubatch", "n_parallel"};

static int read_row(study *s, json_t *row, size_t idx) {
    const char *kv = NULL;
    json_int_t counts[NUM_COUNTS] = {[SEQS] = 1};
    double ns = 0, bytes = 0;
    json_error_t error;
    const int unpacked = json_unpack_ex(
        row, &error, 0, "{s:s, s:I, s:I, s:I, s:I, s:F, s?F, s?I}", "kv", &kv, count_keys[PROMPT],
        &counts[PROMPT], count_keys[GEN], &counts[GEN], count_keys[DEPTH], &counts[DEPTH],
        count_keys[CHUNK], &counts[CHUNK], "avg_ns", &ns, "kv_bytes_per_token", &bytes,
        count_keys[SEQS], &counts[SEQS]);
    if (unpacked != 0) return cli_fail("%s, row %zu: %s", s->args->speed, idx, error.text);
    for (int i = 0; i < NUM_COUNTS; i++) {
        if (counts[i] < 0 || counts[i] > INT32_MAX)
            return cli_fail("%s, row %zu: %s is %lld, must be 0 to %d", s->args->speed, idx,
                            count_keys[i], (long long)counts[i], INT32_MAX);
    }
    setting *const to = setting_of(s, kv);
    if (to == NULL || to->num_rows == MAX_ROWS)
        return cli_fail("%s has more than %d KV settings, or %d rows of one", s->args->speed,
                        (int)MAX_SETTINGS, (int)MAX_ROWS);
    to->rows[to->num_rows++] = (kv8_speed_row){.struct_size = sizeof(kv8_speed_row),
                                               .num_prompt = (int32_t)counts[PROMPT],
                                               .num_gen = (int32_t)counts[GEN],
                                               .depth = (int32_t)counts[DEPTH],
                                               .chunk = (int32_t)counts[CHUNK],
                                               .ns = ns,
                                               .num_seqs = (int32_t)counts[SEQS]};
    if (bytes > 0) to->bytes_per_token = bytes;
    return CLI_OK;
}

static int read_speed(study *s) {
    char *text = NULL;
    size_t size = 0, idx;
    int status = cli_read_file(s->args->speed, &text, &size);
    if (status != CLI_OK) return status;
    json_error_t error;
    s->file = json_loadb(text, size, 0, &error);
    free(text);
    if (s->file == NULL) return cli_fail("%s: %s", s->args->speed, error.text);
    const json_t *const rows = json_object_get(s->file, "rows");
    json_t *row;
    if (!json_is_array(rows) || json_array_size(rows) == 0)
        return cli_fail("%s has no \"rows\": what kv8 bench model --json prints has",
                        s->args->speed);
    json_array_foreach(rows, idx, row) {
        if ((status = read_row(s, row, idx)) != CLI_OK) return status;
    }
    return CLI_OK;
}

/* --- running --- */

static int size_pool(const simulate_args *args, setting *self) {
    self->pool_tokens = args->kv_tokens;
    if (args->kv_memory <= 0) return CLI_OK;
    if (self->bytes_per_token <= 0)
        return cli_fail("%s does not say kv_bytes_per_token of %s: use --kv-tokens", args->speed,
                        self->kv);
    const double tokens = (double)args->kv_memory * 1073741824.0 / self->bytes_per_token;
    if (tokens < 1)
        return cli_fail("--kv-memory is %g GiB, a token of %s takes %g bytes",
                        (double)args->kv_memory, self->kv, self->bytes_per_token);
    if (tokens > INT32_MAX) return cli_fail("--kv-memory holds more than %d tokens", INT32_MAX);
    self->pool_tokens = (int64_t)tokens;
    return CLI_OK;
}

static int run_setting(const study *s, setting *self) {
    const simulate_args *const args = s->args;
    self->time = (kv8_step_time)KV8_STEP_TIME_INIT;
    const int status = size_pool(args, self);
    if (status != CLI_OK) return status;
    kv8_status done = kv8_step_time_fit(self->rows, self->num_rows, &self->time);
    cli_progress progress;
    cli_progress_begin(&progress);
    for (int32_t i = 0; i < s->num_loads && done == KV8_OK && cli_interrupted() == 0; i++) {
        kv8_simulation_options options = KV8_SIMULATION_OPTIONS_INIT;
        options.time = &self->time;
        options.requests_per_s = s->loads[i];
        options.num_requests = args->requests;
        options.prompt_len = args->prompt;
        options.max_tokens = args->gen;
        options.max_requests = args->max_requests;
        options.step_tokens = args->step_tokens;
        options.paced = args->step_tokens == 0;
        options.pool_tokens = self->pool_tokens;
        options.progress = cli_progress_show;
        options.progress_cookie = &progress;
        self->results[i] = (kv8_simulation)KV8_SIMULATION_INIT;
        done = kv8_simulate(&options, &self->results[i]);
    }
    cli_progress_end(&progress);
    if (cli_interrupted() != 0) return cli_interrupted();
    return done == KV8_OK ? CLI_OK : cli_fail("%s: %s", self->kv, kv8_status_message());
}

/* --- the results --- */

static void print_table(const study *s) {
    for (int32_t k = 0; k < s->num_settings; k++) {
        const setting *const self = &s->settings[k];
        const kv8_step_time *const t = &self->time;
        printf("%s: a step of", self->kv);
        for (int32_t i = 0; i < t->num_sizes; i++) printf("%s %d", i == 0 ? "" : ",", t->sizes[i]);
        printf(" tokens takes");
        for (int32_t i = 0; i < t->num_sizes; i++)
            printf("%s %.4g", i == 0 ? "" : ",", t->ns[i] * 1e-6);
        printf(" ms, a key read %.4g ns, a pair %.4g ns", t->decode_key_ns, t->prefill_key_ns);
        printf(self->pool_tokens > 0 ? ", %lld tokens of KV\n" : "\n",
               (long long)self->pool_tokens);
    }
    printf("\n| %-14s | %8s | %8s | %9s | %-26s | %-23s | %7s | %9s |\n", "kv", "load/s",
           "served/s", "tokens/s", "TTFT ms: mean, p50, p99", "ITL ms: mean, p50, p99", "running",
           "preempted");
    printf(
        "| -------------- | -------: | -------: | --------: | -------------------------- |"
        " ----------------------- | ------: | --------: |\n");
    for (int32_t k = 0; k < s->num_settings; k++) {
        for (int32_t i = 0; i < s->num_loads; i++) {
            const kv8_simulation *const r = &s->settings[k].results[i];
            printf(
                "| %-14s | %8.4g | %8.4g | %9.5g | %8.4g %8.4g %8.4g | %7.4g %7.4g %7.4g |"
                " %7.4g | %9llu |\n",
                s->settings[k].kv, s->loads[i], r->requests_per_s, r->tokens_per_s, r->ttft.mean,
                r->ttft.p50, r->ttft.p99, r->itl.mean, r->itl.p50, r->itl.p99, r->mean_running,
                (unsigned long long)r->num_preemptions);
        }
    }
}

static json_t *spread_json(const kv8_spread *spread) {
    return json_pack("{s:f, s:f, s:f}", "mean_ms", spread->mean, "p50_ms", spread->p50, "p99_ms",
                     spread->p99);
}

static json_t *setting_json(const study *s, const setting *self) {
    json_t *const loads = json_array();
    for (int32_t i = 0; i < s->num_loads; i++) {
        const kv8_simulation *const r = &self->results[i];
        json_array_append_new(
            loads,
            json_pack("{s:f, s:f, s:f, s:f, s:o, s:o, s:f, s:I, s:I}", "load_per_s", s->loads[i],
                      "requests_per_s", r->requests_per_s, "tokens_per_s", r->tokens_per_s,
                      "seconds", r->seconds, "ttft", spread_json(&r->ttft), "itl",
                      spread_json(&r->itl), "mean_running", r->mean_running, "steps",
                      (json_int_t)r->num_steps, "preemptions", (json_int_t)r->num_preemptions));
    }
    json_t *const sizes = json_array(), *const ns = json_array();
    for (int32_t i = 0; i < self->time.num_sizes; i++) {
        json_array_append_new(sizes, json_integer(self->time.sizes[i]));
        json_array_append_new(ns, json_real(self->time.ns[i]));
    }
    return json_pack("{s:s, s:I, s:{s:o, s:o, s:f, s:f}, s:o}", "kv", self->kv, "kv_tokens",
                     (json_int_t)self->pool_tokens, "step_time", "tokens", sizes, "ns", ns,
                     "decode_key_ns", self->time.decode_key_ns, "prefill_key_ns",
                     self->time.prefill_key_ns, "loads", loads);
}

static int print_json(const study *s) {
    json_t *const rows = json_array();
    for (int32_t k = 0; k < s->num_settings; k++)
        json_array_append_new(rows, setting_json(s, &s->settings[k]));
    const simulate_args *const args = s->args;
    return cli_write_json(
        json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:o}", "version", kv8_version(), "n_prompt",
                  args->prompt, "n_gen", args->gen, "requests", args->requests, "max_requests",
                  args->max_requests, "step_tokens", args->step_tokens, "rows", rows),
        stdout, "stdout");
}

/* --- the picture --- */

/* Tell apart on white and in print, also for the colour-blind (after Okabe and Ito 2008). */
static const char *const colours[] = {"#0072b2", "#e69f00", "#009e73", "#cc79a7",
                                      "#56b4e9", "#d55e00", "#999999", "#f0e442"};
enum { NUM_COLOURS = sizeof colours / sizeof colours[0] };

static void write_panel(const study *s, const char *title, int column, FILE *script) {
    fprintf(script, "set title '%s' font ',13'\nplot ", title);
    for (int32_t k = 0; k < s->num_settings; k++) {
        for (int p99 = 0; p99 < 2; p99++) {
            fprintf(script,
                    "%s $data%d using 1:%d with linespoints pointtype 7 pointsize 0.5 linewidth 1.6"
                    " dashtype %d linecolor rgb '%s' title ",
                    k + p99 > 0 ? "," : "", k, column + p99, p99 + 1, colours[k % NUM_COLOURS]);
            char name[96];
            snprintf(name, sizeof name, "%s %s", s->settings[k].kv, p99 ? "p99" : "p50");
            cli_plot_quoted(name, script);
        }
    }
    fprintf(script, "\n");
}

static void write_picture(const void *cookie, FILE *script) {
    const study *const s = cookie;
    for (int32_t k = 0; k < s->num_settings; k++) {
        fprintf(script, "$data%d << EOD\n", k);
        for (int32_t i = 0; i < s->num_loads; i++) {
            const kv8_simulation *const r = &s->settings[k].results[i];
            fprintf(script, "%.9g %.9g %.9g %.9g %.9g\n", s->loads[i], r->ttft.p50, r->ttft.p99,
                    r->itl.p50, r->itl.p99);
        }
        fprintf(script, "EOD\n");
    }
    fprintf(script,
            "set terminal svg size 1180,460 noenhanced font 'Helvetica,13' background '#ffffff'\n"
            "set encoding utf8\nset multiplot layout 1,2\nset border 3 linecolor rgb '#888888'\n"
            "set tics nomirror scale 0.6,0 textcolor rgb '#333333'\n"
            "set grid linetype 1 linecolor rgb '#e4e4e4'\nset key left top samplen 2\n"
            "set logscale xy\nset xlabel 'requests per second'\nset ylabel 'ms'\n");
    write_panel(s, "time to first token", 2, script);
    if (s->args->gen > 1) write_panel(s, "time between tokens", 4, script);
    fprintf(script, "unset multiplot\n");
}

static int draw(const study *s, cli_output *output) {
    char title[160];
    snprintf(title, sizeof title, "kv8 simulate: prompts of %d, %d generated", s->args->prompt,
             s->args->gen);
    const int status = cli_plot_run(write_picture, s, title, output->file);
    return status == CLI_OK ? cli_output_commit(output) : status;
}

/* --- the verb --- */

static int run(study *s, cli_output *output) {
    int status = parse_loads(s);
    if (status == CLI_OK) status = read_speed(s);
    if (status == CLI_OK && s->args->plot != NULL) status = cli_plot_check();
    if (status == CLI_OK && s->args->plot != NULL) status = cli_output_open(output, s->args->plot);
    for (int32_t k = 0; k < s->num_settings && status == CLI_OK; k++)
        status = run_setting(s, &s->settings[k]);
    if (status != CLI_OK) return status;
    if (s->args->json)
        status = print_json(s);
    else
        print_table(s);
    if (status == CLI_OK) status = cli_finish_stdout();
    return status == CLI_OK && s->args->plot != NULL ? draw(s, output) : status;
}

int cmd_simulate(int argc, char **argv) {
    simulate_args args = {
        .load = "0.5,1,2,4,8", .prompt = 1024, .gen = 256, .requests = 500, .max_requests = 64};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    cli_catch_interrupt();
    study s = {.args = &args, .settings = calloc(MAX_SETTINGS, sizeof *s.settings)};
    cli_output output = {0};
    status = s.settings == NULL ? cli_fail("no memory") : run(&s, &output);
    cli_output_abort(&output);
    json_decref(s.file);
    free(s.settings);
    return status;
}
