/* cmd_calibrate.c - kv8 calibrate: a text past the model, scales fitted to what was seen, the best
 * formats within a budget, and all of it written as a scale file; or a scale file in another form.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "budget.h"
#include "cli.h"
#include "counts.h"
#include "fits.h"
#include "ranks.h"

typedef struct calibrate_args {
    const char *model, *text, *output, *format, *from, *merge, *check, *device, *dtype,
        *granularity, *method;
    const char *parallel, *budget, *plot, *report;
    int32_t max_tokens, window_len, num_windows, num_ranks, threads;
    float percentile, margin;
    bool power_of_two, with_q, json;
} calibrate_args;

/* What the words of the arguments mean. */
typedef struct plan {
    kv8_fit_options fit;
    kv8_scale_format format;
    budget budget;
    bool per_tensor, by_heads; /* by_heads: ranks share out the heads, not the text */
} plan;

static int parse(calibrate_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"text", "FILE", "UTF-8 text; NUL bytes separate documents", CLI_TEXT, &args->text},
        {"output", "PATH", "where the scales go; -o PATH too", CLI_OUTPUT, &args->output},
        {"format", "NAME",
         "form of the output: kv8, lightllm, sglang, compressed-tensors or\n"
         "modelopt (kv8)",
         CLI_TEXT, &args->format},
        {"device", "DEVICE", "what computes: cpu, cuda or cuda:N, the Nth GPU (cpu)", CLI_TEXT,
         &args->device},
        {"max-tokens", "N", "tokens of the text to observe (16384)", CLI_INT, &args->max_tokens, 1,
         2e9},
        {"window-len", "L", "tokens read from an empty cache at a time (4096)", CLI_INT,
         &args->window_len, 2, 1e7},
        {"dtype", "NAME", "codes to fit for: e4m3, e4m3fnuz or e5m2 (e4m3)", CLI_TEXT,
         &args->dtype},
        {"granularity", "WORD", "head or tensor: a scale for each head, or layer (head)", CLI_TEXT,
         &args->granularity},
        {"method", "WORD", "absmax, percentile or squared-error (absmax)", CLI_TEXT, &args->method},
        {"percentile", "P", "of values that must not clip (99.99)", CLI_FLOAT, &args->percentile,
         1e-3, 100},
        {"margin", "X", "factor on the fitted range (1)", CLI_FLOAT, &args->margin, 1, 1024},
        {"power-of-two", NULL, "round scales up to powers of two", CLI_FLAG, &args->power_of_two},
        {"with-q", NULL, "fit scales for queries too", CLI_FLAG, &args->with_q},
        {"budget", "SPEC",
         "KL=X, top1=X or bytes=X: also choose bf16, int8 or e4m3 for\n"
         "every layer's K and V, with the fewest bytes (or least KL)",
         CLI_TEXT, &args->budget},
        {"windows", "N", "windows to measure damage on, and as many to verify on (2)", CLI_INT,
         &args->num_windows, 1, 1e6},
        {"from", "FILE", "take the scales from a file instead of a text", CLI_TEXT, &args->from},
        {"merge", "FILES", "take the counts of scale files, commas between, instead of a text's",
         CLI_TEXT, &args->merge},
        {"check", "FILE", "hold a file's scales against what the text shows", CLI_TEXT,
         &args->check},
        {"num-ranks", "N", "ranks of sglang's form (1)", CLI_INT, &args->num_ranks, 1, 65536},
        {"parallel", "WORD", "data or heads: what the ranks of mpirun share out (data)", CLI_TEXT,
         &args->parallel},
        {"plot", "FILE", "draw the fit (or with --budget the choice) as SVG", CLI_OUTPUT,
         &args->plot},
        {"report", "FILE", "write the JSON object to a file", CLI_OUTPUT, &args->report},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"json", NULL, "print the JSON object instead of the table", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 calibrate MODEL --text FILE -o SCALES [options]",
        .about =
            "Observes the K and V that a text makes, fits the scales of an FP8 cache to them and\n"
            "shows what they cost, beside scale 1. Names what no scale mends: NaN, outliers.\n"
            "Under mpirun the ranks share the work; the file is the same.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    const int status = cli_parse(&command, argc, argv, &args->model);
    if (status >= 0) return status;
    if ((args->text != NULL) + (args->from != NULL) + (args->merge != NULL) != 1)
        return cli_fail("one of --text FILE, --merge FILES and --from FILE");
    if (args->merge != NULL && (args->budget != NULL || args->with_q))
        return cli_fail("--merge has no text for --budget, and files hold no counts of queries");
    if (args->from != NULL && (args->budget != NULL || args->check != NULL || args->plot != NULL ||
                               args->report != NULL || args->json))
        return cli_fail("--from FILE only writes it in another form: --output PATH, --format NAME");
    if (args->output == NULL && args->from != NULL) return cli_fail("--output PATH is missing");
    return -1;
}

