/* test_golden.c - the model that ships against what transformers computes with it in float32 (see
 * models/tiny-gpt-oss/README.md).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_runs.h"
#include "ops_impl.h"

static kv8_safetensors file;

static int open_golden(void **state) {
    (void)state;
    return kv8_safetensors_open(&file, "models/tiny-gpt-oss/golden.safetensors", NULL) == KV8_OK
               ? 0
               : -1;
}

static int close_golden(void **state) {
    (void)state;
    kv8_safetensors_close(&file);
    return 0;
}

/* Of a short run: only as many tokens as leave the sliding window (128) behind. */
enum { SHORT_TOKENS = 160, SHORT_GREEDY = 8 };

/* Bounds of the project: 2e-4 nats on every token's loss, 2e-3 on logits. */
static void check_window(kv8_isa isa) {
    int32_t n = 0, num_nll = 0, num_top = 0, num_last = 0;
    const int32_t *const ids = golden(&file, "window.ids", KV8_TENSOR_I32, &n);
    const float *const nll = golden(&file, "window.nll", KV8_TENSOR_F32, &num_nll);
    const int32_t *const top1 = golden(&file, "window.top1", KV8_TENSOR_I32, &num_top);
    const float *const last = golden(&file, "window.last_logits", KV8_TENSOR_F32, &num_last);
    if (test_is_short()) {
        n = num_top = SHORT_TOKENS;
        num_nll = SHORT_TOKENS - 1;
        num_last = 0;
    }
    kv8_model *const model = open_model(tiny_model, isa);
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    const size_t vocab = (size_t)info.vocab_size;
    float *const logits = logits_of(model, KV8_F32, 16, ids, n, 512);
    double worst = 0;
    for (int32_t t = 0; t < num_nll; t++) {
        const float *const row = logits + (size_t)t * vocab;
        const double loss = log_sum_exp_of(row, info.vocab_size) - (double)row[ids[t + 1]];
        const double error = fabs(loss - (double)nll[t]);
        if (!(error <= 2e-4)) fail_msg("%s: nll[%d] is off by %g", kv8_isa_name(isa), t, error);
        if (error > worst) worst = error;
    }
    for (int32_t t = 0; t < num_top; t++)
        assert_int_equal(argmax_of(logits + (size_t)t * vocab, info.vocab_size), top1[t]);
    const size_t tail = (size_t)num_last;
    const double last_error = max_difference(logits + (size_t)n * vocab - tail, last, tail);
    print_message("%s: nll within %.2e, last logits within %.2e\n", kv8_isa_name(isa), worst,
                  last_error);
    assert_true(last_error <= 2e-3);
    free(logits);
    kv8_model_close(model);
}

static void window_agrees_on_every_rung(void **state) {
    (void)state;
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (kv8_machine_has_isa((kv8_isa)isa)) check_window((kv8_isa)isa);
    }
}

static void check_greedy(kv8_model *model, const char *name) {
    char tensor[64];
    int32_t num_prompt = 0, num_greedy = 0;
    snprintf(tensor, sizeof tensor, "%s.prompt", name);
    const int32_t *const prompt = golden(&file, tensor, KV8_TENSOR_I32, &num_prompt);
    snprintf(tensor, sizeof tensor, "%s.greedy", name);
    const int32_t *const greedy = golden(&file, tensor, KV8_TENSOR_I32, &num_greedy);
    if (test_is_short()) num_greedy = SHORT_GREEDY;
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, num_prompt + num_greedy, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(model, cache, seq, prompt, num_prompt - 1, 512, NULL);
    float *const logits = malloc((size_t)info.vocab_size * sizeof *logits);
    int32_t next = prompt[num_prompt - 1];
    for (int32_t i = 0; i < num_greedy; i++) {
        run_ids(model, cache, seq, &next, 1, 1, logits);
        next = argmax_of(logits, info.vocab_size);
        if (next != greedy[i]) fail_msg("%s: token %d is %d, not %d", name, i, next, greedy[i]);
    }
    free(logits);
    kv8_cache_destroy(cache);
}

