/* model_runs.h - opening models and caches for tests, and running token lists through them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_RUNS_H
#define KV8_MODEL_RUNS_H

#include <kv8/kv8_engine.h>

#include "model_impl.h"
#include "safetensors.h"
#include "testing.h"

static const char tiny_model[] = "models/tiny-gpt-oss";

/* On the calling thread: test programs already run side by side. */
static inline kv8_model *open_model(const char *directory, kv8_isa isa) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.isa = isa;
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, directory, &options));
    return model;
}

/* Two layers of the published shape with a vocabulary of 5000, random weights. */
static inline kv8_model *open_published(int num_experts, const kv8_model_options *options) {
    static const char config[] =
        "{\"model_type\": \"gpt_oss\", \"num_hidden_layers\": 2, \"num_local_experts\": %d, "
        "\"num_experts_per_tok\": 4, \"hidden_size\": 2880, \"intermediate_size\": 2880, "
        "\"num_attention_heads\": 64, \"num_key_value_heads\": 8, \"head_dim\": 64, "
        "\"vocab_size\": 5000, \"sliding_window\": 128, \"max_position_embeddings\": 131072, "
        "\"rms_norm_eps\": 1e-05, \"rope_theta\": 150000, \"rope_scaling\": {\"rope_type\": "
        "\"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"truncate\": "
        "false, \"original_max_position_embeddings\": 4096}}";
    char path[] = "/tmp/kv8_config_XXXXXX", name[64];
    const int fd = mkstemp(path);
    FILE *const file = fd < 0 ? NULL : fdopen(fd, "w");
    assert_non_null(file);
    fprintf(file, config, num_experts);
    assert_int_equal(fclose(file), 0);
    snprintf(name, sizeof name, "random:%s", path);
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, name, options));
    unlink(path);
    return model;
}

/* A cache of the model's shape for `max_seqs` sequences of at most `max_len` tokens in num_pages
 * pages. keep_all drops the windows, so that every token can be read back. */
static inline kv8_cache *open_pool(const kv8_model *model, kv8_dtype dtype, int32_t page_size,
                                   int32_t max_seqs, int32_t max_len, bool keep_all,
                                   int32_t num_pages) {
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    kv8_cache_layer *const layers = calloc((size_t)info.num_layers, sizeof *layers);
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    layers->struct_size = sizeof *layers;
    assert_ok(kv8_model_cache_layers(model, dtype, dtype, layers, &options));
    for (int32_t i = 0; keep_all && i < info.num_layers; i++) layers[i].window_left = -1;
    options.page_size = page_size;
    options.max_seqs = max_seqs;
    options.max_seq_len = max_len;
    options.num_pages = num_pages;
    options.device = kv8_model_get_options(model)->device;
    options.stream = kv8_model_get_options(model)->stream;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    free(layers);
    return cache;
}
/* The same with pages for all of them. */
static inline kv8_cache *open_cache(const kv8_model *model, kv8_dtype dtype, int32_t page_size,
                                    int32_t max_seqs, int32_t max_len, bool keep_all) {
    return open_pool(model, dtype, page_size, max_seqs, max_len, keep_all,
                     max_seqs * ((max_len + page_size - 1) / page_size));
}

/* Appends n ids in chunks; logits_out [n, vocab], or NULL. */
static inline void run_ids(kv8_model *model, kv8_cache *cache, kv8_seq seq, const int32_t *ids,
                           int32_t n, int32_t chunk, float *logits_out) {
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    for (int32_t begin = 0; begin < n; begin += chunk) {
        const int32_t count = n - begin < chunk ? n - begin : chunk;
        const int32_t indptr[] = {0, count};
        int32_t rows[512];
        assert_true(count <= 512);
        for (int32_t i = 0; i < count; i++) rows[i] = i;
        const kv8_step step = {
            .struct_size = sizeof(kv8_step),
            .num_seqs = 1,
            .seqs = &seq,
            .indptr = indptr,
            .token_ids = ids + begin,
            .num_logit_rows = logits_out != NULL ? count : 0,
            .logit_rows = rows,
            .logits_out =
                logits_out != NULL ? logits_out + (size_t)begin * (size_t)info.vocab_size : NULL};
        assert_ok(kv8_model_step(model, cache, &step));
    }
}

/* Logits [n, vocab] of a fresh sequence in a fresh cache; the caller frees. */
static inline float *logits_of(kv8_model *model, kv8_dtype dtype, int32_t page_size,
                               const int32_t *ids, int32_t n, int32_t chunk) {
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    float *const logits = malloc((size_t)n * (size_t)info.vocab_size * sizeof *logits);
    kv8_cache *const cache = open_cache(model, dtype, page_size, 1, n, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_non_null(logits);
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(model, cache, seq, ids, n, chunk, logits);
    kv8_cache_destroy(cache);
    return logits;
}

/* Largest |a - b|; NaN when any value is. */
static inline double max_difference(const float *a, const float *b, size_t n) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= largest)) largest = d;
        if (isnan(d)) return d;
    }
    return largest;
}

/* |got - want| / |want| of a row. */
static inline double row_error(const float *got, const float *want, int32_t n) {
    double error = 0, size = 0;
    for (int32_t i = 0; i < n; i++) {
        const double d = (double)got[i] - (double)want[i];
        error += d * d;
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(error / size);
}

static inline int32_t argmax_of(const float *logits, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}

/* ln sum exp of a row. */
static inline double log_sum_exp_of(const float *logits, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp((double)logits[i]);
    return log(sum);
}

/* A tensor of golden.safetensors; num_out counts its elements. */
static inline const void *golden(const kv8_safetensors *file, const char *name,
                                 kv8_tensor_type type, int32_t *num_out) {
    const kv8_tensor *const tensor = kv8_safetensors_find(file, name);
    assert_non_null(tensor);
    assert_int_equal(tensor->type, type);
    assert_int_equal((uintptr_t)tensor->data % 4, 0);
    *num_out = (int32_t)(tensor->bytes / 4);
    return tensor->data;
}

#endif
