/* cache_view.c - what attention reads a cache by: planes as strided tensors, page tables of a
 * layer, scales of a batch. Changes nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "cache_state.h"

kv8_paged kv8_cache_paged(const kv8_cache *cache, int32_t layer_idx, int kv) {
    const kv8_layer *const layer = &cache->layers[layer_idx];
    const kv8_plane *const plane = &layer->plane[kv];
    const size_t element = kv8_dtype_size(kv8_plane_dtype(plane));
    kv8_paged view = KV8_PAGED_INIT;
    view.data = layer->data + plane->rows.offset;
    view.stride_page = (int64_t)(layer->page_bytes / element);
    view.stride_slot = (int64_t)(plane->rows.slot_bytes / element);
    view.stride_head = (int64_t)(plane->rows.head_bytes / element);
    if (plane->scale_bytes > 0) {
        const void *const scales = layer->data + plane->scales.offset;
        view.row_scale = scales;
        view.row_scale_stride_page = (int64_t)(layer->page_bytes / sizeof(kv8_f16));
        view.row_scale_stride_slot = (int64_t)(plane->scales.slot_bytes / sizeof(kv8_f16));
        view.row_scale_stride_head = (int64_t)(plane->scales.head_bytes / sizeof(kv8_f16));
    }
    return view;
}

kv8_status kv8_cache_layer_kv(const kv8_cache *cache, int32_t layer, kv8_paged *k_out,
                              kv8_paged *v_out) {
    KV8_REQUIRE(cache, k_out, v_out);
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    const kv8_paged k = kv8_cache_paged(cache, layer, KV8_K);
    const kv8_paged v = kv8_cache_paged(cache, layer, KV8_V);
    KV8_WRITE_STRUCT(kv8_paged, k_out, &k);
    KV8_WRITE_STRUCT(kv8_paged, v_out, &v);
    return KV8_OK;
}

kv8_status kv8_cache_page_table(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                                int32_t num_seqs, int32_t *indptr_out, int32_t *indices_out,
                                int64_t capacity, int32_t *last_page_len_out) {
    KV8_REQUIRE(cache, indptr_out);
    if (num_seqs > 0) KV8_REQUIRE(seqs, last_page_len_out);
    if (capacity > 0) KV8_REQUIRE(indices_out);
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    return kv8_pages_table(cache->pages, cache->layers[layer].group, seqs, num_seqs, indptr_out,
                           indices_out, capacity, last_page_len_out);
}

kv8_status kv8_cache_block_table(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                                 int32_t num_seqs, int32_t *block_table_out, int64_t stride,
                                 int32_t *seq_lens_out) {
    KV8_REQUIRE(cache);
    if (num_seqs > 0) KV8_REQUIRE(seqs, seq_lens_out);
    if (num_seqs > 0 && stride > 0) KV8_REQUIRE(block_table_out);
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    return kv8_pages_block_table(cache->pages, cache->layers[layer].group, seqs, num_seqs,
                                 block_table_out, stride, seq_lens_out);
}

kv8_status kv8_cache_scales(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                            int32_t num_seqs, float *k_scale_out, float *v_scale_out) {
    KV8_REQUIRE(cache);
    if (num_seqs > 0) KV8_REQUIRE(seqs, k_scale_out, v_scale_out);
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (num_seqs < 0)
        return kv8_fail(KV8_ERR_INVALID, "scales: num_seqs is %d, must be >= 0", num_seqs);
    int32_t idx = 0;
    for (int32_t b = 0; b < num_seqs; b++) KV8_TRY(kv8_cache_find(cache, seqs[b], &idx));
    const size_t heads = (size_t)cache->shape.num_kv_heads;
    for (int32_t b = 0; b < num_seqs; b++) {
        const float *const scales = kv8_sequence_scales(cache, kv8_seq_index(seqs[b]));
        memcpy(k_scale_out + (size_t)b * heads, scales + kv8_head_index(cache, KV8_K, layer, 0),
               heads * sizeof *scales);
        memcpy(v_scale_out + (size_t)b * heads, scales + kv8_head_index(cache, KV8_V, layer, 0),
               heads * sizeof *scales);
    }
    return KV8_OK;
}

/* --- the same in device memory --- */

static kv8_status check_on_device(const kv8_cache *cache, int32_t layer) {
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (cache->store->ops->load_tables != NULL) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "cache: its pages are in host memory, not on a GPU");
}

kv8_status kv8_cache_get_device_layer(const kv8_cache *cache, int32_t layer,
                                      kv8_cache_device_layer *layer_out) {
    KV8_TRY(check_on_device(cache, layer));
    *layer_out = cache->store->ops->device_layer(cache->store, layer);
    return KV8_OK;
}

bool kv8_cache_has_own_scales(const kv8_cache *cache, const kv8_seq *seqs, int32_t num_seqs) {
    for (int32_t i = 0; i < num_seqs; i++) {
        if (kv8_pages_is_private(cache->pages, kv8_seq_index(seqs[i]))) return true;
    }
    return false;
}

kv8_status kv8_cache_load_tables(kv8_cache *cache, const kv8_seq *seqs, int32_t num_seqs,
                                 bool lists_alone) {
    KV8_TRY(check_on_device(cache, 0));
    return cache->store->ops->load_tables(cache->store, 0, cache->num_groups, seqs, num_seqs,
                                          lists_alone);
}

kv8_status kv8_cache_page_table_device(kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                                       int32_t num_seqs, kv8_page_table *pages_out) {
    KV8_REQUIRE(cache, pages_out);
    if (num_seqs > 0) KV8_REQUIRE(seqs);
    KV8_TRY(check_on_device(cache, layer));
    KV8_TRY(cache->store->ops->load_tables(cache->store, cache->layers[layer].group, 1, seqs,
                                           num_seqs, false));
    const kv8_cache_device_layer own = cache->store->ops->device_layer(cache->store, layer);
    KV8_WRITE_STRUCT(kv8_page_table, pages_out, &own.pages);
    return KV8_OK;
}

kv8_status kv8_cache_scales_device(kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                                   int32_t num_seqs, const float **k_scale_out,
                                   const float **v_scale_out) {
    KV8_REQUIRE(cache, k_scale_out, v_scale_out);
    if (num_seqs > 0) KV8_REQUIRE(seqs);
    KV8_TRY(check_on_device(cache, layer));
    return cache->store->ops->scales(cache->store, layer, seqs, num_seqs, k_scale_out, v_scale_out);
}
