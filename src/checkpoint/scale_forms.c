/* scale_forms.c - scale files by their form: which reader a path wants, which writer a form has.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <sys/stat.h>

#include "scale_rows.h"

const char *kv8_scale_format_name(kv8_scale_format format) {
    static const char *const names[KV8_SCALES_COUNT] = {
        [KV8_SCALES_KV8] = "kv8",
        [KV8_SCALES_LIGHTLLM] = "lightllm",
        [KV8_SCALES_SGLANG] = "sglang",
        [KV8_SCALES_COMPRESSED_TENSORS] = "compressed-tensors",
        [KV8_SCALES_MODELOPT] = "modelopt"};
    return (unsigned)format < KV8_SCALES_COUNT ? names[format] : NULL;
}

static bool is_directory(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static bool is_safetensors(const char *path) {
    static const char suffix[] = ".safetensors";
    const size_t length = strlen(path), tail = sizeof suffix - 1;
    return length > tail && strcmp(path + length - tail, suffix) == 0;
}

/* What every format can contradict; the readers have checked what only theirs says. */
static kv8_status check_expect(const kv8_scale_data *data, const kv8_scale_expect *expect) {
    if (expect->num_layers != 0 && data->num_layers != expect->num_layers)
        return kv8_fail(KV8_ERR_INVALID, "scales of %d layers, the model has %d", data->num_layers,
                        expect->num_layers);
    if (!data->per_tensor && expect->num_kv_heads != 0 &&
        data->num_kv_heads != expect->num_kv_heads)
        return kv8_fail(KV8_ERR_INVALID, "scales of %d KV heads, the model has %d",
                        data->num_kv_heads, expect->num_kv_heads);
    if (data->model_hash != 0 && expect->model_hash != 0 && data->model_hash != expect->model_hash)
        return kv8_fail(KV8_ERR_INVALID, "\"model_hash\" is %016llx, the model's is %016llx",
                        (unsigned long long)data->model_hash,
                        (unsigned long long)expect->model_hash);
    return KV8_OK;
}

kv8_status kv8_scale_file_open(kv8_scale_file **out, const char *path,
                               const kv8_scale_expect *expect) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(path, expect);
    KV8_TAKE_STRUCT(kv8_scale_expect, expect);
    if (expect->num_layers < 0 || expect->num_kv_heads < 0)
        return kv8_fail(KV8_ERR_INVALID, "scale file for %d layers of %d heads: neither is below 0",
                        expect->num_layers, expect->num_kv_heads);
    const bool directory = is_directory(path);
    kv8_scale_file *file = NULL;
    kv8_status status = directory || is_safetensors(path)
                            ? kv8_scale_tensors_read(&file, path, directory, expect)
                            : kv8_scale_json_read(&file, path, expect);
    if (status == KV8_OK) {
        status = check_expect(&file->data, expect);
        if (status != KV8_OK) kv8_fail_within(status, "%s", path);
    }
    if (status != KV8_OK) {
        kv8_scale_file_close(file);
        return status;
    }
    *out = file;
    return KV8_OK;
}

kv8_status kv8_scale_file_write(const kv8_scale_file *file, const char *path,
                                kv8_scale_format format, int32_t num_ranks) {
    KV8_REQUIRE(file, path);
    const kv8_scale_data *const data = &file->data;
    if (kv8_scale_format_name(format) == NULL)
        return kv8_fail(KV8_ERR_INVALID, "no scale format %d", (int)format);
    if (num_ranks < 0 || (num_ranks > 1 && data->num_kv_heads % num_ranks != 0 &&
                          num_ranks % data->num_kv_heads != 0))
        return kv8_fail(KV8_ERR_INVALID, "%d heads over %d ranks: neither divides the other",
                        data->num_kv_heads, num_ranks);
    if (num_ranks > 1 && format != KV8_SCALES_SGLANG)
        return kv8_fail(KV8_ERR_INVALID, "%d ranks: only sglang's file is written by rank",
                        num_ranks);
    if (format != KV8_SCALES_KV8 && data->dtype != KV8_E4M3)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s holds e4m3 scales, these are of %s",
                        kv8_scale_format_name(format), kv8_dtype_name(data->dtype));
    if (format == KV8_SCALES_COMPRESSED_TENSORS || format == KV8_SCALES_MODELOPT)
        return kv8_scale_tensors_write(file, path, is_directory(path), format);
    return kv8_scale_json_write(file, path, format, num_ranks == 0 ? 1 : num_ranks);
}
