/* scale_tensors.c - scales as tensors of a checkpoint, by the names of compressed-tensors and of
 * ModelOpt:
 *
 *   model.layers.N.self_attn.k_scale, .v_scale              [1] or [num_kv_heads, 1, 1]
 *   model.layers.N.self_attn.k_proj.k_scale, .v_proj.v_scale   one number
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "scale_rows.h"

static const char shard_name[] = "model-kv-scales.safetensors";
static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";

/* The ends of the two scales' names, K's first. */
static const char *const name_ends[KV8_SCALES_COUNT][2] = {
    [KV8_SCALES_COMPRESSED_TENSORS] = {"self_attn.k_scale", "self_attn.v_scale"},
    [KV8_SCALES_MODELOPT] = {"self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"}};
/* What makes a stored value more than code * scale. */
static const char *const affine_ends[] = {"self_attn.k_zero_point", "self_attn.v_zero_point",
                                          "self_attn.k_proj.k_bias", "self_attn.v_proj.v_bias"};

/* --- reading --- */

/* "...layers.N.<end>" gives N, anything else -1. */
static int32_t layer_of(const char *name, const char *end) {
    const size_t length = strlen(name), tail = strlen(end);
    if (length <= tail || strcmp(name + length - tail, end) != 0) return -1;
    const char *at = strstr(name, "layers.");
    if (at == NULL) return -1;
    char *after = NULL;
    const long layer = strtol(at + 7, &after, 10);
    if (layer < 0 || layer >= 1 << 16 || *after != '.' || after + 1 != name + length - tail)
        return -1;
    return (int32_t)layer;
}

bool kv8_is_kv_scale(const char *tensor_name) {
    for (int form = KV8_SCALES_COMPRESSED_TENSORS; form <= KV8_SCALES_MODELOPT; form++) {
        for (int kv = 0; kv < 2; kv++) {
            if (layer_of(tensor_name, name_ends[form][kv]) >= 0) return true;
        }
    }
    return false;
}

static int64_t num_elements(const kv8_tensor *tensor) {
    int64_t num = 1;
    for (int32_t i = 0; i < tensor->num_dims; i++) num *= tensor->shape[i];
    return num;
}

/* The tensor's numbers as f32, into values[num]. */
static kv8_status read_numbers(const kv8_tensor *tensor, int64_t num, float *values) {
    const kv8_dtype dtype = tensor->type == KV8_TENSOR_F32    ? KV8_F32
                            : tensor->type == KV8_TENSOR_BF16 ? KV8_BF16
                            : tensor->type == KV8_TENSOR_F16  ? KV8_F16
                                                              : KV8_DTYPE_NONE;
    if (dtype == KV8_DTYPE_NONE)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "tensor \"%s\" is %s, must be F32, BF16 or F16",
                        tensor->name, kv8_tensor_type_name(tensor->type));
    if (dtype == KV8_F32)
        memcpy(values, tensor->data, (size_t)num * sizeof *values);
    else
        KV8_TRY(kv8_widen(KV8_ISA_SCALAR, dtype, tensor->data, (size_t)num, values));
    for (int64_t i = 0; i < num; i++) {
        if (!(values[i] > 0) || !isfinite(values[i]))
            return kv8_fail(KV8_ERR_INVALID,
                            "tensor \"%s\"[%" PRId64 "] is %g, must be finite and above 0",
                            tensor->name, i, (double)values[i]);
    }
    return KV8_OK;
}

/* The scales found among a checkpoint's tensors. */
typedef struct found {
    const kv8_checkpoint *checkpoint;
    kv8_scale_format format;
    int32_t num_layers;
    const kv8_tensor **tensors; /* [num_layers, 2] */
} found;

static kv8_status refuse_affine(const kv8_checkpoint *checkpoint) {
    for (size_t i = 0; i < checkpoint->num_tensors; i++) {
        const kv8_tensor *const tensor = checkpoint->by_name[i];
        for (size_t e = 0; e < sizeof affine_ends / sizeof affine_ends[0]; e++) {
            if (layer_of(tensor->name, affine_ends[e]) < 0) continue;
            for (uint64_t b = 0; b < tensor->bytes; b++) {
                if (tensor->data[b] != 0)
                    return kv8_fail(KV8_ERR_UNSUPPORTED,
                                    "tensor \"%s\" is not 0: kv8 stores code * scale alone",
                                    tensor->name);
            }
        }
    }
    return KV8_OK;
}

