/* snapshot.c - one sequence as a file and back. Rows are stored token by token, so that page size
 * and layout of the two caches need not agree; heads, dims, dtypes and windows must.
 *
 *   offset 0    8 bytes  magic "kv8snap\n"
 *          8    u32      version, 1
 *         12    u32      flags: bit 0 = token ids follow
 *         16    4 x i32  num_layers, num_kv_heads, k_head_dim, v_head_dim
 *         32    i32      length: tokens
 *         36    u32      0
 *         40    per layer 4 x i32: k_dtype, v_dtype, window_left, first token stored
 *               per layer f32 k_scale[num_kv_heads], v_scale[num_kv_heads]
 *               i32 token_ids[length]                                       (flag bit 0)
 *               per layer, per token first..length-1: K rows [num_kv_heads], K
 *                 scales [num_kv_heads] of formats with scales apart, V rows, V scales
 *   end - 16    XXH3-128 over all bytes before, in canonical (big-endian) form
 *
 * Numbers are little-endian; dtypes are the numbers of kv8/formats.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define XXH_STATIC_LINKING_ONLY /* XXH3_state_t on the stack */
#include "snapshot.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "cache_state.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "codes of two and four bytes are stored as they lie in memory");

static const char MAGIC[8] = {'k', 'v', '8', 's', 'n', 'a', 'p', '\n'};
enum {
    VERSION = 1,
    FLAG_TOKEN_IDS = 1,
    HEADER_BYTES = 40,
    LAYER_BYTES = 16,
    CHECKSUM_BYTES = sizeof(XXH128_canonical_t)
};

typedef struct snapshot_header {
    char magic[8];
    uint32_t version, flags;
    int32_t num_layers, num_kv_heads, k_head_dim, v_head_dim, length;
    uint32_t zero;
} snapshot_header;
_Static_assert(sizeof(snapshot_header) == HEADER_BYTES, "no padding");

typedef struct snapshot_layer {
    int32_t k_dtype, v_dtype, window_left, first;
} snapshot_layer;
_Static_assert(sizeof(snapshot_layer) == LAYER_BYTES, "no padding");

/* --- save --- */

typedef struct save_stream {
    kv8_file_writer writer;
    XXH3_state_t hash;
} save_stream;

static kv8_status put(save_stream *stream, const void *data, size_t size) {
    XXH3_128bits_update(&stream->hash, data, size);
    return kv8_file_writer_write(&stream->writer, data, size);
}

static kv8_status put_header(const kv8_cache *cache, int32_t idx, save_stream *stream) {
    const kv8_cache_shape *const shape = &cache->shape;
    const int32_t *const token_ids = kv8_pages_token_ids(cache->pages, idx);
    const int32_t length = kv8_pages_length(cache->pages, idx);
    snapshot_header header = {.version = VERSION,
                              .flags = token_ids != NULL ? FLAG_TOKEN_IDS : 0,
                              .num_layers = shape->num_layers,
                              .num_kv_heads = shape->num_kv_heads,
                              .k_head_dim = shape->k_head_dim,
                              .v_head_dim = shape->v_head_dim,
                              .length = length};
    memcpy(header.magic, MAGIC, sizeof MAGIC);
    KV8_TRY(put(stream, &header, sizeof header));
    for (int32_t i = 0; i < shape->num_layers; i++) {
        const kv8_layer *const layer = &cache->layers[i];
        const snapshot_layer entry = {
            .k_dtype = (int32_t)kv8_plane_dtype(&layer->plane[KV8_K]),
            .v_dtype = (int32_t)kv8_plane_dtype(&layer->plane[KV8_V]),
            .window_left = layer->window_left,
            .first = kv8_pages_kept_from(cache->pages, idx, layer->group),
        };
        KV8_TRY(put(stream, &entry, sizeof entry));
    }
    const float *const scales = kv8_sequence_scales(cache, idx);
    const size_t scale_bytes = (size_t)shape->num_kv_heads * sizeof(float);
    for (int32_t i = 0; i < shape->num_layers; i++) {
        for (int kv = 0; kv < 2; kv++)
            KV8_TRY(put(stream, scales + kv8_head_index(cache, kv, i, 0), scale_bytes));
    }
    if (token_ids == NULL) return KV8_OK;
    return put(stream, token_ids, (size_t)length * sizeof *token_ids);
}

static kv8_status put_row(const kv8_cache *cache, const kv8_plane *plane, const uint8_t *page,
                          int32_t slot, save_stream *stream) {
    const int32_t num_kv_heads = cache->shape.num_kv_heads;
    for (int32_t head = 0; head < num_kv_heads; head++)
        KV8_TRY(put(stream, page + kv8_plane_row(plane, slot, head), plane->row_bytes));
    for (int32_t head = 0; plane->scale_bytes > 0 && head < num_kv_heads; head++)
        KV8_TRY(put(stream, page + kv8_plane_scales(plane, slot, head), plane->scale_bytes));
    return KV8_OK;
}

