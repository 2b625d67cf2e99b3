/* cache.c - a cache's life: options checked, everything allocated, facts and counters read,
 * everything released. Moves no page, writes no row and knows no store: it is given one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "cache_state.h"

/* --- options --- */

static kv8_status check_range(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "cache: %s is %lld, must be %lld to %lld", name,
                    (long long)value, (long long)low, (long long)high);
}

static bool is_scale(float scale) {
    return isfinite(scale) && scale > 0;
}

static kv8_status check_scale_array(const char *name, int32_t layer, const float *scales,
                                    int32_t num_kv_heads) {
    for (int32_t head = 0; scales != NULL && head < num_kv_heads; head++) {
        if (!is_scale(scales[head]))
            return kv8_fail(KV8_ERR_INVALID,
                            "cache: %s of layer %d, head %d is %g, must be finite and > 0", name,
                            layer, head, (double)scales[head]);
    }
    return KV8_OK;
}

static kv8_status check_dtype(const char *name, int32_t layer, kv8_dtype dtype) {
    if (dtype > KV8_DTYPE_NONE && dtype < KV8_DTYPE_COUNT) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "cache: %s of layer %d is %d, which is no dtype", name, layer,
                    (int)dtype);
}

/* The array steps by the size that its first element was compiled with. */
static kv8_status read_layer(const kv8_cache_options *o, int32_t i, kv8_cache_layer *out) {
    const void *const at = (const uint8_t *)o->layers + (size_t)i * o->layers->struct_size;
    KV8_READ_STRUCT(kv8_cache_layer, out, at);
    return KV8_OK;
}

static kv8_status check_options(const kv8_cache_options *o) {
    KV8_TRY(check_range("num_layers", o->num_layers, 1, INT32_MAX));
    KV8_TRY(check_range("num_kv_heads", o->num_kv_heads, 1, INT32_MAX));
    KV8_TRY(check_range("k_head_dim", o->k_head_dim, 1, KV8_MAX_ROW_VALUES));
    KV8_TRY(check_range("v_head_dim", o->v_head_dim, 0, KV8_MAX_ROW_VALUES));
    KV8_TRY(check_range("page_size", o->page_size, 1, INT32_MAX));
    KV8_TRY(check_range("layout", o->layout, KV8_LAYOUT_NHD, KV8_LAYOUT_HND));
    /* One below the largest int32: the free list has an anchor beside the pages. */
    KV8_TRY(check_range("num_pages", o->num_pages, 1, INT32_MAX - 1));
    KV8_TRY(check_range("num_window_pages", o->num_window_pages, 0, INT32_MAX - 1));
    KV8_TRY(check_range("max_seqs", o->max_seqs, 1, INT32_MAX));
    KV8_TRY(check_range("max_seq_len", o->max_seq_len, 1, INT32_MAX));
    KV8_TRY(check_range("window_slack", o->window_slack, 0, INT32_MAX));
    if (o->layers == NULL) return kv8_fail(KV8_ERR_INVALID, "cache: layers is NULL");
    for (int32_t i = 0; i < o->num_layers; i++) {
        kv8_cache_layer layer;
        KV8_TRY(read_layer(o, i, &layer));
        KV8_TRY(check_dtype("k_dtype", i, layer.k_dtype));
        KV8_TRY(check_dtype("v_dtype", i, layer.v_dtype));
        if (layer.window_left < -1)
            return kv8_fail(KV8_ERR_INVALID, "cache: window_left of layer %d is %d, must be >= -1",
                            i, layer.window_left);
        KV8_TRY(check_scale_array("k_scale", i, layer.k_scale, o->num_kv_heads));
        KV8_TRY(check_scale_array("v_scale", i, layer.v_scale, o->num_kv_heads));
    }
    return KV8_OK;
}

/* --- create --- */

/* Entries of a multi-dimensional array, or an overflow refused by kv8_alloc. */
static size_t times(size_t a, size_t b) {
    size_t product = 0;
    return kv8_mul_size(a, b, &product) ? product : SIZE_MAX;
}

static size_t num_heads_total(const kv8_cache *cache) {
    return times(times(2, (size_t)cache->shape.num_layers), (size_t)cache->shape.num_kv_heads);
}
static size_t num_seq_scales(const kv8_cache *cache) {
    return times((size_t)cache->shape.max_seqs, num_heads_total(cache));
}

