/* kv_setting.c - KV settings: from the words a user writes to dtypes by layer kind, and from those
 * to a cache for a model. It runs nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include <kv8/engine.h>

#include "formats_impl.h"
#include "model_impl.h"

/* --- words --- */

static kv8_status parse_dtype(const char *text, size_t length, kv8_dtype *dtype_out) {
    char name[16];
    if (length >= sizeof name) length = sizeof name - 1; /* longer than any name: still unknown */
    memcpy(name, text, length);
    name[length] = '\0';
    return kv8_dtype_from_name(name, dtype_out);
}

/* "e4m3" or "k=int8,v=e4m3", without an @. */
static kv8_status parse_pair(const char *text, size_t length, kv8_dtype *k_out, kv8_dtype *v_out) {
    if (length < 2 || memcmp(text, "k=", 2) != 0) {
        KV8_TRY(parse_dtype(text, length, k_out));
        *v_out = *k_out;
        return KV8_OK;
    }
    const char *const comma = memchr(text, ',', length);
    const size_t k_length = comma == NULL ? length : (size_t)(comma - text);
    if (length - k_length < 3 || memcmp(comma, ",v=", 3) != 0)
        return kv8_fail(KV8_ERR_INVALID, "\"k=\" needs its \"v=\", as in k=int8,v=e4m3");
    KV8_TRY(parse_dtype(text + 2, k_length - 2, k_out));
    return parse_dtype(comma + 3, length - k_length - 3, v_out);
}

static kv8_status parse_setting(const char *text, size_t length, kv8_kv_setting *setting_out) {
    kv8_kv_setting setting = {{0}};
    if (length == 0) return kv8_fail(KV8_ERR_INVALID, "empty KV setting");
    if (length >= sizeof setting.name)
        return kv8_fail(KV8_ERR_INVALID, "KV setting of %zu characters, the limit is %zu", length,
                        sizeof setting.name - 1);
    memcpy(setting.name, text, length);
    const char *const at = strchr(setting.name, '@');
    const size_t pair_length = at == NULL ? length : (size_t)(at - setting.name);
    kv8_dtype k = KV8_DTYPE_NONE, v = KV8_DTYPE_NONE;
    const kv8_status status = parse_pair(setting.name, pair_length, &k, &v);
    if (status != KV8_OK) return kv8_fail_within(status, "KV setting \"%s\"", setting.name);
    const bool full = at == NULL || strcmp(at, "@full") == 0;
    const bool sliding = at == NULL || strcmp(at, "@sliding") == 0;
    if (!full && !sliding)
        return kv8_fail(KV8_ERR_INVALID,
                        "KV setting \"%s\": layers are \"@full\" or \"@sliding\", not \"%s\"",
                        setting.name, at);
    setting.full_k = full ? k : KV8_BF16;
    setting.full_v = full ? v : KV8_BF16;
    setting.sliding_k = sliding ? k : KV8_BF16;
    setting.sliding_v = sliding ? v : KV8_BF16;
    *setting_out = setting;
    return KV8_OK;
}

kv8_status kv8_kv_setting_parse(const char *text, kv8_kv_setting *setting_out) {
    KV8_REQUIRE(text, setting_out);
    return parse_setting(text, strlen(text), setting_out);
}

/* Characters of the first setting of a list: up to the comma, but k=.. takes its v=.. along. */
static size_t setting_length(const char *text) {
    size_t length = strcspn(text, ",");
    if (strncmp(text, "k=", 2) == 0 && strncmp(text + length, ",v=", 3) == 0)
        length += 1 + strcspn(text + length + 1, ",");
    return length;
}

kv8_status kv8_kv_setting_parse_list(const char *text, kv8_kv_setting *settings_out,
                                     int32_t capacity, int32_t *num_out) {
    KV8_REQUIRE(text, settings_out, num_out);
    int32_t num = 0;
    for (const char *at = text;; at++) {
        const size_t length = setting_length(at);
        if (num == capacity)
            return kv8_fail(KV8_ERR_INVALID, "more than %d KV settings in \"%s\"", capacity, text);
        KV8_TRY(parse_setting(at, length, &settings_out[num]));
        num++;
        at += length;
        if (*at == '\0') break;
    }
    *num_out = num;
    return KV8_OK;
}

/* --- a cache --- */

enum { PAGE_SIZE = 16 }; /* tokens; small enough that a window of 128 frees its pages promptly */

