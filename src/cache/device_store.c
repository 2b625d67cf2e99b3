/* device_store.c - pages in a GPU's memory. Everything it does is work on the cache's stream, in
 * the order of the calls: copies of pages, append kernels, tables.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "append_device.h"
#include "cache_state.h"
#include "device_tables.h"

enum {
    ROWS_PER_LAUNCH = 1 << 14,
    NUM_SOURCES = KV8_F16 + 1 /* dtypes that rows come in: f32, bf16, f16 */
};

typedef struct device_store {
    kv8_store base;
    kv8_cache *cache;
    kv8_device *device;
    kv8_stream *stream;
    kv8_staging staging;
    uint64_t *counters;  /* device, [num_layers, 2, num_kv_heads, 2 (clips, NaN)] */
    float *layer_scales; /* device, the cache's */
    float *scales;       /* device, [num_layers, 2, max_seqs, num_kv_heads] */
    kv8_device_tables *tables;
    kv8_append_kernels kernels[NUM_SOURCES];
    bool has_kernels[NUM_SOURCES];
} device_store;

static device_store *on_device(kv8_store *store) {
    return (device_store *)store;
}

/* --- sizes --- */

static size_t num_heads(const kv8_cache *cache) {
    return (size_t)cache->shape.num_kv_heads;
}
static size_t counters_bytes(const kv8_cache *cache) {
    return 2 * kv8_num_scales(cache) * sizeof(uint64_t);
}
static uint64_t *counters_of(const device_store *store, int32_t layer, int kv) {
    return store->counters + (2 * (size_t)layer + (size_t)kv) * num_heads(store->cache) * 2;
}
/* Scales of max_seqs sequences of one layer, K or V. */
static size_t scales_bytes(const kv8_cache *cache) {
    return (size_t)cache->shape.max_seqs * num_heads(cache) * sizeof(float);
}
static size_t indptr_bytes(const kv8_cache *cache) {
    return ((size_t)cache->shape.max_seqs + 1) * sizeof(int32_t);
}

static size_t max_size(size_t a, size_t b) {
    return a > b ? a : b;
}
/* The largest thing that is staged in one piece. */
static size_t largest_piece(const kv8_cache *cache) {
    size_t bytes = kv8_device_tables_staged_bytes(cache);
    for (int32_t i = 0; i < cache->shape.num_layers; i++)
        bytes = max_size(bytes, cache->layers[i].page_bytes);
    bytes = max_size(bytes, counters_bytes(cache));
    return max_size(bytes, ROWS_PER_LAUNCH * sizeof(int64_t) + indptr_bytes(cache) +
                               2 * scales_bytes(cache) + 4 * KV8_STAGING_ALIGNMENT);
}

/* --- pages --- */

static uint8_t *page_at(kv8_store *store, int32_t layer_idx, int32_t page) {
    const kv8_layer *const layer = &on_device(store)->cache->layers[layer_idx];
    return layer->data + (size_t)page * layer->page_bytes;
}

static kv8_status copy_page(kv8_store *store, int32_t layer, int32_t to, int32_t from) {
    return kv8_stream_copy(on_device(store)->stream, page_at(store, layer, to),
                           page_at(store, layer, from),
                           on_device(store)->cache->layers[layer].page_bytes);
}

static kv8_status read_page(kv8_store *store, int32_t layer, int32_t page,
                            const uint8_t **bytes_out) {
    device_store *const own = on_device(store);
    kv8_staged piece;
    KV8_TRY(kv8_staging_stage(&own->staging, own->cache->layers[layer].page_bytes, &piece));
    KV8_TRY(kv8_stream_copy(own->stream, piece.host, page_at(store, layer, page), piece.bytes));
    KV8_TRY(kv8_stream_synchronize(own->stream));
    own->staging.used = 0;
    *bytes_out = piece.host;
    return KV8_OK;
}

static kv8_status edit_page(kv8_store *store, int32_t layer, int32_t page, uint8_t **bytes_out) {
    (void)page;
    device_store *const own = on_device(store);
    kv8_staged piece;
    KV8_TRY(kv8_staging_stage(&own->staging, own->cache->layers[layer].page_bytes, &piece));
    memset(piece.host, 0, piece.bytes);
    *bytes_out = piece.host;
    return KV8_OK;
}

static kv8_status write_page(kv8_store *store, int32_t layer, int32_t page, const uint8_t *bytes) {
    return kv8_stream_copy(on_device(store)->stream, page_at(store, layer, page), bytes,
                           on_device(store)->cache->layers[layer].page_bytes);
}

