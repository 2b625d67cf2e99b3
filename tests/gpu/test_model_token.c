/* test_model_token.c - a token by one kernel: against the host's model, and where many blocks share
 * the keys against the graph of many kernels; formats of the cache, windows, numbers of experts;
 * equal bits in every run; the token that it draws; what it refuses.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "gpu_testing.h"
#include "model_runs.h"
#include "sampler_device.h"

enum { VOCAB = 5000 };

/* g NULL: on the host. */
static kv8_model *open_path(const gpu *g, int num_experts, kv8_step_path path) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    if (g != NULL) options.device = g->device;
    if (g != NULL) options.stream = g->stream;
    options.path = path;
    return open_published(num_experts, &options);
}

/* Logits of all tokens but the first `skipped`, which are chunks of many; the others of `chunk`. */
static float *run(kv8_model *model, kv8_dtype dtype, int32_t page_size, int32_t skipped, int32_t n,
                  int32_t chunk) {
    int32_t *const ids = malloc((size_t)(skipped + n) * sizeof *ids);
    float *const logits = malloc((size_t)n * VOCAB * sizeof *logits);
    assert_true(ids != NULL && logits != NULL);
    for (int32_t i = 0; i < skipped + n; i++) ids[i] = 37 * i % VOCAB;
    kv8_cache *const cache = open_cache(model, dtype, page_size, 1, skipped + n, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(model, cache, seq, ids, skipped, 512, NULL);
    run_ids(model, cache, seq, ids + skipped, n, chunk, logits);
    kv8_cache_destroy(cache);
    free(ids);
    return logits;
}

/* All rows within `worst`, but for num_far, which a router's near choice moved. */
static void check(const char *what, const float *got, const float *want, int32_t n, double worst,
                  int32_t num_far) {
    double sum = 0, most = 0;
    int32_t far = 0;
    for (int32_t r = 0; r < n; r++) {
        const double error = row_error(got + (size_t)r * VOCAB, want + (size_t)r * VOCAB, VOCAB);
        if (!(error <= worst)) {
            far++;
            continue;
        }
        sum += error;
        most = fmax(most, error);
    }
    print_message("%s: error of a row %.5f in the mean, %.5f at worst, %d of %d far\n", what,
                  sum / n, most, far, n);
    if (far > num_far) fail_msg("%s: %d rows of %d are far off", what, far, n);
}

static void one_kernel_agrees_with_the_host(void **state) {
    enum { NUM = 150 };
    const gpu *const g = gpu_get_with_kernels(state);
    static const struct {
        int num_experts;
        kv8_dtype dtype;
        int32_t page_size, num_far;
        double worst; /* a rounding of K or V that falls the other way is of the format's size */
    } cases[] = {{4, KV8_BF16, 16, 0, 0.01},   {4, KV8_F16, 32, 0, 0.01},
                 {4, KV8_E4M3, 16, 0, 0.05},   {4, KV8_E5M2, 64, 0, 0.09},
                 {4, KV8_INT8, 16, 0, 0.02},   {4, KV8_INT8, 64, 0, 0.02},
                 {32, KV8_BF16, 16, 75, 0.02}, {128, KV8_BF16, 16, 75, 0.02}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kv8_model *const host = open_path(NULL, cases[i].num_experts, KV8_PATH_AUTO);
        kv8_model *const model = open_path(g, cases[i].num_experts, KV8_PATH_PERSISTENT);
        char what[64];
        snprintf(what, sizeof what, "%d experts, %s", cases[i].num_experts,
                 kv8_dtype_name(cases[i].dtype));
        float *const got = run(model, cases[i].dtype, cases[i].page_size, 0, NUM, 1);
        float *const want = run(host, cases[i].dtype, cases[i].page_size, 0, NUM, NUM);
        check(what, got, want, NUM, cases[i].worst, cases[i].num_far);
        free(got);
        free(want);
        kv8_model_close(model);
        kv8_model_close(host);
    }
}

/* More keys than one range, more than one granule a block, and more than the 32 whose pages it
 * reads at once. */
static void long_sequences_agree_with_the_graph(void **state) {
    enum { NUM = 3 };
    const gpu *const g = gpu_get_with_kernels(state);
    static const struct {
        kv8_dtype dtype;
        int32_t page_size, skipped;
        double worst; /* a wrong page moves the longest by 0.01 */
    } cases[] = {{KV8_BF16, 16, 700, 0.007},
                 {KV8_BF16, 32, 2300, 0.007},
                 {KV8_E4M3, 128, 9000, 0.007},
                 {KV8_E4M3, 64, 69000, 0.007},
                 {KV8_INT8, 32, 3000, 0.02}};
    kv8_model *const one = open_path(g, 4, KV8_PATH_PERSISTENT);
    kv8_model *const many = open_path(g, 4, KV8_PATH_GRAPH);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char what[64];
        snprintf(what, sizeof what, "%s, after %d tokens", kv8_dtype_name(cases[i].dtype),
                 cases[i].skipped);
        float *const got = run(one, cases[i].dtype, cases[i].page_size, cases[i].skipped, NUM, 1);
        float *const want = run(many, cases[i].dtype, cases[i].page_size, cases[i].skipped, NUM, 1);
        check(what, got, want, NUM, cases[i].worst, 0);
        free(got);
        free(want);
    }
    kv8_model_close(many);
    kv8_model_close(one);
}