/* Gives every layer its group; a new one for every window_left not seen before. */
static void assign_groups(kv8_cache *cache) {
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        kv8_layer *const layer = &cache->layers[i];
        while (layer->group < cache->num_groups &&
               cache->layers[cache->first_layer[layer->group]].window_left != layer->window_left)
            layer->group++;
        if (layer->group == cache->num_groups) cache->first_layer[cache->num_groups++] = i;
    }
}

/* What extend asks for: the bytes of every layer of the group. */
static kv8_status copy_page(void *cookie, int32_t group, int32_t to, int32_t from) {
    const kv8_cache *const cache = cookie;
    kv8_store *const store = cache->store;
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        if (cache->layers[i].group == group) KV8_TRY(store->ops->copy_page(store, i, to, from));
    }
    return KV8_OK;
}

static kv8_status create_pages(kv8_cache *cache, const kv8_cache_options *o) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)cache->num_groups, sizeof(kv8_page_group_options),
                      "page group options", &memory));
    kv8_page_group_options *const groups = memory;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int32_t window_left = cache->layers[cache->first_layer[g]].window_left;
        const bool windowed = window_left >= 0 && o->num_window_pages > 0;
        groups[g] =
            (kv8_page_group_options){.window_left = window_left,
                                     .num_pages = windowed ? o->num_window_pages : o->num_pages,
                                     .layer = cache->first_layer[g]};
    }
    const kv8_pages_options options = {
        .allocator = cache->allocator,
        .page_size = o->page_size,
        .max_seqs = o->max_seqs,
        .max_seq_len = o->max_seq_len,
        .window_slack = o->window_slack,
        .num_groups = cache->num_groups,
        .groups = groups,
        .copy_page = copy_page,
        .cookie = cache,
    };
    const kv8_status status = kv8_pages_create(&cache->pages, &options);
    kv8_release(NULL, memory, (size_t)cache->num_groups, sizeof(kv8_page_group_options));
    return status;
}

/* Everything of a layer but its memory and its group. */
static kv8_status lay_out_layer(kv8_cache *cache, int32_t layer_idx, const kv8_cache_layer *o) {
    kv8_layer *const layer = &cache->layers[layer_idx];
    layer->window_left = o->window_left;
    const kv8_cache_shape *const shape = &cache->shape;
    const kv8_page_shape page = {.num_slots = shape->page_size,
                                 .num_heads = shape->num_kv_heads,
                                 .head_major = shape->layout == KV8_LAYOUT_HND};
    const kv8_row_format formats[2] = {kv8_row_format_of(o->k_dtype, shape->k_head_dim),
                                       kv8_row_format_of(o->v_dtype, shape->v_head_dim)};
    const float *const given[2] = {o->k_scale, o->v_scale};
    size_t page_bytes = 0;
    bool fits = true;
    for (int kv = 0; kv < 2; kv++) {
        kv8_plane *const plane = &layer->plane[kv];
        plane->format = formats[kv];
        plane->row_bytes = kv8_row_bytes(&plane->format);
        plane->scale_bytes = kv8_row_total_bytes(&plane->format) - plane->row_bytes;
        fits = fits &&
               kv8_row_lay_out(&plane->format, &page, &page_bytes, &plane->rows, &plane->scales);
        plane->scale = cache->layer_scales + kv8_head_index(cache, kv, layer_idx, 0);
        for (int32_t head = 0; head < shape->num_kv_heads; head++)
            plane->scale[head] = given[kv] == NULL ? 1.0f : given[kv][head];
    }
    for (int kv = 0; kv < 2; kv++) {
        kv8_plane *const plane = &layer->plane[kv];
        fits = fits && kv8_row_lay_out_scales(&plane->format, &page, &page_bytes, &plane->scales);
    }
    if (!fits)
        return kv8_fail(
            KV8_ERR_INVALID, "cache: a page of %d tokens, %d heads of %d + %d elements overflows",
            shape->page_size, shape->num_kv_heads, shape->k_head_dim, shape->v_head_dim);
    layer->page_bytes = kv8_round_up(page_bytes, KV8_ALIGNMENT);
    return KV8_OK;
}

