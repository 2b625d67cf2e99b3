/* test_golden_device.c - the model that ships on a GPU, held against what transformers computes
 * with it in float32, token by token given the right ones before it: choices, losses, and what the
 * formats of the cache do beside what they do on the host.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/evaluate.h>

#include "gpu_testing.h"
#include "model_runs.h"

/* Choices between logits nearer than this are nobody's. */
static const double MARGIN = 0.05;

typedef struct scene {
    kv8_model *host, *device;
    kv8_model_info info;
    kv8_safetensors golden;
} scene;

static void open_scene(scene *s, void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    *s = (scene){.info = KV8_MODEL_INFO_INIT};
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    assert_ok(kv8_threads_create(&options.threads, 0));
    assert_ok(kv8_model_open(&s->host, tiny_model, &options));
    options.device = g->device;
    options.stream = g->stream;
    assert_ok(kv8_model_open(&s->device, tiny_model, &options));
    assert_ok(kv8_model_get_info(s->host, &s->info));
    assert_ok(kv8_safetensors_open(&s->golden, "models/tiny-gpt-oss/golden.safetensors", NULL));
}
static void close_scene(scene *s) {
    kv8_threads *const threads = kv8_model_get_options(s->host)->threads;
    kv8_safetensors_close(&s->golden);
    kv8_model_close(s->device);
    kv8_model_close(s->host);
    kv8_threads_destroy(threads);
}

/* Of rows of logits: how many choose as they should, and by how much those differ that do not. */
typedef struct choices {
    int32_t num, same, sure; /* sure: they differ, and the right one is ahead by more than MARGIN */
} choices;

/* How far the host's logits have `right` ahead of all others. */
static double lead_of(const float *logits, int32_t right, int32_t n) {
    double next = -HUGE_VAL;
    for (int32_t i = 0; i < n; i++) {
        if (i != right) next = fmax(next, (double)logits[i]);
    }
    return (double)logits[right] - next;
}

static void count_choices(choices *c, const scene *s, const float *got, const float *host,
                          const int32_t *right, int32_t num) {
    const int32_t vocab = s->info.vocab_size;
    for (int32_t i = 0; i < num; i++) {
        const size_t at = (size_t)i * (size_t)vocab;
        const bool same = argmax_of(got + at, vocab) == right[i];
        c->num++;
        c->same += same;
        if (same || lead_of(host + at, right[i], vocab) <= MARGIN) continue;
        print_message("a choice ahead by %.4f falls\n", lead_of(host + at, right[i], vocab));
        c->sure++;
    }
}

/* A prompt and its greedy continuation, fed as they are. */
static void add_prompt(choices *c, const scene *s, const char *name) {
    char tensor[64];
    int32_t num_prompt = 0, num = 0;
    snprintf(tensor, sizeof tensor, "%s.prompt", name);
    const int32_t *const prompt = golden(&s->golden, tensor, KV8_TENSOR_I32, &num_prompt);
    snprintf(tensor, sizeof tensor, "%s.greedy", name);
    const int32_t *const greedy = golden(&s->golden, tensor, KV8_TENSOR_I32, &num);
    const int32_t length = num_prompt + num - 1;
    int32_t *const ids = malloc((size_t)length * sizeof *ids);
    assert_non_null(ids);
    memcpy(ids, prompt, (size_t)num_prompt * sizeof *ids);
    memcpy(ids + num_prompt, greedy, (size_t)(num - 1) * sizeof *ids);
    float *const got = logits_of(s->device, KV8_F32, 16, ids, length, 512);
    float *const host = logits_of(s->host, KV8_F32, 16, ids, length, 512);
    const size_t at = (size_t)(num_prompt - 1) * (size_t)s->info.vocab_size;
    count_choices(c, s, got + at, host + at, greedy, num);
    free(host);
    free(got);
    free(ids);
}