static void greedy_continuations_are_equal(void **state) {
    (void)state;
    static const char *const names[] = {"chat0", "chat1", "chat2", "text0",
                                        "text1", "text2", "text3"};
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    const size_t count = test_is_short() ? 1 : sizeof names / sizeof names[0];
    for (size_t i = 0; i < count; i++) check_greedy(model, names[i]);
    kv8_model_close(model);
}

/* The first n tokens of held.txt: documents are separated by NUL, each begun by <|endoftext|>. The
 * caller frees. */
static int32_t *held_out_tokens(int32_t n) {
    kv8_tokenizer *tokenizer = NULL;
    char *text = NULL;
    size_t size = 0;
    assert_ok(kv8_tokenizer_open(&tokenizer, "models/tiny-gpt-oss/tokenizer.json"));
    assert_ok(kv8_file_read("models/tiny-gpt-oss/held.txt", 1 << 20, &text, &size));
    int32_t *const out = malloc((size_t)n * sizeof *out);
    assert_non_null(out);
    int32_t done = 0;
    for (const char *at = text; done < n; at += strlen(at) + 1) {
        assert_true(at < text + size);
        int32_t *ids = NULL;
        size_t count = 0;
        assert_ok(
            kv8_tokenizer_encode(tokenizer, at, strlen(at), KV8_SPECIAL_AS_TEXT, &ids, &count));
        out[done++] = kv8_tokenizer_special_id(tokenizer, "<|endoftext|>");
        for (size_t i = 0; i < count && done < n; i++) out[done++] = ids[i];
        kv8_free(ids);
    }
    kv8_release(NULL, text, size + 1, 1);
    kv8_tokenizer_close(tokenizer);
    return out;
}

/* K after rope and V, read back from an f32 cache that keeps every token. */
static void stored_keys_and_values_reach_the_calibration(void **state) {
    (void)state;
    if (test_is_short()) skip();
    enum { TOKENS = 4096, HEADS = 2, HEAD_DIM = 64, WIDTH = HEADS * HEAD_DIM };
    int32_t num_absmax = 0, num_window = 0;
    const float *const absmax = golden(&file, "calibration.absmax", KV8_TENSOR_F32, &num_absmax);
    const int32_t *const window = golden(&file, "window.ids", KV8_TENSOR_I32, &num_window);
    int32_t *const ids = held_out_tokens(TOKENS);
    assert_memory_equal(ids, window, (size_t)num_window * sizeof *ids);
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, TOKENS, true);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(model, cache, seq, ids, TOKENS, 512, NULL);
    float *const kv[2] = {malloc(TOKENS * WIDTH * sizeof(float)),
                          malloc(TOKENS * WIDTH * sizeof(float))};
    for (int32_t i = 0; i < num_absmax; i++) {
        const int32_t layer = i / (2 * HEADS), which = i / HEADS % 2, head = i % HEADS;
        if (i % (2 * HEADS) == 0)
            assert_ok(kv8_cache_read(cache, layer, seq, 0, TOKENS, kv[0], kv[1]));
        float high = 0;
        for (int32_t t = 0; t < TOKENS; t++) {
            const float *const row = kv[which] + t * WIDTH + head * HEAD_DIM;
            for (int32_t d = 0; d < HEAD_DIM; d++) high = fmaxf(high, fabsf(row[d]));
        }
        const float error = fabsf(high - absmax[i]) / absmax[i];
        if (!(error <= 1e-4f))
            fail_msg("layer %d, %c, head %d: absmax %g, not %g", layer, "kv"[which], head,
                     (double)high, (double)absmax[i]);
    }
    free(kv[0]);
    free(kv[1]);
    free(ids);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(window_agrees_on_every_rung),
        cmocka_unit_test(greedy_continuations_are_equal),
        cmocka_unit_test(stored_keys_and_values_reach_the_calibration),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
