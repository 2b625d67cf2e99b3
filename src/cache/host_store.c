/* host_store.c - pages in host memory: append is append_rows.c's, a page is read where it lies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "append_rows.h"
#include "cache_state.h"

typedef struct host_store {
    kv8_store base;
    kv8_cache *cache;
    const kv8_allocator *page_allocator;
    uint64_t *counters; /* [num_layers, 2, num_kv_heads, 2 (clips, NaN)] */
} host_store;

static host_store *host(kv8_store *store) {
    return (host_store *)store;
}

static size_t num_counters(const kv8_cache *cache) {
    return 2 * kv8_num_scales(cache);
}
/* K's or V's of a layer: [num_kv_heads, 2]. */
static uint64_t *counters_of(const host_store *store, int32_t layer, int kv) {
    const size_t heads = (size_t)store->cache->shape.num_kv_heads;
    return store->counters + (2 * (size_t)layer + (size_t)kv) * heads * 2;
}

/* --- pages --- */

static uint8_t *page_at(kv8_store *store, int32_t layer_idx, int32_t page) {
    const kv8_layer *const layer = &host(store)->cache->layers[layer_idx];
    return layer->data + (size_t)page * layer->page_bytes;
}

static kv8_status copy_page(kv8_store *store, int32_t layer, int32_t to, int32_t from) {
    memcpy(page_at(store, layer, to), page_at(store, layer, from),
           host(store)->cache->layers[layer].page_bytes);
    return KV8_OK;
}

static kv8_status read_page(kv8_store *store, int32_t layer, int32_t page,
                            const uint8_t **bytes_out) {
    *bytes_out = page_at(store, layer, page);
    return KV8_OK;
}

static kv8_status edit_page(kv8_store *store, int32_t layer, int32_t page, uint8_t **bytes_out) {
    *bytes_out = page_at(store, layer, page);
    return KV8_OK;
}

static kv8_status write_page(kv8_store *store, int32_t layer, int32_t page, const uint8_t *bytes) {
    (void)store, (void)layer, (void)page, (void)bytes; /* filled where it lies */
    return KV8_OK;
}

/* --- append --- */

typedef struct row_finder {
    const kv8_cache *cache;
    const kv8_append *append;
    int32_t group;
} row_finder;

static kv8_row_place place_of(const void *cookie, int32_t row, int32_t request) {
    const row_finder *const f = cookie;
    return kv8_cache_place(f->cache, f->append, f->group, row, request);
}

static kv8_row_array row_array(const kv8_layer *layer, const kv8_row_plane *part, bool there) {
    return (kv8_row_array){.data = there ? layer->data + part->offset : NULL,
                           .page_bytes = (int64_t)layer->page_bytes,
                           .slot_bytes = (int64_t)part->slot_bytes,
                           .head_bytes = (int64_t)part->head_bytes};
}

static kv8_append_target target_of(const host_store *store, int32_t layer_idx,
                                   const kv8_append *append, int kv) {
    const kv8_cache *const cache = store->cache;
    const kv8_layer *const layer = &cache->layers[layer_idx];
    const kv8_plane *const plane = &layer->plane[kv];
    const int64_t element = (int64_t)kv8_dtype_size(append->src_dtype);
    return (kv8_append_target){
        .format = plane->format,
        .source = kv == KV8_K ? append->k : append->v,
        .source_row_bytes = element * (kv == KV8_K ? append->k_stride_row : append->v_stride_row),
        .source_head_bytes =
            element * (kv == KV8_K ? append->k_stride_head : append->v_stride_head),
        .rows = row_array(layer, &plane->rows, true),
        .scales = row_array(layer, &plane->scales, plane->scale_bytes > 0),
        .scale = cache->seq_scales + kv8_head_index(cache, kv, layer_idx, 0),
        .scale_stride_idx = (int64_t)kv8_num_scales(cache),
        .scale_stride_head = 1,
        .counters = counters_of(store, layer_idx, kv),
    };
}

static kv8_status append(kv8_store *store, int32_t layer, const kv8_append *rows) {
    const kv8_cache *const cache = host(store)->cache;
    const row_finder finder = {cache, rows, cache->layers[layer].group};
    const kv8_append_job job = {
        .isa = cache->isa,
        .src_dtype = rows->src_dtype,
        .num_rows = rows->indptr[rows->num_seqs],
        .num_kv_heads = cache->shape.num_kv_heads,
        .target = {target_of(host(store), layer, rows, KV8_K),
                   target_of(host(store), layer, rows, KV8_V)},
        .cos_sin = rows->cos_sin,
        .interleaved = rows->interleaved != 0,
        .indptr = rows->indptr,
        .num_requests = rows->num_seqs,
        .place = place_of,
        .cookie = &finder,
    };
    kv8_append_rows(&job, cache->threads);
    return KV8_OK;
}

/* --- counters --- */

static kv8_status read_counters(kv8_store *store, const uint64_t **counters_out) {
    *counters_out = host(store)->counters;
    return KV8_OK;
}

static kv8_status reset_counters(kv8_store *store) {
    memset(host(store)->counters, 0, num_counters(host(store)->cache) * sizeof(uint64_t));
    return KV8_OK;
}

/* --- create --- */

static size_t num_pages_of(const kv8_cache *cache, const kv8_layer *layer) {
    return (size_t)kv8_pages_num_pages(cache->pages, layer->group);
}

static void destroy(kv8_store *store) {
    kv8_cache *const cache = host(store)->cache;
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        kv8_layer *const layer = &cache->layers[i];
        if (layer->data != NULL)
            kv8_release(host(store)->page_allocator, layer->data, num_pages_of(cache, layer),
                        layer->page_bytes);
        layer->data = NULL;
    }
    kv8_release(cache->allocator, host(store)->counters, num_counters(cache), sizeof(uint64_t));
    kv8_release(cache->allocator, store, 1, sizeof(host_store));
}

static const kv8_store_ops host_ops = {
    .destroy = destroy,
    .copy_page = copy_page,
    .append = append,
    .read_page = read_page,
    .edit_page = edit_page,
    .write_page = write_page,
    .read_counters = read_counters,
    .reset_counters = reset_counters,
};

kv8_status kv8_host_store_create(kv8_store **out, kv8_cache *cache, const void *where) {
    *out = NULL;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(cache->allocator, 1, sizeof(host_store), "cache store", &memory));
    host_store *const store = memory;
    *store = (host_store){.base = {&host_ops}, .cache = cache, .page_allocator = where};
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_alloc(cache->allocator, num_counters(cache), sizeof(uint64_t),
                           "cache counters", &memory));
    store->counters = memory;
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        kv8_layer *const layer = &cache->layers[i];
        KV8_TRY_GOTO(kv8_alloc(store->page_allocator, num_pages_of(cache, layer), layer->page_bytes,
                               "cache pages of one layer", &memory));
        layer->data = memory;
    }
    *out = &store->base;
    return KV8_OK;
fail:
    destroy(&store->base);
    return status;
}