static kv8_status put_rows(const kv8_cache *cache, int32_t idx, save_stream *stream) {
    const int32_t page_size = cache->shape.page_size;
    const int32_t length = kv8_pages_length(cache->pages, idx);
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        const kv8_layer *const layer = &cache->layers[i];
        const int32_t *const pages = kv8_pages_list(cache->pages, idx, layer->group);
        const int32_t first = kv8_pages_kept_from(cache->pages, idx, layer->group);
        const uint8_t *page = NULL;
        for (int32_t token = first; token < length; token++) {
            if (token == first || token % page_size == 0)
                KV8_TRY(
                    cache->store->ops->read_page(cache->store, i, pages[token / page_size], &page));
            for (int kv = 0; kv < 2; kv++)
                KV8_TRY(put_row(cache, &layer->plane[kv], page, token % page_size, stream));
        }
    }
    return KV8_OK;
}

kv8_status kv8_cache_save(const kv8_cache *cache, kv8_seq seq, const char *path) {
    KV8_REQUIRE(cache, path);
    int32_t idx = 0;
    KV8_TRY(kv8_cache_find(cache, seq, &idx));
    save_stream stream;
    XXH3_128bits_reset(&stream.hash);
    KV8_TRY(kv8_file_writer_open(&stream.writer, path));
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(put_header(cache, idx, &stream));
    KV8_TRY_GOTO(put_rows(cache, idx, &stream));
    XXH128_canonical_t checksum;
    XXH128_canonicalFromHash(&checksum, XXH3_128bits_digest(&stream.hash));
    KV8_TRY_GOTO(kv8_file_writer_write(&stream.writer, &checksum, sizeof checksum));
    KV8_TRY_GOTO(kv8_file_writer_commit(&stream.writer));
    return KV8_OK;
fail:
    kv8_file_writer_abort(&stream.writer);
    return status;
}

/* --- load: the file against itself --- */

typedef struct snapshot {
    const char *name;
    const uint8_t *data;
    size_t size;
    snapshot_header header;
    size_t scales_offset, ids_offset, rows_offset; /* into data */
} snapshot;

static kv8_status corrupt(const snapshot *file, const char *reason) {
    return kv8_fail(KV8_ERR_CORRUPT, "%s: %s", file->name, reason);
}

static snapshot_layer layer_of(const snapshot *file, int32_t layer) {
    snapshot_layer entry;
    memcpy(&entry, file->data + HEADER_BYTES + (size_t)layer * LAYER_BYTES, sizeof entry);
    return entry;
}

/* Bytes of one stored row of K or V, all heads. */
static bool row_bytes(int32_t num_kv_heads, int32_t head_dim, int32_t dtype, size_t *bytes_out) {
    if (dtype <= KV8_DTYPE_NONE || dtype >= KV8_DTYPE_COUNT) return false;
    const kv8_row_format format = kv8_row_format_of((kv8_dtype)dtype, head_dim);
    return kv8_mul_size(kv8_row_total_bytes(&format), (size_t)num_kv_heads, bytes_out);
}

/* Adds count * bytes to *total. */
static bool add_bytes(size_t *total, size_t count, size_t bytes) {
    size_t product = 0;
    return kv8_mul_size(count, bytes, &product) && kv8_add_size(*total, product, total);
}

/* What a file of this header and layer table must measure. */
static kv8_status measure(snapshot *file, size_t *size_out) {
    const snapshot_header *const header = &file->header;
    const size_t num_layers = (size_t)header->num_layers, length = (size_t)header->length;
    size_t total = HEADER_BYTES;
    bool fits = add_bytes(&total, num_layers, LAYER_BYTES);
    if (!fits || total > file->size)
        return corrupt(file, "torn: the file ends inside the layer table");
    file->scales_offset = total;
    size_t scales = 0;
    fits = kv8_mul_size(num_layers * 2, (size_t)header->num_kv_heads, &scales) &&
           add_bytes(&total, scales, sizeof(float));
    file->ids_offset = total;
    if (header->flags & FLAG_TOKEN_IDS) fits = fits && add_bytes(&total, length, sizeof(int32_t));
    file->rows_offset = total;
    for (int32_t i = 0; fits && i < header->num_layers; i++) {
        const snapshot_layer layer = layer_of(file, i);
        size_t k_bytes = 0, v_bytes = 0;
        if (layer.first < 0 || layer.first > header->length ||
            !row_bytes(header->num_kv_heads, header->k_head_dim, layer.k_dtype, &k_bytes) ||
            !row_bytes(header->num_kv_heads, header->v_head_dim, layer.v_dtype, &v_bytes))
            return kv8_fail(
                KV8_ERR_CORRUPT, "%s: layer %d has dtypes %d and %d and begins at token %d of %d",
                file->name, i, layer.k_dtype, layer.v_dtype, layer.first, header->length);
        const size_t tokens = length - (size_t)layer.first;
        fits = add_bytes(&total, tokens, k_bytes) && add_bytes(&total, tokens, v_bytes);
    }
    fits = fits && kv8_add_size(total, CHECKSUM_BYTES, &total);
    if (!fits) return corrupt(file, "the header's sizes overflow");
    *size_out = total;
    return KV8_OK;
}