/* --- append --- */

/* What one launch needs beside the rows, in one staged piece. */
typedef struct launch_tables {
    int64_t *slot_mapping; /* [num_rows] */
    int32_t *indptr;       /* [num_seqs + 1], of the launch's rows */
    float *scale[2];       /* [num_seqs, num_kv_heads] */
} launch_tables;

/* base NULL: only the bytes are asked for. */
static launch_tables tables_at(uint8_t *base, int32_t num_rows, int32_t num_seqs, size_t heads,
                               size_t *bytes_out) {
    const size_t slots = kv8_round_up((size_t)num_rows * sizeof(int64_t), KV8_STAGING_ALIGNMENT);
    const size_t indptr =
        kv8_round_up(((size_t)num_seqs + 1) * sizeof(int32_t), KV8_STAGING_ALIGNMENT);
    const size_t scale =
        kv8_round_up((size_t)num_seqs * heads * sizeof(float), KV8_STAGING_ALIGNMENT);
    *bytes_out = slots + indptr + 2 * scale;
    if (base == NULL) return (launch_tables){0};
    void *const at[4] = {base, base + slots, base + slots + indptr, base + slots + indptr + scale};
    return (launch_tables){at[0], at[1], {at[2], at[3]}};
}

static void fill_tables(const kv8_cache *cache, int32_t layer, const kv8_append *rows,
                        int32_t begin, int32_t end, const launch_tables *out) {
    const int32_t group = cache->layers[layer].group;
    const size_t heads = num_heads(cache);
    for (int32_t i = 0; i <= rows->num_seqs; i++) {
        const int64_t clipped = kv8_max_i64(begin, kv8_min_i64(rows->indptr[i], end));
        out->indptr[i] = (int32_t)clipped - begin;
    }
    for (int32_t i = 0; i < rows->num_seqs; i++) {
        for (int32_t j = out->indptr[i]; j < out->indptr[i + 1]; j++) {
            const kv8_row_place place = kv8_cache_place(cache, rows, group, begin + j, i);
            out->slot_mapping[j] = place.page * cache->shape.page_size + place.slot;
        }
        const float *const scales = kv8_sequence_scales(cache, kv8_seq_index(rows->seqs[i]));
        for (int kv = 0; kv < 2; kv++)
            memcpy(out->scale[kv] + (size_t)i * heads, scales + kv8_head_index(cache, kv, layer, 0),
                   heads * sizeof(float));
    }
}

/* Rows [begin, end) of an append. */
static kv8_status launch(device_store *store, int32_t layer_idx, const kv8_append *rows,
                         int32_t begin, int32_t end) {
    const kv8_cache *const cache = store->cache;
    const kv8_layer *const layer = &cache->layers[layer_idx];
    const size_t element = kv8_dtype_size(rows->src_dtype);
    size_t bytes = 0;
    kv8_staged piece;
    tables_at(NULL, end - begin, rows->num_seqs, num_heads(cache), &bytes);
    KV8_TRY(kv8_staging_stage(&store->staging, bytes, &piece));
    const launch_tables filled =
        tables_at(piece.host, end - begin, rows->num_seqs, num_heads(cache), &bytes);
    fill_tables(cache, layer_idx, rows, begin, end, &filled);
    KV8_TRY(kv8_staging_send(&store->staging, &piece));
    const launch_tables sent =
        tables_at(piece.device, end - begin, rows->num_seqs, num_heads(cache), &bytes);
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = cache->shape.num_kv_heads;
    spec.k_head_dim = cache->shape.k_head_dim;
    spec.v_head_dim = cache->shape.v_head_dim;
    spec.page_size = cache->shape.page_size;
    spec.src_dtype = rows->src_dtype;
    spec.k_dtype = kv8_plane_dtype(&layer->plane[KV8_K]);
    spec.v_dtype = kv8_plane_dtype(&layer->plane[KV8_V]);
    kv8_append_inputs in = {.args = KV8_APPEND_ARGS_INIT, .pages = KV8_PAGE_TABLE_INIT};
    in.args.batch = rows->num_seqs;
    in.args.max_rows = end - begin;
    in.args.indptr = sent.indptr;
    in.args.slot_mapping = sent.slot_mapping;
    in.args.k = (const uint8_t *)rows->k + begin * rows->k_stride_row * (int64_t)element;
    in.args.k_stride_row = rows->k_stride_row;
    in.args.k_stride_head = rows->k_stride_head;
    in.args.v = (const uint8_t *)rows->v + begin * rows->v_stride_row * (int64_t)element;
    in.args.v_stride_row = rows->v_stride_row;
    in.args.v_stride_head = rows->v_stride_head;
    in.args.k_scale = sent.scale[KV8_K];
    in.args.v_scale = sent.scale[KV8_V];
    in.args.scale_stride_request = cache->shape.num_kv_heads;
    in.args.scale_stride_head = 1;
    in.args.cos_sin =
        rows->cos_sin == NULL ? NULL : rows->cos_sin + (int64_t)begin * cache->shape.k_head_dim;
    in.args.interleaved = rows->interleaved;
    in.args.counters = counters_of(store, layer_idx, KV8_K);
    in.pool[KV8_K] = kv8_cache_paged(cache, layer_idx, KV8_K);
    in.pool[KV8_V] = kv8_cache_paged(cache, layer_idx, KV8_V);
    return kv8_append_kernels_launch(&store->kernels[rows->src_dtype], store->stream, &spec, &in);
}

