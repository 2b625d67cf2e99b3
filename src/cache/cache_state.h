/* cache_state.h - the objects inside a kv8_cache, for the files of this room only.
 *
 *   kv8_cache
 *    |- layers[num_layers]      bytes of K and V for every page id of the layer's group
 *    |- groups[num_groups]      page ids: pool and prefix index, one per distinct window_left
 *    `- sequences[max_seqs]     tokens, scales, and per group a list of page ids
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

#include <stdatomic.h>

#include "cache_impl.h"
#include "page_pool.h"
#include "prefix_index.h"

enum { KV8_MAX_HEAD_DIM = KV8_MAX_ROW_VALUES, KV8_K = 0, KV8_V = 1 };

/* K or V of one layer. */
typedef struct kv8_plane {
    kv8_row_format format;
    kv8_row_plane rows, scales; /* where they lie in a page */
    size_t row_bytes;
    size_t scale_bytes; /* of a row, apart from it; 0 = it has none there */
    size_t page_bytes;
    uint8_t *data; /* of page 0 */
    float *scale;  /* [num_kv_heads], for sequences without their own */
} kv8_plane;

typedef struct kv8_counters_cell {
    _Atomic uint64_t clips, nans;
} kv8_counters_cell;

typedef struct kv8_layer {
    int32_t window_left;
    int32_t group;
    size_t page_bytes;
    uint8_t *data; /* [num_pages of the group, page_bytes] */
    kv8_plane plane[2];
} kv8_layer;

typedef struct kv8_group {
    int32_t window_left;
    int32_t first_layer; /* the lowest layer of the group: names it in messages */
    kv8_page_pool pool;
    kv8_prefix_index index;
} kv8_group;

/* A sequence holds, in each group, the pages of tokens [held_from, length): entries
 * held_from / page_size .. ceil(length / page_size) - 1 of its list; earlier ones are
 * KV8_NO_PAGE, later ones meaningless. */
typedef struct kv8_sequence {
    uint32_t generation; /* of the handle that is or was last valid */
    bool alive;
    bool has_ids;    /* every token's id is known */
    bool own_scales; /* never published: its codes mean other values than the cache's */
    int32_t length;
    int32_t chain_pages;   /* pages that `chain` covers */
    kv8_prefix_hash chain; /* hash of the first chain_pages pages */
    uint64_t append_mark;  /* the latest append that named this sequence */
    int32_t *held_from;    /* [num_groups] */
    int32_t *pages;        /* [num_groups, table_pages] */
    int32_t *token_ids;    /* [as many as the page lists can reach] */
    float *scales;         /* [2, num_layers, num_kv_heads]: K then V */
} kv8_sequence;

struct kv8_cache {
    const kv8_allocator *allocator;
    kv8_threads *threads;
    kv8_isa isa;
    kv8_cache_shape shape;
    int32_t num_groups;
    int32_t table_pages; /* longest page list of a sequence */
    int32_t num_seqs;
    uint64_t append_mark;
    kv8_layer *layers;
    kv8_group *groups;
    kv8_sequence *sequences;
    int32_t *free_slots; /* stack of sequence slots; the next one is [max_seqs - num_seqs - 1] */
    /* Backing of the arrays above; sizes in cache.c. */
    float *layer_scales;         /* [2, num_layers, num_kv_heads] */
    kv8_counters_cell *counters; /* [2, num_layers, num_kv_heads] */
    int32_t *seq_held_from, *seq_pages, *seq_token_ids;
    float *seq_scales;
};

/* --- addresses --- */

/* The bytes of one row, and those of its scales (NULL where it has none apart from it). */
static inline uint8_t *kv8_plane_row(const kv8_plane *plane, int32_t page, int32_t slot,
                                     int32_t head) {
    return plane->data + (size_t)page * plane->page_bytes + plane->rows.offset +
           (size_t)slot * plane->rows.slot_bytes + (size_t)head * plane->rows.head_bytes;
}
static inline uint8_t *kv8_plane_scales(const kv8_plane *plane, int32_t page, int32_t slot,
                                        int32_t head) {
    if (plane->scale_bytes == 0) return NULL;
    return plane->data + (size_t)page * plane->page_bytes + plane->scales.offset +
           (size_t)slot * plane->scales.slot_bytes + (size_t)head * plane->scales.head_bytes;
}
static inline kv8_dtype kv8_plane_dtype(const kv8_plane *plane) {
    return plane->format.segment[0].dtype;
}
/* Index of (K or V, layer, head) in layer_scales, counters and a sequence's scales. */
static inline size_t kv8_head_index(const kv8_cache *cache, int kv, int32_t layer, int32_t head) {
    const size_t num_layers = (size_t)cache->shape.num_layers;
    return ((size_t)kv * num_layers + (size_t)layer) * (size_t)cache->shape.num_kv_heads +
           (size_t)head;
}
static inline int32_t *kv8_sequence_pages(const kv8_cache *cache, const kv8_sequence *sequence,
                                          int32_t group) {
    return sequence->pages + (size_t)group * (size_t)cache->table_pages;
}
/* Pages of a list that reaches up to `length` tokens. */
static inline int32_t kv8_pages_for(const kv8_cache *cache, int32_t length) {
    return (int32_t)kv8_ceil_div(length, cache->shape.page_size);
}
/* The first token that a sequence of `length` tokens must keep in a group: what a query at
 * position `length` sees, and window_slack more. */
static inline int32_t kv8_keep_from(const kv8_cache *cache, const kv8_group *group,
                                    int32_t length) {
    if (group->window_left < 0) return 0;
    const int64_t from = (int64_t)length - group->window_left - cache->shape.window_slack;
    return (int32_t)kv8_max_i64(0, from);
}

/* --- checks shared by the public calls --- */

/* The living sequence a handle names; KV8_ERR_NOT_FOUND for stale and foreign handles. */
kv8_status kv8_sequence_find(const kv8_cache *cache, kv8_seq seq, kv8_sequence **sequence_out);
kv8_status kv8_cache_check_layer(const kv8_cache *cache, int32_t layer);
/* Every scale is finite and > 0, or the array is NULL. */
kv8_status kv8_cache_check_scales(const kv8_cache *cache, const char *name, int32_t layer,
                                  const float *scales);

/* --- pages of sequences (sequence.c) --- */

/* A page for writing, no longer findable. The caller has checked that one is free. */
int32_t kv8_group_take_page(kv8_group *group);
/* Gives back entries [begin, end) of a list, last page first, so that a chain of published pages
 * is forgotten from its end. */
void kv8_group_give_pages(kv8_group *group, const int32_t *pages, int32_t begin, int32_t end);

#endif
