/* cli_scales.c - a scale file opened for a model.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "cli.h"

int cli_scales_open(cli_scales *scales, const char *path, const cli_model *model) {
    *scales = (cli_scales){0};
    if (path == NULL) return CLI_OK;
    const size_t num_layers = (size_t)model->info.num_layers;
    kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
    expect.num_layers = model->info.num_layers;
    expect.num_kv_heads = model->info.num_kv_heads;
    expect.architecture = model->info.architecture;
    expect.model_hash = kv8_model_hash(model->model);
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    kv8_status status = kv8_scale_file_open(&scales->file, path, &expect);
    if (status == KV8_OK) status = kv8_scale_file_get(scales->file, &data);
    if (status != KV8_OK) return cli_fail_status(status);
    scales->layers = data.kv_dtypes;
    scales->dtype = data.dtype;
    scales->k = malloc(num_layers * sizeof *scales->k);
    scales->v = malloc(num_layers * sizeof *scales->v);
    if (scales->k == NULL || scales->v == NULL) return cli_fail("no memory for scales");
    for (int32_t i = 0; i < model->info.num_layers; i++) {
        scales->k[i] = kv8_scale_file_k(scales->file, i);
        scales->v[i] = kv8_scale_file_v(scales->file, i);
    }
    return CLI_OK;
}

void cli_scales_close(cli_scales *scales) {
    kv8_scale_file_close(scales->file);
    free(scales->k);
    free(scales->v);
    *scales = (cli_scales){0};
}
