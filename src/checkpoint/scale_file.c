/* scale_file.c - reads LightLLM's kv_cache_calib.json: K and V scales by layer and head, made for
 * e4m3 (scale = absmax / 448). It checks everything the file says about itself and everything the
 * model can contradict; it does not fit, change or invent a scale.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include <kv8/scale_file.h>

#include "json_fields.h"

/* A row holds K's scales, then V's, each repeated to num_kv_heads for per-tensor files. */
struct kv8_scale_file {
    int32_t num_layers, num_kv_heads;
    float *scales; /* [num_layers, 2, num_kv_heads] */
};

/* 1,000 layers of 1,000 heads, 20 characters a number: far above any model's file. */
static const size_t max_file_size = (size_t)64 << 20;

static size_t num_scales(const kv8_scale_file *file) {
    return (size_t)file->num_layers * 2 * (size_t)file->num_kv_heads;
}

static kv8_status get_member(const json_t *root, const char *key, json_t **value_out) {
    json_t *const value = json_object_get(root, key);
    if (value == NULL) return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is missing", key);
    *value_out = value;
    return KV8_OK;
}

static kv8_status check_string(const json_t *root, const char *key, const char **text_out) {
    json_t *value = NULL;
    KV8_TRY(get_member(root, key, &value));
    if (!json_is_string(value)) return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is not a string", key);
    *text_out = json_string_value(value);
    return KV8_OK;
}

static kv8_status check_integer(const json_t *root, const char *key, int64_t wanted) {
    json_t *value = NULL;
    KV8_TRY(get_member(root, key, &value));
    if (!json_is_integer(value))
        return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is not an integer", key);
    if (json_integer_value(value) != wanted)
        return kv8_fail(KV8_ERR_INVALID, "\"%s\" is %lld, the model has %lld", key,
                        (long long)json_integer_value(value), (long long)wanted);
    return KV8_OK;
}

/* Scales fitted to another range (int8's 127, e5m2's 57344) would clip or waste e4m3's. */
static kv8_status check_limit(const json_t *root, const char *key, double wanted) {
    json_t *value = NULL;
    KV8_TRY(get_member(root, key, &value));
    if (!json_is_number(value)) return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is not a number", key);
    if (!(json_number_value(value) == wanted))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "\"%s\" is %g, e4m3 scales have %g", key,
                        json_number_value(value), wanted);
    return KV8_OK;
}

/* Everything besides the scales; *columns_out is the length of a row. */
static kv8_status check_head(const json_t *root, const kv8_scale_file *file, size_t *columns_out) {
    const char *text = NULL;
    KV8_TRY(check_string(root, "version", &text));
    if (strcmp(text, "1.0") != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "version is \"%s\", known is \"1.0\"", text);
    KV8_TRY(check_string(root, "architectures", &text));
    KV8_TRY(check_string(root, "quant_type", &text));
    const bool per_head = strcmp(text, "per_head") == 0;
    if (!per_head && strcmp(text, "per_tensor") != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "quant_type is \"%s\", known are \"per_head\" and \"per_tensor\"", text);
    KV8_TRY(check_limit(root, "qmin", -448));
    KV8_TRY(check_limit(root, "qmax", 448));
    KV8_TRY(check_integer(root, "num_layers", file->num_layers));
    /* A per-tensor file is right for any number of heads. */
    if (per_head) KV8_TRY(check_integer(root, "num_head", file->num_kv_heads));

    const size_t columns = per_head ? 2 * (size_t)file->num_kv_heads : 2;
    json_t *shape = NULL;
    KV8_TRY(get_member(root, "scales_shape", &shape));
    const json_t *const first = json_array_get(shape, 0), *const second = json_array_get(shape, 1);
    if (json_array_size(shape) != 2 || !json_is_integer(first) || !json_is_integer(second))
        return kv8_fail(KV8_ERR_CORRUPT, "\"scales_shape\" is not two integers");
    if (json_integer_value(first) != file->num_layers ||
        json_integer_value(second) != (json_int_t)columns)
        return kv8_fail(KV8_ERR_INVALID, "\"scales_shape\" is [%lld, %lld], must be [%d, %zu]",
                        (long long)json_integer_value(first), (long long)json_integer_value(second),
                        file->num_layers, columns);
    *columns_out = columns;
    return KV8_OK;
}

