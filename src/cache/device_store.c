/* device_store.c - pages in a GPU's memory. Everything it does is work on the cache's stream, in
 * the order of the calls: copies of pages, append kernels, tables. What the host sends goes through
 * *staging*: page-locked memory and as much device memory beside it, filled from the front; when it
 * is full, the stream is waited for and filling starts anew, so that nothing is overwritten that
 * the device has yet to read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "append_device.h"
#include "cache_state.h"

enum {
    ROWS_PER_LAUNCH = 1 << 14,
    MIN_STAGING = 1 << 18, /* of one piece */
    STAGING_ALIGNMENT = 256,
    NUM_SOURCES = KV8_F16 + 1 /* dtypes that rows come in: f32, bf16, f16 */
};

/* Page tables of a group at fixed addresses: [max_seqs + 1], [max_seqs] and [capacity] in a row. */
typedef struct group_tables {
    int32_t *indptr;
    kv8_seq *seqs; /* [num_seqs] of max_seqs: whose lists they have */
    int32_t num_seqs;
    uint64_t version; /* kv8_pages_lists_version of those; 0: none */
} group_tables;

typedef struct device_store {
    kv8_store base;
    kv8_cache *cache;
    kv8_device *device;
    kv8_stream *stream;
    uint8_t *staging_host, *staging_device;
    size_t staging_bytes, staging_used;
    uint64_t *counters;   /* device, [num_layers, 2, num_kv_heads, 2 (clips, NaN)] */
    float *layer_scales;  /* device, the cache's */
    float *scales;        /* device, [num_layers, 2, max_seqs, num_kv_heads] */
    group_tables *tables; /* [num_groups] */
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
static size_t table_capacity(const kv8_cache *cache) {
    return (size_t)cache->shape.max_seqs * (size_t)kv8_pages_longest_list(cache->pages);
}
static size_t table_bytes(const kv8_cache *cache) {
    return 2 * indptr_bytes(cache) + table_capacity(cache) * sizeof(int32_t);
}

static size_t max_size(size_t a, size_t b) {
    return a > b ? a : b;
}
/* Several of the largest thing that is staged in one piece, so that few are waited for. */
static size_t wanted_staging(const kv8_cache *cache) {
    size_t bytes = MIN_STAGING;
    for (int32_t i = 0; i < cache->shape.num_layers; i++)
        bytes = max_size(bytes, cache->layers[i].page_bytes);
    bytes = max_size(bytes, table_bytes(cache));
    bytes = max_size(bytes, counters_bytes(cache));
    bytes = max_size(bytes, ROWS_PER_LAUNCH * sizeof(int64_t) + indptr_bytes(cache) +
                                2 * scales_bytes(cache) + 4 * STAGING_ALIGNMENT);
    return 4 * kv8_round_up(bytes, STAGING_ALIGNMENT);
}

/* --- staging --- */

typedef struct staged {
    uint8_t *host, *device; /* the same bytes; the device's once they are sent */
    size_t bytes;
} staged;

static kv8_status stage(device_store *store, size_t bytes, staged *out) {
    const size_t taken = kv8_round_up(bytes, STAGING_ALIGNMENT);
    if (taken > store->staging_bytes - store->staging_used) {
        KV8_TRY(kv8_stream_synchronize(store->stream));
        store->staging_used = 0;
    }
    *out = (staged){store->staging_host + store->staging_used,
                    store->staging_device + store->staging_used, bytes};
    store->staging_used += taken;
    return KV8_OK;
}

/* Of what was staged last, the first bytes alone. */
static void shorten(device_store *store, staged *piece, size_t bytes) {
    store->staging_used -= kv8_round_up(piece->bytes, STAGING_ALIGNMENT);
    store->staging_used += kv8_round_up(bytes, STAGING_ALIGNMENT);
    piece->bytes = bytes;
}

static kv8_status send(device_store *store, const staged *piece) {
    return kv8_stream_copy(store->stream, piece->device, piece->host, piece->bytes);
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
    staged piece;
    KV8_TRY(stage(own, own->cache->layers[layer].page_bytes, &piece));
    KV8_TRY(kv8_stream_copy(own->stream, piece.host, page_at(store, layer, page), piece.bytes));
    KV8_TRY(kv8_stream_synchronize(own->stream));
    own->staging_used = 0;
    *bytes_out = piece.host;
    return KV8_OK;
}

static kv8_status edit_page(kv8_store *store, int32_t layer, int32_t page, uint8_t **bytes_out) {
    (void)page;
    device_store *const own = on_device(store);
    staged piece;
    KV8_TRY(stage(own, own->cache->layers[layer].page_bytes, &piece));
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
    const size_t slots = kv8_round_up((size_t)num_rows * sizeof(int64_t), STAGING_ALIGNMENT);
    const size_t indptr = kv8_round_up(((size_t)num_seqs + 1) * sizeof(int32_t), STAGING_ALIGNMENT);
    const size_t scale = kv8_round_up((size_t)num_seqs * heads * sizeof(float), STAGING_ALIGNMENT);
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
    staged piece;
    tables_at(NULL, end - begin, rows->num_seqs, num_heads(cache), &bytes);
    KV8_TRY(stage(store, bytes, &piece));
    const launch_tables filled =
        tables_at(piece.host, end - begin, rows->num_seqs, num_heads(cache), &bytes);
    fill_tables(cache, layer_idx, rows, begin, end, &filled);
    KV8_TRY(send(store, &piece));
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
    staged piece;
    KV8_TRY(stage(own, counters_bytes(own->cache), &piece));
    KV8_TRY(kv8_stream_copy(own->stream, piece.host, own->counters, piece.bytes));
    KV8_TRY(kv8_stream_synchronize(own->stream));
    own->staging_used = 0;
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

static bool has_lists(const group_tables *tables, const kv8_pages *pages, const kv8_seq *seqs,
                      int32_t num_seqs) {
    return num_seqs > 0 && tables->version == kv8_pages_lists_version(pages) &&
           tables->num_seqs == num_seqs &&
           memcmp(tables->seqs, seqs, (size_t)num_seqs * sizeof *seqs) == 0;
}

/* The tables in full. */
static kv8_status send_tables(device_store *own, int32_t group, const kv8_seq *seqs,
                              int32_t num_seqs) {
    const kv8_cache *const cache = own->cache;
    group_tables *const tables = &own->tables[group];
    const size_t last_at = (size_t)cache->shape.max_seqs + 1, indices_at = 2 * last_at;
    staged piece;
    KV8_TRY(stage(own, table_bytes(cache), &piece));
    void *const host = piece.host;
    int32_t *const indptr = host;
    KV8_TRY(kv8_pages_table(cache->pages, group, seqs, num_seqs, indptr, indptr + indices_at,
                            (int64_t)table_capacity(cache), indptr + last_at));
    for (int32_t b = num_seqs; b < cache->shape.max_seqs; b++) {
        indptr[b + 1] = indptr[num_seqs];
        indptr[last_at + (size_t)b] = 0;
    }
    shorten(own, &piece, (indices_at + (size_t)indptr[num_seqs]) * sizeof(int32_t));
    tables->version = 0;
    KV8_TRY(kv8_stream_copy(own->stream, tables->indptr, host, piece.bytes));
    if (num_seqs > 0) memcpy(tables->seqs, seqs, (size_t)num_seqs * sizeof *seqs);
    tables->num_seqs = num_seqs;
    tables->version = kv8_pages_lists_version(cache->pages);
    return KV8_OK;
}

static kv8_status send_last_lengths(device_store *own, int32_t group, const kv8_seq *seqs,
                                    int32_t num_seqs) {
    const kv8_cache *const cache = own->cache;
    int32_t *const fixed = own->tables[group].indptr + cache->shape.max_seqs + 1;
    staged piece;
    KV8_TRY(stage(own, (size_t)num_seqs * sizeof *fixed, &piece));
    void *const host = piece.host;
    kv8_pages_last_lengths(cache->pages, seqs, num_seqs, host);
    return kv8_stream_copy(own->stream, fixed, host, piece.bytes);
}

static kv8_status page_table(kv8_store *store, int32_t layer, const kv8_seq *seqs, int32_t num_seqs,
                             bool lists_alone, kv8_page_table *pages_out) {
    device_store *const own = on_device(store);
    const kv8_cache *const cache = own->cache;
    const int32_t group = cache->layers[layer].group;
    KV8_TRY(check_num_seqs(cache, num_seqs));
    const size_t last_at = (size_t)cache->shape.max_seqs + 1, indices_at = 2 * last_at;
    int32_t *const fixed = own->tables[group].indptr;
    if (!has_lists(&own->tables[group], cache->pages, seqs, num_seqs))
        KV8_TRY(send_tables(own, group, seqs, num_seqs));
    else if (!lists_alone)
        KV8_TRY(send_last_lengths(own, group, seqs, num_seqs));
    *pages_out = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    pages_out->page_indptr = fixed;
    pages_out->last_page_len = fixed + last_at;
    pages_out->page_indices = fixed + indices_at;
    return KV8_OK;
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
    staged piece;
    KV8_TRY(stage(own, 2 * used * sizeof(float), &piece));
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
    for (int32_t g = 0; own->tables != NULL && g < cache->num_groups; g++) {
        kv8_device_free(own->device, own->tables[g].indptr);
        kv8_release(cache->allocator, own->tables[g].seqs, (size_t)cache->shape.max_seqs,
                    sizeof(kv8_seq));
    }
    kv8_release(cache->allocator, own->tables, (size_t)cache->num_groups, sizeof(group_tables));
    kv8_device_free(own->device, own->scales);
    kv8_device_free(own->device, own->layer_scales);
    kv8_device_free(own->device, own->counters);
    kv8_device_free(own->device, own->staging_device);
    kv8_device_free_host(own->device, own->staging_host);
    kv8_release(cache->allocator, own, 1, sizeof *own);
}

/* Device memory that holds zeros. */
static kv8_status alloc_zeroed(const device_store *store, size_t count, size_t size, void **out) {
    size_t bytes = 0;
    *out = NULL;
    if (!kv8_mul_size(count, size, &bytes))
        return kv8_fail(KV8_ERR_INVALID, "cache: %zu times %zu bytes overflow", count, size);
    KV8_TRY(kv8_device_alloc(store->device, bytes, out));
    const kv8_status status = kv8_stream_fill(store->stream, *out, 0, bytes);
    if (status == KV8_OK) return KV8_OK;
    kv8_device_free(store->device, *out);
    *out = NULL;
    return status;
}

static kv8_status create_tables(device_store *store) {
    const kv8_cache *const cache = store->cache;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(cache->allocator, (size_t)cache->num_groups, sizeof(group_tables),
                      "device page tables", &memory));
    store->tables = memory;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        KV8_TRY(alloc_zeroed(store, 1, table_bytes(cache), &memory));
        store->tables[g].indptr = memory;
        KV8_TRY(kv8_alloc(cache->allocator, (size_t)cache->shape.max_seqs, sizeof(kv8_seq),
                          "sequences of device page tables", &memory));
        store->tables[g].seqs = memory;
    }
    KV8_TRY(alloc_zeroed(store, 2 * (size_t)cache->shape.num_layers, scales_bytes(cache), &memory));
    store->scales = memory;
    const size_t bytes = kv8_num_scales(cache) * sizeof(float);
    KV8_TRY(kv8_device_alloc(store->device, bytes, &memory));
    store->layer_scales = memory;
    return kv8_stream_copy(store->stream, store->layer_scales, cache->layer_scales, bytes);
}

static kv8_status create_staging(device_store *store) {
    void *memory = NULL;
    store->staging_bytes = wanted_staging(store->cache);
    KV8_TRY(kv8_device_alloc_host(store->device, store->staging_bytes, &memory));
    store->staging_host = memory;
    KV8_TRY(kv8_device_alloc(store->device, store->staging_bytes, &memory));
    store->staging_device = memory;
    return KV8_OK;
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
    .page_table = page_table,
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
    KV8_TRY_GOTO(create_staging(store));
    KV8_TRY_GOTO(alloc_zeroed(store, 1, counters_bytes(cache), &memory));
    store->counters = memory;
    KV8_TRY_GOTO(create_tables(store));
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        kv8_layer *const layer = &cache->layers[i];
        KV8_TRY_GOTO(alloc_zeroed(store, (size_t)kv8_pages_num_pages(cache->pages, layer->group),
                                  layer->page_bytes, &memory));
        layer->data = memory;
    }
    *out = &store->base;
    return KV8_OK;
fail:
    destroy(&store->base);
    return status;
}
