/* test_random_model.c - models of random weights: the tensors are those of a checkpoint of the same
 * shape, values are plausible and the same each time, layers differ, and what has no such model is
 * refused by name.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_runs.h"

static const char random_tiny[] = "random:models/tiny-gpt-oss/config.json";

/* The nth tensor's line. */
typedef struct nth_tensor {
    int32_t left;
    char line[256];
} nth_tensor;

static int take_nth(void *cookie, const kv8_tensor_info *tensor) {
    nth_tensor *const nth = cookie;
    if (nth->left-- > 0) return 0;
    snprintf(nth->line, sizeof nth->line, "%s %s %lld %lld %lld", tensor->name, tensor->dtype,
             (long long)tensor->shape[0], (long long)tensor->shape[1], (long long)tensor->bytes);
    return 1;
}

static int find_line(void *cookie, const kv8_tensor_info *tensor) {
    nth_tensor here = {.left = 0};
    take_nth(&here, tensor);
    if (strcmp(here.line, ((nth_tensor *)cookie)->line) != 0) return 0;
    ((nth_tensor *)cookie)->left = 1;
    return 1;
}

static void it_has_the_tensors_of_a_checkpoint(void **state) {
    (void)state;
    kv8_model *const random = open_model(random_tiny, KV8_ISA_BEST);
    kv8_model *const real = open_model(tiny_model, KV8_ISA_BEST);
    kv8_model_info a = KV8_MODEL_INFO_INIT, b = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(random, &a));
    assert_ok(kv8_model_get_info(real, &b));
    assert_int_equal(a.num_tensors, b.num_tensors);
    assert_int_equal(a.num_parameters, b.num_parameters);
    assert_int_equal(a.bytes, b.bytes);
    assert_int_equal(a.bytes_per_decoded_token, b.bytes_per_decoded_token);
    for (int32_t i = 0; i < a.num_tensors; i++) {
        nth_tensor nth = {.left = i};
        kv8_model_visit_tensors(random, take_nth, &nth);
        nth.left = 0;
        kv8_model_visit_tensors(real, find_line, &nth);
        if (nth.left != 1) fail_msg("no tensor of the checkpoint is %s", nth.line);
    }
    kv8_model_close(real);
    kv8_model_close(random);
}

static void logits_are_plausible_and_repeat(void **state) {
    (void)state;
    static const int32_t ids[] = {1, 7, 4000, 12, 12, 900};
    enum { NUM = sizeof ids / sizeof ids[0], VOCAB = 4096 };
    float *logits[2];
    for (int m = 0; m < 2; m++) {
        kv8_model *const model = open_model(random_tiny, KV8_ISA_BEST);
        logits[m] = logits_of(model, KV8_E4M3, 16, ids, NUM, 512);
        kv8_model_close(model);
    }
    assert_memory_equal(logits[0], logits[1], NUM * VOCAB * sizeof(float));
    for (int t = 0; t < NUM; t++) {
        double squares = 0;
        for (int i = 0; i < VOCAB; i++)
            squares += (double)logits[0][t * VOCAB + i] * (double)logits[0][t * VOCAB + i];
        const double rms = sqrt(squares / VOCAB);
        if (!(rms > 0.3 && rms < 3)) fail_msg("token %d: logits of %g", t, rms);
        for (int u = 0; u < t; u++) /* other tokens, other logits */
            assert_true(max_difference(logits[0] + t * VOCAB, logits[0] + u * VOCAB, VOCAB) > 0.1);
    }
    free(logits[0]);
    free(logits[1]);
}

static void other_names_are_refused(void **state) {
    (void)state;
    kv8_model *model = NULL;
    assert_refused(kv8_model_open(&model, "random:gpt-oss-7b", NULL), KV8_ERR_INVALID, "options");
    const kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    assert_refused(kv8_model_open(&model, "random:gpt-oss-7b", &options), KV8_ERR_NOT_FOUND,
                   "gpt-oss-120b");
    assert_refused(kv8_model_open(&model, "random:models/tiny-gpt-oss/held.txt", &options),
                   KV8_ERR_CORRUPT, "held.txt");
    assert_null(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_has_the_tensors_of_a_checkpoint),
        cmocka_unit_test(logits_are_plausible_and_repeat),
        cmocka_unit_test(other_names_are_refused),
    };
    return cmocka_run_group_tests_name("random_model", tests, NULL, NULL);
}
