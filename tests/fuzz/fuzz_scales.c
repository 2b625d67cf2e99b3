/* fuzz_scales.c - any bytes as a scale file in JSON, of kv8, LightLLM or SGLang: refused with a
 * message, or scales that a cache can rely on, counts that lie whole in their bins, and halves that
 * split as the whole says.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "scale_rows.h"

enum { HEADS = 2, MAX_LAYERS = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int holds) {
    if (!holds) abort();
}

static void check_data(const kv8_scale_data *d) {
    const size_t cells = (size_t)d->num_layers * kv8_scale_columns(d);
    check(d->num_layers >= 1 && d->num_layers <= MAX_LAYERS && d->num_kv_heads == HEADS);
    for (size_t i = 0; i < cells; i++) {
        check(isfinite(d->scales[i]) && d->scales[i] > 0);
        check(d->amax == NULL || (isfinite(d->amax[i]) && d->amax[i] >= 0));
        check(d->zeros == NULL || d->zeros[i] <= INT64_MAX);
        for (int32_t bin = 0; d->histogram != NULL && bin < d->num_bins; bin++)
            check(d->histogram[i * (size_t)d->num_bins + (size_t)bin] <= INT64_MAX);
    }
    for (int32_t i = 0; d->kv_dtypes != NULL && i < 2 * d->num_layers; i++)
        check(kv8_dtype_name(d->kv_dtypes[i]) != NULL);
}

static void check_split(const kv8_scale_file *whole, int32_t num_layers) {
    for (int32_t head = 0; head < HEADS; head++) {
        kv8_scale_file *part = NULL;
        check(kv8_scale_file_split(&part, whole, head, 1) == KV8_OK);
        for (int32_t layer = 0; layer < num_layers; layer++) {
            check(kv8_scale_file_k(part, layer)[0] == kv8_scale_file_k(whole, layer)[head]);
            check(kv8_scale_file_v(part, layer)[0] == kv8_scale_file_v(whole, layer)[head]);
        }
        kv8_scale_file_close(part);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
    kv8_scale_file *file = NULL;
    expect.num_kv_heads = HEADS;
    if (kv8_scale_json_parse(&file, "fuzz", (const char *)data, size, &expect) == KV8_OK) {
        kv8_scale_data all = KV8_SCALE_DATA_INIT;
        check(kv8_scale_file_get(file, &all) == KV8_OK);
        check_data(&all);
        check_split(file, all.num_layers);
    } else {
        check(file == NULL && kv8_status_message()[0] != '\0');
    }
    kv8_scale_file_close(file);
    return 0;
}
