/* cmd_compare.c - kv8 compare: runs KV settings beside f32 KV on a text and shows the differences
 * as a table, JSON and a plot. The measuring is kv8_evaluate_compare's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_SETTINGS = 64, GREEDY_LEN = 64 };

typedef struct compare_args {
    const char *model, *text, *kv, *scales, *without, *plot, *report, *device;
    int32_t num_windows, window_len, num_greedy, num_recall, threads;
    bool json;
} compare_args;

static int parse(compare_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"text", "FILE", "UTF-8 text; NUL bytes separate documents", CLI_TEXT, &args->text},
        {"kv", "LIST",
         "KV settings (bf16,e4m3,e5m2,int8): f32, bf16, f16, e4m3, e4m3fnuz,\n"
         "e5m2, int8; e4m3@full or e4m3@sliding (the other layers stay\n"
         "bf16); k=int8,v=e4m3",
         CLI_TEXT, &args->kv},
        {"windows", "N", "consecutive windows of the text to run (6)", CLI_INT, &args->num_windows,
         1, 1e6},
        {"window-len", "L", "tokens of a window (4096)", CLI_INT, &args->window_len, 2, 1e7},
        {"greedy", "N", "prompts from the text to continue by 64 tokens (8)", CLI_INT,
         &args->num_greedy, 0, 1e4},
        {"recall", "N", "tables of codes to ask 8 questions each (4)", CLI_INT, &args->num_recall,
         0, 1e4},
        {"scales", "FILE",
         "scales of the FP8 formats (kv8 calibrate, LightLLM, SGLang,\n"
         "safetensors); the mix of formats in it is compared too",
         CLI_TEXT, &args->scales},
        {"without", "PART", "both sides without the model's sinks, window, or sinks,window",
         CLI_TEXT, &args->without},
        {"plot", "FILE", "draw the comparison as SVG (needs gnuplot)", CLI_OUTPUT, &args->plot},
        {"report", "FILE", "write the JSON object to a file", CLI_OUTPUT, &args->report},
        {"device", "DEVICE", "what computes: cpu, cuda or cuda:N, the Nth GPU (cpu)", CLI_TEXT,
         &args->device},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"json", NULL, "print the JSON object instead of the table", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 compare MODEL --text FILE [options]",
        .about =
            "Runs a text through the model once for every KV setting beside f32 KV and shows\n"
            "what the setting does: KL divergence in nats, share of equal top-1 predictions,\n"
            "change of loss, share of a greedy continuation before it differs, share of\n"
            "codes looked up right, cache bytes per token, tokens per second.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    const int status = cli_parse(&command, argc, argv, &args->model);
    if (status >= 0) return status;
    return args->text == NULL ? cli_fail("--text FILE is missing") : -1;
}

/* --- results --- */

static void print_number(const char *format, double value) {
    if (isnan(value)) {
        printf(" %8s", "-");
    } else {
        printf(format, value);
    }
}

/* A row, and under it the errors of its first five columns. */
static void print_row(const kv8_compare_row *row, int width) {
    printf("%-*s %9.3g %8.4f %+8.4f", width, row->kv, row->kl, row->top1, row->dloss);
    print_number(" %8.4f", row->greedy_match);
    print_number(" %8.4f", row->recall);
    printf(" %12.0f %10.0f", row->bytes_per_token, row->tokens_per_s);
    if (isnan(row->decode_tokens_per_s)) {
        printf(" %10s\n", "-");
    } else {
        printf(" %10.0f\n", row->decode_tokens_per_s);
    }
    printf("%*s %9.2g", width, "+-", row->kl_error);
    print_number(" %8.4f", row->top1_error);
    print_number(" %8.4f", row->dloss_error);
    print_number(" %8.4f", row->greedy_error);
    print_number(" %8.4f", row->recall_error);
    putchar('\n');
}

/* "6 windows of 4096 tokens, 2 threads, avx512". */
static void describe_run(const compare_args *args, const cli_model *model, char *text,
                         size_t size) {
    const int32_t num_threads = kv8_threads_count(model->threads);
    snprintf(text, size, "%d window%s of %d tokens, %d thread%s, %s", args->num_windows,
             args->num_windows == 1 ? "" : "s", args->window_len, num_threads,
             num_threads == 1 ? "" : "s", kv8_isa_name(model->isa));
}