/* --- words --- */

/* What the form of the output cannot hold, before anything is measured for it. */
static int check_form(const calibrate_args *args, const plan *p) {
    if (args->from == NULL && p->format != KV8_SCALES_KV8 && p->fit.dtype != KV8_E4M3)
        return cli_fail("--format %s holds scales of e4m3, --dtype is %s", args->format,
                        args->dtype);
    if (args->num_ranks > 1 && p->format != KV8_SCALES_SGLANG)
        return cli_fail("--num-ranks goes with --format sglang");
    return CLI_OK;
}

static int read_words(const calibrate_args *args, plan *out) {
    static const char *const methods[] = {"absmax", "percentile", "squared-error"};
    static const char *const granularities[] = {"head", "tensor"};
    static const char *const parallels[] = {"data", "heads"};
    const char *formats[KV8_SCALES_COUNT];
    for (int i = 0; i < KV8_SCALES_COUNT; i++)
        formats[i] = kv8_scale_format_name((kv8_scale_format)i);
    int method, granularity, parallel, format;
    if ((method = cli_word("method", args->method, methods, 3)) < 0 ||
        (granularity = cli_word("granularity", args->granularity, granularities, 2)) < 0 ||
        (parallel = cli_word("parallel", args->parallel, parallels, 2)) < 0 ||
        (format = cli_word("format", args->format, formats, KV8_SCALES_COUNT)) < 0)
        return CLI_FAILED;
    *out = (plan){.fit = KV8_FIT_OPTIONS_INIT,
                  .format = (kv8_scale_format)format,
                  .per_tensor = granularity == 1,
                  .by_heads = parallel == 1};
    const kv8_status status = kv8_dtype_from_name(args->dtype, &out->fit.dtype);
    if (status != KV8_OK) return cli_fail_status(status);
    if (kv8_dtype_size(out->fit.dtype) != 1 || out->fit.dtype == KV8_INT8)
        return cli_fail("--dtype is %s, must be a float of 8 bits", args->dtype);
    if (args->budget != NULL && out->fit.dtype != KV8_E4M3)
        return cli_fail("--budget chooses among bf16, int8 and e4m3; --dtype is %s", args->dtype);
    out->fit.method = (kv8_fit_method)method;
    out->fit.percentile = (double)args->percentile;
    out->fit.margin = (double)args->margin;
    out->fit.power_of_two = args->power_of_two;
    if (check_form(args, out) != CLI_OK) return CLI_FAILED;
    return args->budget == NULL ? CLI_OK : budget_parse(args->budget, &out->budget);
}

/* --- observing --- */

/* The text's tokens: those observed, then those to verify on. */
typedef struct tokens {
    int32_t *ids;
    int64_t num, num_observed;
} tokens;

