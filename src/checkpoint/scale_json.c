/* scale_json.c - scale files in JSON: LightLLM's nine keys, and kv8's besides.
 *
 * Everything the file says about itself is checked, and everything the model can contradict.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "scale_rows.h"

/* 1,000 layers of 1,000 heads, 20 characters a number: far above any model's file. */
static const size_t max_file_size = (size_t)64 << 20;

/* --- fields --- */

static kv8_status get_member(const json_t *root, const char *key, const json_t **value_out) {
    const json_t *const value = json_object_get(root, key);
    if (value == NULL) return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is missing", key);
    *value_out = value;
    return KV8_OK;
}

static kv8_status get_string(const json_t *root, const char *key, const char **text_out) {
    const json_t *value = NULL;
    KV8_TRY(get_member(root, key, &value));
    if (!json_is_string(value)) return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is not a string", key);
    *text_out = json_string_value(value);
    return KV8_OK;
}

static kv8_status get_integer(const json_t *root, const char *key, int32_t wanted,
                              int32_t *value_out) {
    const json_t *value = NULL;
    KV8_TRY(get_member(root, key, &value));
    const json_int_t number = json_integer_value(value);
    if (!json_is_integer(value))
        return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is not an integer", key);
    if (number < 1 || number > 1 << 16)
        return kv8_fail(KV8_ERR_CORRUPT, "\"%s\" is %lld, must be 1 to %d", key, (long long)number,
                        1 << 16);
    if (wanted != 0 && number != wanted)
        return kv8_fail(KV8_ERR_INVALID, "\"%s\" is %lld, the model has %d", key, (long long)number,
                        wanted);
    *value_out = (int32_t)number;
    return KV8_OK;
}

/* Scales fitted to another range than the codes' would clip or waste it. */
static kv8_status check_limit(const json_t *root, const char *key, double wanted, kv8_dtype dtype) {
    const json_t *value = NULL;
    KV8_TRY(get_member(root, key, &value));
    if (!json_is_number(value)) return kv8_fail(KV8_ERR_CORRUPT, "key \"%s\" is not a number", key);
    if (!(json_number_value(value) == wanted))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "\"%s\" is %g, %s scales have %g", key,
                        json_number_value(value), kv8_dtype_name(dtype), wanted);
    return KV8_OK;
}

static kv8_status check_architecture(const char *has, const char *wanted) {
    if (wanted == NULL || strcmp(has, wanted) == 0) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "\"architectures\" is \"%.80s\", the model is \"%s\"", has,
                    wanted);
}

static kv8_status read_dtype(const json_t *root, kv8_dtype *dtype_out) {
    *dtype_out = KV8_E4M3;
    if (json_object_get(root, "dtype") == NULL) return KV8_OK;
    const char *name = NULL;
    KV8_TRY(get_string(root, "dtype", &name));
    const kv8_status status = kv8_dtype_from_name(name, dtype_out);
    return status == KV8_OK ? status : kv8_fail_within(status, "\"dtype\"");
}