/* Which of the two forms, and how many layers it names. */
static kv8_status find_form(found *f, const char *path) {
    int32_t layers[KV8_SCALES_COUNT] = {0};
    for (size_t i = 0; i < f->checkpoint->num_tensors; i++) {
        for (int form = KV8_SCALES_COMPRESSED_TENSORS; form <= KV8_SCALES_MODELOPT; form++) {
            for (int kv = 0; kv < 2; kv++) {
                const int32_t layer =
                    layer_of(f->checkpoint->by_name[i]->name, name_ends[form][kv]);
                if (layer >= layers[form]) layers[form] = layer + 1;
            }
        }
    }
    const int32_t one = layers[KV8_SCALES_COMPRESSED_TENSORS], two = layers[KV8_SCALES_MODELOPT];
    if (one == 0 && two == 0)
        return kv8_fail(KV8_ERR_NOT_FOUND, "%s: no tensor ...layers.N.%s or ...layers.N.%s", path,
                        name_ends[KV8_SCALES_COMPRESSED_TENSORS][0],
                        name_ends[KV8_SCALES_MODELOPT][0]);
    if (one > 0 && two > 0)
        return kv8_fail(KV8_ERR_INVALID, "%s: both %s and %s are there", path,
                        name_ends[KV8_SCALES_COMPRESSED_TENSORS][0],
                        name_ends[KV8_SCALES_MODELOPT][0]);
    f->format = one > 0 ? KV8_SCALES_COMPRESSED_TENSORS : KV8_SCALES_MODELOPT;
    f->num_layers = one > 0 ? one : two;
    return KV8_OK;
}

static kv8_status collect(found *f) {
    f->tensors = calloc(2 * (size_t)f->num_layers, sizeof *f->tensors);
    if (f->tensors == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "no memory for scales");
    for (size_t i = 0; i < f->checkpoint->num_tensors; i++) {
        const kv8_tensor *const tensor = f->checkpoint->by_name[i];
        for (int kv = 0; kv < 2; kv++) {
            const int32_t layer = layer_of(tensor->name, name_ends[f->format][kv]);
            if (layer < 0) continue;
            const kv8_tensor **const slot = &f->tensors[2 * layer + kv];
            if (*slot != NULL)
                return kv8_fail(KV8_ERR_INVALID, "tensors \"%s\" and \"%s\" are one scale",
                                (*slot)->name, tensor->name);
            *slot = tensor;
        }
    }
    for (int32_t i = 0; i < 2 * f->num_layers; i++) {
        if (f->tensors[i] == NULL)
            return kv8_fail(KV8_ERR_CORRUPT, "tensor layers.%d.%s is missing", i / 2,
                            name_ends[f->format][i % 2]);
    }
    return KV8_OK;
}

static kv8_status read_found(kv8_scale_file **out, const found *f, const kv8_scale_expect *expect) {
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    const int64_t per_tensor = num_elements(f->tensors[0]);
    if (per_tensor < 1 || per_tensor > 1 << 16)
        return kv8_fail(KV8_ERR_INVALID, "tensor \"%s\" has %" PRId64 " elements",
                        f->tensors[0]->name, per_tensor);
    data.format = f->format;
    data.architecture = expect->architecture;
    data.num_layers = f->num_layers;
    data.per_tensor = per_tensor == 1 && expect->num_kv_heads != 1;
    data.num_kv_heads =
        data.per_tensor ? kv8_max_i64(expect->num_kv_heads, 1) : (int32_t)per_tensor;
    float *const scales = calloc(2 * (size_t)f->num_layers, (size_t)per_tensor * sizeof *scales);
    if (scales == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "no memory for scales");
    kv8_status status = KV8_OK;
    for (int32_t i = 0; i < 2 * f->num_layers && status == KV8_OK; i++) {
        if (num_elements(f->tensors[i]) != per_tensor)
            status = kv8_fail(
                KV8_ERR_INVALID, "tensor \"%s\" has %" PRId64 " elements, \"%s\" %" PRId64,
                f->tensors[i]->name, num_elements(f->tensors[i]), f->tensors[0]->name, per_tensor);
        else
            status = read_numbers(f->tensors[i], per_tensor, scales + i * per_tensor);
    }
    data.scales = scales;
    if (status == KV8_OK) status = kv8_scale_file_create(out, &data);
    free(scales);
    return status;
}