static int read_tokens(const calibrate_args *args, const cli_model *model, tokens *out) {
    const int status = cli_read_text(model->tokenizer, args->text, &out->ids, &out->num);
    if (status != CLI_OK) return status;
    if (out->num == 0) return cli_fail("%s: holds no token", args->text);
    out->num_observed = out->num < args->max_tokens ? out->num : args->max_tokens;
    const int64_t wanted = (int64_t)args->num_windows * args->window_len;
    if (args->budget == NULL) return CLI_OK;
    if (out->num_observed < wanted || out->num - out->num_observed < wanted)
        return cli_fail(
            "%s: %lld tokens, --budget needs %lld within --max-tokens and as many "
            "behind them",
            args->text, (long long)out->num, (long long)wanted);
    return CLI_OK;
}

static int make_observer(const calibrate_args *args, const plan *p, const cli_model *model,
                         const ranks *all, kv8_observer **out) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_model_observer_options(model->model, &options);
    if (!args->with_q) options.num_qo_heads = 0;
    if (p->by_heads) {
        options.rank = all->rank;
        options.num_ranks = all->num;
    }
    const kv8_status status = kv8_observer_create(out, &options);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

static int observe(const calibrate_args *args, const plan *p, cli_model *model, const ranks *all,
                   const tokens *text, kv8_observer *observer) {
    if (args->merge != NULL) /* rank 0's, else they would count once for each rank */
        return all->rank == 0 ? counts_add_files(observer, args->merge, model) : CLI_OK;
    cli_progress progress;
    kv8_observe_text_options options = KV8_OBSERVE_TEXT_OPTIONS_INIT;
    options.token_ids = text->ids;
    options.num_tokens = text->num_observed;
    options.window_len = args->window_len;
    options.rank = p->by_heads ? 0 : all->rank;
    options.num_ranks = p->by_heads ? 1 : all->num;
    options.progress = cli_progress_show;
    options.progress_cookie = &progress;
    cli_progress_begin(&progress);
    const kv8_status status = kv8_evaluate_observe(model->model, observer, &options);
    cli_progress_end(&progress);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* --- choosing --- */

/* Rows of [num_layers] pointers into the fits, per head. */
typedef struct scale_pointers {
    const float **k, **v;
    float *repeated; /* per tensor */
} scale_pointers;

static void free_pointers(scale_pointers *p) {
    free(p->k);
    free(p->v);
    free(p->repeated);
}

static int make_pointers(const fits *f, scale_pointers *out) {
    const size_t layers = (size_t)f->num_layers, heads = (size_t)f->num_kv_heads;
    *out = (scale_pointers){.k = malloc(layers * sizeof *out->k),
                            .v = malloc(layers * sizeof *out->v),
                            .repeated = malloc(layers * 2 * heads * sizeof *out->repeated)};
    if (out->k == NULL || out->v == NULL || out->repeated == NULL)
        return cli_fail("no memory for scales");
    for (size_t i = 0; i < layers * 2 * heads; i++)
        out->repeated[i] = f->per_tensor ? f->scales[i / heads] : f->scales[i];
    for (size_t i = 0; i < layers; i++) {
        out->k[i] = out->repeated + i * 2 * heads;
        out->v[i] = out->k[i] + heads;
    }
    return CLI_OK;
}

static int choose(const calibrate_args *args, const plan *p, cli_model *model, const tokens *text,
                  const fits *f, kv8_choice **out) {
    scale_pointers scales;
    int status = make_pointers(f, &scales);
    if (status == CLI_OK) {
        cli_progress progress;
        kv8_choose_options options = KV8_CHOOSE_OPTIONS_INIT;
        const int64_t num = (int64_t)args->num_windows * args->window_len;
        options.token_ids = text->ids;
        options.held_ids = text->ids + text->num_observed;
        options.num_tokens = options.num_held = num;
        options.window_len = args->window_len;
        options.k_scale = scales.k;
        options.v_scale = scales.v;
        options.budget_kind = p->budget.kind;
        options.budget = p->budget.value;
        options.progress = cli_progress_show;
        options.progress_cookie = &progress;
        cli_progress_begin(&progress);
        const kv8_status chosen = kv8_evaluate_choose(out, model->model, &options);
        cli_progress_end(&progress);
        if (chosen != KV8_OK) status = cli_fail_status(chosen);
    }
    free_pointers(&scales);
    return status;
}

/* --- results --- */

/* What rank 0 shows and writes. */
typedef struct result {
    fits fits;
    kv8_choice *choice; /* NULL without --budget */
    cli_output plot, report;
} result;

static int write_scales(const calibrate_args *args, const plan *p, const cli_model *model,
                        const result *r) {
    if (args->output == NULL) return CLI_OK;
    kv8_mix mix = KV8_MIX_INIT;
    if (r->choice != NULL) {
        const kv8_status status = kv8_choice_get_mix(r->choice, kv8_choice_chosen(r->choice), &mix);
        if (status != KV8_OK) return cli_fail_status(status);
    }
    return fits_write(&r->fits, model, r->choice == NULL ? NULL : mix.layers, args->output,
                      p->format, args->num_ranks);
}

/* Where the counts come from. */
static const char *source_of(const calibrate_args *args) {
    return args->text != NULL ? args->text : args->merge;
}

static json_t *report_json(const calibrate_args *args, const plan *p, const cli_model *model,
                           const result *r) {
    return json_pack(
        "{s:o, s:o, s:I, s:s, s:s, s:f, s:s, s:o, s:o*}", "model", cli_json_text(args->model),
        "text", cli_json_text(source_of(args)), "tokens", (json_int_t)r->fits.num_tokens, "dtype",
        args->dtype, "method", args->method, "margin", (double)args->margin, "version",
        kv8_version(), "heads", fits_json(&r->fits), "budget",
        r->choice == NULL ? NULL : budget_json(&p->budget, r->choice, model->info.num_layers));
}

static int show(const calibrate_args *args, const plan *p, const cli_model *model, result *r) {
    int status = CLI_OK;
    if (args->json) {
        status = cli_write_json(report_json(args, p, model, r), stdout, "stdout");
    } else {
        printf("%s: %llu tokens of %s, %s by %s\n\n", args->model,
               (unsigned long long)r->fits.num_tokens, source_of(args), args->dtype, args->method);
        fits_print(&r->fits);
        if (r->choice != NULL) budget_print(&p->budget, r->choice, model->info.num_layers);
    }
    if (status == CLI_OK) status = cli_finish_stdout();
    if (status == CLI_OK && args->report != NULL) {
        status = cli_write_json(report_json(args, p, model, r), r->report.file, args->report);
        if (status == CLI_OK) status = cli_output_commit(&r->report);
    }
    if (status == CLI_OK && args->plot != NULL) {
        status = r->choice == NULL
                     ? fits_draw(&r->fits, args->model, r->plot.file)
                     : budget_draw(&p->budget, r->choice, model->info.num_layers, r->plot.file);
        if (status == CLI_OK) status = cli_output_commit(&r->plot);
    }
    return status;
}

static int check_file(const calibrate_args *args, const cli_model *model, const result *r) {
    if (args->check == NULL) return CLI_OK;
    cli_scales scales;
    int status = cli_scales_open(&scales, args->check, model);
    if (status == CLI_OK) status = fits_check(&r->fits, scales.file, args->check);
    cli_scales_close(&scales);
    return status == CLI_OK ? cli_finish_stdout() : status;
}

/* Fits, chooses, shows, writes: after the ranks' counts are one. */
static int finish(const calibrate_args *args, const plan *p, cli_model *model, const tokens *text,
                  const kv8_observer *observer, result *r) {
    int status = fits_make(&r->fits, observer, &p->fit, p->per_tensor);
    if (status == CLI_OK && args->budget != NULL)
        status = choose(args, p, model, text, &r->fits, &r->choice);
    if (status == CLI_OK) status = show(args, p, model, r);
    if (status == CLI_OK) status = check_file(args, model, r);
    if (status == CLI_OK && r->choice != NULL && kv8_choice_chosen(r->choice) < 0)
        status = cli_fail("no mix holds %s on the held text; nothing is written", args->budget);
    return status == CLI_OK ? write_scales(args, p, model, r) : status;
}

/* Everything that can be refused early is, before the model runs. */
static int open_outputs(const calibrate_args *args, result *r) {
    cli_output probe = {0};
    int status = CLI_OK;
    if (args->plot != NULL) status = cli_plot_check();
    if (status == CLI_OK && args->plot != NULL) status = cli_output_open(&r->plot, args->plot);
    if (status == CLI_OK && args->report != NULL)
        status = cli_output_open(&r->report, args->report);
    /* A checkpoint's directory is checked when the shard is written into it. */
    if (status == CLI_OK && args->output != NULL && strncmp(args->format, "c", 1) != 0 &&
        strncmp(args->format, "m", 1) != 0)
        status = cli_output_open(&probe, args->output);
    cli_output_abort(&probe);
    return status;
}

static int calibrate(const calibrate_args *args, const plan *p, cli_model *model,
                     const ranks *all) {
    tokens text = {0};
    result r = {.fits = {0}};
    kv8_observer *observer = NULL;
    const int32_t heads = model->info.num_kv_heads;
    if (heads % args->num_ranks != 0 && args->num_ranks % heads != 0)
        return cli_fail("--num-ranks is %d, the model has %d KV heads: neither divides the other",
                        args->num_ranks, heads);
    int status = all->rank == 0 ? open_outputs(args, &r) : CLI_OK;
    if (status == CLI_OK && args->text != NULL) status = read_tokens(args, model, &text);
    if (status == CLI_OK) status = make_observer(args, p, model, all, &observer);
    if (status == CLI_OK) status = observe(args, p, model, all, &text, observer);
    status = ranks_agree(all, status);
    if (status == CLI_OK) status = ranks_combine(all, observer);
    if (status == CLI_OK && all->rank == 0) status = finish(args, p, model, &text, observer, &r);
    status = ranks_agree(all, status);
    kv8_observer_destroy(observer);
    kv8_choice_destroy(r.choice);
    fits_free(&r.fits);
    cli_output_abort(&r.plot);
    cli_output_abort(&r.report);
    free(text.ids);
    return status;
}

/* --from: a file in another form. */
static int convert(const calibrate_args *args, const plan *p, const cli_model *model) {
    cli_scales scales;
    int status = cli_scales_open(&scales, args->from, model);
    if (status == CLI_OK) {
        const kv8_status written =
            kv8_scale_file_write(scales.file, args->output, p->format, args->num_ranks);
        if (written != KV8_OK) status = cli_fail_status(written);
    }
    cli_scales_close(&scales);
    return status;
}

/* A window at once is a GPU's prefill at its speed. */
static int32_t step_on_device(const calibrate_args *args) {
    enum { LONGEST = 8192 };
    return args->window_len < LONGEST ? args->window_len : LONGEST;
}

int cmd_calibrate(int argc, char **argv) {
    calibrate_args args = {.format = "kv8",
                           .dtype = "e4m3",
                           .granularity = "head",
                           .method = "absmax",
                           .parallel = "data",
                           .max_tokens = 16384,
                           .window_len = 4096,
                           .num_windows = 2,
                           .num_ranks = 1,
                           .percentile = 99.99f,
                           .margin = 1};
    plan p;
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    status = read_words(&args, &p);
    if (status != CLI_OK) return status;
    cli_catch_interrupt();
    ranks all;
    cli_model model = {0};
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    if (args.device != NULL && strcmp(args.device, "cpu") != 0)
        options.max_step_tokens = step_on_device(&args);
    status = ranks_begin(&all);
    if (status == CLI_OK) {
        status = cli_model_open(&model, &(cli_opening){.directory = args.model,
                                                       .device = args.device,
                                                       .options = &options,
                                                       .threads = args.threads,
                                                       .with_tokenizer = args.text != NULL});
        status = ranks_agree(&all, status);
        if (status == CLI_OK)
            status =
                args.from != NULL ? convert(&args, &p, &model) : calibrate(&args, &p, &model, &all);
        cli_model_close(&model);
        ranks_end(&all);
    }
    return status;
}