/* The nine keys besides the scales. */
static kv8_status read_head(const json_t *root, const kv8_scale_expect *expect,
                            kv8_scale_data *data) {
    const char *text = NULL;
    KV8_TRY(get_string(root, "version", &text));
    if (strcmp(text, "1.0") != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "version is \"%s\", known is \"1.0\"", text);
    KV8_TRY(get_string(root, "architectures", &data->architecture));
    KV8_TRY(check_architecture(data->architecture, expect->architecture));
    KV8_TRY(get_string(root, "quant_type", &text));
    data->per_tensor = strcmp(text, "per_tensor") == 0;
    if (!data->per_tensor && strcmp(text, "per_head") != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "quant_type is \"%s\", known are \"per_head\" and \"per_tensor\"", text);
    KV8_TRY(read_dtype(root, &data->dtype));
    const double max = (double)kv8_dtype_max(data->dtype);
    KV8_TRY(check_limit(root, "qmin", -max, data->dtype));
    KV8_TRY(check_limit(root, "qmax", max, data->dtype));
    KV8_TRY(get_integer(root, "num_layers", expect->num_layers, &data->num_layers));
    /* A per-tensor file is right for any number of heads. */
    KV8_TRY(get_integer(root, "num_head", data->per_tensor ? 0 : expect->num_kv_heads,
                        &data->num_kv_heads));
    if (data->per_tensor && expect->num_kv_heads != 0) data->num_kv_heads = expect->num_kv_heads;

    const size_t columns = kv8_scale_columns(data);
    const json_t *shape = NULL;
    KV8_TRY(get_member(root, "scales_shape", &shape));
    const json_t *const first = json_array_get(shape, 0), *const second = json_array_get(shape, 1);
    if (json_array_size(shape) != 2 || !json_is_integer(first) || !json_is_integer(second))
        return kv8_fail(KV8_ERR_CORRUPT, "\"scales_shape\" is not two integers");
    if (json_integer_value(first) != data->num_layers ||
        json_integer_value(second) != (json_int_t)columns)
        return kv8_fail(KV8_ERR_INVALID, "\"scales_shape\" is [%lld, %lld], must be [%d, %zu]",
                        (long long)json_integer_value(first), (long long)json_integer_value(second),
                        data->num_layers, columns);
    return KV8_OK;
}

/* --- rows --- */

/* [num_rows, columns] of f32 numbers; the caller frees. May be absent where it is not required. */
static kv8_status read_rows(const json_t *root, const char *key, bool required, int32_t num_rows,
                            size_t columns, float **out) {
    *out = NULL;
    const json_t *rows = json_object_get(root, key);
    if (rows == NULL && !required) return KV8_OK;
    KV8_TRY(get_member(root, key, &rows));
    if (!json_is_array(rows) || json_array_size(rows) != (size_t)num_rows)
        return kv8_fail(KV8_ERR_CORRUPT, "\"%s\" has %zu rows, must have %d", key,
                        json_array_size(rows), num_rows);
    float *const values = malloc((size_t)num_rows * columns * sizeof *values);
    if (values == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "\"%s\": no memory", key);
    *out = values;
    for (size_t i = 0; i < (size_t)num_rows; i++) {
        const json_t *const row = json_array_get(rows, i);
        if (!json_is_array(row) || json_array_size(row) != columns)
            return kv8_fail(KV8_ERR_CORRUPT, "\"%s\"[%zu] holds %zu numbers, must hold %zu", key, i,
                            json_array_size(row), columns);
        for (size_t j = 0; j < columns; j++) {
            const json_t *const item = json_array_get(row, j);
            /* A double may underflow to 0 or overflow to infinity: create refuses both. */
            values[i * columns + j] = json_is_number(item) ? (float)json_number_value(item) : NAN;
        }
    }
    return KV8_OK;
}

static kv8_status read_side(const json_t *layer, size_t idx, const char *side, kv8_dtype *out) {
    const json_t *const name = json_object_get(layer, side);
    if (!json_is_string(name))
        return kv8_fail(KV8_ERR_CORRUPT, "\"layers\"[%zu] has no string \"%s\"", idx, side);
    const kv8_status status = kv8_dtype_from_name(json_string_value(name), out);
    return status == KV8_OK ? status : kv8_fail_within(status, "\"layers\"[%zu].\"%s\"", idx, side);
}

static kv8_status read_layers(const json_t *root, int32_t num_layers, kv8_dtype **out) {
    *out = NULL;
    const json_t *const layers = json_object_get(root, "layers");
    if (layers == NULL) return KV8_OK;
    if (!json_is_array(layers) || json_array_size(layers) != (size_t)num_layers)
        return kv8_fail(KV8_ERR_CORRUPT, "\"layers\" has %zu entries, must have %d",
                        json_array_size(layers), num_layers);
    kv8_dtype *const dtypes = malloc(2 * (size_t)num_layers * sizeof *dtypes);
    if (dtypes == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "\"layers\": no memory");
    *out = dtypes;
    for (size_t i = 0; i < (size_t)num_layers; i++) {
        const json_t *const layer = json_array_get(layers, i);
        KV8_TRY(read_side(layer, i, "k", &dtypes[2 * i]));
        KV8_TRY(read_side(layer, i, "v", &dtypes[2 * i + 1]));
    }
    return KV8_OK;
}

