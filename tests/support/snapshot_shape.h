/* snapshot_shape.h - the small cache that the snapshot test and its fuzz harness load into; the
 * harness's seeds are files of this shape.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SNAPSHOT_SHAPE_H
#define KV8_SNAPSHOT_SHAPE_H

#include <kv8/cache.h>

enum { SHAPE_LAYERS = 3, SHAPE_HEADS = 2, SHAPE_K_DIM = 3, SHAPE_V_DIM = 2 };

static const float shape_k_scale[SHAPE_HEADS] = {0.5f, 0.25f};
static const kv8_cache_layer shape_layers[SHAPE_LAYERS] = {
    {sizeof(kv8_cache_layer), KV8_INT8, KV8_E4M3, -1, shape_k_scale, NULL},
    {sizeof(kv8_cache_layer), KV8_BF16, KV8_INT8, 4, NULL, NULL},
    {sizeof(kv8_cache_layer), KV8_E5M2, KV8_F32, -1, NULL, NULL},
};

static inline kv8_cache_options snapshot_shape(void) {
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    options.num_layers = SHAPE_LAYERS;
    options.layers = shape_layers;
    options.num_kv_heads = SHAPE_HEADS;
    options.k_head_dim = SHAPE_K_DIM;
    options.v_head_dim = SHAPE_V_DIM;
    options.page_size = 4;
    options.num_pages = 8;
    options.max_seqs = 3;
    options.max_seq_len = 30;
    options.window_slack = 1;
    return options;
}

#endif
