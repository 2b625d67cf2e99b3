/* serve_args.c - the command line of kv8 serve.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "serve_args.h"

#include <stdlib.h>
#include <string.h>

/* What is given as text, before it is looked at. */
typedef struct given {
    const char *kv_memory, *names, *key, *key_file, *parser;
    const char *cache_dtype, *quantization, *load_format, *dtype, *tool_parser; /* vLLM's */
    float gpu_memory;
    int32_t tensor_parallel, pipeline_parallel;
    bool prefix, no_prefix, eager, auto_tools, trust;
} given;

/* --- vLLM's words --- */

/* NULL (not given) and one of two words pass. */
static bool passes(const char *option, const char *value, const char *first, const char *second) {
    return value == NULL || cli_word(option, value, (const char *const[]){first, second}, 2) >= 0;
}

/* --kv-cache-dtype says --kv in vLLM's words: auto is the model's own 16 bits. */
static int take_cache_dtype(serve_args *args, const char *dtype) {
    static const char *const words[][2] = {{"auto", "bf16"},
                                           {"bfloat16", "bf16"},
                                           {"fp8", "e4m3"},
                                           {"fp8_e4m3", "e4m3"},
                                           {"fp8_e5m2", "e5m2"}};
    if (dtype == NULL) return -1;
    if (args->kv != NULL) return cli_fail("--kv and --kv-cache-dtype say the same, one is enough");
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcmp(dtype, words[i][0]) == 0) args->kv = words[i][1];
    }
    if (args->kv != NULL) return -1;
    return cli_fail(
        "--kv-cache-dtype is \"%s\", must be auto, bfloat16, fp8, fp8_e4m3 or fp8_e5m2; --kv takes "
        "more",
        dtype);
}

static int take_vllm_words(serve_args *args, const given *g) {
    if (g->prefix && g->no_prefix)
        return cli_fail("--enable-prefix-caching and --no-enable-prefix-caching contradict");
    args->share_prefixes = !g->no_prefix;
    if (g->quantization != NULL && strcmp(g->quantization, "mxfp4") != 0)
        return cli_fail("--quantization is \"%s\", checkpoints are mxfp4", g->quantization);
    if (!passes("load-format", g->load_format, "auto", "safetensors") ||
        !passes("dtype", g->dtype, "auto", "bfloat16") ||
        !passes("tool-call-parser", g->tool_parser, "openai", "harmony"))
        return CLI_FAILED;
    if (g->tensor_parallel != 1)
        return cli_fail("--tensor-parallel-size is %d, one device serves", g->tensor_parallel);
    if (g->pipeline_parallel != 1)
        return cli_fail("--pipeline-parallel-size is %d, one device serves", g->pipeline_parallel);
    if (g->gpu_memory > 0 && strcmp(args->device, "cpu") == 0)
        return cli_fail(
            "--gpu-memory-utilization is about a GPU, this serves on the CPU; "
            "--kv-memory says how much of its memory the KV cache takes");
    if (g->gpu_memory > 0 && g->kv_memory != NULL)
        return cli_fail("--gpu-memory-utilization and --kv-memory: one of them");
    args->gpu_share = (double)g->gpu_memory;
    args->eager = g->eager;
    return take_cache_dtype(args, g->cache_dtype);
}

/* --- kv8's own --- */

/* "8GiB", "500MB", "0.25". */
static int take_kv_memory(serve_args *args, const char *text) {
    static const struct {
        const char *suffix;
        double factor;
    } units[] = {{"", 1},      {"kB", 1e3},   {"MB", 1e6},      {"GB", 1e9},
                 {"TB", 1e12}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824.0}};
    args->kv_fraction = strcmp(args->device, "cpu") == 0 ? 0.25 : 0.9;
    if (text == NULL) return -1;
    char *end;
    const double number = strtod(text, &end);
    if (end != text && *end == '\0' && number > 0 && number <= 1) {
        args->kv_fraction = number;
        return -1;
    }
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (end == text || strcmp(end, units[i].suffix) != 0) continue;
        const double bytes = number * units[i].factor;
        /* A small number without a unit is more likely a fraction gone wrong. */
        if (!(bytes >= (*end == '\0' ? 65536 : 1) && bytes < 1e15)) break;
        args->kv_bytes = (uint64_t)bytes;
        return -1;
    }
    return cli_fail(
        "--kv-memory is \"%s\", must be a size (8GiB, 500MB) or a fraction of the "
        "memory (0.25; of a GPU's free memory 0.9)",
        text);
}

