/* test_model_device.c - the model that ships on a GPU, against the model on the host, which agrees
 * with transformers (test_golden.c): logits of every row, choices, chunk borders, batches, formats
 * of the cache, graphs against single launches; what fails leaves cache and model as they were.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "gpu_testing.h"
#include "model_runs.h"

enum { WINDOW = 1024, SEQS = 128 /* of a batch at most */ };

/* Rounding activations to bf16 moves a row's worst logit by 0.05 in the mean, and by more than 1
 * where a router's choice was near and falls the other way: one row in a hundred, as the host's
 * model shows when its activations are rounded. Choices between logits nearer than MARGIN are
 * nobody's. */
static const double NOISE = 0.25, FLIPPED = 2.5, MARGIN = 0.05;

typedef struct scene {
    const gpu *g;
    kv8_model *host, *device;
    kv8_model_info info;
    kv8_safetensors golden;
    const int32_t *ids; /* [WINDOW] */
} scene;

static kv8_model *open_on(const gpu *g, kv8_step_path path) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = g->device;
    options.stream = g->stream;
    options.path = path;
    options.max_step_seqs = SEQS;
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, tiny_model, &options));
    return model;
}

static void open_scene(scene *s, void **state) {
    int32_t n = 0;
    *s = (scene){.g = gpu_get_with_kernels(state), .info = KV8_MODEL_INFO_INIT};
    assert_ok(kv8_safetensors_open(&s->golden, "models/tiny-gpt-oss/golden.safetensors", NULL));
    s->ids = golden(&s->golden, "window.ids", KV8_TENSOR_I32, &n);
    assert_int_equal(n, WINDOW);
    s->host = open_model(tiny_model, KV8_ISA_BEST);
    s->device = open_on(s->g, KV8_PATH_AUTO);
    assert_ok(kv8_model_get_info(s->host, &s->info));
}
static void close_scene(scene *s) {
    kv8_model_close(s->device);
    kv8_model_close(s->host);
    kv8_safetensors_close(&s->golden);
}

static float *alloc_logits(const scene *s, int32_t rows) {
    float *const logits = malloc((size_t)rows * (size_t)s->info.vocab_size * sizeof *logits);
    assert_non_null(logits);
    return logits;
}
static const float *row_of(const scene *s, const float *logits, int32_t row) {
    return logits + (size_t)row * (size_t)s->info.vocab_size;
}

/* The best logit less the next. */
static double margin_of(const float *logits, int32_t n) {
    const int32_t best = argmax_of(logits, n);
    double next = -HUGE_VAL;
    for (int32_t i = 0; i < n; i++) {
        if (i != best && (double)logits[i] > next) next = (double)logits[i];
    }
    return (double)logits[best] - next;
}

/* All rows but four and one in eight within `noise` of the reference's, with the choices that the
 * reference is sure of; the others within ten times that. A router's near choice costs a row more,
 * and through attention the rows after it. */
static void check_rows(const scene *s, const char *what, const float *got, const float *want,
                       int32_t rows, double noise) {
    const int32_t vocab = s->info.vocab_size;
    double worst = 0, total = 0;
    int32_t same = 0, num_far = 0;
    for (int32_t r = 0; r < rows; r++) {
        const float *const a = row_of(s, got, r), *const b = row_of(s, want, r);
        const double error = max_difference(a, b, (size_t)vocab);
        if (!(error <= noise / NOISE * FLIPPED))
            fail_msg("%s: row %d is off by %g", what, r, error);
        const bool is_same = argmax_of(a, vocab) == argmax_of(b, vocab);
        if (!is_same && noise <= NOISE && error <= noise && margin_of(b, vocab) > MARGIN)
            fail_msg("%s: row %d chooses %d, not %d, by %g", what, r, argmax_of(a, vocab),
                     argmax_of(b, vocab), margin_of(b, vocab));
        same += is_same;
        num_far += error > noise;
        total += error;
        if (error > worst) worst = error;
    }
    print_message("%s: %d rows, worst logit off by %.4f, rows' mean %.4f, %d far, top-1 %.4f\n",
                  what, rows, worst, total / rows, num_far, (double)same / rows);
    if (num_far > 4 + rows / 8) fail_msg("%s: %d rows of %d are far off", what, num_far, rows);
}