static void runs_repeat(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_model *const model = open_path(g, 32, KV8_PATH_AUTO);
    float *const first = run(model, KV8_E4M3, 16, 300, 20, 1);
    for (int i = 0; i < 10; i++) {
        float *const again = run(model, KV8_E4M3, 16, 300, 20, 1);
        assert_memory_equal(first, again, 20 * VOCAB * sizeof *first);
        free(again);
    }
    free(first);
    kv8_model_close(model);
}

/* One token more by a step that draws the next; its logits to `logits`. */
static kv8_drawn draw_next(const gpu *g, kv8_model *model, kv8_cache *cache, kv8_seq seq,
                           const kv8_device_sampler *sampler, const kv8_draw *draw, float *logits) {
    const int32_t id = 37 * draw->history.num_tokens % VOCAB;
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = 1,
                           .seqs = &seq,
                           .indptr = (const int32_t[]){0, 1},
                           .token_ids = &id,
                           .num_logit_rows = 1,
                           .logit_rows = (const int32_t[]){0}};
    kv8_step_draw how;
    kv8_drawn drawn;
    bool draws = false;
    assert_ok(kv8_cache_extend(cache, seq, 1, &id));
    assert_true(kv8_device_sampler_simplify(sampler, draw, &how));
    assert_ok(kv8_model_step_extended(model, cache, &step, &how, &draws));
    assert_true(draws);
    assert_ok(kv8_device_sampler_take(sampler, &drawn));
    gpu_download(g, logits, kv8_model_device_logits(model), VOCAB * sizeof *logits);
    return drawn;
}

/* The host's draw from the same logits, sharp and flat ones, with a seed of its own each. */
static void it_draws_as_the_sampler_does(void **state) {
    enum { NUM = 80 };
    static const float temperatures[] = {1, 0, 0.3f, 8};
    static float logits[VOCAB];
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_model *const model = open_path(g, 4, KV8_PATH_PERSISTENT);
    kv8_cache *const cache = open_cache(model, KV8_E4M3, 16, 1, NUM, false);
    kv8_device_sampler *on_device = NULL;
    kv8_sampler *host = NULL;
    kv8_seq seq = KV8_SEQ_NONE;
    int32_t num_other = 0;
    assert_ok(
        kv8_device_sampler_create(&on_device, g->device, g->stream, NULL, VOCAB, 1, VOCAB, NULL));
    assert_ok(kv8_sampler_create(&host, VOCAB, NULL));
    assert_ok(kv8_cache_seq_create(cache, &seq));
    for (int32_t i = 0; i < NUM; i++) {
        kv8_sampling sampling = KV8_SAMPLING_INIT;
        sampling.temperature = temperatures[i % 4];
        sampling.seed = (uint64_t)i;
        const kv8_draw draw = {
            .sampling = &sampling, .history = {NULL, 0, i}, .mask = -1, .token = -1};
        const kv8_drawn got = draw_next(g, model, cache, seq, on_device, &draw, logits);
        const int32_t want = kv8_sampler_draw(host, &sampling, &draw.history, NULL, logits);
        if (got.bad_id != -1 || got.token != want)
            fail_msg("draw %d at temperature %g: token %d (bad %d), the host's is %d", i,
                     (double)sampling.temperature, got.token, got.bad_id, want);
        for (int32_t id = 0; id < VOCAB; id++) num_other += id < want && logits[id] > logits[want];
    }
    assert_true(num_other > 0); /* not the likeliest each time */
    kv8_sampler_destroy(host);
    kv8_device_sampler_destroy(on_device);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
}

/* What no kernel takes is refused where it is asked for, and takes the graph where it is not. */
static void what_it_does_not_take_is_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int is_asked = 0; is_asked < 2; is_asked++) {
        kv8_model *const model = open_path(g, 4, is_asked ? KV8_PATH_PERSISTENT : KV8_PATH_AUTO);
        kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, 8, false);
        kv8_seq seq = KV8_SEQ_NONE;
        int32_t length = -1;
        float *const logits = malloc(VOCAB * sizeof *logits);
        assert_ok(kv8_cache_seq_create(cache, &seq));
        const kv8_step step = {.struct_size = sizeof step,
                               .num_seqs = 1,
                               .seqs = &seq,
                               .indptr = (const int32_t[]){0, 1},
                               .token_ids = (const int32_t[]){5},
                               .num_logit_rows = 1,
                               .logit_rows = (const int32_t[]){0},
                               .logits_out = logits};
        if (is_asked)
            assert_refused(kv8_model_step(model, cache, &step), KV8_ERR_UNSUPPORTED, "persistent");
        else
            assert_ok(kv8_model_step(model, cache, &step));
        assert_ok(kv8_cache_seq_length(cache, seq, &length));
        assert_int_equal(length, is_asked ? 0 : 1);
        free(logits);
        kv8_cache_destroy(cache);
        kv8_model_close(model);
    }
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_kernel_agrees_with_the_host),
        cmocka_unit_test(long_sequences_agree_with_the_graph),
        cmocka_unit_test(runs_repeat),
        cmocka_unit_test(it_draws_as_the_sampler_does),
        cmocka_unit_test(what_it_does_not_take_is_refused),
    };
    return cmocka_run_group_tests_name("model_token", tests, gpu_open, gpu_close);
}
