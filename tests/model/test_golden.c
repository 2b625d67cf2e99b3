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

/* Bounds of the project: 2e-4 nats on every token's loss, 2e-3 on logits. */
static void check_window(kv8_isa isa) {
    int32_t n = 0, num_nll = 0, num_top = 0, num_last = 0;
    const int32_t *const ids = golden(&file, "window.ids", KV8_TENSOR_I32, &n);
    const float *const nll = golden(&file, "window.nll", KV8_TENSOR_F32, &num_nll);
    const int32_t *const top1 = golden(&file, "window.top1", KV8_TENSOR_I32, &num_top);
    const float *const last = golden(&file, "window.last_logits", KV8_TENSOR_F32, &num_last);
    kv8_model *const model = open_model(tiny_model, isa);
    kv8_model_info info;
    kv8_model_get_info(model, &info);
    const size_t vocab = (size_t)info.vocab_size;
    float *const logits = logits_of(model, KV8_F32, 16, ids, n, 512);
    double worst = 0;
    for (int32_t t = 0; t < num_nll; t++) {
        const float *const row = logits + (size_t)t * vocab;
        const double loss = kv8_log_sum_exp(row, vocab, NULL) - (double)row[ids[t + 1]];
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
    kv8_model_info info;
    kv8_model_get_info(model, &info);
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
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) check_greedy(model, names[i]);
    kv8_model_close(model);
}

/* calibration.absmax covers 4096 tokens whose first 1024 are window.ids: what K and V reach there
 * can only be less, and must be in its neighbourhood. */
static void stored_keys_and_values_stay_below_the_calibration(void **state) {
    (void)state;
    int32_t n = 0, num_absmax = 0;
    const int32_t *const ids = golden(&file, "window.ids", KV8_TENSOR_I32, &n);
    const float *const absmax = golden(&file, "calibration.absmax", KV8_TENSOR_F32, &num_absmax);
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    kv8_model_info info;
    kv8_model_get_info(model, &info);
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, n, true);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(model, cache, seq, ids, n, 512, NULL);
    const size_t heads = (size_t)info.num_kv_heads, width = heads * (size_t)info.head_dim;
    float *const kv[2] = {malloc((size_t)n * width * sizeof(float)),
                          malloc((size_t)n * width * sizeof(float))};
    for (int32_t layer = 0; layer < info.num_layers; layer++) {
        assert_ok(kv8_cache_read(cache, layer, seq, 0, n, kv[0], kv[1]));
        for (size_t which = 0; which < 2; which++) {
            for (size_t h = 0; h < heads; h++) {
                float high = 0;
                for (size_t t = 0; t < (size_t)n; t++) {
                    const float *const row = kv[which] + t * width + h * (size_t)info.head_dim;
                    for (int32_t d = 0; d < info.head_dim; d++) high = fmaxf(high, fabsf(row[d]));
                }
                const float limit = absmax[((size_t)layer * 2 + which) * heads + h];
                assert_true(high <= limit * 1.0001f);
                assert_true(high >= limit * 0.5f);
            }
        }
    }
    free(kv[0]);
    free(kv[1]);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(window_agrees_on_every_rung),
        cmocka_unit_test(greedy_continuations_are_equal),
        cmocka_unit_test(stored_keys_and_values_stay_below_the_calibration),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