/* --- one sequence --- */

static void the_window_agrees_with_the_golden(void **state) {
    scene s;
    open_scene(&s, state);
    int32_t num = 0, same = 0;
    const int32_t *const top1 = golden(&s.golden, "window.top1", KV8_TENSOR_I32, &num);
    float *const want = logits_of(s.host, KV8_F32, 16, s.ids, WINDOW, 512);
    float *const got = logits_of(s.device, KV8_F32, 16, s.ids, WINDOW, 512);
    check_rows(&s, "window, f32 KV", got, want, WINDOW, NOISE);
    for (int32_t t = 0; t < num; t++)
        same += argmax_of(row_of(&s, got, t), s.info.vocab_size) == top1[t];
    assert_true(same * 1000 >= num * 995);
    free(want);
    free(got);
    close_scene(&s);
}

static void chunk_borders_and_page_sizes_change_nothing_but_noise(void **state) {
    scene s;
    open_scene(&s, state);
    float *const want = logits_of(s.host, KV8_BF16, 16, s.ids, 320, 512);
    static const int32_t chunks[] = {1, 2, 7, 33, 64, 100, 320};
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
        char what[64];
        snprintf(what, sizeof what, "chunks of %d", chunks[i]);
        float *const got = logits_of(s.device, KV8_BF16, i % 2 ? 32 : 16, s.ids, 320, chunks[i]);
        check_rows(&s, what, got, want, 320, NOISE);
        free(got);
    }
    free(want);
    close_scene(&s);
}

static void formats_of_the_cache_are_those_of_the_host(void **state) {
    scene s;
    open_scene(&s, state);
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_E5M2, KV8_INT8, KV8_F16, KV8_BF16};
    /* A rounding of K or V that falls the other way is an error of the format's size. */
    static const double noise[] = {0.8, 1.5, 0.35, 0.25, 0.25};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        float *const want = logits_of(s.host, dtypes[i], 16, s.ids, 300, 512);
        float *const got = logits_of(s.device, dtypes[i], 16, s.ids, 300, 300);
        check_rows(&s, kv8_dtype_name(dtypes[i]), got, want, 300, noise[i]);
        free(want);
        free(got);
    }
    close_scene(&s);
}

/* --- greedy --- */

/* As long as no choice was near: from there on both go their own ways. */
static void greedy_continuations_are_the_golden_ones(void **state) {
    scene s;
    open_scene(&s, state);
    static const char *const names[] = {"chat0", "chat1", "chat2", "text0",
                                        "text1", "text2", "text3"};
    float *const logits = alloc_logits(&s, 1);
    int32_t equal = 0, total = 0;
    for (size_t p = 0; p < sizeof names / sizeof names[0]; p++) {
        char tensor[64];
        int32_t num_prompt = 0, num = 0, i = 0;
        snprintf(tensor, sizeof tensor, "%s.prompt", names[p]);
        const int32_t *const prompt = golden(&s.golden, tensor, KV8_TENSOR_I32, &num_prompt);
        snprintf(tensor, sizeof tensor, "%s.greedy", names[p]);
        const int32_t *const greedy = golden(&s.golden, tensor, KV8_TENSOR_I32, &num);
        kv8_cache *const cache = open_cache(s.device, KV8_F32, 16, 1, num_prompt + num, false);
        kv8_seq seq = KV8_SEQ_NONE;
        assert_ok(kv8_cache_seq_create(cache, &seq));
        run_ids(s.device, cache, seq, prompt, num_prompt - 1, 512, NULL);
        int32_t next = prompt[num_prompt - 1];
        for (; i < num; i++) {
            run_ids(s.device, cache, seq, &next, 1, 1, logits);
            next = argmax_of(logits, s.info.vocab_size);
            if (next == greedy[i]) continue;
            if (margin_of(logits, s.info.vocab_size) > MARGIN)
                fail_msg("%s: token %d is %d, not %d", names[p], i, next, greedy[i]);
            break;
        }
        equal += i;
        total += num;
        kv8_cache_destroy(cache);
    }
    print_message("greedy: %d of %d tokens before the first near choice\n", equal, total);
    free(logits);
    close_scene(&s);
}