/* --- counts --- */

/* As kv8/calibrate.h counts. */
enum { NUM_BINS = 512, FIRST_EXPONENT = -32, BINS_PER_OCTAVE = 8 };

static kv8_status read_count(const json_t *value, const char *key, size_t row, size_t column,
                             uint64_t *out) {
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return kv8_fail(KV8_ERR_CORRUPT, "\"%s\"[%zu][%zu] holds what is no count", key, row,
                        column);
    *out = (uint64_t)json_integer_value(value);
    return KV8_OK;
}

/* Row `i` of an array of `num_rows`, each of `columns` items. */
static kv8_status get_row(const json_t *rows, const char *key, size_t i, size_t num_rows,
                          size_t columns, const json_t **row_out) {
    *row_out = json_array_get(rows, i);
    if (json_array_size(rows) == num_rows && json_array_size(*row_out) == columns) return KV8_OK;
    return kv8_fail(KV8_ERR_CORRUPT, "\"%s\" is not %zu rows of %zu columns", key, num_rows,
                    columns);
}

/* [num_layers, columns] counts; the caller frees. Absent: NULL. */
static kv8_status read_counts(const json_t *root, const char *key, const kv8_scale_data *data,
                              uint64_t **out) {
    const json_t *const rows = json_object_get(root, key), *row = NULL;
    const size_t num_rows = (size_t)data->num_layers, columns = kv8_scale_columns(data);
    *out = NULL;
    if (rows == NULL) return KV8_OK;
    uint64_t *const counts = *out = malloc(num_rows * columns * sizeof *counts);
    if (counts == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "\"%s\": no memory", key);
    for (size_t i = 0; i < num_rows; i++) {
        KV8_TRY(get_row(rows, key, i, num_rows, columns, &row));
        for (size_t j = 0; j < columns; j++)
            KV8_TRY(read_count(json_array_get(row, j), key, i, j, &counts[i * columns + j]));
    }
    return KV8_OK;
}

/* A column's first bin, then the counts from there on, into NUM_BINS zeroed bins. */
static kv8_status read_bins(const json_t *column, size_t row, size_t idx, uint64_t *bins) {
    const size_t length = json_array_size(column);
    uint64_t first = NUM_BINS;
    if (length > 0) KV8_TRY(read_count(json_array_get(column, 0), "histogram", row, idx, &first));
    if (first >= NUM_BINS || length - 1 > NUM_BINS - first)
        return kv8_fail(KV8_ERR_CORRUPT, "\"histogram\"[%zu][%zu] is not within %d bins", row, idx,
                        NUM_BINS);
    for (size_t i = 1; i < length; i++)
        KV8_TRY(read_count(json_array_get(column, i), "histogram", row, idx, &bins[first + i - 1]));
    return KV8_OK;
}

/* [num_layers, columns, NUM_BINS]; the caller frees. Absent: NULL. */
static kv8_status read_histogram(const json_t *root, kv8_scale_data *data, uint64_t **out) {
    const json_t *const histogram = json_object_get(root, "histogram"), *row = NULL;
    const size_t num_rows = (size_t)data->num_layers, columns = kv8_scale_columns(data);
    *out = NULL;
    if (histogram == NULL) return KV8_OK;
    if (json_integer_value(json_object_get(histogram, "first_exponent")) != FIRST_EXPONENT ||
        json_integer_value(json_object_get(histogram, "bins_per_octave")) != BINS_PER_OCTAVE)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "\"histogram\" must have first_exponent %d and bins_per_octave %d",
                        FIRST_EXPONENT, BINS_PER_OCTAVE);
    uint64_t *const bins = *out = calloc(num_rows * columns, NUM_BINS * sizeof *bins);
    if (bins == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "\"histogram\": no memory");
    const json_t *const counts = json_object_get(histogram, "counts");
    for (size_t i = 0; i < num_rows; i++) {
        KV8_TRY(get_row(counts, "histogram", i, num_rows, columns, &row));
        for (size_t j = 0; j < columns; j++)
            KV8_TRY(read_bins(json_array_get(row, j), i, j, bins + (i * columns + j) * NUM_BINS));
    }
    data->num_bins = NUM_BINS;
    data->histogram_exponent = FIRST_EXPONENT;
    return KV8_OK;
}