static kv8_status append(kv8_store *store, int32_t layer, const kv8_append *rows) {
    device_store *const own = on_device(store);
    if (!own->has_kernels[rows->src_dtype])
        KV8_TRY(
            kv8_append_kernels_get(&own->kernels[rows->src_dtype], own->device, rows->src_dtype));
    own->has_kernels[rows->src_dtype] = true;
    const int32_t num_rows = rows->indptr[rows->num_seqs];
    for (int32_t begin = 0; begin < num_rows; begin += ROWS_PER_LAUNCH) {
        const int32_t end = (int32_t)kv8_min_i64((int64_t)begin + ROWS_PER_LAUNCH, num_rows);
        KV8_TRY(launch(own, layer, rows, begin, end));
        if (end == num_rows) break; /* begin + ROWS_PER_LAUNCH might not fit */
    }
    return KV8_OK;
}

/* --- counters --- */

static kv8_status read_counters(kv8_store *store, const uint64_t **counters_out) {
    device_store *const own = on_device(store);
    kv8_staged piece;
    KV8_TRY(kv8_staging_stage(&own->staging, counters_bytes(own->cache), &piece));
    KV8_TRY(kv8_stream_copy(own->stream, piece.host, own->counters, piece.bytes));
    KV8_TRY(kv8_stream_synchronize(own->stream));
    own->staging.used = 0;
    const void *const counters = piece.host;
    *counters_out = counters;
    return KV8_OK;
}

static kv8_status reset_counters(kv8_store *store) {
    device_store *const own = on_device(store);
    return kv8_stream_fill(own->stream, own->counters, 0, counters_bytes(own->cache));
}

/* --- tables for attention --- */

static kv8_status check_num_seqs(const kv8_cache *cache, int32_t num_seqs) {
    if (num_seqs >= 0 && num_seqs <= cache->shape.max_seqs) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "cache: num_seqs is %d, must be 0 to max_seqs %d", num_seqs,
                    cache->shape.max_seqs);
}

static kv8_status load_tables(kv8_store *store, int32_t first, int32_t num_groups,
                              const kv8_seq *seqs, int32_t num_seqs, bool lists_alone) {
    device_store *const own = on_device(store);
    KV8_TRY(check_num_seqs(own->cache, num_seqs));
    return kv8_device_tables_load(own->tables, first, num_groups, seqs, num_seqs, lists_alone);
}

static kv8_status scales(kv8_store *store, int32_t layer, const kv8_seq *seqs, int32_t num_seqs,
                         const float **k_scale_out, const float **v_scale_out) {
    device_store *const own = on_device(store);
    const kv8_cache *const cache = own->cache;
    KV8_TRY(check_num_seqs(cache, num_seqs));
    const size_t each = scales_bytes(cache) / sizeof(float);
    const size_t used = (size_t)num_seqs * num_heads(cache);
    float *const fixed = own->scales + 2 * (size_t)layer * each;
    *k_scale_out = fixed;
    *v_scale_out = fixed + each;
    if (num_seqs == 0) return KV8_OK;
    kv8_staged piece;
    KV8_TRY(kv8_staging_stage(&own->staging, 2 * used * sizeof(float), &piece));
    void *const host = piece.host;
    float *const k = host;
    KV8_TRY(kv8_cache_scales(cache, layer, seqs, num_seqs, k, k + used));
    KV8_TRY(kv8_stream_copy(own->stream, fixed, k, used * sizeof(float)));
    return kv8_stream_copy(own->stream, fixed + each, k + used, used * sizeof(float));
}