/* --- batches --- */

/* One step of `num` sequences, sequence i taking counts[i] tokens of the window from starts[i] on;
 * logits of every row. */
static void step_batch(const scene *s, kv8_model *model, kv8_cache *cache, const kv8_seq *seqs,
                       int32_t num, const int32_t *starts, const int32_t *counts, float *logits) {
    int32_t indptr[SEQS + 1] = {0}, rows[512], ids[512];
    for (int32_t i = 0; i < num; i++) {
        indptr[i + 1] = indptr[i] + counts[i];
        memcpy(ids + indptr[i], s->ids + starts[i], (size_t)counts[i] * sizeof *ids);
    }
    for (int32_t r = 0; r < indptr[num]; r++) rows[r] = r;
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = num,
                           .seqs = seqs,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = indptr[num],
                           .logit_rows = rows,
                           .logits_out = logits};
    assert_ok(kv8_model_step(model, cache, &step));
}

/* Of prompt i; of many together one to three tokens, which one step takes. */
static int32_t prompt_length(int32_t num, int32_t i) {
    return 1 + 5 * i % (num <= 40 ? 23 : 3);
}

/* Prompts of many lengths in one step, some with a single token, then steps of decode. */
static void run_batch(const scene *s, kv8_model *model, int32_t num, float *logits) {
    kv8_cache *const cache = open_cache(model, KV8_BF16, 16, SEQS, 64, false);
    kv8_seq seqs[SEQS];
    int32_t starts[SEQS], counts[SEQS], total = 0;
    for (int32_t i = 0; i < num; i++) {
        assert_ok(kv8_cache_seq_create(cache, &seqs[i]));
        starts[i] = 17 * i % 900;
        counts[i] = prompt_length(num, i);
        total += counts[i];
    }
    step_batch(s, model, cache, seqs, num, starts, counts, logits);
    for (int32_t turn = 0; turn < 3; turn++) {
        for (int32_t i = 0; i < num; i++) {
            starts[i] += counts[i];
            counts[i] = 1;
        }
        step_batch(s, model, cache, seqs, num, starts, counts,
                   logits + (size_t)(total + turn * num) * (size_t)s->info.vocab_size);
    }
    kv8_cache_destroy(cache);
}

static kv8_model *open_host_batch(void) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.max_step_seqs = SEQS;
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, tiny_model, &options));
    return model;
}

static void batches_agree_with_the_host(void **state) {
    scene s;
    open_scene(&s, state);
    kv8_model *const host = open_host_batch();
    kv8_model *const eager = open_on(s.g, KV8_PATH_EAGER);
    static const int32_t sizes[] = {1, 2, 3, 8, 9, 17, 33, 40, 65, 96, SEQS};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const int32_t num = sizes[i];
        int32_t rows = 3 * num;
        for (int32_t k = 0; k < num; k++) rows += prompt_length(num, k);
        float *const want = alloc_logits(&s, rows), *const got = alloc_logits(&s, rows);
        float *const single = alloc_logits(&s, rows);
        char what[64];
        snprintf(what, sizeof what, "batch of %d", num);
        run_batch(&s, host, num, want);
        run_batch(&s, s.device, num, got);
        run_batch(&s, eager, num, single);
        check_rows(&s, what, got, want, rows, NOISE);
        check_rows(&s, "  launched one by one", single, want, rows, NOISE);
        /* Graphs up to 16 rows are of exactly the launches. */
        if (num <= 16)
            assert_memory_equal(got, single,
                                (size_t)rows * (size_t)s.info.vocab_size * sizeof *got);
        free(want);
        free(got);
        free(single);
    }
    kv8_model_close(eager);
    kv8_model_close(host);
    close_scene(&s);
}

