/* scale_file.c - a model's scales in memory: checked when they come in, split by heads. It does not
 * fit, change or invent a scale, and knows no form of file.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "formats_impl.h"
#include "scale_rows.h"

/* --- checks --- */

static kv8_status check_shape(const kv8_scale_data *data) {
    if (data->num_layers < 1 || data->num_layers > 1 << 16 || data->num_kv_heads < 1 ||
        data->num_kv_heads > 1 << 16)
        return kv8_fail(KV8_ERR_INVALID, "scales of %d layers of %d heads: both must be 1 to %d",
                        data->num_layers, data->num_kv_heads, 1 << 16);
    if (data->dtype != KV8_DTYPE_NONE && !kv8_is_float8(data->dtype))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "scales of %s, must be of a float of 8 bits",
                        kv8_dtype_name(data->dtype));
    if (data->scales == NULL) return kv8_fail(KV8_ERR_INVALID, "scales is NULL");
    return KV8_OK;
}

/* Rows of numbers that are finite and not below `least`; 0 itself only where least is 0. */
static kv8_status check_rows(const char *key, const float *rows, int32_t num_layers, size_t columns,
                             bool may_be_zero) {
    for (size_t i = 0; rows != NULL && i < (size_t)num_layers * columns; i++) {
        if (isfinite(rows[i]) && (rows[i] > 0 || (may_be_zero && rows[i] == 0))) continue;
        return kv8_fail(KV8_ERR_INVALID, "\"%s\"[%zu][%zu] is %g, must be a finite f32 number %s 0",
                        key, i / columns, i % columns, (double)rows[i],
                        may_be_zero ? "not below" : "above");
    }
    return KV8_OK;
}

/* Fitted to amax, a scale follows from it, whole or as the next power of two: so K's scales on V's
 * heads, or a layer's on another, do not pass. */
static kv8_status check_agreement(const kv8_scale_data *data) {
    const size_t columns = kv8_scale_columns(data);
    if (data->amax == NULL || data->method == NULL || strcmp(data->method, "absmax") != 0)
        return KV8_OK;
    for (size_t i = 0; i < (size_t)data->num_layers * columns; i++) {
        const double wanted = (double)data->amax[i] * (data->margin > 0 ? data->margin : 1) /
                              (double)kv8_dtype_max(data->dtype);
        const double ratio = wanted > 0 ? (double)data->scales[i] / wanted : 1;
        int exponent = 0;
        const bool power_of_two = frexpf(data->scales[i], &exponent) == 0.5f;
        if (fabs(ratio - 1) <= 1e-5 || (power_of_two && ratio >= 1 && ratio < 2)) continue;
        return kv8_fail(KV8_ERR_INVALID,
                        "\"scales\"[%zu][%zu] is %g, its amax of %g asks for %g: these scales "
                        "belong elsewhere",
                        i / columns, i % columns, (double)data->scales[i], (double)data->amax[i],
                        wanted);
    }
    return KV8_OK;
}

static kv8_status check_mix(const kv8_scale_data *data) {
    for (int32_t i = 0; data->kv_dtypes != NULL && i < 2 * data->num_layers; i++) {
        if (data->kv_dtypes[i] <= KV8_DTYPE_NONE || data->kv_dtypes[i] >= KV8_DTYPE_COUNT)
            return kv8_fail(KV8_ERR_INVALID, "layer %d: %s has no dtype", i / 2,
                            i % 2 == 0 ? "K" : "V");
    }
    return KV8_OK;
}

/* --- create --- */

static kv8_status hold(kv8_scale_file *file, const void *from, size_t count, size_t size,
                       const void *field_out) {
    if (from == NULL) return KV8_OK;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, count, size, "scales", &memory));
    memcpy(memory, from, count * size);
    file->held[file->num_held].ptr = memory;
    file->held[file->num_held].count = count;
    file->held[file->num_held++].size = size;
    memcpy((void *)(uintptr_t)field_out, &memory, sizeof memory);
    return KV8_OK;
}

static kv8_status hold_all(kv8_scale_file *file, const kv8_scale_data *from) {
    kv8_scale_data *const data = &file->data;
    const size_t rows = (size_t)data->num_layers, cells = rows * kv8_scale_columns(data);
    if (from->architecture != NULL)
        KV8_TRY(
            hold(file, from->architecture, strlen(from->architecture) + 1, 1, &data->architecture));
    if (from->method != NULL)
        KV8_TRY(hold(file, from->method, strlen(from->method) + 1, 1, &data->method));
    KV8_TRY(hold(file, from->scales, cells, sizeof(float), &data->scales));
    KV8_TRY(hold(file, from->amax, cells, sizeof(float), &data->amax));
    KV8_TRY(hold(file, from->sqnr_db, cells, sizeof(double), &data->sqnr_db));
    KV8_TRY(hold(file, from->clip_rate, cells, sizeof(double), &data->clip_rate));
    KV8_TRY(hold(file, from->kv_dtypes, 2 * rows, sizeof(kv8_dtype), &data->kv_dtypes));
    if (from->histogram != NULL)
        KV8_TRY(hold(file, from->histogram, cells * (size_t)data->num_bins, sizeof(uint64_t),
                     &data->histogram));
    KV8_TRY(hold(file, from->zeros, cells, sizeof(uint64_t), &data->zeros));
    KV8_TRY(hold(file, from->nans, cells, sizeof(uint64_t), &data->nans));
    KV8_TRY(hold(file, from->infs, cells, sizeof(uint64_t), &data->infs));
    return hold(file, from->q_scales, rows * (size_t)data->num_qo_heads, sizeof(float),
                &data->q_scales);
}

