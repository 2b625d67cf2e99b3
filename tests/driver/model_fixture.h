/* model_fixture.h - a small model on the stand-in's GPU, a cache and sequences, and steps of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_FIXTURE_H
#define KV8_MODEL_FIXTURE_H

#include "checkpoint_files.h"
#include "model_runs.h"
#include "stand_in.h"

enum { UNKNOWN = 999, PROMPT = 5, VOCAB = 64, SEQS = 20 };

static char directory[256];
static const int32_t ids[64] = {3, 1, 4, 1, 5, 9, 2, 6};

typedef struct fixture {
    kv8_device *device;
    kv8_stream *stream;
    kv8_model *model;
    kv8_cache *cache;
    kv8_seq seqs[SEQS];
} fixture;

static inline int make_model(void **state) {
    (void)state;
    const checkpoint_shape shape = {.layers = 2,
                                    .hidden = 64,
                                    .intermediate = 64,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .head_dim = 64,
                                    .experts = 4,
                                    .experts_per_token = 2,
                                    .vocab = VOCAB,
                                    .window = 8,
                                    .max_seq_len = 256};
    file_tensor tensors[64];
    static uint8_t bytes[1 << 20];
    uint64_t rng = 1;
    size_t used = 0;
    const size_t count = list_tensors(&shape, tensors);
    make_directory(directory);
    write_config(directory, &shape);
    for (size_t i = 0; i < count; used += tensors[i++].bytes) {
        assert_true(used + tensors[i].bytes <= sizeof bytes);
        fill_tensor(&tensors[i], &rng, bytes + used, tensors[i].bytes);
        tensors[i].data = bytes + used;
    }
    write_safetensors(directory, "model.safetensors", tensors, count, 0);
    return 0;
}
static inline int drop_model(void **state) {
    (void)state;
    remove_directory(directory);
    return 0;
}

static inline kv8_model_options options_of(const fixture *f, kv8_step_path path) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = f->device;
    options.stream = f->stream;
    options.path = path;
    options.max_step_tokens = 64;
    options.max_step_seqs = SEQS;
    return options;
}

static inline kv8_status try_model(fixture *f, kv8_step_path path) {
    const kv8_model_options options = options_of(f, path);
    return kv8_model_open(&f->model, directory, &options);
}

static inline void open_device(fixture *f) {
    stand_in_reset();
    *f = (fixture){0};
    assert_ok(kv8_device_open(&f->device, 0));
    assert_ok(kv8_stream_create(&f->stream, f->device));
}
static inline void open_fixture(fixture *f, kv8_step_path path) {
    open_device(f);
    assert_ok(try_model(f, path));
    f->cache = open_cache(f->model, KV8_E4M3, 16, SEQS, 64, false);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_create(f->cache, &f->seqs[i]));
}
static inline void close_fixture(fixture *f) {
    stand_in_fail(NULL, 0, 0);
    kv8_cache_destroy(f->cache);
    kv8_model_close(f->model);
    kv8_stream_destroy(f->stream);
    kv8_device_close(f->device);
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
}

/* One step of the first num sequences, rows indptr[i] to indptr[i + 1] each, 64 at most, with
 * logits of each last one. */
static inline kv8_status run_rows(fixture *f, int32_t num, const int32_t *indptr) {
    enum { MOST_VOCAB = 5000 }; /* of open_published */
    static float logits[SEQS * MOST_VOCAB];
    int32_t rows[SEQS], tokens[64];
    for (int32_t i = 0; i < num; i++) rows[i] = indptr[i + 1] - 1;
    for (int32_t i = 0; i < indptr[num]; i++) tokens[i] = ids[i % 8];
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = num,
                           .seqs = f->seqs,
                           .indptr = indptr,
                           .token_ids = tokens,
                           .num_logit_rows = num,
                           .logit_rows = rows,
                           .logits_out = logits};
    return kv8_model_step(f->model, f->cache, &step);
}
/* The same, `count` tokens each. */
static inline kv8_status run_step(fixture *f, int32_t num, int32_t count) {
    int32_t indptr[SEQS + 1];
    for (int32_t i = 0; i <= num; i++) indptr[i] = i * count;
    return run_rows(f, num, indptr);
}

#endif
