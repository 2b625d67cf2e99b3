/* safetensors.c - parsing and checking the header of a safetensors file.
 *
 * Everything in the header comes from outside: every number is checked before it is used, and no
 * byte of tensor data is read here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "json_fields.h"

enum { LENGTH_BYTES = 8 };

static const struct {
    const char *name;
    uint32_t bits;
} tensor_types[KV8_TENSOR_TYPE_COUNT] = {
    [KV8_TENSOR_BOOL] = {"BOOL", 8},       [KV8_TENSOR_F4] = {"F4", 4},
    [KV8_TENSOR_F6_E2M3] = {"F6_E2M3", 6}, [KV8_TENSOR_F6_E3M2] = {"F6_E3M2", 6},
    [KV8_TENSOR_F8_E4M3] = {"F8_E4M3", 8}, [KV8_TENSOR_F8_E5M2] = {"F8_E5M2", 8},
    [KV8_TENSOR_F8_E8M0] = {"F8_E8M0", 8}, [KV8_TENSOR_U8] = {"U8", 8},
    [KV8_TENSOR_I8] = {"I8", 8},           [KV8_TENSOR_U16] = {"U16", 16},
    [KV8_TENSOR_I16] = {"I16", 16},        [KV8_TENSOR_F16] = {"F16", 16},
    [KV8_TENSOR_BF16] = {"BF16", 16},      [KV8_TENSOR_U32] = {"U32", 32},
    [KV8_TENSOR_I32] = {"I32", 32},        [KV8_TENSOR_F32] = {"F32", 32},
    [KV8_TENSOR_U64] = {"U64", 64},        [KV8_TENSOR_I64] = {"I64", 64},
    [KV8_TENSOR_F64] = {"F64", 64},        [KV8_TENSOR_C64] = {"C64", 64},
};

const char *kv8_tensor_type_name(kv8_tensor_type type) {
    return tensor_types[type].name;
}

/* A failure that names file and tensor. */
#define FAIL_TENSOR(tensor, format, ...)                                                    \
    kv8_fail(KV8_ERR_CORRUPT, "%s: tensor \"%s\": " format, (tensor)->file, (tensor)->name, \
             __VA_ARGS__)

static kv8_status parse_type(kv8_tensor *tensor, const json_t *entry) {
    const json_t *const dtype = json_object_get(entry, "dtype");
    if (!json_is_string(dtype)) return FAIL_TENSOR(tensor, "%s", "dtype is missing or no string");
    const char *const spelled = json_string_value(dtype);
    for (int type = 0; type < KV8_TENSOR_TYPE_COUNT; type++) {
        if (strcmp(tensor_types[type].name, spelled) != 0) continue;
        tensor->type = (kv8_tensor_type)type;
        return KV8_OK;
    }
    return FAIL_TENSOR(tensor, "unknown dtype \"%.40s\"", spelled);
}

