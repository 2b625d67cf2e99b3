/* scale_rows.h - a scale file in memory, and its readers and writers by format.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SCALE_ROWS_H
#define KV8_SCALE_ROWS_H

#include <kv8/scale_file.h>

#include "checkpoint_impl.h"

enum { KV8_SCALE_MAX_HELD = 12 };
struct kv8_scale_file {
    kv8_scale_data data; /* its arrays are held below */
    float *by_head;      /* [num_layers, 2, num_kv_heads] */
    struct {
        void *ptr;
        size_t count, size;
    } held[KV8_SCALE_MAX_HELD];
    int32_t num_held;
};

/* Numbers in a row of `scales`. */
static inline size_t kv8_scale_columns(const kv8_scale_data *data) {
    return data->per_tensor ? 2 : 2 * (size_t)data->num_kv_heads;
}
/* Heads first..first+num-1 of rank r of num_ranks: a part of the heads, or a copy of one. */
static inline int32_t kv8_scale_first_head(int32_t num_heads, int32_t num_ranks, int32_t rank) {
    return (int32_t)((int64_t)rank * num_heads / num_ranks);
}
static inline int32_t kv8_scale_num_heads(int32_t num_heads, int32_t num_ranks) {
    return num_heads > num_ranks ? num_heads / num_ranks : 1;
}

/* JSON of kv8, LightLLM or SGLang; `path` is for messages. */
kv8_status kv8_scale_json_parse(kv8_scale_file **out, const char *path, const char *text,
                                size_t size, const kv8_scale_expect *expect);
kv8_status kv8_scale_json_read(kv8_scale_file **out, const char *path,
                               const kv8_scale_expect *expect);
kv8_status kv8_scale_json_write(const kv8_scale_file *file, const char *path,
                                kv8_scale_format format, int32_t num_ranks);
/* SGLang's, whose root has "kv_cache". */
kv8_status kv8_scale_sglang_read(kv8_scale_file **out, const json_t *root,
                                 const kv8_scale_expect *expect);
json_t *kv8_scale_sglang_dump(const kv8_scale_file *file, int32_t num_ranks);

/* A .safetensors file, or a directory. */
kv8_status kv8_scale_tensors_read(kv8_scale_file **out, const char *path, bool is_directory,
                                  const kv8_scale_expect *expect);
kv8_status kv8_scale_tensors_write(const kv8_scale_file *file, const char *path, bool is_directory,
                                   kv8_scale_format format);

#endif