/* Factor on a scale of `scales` for codes of `dtype`, 0 for dtypes that take none: the smallest
 * power of two under which e4m3's largest value does not clip. In e4m3fnuz absmax / 448 becomes
 * absmax / 224, within its 240; e5m2 reaches far beyond e4m3. */
static kv8_status scale_factor(kv8_dtype dtype, kv8_dtype scales, int32_t layer,
                               float *factor_out) {
    const bool takes_scale = kv8_is_float8(dtype);
    *factor_out = takes_scale ? 1 : 0;
    if (!takes_scale || dtype == scales) return KV8_OK;
    if (scales != KV8_DTYPE_NONE && scales != KV8_E4M3)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "layer %d stores %s, the scales are for %s", layer,
                        kv8_dtype_name(dtype), kv8_dtype_name(scales));
    while (kv8_dtype_max(KV8_E4M3) / *factor_out > kv8_dtype_max(dtype)) *factor_out *= 2;
    return KV8_OK;
}

/* The layer's scales in the dtype's measure: into `room`, or NULL for 1. */
static kv8_status layer_scale(const float *const *scales, kv8_dtype scale_dtype, int32_t layer,
                              kv8_dtype dtype, int32_t num_kv_heads, float *room,
                              const float **out) {
    float factor = 0;
    *out = NULL;
    if (scales == NULL) return KV8_OK;
    KV8_TRY(scale_factor(dtype, scale_dtype, layer, &factor));
    if (factor == 0) return KV8_OK;
    for (int32_t head = 0; head < num_kv_heads; head++) room[head] = scales[layer][head] * factor;
    *out = room;
    return KV8_OK;
}

/* Pages that num_seqs sequences of num_tokens in all may take: every one rounds up, and a forked
 * one holds a copied tail while it grows. */
static kv8_status count_pages(int64_t num_tokens, int64_t num_seqs, int32_t *pages_out) {
    const int64_t pages = kv8_ceil_div(num_tokens, PAGE_SIZE) + 2 * num_seqs;
    if (pages > INT32_MAX)
        return kv8_fail(KV8_ERR_INVALID, "a cache of %lld tokens, the limit is %lld",
                        (long long)num_tokens, (long long)INT32_MAX * PAGE_SIZE);
    *pages_out = (int32_t)pages;
    return KV8_OK;
}

/* A window group holds each sequence's window, one step, and, for prefixes that other requests find
 * again, a part of what the other layers keep. */
static kv8_status count_all_pages(const kv8_model_info *info, const kv8_kv_cache_options *options,
                                  kv8_cache_options *cache_options) {
    const int64_t num_seqs = cache_options->max_seqs;
    const int64_t num_tokens =
        options->num_tokens > 0 ? options->num_tokens : num_seqs * options->max_seq_len;
    KV8_TRY(count_pages(num_tokens, num_seqs, &cache_options->num_pages));
    enum { PREFIX_PART = 8 };
    const int64_t window_tokens = num_seqs * (kv8_max_i64(info->window_left, 0) + PAGE_SIZE) +
                                  options->step_tokens +
                                  (options->share_prefixes ? num_tokens / PREFIX_PART : 0);
    return count_pages(
        options->step_tokens > 0 ? kv8_min_i64(num_tokens, window_tokens) : num_tokens, num_seqs,
        &cache_options->num_window_pages);
}

/* Dtypes and scales of one layer; `room` holds its scales, K's then V's. */
static kv8_status fill_layer(const kv8_model *model, const kv8_kv_setting *setting,
                             const kv8_kv_cache_options *options, int32_t idx, int32_t num_kv_heads,
                             float *room, kv8_cache_layer *layer) {
    if (setting->layers != NULL) {
        layer->k_dtype = setting->layers[2 * idx];
        layer->v_dtype = setting->layers[2 * idx + 1];
    } else if (kv8_model_layer_window(model, idx) >= 0) {
        layer->k_dtype = setting->sliding_k;
        layer->v_dtype = setting->sliding_v;
    }
    KV8_TRY(layer_scale(options->k_scale, options->scale_dtype, idx, layer->k_dtype, num_kv_heads,
                        room, &layer->k_scale));
    return layer_scale(options->v_scale, options->scale_dtype, idx, layer->v_dtype, num_kv_heads,
                       room + num_kv_heads, &layer->v_scale);
}