static void print_table(const compare_args *args, const cli_model *model,
                        const kv8_compare_row *rows, int32_t num_rows) {
    int width = 8;
    for (int32_t i = 0; i < num_rows; i++) {
        const int length = (int)strlen(rows[i].kv);
        if (length > width) width = length;
    }
    char what[128];
    describe_run(args, model, what, sizeof what);
    printf("%s: %s; f32 KV is the reference\n\n", args->model, what);
    printf("%-*s %9s %8s %8s %8s %8s %12s %10s %10s\n", width, "kv", "KL nats", "top-1", "dloss",
           "greedy", "recall", "bytes/token", "tokens/s", "decode/s");
    for (int32_t i = 0; i < num_rows; i++) print_row(&rows[i], width);
    printf("\nloss with f32 KV: %.4f nats per token\n", rows[0].loss);
    printf("+-: one standard error; of KL, which few positions dominate, a lower bound\n");
}

static json_t *row_json(const kv8_compare_row *row) {
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"kl", row->kl},
                   {"kl_error", row->kl_error},
                   {"top1", row->top1},
                   {"top1_error", row->top1_error},
                   {"loss", row->loss},
                   {"dloss", row->dloss},
                   {"dloss_error", row->dloss_error},
                   {"greedy_match", row->greedy_match},
                   {"greedy_error", row->greedy_error},
                   {"recall", row->recall},
                   {"recall_error", row->recall_error},
                   {"tokens_per_s", row->tokens_per_s},
                   {"decode_tokens_per_s", row->decode_tokens_per_s}};
    json_t *const object =
        json_pack("{s:s, s:I}", "kv", row->kv, "bytes_per_token", (json_int_t)row->bytes_per_token);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        json_object_set_new(object, numbers[i].key, cli_json_number(numbers[i].value));
    return object;
}

static json_t *report_json(const compare_args *args, const cli_model *model,
                           const kv8_compare_row *rows, int32_t num_rows) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < num_rows; i++) json_array_append_new(list, row_json(&rows[i]));
    return json_pack("{s:o, s:o, s:o*, s:s*, s:i, s:i, s:i, s:s, s:s, s:o}", "model",
                     cli_json_text(args->model), "text", cli_json_text(args->text), "scales",
                     args->scales == NULL ? NULL : cli_json_text(args->scales), "without",
                     args->without, "windows", args->num_windows, "window_len", args->window_len,
                     "threads", kv8_threads_count(model->threads), "isa", kv8_isa_name(model->isa),
                     "version", kv8_version(), "rows", list);
}

static int draw_plot(const compare_args *args, const cli_model *model, const kv8_compare_row *rows,
                     int32_t num_rows, cli_output *plot) {
    char title[256], what[128];
    describe_run(args, model, what, sizeof what);
    snprintf(title, sizeof title, "KV cache formats on %s: %s", args->model, what);
    const int status = cli_plot_draw(rows, num_rows, title, plot->file);
    return status == CLI_OK ? cli_output_commit(plot) : status;
}

/* What was measured is printed first: a plot or a report that fails must not lose it. */
static int show(const compare_args *args, const cli_model *model, const kv8_compare_row *rows,
                int32_t num_rows, cli_output *plot, cli_output *report) {
    int status = CLI_OK;
    if (args->json) {
        status = cli_write_json(report_json(args, model, rows, num_rows), stdout, "stdout");
    } else {
        print_table(args, model, rows, num_rows);
    }
    if (status == CLI_OK) status = cli_finish_stdout();
    if (status == CLI_OK && args->report != NULL) {
        status =
            cli_write_json(report_json(args, model, rows, num_rows), report->file, args->report);
        if (status == CLI_OK) status = cli_output_commit(report);
    }
    if (status == CLI_OK && args->plot != NULL)
        status = draw_plot(args, model, rows, num_rows, plot);
    return status;
}

/* --- the run --- */

/* f32 is measured in any case, as the reference. Returns how many settings stay. */
static int32_t drop_reference(kv8_kv_setting *settings, int32_t num_settings) {
    int32_t num = 0;
    for (int32_t i = 0; i < num_settings; i++) {
        if (strcmp(settings[i].name, "f32") != 0) settings[num++] = settings[i];
    }
    return num;
}