/* Magic, version, size, checksum: the file is whole and as it was written. */
static kv8_status check_file(snapshot *file) {
    if (file->size < sizeof MAGIC || memcmp(file->data, MAGIC, sizeof MAGIC) != 0)
        return corrupt(file, "not a kv8 snapshot");
    if (file->size < HEADER_BYTES) return corrupt(file, "torn: the file ends inside its header");
    memcpy(&file->header, file->data, sizeof file->header);
    const snapshot_header *const header = &file->header;
    if (header->version != VERSION)
        return kv8_fail(KV8_ERR_CORRUPT, "%s: snapshot version is %u, this build reads %d",
                        file->name, header->version, (int)VERSION);
    if (header->flags > FLAG_TOKEN_IDS || header->zero != 0 || header->num_layers < 1 ||
        header->num_kv_heads < 1 || header->k_head_dim < 1 ||
        header->k_head_dim > KV8_MAX_ROW_VALUES || header->v_head_dim < 1 ||
        header->v_head_dim > KV8_MAX_ROW_VALUES || header->length < 0)
        return corrupt(file, "the header holds impossible values");
    size_t size = 0;
    KV8_TRY(measure(file, &size));
    if (size != file->size)
        return kv8_fail(KV8_ERR_CORRUPT, "%s: %s: %zu bytes, its header says %zu", file->name,
                        file->size < size ? "torn" : "too long", file->size, size);
    XXH128_canonical_t stored;
    memcpy(&stored, file->data + size - CHECKSUM_BYTES, sizeof stored);
    const XXH128_hash_t actual = XXH3_128bits(file->data, size - CHECKSUM_BYTES);
    if (!XXH128_isEqual(XXH128_hashFromCanonical(&stored), actual))
        return corrupt(file, "altered: the checksum does not match");
    return KV8_OK;
}

/* --- load: the file against the cache --- */

static kv8_status check_same(const snapshot *file, const char *what, int32_t file_value,
                             int32_t cache_value) {
    if (file_value == cache_value) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s: the snapshot's %s is %d, the cache's %d", file->name,
                    what, file_value, cache_value);
}

static kv8_status check_layer(const kv8_cache *cache, const snapshot *file, int32_t i) {
    const kv8_layer *const layer = &cache->layers[i];
    const snapshot_layer entry = layer_of(file, i);
    const int32_t stored[2] = {entry.k_dtype, entry.v_dtype};
    for (int kv = 0; kv < 2; kv++) {
        if (stored[kv] != (int32_t)kv8_plane_dtype(&layer->plane[kv]))
            return kv8_fail(KV8_ERR_INVALID, "%s: layer %d stores %s as %s, the cache as %s",
                            file->name, i, kv == KV8_K ? "K" : "V",
                            kv8_dtype_name((kv8_dtype)stored[kv]),
                            kv8_dtype_name(kv8_plane_dtype(&layer->plane[kv])));
    }
    if (entry.window_left != layer->window_left)
        return kv8_fail(KV8_ERR_INVALID, "%s: layer %d has window_left %d, the cache's has %d",
                        file->name, i, entry.window_left, layer->window_left);
    const int64_t needed = entry.window_left < 0
                               ? 0
                               : kv8_max_i64(0, (int64_t)file->header.length - entry.window_left);
    const int32_t first_of_group = layer_of(file, cache->first_layer[layer->group]).first;
    if (entry.first > needed || entry.first != first_of_group)
        return kv8_fail(KV8_ERR_CORRUPT,
                        "%s: layer %d begins at token %d, its window needs token %lld", file->name,
                        i, entry.first, (long long)needed);
    for (int32_t j = 0; j < 2 * cache->shape.num_kv_heads; j++) {
        float scale;
        const size_t index = (size_t)i * 2 * (size_t)cache->shape.num_kv_heads + (size_t)j;
        memcpy(&scale, file->data + file->scales_offset + index * sizeof scale, sizeof scale);
        if (!(isfinite(scale) && scale > 0))
            return kv8_fail(KV8_ERR_CORRUPT, "%s: a scale of layer %d is %g", file->name, i,
                            (double)scale);
    }
    return KV8_OK;
}