kv8_status kv8_kv_setting_cache_create(kv8_cache **out, const kv8_model *model,
                                       const kv8_kv_setting *setting,
                                       const kv8_kv_cache_options *options) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(model, setting, options);
    KV8_TAKE_STRUCT(kv8_kv_cache_options, options);
    if (options->max_seq_len < 1)
        return kv8_fail(KV8_ERR_INVALID, "max_seq_len is %d, must be >= 1", options->max_seq_len);
    if (options->max_seqs < 0 || options->num_tokens < 0 || options->step_tokens < 0)
        return kv8_fail(KV8_ERR_INVALID, "max_seqs, num_tokens and step_tokens must not be < 0");
    const kv8_model_info info = *kv8_model_facts(model);
    const size_t num_layers = (size_t)info.num_layers, heads = (size_t)info.num_kv_heads;
    kv8_cache_options cache_options = KV8_CACHE_OPTIONS_INIT;
    cache_options.max_seqs = options->max_seqs > 0 ? options->max_seqs : 1;
    KV8_TRY(count_all_pages(&info, options, &cache_options));

    void *layers_memory = NULL, *scales_memory = NULL;
    kv8_status status =
        kv8_alloc(NULL, num_layers, sizeof(kv8_cache_layer), "cache layers", &layers_memory);
    if (status == KV8_OK)
        status = kv8_alloc(NULL, num_layers * 2 * heads, sizeof(float), "scales", &scales_memory);
    if (status == KV8_OK) {
        kv8_cache_layer *const layers = layers_memory;
        float *const scales = scales_memory;
        layers->struct_size = sizeof *layers;
        status =
            kv8_model_cache_layers(model, setting->full_k, setting->full_v, layers, &cache_options);
        for (int32_t i = 0; i < info.num_layers && status == KV8_OK; i++)
            status = fill_layer(model, setting, options, i, info.num_kv_heads,
                                scales + (size_t)i * 2 * heads, &layers[i]);
        cache_options.layers = layers;
        cache_options.threads = kv8_model_get_options(model)->threads;
        cache_options.device = kv8_model_get_options(model)->device;
        cache_options.stream = kv8_model_get_options(model)->stream;
        cache_options.page_size = PAGE_SIZE;
        cache_options.max_seq_len = options->max_seq_len;
        if (status == KV8_OK) status = kv8_cache_create(out, &cache_options);
    }
    kv8_release(NULL, scales_memory, num_layers * 2 * heads, sizeof(float));
    kv8_release(NULL, layers_memory, num_layers, sizeof(kv8_cache_layer));
    return status;
}

/* What a token takes, from a cache of one. */
static kv8_status measure_token(const kv8_model *model, const kv8_kv_setting *setting,
                                const kv8_kv_cache_options *options, kv8_cache_stats *one) {
    kv8_kv_cache_options small = *options;
    kv8_cache *cache = NULL;
    small.max_seqs = small.max_seq_len = 1;
    small.num_tokens = small.step_tokens = 0;
    kv8_status status = kv8_kv_setting_cache_create(&cache, model, setting, &small);
    if (status == KV8_OK) status = kv8_cache_get_stats(cache, one);
    kv8_cache_destroy(cache);
    return status;
}

kv8_status kv8_kv_setting_count_tokens(const kv8_model *model, const kv8_kv_setting *setting,
                                       const kv8_kv_cache_options *options, uint64_t bytes,
                                       int64_t *tokens_out) {
    KV8_REQUIRE(model, setting, options, tokens_out);
    KV8_TAKE_STRUCT(kv8_kv_cache_options, options);
    kv8_cache_stats one = KV8_CACHE_STATS_INIT;
    kv8_kv_cache_options tried = *options;
    KV8_TRY(measure_token(model, setting, options, &one));
    const uint64_t page = PAGE_SIZE * one.bytes_per_token_unwindowed;
    const uint64_t window_page = PAGE_SIZE * one.bytes_per_token - page;
    kv8_cache_options pages = {.max_seqs = options->max_seqs > 0 ? options->max_seqs : 1};
    int64_t fits = 0, most = (int64_t)pages.max_seqs * options->max_seq_len;
    while (fits < most) {
        tried.num_tokens = fits + (most - fits + 1) / 2;
        KV8_TRY(count_all_pages(kv8_model_facts(model), &tried, &pages));
        const uint64_t taken =
            (uint64_t)pages.num_pages * page + (uint64_t)pages.num_window_pages * window_page;
        if (taken <= bytes)
            fits = tried.num_tokens;
        else
            most = tried.num_tokens - 1;
    }
    *tokens_out = fits;
    return KV8_OK;
}
