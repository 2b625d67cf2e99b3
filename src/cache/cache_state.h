/* cache_state.h - the objects inside a kv8_cache, for the files of this room only.
 *
 *   kv8_cache
 *    |- pages                   sequences as lists of page ids, per group of layers with one window
 *    |- layers[num_layers]      how K and V lie in a page, for every page id of the layer's group
 *    |- store                   the bytes, in host memory or a GPU's
 *    `- seq_scales[max_seqs]    what the codes of each sequence are multiplied by
 *
 * Bytes of one page of one layer, each plane starting at a cache line (NHD; HND swaps slot and
 * head), by the row_format of K and V:
 *
 *   K rows [slot, kv_head] | V rows [slot, kv_head]
 *   | K scales [slot, kv_head] | V scales [slot, kv_head]      (of formats with scales apart)
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CACHE_STATE_H
#define KV8_CACHE_STATE_H

#include "append_rows.h"
#include "cache_impl.h"
#include "pages_impl.h"
#include "store.h"

enum { KV8_K = 0, KV8_V = 1 };

/* K or V of one layer. */
typedef struct kv8_plane {
    kv8_row_format format;
    kv8_row_plane rows, scales; /* where they lie in a page */
    size_t row_bytes;
    size_t scale_bytes; /* of a row, apart from it; 0 = it has none there */
    float *scale;       /* [num_kv_heads], for sequences without their own */
} kv8_plane;

typedef struct kv8_layer {
    int32_t window_left;
    int32_t group;
    size_t page_bytes;
    uint8_t *data; /* [num_pages of the group, page_bytes], where the store lies */
    kv8_plane plane[2];
} kv8_layer;

struct kv8_cache {
    const kv8_allocator *allocator;
    kv8_threads *threads;
    kv8_isa isa;
    kv8_cache_shape shape;
    kv8_pages *pages;
    kv8_store *store;
    int32_t num_groups;
    int32_t *first_layer; /* [num_groups], the lowest of each */
    kv8_layer *layers;
    float *layer_scales;   /* [2, num_layers, num_kv_heads]: K then V */
    float *seq_scales;     /* [max_seqs, 2, num_layers, num_kv_heads]; layer_scales of indices
                            * that no sequence has */
    uint64_t batch_mark;   /* of the latest batch, and of the latest that named a sequence */
    uint64_t *batch_marks; /* [max_seqs] */
};

/* kv8_cache_create with the pages in the store that make_store makes. The options have today's
 * size.
 */
kv8_status kv8_cache_create_in(kv8_cache **out, const kv8_cache_options *options,
                               kv8_store_maker *make_store, const void *where);

/* --- addresses --- */

/* From a page's first byte to a row, and to the row's scales apart from it. */
static inline size_t kv8_plane_row(const kv8_plane *plane, int32_t slot, int32_t head) {
    return plane->rows.offset + (size_t)slot * plane->rows.slot_bytes +
           (size_t)head * plane->rows.head_bytes;
}
static inline size_t kv8_plane_scales(const kv8_plane *plane, int32_t slot, int32_t head) {
    return plane->scales.offset + (size_t)slot * plane->scales.slot_bytes +
           (size_t)head * plane->scales.head_bytes;
}
static inline kv8_dtype kv8_plane_dtype(const kv8_plane *plane) {
    return plane->format.segment[0].dtype;
}
/* Index of (K or V, layer, head) in layer_scales and the scales of a sequence. */
static inline size_t kv8_head_index(const kv8_cache *cache, int kv, int32_t layer, int32_t head) {
    const size_t num_layers = (size_t)cache->shape.num_layers;
    return ((size_t)kv * num_layers + (size_t)layer) * (size_t)cache->shape.num_kv_heads +
           (size_t)head;
}
static inline size_t kv8_num_scales(const kv8_cache *cache) {
    return kv8_head_index(cache, 2, 0, 0);
}
/* All scales of the sequence of that index. */
static inline float *kv8_sequence_scales(const kv8_cache *cache, int32_t idx) {
    return cache->seq_scales + (size_t)idx * kv8_num_scales(cache);
}

/* Where row `row` of an append goes, which is its sequence `request`'s. */
kv8_row_place kv8_cache_place(const kv8_cache *cache, const kv8_append *append, int32_t group,
                              int32_t row, int32_t request);
/* K or V of a layer as attention and append see it. */
kv8_paged kv8_cache_paged(const kv8_cache *cache, int32_t layer, int kv);

/* --- checks shared by the public calls --- */

/* The index of the living sequence that a handle names; KV8_ERR_NOT_FOUND for stale and foreign
 * handles. */
kv8_status kv8_cache_find(const kv8_cache *cache, kv8_seq seq, int32_t *idx_out);
kv8_status kv8_cache_check_layer(const kv8_cache *cache, int32_t layer);
/* Every scale is finite and > 0, or the array is NULL. */
kv8_status kv8_cache_check_scales(const kv8_cache *cache, const char *name, int32_t layer,
                                  const float *scales);

/* The sequence of that index has no scales of its own. */
void kv8_cache_drop_scales(kv8_cache *cache, int32_t idx);
/* After a change of a sequence's scales: with others than the cache's its pages mean something else
 * and are its own. */
void kv8_cache_settle_scales(kv8_cache *cache, int32_t idx);

#endif