/* A token's bits are the same in every run. */
static void runs_repeat(void **state) {
    scene s;
    open_scene(&s, state);
    float *const first = logits_of(s.device, KV8_E4M3, 16, s.ids, 200, 128);
    for (int i = 0; i < 5; i++) {
        float *const again = logits_of(s.device, KV8_E4M3, 16, s.ids, 200, 128);
        assert_memory_equal(first, again, 200 * (size_t)s.info.vocab_size * sizeof *first);
        free(again);
    }
    free(first);
    close_scene(&s);
}

/* --- scales and caches --- */

/* Sequences with scales of their own beside one without. */
static void sequences_have_their_own_scales(void **state) {
    scene s;
    open_scene(&s, state);
    float *logits[2];
    kv8_model *const models[2] = {s.host, s.device};
    for (int m = 0; m < 2; m++) {
        kv8_cache *const cache = open_cache(models[m], KV8_INT8, 16, 2, 64, false);
        kv8_seq seqs[2];
        const float scale[2] = {0.5f, 3};
        for (int i = 0; i < 2; i++) assert_ok(kv8_cache_seq_create(cache, &seqs[i]));
        for (int32_t layer = 0; layer < s.info.num_layers; layer++)
            assert_ok(kv8_cache_seq_set_scales(cache, seqs[1], layer, scale, scale));
        logits[m] = alloc_logits(&s, 42);
        step_batch(&s, models[m], cache, seqs, 2, (int32_t[]){0, 50}, (int32_t[]){20, 20},
                   logits[m]);
        step_batch(&s, models[m], cache, seqs, 2, (int32_t[]){20, 70}, (int32_t[]){1, 1},
                   logits[m] + 40 * (size_t)s.info.vocab_size);
        kv8_cache_destroy(cache);
    }
    check_rows(&s, "own scales", logits[1], logits[0], 42, 0.5);
    free(logits[0]);
    free(logits[1]);
    close_scene(&s);
}

/* --- true shapes --- */

enum { VOCAB = 5000 };

/* Rows in steps of many, few and one, on a cache of the format. */
static void compare_layers(kv8_model *host, kv8_model *device, kv8_dtype dtype) {
    enum { NUM = 150 };
    int32_t ids[NUM];
    for (int i = 0; i < NUM; i++) ids[i] = 37 * i % VOCAB;
    static const int32_t chunks[] = {150, 16, 5, 1};
    float *const want = logits_of(host, dtype, 16, ids, NUM, NUM);
    for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
        float *const got = logits_of(device, dtype, 16, ids, NUM, chunks[c]);
        double worst = 0, sum = 0;
        for (int r = 0; r < NUM; r++) {
            const double error = row_error(got + r * VOCAB, want + r * VOCAB, VOCAB);
            sum += error;
            if (!(error <= worst)) worst = error;
        }
        print_message("%s, chunks of %d: error of a row %.5f in the mean, %.5f at worst\n",
                      kv8_dtype_name(dtype), chunks[c], sum / NUM, worst);
        assert_true(worst < 4e-3);
        free(got);
    }
    free(want);
}

enum { CHUNKS = 5, CHUNK_ROWS = 102 };