static kv8_cache_device_layer device_layer(kv8_store *store, int32_t layer) {
    const device_store *const own = on_device(store);
    const kv8_cache *const cache = own->cache;
    return (kv8_cache_device_layer){
        .k_scale = own->layer_scales + kv8_head_index(cache, KV8_K, layer, 0),
        .v_scale = own->layer_scales + kv8_head_index(cache, KV8_V, layer, 0),
        .counters = counters_of(own, layer, KV8_K),
        .pages = kv8_device_tables_get(own->tables, cache->layers[layer].group),
    };
}

/* --- create --- */

static void destroy(kv8_store *store) {
    device_store *const own = on_device(store);
    kv8_cache *const cache = own->cache;
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        kv8_device_free(own->device, cache->layers[i].data);
        cache->layers[i].data = NULL;
    }
    kv8_device_tables_destroy(own->tables);
    kv8_device_free(own->device, own->scales);
    kv8_device_free(own->device, own->layer_scales);
    kv8_device_free(own->device, own->counters);
    kv8_staging_release(&own->staging);
    kv8_release(cache->allocator, own, 1, sizeof *own);
}

static kv8_status create_scales(device_store *store) {
    const kv8_cache *const cache = store->cache;
    void *memory = NULL;
    KV8_TRY(kv8_take_zeros(store->stream, 2 * (size_t)cache->shape.num_layers, scales_bytes(cache),
                           &memory));
    store->scales = memory;
    const size_t bytes = kv8_num_scales(cache) * sizeof(float);
    KV8_TRY(kv8_device_alloc(store->device, bytes, &memory));
    store->layer_scales = memory;
    return kv8_stream_copy(store->stream, store->layer_scales, cache->layer_scales, bytes);
}

static const kv8_store_ops device_ops = {
    .destroy = destroy,
    .copy_page = copy_page,
    .append = append,
    .read_page = read_page,
    .edit_page = edit_page,
    .write_page = write_page,
    .read_counters = read_counters,
    .reset_counters = reset_counters,
    .load_tables = load_tables,
    .scales = scales,
    .device_layer = device_layer,
};

/* All pages, before the first of them is taken. */
static kv8_status check_room(const kv8_cache *cache, kv8_device *device) {
    uint64_t available = 0, pages = 0;
    for (int32_t i = 0; i < cache->shape.num_layers; i++)
        pages += (uint64_t)kv8_pages_num_pages(cache->pages, cache->layers[i].group) *
                 cache->layers[i].page_bytes;
    KV8_TRY(kv8_device_available(device, &available));
    if (pages <= available) return KV8_OK;
    return kv8_fail(KV8_ERR_NO_MEMORY, "cache: its pages take %.2f GB, %s has %.2f GB free",
                    (double)pages * 1e-9, kv8_device_get_info(device)->name,
                    (double)available * 1e-9);
}

kv8_status kv8_device_store_create(kv8_store **out, kv8_cache *cache, const void *where) {
    const kv8_device_place *const place = where;
    *out = NULL;
    if (place->stream == NULL || kv8_stream_device(place->stream) != place->device)
        return kv8_fail(KV8_ERR_INVALID, "cache: stream is %s, must be the device's",
                        place->stream == NULL ? "NULL" : "another device's");
    void *memory = NULL;
    KV8_TRY(check_room(cache, place->device));
    KV8_TRY(kv8_alloc(cache->allocator, 1, sizeof(device_store), "cache store", &memory));
    device_store *const store = memory;
    *store = (device_store){
        .base = {&device_ops}, .cache = cache, .device = place->device, .stream = place->stream};
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_staging_take(&store->staging, store->stream, largest_piece(cache)));
    KV8_TRY_GOTO(kv8_take_zeros(store->stream, 1, counters_bytes(cache), &memory));
    store->counters = memory;
    KV8_TRY_GOTO(create_scales(store));
    KV8_TRY_GOTO(kv8_device_tables_create(&store->tables, cache, &store->staging));
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        kv8_layer *const layer = &cache->layers[i];
        KV8_TRY_GOTO(kv8_take_zeros(store->stream,
                                    (size_t)kv8_pages_num_pages(cache->pages, layer->group),
                                    layer->page_bytes, &memory));
        layer->data = memory;
    }
    *out = &store->base;
    return KV8_OK;
fail:
    destroy(&store->base);
    return status;
}