/* Items between any of `separators`; `text` is cut up. */
static int take_list(char *text, const char *separators, const char *what, const char **items,
                     size_t capacity, size_t *num_out) {
    char *rest = NULL;
    for (char *item = strtok_r(text, separators, &rest); item != NULL;
         item = strtok_r(NULL, separators, &rest)) {
        if (*num_out == capacity) return cli_fail("%s has more than %zu entries", what, capacity);
        items[(*num_out)++] = item;
    }
    return *num_out > 0 ? -1 : cli_fail("%s is empty", what);
}

static int take_keys(serve_args *args, const given *g) {
    size_t size = 0;
    if (g->key != NULL && g->key_file != NULL)
        return cli_fail("--api-key and --api-key-file: one of them");
    if (g->key == NULL && g->key_file == NULL) return -1;
    if (g->key_file != NULL) {
        const int status = cli_read_file(g->key_file, &args->keys_text, &size);
        if (status != CLI_OK) return status;
    } else if ((args->keys_text = strdup(g->key)) == NULL) {
        return cli_fail("no memory for a key");
    }
    return take_list(args->keys_text, "\r\n", g->key != NULL ? "--api-key" : g->key_file,
                     args->keys, SERVE_MAX_KEYS, &args->num_keys);
}

/* JSON holds them. */
static int check_names(const serve_args *args) {
    for (size_t i = 0; i < args->num_names; i++) {
        json_t *const name = json_string(args->names[i]);
        if (name == NULL)
            return cli_fail("the model's name \"%s\" is no UTF-8, --served-model-name gives it one",
                            args->names[i]);
        json_decref(name);
    }
    return -1;
}

/* The names given, or the directory's own. */
static int take_names(serve_args *args, const char *names) {
    args->names_text = strdup(names != NULL ? names : args->model);
    if (args->names_text == NULL) return cli_fail("no memory for names");
    if (names != NULL)
        return take_list(args->names_text, ",", "--served-model-name", args->names, SERVE_MAX_NAMES,
                         &args->num_names);
    char *name = args->names_text;
    for (size_t length = strlen(name); length > 1 && name[length - 1] == '/'; length--)
        name[length - 1] = '\0';
    char *const slash = strrchr(name, '/');
    args->names[0] = slash != NULL && slash[1] != '\0' ? slash + 1 : name;
    args->num_names = 1;
    return -1;
}

static int check(serve_args *args, const given *g) {
    static const char *const logs[] = {"text", "json", "none"};
    int status = take_vllm_words(args, g);
    if (status < 0) status = take_kv_memory(args, g->kv_memory);
    if (status < 0) status = take_names(args, g->names);
    if (status < 0) status = check_names(args);
    if (status < 0) status = take_keys(args, g);
    if (status >= 0) return status;
    if (args->kv == NULL && args->scales == NULL) args->kv = "e4m3";
    if (args->kv != NULL && kv8_kv_setting_parse(args->kv, &args->setting) != KV8_OK)
        return cli_fail_kv(args->kv);
    if (args->snapshot_dir != NULL && !args->share_prefixes)
        return cli_fail("--snapshot-dir is about prefixes, --no-enable-prefix-caching shares none");
    if (!passes("reasoning-parser", g->parser, "harmony", "none")) return CLI_FAILED;
    args->harmony = strcmp(g->parser, "harmony") == 0;
    if (cli_word("log", args->log, logs, sizeof logs / sizeof logs[0]) < 0) return CLI_FAILED;
    return -1;
}

