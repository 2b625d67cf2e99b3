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
    kv8_device
        *device; /* where the pages lie, and the stream of all work on them; NULL = the host */
    kv8_stream *stream;
} kv8_cache_shape;
KV8_SHARED void kv8_cache_get_shape(const kv8_cache *cache, kv8_cache_shape *shape_out);

/* The cache's sequences and page ids, for who extends and shares them without it. Borrowed. */
KV8_SHARED kv8_pages *kv8_cache_pages(kv8_cache *cache);

/* Of living sequences the first that the batch has named before, by its index; -1 = each is named
 * once. */
KV8_SHARED int32_t kv8_cache_find_twice(kv8_cache *cache, const kv8_seq *seqs, int32_t num_seqs);

/* A layer's dtypes, window and scales; the scale arrays are borrowed until destroy. */
KV8_SHARED kv8_status kv8_cache_get_layer(const kv8_cache *cache, int32_t layer,
                                          kv8_cache_layer *layer_out);

/* What kernels of a caller's own append and read a layer by, in the memory of the cache's GPU:
 * addresses that stay, for a recorded graph. */
typedef struct kv8_cache_device_layer {
    const float *k_scale, *v_scale; /* [num_kv_heads], of sequences without their own */
    uint64_t *counters;             /* as kv8_append_args has them */
    kv8_page_table pages;           /* of the sequences that kv8_cache_load_tables named last */
} kv8_cache_device_layer;
KV8_SHARED kv8_status kv8_cache_get_device_layer(const kv8_cache *cache, int32_t layer,
                                                 kv8_cache_device_layer *layer_out);
/* The counters of all layers and heads together, at the cost of those of one. */
KV8_SHARED kv8_status kv8_cache_sum_counters(const kv8_cache *cache, kv8_cache_counters *sums_out);
/* kv8_cache_page_table_device of all layers; what did not change since the last call is left where
 * it lies. lists_alone: last_page_len may be that of an earlier call. */
KV8_SHARED kv8_status kv8_cache_load_tables(kv8_cache *cache, const kv8_seq *seqs, int32_t num_seqs,
                                            bool lists_alone);
/* Whether any of these living sequences has scales of its own. */
KV8_SHARED bool kv8_cache_has_own_scales(const kv8_cache *cache, const kv8_seq *seqs,
                                         int32_t num_seqs);

#endif