/* A step of five sequences that starts them, with the logits of `rows`, and one of decode. */
static float *step_chunks(kv8_model *model, kv8_dtype dtype, const int32_t *rows, int32_t num) {
    static const int32_t indptr[CHUNKS + 1] = {0, 40, 41, 48, 69, CHUNK_ROWS};
    static const int32_t each[CHUNKS + 1] = {0, 1, 2, 3, 4, 5};
    kv8_cache *const cache = open_cache(model, dtype, 16, CHUNKS, 64, false);
    float *const logits = malloc((size_t)(num + CHUNKS) * VOCAB * sizeof *logits);
    kv8_seq seqs[CHUNKS];
    int32_t ids[CHUNK_ROWS];
    assert_non_null(logits);
    for (int i = 0; i < CHUNKS; i++) assert_ok(kv8_cache_seq_create(cache, &seqs[i]));
    for (int i = 0; i < CHUNK_ROWS; i++) ids[i] = 41 * i % VOCAB;
    kv8_step step = {.struct_size = sizeof step,
                     .num_seqs = CHUNKS,
                     .seqs = seqs,
                     .indptr = indptr,
                     .token_ids = ids,
                     .num_logit_rows = num,
                     .logit_rows = rows,
                     .logits_out = logits};
    assert_ok(kv8_model_step(model, cache, &step));
    step.indptr = each;
    step.num_logit_rows = CHUNKS;
    step.logit_rows = each;
    step.logits_out = logits + (size_t)num * VOCAB;
    assert_ok(kv8_model_step(model, cache, &step));
    kv8_cache_destroy(cache);
    return logits;
}

/* Logits of the last rows of sequences, of others and of none, and what every layer stored. */
static void compare_chunks(kv8_model *host, kv8_model *device, kv8_dtype dtype) {
    static const struct {
        int32_t num, rows[8];
    } wanted[] = {{5, {40, 45, 46, 47, 68}},
                  {1, {101}},
                  {4, {3, 40, 44, 101}},
                  {0, {0}},
                  {8, {39, 40, 47, 68, 98, 99, 100, 101}}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        float *const want = step_chunks(host, dtype, wanted[i].rows, wanted[i].num);
        float *const got = step_chunks(device, dtype, wanted[i].rows, wanted[i].num);
        for (int32_t r = 0; r < wanted[i].num + CHUNKS; r++) {
            const double error = row_error(got + r * VOCAB, want + r * VOCAB, VOCAB);
            if (!(error < 4e-3))
                fail_msg("%s, rows %d of the step: row %d of logits is off by %g",
                         kv8_dtype_name(dtype), wanted[i].num, r, error);
        }
        free(want);
        free(got);
    }
}

/* What enters layers while a text of one sequence is read in chunks: on a GPU kernel by kernel,
 * and of one token by a graph. */
static void compare_inputs(kv8_model *host, kv8_model *device, kv8_stream *stream) {
    enum { NUM = 152, HIDDEN = 2880, KEPT = 3 };
    static float got[150 * HIDDEN], logits[2][VOCAB];
    static const int32_t chunks[] = {150, 1, 1};
    int32_t ids[NUM], at = 0;
    kv8_model *const models[2] = {host, device};
    kv8_cache *caches[2];
    kv8_seq seqs[2];
    for (int i = 0; i < NUM; i++) ids[i] = 53 * i % VOCAB;
    for (int m = 0; m < 2; m++) {
        caches[m] = open_cache(models[m], KV8_F32, 16, 1, NUM, false);
        assert_ok(kv8_cache_seq_create(caches[m], &seqs[m]));
    }
    for (int s = 0; s < 3; at += chunks[s++]) {
        const int32_t rows = chunks[s], indptr[] = {0, rows}, last = rows - 1;
        for (int m = 0; m < 2; m++) {
            const kv8_step step = {.struct_size = sizeof step,
                                   .num_seqs = 1,
                                   .seqs = &seqs[m],
                                   .indptr = indptr,
                                   .token_ids = ids + at,
                                   .num_logit_rows = 1,
                                   .logit_rows = &last,
                                   .logits_out = logits[m]};
            assert_ok(kv8_model_step(models[m], caches[m], &step));
        }
        assert_true(row_error(logits[1], logits[0], VOCAB) < 4e-3);
        for (int32_t k = 0; k < KEPT; k++) {
            const float *const want = kv8_model_layer_input(host, k);
            assert_ok(kv8_stream_copy(stream, got, kv8_model_layer_input(device, k),
                                      (size_t)(rows * HIDDEN) * sizeof *got));
            assert_ok(kv8_stream_synchronize(stream));
            for (int32_t r = 0; r < rows; r++) {
                const double error = row_error(got + r * HIDDEN, want + r * HIDDEN, HIDDEN);
                if (!(error <= (k == 0 ? 0 : 4e-3)))
                    fail_msg("step %d, row %d: what enters layer %d is off by %g", s, r, k, error);
            }
        }
    }
    for (int m = 0; m < 2; m++) kv8_cache_destroy(caches[m]);
}

