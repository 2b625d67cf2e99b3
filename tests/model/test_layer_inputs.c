/* test_layer_inputs.c - the residual stream that a model keeps for a draft head: what enters the
 * first layer is the embedding; what enters another one, through the final norm and the head in
 * f64, gives the logits of a checkpoint of only the layers before it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "checkpoint_files.h"
#include "model_runs.h"

enum { LAYERS = 4, HALF = 2, HIDDEN = 64, VOCAB = 300, KEPT = 3, TOKENS = 40 };
static const double EPS = 1e-5;

static const checkpoint_shape shape = {.layers = LAYERS,
                                       .hidden = HIDDEN,
                                       .intermediate = 64,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .head_dim = 32,
                                       .experts = 4,
                                       .experts_per_token = 2,
                                       .vocab = VOCAB,
                                       .window = 16,
                                       .max_seq_len = 256};

/* All layers, and the first of them under the same names with the same data. */
typedef struct checkpoints {
    char whole[256], half[256];
    file_tensor *tensors; /* of the whole */
    size_t num;
} checkpoints;

static void write_checkpoint(const checkpoint_shape *s, char *directory, file_tensor *tensors,
                             size_t num) {
    make_directory(directory);
    write_config(directory, s);
    write_safetensors(directory, "model.safetensors", tensors, num, 0);
}

