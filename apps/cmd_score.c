/* cmd_score.c - kv8 score: the loss of a model on a list of token ids, for one KV setting.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "cli.h"

typedef struct score_args {
    const char *model, *tokens, *kv, *device;
    int32_t threads;
    bool json, batch_invariant;
} score_args;

static int parse(score_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"tokens", "FILE", "a JSON array of at least two token ids", CLI_TEXT, &args->tokens},
        {"kv", "SETTING", "how the KV cache is stored, see kv8 compare --help (f32)", CLI_TEXT,
         &args->kv},
        {"device", "DEVICE", "what computes: cpu, cuda or cuda:N, the Nth GPU (cpu)", CLI_TEXT,
         &args->device},
        {"batch-invariant", NULL, "no loss depends on how the text is cut into steps", CLI_FLAG,
         &args->batch_invariant},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"json", NULL, "print one JSON object: nll, loss, kv, tokens_per_s", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 score MODEL --tokens FILE [options]",
        .about = "Prints the natural-log loss of every token given the tokens before it.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    const int status = cli_parse(&command, argc, argv, &args->model);
    if (status >= 0) return status;
    return args->tokens == NULL ? cli_fail("--tokens FILE is missing") : -1;
}

static double mean(const float *values, int32_t num) {
    double sum = 0;
    for (int32_t i = 0; i < num; i++) sum += (double)values[i];
    return sum / num;
}

static int print_json(const kv8_kv_setting *setting, const float *nll, int32_t num,
                      double tokens_per_s) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < num; i++) json_array_append_new(list, cli_json_number((double)nll[i]));
    json_t *const root = json_pack("{s:s, s:o, s:o, s:o}", "kv", setting->name, "loss",
                                   cli_json_number(mean(nll, num)), "tokens_per_s",
                                   cli_json_number(tokens_per_s), "nll", list);
    return cli_write_json(root, stdout, "stdout");
}

static void print_text(const kv8_kv_setting *setting, const int32_t *ids, const float *nll,
                       int32_t num, double tokens_per_s) {
    const double loss = mean(nll, num);
    printf("%d token%s scored, KV %s: loss %.4f nats per token, perplexity %.4g, %.0f tokens/s\n",
           num, num == 1 ? "" : "s", setting->name, loss, exp(loss), tokens_per_s);
    int32_t worst = 0;
    for (int32_t i = 1; i < num; i++) {
        if (nll[i] > nll[worst]) worst = i;
    }
    printf("least expected: token %d (id %d), %.4f nats\n", worst + 1, ids[worst + 1],
           (double)nll[worst]);
}

static int run(const score_args *args, const kv8_kv_setting *setting, cli_model *model) {
    int32_t *ids = NULL, num = 0;
    int status = cli_read_tokens(args->tokens, model->info.vocab_size, &ids, &num);
    if (status != CLI_OK) return status;
    float *const nll = malloc((size_t)num * sizeof *nll);
    if (nll == NULL) status = cli_fail("no memory for %d losses", num);
    if (status == CLI_OK) {
        cli_progress progress;
        cli_progress_begin(&progress);
        kv8_score_options options = KV8_SCORE_OPTIONS_INIT;
        options.progress = cli_progress_show;
        options.progress_cookie = &progress;
        const kv8_status scored =
            kv8_evaluate_score(model->model, setting, ids, num, &options, nll);
        cli_progress_end(&progress);
        const double tokens_per_s = num / (cli_seconds() - progress.started);
        if (scored != KV8_OK) {
            status = cli_fail_status(scored);
        } else if (args->json) {
            status = print_json(setting, nll, num - 1, tokens_per_s);
        } else {
            print_text(setting, ids, nll, num - 1, tokens_per_s);
        }
    }
    free(nll);
    free(ids);
    return status == CLI_OK ? cli_finish_stdout() : status;
}

int cmd_score(int argc, char **argv) {
    score_args args = {.kv = "f32"};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    kv8_kv_setting setting;
    if (kv8_kv_setting_parse(args.kv, &setting) != KV8_OK) return cli_fail_kv(args.kv);
    cli_catch_interrupt();
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    if (args.batch_invariant) options.batch_invariant = 1;
    cli_model model;
    status = cli_model_open(&model, &(cli_opening){.directory = args.model,
                                                   .device = args.device,
                                                   .options = &options,
                                                   .threads = args.threads});
    if (status == CLI_OK) status = run(&args, &setting, &model);
    cli_model_close(&model);
    return status;
}