kv8_status kv8_cache_create_in(kv8_cache **out, const kv8_cache_options *options,
                               kv8_store_maker *make_store, const void *where) {
    *out = NULL;
    KV8_TRY(check_options(options));
    kv8_isa isa = KV8_ISA_BEST;
    KV8_TRY(kv8_machine_resolve_isa(options->isa, &isa));
    const kv8_allocator *const allocator = options->allocator;
    const int32_t v_head_dim = options->v_head_dim > 0 ? options->v_head_dim : options->k_head_dim;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, 1, sizeof(kv8_cache), "cache", &memory));
    kv8_cache *const cache = memory;
    *cache = (kv8_cache){
        .allocator = allocator,
        .threads = options->threads,
        .isa = isa,
        .shape = {.num_layers = options->num_layers,
                  .num_kv_heads = options->num_kv_heads,
                  .k_head_dim = options->k_head_dim,
                  .v_head_dim = v_head_dim,
                  .page_size = options->page_size,
                  .max_seqs = options->max_seqs,
                  .max_seq_len = options->max_seq_len,
                  .window_slack = options->window_slack,
                  .layout = options->layout,
                  .device = options->device,
                  .stream = options->stream},
    };
    const size_t num_layers = (size_t)options->num_layers;
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_alloc(allocator, num_layers, sizeof(kv8_layer), "cache layers", &memory));
    cache->layers = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, num_layers, sizeof(int32_t), "cache groups", &memory));
    cache->first_layer = memory;
    KV8_TRY_GOTO(
        kv8_alloc(allocator, num_heads_total(cache), sizeof(float), "cache scales", &memory));
    cache->layer_scales = memory;
    KV8_TRY_GOTO(
        kv8_alloc(allocator, num_seq_scales(cache), sizeof(float), "sequence scales", &memory));
    cache->seq_scales = memory;
    KV8_TRY_GOTO(
        kv8_alloc(allocator, (size_t)options->max_seqs, sizeof(uint64_t), "batch marks", &memory));
    cache->batch_marks = memory;
    for (int32_t i = 0; i < options->num_layers; i++) {
        kv8_cache_layer layer;
        KV8_TRY_GOTO(read_layer(options, i, &layer));
        KV8_TRY_GOTO(lay_out_layer(cache, i, &layer));
    }
    assign_groups(cache);
    for (int32_t i = 0; i < options->max_seqs; i++) kv8_cache_drop_scales(cache, i);
    KV8_TRY_GOTO(create_pages(cache, options));
    KV8_TRY_GOTO(make_store(&cache->store, cache, where));
    *out = cache;
    return KV8_OK;
fail:
    kv8_cache_destroy(cache);
    return status;
}

void kv8_cache_destroy(kv8_cache *cache) {
    if (cache == NULL) return;
    const kv8_allocator *const allocator = cache->allocator;
    const size_t num_layers = (size_t)cache->shape.num_layers;
    const size_t max_seqs = (size_t)cache->shape.max_seqs;
    if (cache->store != NULL) cache->store->ops->destroy(cache->store);
    kv8_pages_destroy(cache->pages);
    kv8_release(allocator, cache->batch_marks, max_seqs, sizeof(uint64_t));
    kv8_release(allocator, cache->seq_scales, num_seq_scales(cache), sizeof(float));
    kv8_release(allocator, cache->layer_scales, num_heads_total(cache), sizeof(float));
    kv8_release(allocator, cache->first_layer, num_layers, sizeof(int32_t));
    kv8_release(allocator, cache->layers, num_layers, sizeof(kv8_layer));
    kv8_release(allocator, cache, 1, sizeof(kv8_cache));
}

/* --- facts --- */

void kv8_cache_drop_scales(kv8_cache *cache, int32_t idx) {
    memcpy(kv8_sequence_scales(cache, idx), cache->layer_scales,
           kv8_num_scales(cache) * sizeof(float));
}

kv8_pages *kv8_cache_pages(kv8_cache *cache) {
    return cache->pages;
}

kv8_status kv8_cache_check_layer(const kv8_cache *cache, int32_t layer) {
    if (cache == NULL) return kv8_fail(KV8_ERR_INVALID, "cache is NULL");
    if (layer >= 0 && layer < cache->shape.num_layers) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "cache: layer is %d, must be 0 to %d", layer,
                    cache->shape.num_layers - 1);
}

kv8_status kv8_cache_check_scales(const kv8_cache *cache, const char *name, int32_t layer,
                                  const float *scales) {
    return check_scale_array(name, layer, scales, cache->shape.num_kv_heads);
}

void kv8_cache_get_shape(const kv8_cache *cache, kv8_cache_shape *shape_out) {
    *shape_out = cache->shape;
}