static void choices_are_the_golden_ones(void **state) {
    static const char *const names[] = {"chat0", "chat1", "chat2", "text0",
                                        "text1", "text2", "text3"};
    scene s;
    choices c = {0};
    int32_t num = 0;
    open_scene(&s, state);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) add_prompt(&c, &s, names[i]);
    const int32_t *const ids = golden(&s.golden, "window.ids", KV8_TENSOR_I32, &num);
    const int32_t *const top1 = golden(&s.golden, "window.top1", KV8_TENSOR_I32, &num);
    float *const got = logits_of(s.device, KV8_F32, 16, ids, num, 512);
    float *const host = logits_of(s.host, KV8_F32, 16, ids, num, 512);
    count_choices(&c, &s, got, host, top1, num);
    print_message("%d of %d choices equal, %d that were ahead by more than %.2f fall\n", c.same,
                  c.num, c.sure, MARGIN);
    assert_true(c.same * 1000 >= c.num * 995);
    assert_int_equal(c.sure, 0);
    free(host);
    free(got);
    close_scene(&s);
}

/* Rounding activations moves a token's loss by some hundredths, the text's by almost nothing. */
static void losses_are_the_golden_ones(void **state) {
    scene s;
    int32_t num = 0, num_nll = 0;
    open_scene(&s, state);
    const int32_t *const ids = golden(&s.golden, "window.ids", KV8_TENSOR_I32, &num);
    const float *const want = golden(&s.golden, "window.nll", KV8_TENSOR_F32, &num_nll);
    kv8_kv_setting f32;
    float *const nll = malloc((size_t)num_nll * sizeof *nll);
    kv8_score_options options = KV8_SCORE_OPTIONS_INIT;
    assert_non_null(nll);
    assert_ok(kv8_kv_setting_parse("f32", &f32));
    assert_ok(kv8_evaluate_score(s.device, &f32, ids, num, &options, nll));
    double sum = 0, absolute = 0;
    for (int32_t i = 0; i < num_nll; i++) {
        sum += (double)nll[i] - (double)want[i];
        absolute += fabs((double)nll[i] - (double)want[i]);
    }
    print_message("losses off by %.5f in the mean, the text's by %.5f\n", absolute / num_nll,
                  sum / num_nll);
    assert_true(absolute / num_nll < 0.02);
    assert_true(fabs(sum / num_nll) < 0.004);
    free(nll);
    close_scene(&s);
}

/* KL of each format beside the host's, window for window of the same text. */
static void formats_cost_what_they_cost_on_the_host(void **state) {
    enum { NUM = 3 };
    static const char *const names[NUM] = {"bf16", "e4m3", "e5m2"};
    scene s;
    int32_t num = 0;
    kv8_kv_setting settings[NUM];
    kv8_compare_row host[NUM + 1] = {KV8_COMPARE_ROW_INIT},
                               device[NUM + 1] = {KV8_COMPARE_ROW_INIT};
    open_scene(&s, state);
    for (int i = 0; i < NUM; i++) assert_ok(kv8_kv_setting_parse(names[i], &settings[i]));
    kv8_compare_options options = KV8_COMPARE_OPTIONS_INIT;
    options.token_ids = golden(&s.golden, "window.ids", KV8_TENSOR_I32, &num);
    options.num_tokens = options.window_len = num;
    options.num_windows = 1;
    assert_ok(kv8_evaluate_compare(s.host, settings, NUM, &options, host));
    assert_ok(kv8_evaluate_compare(s.device, settings, NUM, &options, device));
    for (int i = 0; i <= NUM; i++)
        print_message("%-5s KL %.3e +- %.1e on the host %.3e +- %.1e on the GPU, top-1 %.4f %.4f\n",
                      host[i].kv, host[i].kl, host[i].kl_error, device[i].kl, device[i].kl_error,
                      host[i].top1, device[i].top1);
    assert_true(device[0].kl == 0 && device[0].top1 == 1);
    assert_true(fabs(device[0].loss - host[0].loss) < 0.004);
    for (int i = 2; i <= NUM; i++) {
        const double error = hypot(host[i].kl_error, device[i].kl_error);
        assert_true(fabs(device[i].kl - host[i].kl) < 0.05 * host[i].kl + 2 * error);
        assert_true(fabs(device[i].top1 - host[i].top1) < 0.02);
        assert_true(device[i].bytes_per_token == host[i].bytes_per_token);
    }
    close_scene(&s);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(choices_are_the_golden_ones),
        cmocka_unit_test(losses_are_the_golden_ones),
        cmocka_unit_test(formats_cost_what_they_cost_on_the_host),
    };
    return cmocka_run_group_tests_name("golden_device", tests, gpu_open, gpu_close);
}
