/* cli_model.c - threads, model and tokenizer, opened and closed together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static kv8_status open_tokenizer(kv8_tokenizer **out, const char *directory) {
    static const char file[] = "/tokenizer.json";
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

int cli_model_open(cli_model *model, const char *directory, int32_t threads, bool with_tokenizer) {
    const kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    return cli_model_open_with(model, directory, &options, threads, with_tokenizer);
}

int cli_model_open_with(cli_model *model, const char *directory, const kv8_model_options *wanted,
                        int32_t threads, bool with_tokenizer) {
    *model = (cli_model){.info = KV8_MODEL_INFO_INIT};
    kv8_status status = kv8_machine_isa(&model->isa);
    if (status == KV8_OK) status = kv8_threads_create(&model->threads, threads);
    if (status == KV8_OK) {
        kv8_model_options options = *wanted;
        options.threads = model->threads;
        status = kv8_model_open(&model->model, directory, &options);
    }
    if (status == KV8_OK) status = kv8_model_get_info(model->model, &model->info);
    if (status == KV8_OK && with_tokenizer) status = open_tokenizer(&model->tokenizer, directory);
    if (status != KV8_OK) {
        const int exit_status = cli_fail_status(status);
        cli_model_close(model);
        return exit_status;
    }
    return CLI_OK;
}

void cli_model_close(cli_model *model) {
    kv8_tokenizer_close(model->tokenizer);
    kv8_model_close(model->model);
    kv8_threads_destroy(model->threads);
    *model = (cli_model){0};
}