kv8_status kv8_cache_get_layer(const kv8_cache *cache, int32_t layer, kv8_cache_layer *layer_out) {
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    const kv8_layer *const source = &cache->layers[layer];
    *layer_out = (kv8_cache_layer){
        .struct_size = sizeof *layer_out,
        .k_dtype = kv8_plane_dtype(&source->plane[KV8_K]),
        .v_dtype = kv8_plane_dtype(&source->plane[KV8_V]),
        .window_left = source->window_left,
        .k_scale = source->plane[KV8_K].scale,
        .v_scale = source->plane[KV8_V].scale,
    };
    return KV8_OK;
}

int kv8_cache_same_group(const kv8_cache *cache, int32_t layer_a, int32_t layer_b) {
    if (kv8_cache_check_layer(cache, layer_a) != KV8_OK ||
        kv8_cache_check_layer(cache, layer_b) != KV8_OK)
        return 0;
    return cache->layers[layer_a].group == cache->layers[layer_b].group;
}

kv8_status kv8_cache_get_stats(const kv8_cache *cache, kv8_cache_stats *stats_out) {
    KV8_REQUIRE(cache, stats_out);
    const kv8_pages *const pages = cache->pages;
    kv8_cache_stats stats = {.num_groups = cache->num_groups,
                             .num_seqs = kv8_pages_num_seqs(pages),
                             .page_size = cache->shape.page_size};
    for (int32_t g = 0; g < cache->num_groups; g++) {
        stats.pages_total += kv8_pages_num_pages(pages, g);
        stats.pages_free += kv8_pages_num_free(pages, g);
    }
    for (int32_t i = 0; i < cache->shape.num_layers; i++) {
        const kv8_layer *const layer = &cache->layers[i];
        uint64_t row = 0;
        for (int kv = 0; kv < 2; kv++) row += kv8_row_total_bytes(&layer->plane[kv].format);
        const uint64_t token = row * (uint64_t)cache->shape.num_kv_heads;
        stats.bytes += (uint64_t)kv8_pages_num_pages(pages, layer->group) * layer->page_bytes;
        stats.bytes_per_token += token;
        if (layer->window_left < 0) stats.bytes_per_token_unwindowed += token;
    }
    KV8_WRITE_STRUCT(kv8_cache_stats, stats_out, &stats);
    return KV8_OK;
}

/* --- counters --- */

/* Adds those of one head. */
static void add_counters(const kv8_cache *cache, const uint64_t *all, int32_t layer,
                         int32_t kv_head, kv8_cache_counters *sums) {
    const int64_t heads = cache->shape.num_kv_heads;
    const uint64_t *const k = all + 2 * (2 * layer * heads + kv_head), *const v = k + 2 * heads;
    sums->k_clips += k[0];
    sums->k_nans += k[1];
    sums->v_clips += v[0];
    sums->v_nans += v[1];
}

kv8_status kv8_cache_sum_counters(const kv8_cache *cache, kv8_cache_counters *sums_out) {
    const uint64_t *all = NULL;
    *sums_out = (kv8_cache_counters){0};
    KV8_TRY(cache->store->ops->read_counters(cache->store, &all));
    for (int32_t layer = 0; layer < cache->shape.num_layers; layer++) {
        for (int32_t head = 0; head < cache->shape.num_kv_heads; head++)
            add_counters(cache, all, layer, head, sums_out);
    }
    return KV8_OK;
}

kv8_status kv8_cache_get_counters(const kv8_cache *cache, int32_t layer, int32_t kv_head,
                                  kv8_cache_counters *counters_out) {
    KV8_REQUIRE(cache, counters_out);
    KV8_TRY(kv8_cache_check_layer(cache, layer));
    if (kv_head < 0 || kv_head >= cache->shape.num_kv_heads)
        return kv8_fail(KV8_ERR_INVALID, "cache: kv_head is %d, must be 0 to %d", kv_head,
                        cache->shape.num_kv_heads - 1);
    const uint64_t *all = NULL;
    KV8_TRY(cache->store->ops->read_counters(cache->store, &all));
    *counters_out = (kv8_cache_counters){0};
    add_counters(cache, all, layer, kv_head, counters_out);
    return KV8_OK;
}

kv8_status kv8_cache_reset_counters(kv8_cache *cache) {
    if (cache == NULL) return kv8_fail(KV8_ERR_INVALID, "cache is NULL");
    return cache->store->ops->reset_counters(cache->store);
}