static void layers_inputs_agree_with_the_hosts(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    assert_ok(kv8_threads_create(&options.threads, 0));
    options.isa = KV8_ISA_AVX2;
    options.input_layers = (int32_t[]){0, 1, 2};
    options.num_input_layers = 3;
    kv8_model *const host = open_published(4, &options);
    options.isa = KV8_ISA_BEST;
    options.device = g->device;
    options.stream = g->stream;
    kv8_model *const device = open_published(4, &options);
    compare_inputs(host, device, g->stream);
    kv8_cache *const cache = open_cache(device, KV8_E4M3, 16, 1, 16, false);
    kv8_step_plan plan = KV8_STEP_PLAN_INIT;
    assert_ok(kv8_model_plan_step(device, cache, NULL, 1, 1, &plan));
    assert_int_equal(plan.path, KV8_PATH_GRAPH);
    assert_string_equal(plan.why_not_persistent, "layers' inputs are kept");
    kv8_cache_destroy(cache);
    kv8_model_close(device);
    kv8_model_close(host);
    kv8_threads_destroy(options.threads);
}

/* Two layers of the published shape and random weights, a window crossed in between. As many
 * experts as a row has, so that no near choice of a router hides what the layers do; keys and
 * values that are f32 or f16, so that none is rounded to another neighbour. The host's sums are
 * f32, of f32 activations: nearer to f64's than a hundredth of the bound. */
static void layers_of_the_published_shape_agree_with_the_host(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    assert_ok(kv8_threads_create(&options.threads, 0));
    options.isa = KV8_ISA_AVX2; /* above it activations are narrowed */
    kv8_model *const host = open_published(4, &options);
    options.isa = KV8_ISA_BEST;
    options.device = g->device;
    options.stream = g->stream;
    kv8_model *const device = open_published(4, &options);
    compare_layers(host, device, KV8_F32);
    compare_layers(host, device, KV8_F16);
    compare_chunks(host, device, KV8_F32);
    compare_chunks(host, device, KV8_F16);
    kv8_model_close(device);
    kv8_model_close(host);
    kv8_threads_destroy(options.threads);
}

/* --- refusals --- */

/* Prompts and steps of decode past the model, on the host or the GPU, counted. */
static kv8_observer *observe_batch(const scene *s, kv8_model *model, float *logits) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_observer *observer = NULL;
    kv8_model_observer_options(model, &options);
    assert_ok(kv8_observer_create(&observer, &options));
    assert_ok(kv8_model_set_observer(model, observer));
    kv8_observer_start(observer);
    run_batch(s, model, 9, logits);
    kv8_observer_stop(observer);
    run_batch(s, model, 9, logits); /* not counted */
    assert_ok(kv8_model_set_observer(model, NULL));
    return observer;
}

/* As many rows of every head as on the host, whatever a graph's batch is padded to, and values that
 * differ by roundings to bf16 alone. */