static kv8_status read_row(const json_t *row, size_t layer, size_t columns, kv8_scale_file *file) {
    if (!json_is_array(row) || json_array_size(row) != columns)
        return kv8_fail(KV8_ERR_CORRUPT, "\"scales\"[%zu] holds %zu numbers, must hold %zu", layer,
                        json_array_size(row), columns);
    const size_t heads = (size_t)file->num_kv_heads;
    for (size_t i = 0; i < 2 * heads; i++) {
        const size_t column = columns == 2 ? i / heads : i;
        const json_t *const item = json_array_get(row, column);
        const double value = json_number_value(item);
        const float scale = (float)value; /* may underflow to 0 or overflow to infinity */
        if (!json_is_number(item) || !(scale > 0) || !isfinite(scale))
            return kv8_fail(KV8_ERR_INVALID,
                            "\"scales\"[%zu][%zu] is %g, must be a finite f32 number above 0",
                            layer, column, json_is_number(item) ? value : (double)NAN);
        file->scales[layer * 2 * heads + i] = scale;
    }
    return KV8_OK;
}

static kv8_status read_scales(const json_t *root, size_t columns, kv8_scale_file *file) {
    json_t *rows = NULL;
    KV8_TRY(get_member(root, "scales", &rows));
    if (!json_is_array(rows) || json_array_size(rows) != (size_t)file->num_layers)
        return kv8_fail(KV8_ERR_CORRUPT, "\"scales\" has %zu rows, must have %d",
                        json_array_size(rows), file->num_layers);
    for (size_t layer = 0; layer < (size_t)file->num_layers; layer++)
        KV8_TRY(read_row(json_array_get(rows, layer), layer, columns, file));
    return KV8_OK;
}

static kv8_status parse(const char *path, const char *text, size_t size, kv8_scale_file *file) {
    json_t *root = NULL;
    KV8_TRY(kv8_json_parse_object(&root, path, text, size));
    size_t columns = 0;
    kv8_status status = check_head(root, file, &columns);
    if (status == KV8_OK) status = read_scales(root, columns, file);
    json_decref(root);
    return status == KV8_OK ? KV8_OK : kv8_fail_within(status, "%s", path);
}

kv8_status kv8_scale_file_open(kv8_scale_file **out, const char *path, int32_t num_layers,
                               int32_t num_kv_heads) {
    *out = NULL;
    if (num_layers < 1 || num_kv_heads < 1)
        return kv8_fail(KV8_ERR_INVALID, "scale file for %d layers of %d heads: both must be >= 1",
                        num_layers, num_kv_heads);
    char *text = NULL;
    size_t size = 0;
    KV8_TRY(kv8_file_read(path, max_file_size, &text, &size));
    kv8_scale_file shape = {.num_layers = num_layers, .num_kv_heads = num_kv_heads};
    void *memory = NULL;
    kv8_scale_file *file = NULL;
    kv8_status status = kv8_alloc(NULL, 1, sizeof *file, "scale file", &memory);
    if (status == KV8_OK) {
        file = memory;
        *file = shape;
        status = kv8_alloc(NULL, num_scales(file), sizeof(float), "scales", &memory);
        if (status == KV8_OK) file->scales = memory;
    }
    if (status == KV8_OK) status = parse(path, text, size, file);
    kv8_release(NULL, text, size + 1, 1);
    if (status != KV8_OK) {
        kv8_scale_file_close(file);
        return status;
    }
    *out = file;
    return KV8_OK;
}

void kv8_scale_file_close(kv8_scale_file *file) {
    if (file == NULL) return;
    kv8_release(NULL, file->scales, num_scales(file), sizeof(float));
    kv8_release(NULL, file, 1, sizeof *file);
}

const float *kv8_scale_file_k(const kv8_scale_file *file, int32_t layer) {
    return file->scales + (size_t)layer * 2 * (size_t)file->num_kv_heads;
}

const float *kv8_scale_file_v(const kv8_scale_file *file, int32_t layer) {
    return kv8_scale_file_k(file, layer) + file->num_kv_heads;
}