/* One file as a checkpoint of its own. */
static kv8_status open_file(kv8_checkpoint *checkpoint, const char *path) {
    *checkpoint = (kv8_checkpoint){0};
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof *checkpoint->files, "file table", &memory));
    checkpoint->files = memory;
    checkpoint->files_capacity = 1;
    kv8_status status = kv8_safetensors_open(&checkpoint->files[0], path, NULL);
    if (status == KV8_OK) {
        const kv8_safetensors *const file = &checkpoint->files[0];
        checkpoint->num_files = 1;
        status = kv8_alloc(NULL, file->num_tensors, sizeof *checkpoint->by_name, "tensor names",
                           &memory);
        if (status == KV8_OK) {
            checkpoint->by_name = memory;
            checkpoint->num_tensors = file->num_tensors;
            for (size_t i = 0; i < file->num_tensors; i++)
                checkpoint->by_name[i] = &file->tensors[i];
        }
    }
    if (status != KV8_OK) kv8_checkpoint_close(checkpoint);
    return status;
}

kv8_status kv8_scale_tensors_read(kv8_scale_file **out, const char *path, bool is_directory,
                                  const kv8_scale_expect *expect) {
    kv8_checkpoint checkpoint;
    KV8_TRY(is_directory ? kv8_checkpoint_open(&checkpoint, path, NULL)
                         : open_file(&checkpoint, path));
    found f = {.checkpoint = &checkpoint};
    kv8_status status;
    KV8_TRY_GOTO(refuse_affine(&checkpoint));
    KV8_TRY_GOTO(find_form(&f, path));
    KV8_TRY_GOTO(collect(&f));
    KV8_TRY_GOTO(read_found(out, &f, expect));
fail:
    if (status != KV8_OK && strstr(kv8_status_message(), path) == NULL)
        kv8_fail_within(status, "%s", path);
    free(f.tensors);
    kv8_checkpoint_close(&checkpoint);
    return status;
}

/* --- writing --- */

static void tensor_name(char *out, size_t size, int32_t layer, const char *end) {
    snprintf(out, size, "model.layers.%d.%s", layer, end);
}

/* Numbers of one tensor in this form. */
static size_t width_of(const kv8_scale_data *data, kv8_scale_format format) {
    return format == KV8_SCALES_MODELOPT || data->per_tensor ? 1 : (size_t)data->num_kv_heads;
}

static json_t *shape_of(const kv8_scale_data *data, kv8_scale_format format) {
    if (format == KV8_SCALES_MODELOPT) return json_array();
    return data->per_tensor ? json_pack("[i]", 1)
                            : json_pack("[i, i, i]", data->num_kv_heads, 1, 1);
}

static kv8_status write_shard(const kv8_scale_file *file, const char *path,
                              kv8_scale_format format) {
    const kv8_scale_data *const data = &file->data;
    const size_t width = width_of(data, format), bytes = width * sizeof(float);
    json_t *const header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    for (int32_t i = 0; i < 2 * data->num_layers; i++) {
        char name[96];
        tensor_name(name, sizeof name, i / 2, name_ends[format][i % 2]);
        json_object_set_new(
            header, name,
            json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape_of(data, format),
                      "data_offsets", (json_int_t)((size_t)i * bytes),
                      (json_int_t)(((size_t)i + 1) * bytes)));
    }
    char *const text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (text == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for its header", path);
    kv8_file_writer writer = {0};
    kv8_status status;
    KV8_TRY_GOTO(kv8_file_writer_open(&writer, path));
    const size_t length = strlen(text);
    const uint64_t padded = kv8_round_up(length, 8);
    KV8_TRY_GOTO(kv8_file_writer_write(&writer, &padded, sizeof padded)); /* little-endian here */
    KV8_TRY_GOTO(kv8_file_writer_write(&writer, text, length));
    KV8_TRY_GOTO(kv8_file_writer_write(&writer, "       ", (size_t)padded - length));
    for (int32_t i = 0; i < 2 * data->num_layers; i++) {
        const float *const heads =
            i % 2 == 0 ? kv8_scale_file_k(file, i / 2) : kv8_scale_file_v(file, i / 2);
        float largest = heads[0];
        for (int32_t h = 1; h < data->num_kv_heads; h++) largest = fmaxf(largest, heads[h]);
        KV8_TRY_GOTO(kv8_file_writer_write(&writer, width == 1 ? &largest : heads, bytes));
    }
    KV8_TRY_GOTO(kv8_file_writer_commit(&writer));
fail:
    kv8_file_writer_abort(&writer);
    free(text);
    return status;
}

