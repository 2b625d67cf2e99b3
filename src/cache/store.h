/* store.h - where the bytes of a cache's pages lie, as a table of functions: in host memory
 * (host_store.c) or a GPU's (device_store.c). A store knows addresses and copies; which page is
 * whose, and what the bytes mean, is known above it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_STORE_H
#define KV8_STORE_H

#include "cache_impl.h"

typedef struct kv8_store kv8_store;

typedef struct kv8_store_ops {
    void (*destroy)(kv8_store *store);
    /* Page `to` of a layer gets the bytes of page `from`. */
    kv8_status (*copy_page)(kv8_store *store, int32_t layer, int32_t to, int32_t from);
    /* kv8_cache_append of rows that have been checked, one at least. */
    kv8_status (*append)(kv8_store *store, int32_t layer, const kv8_append *append);
    /* The bytes of a page for the host to read, until the next call of the store. */
    kv8_status (*read_page)(kv8_store *store, int32_t layer, int32_t page,
                            const uint8_t **bytes_out);
    /* Room for all bytes of a page, for the host to fill before it calls write_page. */
    kv8_status (*edit_page)(kv8_store *store, int32_t layer, int32_t page, uint8_t **bytes_out);
    kv8_status (*write_page)(kv8_store *store, int32_t layer, int32_t page, const uint8_t *bytes);
    /* [num_layers, 2, num_kv_heads, 2 (clips, NaN)], until the next call of the store. */
    kv8_status (*read_counters)(kv8_store *store, const uint64_t **counters_out);
    kv8_status (*reset_counters)(kv8_store *store);
    /* kv8_cache_load_tables, of groups [first, first + num_groups), and kv8_cache_scales_device;
     * NULL in a store of the host. */
    kv8_status (*load_tables)(kv8_store *store, int32_t first, int32_t num_groups,
                              const kv8_seq *seqs, int32_t num_seqs, bool lists_alone);
    kv8_status (*scales)(kv8_store *store, int32_t layer, const kv8_seq *seqs, int32_t num_seqs,
                         const float **k_scale_out, const float **v_scale_out);
    /* kv8_cache_get_device_layer; NULL in a store of the host. */
    kv8_cache_device_layer (*device_layer)(kv8_store *store, int32_t layer);
} kv8_store_ops;

struct kv8_store {
    const kv8_store_ops *ops;
};

/* A store's create: memory for every page of every layer of a cache whose layers and pages stand;
 * sets the layers' `data`. `where` is what this kind of store must be told. *out is NULL on
 * failure. The cache's allocator gives what the store needs of host memory. */
typedef kv8_status kv8_store_maker(kv8_store **out, kv8_cache *cache, const void *where);

kv8_store_maker kv8_host_store_create;   /* where: the pages' kv8_allocator, or NULL = the heap */
kv8_store_maker kv8_device_store_create; /* where: a kv8_device_place */
typedef struct kv8_device_place {
    kv8_device *device;
    kv8_stream *stream; /* all work on the pages is done in its order */
} kv8_device_place;

#endif
