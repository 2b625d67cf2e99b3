/* cli_model.c - threads, GPU, model and tokenizer, opened and closed together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static kv8_status open_tokenizer(kv8_tokenizer **out, const char *directory, int32_t vocab_size) {
    static const char file[] = "/tokenizer.json";
    if (strncmp(directory, KV8_RANDOM_PREFIX, strlen(KV8_RANDOM_PREFIX)) == 0)
        return kv8_tokenizer_create_words(out, vocab_size);
    char *const path = malloc(strlen(directory) + sizeof file);
    if (path == NULL) return KV8_ERR_NO_MEMORY;
    strcpy(path, directory);
    strcat(path, file);
    const kv8_status status = kv8_tokenizer_open(out, path);
    free(path);
    return status;
}

int cli_without(const char *list, kv8_model_options *options) {
    for (const char *at = list; at != NULL && *at != '\0';) {
        const size_t length = strcspn(at, ",");
        if (length == 5 && memcmp(at, "sinks", 5) == 0)
            options->without_sinks = 1;
        else if (length == 6 && memcmp(at, "window", 6) == 0)
            options->without_window = 1;
        else
            return cli_fail("--without is \"%s\", must be sinks, window or sinks,window", list);
        at += length + (at[length] == ',');
    }
    return list == NULL || list[0] != '\0' ? CLI_OK : cli_fail("--without is empty");
}

int cli_device(const char *text, int32_t *idx_out) {
    enum { MAX_DEVICES = 1024 };
    *idx_out = -1;
    if (text == NULL || strcmp(text, "cpu") == 0) return CLI_OK;
    char *end = NULL;
    const bool has_idx = strncmp(text, "cuda:", 5) == 0 && text[5] >= '0' && text[5] <= '9';
    const long idx = has_idx ? strtol(text + 5, &end, 10) : 0;
    if ((!has_idx && strcmp(text, "cuda") != 0) || (has_idx && *end != '\0') || idx > MAX_DEVICES)
        return cli_fail("--device is \"%s\", must be cpu, cuda or cuda:N", text);
    *idx_out = (int32_t)idx;
    return CLI_OK;
}

int cli_path(const char *name, const char *device, kv8_model_options *options) {
    if (name == NULL) return CLI_OK;
    static const kv8_step_path paths[] = {KV8_PATH_PERSISTENT, KV8_PATH_GRAPH, KV8_PATH_EAGER};
    static const char *const names[] = {"persistent", "graph", "eager"};
    const int i = cli_word("path", name, names, 3);
    if (i < 0) return CLI_FAILED;
    options->path = paths[i];
    int32_t device_idx = -1;
    const int named = cli_device(device, &device_idx);
    if (named != CLI_OK || device_idx >= 0) return named;
    return cli_fail("--path is of a model on a GPU: --device cuda");
}

static kv8_status open_device(cli_model *model, int32_t idx) {
    if (idx < 0) return KV8_OK;
    const kv8_status status = kv8_device_open(&model->device, idx);
    return status == KV8_OK ? kv8_stream_create(&model->stream, model->device) : status;
}

static kv8_status open_model(cli_model *model, const cli_opening *opening) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    cli_progress progress;
    if (opening->options != NULL) options = *opening->options;
    options.threads = model->threads;
    options.device = model->device;
    options.stream = model->stream;
    options.progress = cli_progress_show;
    options.progress_cookie = &progress;
    cli_progress_begin(&progress);
    const kv8_status status = kv8_model_open(&model->model, opening->directory, &options);
    cli_progress_end(&progress);
    return status;
}

int cli_model_open(cli_model *model, const cli_opening *opening) {
    int32_t device_idx = -1;
    *model = (cli_model){.info = KV8_MODEL_INFO_INIT};
    const int named = cli_device(opening->device, &device_idx);
    if (named != CLI_OK) return named;
    kv8_status status = kv8_machine_isa(&model->isa);
    if (status == KV8_OK) status = kv8_threads_create(&model->threads, opening->threads);
    if (status == KV8_OK) status = open_device(model, device_idx);
    if (status == KV8_OK) status = open_model(model, opening);
    if (status == KV8_OK) status = kv8_model_get_info(model->model, &model->info);
    if (status == KV8_OK && opening->with_tokenizer)
        status = open_tokenizer(&model->tokenizer, opening->directory, model->info.vocab_size);
    if (status == KV8_OK) return CLI_OK;
    const int exit_status = cli_fail_status(status);
    cli_model_close(model);
    return exit_status;
}

void cli_model_close(cli_model *model) {
    kv8_tokenizer_close(model->tokenizer);
    kv8_model_close(model->model);
    kv8_stream_destroy(model->stream);
    kv8_device_close(model->device);
    kv8_threads_destroy(model->threads);
    *model = (cli_model){0};
}
