/* counts.c - from the counts in a scale file back to an observer's. Which channel held what is not
 * in the file.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "counts.h"

#include <stdlib.h>
#include <string.h>

static kv8_status add_column(kv8_observer *observer, const kv8_scale_data *data, size_t at) {
    const int32_t heads = data->num_kv_heads, column = (int32_t)(at % (2 * (size_t)heads));
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    seen.num_rows = data->num_tokens;
    seen.zeros = data->zeros[at];
    seen.nans = data->nans[at];
    seen.infs = data->infs[at];
    seen.absmax = data->amax[at];
    seen.histogram = data->histogram + at * KV8_OBSERVE_BINS;
    return kv8_observer_add_head(observer, (kv8_observed_tensor)(column / heads),
                                 (int32_t)(at / (2 * (size_t)heads)), column % heads, &seen);
}

static int add_file(kv8_observer *observer, const char *path, const cli_model *model) {
    cli_scales scales;
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    int status = cli_scales_open(&scales, path, model);
    if (status == CLI_OK) {
        const kv8_status got = kv8_scale_file_get(scales.file, &data);
        if (got != KV8_OK) status = cli_fail_status(got);
    }
    if (status == CLI_OK &&
        (data.per_tensor || data.amax == NULL || data.histogram == NULL || data.zeros == NULL ||
         data.nans == NULL || data.infs == NULL || data.num_bins != KV8_OBSERVE_BINS))
        status = cli_fail(
            "%s: holds no counts by head; files of kv8 calibrate and kv8 serve "
            "--calibrate do, but for --granularity tensor",
            path);
    const size_t num = (size_t)data.num_layers * 2 * (size_t)data.num_kv_heads;
    for (size_t at = 0; status == CLI_OK && at < num; at++) {
        if (add_column(observer, &data, at) != KV8_OK)
            status = cli_fail("%s: layer %zu, column %zu: %s", path,
                              at / (num / (size_t)data.num_layers),
                              at % (num / (size_t)data.num_layers), kv8_status_message());
    }
    cli_scales_close(&scales);
    return status;
}

int counts_add_files(kv8_observer *observer, const char *list, const cli_model *model) {
    const size_t length = strlen(list);
    if (length == 0 || list[0] == ',' || list[length - 1] == ',' || strstr(list, ",,") != NULL)
        return cli_fail("--merge is \"%s\", must be files with commas between", list);
    char *const names = strdup(list), *rest = NULL;
    if (names == NULL) return cli_fail("no memory for names");
    int status = CLI_OK;
    for (char *name = strtok_r(names, ",", &rest); status == CLI_OK && name != NULL;
         name = strtok_r(NULL, ",", &rest))
        status = add_file(observer, name, model);
    free(names);
    return status;
}