int serve_args_parse(serve_args *args, int argc, char **argv) {
    given g = {.parser = "harmony", .tensor_parallel = 1, .pipeline_parallel = 1};
    *args = (serve_args){.host = "127.0.0.1",
                         .port = 8000,
                         .device = "cpu",
                         .log = "text",
                         .calibrate_tokens = 16384};
    const cli_option options[] = {
        {"device", "DEVICE", "cpu, cuda or cuda:N (cpu)", CLI_TEXT, &args->device},
        {"kv", "SETTING", "how the KV cache is stored, see kv8 compare --help (e4m3)", CLI_TEXT,
         &args->kv},
        {"scales", "FILE",
         "scales of the FP8 formats, see kv8 calibrate; without --kv the\n"
         "mix of formats in it is how the cache is stored",
         CLI_TEXT, &args->scales},
        {"kv-memory", "SIZE",
         "of the KV cache: 8GiB, or a fraction of the memory (0.25) or of\nwhat the model leaves "
         "of a GPU's (0.9)",
         CLI_TEXT, &g.kv_memory},
        {"host", "HOST", "address to listen at (127.0.0.1)", CLI_TEXT, &args->host},
        {"port", "N", "port to listen at; 0 = any free one (8000)", CLI_INT, &args->port, 0, 65535},
        {"max-model-len", "N", "longest prompt and answer together (the model's)", CLI_INT,
         &args->max_model_len, 1, INT32_MAX},
        {"max-num-seqs", "N", "most requests in a step (64)", CLI_INT, &args->max_num_seqs, 1,
         4096},
        {"max-num-batched-tokens", "N",
         "tokens of a step as it has room; without it at most 512 (cpu) or\n"
         "2048 (cuda), and so many of prompts that those who decode wait\n"
         "less than twice as long as usual",
         CLI_INT, &args->step_tokens, 1, 65536},
        {"batch-invariant", NULL,
         "answers do not depend on who else is served, at some cost on a\n"
         "GPU; so it is on the CPU anyway",
         CLI_FLAG, &args->batch_invariant},
        {"max-waiting", "N", "most requests that wait for their turn (4096)", CLI_INT,
         &args->max_waiting, 0, 1 << 20},
        {"max-waiting-seconds", "S", "longest that one waits; 0 = as long as it takes (0)",
         CLI_FLOAT, &args->max_waiting_seconds, 0, 1e6},
        {"served-model-name", "NAMES", "what requests call the model, with commas (its directory)",
         CLI_TEXT, &g.names},
        {"api-key", "KEY", "ask for this key; other users of the machine see it here", CLI_TEXT,
         &g.key},
        {"api-key-file", "FILE", "ask for one of the keys in the file, one a line", CLI_TEXT,
         &g.key_file},
        {"calibrate", "FILE",
         "fit scales to what is served and write them, as kv8 calibrate\n"
         "does; POST /calibration/stop and /start end and begin it",
         CLI_OUTPUT, &args->calibrate},
        {"calibrate-warmup", "N", "tokens that pass before any is counted (0)", CLI_INT,
         &args->calibrate_warmup, 0, 2e9},
        {"calibrate-tokens", "N", "tokens after which the scales are written (16384)", CLI_INT,
         &args->calibrate_tokens, 1, 2e9},
        {"snapshot-dir", "DIR",
         "prompts computed before are there after a restart: read from\n"
         "files here at the start, written at the end",
         CLI_TEXT, &args->snapshot_dir},
        {"reasoning-parser", "NAME", "harmony, or none: channels stay text (harmony)", CLI_TEXT,
         &g.parser},
        {"date", "DATE", "the current date in a chat's system message (none)", CLI_TEXT,
         &args->date},
        {"log", "FORM", "one line a request on stderr: text, json or none (text)", CLI_TEXT,
         &args->log},
        {"threads", "N", "threads of the model (all processors)", CLI_INT, &args->threads, 1,
         CLI_MAX_THREADS},
        {"http-threads", "N", "threads of HTTP (2)", CLI_INT, &args->http_threads, 1, 64},
        {"kv-cache-dtype", "DTYPE", "as vLLM: auto = bf16, fp8 = e4m3", CLI_TEXT, &g.cache_dtype},
        {"enable-prefix-caching", NULL, "as vLLM; so it is anyway", CLI_FLAG, &g.prefix},
        {"no-enable-prefix-caching", NULL, "every prompt is computed whole", CLI_FLAG,
         &g.no_prefix},
        {"gpu-memory-utilization", "F", "as vLLM: of a GPU's memory, weights and all", CLI_FLOAT,
         &g.gpu_memory, 0, 1},
        {"enforce-eager", NULL, "as vLLM: no graphs on a GPU", CLI_FLAG, &g.eager},
        {"quantization", "NAME", "as vLLM: mxfp4", CLI_TEXT, &g.quantization},
        {"load-format", "NAME", "as vLLM: auto or safetensors", CLI_TEXT, &g.load_format},
        {"dtype", "NAME", "as vLLM: auto or bfloat16", CLI_TEXT, &g.dtype},
        {"tensor-parallel-size", "N", "as vLLM: 1", CLI_INT, &g.tensor_parallel, 1, 1024},
        {"pipeline-parallel-size", "N", "as vLLM: 1", CLI_INT, &g.pipeline_parallel, 1, 1024},
        {"enable-auto-tool-choice", NULL, "as vLLM; so it is anyway", CLI_FLAG, &g.auto_tools},
        {"tool-call-parser", "NAME", "as vLLM: openai", CLI_TEXT, &g.tool_parser},
        {"trust-remote-code", NULL, "as vLLM; no code comes with a model here", CLI_FLAG, &g.trust},
    };
    const cli_command command = {
        .usage = "kv8 serve MODEL [options]",
        .about =
            "Serves the model to the clients of OpenAI's API: chat completions, completions,\n"
            "responses, models; /health, /metrics, and a page to talk to it at /. Ends when the\n"
            "requests under way have ended after SIGTERM or Ctrl-C, at once after a second one.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    const int status = cli_parse(&command, argc, argv, &args->model);
    return status >= 0 ? status : check(args, &g);
}

void serve_args_free(serve_args *args) {
    free(args->names_text);
    free(args->keys_text);
}
