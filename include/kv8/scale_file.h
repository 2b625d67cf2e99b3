/* kv8/scale_file.h - scale files: the per-layer, per-head K and V scales of a model.
 *
 * Reads LightLLM's kv_cache_calib.json: {"version", "architectures", "quant_type": "per_head" |
 * "per_tensor", "qmin", "qmax", "num_layers", "num_head", "scales_shape": [layers, 2*heads or 2],
 * "scales": [[k..., v...], ...]}. real value = code * scale.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SCALE_FILE_H
#define KV8_SCALE_FILE_H

#include <kv8/formats.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_scale_file kv8_scale_file;

/* Parses and checks a scale file against the model it is meant for: every scale finite and > 0,
 * shapes as the header says, num_layers and num_kv_heads (per_head) equal to the model's. *out is
 * NULL on failure; the message names file, key, value and limit. */
KV8_API KV8_NODISCARD kv8_status kv8_scale_file_open(kv8_scale_file **out, const char *path,
                                                     int32_t num_layers, int32_t num_kv_heads);
KV8_API void kv8_scale_file_close(kv8_scale_file *file);
/* Borrowed arrays of num_kv_heads scales of one layer (per-tensor files repeat one value). */
KV8_API const float *kv8_scale_file_k(const kv8_scale_file *file, int32_t layer);
KV8_API const float *kv8_scale_file_v(const kv8_scale_file *file, int32_t layer);

#ifdef __cplusplus
}
#endif
#endif
