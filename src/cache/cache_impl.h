/* cache_impl.h - what cache shows the rooms above beside kv8/cache.h: the shape of a cache, and
 * append with a stage of the caller's own before the quantisation (fused rotate + append).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CACHE_IMPL_H
#define KV8_CACHE_IMPL_H

#include "formats_impl.h"

#include <kv8/cache.h>

typedef struct kv8_cache_shape {
    int32_t num_layers, num_kv_heads, k_head_dim, v_head_dim;
    int32_t page_size, max_seqs, max_seq_len, window_slack;
    kv8_layout layout;
} kv8_cache_shape;
KV8_SHARED void kv8_cache_get_shape(const kv8_cache *cache, kv8_cache_shape *shape_out);

/* A layer's dtypes, window and scales; the scale arrays are borrowed until destroy. */
KV8_SHARED kv8_status kv8_cache_get_layer(const kv8_cache *cache, int32_t layer,
                                          kv8_cache_layer *layer_out);

/* Changes the k_head_dim f32 values of one head of one row (numbered as in kv8_append) in place,
 * before they are divided by the scale. May run on any thread of the cache's pool. */
typedef void (*kv8_append_prepare)(void *cookie, int32_t row, int32_t kv_head, float *k);

/* kv8_cache_append with `prepare` (NULL = none) applied to every K head: the one place where rows
 * are written, so that a fused append stores the same bytes as two steps. */
kv8_status kv8_cache_append_prepared(kv8_cache *cache, int32_t layer, const kv8_append *append,
                                     kv8_append_prepare prepare, void *cookie);

/* The same on a GPU. A plan that rotates runs kernels called "kv8_append_rope..." on K and cos_sin
 * [rows, k_head_dim] in device memory; one that does not takes NULL for it. */
kv8_status kv8_append_plan_create_rotating(kv8_append_plan **out, kv8_device *device,
                                           const kv8_append_spec *spec);
kv8_status kv8_append_plan_run_rotating(const kv8_append_plan *plan, kv8_stream *stream,
                                        const kv8_append_args *args, const float *cos_sin);

#endif
