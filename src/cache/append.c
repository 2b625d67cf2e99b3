/* append.c - rows into pages and back: the one place where a row is quantised. Takes no page;
 * extend has done that.
 *
 * Work is cut into (block of rows, head) pieces for the pool of threads. Every piece writes bytes
 * of its own; the counters of a head are sums, so their order changes nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>

#include "cache_state.h"

enum {
    ROWS_PER_TASK = 32,
    /* Fewer elements than this (some 6 us at 0.4 ns each on AVX-512) are written sooner by one
     * thread than others wake. */
    MIN_PARALLEL_ELEMENTS = 1 << 14
};

/* --- checks --- */

static kv8_status check_source(const kv8_append *append, int32_t num_rows) {
    if (append->src_dtype != KV8_F32 && append->src_dtype != KV8_BF16 &&
        append->src_dtype != KV8_F16)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "append: src_dtype is %s, must be f32, bf16 or f16",
                        kv8_dtype_name(append->src_dtype));
    if (num_rows > 0 && (append->k == NULL || append->v == NULL))
        return kv8_fail(KV8_ERR_INVALID, "append: k or v is NULL with %d rows", num_rows);
    return KV8_OK;
}

static kv8_status check_append(kv8_cache *cache, int32_t layer, const kv8_append *append) {
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (append == NULL) return kv8_fail(KV8_ERR_INVALID, "append: append is NULL");
    if (append->num_seqs < 0)
        return kv8_fail(KV8_ERR_INVALID, "append: num_seqs is %d, must be >= 0", append->num_seqs);
    if (append->num_seqs == 0) return KV8_OK;
    if (append->seqs == NULL || append->indptr == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append: seqs or indptr is NULL");
    if (append->indptr[0] != 0)
        return kv8_fail(KV8_ERR_INVALID, "append: indptr[0] is %d, must be 0", append->indptr[0]);
    cache->append_mark++;
    for (int32_t i = 0; i < append->num_seqs; i++) {
        int32_t idx = 0;
        KV8_TRY(kv8_cache_find(cache, append->seqs[i], &idx));
        if (append->indptr[i + 1] < append->indptr[i])
            return kv8_fail(KV8_ERR_INVALID, "append: indptr[%d] is %d, less than %d before it",
                            i + 1, append->indptr[i + 1], append->indptr[i]);
        if (cache->append_marks[idx] == cache->append_mark)
            return kv8_fail(KV8_ERR_INVALID, "append: seqs[%d] is there twice", i);
        cache->append_marks[idx] = cache->append_mark;
        KV8_TRY(kv8_pages_check_writable(cache->pages, idx, cache->layers[layer].group,
                                         append->indptr[i + 1] - append->indptr[i]));
    }
    return check_source(append, append->indptr[append->num_seqs]);
}

/* --- one head of one row --- */

/* Writes a row of one head to its place. `values` may be scratch, which is then overwritten. */
static void store_head(const kv8_cache *cache, const kv8_plane *plane, int32_t page, int32_t slot,
                       int32_t head, float scale, const float *values, float *scratch,
                       kv8_narrow_counts *counts) {
    const kv8_status status = kv8_row_narrow(cache->isa, &plane->format, values, scale, scratch,
                                             kv8_plane_row(plane, page, slot, head),
                                             kv8_plane_scales(plane, page, slot, head), counts);
    assert(status == KV8_OK); /* dtype, scale and isa were checked at create and set_scales */
    (void)status;
}

/* --- the loop --- */

typedef struct append_job {
    kv8_cache *cache;
    const kv8_append *append;
    int32_t layer;
    kv8_append_prepare prepare;
    void *cookie;
} append_job;

/* K or V of one head of one row as f32: in place where it can be, else in scratch. */
static const float *source_head(const append_job *job, int kv, int32_t row, int32_t head,
                                float *scratch) {
    const kv8_append *const append = job->append;
    const int64_t offset = kv == KV8_K ? row * append->k_stride_row + head * append->k_stride_head
                                       : row * append->v_stride_row + head * append->v_stride_head;
    const uint8_t *const base = kv == KV8_K ? append->k : append->v;
    const void *const source = base + offset * (int64_t)kv8_dtype_size(append->src_dtype);
    const bool prepares = kv == KV8_K && job->prepare != NULL;
    if (append->src_dtype == KV8_F32 && !prepares) return source;
    const kv8_layer *const layer = &job->cache->layers[job->layer];
    const kv8_status status =
        kv8_widen(job->cache->isa, append->src_dtype, source,
                  (size_t)kv8_row_num_values(&layer->plane[kv].format), scratch);
    assert(status == KV8_OK);
    (void)status;
    if (prepares) job->prepare(job->cookie, row, head, scratch);
    return scratch;
}

static void count(kv8_cache *cache, int kv, int32_t layer, int32_t head,
                  const kv8_narrow_counts *counts) {
    kv8_counters_cell *const cell = &cache->counters[kv8_head_index(cache, kv, layer, head)];
    if (counts->clips > 0)
        atomic_fetch_add_explicit(&cell->clips, counts->clips, memory_order_relaxed);
    if (counts->nans > 0)
        atomic_fetch_add_explicit(&cell->nans, counts->nans, memory_order_relaxed);
}

/* The request that owns a row: the last one whose rows begin at or before it. */
static int32_t request_of_row(const kv8_append *append, int32_t row) {
    int32_t low = 0, high = append->num_seqs; /* indptr[low] <= row < indptr[high] */
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (append->indptr[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void append_task(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const append_job *const job = cookie;
    kv8_cache *const cache = job->cache;
    const kv8_append *const append = job->append;
    const kv8_layer *const layer = &cache->layers[job->layer];
    const int32_t num_kv_heads = cache->shape.num_kv_heads, page_size = cache->shape.page_size;
    const int32_t head = (int32_t)(index % (size_t)num_kv_heads);
    const int32_t begin = (int32_t)(index / (size_t)num_kv_heads) * ROWS_PER_TASK;
    const int32_t end =
        (int32_t)kv8_min_i64((int64_t)begin + ROWS_PER_TASK, append->indptr[append->num_seqs]);
    _Alignas(KV8_ALIGNMENT) float scratch[KV8_MAX_HEAD_DIM];
    kv8_narrow_counts counts[2] = {{0}, {0}};
    int32_t request = request_of_row(append, begin);
    for (int32_t row = begin; row < end; row++) {
        while (row >= append->indptr[request + 1]) request++;
        const int32_t idx = kv8_seq_index(append->seqs[request]);
        const int32_t position =
            kv8_pages_length(cache->pages, idx) - (append->indptr[request + 1] - row);
        const int32_t page = kv8_pages_list(cache->pages, idx, layer->group)[position / page_size];
        const float *const scales = kv8_sequence_scales(cache, idx);
        for (int kv = 0; kv < 2; kv++) {
            const float scale = scales[kv8_head_index(cache, kv, job->layer, head)];
            const float *const values = source_head(job, kv, row, head, scratch);
            store_head(cache, &layer->plane[kv], page, position % page_size, head, scale, values,
                       scratch, &counts[kv]);
        }
    }
    for (int kv = 0; kv < 2; kv++) count(cache, kv, job->layer, head, &counts[kv]);
}

kv8_status kv8_cache_append_prepared(kv8_cache *cache, int32_t layer, const kv8_append *append,
                                     kv8_append_prepare prepare, void *cookie) {
    KV8_TRY(check_append(cache, layer, append));
    const int32_t num_rows = append->num_seqs == 0 ? 0 : append->indptr[append->num_seqs];
    if (num_rows == 0) return KV8_OK;
    append_job job = {
        .cache = cache, .append = append, .layer = layer, .prepare = prepare, .cookie = cookie};
    const int64_t num_heads = cache->shape.num_kv_heads;
    const int64_t elements =
        num_rows * num_heads * (cache->shape.k_head_dim + cache->shape.v_head_dim);
    const size_t num_tasks = (size_t)(kv8_ceil_div(num_rows, ROWS_PER_TASK) * num_heads);
    kv8_threads *const threads = elements < MIN_PARALLEL_ELEMENTS ? NULL : cache->threads;
    kv8_threads_run(threads, num_tasks, append_task, &job);
    return KV8_OK;
}

kv8_status kv8_cache_append(kv8_cache *cache, int32_t layer, const kv8_append *append) {
    return kv8_cache_append_prepared(cache, layer, append, NULL, NULL);
}

/* --- and back --- */

static void load_head(const kv8_cache *cache, const kv8_plane *plane, int32_t page, int32_t slot,
                      int32_t head, float scale, float *values_out) {
    const kv8_status status =
        kv8_row_widen(cache->isa, &plane->format, kv8_plane_row(plane, page, slot, head),
                      kv8_plane_scales(plane, page, slot, head), scale, values_out);
    assert(status == KV8_OK);
    (void)status;
}

kv8_status kv8_cache_read(const kv8_cache *cache, int32_t layer, kv8_seq seq, int32_t begin,
                          int32_t num_tokens, float *k_out, float *v_out) {
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    const int32_t length = kv8_pages_length(cache->pages, idx);
    if (begin < 0 || num_tokens < 0 || begin > length || num_tokens > length - begin)
        return kv8_fail(KV8_ERR_INVALID, "read: %d tokens from %d on, the sequence holds %d",
                        num_tokens, begin, length);
    const kv8_layer *const source = &cache->layers[layer];
    const int32_t held_from = kv8_pages_held_from(cache->pages, idx, source->group);
    if (num_tokens > 0 && begin < held_from)
        return kv8_fail(KV8_ERR_NOT_FOUND,
                        "read: token %d is behind the window, which is held from %d on", begin,
                        held_from);
    const int32_t *const pages = kv8_pages_list(cache->pages, idx, source->group);
    const float *const scales = kv8_sequence_scales(cache, idx);
    const int32_t page_size = cache->shape.page_size, num_kv_heads = cache->shape.num_kv_heads;
    float *const out[2] = {k_out, v_out};
    for (int kv = 0; kv < 2; kv++) {
        const kv8_plane *const plane = &source->plane[kv];
        const int32_t num_values = kv8_row_num_values(&plane->format);
        float *at = out[kv];
        for (int32_t i = 0; at != NULL && i < num_tokens; i++) {
            const int32_t page = pages[(begin + i) / page_size], slot = (begin + i) % page_size;
            for (int32_t head = 0; head < num_kv_heads; head++, at += num_values)
                load_head(cache, plane, page, slot, head,
                          scales[kv8_head_index(cache, kv, layer, head)], at);
        }
    }
    return KV8_OK;
}
