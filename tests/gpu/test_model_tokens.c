/* test_model_tokens.c - a token each of several sequences by one kernel against the graph of many:
 * numbers of sequences that change from step to step, lengths far apart, formats of the cache,
 * numbers of experts; equal bits in every run, and whatever the neighbours hold.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpu_testing.h"
#include "model_runs.h"

enum { VOCAB = 5000, MOST = 8, STEPS = 6 };

static kv8_model *open_path(const gpu *g, int num_experts, kv8_step_path path) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = g->device;
    options.stream = g->stream;
    options.path = path;
    return open_published(num_experts, &options);
}

typedef struct run_shape {
    kv8_dtype dtype;
    int32_t page_size;
    int32_t lengths[MOST]; /* before the first step */
    int32_t seqs[STEPS];   /* of each step: the first ones */
} run_shape;

static int32_t id_of(int32_t seq, int32_t at) {
    return (37 * at + 911 * seq + at / 7 * seq) % VOCAB;
}

/* Logits [steps, MOST, vocab]; those of no sequence are 0. */
static float *run(kv8_model *model, const run_shape *shape, kv8_step_path path) {
    int32_t longest = 0, at[MOST];
    kv8_seq seqs[MOST];
    float *const logits = calloc((size_t)STEPS * MOST * VOCAB, sizeof *logits);
    assert_non_null(logits);
    for (int i = 0; i < MOST; i++)
        longest = shape->lengths[i] > longest ? shape->lengths[i] : longest;
    kv8_cache *const cache =
        open_cache(model, shape->dtype, shape->page_size, MOST, longest + STEPS, false);
    int32_t *const ids = malloc((size_t)longest * sizeof *ids);
    assert_non_null(ids);
    for (int32_t s = 0; s < MOST; s++) {
        assert_ok(kv8_cache_seq_create(cache, &seqs[s]));
        for (int32_t i = 0; i < shape->lengths[s]; i++) ids[i] = id_of(s, i);
        run_ids(model, cache, seqs[s], ids, shape->lengths[s], 512, NULL);
        at[s] = shape->lengths[s];
    }
    for (int i = 0; i < STEPS; i++) {
        const int32_t n = shape->seqs[i];
        int32_t indptr[MOST + 1], rows[MOST], tokens[MOST];
        for (int32_t s = 0; s <= n; s++) indptr[s] = s;
        for (int32_t s = 0; s < n; s++) rows[s] = s, tokens[s] = id_of(s, at[s]++);
        const kv8_step step = {.struct_size = sizeof step,
                               .num_seqs = n,
                               .seqs = seqs,
                               .indptr = indptr,
                               .token_ids = tokens,
                               .num_logit_rows = n,
                               .logit_rows = rows,
                               .logits_out = logits + (size_t)i * MOST * VOCAB};
        kv8_step_plan plan = KV8_STEP_PLAN_INIT;
        assert_ok(kv8_model_plan_step(model, cache, NULL, n, n, &plan));
        assert_int_equal(plan.path, path);
        assert_ok(kv8_model_step(model, cache, &step));
    }
    free(ids);
    kv8_cache_destroy(cache);
    return logits;
}

/* All rows within `worst`, but for num_far, which a router's near choice moved. */
static void check(const char *what, const run_shape *shape, const float *got, const float *want,
                  double worst, int32_t num_far) {
    double sum = 0, most = 0;
    int32_t far = 0, n = 0;
    for (int i = 0; i < STEPS; i++) {
        for (int32_t s = 0; s < shape->seqs[i]; s++, n++) {
            const size_t row = (size_t)(i * MOST + s) * VOCAB;
            const double error = row_error(got + row, want + row, VOCAB);
            if (!(error <= worst)) {
                if (far++ < 4) print_message("step %d, sequence %d: %.5f\n", i, s, error);
                continue;
            }
            sum += error;
            most = fmax(most, error);
        }
    }
    print_message("%s: error of a row %.5f in the mean, %.5f at worst, %d of %d far\n", what,
                  sum / n, most, far, n);
    if (far > num_far) fail_msg("%s: %d rows of %d are far off", what, far, n);
}

#define SHORT \
    { 1, 20, 3, 130, 64, 16, 127, 5 }
#define MIXED \
    { 700, 3, 260, 1500, 144, 1, 320, 2000 }
#define LONG \
    { 9000, 9000, 100, 5000, 20000, 9000, 9000, 40 }

static void tokens_agree_with_the_graph(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const struct {
        int num_experts, num_far;
        double worst;
        run_shape shape;
    } cases[] = {
        {4, 0, 0.01, {KV8_BF16, 16, SHORT, {2, 3, 4, 8, 2, 5}}},
        {4, 0, 0.02, {KV8_E4M3, 16, MIXED, {8, 2, 4, 7, 3, 8}}},
        {4, 0, 0.02, {KV8_E4M3, 64, LONG, {4, 8, 2, 5, 6, 3}}},
        {4, 0, 0.01, {KV8_BF16, 32, LONG, {2, 8, 4, 2, 8, 4}}},
        {4, 0, 0.01, {KV8_F16, 32, MIXED, {8, 8, 4, 4, 2, 2}}},
        {4, 0, 0.04, {KV8_E5M2, 16, MIXED, {2, 2, 4, 4, 8, 8}}},
        {4, 0, 0.02, {KV8_INT8, 16, MIXED, {8, 4, 2, 8, 4, 2}}},
        {32, 15, 0.02, {KV8_BF16, 16, MIXED, {8, 4, 2, 8, 4, 2}}},
        {128, 15, 0.02, {KV8_BF16, 16, MIXED, {2, 8, 6, 4, 5, 7}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kv8_model *const one = open_path(g, cases[i].num_experts, KV8_PATH_AUTO);
        kv8_model *const many = open_path(g, cases[i].num_experts, KV8_PATH_GRAPH);
        char what[64];
        snprintf(what, sizeof what, "%d experts, %s, case %zu", cases[i].num_experts,
                 kv8_dtype_name(cases[i].shape.dtype), i);
        float *const got = run(one, &cases[i].shape, KV8_PATH_PERSISTENT);
        float *const want = run(many, &cases[i].shape, KV8_PATH_GRAPH);
        check(what, &cases[i].shape, got, want, cases[i].worst, cases[i].num_far);
        free(got);
        free(want);
        kv8_model_close(many);
        kv8_model_close(one);
    }
}

static void runs_repeat(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const run_shape shape = {KV8_E4M3, 16, MIXED, {8, 3, 4, 2, 6, 8}};
    kv8_model *const model = open_path(g, 32, KV8_PATH_AUTO);
    float *const first = run(model, &shape, KV8_PATH_PERSISTENT);
    for (int i = 0; i < 10; i++) {
        float *const again = run(model, &shape, KV8_PATH_PERSISTENT);
        assert_memory_equal(first, again, (size_t)STEPS * MOST * VOCAB * sizeof *first);
        free(again);
    }
    free(first);
    kv8_model_close(model);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_agree_with_the_graph),
        cmocka_unit_test(runs_repeat),
    };
    return cmocka_run_group_tests_name("model_tokens", tests, gpu_open, gpu_close);
}
