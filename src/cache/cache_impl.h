/* cache_impl.h - what cache shows the rooms above beside kv8/cache.h: the shape of a cache, and its
 * pages.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CACHE_IMPL_H
#define KV8_CACHE_IMPL_H

#include "formats_impl.h"
#include "pages_impl.h"

#include <kv8/cache.h>

typedef struct kv8_cache_shape {
    int32_t num_layers, num_kv_heads, k_head_dim, v_head_dim;
    int32_t page_size, max_seqs, max_seq_len, window_slack;
    kv8_layout layout;
} kv8_cache_shape;
KV8_SHARED void kv8_cache_get_shape(const kv8_cache *cache, kv8_cache_shape *shape_out);

/* The cache's sequences and page ids, for who extends and shares them without it. Borrowed. */
KV8_SHARED kv8_pages *kv8_cache_pages(kv8_cache *cache);

/* A layer's dtypes, window and scales; the scale arrays are borrowed until destroy. */
KV8_SHARED kv8_status kv8_cache_get_layer(const kv8_cache *cache, int32_t layer,
                                          kv8_cache_layer *layer_out);

#endif
