/* append.c - rows into the pages of a cache and back. Takes no page: extend has done that; and
 * converts no number: append_rows.c does that.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_check.h"
#include "cache_state.h"

static kv8_status check_append(kv8_cache *cache, int32_t layer, const kv8_append *append) {
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (append->num_seqs < 0)
        return kv8_fail(KV8_ERR_INVALID, "append: num_seqs is %d, must be >= 0", append->num_seqs);
    if (append->num_seqs == 0) return KV8_OK;
    if (append->seqs == NULL || append->indptr == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append: seqs or indptr is NULL");
    if (append->indptr[0] != 0)
        return kv8_fail(KV8_ERR_INVALID, "append: indptr[0] is %d, must be 0", append->indptr[0]);
    for (int32_t i = 0; i < append->num_seqs; i++) {
        int32_t idx = 0;
        KV8_TRY(kv8_cache_find(cache, append->seqs[i], &idx));
        if (append->indptr[i + 1] < append->indptr[i])
            return kv8_fail(KV8_ERR_INVALID, "append: indptr[%d] is %d, less than %d before it",
                            i + 1, append->indptr[i + 1], append->indptr[i]);
        KV8_TRY(kv8_pages_check_writable(cache->pages, idx, cache->layers[layer].group,
                                         append->indptr[i + 1] - append->indptr[i]));
    }
    const int32_t twice = kv8_cache_find_twice(cache, append->seqs, append->num_seqs);
    if (twice >= 0) return kv8_fail(KV8_ERR_INVALID, "append: seqs[%d] is there twice", twice);
    KV8_TRY(kv8_append_check_source(append->src_dtype));
    if (append->indptr[append->num_seqs] > 0 && (append->k == NULL || append->v == NULL))
        return kv8_fail(KV8_ERR_INVALID, "append: k or v is NULL with %d rows",
                        append->indptr[append->num_seqs]);
    if (append->interleaved != 0 && append->interleaved != 1)
        return kv8_fail(KV8_ERR_INVALID, "append: interleaved is %d, must be 0 or 1",
                        append->interleaved);
    if (append->cos_sin != NULL && cache->shape.k_head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "append: k_head_dim is %d, must be even to be rotated",
                        cache->shape.k_head_dim);
    return KV8_OK;
}

/* --- append --- */

kv8_row_place kv8_cache_place(const kv8_cache *cache, const kv8_append *append, int32_t group,
                              int32_t row, int32_t request) {
    const int32_t idx = kv8_seq_index(append->seqs[request]);
    const int32_t page_size = cache->shape.page_size;
    const int32_t position =
        kv8_pages_length(cache->pages, idx) - (append->indptr[request + 1] - row);
    return (kv8_row_place){.page = kv8_pages_list(cache->pages, idx, group)[position / page_size],
                           .slot = position % page_size,
                           .scale_idx = idx};
}

kv8_status kv8_cache_append(kv8_cache *cache, int32_t layer, const kv8_append *append) {
    KV8_REQUIRE(cache, append);
    KV8_TAKE_STRUCT(kv8_append, append);
    KV8_TRY(check_append(cache, layer, append));
    if (append->num_seqs == 0 || append->indptr[append->num_seqs] == 0) return KV8_OK;
    return cache->store->ops->append(cache->store, layer, append);
}

/* --- and back --- */

/* Tokens [begin, end) of one page, K or V, each a row of every head. */
static void widen_rows(const kv8_cache *cache, const kv8_plane *plane, const uint8_t *page,
                       int32_t begin, int32_t end, const float *scales, float *out) {
    const kv8_formats_kernels *const kernels = kv8_formats_kernels_get(cache->isa);
    for (int32_t slot = begin; slot < end; slot++) {
        for (int32_t head = 0; head < cache->shape.num_kv_heads; head++) {
            kv8_row_widen(kernels, &plane->format, page + kv8_plane_row(plane, slot, head),
                          page + kv8_plane_scales(plane, slot, head), scales[head], out);
            out += kv8_row_num_values(&plane->format);
        }
    }
}

static kv8_status check_range(const kv8_cache *cache, int32_t idx, int32_t group, int32_t begin,
                              int32_t num_tokens) {
    const int32_t length = kv8_pages_length(cache->pages, idx);
    if (begin < 0 || num_tokens < 0 || begin > length || num_tokens > length - begin)
        return kv8_fail(KV8_ERR_INVALID, "read: %d tokens from %d on, the sequence holds %d",
                        num_tokens, begin, length);
    const int32_t held_from = kv8_pages_held_from(cache->pages, idx, group);
    if (num_tokens > 0 && begin < held_from)
        return kv8_fail(KV8_ERR_NOT_FOUND,
                        "read: token %d is behind the window, which is held from %d on", begin,
                        held_from);
    return KV8_OK;
}

kv8_status kv8_cache_read(const kv8_cache *cache, int32_t layer, kv8_seq seq, int32_t begin,
                          int32_t num_tokens, float *k_out, float *v_out) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    const kv8_layer *const source = &cache->layers[layer];
    KV8_TRY(check_range(cache, idx, source->group, begin, num_tokens));
    const int32_t *const pages = kv8_pages_list(cache->pages, idx, source->group);
    const int32_t page_size = cache->shape.page_size, end = begin + num_tokens;
    float *const out[2] = {k_out, v_out};
    for (int32_t token = begin; token < end;) {
        const int32_t slot = token % page_size;
        const int32_t count = (int32_t)kv8_min_i64(page_size - slot, end - token);
        const uint8_t *page = NULL;
        KV8_TRY(cache->store->ops->read_page(cache->store, layer, pages[token / page_size], &page));
        for (int kv = 0; kv < 2; kv++) {
            const kv8_plane *const plane = &source->plane[kv];
            const size_t values =
                (size_t)cache->shape.num_kv_heads * (size_t)kv8_row_num_values(&plane->format);
            if (out[kv] != NULL)
                widen_rows(cache, plane, page, slot, slot + count,
                           kv8_sequence_scales(cache, idx) + kv8_head_index(cache, kv, layer, 0),
                           out[kv] + (size_t)(token - begin) * values);
        }
        token += count;
    }
    return KV8_OK;
}