/* A file's mix is compared too, after the settings asked for. */
static int32_t add_mix(const cli_scales *scales, kv8_kv_setting *settings, int32_t num_settings) {
    if (scales->layers == NULL || num_settings == MAX_SETTINGS) return num_settings;
    settings[num_settings] = (kv8_kv_setting){.name = "mix", .layers = scales->layers};
    return num_settings + 1;
}

static int measure(const compare_args *args, cli_model *model, const cli_scales *scales,
                   const kv8_kv_setting *settings, int32_t num_settings,
                   kv8_compare_row *rows_out) {
    int32_t *ids = NULL;
    int64_t num_tokens = 0;
    int status = cli_read_text(model->tokenizer, args->text, &ids, &num_tokens);
    if (status != CLI_OK) return status;
    if (num_tokens / args->window_len < args->num_windows) {
        free(ids);
        return cli_fail(
            "the text has %lld tokens: %lld windows of %d fit, %d were asked for; "
            "--windows and --window-len say how many and how long",
            (long long)num_tokens, (long long)(num_tokens / args->window_len), args->window_len,
            args->num_windows);
    }
    cli_progress progress;
    kv8_compare_options options = KV8_COMPARE_OPTIONS_INIT;
    options.tokenizer = model->tokenizer;
    options.token_ids = ids;
    options.num_tokens = num_tokens;
    options.num_windows = args->num_windows;
    options.window_len = args->window_len;
    options.k_scale = scales->k;
    options.v_scale = scales->v;
    options.scale_dtype = scales->dtype;
    options.num_greedy = args->num_greedy;
    /* Short windows still leave half their tokens to the prompt. */
    options.greedy_len = args->window_len < 2 * GREEDY_LEN ? args->window_len / 2 : GREEDY_LEN;
    options.num_recall = args->num_recall;
    options.progress = cli_progress_show;
    options.progress_cookie = &progress;
    cli_progress_begin(&progress);
    const kv8_status compared =
        kv8_evaluate_compare(model->model, settings, num_settings, &options, rows_out);
    cli_progress_end(&progress);
    if (compared != KV8_OK) status = cli_fail_status(compared);
    free(ids);
    return status;
}

/* Everything that can be refused early is, before the model runs. */
static int open_outputs(const compare_args *args, cli_output *plot, cli_output *report) {
    int status = CLI_OK;
    if (args->plot != NULL) status = cli_plot_check();
    if (status == CLI_OK && args->plot != NULL) status = cli_output_open(plot, args->plot);
    if (status == CLI_OK && args->report != NULL) status = cli_output_open(report, args->report);
    return status;
}

int cmd_compare(int argc, char **argv) {
    compare_args args = {.kv = "bf16,e4m3,e5m2,int8",
                         .num_windows = 6,
                         .window_len = 4096,
                         .num_greedy = 8,
                         .num_recall = 4};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    kv8_kv_setting settings[MAX_SETTINGS];
    int32_t num_settings = 0;
    status = cli_parse_kv(args.kv, settings, MAX_SETTINGS, &num_settings);
    if (status != CLI_OK) return status;
    num_settings = drop_reference(settings, num_settings);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    status = cli_without(args.without, &options);
    if (status != CLI_OK) return status;
    cli_catch_interrupt();
    cli_output plot = {0}, report = {0};
    cli_model model = {0};
    cli_scales scales = {0};
    kv8_compare_row rows[MAX_SETTINGS + 1] = {KV8_COMPARE_ROW_INIT};
    status = open_outputs(&args, &plot, &report);
    if (status == CLI_OK)
        status = cli_model_open(&model, &(cli_opening){.directory = args.model,
                                                       .device = args.device,
                                                       .options = &options,
                                                       .threads = args.threads,
                                                       .with_tokenizer = true});
    if (status == CLI_OK) status = cli_scales_open(&scales, args.scales, &model);
    if (status == CLI_OK) {
        num_settings = add_mix(&scales, settings, num_settings);
        status = measure(&args, &model, &scales, settings, num_settings, rows);
    }
    if (status == CLI_OK) status = show(&args, &model, rows, num_settings + 1, &plot, &report);
    cli_output_abort(&plot);
    cli_output_abort(&report);
    cli_scales_close(&scales);
    cli_model_close(&model);
    return status;
}