static void observers_count_what_the_host_counts(void **state) {
    scene s;
    open_scene(&s, state);
    float *const logits = alloc_logits(&s, 512);
    kv8_observer *const want = observe_batch(&s, s.host, logits);
    kv8_observer *const got = observe_batch(&s, s.device, logits);
    double worst = 0;
    for (int tensor = KV8_OBSERVED_K; tensor < KV8_OBSERVED_COUNT; tensor++) {
        const int32_t num = tensor == KV8_OBSERVED_Q ? s.info.num_qo_heads : s.info.num_kv_heads;
        for (int32_t i = 0; i < s.info.num_layers * num; i++) {
            kv8_observed_head a = KV8_OBSERVED_HEAD_INIT, b = a;
            const kv8_observed_tensor of = (kv8_observed_tensor)tensor;
            assert_ok(kv8_observer_get(want, of, i / num, i % num, &a));
            assert_ok(kv8_observer_get(got, of, i / num, i % num, &b));
            assert_true(a.num_rows > 0);
            assert_int_equal(a.num_rows, b.num_rows);
            assert_int_equal(b.nans + b.infs, 0);
            worst = fmax(worst, fabs((double)b.absmax / (double)a.absmax - 1));
        }
    }
    print_message("absmax of heads within %.4f of the host's\n", worst);
    assert_true(worst < 0.1);
    kv8_observer_destroy(want);
    kv8_observer_destroy(got);
    free(logits);
    close_scene(&s);
}

static void what_fails_changes_nothing(void **state) {
    scene s;
    open_scene(&s, state);
    kv8_cache *const cache = open_pool(s.device, KV8_E4M3, 16, 2, 256, false, 4);
    kv8_cache *const elsewhere = open_cache(s.host, KV8_E4M3, 16, 1, 64, false);
    kv8_seq seq = KV8_SEQ_NONE, other = KV8_SEQ_NONE;
    int32_t length = 0, bad = s.info.vocab_size;
    float *const logits = alloc_logits(&s, 1);
    assert_ok(kv8_cache_seq_create(cache, &seq));
    assert_ok(kv8_cache_seq_create(elsewhere, &other));
    run_ids(s.device, cache, seq, s.ids, 30, 30, NULL);
    kv8_step step = {.struct_size = sizeof step,
                     .num_seqs = 1,
                     .seqs = &seq,
                     .indptr = (const int32_t[]){0, 100},
                     .token_ids = s.ids};
    assert_refused(kv8_model_step(s.device, cache, &step), KV8_ERR_FULL, "page");
    step.indptr = (const int32_t[]){0, 1};
    step.token_ids = &bad;
    assert_refused(kv8_model_step(s.device, cache, &step), KV8_ERR_INVALID, "4096");
    step.token_ids = s.ids;
    step.seqs = &other;
    assert_refused(kv8_model_step(s.device, elsewhere, &step), KV8_ERR_INVALID, "host memory");
    step.seqs = &seq;
    assert_refused(kv8_model_step(s.host, cache, &step), KV8_ERR_INVALID, "GPU");
    assert_ok(kv8_cache_seq_length(cache, seq, &length));
    assert_int_equal(length, 30);
    run_ids(s.device, cache, seq, s.ids + 30, 1, 1, logits);
    float *const want = logits_of(s.device, KV8_E4M3, 16, s.ids, 31, 30);
    check_rows(&s, "after failures", logits, row_of(&s, want, 30), 1, NOISE);
    free(want);
    free(logits);
    kv8_cache_destroy(elsewhere);
    kv8_cache_destroy(cache);
    close_scene(&s);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_window_agrees_with_the_golden),
        cmocka_unit_test(chunk_borders_and_page_sizes_change_nothing_but_noise),
        cmocka_unit_test(formats_of_the_cache_are_those_of_the_host),
        cmocka_unit_test(greedy_continuations_are_the_golden_ones),
        cmocka_unit_test(batches_agree_with_the_host),
        cmocka_unit_test(runs_repeat),
        cmocka_unit_test(sequences_have_their_own_scales),
        cmocka_unit_test(layers_inputs_agree_with_the_hosts),
        cmocka_unit_test(layers_of_the_published_shape_agree_with_the_host),
        cmocka_unit_test(observers_count_what_the_host_counts),
        cmocka_unit_test(what_fails_changes_nothing),
    };
    return cmocka_run_group_tests_name("model_device", tests, gpu_open, gpu_close);
}