/* What kv8 adds to the nine keys, each optional. */
static kv8_status read_facts(const json_t *root, kv8_scale_data *data) {
    const kv8_json_fields fields = {.file = "scales", .prefix = "", .object = root};
    const char *hash = NULL;
    double tokens = 0;
    KV8_TRY(kv8_json_string_or(&fields, "method", &data->method));
    KV8_TRY(kv8_json_real_or(&fields, "margin", 1, 1024, &data->margin));
    KV8_TRY(kv8_json_real_or(&fields, "tokens", 0, 0x1p53, &tokens));
    KV8_TRY(kv8_json_string_or(&fields, "model_hash", &hash));
    data->num_tokens = (uint64_t)tokens;
    if (hash == NULL) return KV8_OK;
    char *end = NULL;
    data->model_hash = strtoull(hash, &end, 16);
    if (strlen(hash) != 16 || *end != '\0')
        return kv8_fail(KV8_ERR_CORRUPT, "\"model_hash\" is \"%.40s\", must be 16 hex digits",
                        hash);
    return KV8_OK;
}

static kv8_status read_own(kv8_scale_file **out, const json_t *root,
                           const kv8_scale_expect *expect) {
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    float *scales = NULL, *amax = NULL, *q_scales = NULL;
    uint64_t *histogram = NULL, *zeros = NULL, *nans = NULL, *infs = NULL;
    kv8_dtype *layers = NULL;
    kv8_status status;
    KV8_TRY_GOTO(read_head(root, expect, &data));
    KV8_TRY_GOTO(read_facts(root, &data));
    const size_t columns = kv8_scale_columns(&data);
    KV8_TRY_GOTO(read_rows(root, "scales", true, data.num_layers, columns, &scales));
    KV8_TRY_GOTO(read_rows(root, "amax", false, data.num_layers, columns, &amax));
    const json_t *const q_rows = json_object_get(root, "q_scales");
    data.num_qo_heads = (int32_t)json_array_size(json_array_get(q_rows, 0));
    KV8_TRY_GOTO(
        read_rows(root, "q_scales", false, data.num_layers, (size_t)data.num_qo_heads, &q_scales));
    KV8_TRY_GOTO(read_layers(root, data.num_layers, &layers));
    KV8_TRY_GOTO(read_histogram(root, &data, &histogram));
    KV8_TRY_GOTO(read_counts(root, "zeros", &data, &zeros));
    KV8_TRY_GOTO(read_counts(root, "nans", &data, &nans));
    KV8_TRY_GOTO(read_counts(root, "infs", &data, &infs));
    data.format = json_object_get(root, "amax") != NULL ? KV8_SCALES_KV8 : KV8_SCALES_LIGHTLLM;
    data.scales = scales;
    data.amax = amax;
    data.q_scales = q_scales;
    data.kv_dtypes = layers;
    data.histogram = histogram;
    data.zeros = zeros;
    data.nans = nans;
    data.infs = infs;
    KV8_TRY_GOTO(kv8_scale_file_create(out, &data));
fail:
    free(scales);
    free(amax);
    free(q_scales);
    free(layers);
    free(histogram);
    free(zeros);
    free(nans);
    free(infs);
    return status;
}

kv8_status kv8_scale_json_parse(kv8_scale_file **out, const char *path, const char *text,
                                size_t size, const kv8_scale_expect *expect) {
    json_t *root = NULL;
    KV8_TRY(kv8_json_parse_object(&root, path, text, size));
    const kv8_status status = json_object_get(root, "kv_cache") != NULL
                                  ? kv8_scale_sglang_read(out, root, expect)
                                  : read_own(out, root, expect);
    json_decref(root);
    return status == KV8_OK ? status : kv8_fail_within(status, "%s", path);
}