static kv8_status repeat_by_head(kv8_scale_file *file) {
    const size_t heads = (size_t)file->data.num_kv_heads, columns = kv8_scale_columns(&file->data);
    const size_t num = (size_t)file->data.num_layers * 2 * heads;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, num, sizeof(float), "scales", &memory));
    file->by_head = memory;
    for (size_t i = 0; i < num; i++) {
        const size_t layer = i / (2 * heads), at = i % (2 * heads);
        const size_t column = file->data.per_tensor ? at / heads : at;
        file->by_head[i] = file->data.scales[layer * columns + column];
    }
    return KV8_OK;
}

kv8_status kv8_scale_file_create(kv8_scale_file **out, const kv8_scale_data *data) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(data);
    KV8_TAKE_STRUCT(kv8_scale_data, data);
    KV8_TRY(check_shape(data));
    kv8_scale_data own = *data;
    if (own.dtype == KV8_DTYPE_NONE) own.dtype = KV8_E4M3;
    if (own.q_scales == NULL) own.num_qo_heads = 0;
    KV8_TRY(check_rows("scales", own.scales, own.num_layers, kv8_scale_columns(&own), false));
    KV8_TRY(check_rows("amax", own.amax, own.num_layers, kv8_scale_columns(&own), true));
    KV8_TRY(check_rows("q_scales", own.q_scales, own.num_layers, (size_t)own.num_qo_heads, false));
    KV8_TRY(check_mix(&own));
    KV8_TRY(check_agreement(&own));
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_scale_file), "scale file", &memory));
    kv8_scale_file *const file = memory;
    file->data = own;
    kv8_status status = hold_all(file, data);
    if (status == KV8_OK) status = repeat_by_head(file);
    if (status != KV8_OK) {
        kv8_scale_file_close(file);
        return status;
    }
    *out = file;
    return KV8_OK;
}

void kv8_scale_file_close(kv8_scale_file *file) {
    if (file == NULL) return;
    for (int32_t i = 0; i < file->num_held; i++)
        kv8_release(NULL, file->held[i].ptr, file->held[i].count, file->held[i].size);
    kv8_release(NULL, file->by_head,
                (size_t)file->data.num_layers * 2 * (size_t)file->data.num_kv_heads, sizeof(float));
    kv8_release(NULL, file, 1, sizeof *file);
}

/* --- asking --- */

const float *kv8_scale_file_k(const kv8_scale_file *file, int32_t layer) {
    return file->by_head + (size_t)layer * 2 * (size_t)file->data.num_kv_heads;
}

const float *kv8_scale_file_v(const kv8_scale_file *file, int32_t layer) {
    return kv8_scale_file_k(file, layer) + file->data.num_kv_heads;
}

kv8_status kv8_scale_file_get(const kv8_scale_file *file, kv8_scale_data *data_out) {
    KV8_REQUIRE(file, data_out);
    KV8_WRITE_STRUCT(kv8_scale_data, data_out, &file->data);
    return KV8_OK;
}

/* Columns first..first+num-1 of K's half and of V's of every row. */
static kv8_status take_heads(const float *rows, const kv8_scale_data *data, int32_t first,
                             int32_t num, float **out) {
    *out = NULL;
    if (rows == NULL) return KV8_OK;
    const size_t columns = 2 * (size_t)data->num_kv_heads, taken = 2 * (size_t)num;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)data->num_layers * taken, sizeof(float), "scales", &memory));
    *out = memory;
    for (size_t i = 0; i < (size_t)data->num_layers * taken; i++) {
        const size_t layer = i / taken, half = i % taken / (size_t)num;
        const size_t head = (size_t)first + i % (size_t)num;
        (*out)[i] = rows[layer * columns + half * (size_t)data->num_kv_heads + head];
    }
    return KV8_OK;
}

kv8_status kv8_scale_file_split(kv8_scale_file **out, const kv8_scale_file *file,
                                int32_t first_head, int32_t num_heads) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(file);
    const kv8_scale_data *const whole = &file->data;
    if (first_head < 0 || num_heads < 1 || num_heads > whole->num_kv_heads - first_head)
        return kv8_fail(KV8_ERR_INVALID, "heads %d to %d of a file of %d", first_head,
                        first_head + num_heads - 1, whole->num_kv_heads);
    kv8_scale_data part = *whole;
    part.num_kv_heads = num_heads;
    part.q_scales = NULL;
    part.sqnr_db = part.clip_rate = NULL;
    part.histogram = part.zeros = part.nans = part.infs = NULL;
    if (whole->per_tensor) return kv8_scale_file_create(out, &part);
    float *scales = NULL, *amax = NULL;
    kv8_status status = take_heads(whole->scales, whole, first_head, num_heads, &scales);
    if (status == KV8_OK) status = take_heads(whole->amax, whole, first_head, num_heads, &amax);
    part.scales = scales;
    part.amax = amax;
    if (status == KV8_OK) status = kv8_scale_file_create(out, &part);
    const size_t num = (size_t)whole->num_layers * 2 * (size_t)num_heads;
    kv8_release(NULL, scales, num, sizeof(float));
    kv8_release(NULL, amax, num, sizeof(float));
    return status;
}