/* What the file stores is what the cache stores. */
static kv8_status check_fit(const kv8_cache *cache, const snapshot *file) {
    const snapshot_header *const header = &file->header;
    const kv8_cache_shape *const shape = &cache->shape;
    KV8_TRY(check_same(file, "num_layers", header->num_layers, shape->num_layers));
    KV8_TRY(check_same(file, "num_kv_heads", header->num_kv_heads, shape->num_kv_heads));
    KV8_TRY(check_same(file, "k_head_dim", header->k_head_dim, shape->k_head_dim));
    KV8_TRY(check_same(file, "v_head_dim", header->v_head_dim, shape->v_head_dim));
    for (int32_t i = 0; i < shape->num_layers; i++) KV8_TRY(check_layer(cache, file, i));
    return KV8_OK;
}

/* --- load: filling --- */

static const uint8_t *get(const uint8_t *from, void *to, size_t size) {
    memcpy(to, from, size);
    return from + size;
}

/* One row of every head. */
static const uint8_t *get_row(const kv8_cache *cache, const kv8_plane *plane, const uint8_t *at,
                              uint8_t *page, int32_t slot) {
    const int32_t num_kv_heads = cache->shape.num_kv_heads;
    for (int32_t head = 0; head < num_kv_heads; head++)
        at = get(at, page + kv8_plane_row(plane, slot, head), plane->row_bytes);
    for (int32_t head = 0; plane->scale_bytes > 0 && head < num_kv_heads; head++)
        at = get(at, page + kv8_plane_scales(plane, slot, head), plane->scale_bytes);
    return at;
}

static kv8_status fill_rows(kv8_cache *cache, int32_t idx, const uint8_t *at) {
    kv8_store *const store = cache->store;
    const int32_t length = kv8_pages_length(cache->pages, idx);
    const int32_t page_size = cache->shape.page_size;
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        const kv8_layer *const layer = &cache->layers[i];
        const int32_t *const pages = kv8_pages_list(cache->pages, idx, layer->group);
        const int32_t first = kv8_pages_held_from(cache->pages, idx, layer->group);
        uint8_t *page = NULL;
        for (int32_t token = first; token < length; token++) {
            const int32_t id = pages[token / page_size], slot = token % page_size;
            if (page == NULL) KV8_TRY(store->ops->edit_page(store, i, id, &page));
            for (int kv = 0; kv < 2; kv++) at = get_row(cache, &layer->plane[kv], at, page, slot);
            if (slot + 1 < page_size && token + 1 < length) continue;
            KV8_TRY(store->ops->write_page(store, i, id, page));
            page = NULL;
        }
    }
    return KV8_OK;
}

static kv8_status fill(kv8_cache *cache, int32_t idx, const snapshot *file) {
    float *const scales = kv8_sequence_scales(cache, idx);
    const uint8_t *at = file->data + file->scales_offset;
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        for (int kv = 0; kv < 2; kv++)
            at = get(at, scales + kv8_head_index(cache, kv, i, 0),
                     (size_t)cache->shape.num_kv_heads * sizeof(float));
    }
    kv8_cache_settle_scales(cache, idx);
    return fill_rows(cache, idx, file->data + file->rows_offset);
}

typedef struct restoring {
    const kv8_cache *cache;
    const snapshot *file;
} restoring;

static int32_t first_of_group(const void *cookie, int32_t group) {
    const restoring *const r = cookie;
    return layer_of(r->file, r->cache->first_layer[group]).first;
}

kv8_status kv8_cache_load_bytes(kv8_cache *cache, const uint8_t *data, size_t size,
                                const char *name, kv8_seq *seq_out) {
    snapshot file = {.name = name, .data = data, .size = size};
    KV8_TRY(check_file(&file));
    KV8_TRY(check_fit(cache, &file));
    const restoring r = {cache, &file};
    const bool has_ids = (file.header.flags & FLAG_TOKEN_IDS) != 0;
    kv8_seq seq = KV8_SEQ_NONE;
    kv8_status status =
        kv8_pages_seq_restore(cache->pages, file.header.length,
                              has_ids ? data + file.ids_offset : NULL, first_of_group, &r, &seq);
    if (status != KV8_OK) return kv8_fail_within(status, "%s", name);
    status = fill(cache, kv8_seq_index(seq), &file);
    if (status != KV8_OK) {
        KV8_MUST(kv8_cache_seq_destroy(cache, seq));
        return status;
    }
    *seq_out = seq;
    return KV8_OK;
}

kv8_status kv8_cache_load(kv8_cache *cache, const char *path, kv8_seq *seq_out) {
    KV8_REQUIRE(cache, path, seq_out);
    kv8_file_map map;
    KV8_TRY(kv8_file_map_open(&map, path));
    const kv8_status status = kv8_cache_load_bytes(cache, map.data, map.size, path, seq_out);
    kv8_file_map_close(&map);
    return status;
}