/* --- into a checkpoint --- */

/* The index as it stands, or one made of the checkpoint's files. */
static kv8_status current_index(const char *directory, const char *path, json_t **out) {
    struct stat info;
    if (stat(path, &info) == 0) {
        char *text = NULL;
        size_t size = 0;
        KV8_TRY(kv8_file_read(path, 100000000, &text, &size));
        const kv8_status status = kv8_json_parse_object(out, path, text, size);
        kv8_release(NULL, text, size + 1, 1);
        return status;
    }
    kv8_checkpoint checkpoint;
    KV8_TRY(kv8_checkpoint_open(&checkpoint, directory, NULL));
    json_t *const map = json_object();
    uint64_t bytes = 0;
    for (size_t i = 0; i < checkpoint.num_tensors; i++) {
        const kv8_tensor *const tensor = checkpoint.by_name[i];
        const char *const slash = strrchr(tensor->file, '/');
        json_object_set_new(map, tensor->name,
                            json_string(slash == NULL ? single_name : slash + 1));
        bytes += tensor->bytes;
    }
    kv8_checkpoint_close(&checkpoint);
    *out =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)bytes, "weight_map", map);
    return *out != NULL ? KV8_OK : kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory", path);
}

/* Names the shard's tensors; refuses an index that has scales from elsewhere. */
static kv8_status add_to_index(json_t *index, const char *path, const kv8_scale_data *data,
                               kv8_scale_format format) {
    json_t *const map = json_object_get(index, "weight_map");
    if (!json_is_object(map))
        return kv8_fail(KV8_ERR_CORRUPT, "%s: weight_map is missing or no object", path);
    for (int32_t i = 0; i < 2 * data->num_layers; i++) {
        char name[96];
        tensor_name(name, sizeof name, i / 2, name_ends[format][i % 2]);
        const char *const now = json_string_value(json_object_get(map, name));
        if (now != NULL && strcmp(now, shard_name) != 0)
            return kv8_fail(KV8_ERR_INVALID, "%s: \"%s\" is in %s already", path, name, now);
        json_object_set_new(map, name, json_string(shard_name));
    }
    json_t *const total = json_object_get(json_object_get(index, "metadata"), "total_size");
    if (json_is_integer(total))
        json_integer_set(total, json_integer_value(total) +
                                    (json_int_t)(2 * (size_t)data->num_layers *
                                                 width_of(data, format) * sizeof(float)));
    return KV8_OK;
}

static kv8_status write_index(const json_t *index, const char *path) {
    char *const text = json_dumps(index, JSON_INDENT(2));
    if (text == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory", path);
    kv8_file_writer writer = {0};
    kv8_status status;
    KV8_TRY_GOTO(kv8_file_writer_open(&writer, path));
    KV8_TRY_GOTO(kv8_file_writer_write(&writer, text, strlen(text)));
    KV8_TRY_GOTO(kv8_file_writer_write(&writer, "\n", 1));
    KV8_TRY_GOTO(kv8_file_writer_commit(&writer));
fail:
    kv8_file_writer_abort(&writer);
    free(text);
    return status;
}

/* The shard first: without its entry in the index nobody looks at it. */
static kv8_status write_into(const kv8_scale_file *file, const char *directory,
                             kv8_scale_format format) {
    char *const shard = kv8_path_join(directory, shard_name);
    char *const path = kv8_path_join(directory, index_name);
    json_t *index = NULL;
    struct stat info;
    kv8_status status = shard != NULL && path != NULL
                            ? KV8_OK
                            : kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory", directory);
    if (status == KV8_OK && stat(shard, &info) == 0)
        status = kv8_fail(KV8_ERR_INVALID, "%s is there already", shard);
    if (status == KV8_OK) status = current_index(directory, path, &index);
    if (status == KV8_OK) status = add_to_index(index, path, &file->data, format);
    if (status == KV8_OK) status = write_shard(file, shard, format);
    if (status == KV8_OK) {
        status = write_index(index, path);
        if (status != KV8_OK) remove(shard);
    }
    json_decref(index);
    free(shard);
    free(path);
    return status;
}

kv8_status kv8_scale_tensors_write(const kv8_scale_file *file, const char *path, bool is_directory,
                                   kv8_scale_format format) {
    return is_directory ? write_into(file, path, format) : write_shard(file, path, format);
}