/* Fills shape and bytes. */
static kv8_status parse_shape(kv8_tensor *tensor, const json_t *entry) {
    const json_t *const shape = json_object_get(entry, "shape");
    if (!json_is_array(shape)) return FAIL_TENSOR(tensor, "%s", "shape is missing or no array");
    const size_t num_dims = json_array_size(shape);
    if (num_dims > KV8_TENSOR_MAX_DIMS)
        return FAIL_TENSOR(tensor, "%zu dimensions, the limit is %d", num_dims,
                           (int)KV8_TENSOR_MAX_DIMS);
    tensor->num_dims = (int32_t)num_dims;
    uint64_t bits = tensor_types[tensor->type].bits;
    for (size_t i = 0; i < num_dims; i++) {
        const json_t *const dim = json_array_get(shape, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return FAIL_TENSOR(tensor, "shape[%zu] is not an integer >= 0", i);
        tensor->shape[i] = json_integer_value(dim);
        if (__builtin_mul_overflow(bits, (uint64_t)tensor->shape[i], &bits))
            return FAIL_TENSOR(tensor,
                               "the product of the shape overflows at shape[%zu] = %" PRId64, i,
                               tensor->shape[i]);
    }
    if (bits % 8 != 0)
        return FAIL_TENSOR(tensor, "%" PRIu64 " bits are no whole number of bytes", bits);
    tensor->bytes = bits / 8;
    return KV8_OK;
}

static kv8_status parse_offsets(kv8_tensor *tensor, const json_t *entry, uint64_t data_bytes) {
    const json_t *const offsets = json_object_get(entry, "data_offsets");
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return FAIL_TENSOR(tensor, "%s", "data_offsets is not [begin, end]");
    uint64_t ends[2];
    for (size_t i = 0; i < 2; i++) {
        const json_t *const value = json_array_get(offsets, i);
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return FAIL_TENSOR(tensor, "data_offsets[%zu] is not an integer >= 0", i);
        ends[i] = (uint64_t)json_integer_value(value);
    }
    if (ends[0] > ends[1])
        return FAIL_TENSOR(tensor, "data_offsets [%" PRIu64 ", %" PRIu64 "] run backwards", ends[0],
                           ends[1]);
    if (ends[1] > data_bytes)
        return FAIL_TENSOR(tensor,
                           "data ends at byte %" PRIu64 ", but the file holds only %" PRIu64
                           " bytes of data: it is truncated",
                           ends[1], data_bytes);
    if (ends[1] - ends[0] != tensor->bytes)
        return FAIL_TENSOR(tensor,
                           "data_offsets span %" PRIu64 " bytes, its shape of %s needs %" PRIu64,
                           ends[1] - ends[0], kv8_tensor_type_name(tensor->type), tensor->bytes);
    tensor->offset = ends[0];
    return KV8_OK;
}

static kv8_status parse_tensor(kv8_tensor *tensor, const json_t *entry, uint64_t data_bytes) {
    if (!json_is_object(entry)) return FAIL_TENSOR(tensor, "%s", "its entry is no object");
    KV8_TRY(parse_type(tensor, entry));
    KV8_TRY(parse_shape(tensor, entry));
    return parse_offsets(tensor, entry, data_bytes);
}

static kv8_status check_metadata(const char *label, const json_t *metadata) {
    if (!json_is_object(metadata))
        return kv8_fail(KV8_ERR_CORRUPT, "%s: __metadata__ is no object", label);
    const char *key;
    const json_t *value;
    /* jansson's iteration takes a non-const object it does not change. */
    json_object_foreach((json_t *)(uintptr_t)metadata, key, value) {
        if (!json_is_string(value))
            return kv8_fail(KV8_ERR_CORRUPT, "%s: __metadata__ \"%.80s\" is no string", label, key);
    }
    return KV8_OK;
}

static int by_offset(const void *a, const void *b) {
    const kv8_tensor *const x = a, *const y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The tensors must tile the data section: no overlap, no gap, nothing behind the last. */
static kv8_status check_tiling(const kv8_safetensors *file, const char *label) {
    uint64_t end = 0;
    for (size_t i = 0; i < file->num_tensors; i++) {
        const kv8_tensor *const tensor = &file->tensors[i];
        if (tensor->offset < end)
            return FAIL_TENSOR(tensor, "its data begins at byte %" PRIu64 " and overlaps \"%s\"",
                               tensor->offset, file->tensors[i - 1].name);
        if (tensor->offset > end)
            return FAIL_TENSOR(tensor,
                               "a gap of %" PRIu64 " bytes before its data at byte %" PRIu64,
                               tensor->offset - end, tensor->offset);
        end = tensor->offset + tensor->bytes;
    }
    if (end != file->data_bytes)
        return kv8_fail(KV8_ERR_CORRUPT,
                        "%s: %" PRIu64 " bytes behind the last tensor, which ends at byte %" PRIu64,
                        label, file->data_bytes - end, end);
    return KV8_OK;
}

/* Copies label and names out of the JSON; fills name and file of every tensor. */
static kv8_status copy_names(kv8_safetensors *file, const char *label, json_t *header) {
    size_t size = strlen(label) + 1, count = 0;
    const char *key;
    json_t *value;
    json_object_foreach(header, key, value) {
        if (strcmp(key, "__metadata__") == 0) continue;
        size += strlen(key) + 1; /* bounded by the header's size */
        count++;
    }
    void *memory = NULL;
    KV8_TRY(kv8_alloc(file->allocator, size, 1, "tensor names", &memory));
    file->strings = memory;
    file->strings_size = size;
    KV8_TRY(kv8_alloc(file->allocator, count, sizeof *file->tensors, "tensor table", &memory));
    file->tensors = memory;
    file->num_tensors = count;
    char *at = file->strings;
    memcpy(at, label, strlen(label) + 1);
    at += strlen(label) + 1;
    kv8_tensor *tensor = file->tensors;
    json_object_foreach(header, key, value) {
        if (strcmp(key, "__metadata__") == 0) continue;
        memcpy(at, key, strlen(key) + 1);
        *tensor++ = (kv8_tensor){.name = at, .file = file->strings};
        at += strlen(key) + 1;
    }
    return KV8_OK;
}

static kv8_status parse_header(kv8_safetensors *file, const char *label, json_t *header,
                               const uint8_t *data) {
    KV8_TRY(copy_names(file, label, header));
    const char *key;
    json_t *value;
    kv8_tensor *tensor = file->tensors;
    json_object_foreach(header, key, value) {
        if (strcmp(key, "__metadata__") == 0) {
            KV8_TRY(check_metadata(label, value));
            continue;
        }
        KV8_TRY(parse_tensor(tensor, value, file->data_bytes));
        tensor->data = data + tensor->offset;
        tensor++;
    }
    qsort(file->tensors, file->num_tensors, sizeof *file->tensors, by_offset);
    return check_tiling(file, label);
}

/* Checks the length field; *length_out header bytes follow it. */
static kv8_status read_length(const char *label, const uint8_t *bytes, size_t size,
                              size_t *length_out) {
    if (size < LENGTH_BYTES)
        return kv8_fail(KV8_ERR_CORRUPT, "%s: %zu bytes, no room for the header's length", label,
                        size);
    uint64_t length = 0;
    for (int i = 0; i < LENGTH_BYTES; i++) length |= (uint64_t)bytes[i] << (8 * i);
    if (length > KV8_SAFETENSORS_MAX_HEADER)
        return kv8_fail(KV8_ERR_CORRUPT, "%s: a header of %" PRIu64 " bytes, the limit is %" PRIu64,
                        label, length, KV8_SAFETENSORS_MAX_HEADER);
    if (length > size - LENGTH_BYTES)
        return kv8_fail(KV8_ERR_CORRUPT,
                        "%s: a header of %" PRIu64 " bytes in a file of %zu: it is truncated",
                        label, length, size);
    *length_out = (size_t)length;
    return KV8_OK;
}

kv8_status kv8_safetensors_parse(kv8_safetensors *out, const char *label, const uint8_t *bytes,
                                 size_t size, const kv8_allocator *allocator) {
    *out = (kv8_safetensors){.allocator = allocator};
    size_t length = 0;
    KV8_TRY(read_length(label, bytes, size, &length));
    if (length == 0 || bytes[LENGTH_BYTES] != '{')
        return kv8_fail(KV8_ERR_CORRUPT, "%s: no safetensors file: its header is no JSON object",
                        label);
    json_t *header = NULL;
    const kv8_status parsed =
        kv8_json_parse(&header, "header", (const char *)bytes + LENGTH_BYTES, length);
    if (parsed != KV8_OK) return kv8_fail_within(parsed, "%s", label);
    out->data_bytes = size - LENGTH_BYTES - length;
    const kv8_status status = parse_header(out, label, header, bytes + LENGTH_BYTES + length);
    json_decref(header);
    if (status != KV8_OK) kv8_safetensors_close(out);
    return status;
}

kv8_status kv8_safetensors_open(kv8_safetensors *out, const char *path,
                                const kv8_allocator *allocator) {
    *out = (kv8_safetensors){0};
    kv8_file_map map;
    KV8_TRY(kv8_file_map_open(&map, path));
    const kv8_status status = kv8_safetensors_parse(out, path, map.data, map.size, allocator);
    if (status != KV8_OK) {
        kv8_file_map_close(&map);
        return status;
    }
    out->map = map;
    return KV8_OK;
}

void kv8_safetensors_close(kv8_safetensors *file) {
    kv8_release(file->allocator, file->tensors, file->num_tensors, sizeof *file->tensors);
    kv8_release(file->allocator, file->strings, file->strings_size, 1);
    kv8_file_map_close(&file->map);
    *file = (kv8_safetensors){0};
}

const kv8_tensor *kv8_safetensors_find(const kv8_safetensors *file, const char *name) {
    for (size_t i = 0; i < file->num_tensors; i++) {
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
    }
    return NULL;
}
