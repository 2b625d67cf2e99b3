/* page_table.c - what attention reads a cache by: planes as strided tensors, page lists of a batch
 * in CSR or dense form, scales of a batch. Copies lists; changes nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "cache_state.h"

static kv8_paged paged_view(const kv8_plane *plane) {
    const size_t element = kv8_dtype_size(kv8_plane_dtype(plane));
    kv8_paged view = {
        .data = kv8_plane_row(plane, 0, 0, 0),
        .stride_page = (int64_t)(plane->page_bytes / element),
        .stride_slot = (int64_t)(plane->rows.slot_bytes / element),
        .stride_head = (int64_t)(plane->rows.head_bytes / element),
    };
    if (plane->scale_bytes > 0) {
        const void *const scales = kv8_plane_scales(plane, 0, 0, 0);
        view.row_scale = scales;
        view.row_scale_stride_page = (int64_t)(plane->page_bytes / sizeof(kv8_f16));
        view.row_scale_stride_slot = (int64_t)(plane->scales.slot_bytes / sizeof(kv8_f16));
        view.row_scale_stride_head = (int64_t)(plane->scales.head_bytes / sizeof(kv8_f16));
    }
    return view;
}

kv8_status kv8_cache_layer_kv(const kv8_cache *cache, int32_t layer, kv8_paged *k_out,
                              kv8_paged *v_out) {
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    *k_out = paged_view(&cache->layers[layer].plane[KV8_K]);
    *v_out = paged_view(&cache->layers[layer].plane[KV8_V]);
    return KV8_OK;
}

/* Layer and every handle are good; *num_pages_out is the sum of the lists' lengths. */
static kv8_status check_batch(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                              int32_t num_seqs, int64_t *num_pages_out) {
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (num_seqs < 0)
        return kv8_fail(KV8_ERR_INVALID, "page table: num_seqs is %d, must be >= 0", num_seqs);
    int64_t num_pages = 0;
    for (int32_t b = 0; b < num_seqs; b++) {
        kv8_sequence *sequence = NULL;
        KV8_TRY(kv8_sequence_find(cache, seqs[b], &sequence));
        num_pages += kv8_pages_for(cache, sequence->length);
    }
    *num_pages_out = num_pages;
    return KV8_OK;
}

/* A sequence that check_batch has seen. */
static const kv8_sequence *checked(const kv8_cache *cache, kv8_seq seq) {
    return &cache->sequences[seq & 0xffffffff];
}

kv8_status kv8_cache_page_table(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                                int32_t num_seqs, int32_t *indptr_out, int32_t *indices_out,
                                int64_t capacity, int32_t *last_page_len_out) {
    int64_t num_pages = 0;
    KV8_TRY(check_batch(cache, layer, seqs, num_seqs, &num_pages));
    if (num_pages > capacity || num_pages > INT32_MAX)
        return kv8_fail(KV8_ERR_FULL, "page table: %lld entries needed, the capacity is %lld",
                        (long long)num_pages, (long long)kv8_min_i64(capacity, INT32_MAX));
    const int32_t group = cache->layers[layer].group, page_size = cache->shape.page_size;
    indptr_out[0] = 0;
    for (int32_t b = 0; b < num_seqs; b++) {
        const kv8_sequence *const sequence = checked(cache, seqs[b]);
        const int32_t count = kv8_pages_for(cache, sequence->length);
        if (count > 0)
            memcpy(indices_out + indptr_out[b], kv8_sequence_pages(cache, sequence, group),
                   (size_t)count * sizeof *indices_out);
        indptr_out[b + 1] = indptr_out[b] + count;
        last_page_len_out[b] = count == 0 ? 0 : sequence->length - (count - 1) * page_size;
    }
    return KV8_OK;
}

kv8_status kv8_cache_block_table(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                                 int32_t num_seqs, int32_t *block_table_out, int64_t stride,
                                 int32_t *seq_lens_out) {
    int64_t num_pages = 0;
    KV8_TRY(check_batch(cache, layer, seqs, num_seqs, &num_pages));
    int64_t longest = 0;
    for (int32_t b = 0; b < num_seqs; b++)
        longest = kv8_max_i64(longest, kv8_pages_for(cache, checked(cache, seqs[b])->length));
    if (longest > stride)
        return kv8_fail(KV8_ERR_FULL,
                        "block table: rows of %lld entries needed, the stride is %lld",
                        (long long)longest, (long long)stride);
    const int32_t group = cache->layers[layer].group;
    for (int32_t b = 0; b < num_seqs; b++) {
        const kv8_sequence *const sequence = checked(cache, seqs[b]);
        const int32_t *const pages = kv8_sequence_pages(cache, sequence, group);
        const int32_t count = kv8_pages_for(cache, sequence->length);
        int32_t *const row = block_table_out + (int64_t)b * stride;
        for (int64_t i = 0; i < stride; i++) row[i] = i < count ? pages[i] : KV8_NO_PAGE;
        seq_lens_out[b] = sequence->length;
    }
    return KV8_OK;
}

kv8_status kv8_cache_scales(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs,
                            int32_t num_seqs, float *k_scale_out, float *v_scale_out) {
    int64_t num_pages = 0;
    KV8_TRY(check_batch(cache, layer, seqs, num_seqs, &num_pages));
    const size_t heads = (size_t)cache->shape.num_kv_heads;
    for (int32_t b = 0; b < num_seqs; b++) {
        const kv8_sequence *const sequence = checked(cache, seqs[b]);
        memcpy(k_scale_out + (size_t)b * heads,
               sequence->scales + kv8_head_index(cache, KV8_K, layer, 0), heads * sizeof(float));
        memcpy(v_scale_out + (size_t)b * heads,
               sequence->scales + kv8_head_index(cache, KV8_V, layer, 0), heads * sizeof(float));
    }
    return KV8_OK;
}
