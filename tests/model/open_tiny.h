/* open_tiny.h - the shipped model and the ids of a text beside it, opened once for all tests of a
 * program.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_OPEN_TINY_H
#define KV8_OPEN_TINY_H

#include "model_runs.h"

static kv8_safetensors file;
static const int32_t *ids; /* of a text, 1024 */
static kv8_model *model;
static kv8_model_info info = KV8_MODEL_INFO_INIT;

static inline int open_all(void **state) {
    (void)state;
    int32_t n = 0;
    if (kv8_safetensors_open(&file, "models/tiny-gpt-oss/golden.safetensors", NULL) != KV8_OK)
        return -1;
    ids = golden(&file, "window.ids", KV8_TENSOR_I32, &n);
    model = open_model(tiny_model, KV8_ISA_BEST);
    assert_ok(kv8_model_get_info(model, &info));
    return 0;
}

static inline int close_all(void **state) {
    (void)state;
    kv8_model_close(model);
    kv8_safetensors_close(&file);
    return 0;
}

#endif
