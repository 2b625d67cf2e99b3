/* safetensors.h - one safetensors file: its header parsed and checked, its data borrowed.
 *
 *   u64 header length | JSON {name: {dtype, shape, data_offsets}, "__metadata__": {..}} | data
 *
 * Knows the file format; never a model's tensor names. What is refused is what the format's
 * reference implementation refuses: overlaps, gaps, trailing bytes, sizes that do not follow from
 * shape and dtype, duplicate names. Data may lie at any alignment.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SAFETENSORS_H
#define KV8_SAFETENSORS_H

#include "base_impl.h"

typedef enum kv8_tensor_type {
    KV8_TENSOR_BOOL = 0,
    KV8_TENSOR_F4,
    KV8_TENSOR_F6_E2M3,
    KV8_TENSOR_F6_E3M2,
    KV8_TENSOR_F8_E4M3,
    KV8_TENSOR_F8_E5M2,
    KV8_TENSOR_F8_E8M0,
    KV8_TENSOR_U8,
    KV8_TENSOR_I8,
    KV8_TENSOR_U16,
    KV8_TENSOR_I16,
    KV8_TENSOR_F16,
    KV8_TENSOR_BF16,
    KV8_TENSOR_U32,
    KV8_TENSOR_I32,
    KV8_TENSOR_F32,
    KV8_TENSOR_U64,
    KV8_TENSOR_I64,
    KV8_TENSOR_F64,
    KV8_TENSOR_C64,
    KV8_TENSOR_TYPE_COUNT
} kv8_tensor_type;

/* "BF16", as headers spell it. */
const char *kv8_tensor_type_name(kv8_tensor_type type);

enum { KV8_TENSOR_MAX_DIMS = 8 };

typedef struct kv8_tensor {
    const char *name;
    const char *file; /* the label given to parse */
    kv8_tensor_type type;
    int32_t num_dims;
    int64_t shape[KV8_TENSOR_MAX_DIMS];
    uint64_t offset; /* from the first data byte */
    uint64_t bytes;
    const uint8_t *data;
} kv8_tensor;

typedef struct kv8_safetensors {
    const kv8_allocator *allocator;
    kv8_file_map map;    /* empty when parsed from memory */
    kv8_tensor *tensors; /* in file order */
    size_t num_tensors;
    char *strings; /* the label, then the tensors' names, each with its 0 */
    size_t strings_size;
    uint64_t data_bytes;
} kv8_safetensors;

/* The reference implementation's limit on the header. */
#define KV8_SAFETENSORS_MAX_HEADER ((uint64_t)100000000)

/* Parses a whole file's bytes, which are borrowed and must outlive *out. `label` names the file in
 * messages. On failure *out is empty and needs no close. */
kv8_status kv8_safetensors_parse(kv8_safetensors *out, const char *label, const uint8_t *bytes,
                                 size_t size, const kv8_allocator *allocator);
/* Maps the file and parses it. */
kv8_status kv8_safetensors_open(kv8_safetensors *out, const char *path,
                                const kv8_allocator *allocator);
void kv8_safetensors_close(kv8_safetensors *file);
/* NULL when there is none of that name. */
const kv8_tensor *kv8_safetensors_find(const kv8_safetensors *file, const char *name);

#endif