static const file_tensor *find(const checkpoints *c, const char *name) {
    for (size_t i = 0; i < c->num; i++)
        if (strcmp(c->tensors[i].name, name) == 0) return &c->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void open_checkpoints(checkpoints *c) {
    uint64_t rng = 5;
    c->tensors = calloc(num_checkpoint_tensors(&shape), sizeof *c->tensors);
    assert_non_null(c->tensors);
    c->num = list_tensors(&shape, c->tensors);
    for (size_t i = 0; i < c->num; i++) {
        uint8_t *const data = malloc(c->tensors[i].bytes);
        assert_non_null(data);
        fill_tensor(&c->tensors[i], &rng, data, c->tensors[i].bytes);
        c->tensors[i].data = data;
    }
    checkpoint_shape less = shape;
    less.layers = HALF;
    file_tensor *const first = calloc(num_checkpoint_tensors(&less), sizeof *first);
    assert_non_null(first);
    const size_t num = list_tensors(&less, first);
    for (size_t i = 0; i < num; i++) first[i].data = find(c, first[i].name)->data;
    write_checkpoint(&shape, c->whole, c->tensors, c->num);
    write_checkpoint(&less, c->half, first, num);
    free(first);
}
static void close_checkpoints(checkpoints *c) {
    remove_directory(c->whole);
    remove_directory(c->half);
    for (size_t i = 0; i < c->num; i++) free((void *)(uintptr_t)c->tensors[i].data);
    free(c->tensors);
}

static double value_of(const file_tensor *t, size_t idx) {
    const uint8_t *const code = (const uint8_t *)t->data + 2 * idx;
    const uint32_t bits = (uint32_t)code[0] << 16 | (uint32_t)code[1] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Norm and head of a row; the gains are 1. */
static void compare_logits(const checkpoints *c, const char *what, int32_t row, const float *x,
                           const float *logits) {
    const file_tensor *const head = find(c, "lm_head.weight");
    double squares = 0, worst = 0, largest = 0;
    for (int i = 0; i < HIDDEN; i++) squares += (double)x[i] * (double)x[i];
    const double scale = 1 / sqrt(squares / HIDDEN + EPS);
    for (size_t v = 0; v < VOCAB; v++) {
        double want = 0;
        for (size_t i = 0; i < HIDDEN; i++)
            want += value_of(head, v * HIDDEN + i) * (double)x[i] * scale;
        worst = fmax(worst, fabs((double)logits[v] - want));
        largest = fmax(largest, fabs(want));
    }
    if (!(worst <= 1e-5 * largest))
        fail_msg("%s: row %d of logits is off by %g of %g", what, row, worst, largest);
}

/* A step of a sequence's tokens [first, first + num), all rows' logits or those of `wanted`. */
static void run_step(kv8_model *model, kv8_cache *cache, kv8_seq seq, const int32_t *ids,
                     int32_t num, const int32_t *wanted, int32_t num_wanted, float *logits) {
    const int32_t indptr[] = {0, num};
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = 1,
                           .seqs = &seq,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = num_wanted,
                           .logit_rows = wanted,
                           .logits_out = logits};
    assert_ok(kv8_model_step(model, cache, &step));
}

static void what_entered_is_what_the_layers_before_made(void **state) {
    (void)state;
    static const int32_t kept[KEPT] = {0, HALF, LAYERS}, chunks[] = {TOKENS - 7, 1, 6};
    static const int32_t wanted[] = {0, 4, 5};
    static float logits[TOKENS * VOCAB];
    checkpoints c;
    open_checkpoints(&c);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.isa = KV8_ISA_SCALAR;
    options.input_layers = (int32_t[]){kept[0], kept[1], kept[2]}; /* copied: gone behind open */
    options.num_input_layers = KEPT;
    kv8_model *model = NULL, *plain = NULL;
    assert_ok(kv8_model_open(&model, c.whole, &options));
    kv8_model *const half = open_model(c.half, KV8_ISA_SCALAR);
    options.num_input_layers = 0;
    assert_ok(kv8_model_open(&plain, c.whole, &options));
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; i++) ids[i] = (61 * i + 7) % VOCAB;
    float *const before = logits_of(half, KV8_F32, 16, ids, TOKENS, TOKENS);
    float *const all = logits_of(plain, KV8_F32, 16, ids, TOKENS, TOKENS);
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, TOKENS, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    int32_t at = 0;
    for (int s = 0; s < 3; at += chunks[s++]) {
        const int32_t num_wanted = s == 2 ? 3 : 0; /* of the last step; no row of the others */
        run_step(model, cache, seq, ids + at, chunks[s], wanted, num_wanted, logits);
        for (int32_t r = 0; r < chunks[s]; r++) {
            const file_tensor *const embedding = find(&c, "model.embed_tokens.weight");
            const float *const first = kv8_model_layer_input(model, 0) + r * HIDDEN;
            for (int i = 0; i < HIDDEN; i++)
                assert_true((double)first[i] ==
                            value_of(embedding, (size_t)(ids[at + r] * HIDDEN + i)));
            compare_logits(&c, "half", at + r, kv8_model_layer_input(model, 1) + r * HIDDEN,
                           before + (at + r) * VOCAB);
            compare_logits(&c, "all", at + r, kv8_model_layer_input(model, 2) + r * HIDDEN,
                           all + (at + r) * VOCAB);
        }
        for (int32_t i = 0; i < num_wanted; i++)
            assert_true(max_difference(logits + i * VOCAB, all + (at + wanted[i]) * VOCAB, VOCAB) <=
                        1e-5);
    }
    assert_null(kv8_model_layer_input(model, -1));
    assert_null(kv8_model_layer_input(model, KEPT));
    assert_null(kv8_model_layer_input(plain, 0));
    kv8_cache_destroy(cache);
    kv8_model_close(model);
    kv8_model_close(plain);
    kv8_model_close(half);
    free(before);
    free(all);
    close_checkpoints(&c);
}

static void wrong_lists_are_refused(void **state) {
    (void)state;
    static const struct {
        int32_t num, layers[3];
        const char *part;
    } cases[] = {
        {-1, {0}, "num_input_layers is -1"},
        {1, {7}, "input_layers[0] is 7, must be from 0 to 6"},
        {1, {-1}, "input_layers[0] is -1, must be from 0 to 6"},
        {3, {1, 4, 4}, "input_layers[2] is 4, must be above the one before, 4"},
        {2, {6, 7}, "input_layers[1] is 7, must be from 0 to 6"},
    };
    kv8_model *model = NULL;
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        options.num_input_layers = cases[i].num;
        options.input_layers = cases[i].layers;
        assert_refused(kv8_model_open(&model, tiny_model, &options), KV8_ERR_INVALID,
                       cases[i].part);
        assert_null(model);
    }
    options.num_input_layers = 1;
    options.input_layers = NULL;
    assert_refused(kv8_model_open(&model, tiny_model, &options), KV8_ERR_INVALID,
                   "input_layers at NULL");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_entered_is_what_the_layers_before_made),
        cmocka_unit_test(wrong_lists_are_refused),
    };
    return cmocka_run_group_tests_name("layer_inputs", tests, NULL, NULL);
}