kv8_status kv8_scale_json_read(kv8_scale_file **out, const char *path,
                               const kv8_scale_expect *expect) {
    char *text = NULL;
    size_t size = 0;
    KV8_TRY(kv8_file_read(path, max_file_size, &text, &size));
    const kv8_status status = kv8_scale_json_parse(out, path, text, size, expect);
    kv8_release(NULL, text, size + 1, 1);
    return status;
}

/* --- writing --- */

/* Row i of a [rows, columns] array of f32 or f64 (one of both NULL). */
static json_t *dump_row(const float *f32, const double *f64, size_t row, size_t columns) {
    json_t *const out = json_array();
    for (size_t i = row * columns; i < (row + 1) * columns; i++) {
        const double value = f32 != NULL ? (double)f32[i] : f64[i];
        json_array_append_new(out, isfinite(value) ? json_real(value) : json_null());
    }
    return out;
}

static void dump_rows(json_t *root, const char *key, const float *f32, const double *f64,
                      int32_t num_rows, size_t columns) {
    if (f32 == NULL && f64 == NULL) return;
    json_t *const rows = json_array();
    for (int32_t i = 0; i < num_rows; i++)
        json_array_append_new(rows, dump_row(f32, f64, (size_t)i, columns));
    json_object_set_new(root, key, rows);
}

static json_t *dump_nine(const kv8_scale_data *data) {
    const double max = (double)kv8_dtype_max(data->dtype);
    json_t *const root = json_pack(
        "{s:s, s:s, s:s, s:f, s:f, s:i, s:i, s:[i, i]}", "version", "1.0", "architectures",
        data->architecture == NULL ? "unknown_architecture" : data->architecture, "quant_type",
        data->per_tensor ? "per_tensor" : "per_head", "qmin", -max, "qmax", max, "num_layers",
        data->num_layers, "num_head", data->num_kv_heads, "scales_shape", data->num_layers,
        (int)kv8_scale_columns(data));
    if (root != NULL)
        dump_rows(root, "scales", data->scales, NULL, data->num_layers, kv8_scale_columns(data));
    return root;
}

/* Of each column: its first bin that is not empty, then the counts from there to the last such. */
static json_t *dump_histogram(const kv8_scale_data *data) {
    const size_t columns = kv8_scale_columns(data);
    json_t *const rows = json_array();
    for (size_t i = 0; i < (size_t)data->num_layers * columns; i++) {
        const uint64_t *const bins = data->histogram + i * (size_t)data->num_bins;
        int32_t first = 0, last = data->num_bins - 1;
        while (first < last && bins[first] == 0) first++;
        while (last > first && bins[last] == 0) last--;
        json_t *const counts = json_array();
        json_array_append_new(counts, json_integer(first));
        for (int32_t bin = first; bin <= last; bin++)
            json_array_append_new(counts, json_integer((json_int_t)bins[bin]));
        if (i % columns == 0) json_array_append_new(rows, json_array());
        json_array_append_new(json_array_get(rows, i / columns), counts);
    }
    return json_pack("{s:i, s:i, s:o}", "first_exponent", data->histogram_exponent,
                     "bins_per_octave", 8, "counts", rows);
}

static void dump_counts(json_t *root, const char *key, const uint64_t *counts, int32_t num_rows,
                        size_t columns) {
    if (counts == NULL) return;
    json_t *const rows = json_array();
    for (size_t i = 0; i < (size_t)num_rows * columns; i++) {
        if (i % columns == 0) json_array_append_new(rows, json_array());
        json_array_append_new(json_array_get(rows, i / columns),
                              json_integer((json_int_t)counts[i]));
    }
    json_object_set_new(root, key, rows);
}

static json_t *dump_layers(const kv8_scale_data *data) {
    json_t *const layers = json_array();
    for (int32_t i = 0; i < data->num_layers; i++)
        json_array_append_new(
            layers, json_pack("{s:s, s:s}", "k", kv8_dtype_name(data->kv_dtypes[2 * i]), "v",
                              kv8_dtype_name(data->kv_dtypes[2 * i + 1])));
    return layers;
}

