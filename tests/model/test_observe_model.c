/* test_observe_model.c - what a model shows its observer: the golden absmax, no padding, no change
 * of the result, the same counts however the text is cut.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_runs.h"

enum { NUM_TOKENS = 4096, CHUNK = 512 };

static int32_t *held_tokens(int32_t num) {
    char *text = NULL;
    FILE *const file = fopen("models/tiny-gpt-oss/held.txt", "rb");
    assert_non_null(file);
    enum { BYTES = 1 << 16 };
    text = malloc(BYTES);
    const size_t size = fread(text, 1, BYTES, file);
    fclose(file);
    kv8_tokenizer *tokenizer = NULL;
    assert_ok(kv8_tokenizer_open(&tokenizer, "models/tiny-gpt-oss/tokenizer.json"));
    int32_t *const ids = malloc((size_t)num * sizeof *ids);
    int32_t used = 0;
    for (size_t at = 0; used < num;) {
        assert_true(at < size);
        const size_t length = strnlen(text + at, size - at);
        int32_t *document = NULL;
        size_t num_document = 0;
        ids[used++] = kv8_tokenizer_special_id(tokenizer, "<|endoftext|>");
        assert_ok(kv8_tokenizer_encode(tokenizer, text + at, length, KV8_SPECIAL_AS_TEXT, &document,
                                       &num_document));
        for (size_t i = 0; i < num_document && used < num; i++) ids[used++] = document[i];
        kv8_free(document);
        at += length + 1;
    }
    kv8_tokenizer_close(tokenizer);
    free(text);
    return ids;
}

static kv8_observer *observer_of(const kv8_model *model, bool with_q) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_model_observer_options(model, &options);
    if (!with_q) options.num_qo_heads = 0;
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    kv8_observer_start(observer);
    return observer;
}

/* One sequence of num ids in chunks; logits_out as run_ids has it. */
static void observe(kv8_model *model, kv8_observer *observer, const int32_t *ids, int32_t num,
                    int32_t chunk, float *logits_out) {
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, num, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    assert_ok(kv8_model_set_observer(model, observer));
    run_ids(model, cache, seq, ids, num, chunk, logits_out);
    assert_ok(kv8_model_set_observer(model, NULL));
    kv8_cache_destroy(cache);
}

static void absmax_is_the_golden_one(void **state) {
    (void)state;
    kv8_safetensors file;
    int32_t num = 0;
    assert_ok(kv8_safetensors_open(&file, "models/tiny-gpt-oss/golden.safetensors", NULL));
    const float *const wanted = golden(&file, "calibration.absmax", KV8_TENSOR_F32, &num);
    assert_int_equal(num, 6 * 2 * 2);
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    kv8_observer *const observer = observer_of(model, false);
    int32_t *const ids = held_tokens(NUM_TOKENS);
    observe(model, observer, ids, NUM_TOKENS, CHUNK, NULL);
    for (int32_t layer = 0; layer < 6; layer++) {
        for (int kv = 0; kv < 2; kv++) {
            for (int32_t head = 0; head < 2; head++) {
                kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
                assert_ok(kv8_observer_get(observer, (kv8_observed_tensor)kv, layer, head, &seen));
                const double must = (double)wanted[(layer * 2 + kv) * 2 + head];
                if (!(fabs((double)seen.absmax - must) <= 1e-3 * must))
                    fail_msg("layer %d %s head %d: absmax %g, must be %g", layer, kv ? "V" : "K",
                             head, (double)seen.absmax, must);
                assert_int_equal(seen.num_rows, NUM_TOKENS);
                assert_int_equal(seen.nans + seen.infs, 0);
            }
        }
    }
    free(ids);
    kv8_observer_destroy(observer);
    kv8_model_close(model);
    kv8_safetensors_close(&file);
}

static void halves_make_the_whole(void **state) {
    (void)state;
    enum { HALF = 192 };
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    int32_t *const ids = held_tokens(2 * HALF);
    kv8_observer *const whole = observer_of(model, true), *const first = observer_of(model, true),
                        *const second = observer_of(model, true);
    observe(model, whole, ids, HALF, 64, NULL);
    observe(model, whole, ids + HALF, HALF, 64, NULL);
    observe(model, second, ids + HALF, HALF, 64, NULL);
    observe(model, first, ids, HALF, 64, NULL);
    assert_ok(kv8_observer_merge(second, first));
    size_t num = 0;
    const uint64_t *const sums = kv8_observer_sums(whole, &num);
    assert_memory_equal(sums, kv8_observer_sums(second, &num), num * sizeof *sums);
    const float *const maxima = kv8_observer_maxima(whole, &num);
    assert_memory_equal(maxima, kv8_observer_maxima(second, &num), num * sizeof *maxima);
    kv8_observed_head q = KV8_OBSERVED_HEAD_INIT;
    assert_ok(kv8_observer_get(whole, KV8_OBSERVED_Q, 5, 7, &q));
    assert_true(q.num_rows == 2 * HALF && q.absmax > 0);
    kv8_observer_destroy(whole);
    kv8_observer_destroy(first);
    kv8_observer_destroy(second);
    free(ids);
    kv8_model_close(model);
}

/* An observed run stores and answers as one that is not. */
static void observing_changes_nothing(void **state) {
    (void)state;
    enum { NUM = 96 };
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    int32_t *const ids = held_tokens(NUM);
    kv8_observer *const observer = observer_of(model, true);
    const size_t size = (size_t)NUM * (size_t)info.vocab_size * sizeof(float);
    float *const observed = malloc(size), *const plain = malloc(size);
    observe(model, observer, ids, NUM, 40, observed);
    observe(model, NULL, ids, NUM, 40, plain);
    assert_memory_equal(observed, plain, size);
    kv8_observer_stop(observer);
    observe(model, observer, ids, NUM, 40, observed); /* stopped: not counted */
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    assert_ok(kv8_observer_get(observer, KV8_OBSERVED_V, 3, 1, &seen));
    assert_int_equal(seen.num_rows, NUM);
    free(observed);
    free(plain);
    free(ids);
    kv8_observer_destroy(observer);
    kv8_model_close(model);
}

static void refuses_another_shape(void **state) {
    (void)state;
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_model_observer_options(model, &options);
    options.num_layers = 5;
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    assert_refused(kv8_model_set_observer(model, observer), KV8_ERR_INVALID, "has 5 layers");
    kv8_observer_destroy(observer);
    kv8_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(absmax_is_the_golden_one),
        cmocka_unit_test(halves_make_the_whole),
        cmocka_unit_test(observing_changes_nothing),
        cmocka_unit_test(refuses_another_shape),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