static json_t *dump_own(const kv8_scale_data *data) {
    json_t *const root = dump_nine(data);
    if (root == NULL) return NULL;
    const size_t columns = kv8_scale_columns(data);
    json_object_set_new(root, "dtype", json_string(kv8_dtype_name(data->dtype)));
    if (data->method != NULL) json_object_set_new(root, "method", json_string(data->method));
    if (data->margin > 0) json_object_set_new(root, "margin", json_real(data->margin));
    if (data->num_tokens > 0)
        json_object_set_new(root, "tokens", json_integer((json_int_t)data->num_tokens));
    if (data->model_hash != 0) {
        char hash[17];
        snprintf(hash, sizeof hash, "%016llx", (unsigned long long)data->model_hash);
        json_object_set_new(root, "model_hash", json_string(hash));
    }
    dump_rows(root, "amax", data->amax, NULL, data->num_layers, columns);
    dump_rows(root, "sqnr_db", NULL, data->sqnr_db, data->num_layers, columns);
    dump_rows(root, "clip_rate", NULL, data->clip_rate, data->num_layers, columns);
    dump_rows(root, "q_scales", data->q_scales, NULL, data->num_layers, (size_t)data->num_qo_heads);
    if (data->kv_dtypes != NULL) json_object_set_new(root, "layers", dump_layers(data));
    dump_counts(root, "zeros", data->zeros, data->num_layers, columns);
    dump_counts(root, "nans", data->nans, data->num_layers, columns);
    dump_counts(root, "infs", data->infs, data->num_layers, columns);
    if (data->histogram != NULL) json_object_set_new(root, "histogram", dump_histogram(data));
    return root;
}

/* One key a line, one row of an array of arrays a line; 9 digits give every f32 back. */
static kv8_status write_value(kv8_file_writer *writer, const json_t *value, int depth) {
    const size_t flags = JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9);
    const bool rows =
        depth < 2 && json_is_array(value) && json_array_size(value) > 0 &&
        (json_is_array(json_array_get(value, 0)) || json_is_object(json_array_get(value, 0)));
    if (!rows && !(depth < 2 && json_is_object(value))) {
        char *const text = json_dumps(value, flags);
        if (text == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory", writer->path);
        const kv8_status status = kv8_file_writer_write(writer, text, strlen(text));
        free(text);
        return status;
    }
    if (rows) {
        KV8_TRY(kv8_file_writer_write(writer, "[", 1));
        for (size_t i = 0; i < json_array_size(value); i++) {
            KV8_TRY(kv8_file_writer_write(writer, i == 0 ? "\n  " : ",\n  ", i == 0 ? 3 : 4));
            KV8_TRY(write_value(writer, json_array_get(value, i), 2));
        }
        return kv8_file_writer_write(writer, "]", 1);
    }
    const char *key;
    json_t *member;
    const char *before = "{\n ";
    json_object_foreach((json_t *)(uintptr_t)value, key, member) {
        KV8_TRY(kv8_file_writer_write(writer, before, strlen(before)));
        before = ",\n ";
        KV8_TRY(kv8_file_writer_write(writer, "\"", 1)); /* no key of ours needs an escape */
        KV8_TRY(kv8_file_writer_write(writer, key, strlen(key)));
        KV8_TRY(kv8_file_writer_write(writer, "\": ", 3));
        KV8_TRY(write_value(writer, member, depth + 1));
    }
    return kv8_file_writer_write(writer, "}", 1);
}

kv8_status kv8_scale_json_write(const kv8_scale_file *file, const char *path,
                                kv8_scale_format format, int32_t num_ranks) {
    json_t *const root = format == KV8_SCALES_KV8        ? dump_own(&file->data)
                         : format == KV8_SCALES_LIGHTLLM ? dump_nine(&file->data)
                                                         : kv8_scale_sglang_dump(file, num_ranks);
    if (root == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for the JSON", path);
    kv8_file_writer writer = {0};
    kv8_status status = kv8_file_writer_open(&writer, path);
    if (status == KV8_OK) status = write_value(&writer, root, 0);
    if (status == KV8_OK) status = kv8_file_writer_write(&writer, "\n", 1);
    if (status == KV8_OK) status = kv8_file_writer_commit(&writer);
    kv8_file_writer_abort(&writer);
    json_decref(root);
    return status;
}
