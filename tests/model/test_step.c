/* test_step.c - one step of the model: how tokens are cut into steps, pages and batches does not
 * matter, and a step that fails changes nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model.h"
#include "open_tiny.h"

enum { TOKENS = 300 }; /* beyond the window of 128, and not a multiple of anything */

static size_t logits_count(int32_t n) {
    return (size_t)n * (size_t)info.vocab_size;
}

static void chunks_and_pages_do_not_matter(void **state) {
    (void)state;
    float *const whole = logits_of(model, KV8_F32, 64, ids, TOKENS, 512);
    static const int32_t chunks[] = {1, 2, 3, 4, 5, 6, 7, 64, 512};
    static const int32_t page_sizes[] = {1, 16};
    for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
        for (size_t p = 0; p < 2; p++) {
            if (test_is_short() && p != c % 2) continue;
            /* Single tokens cost most: there, just past the window. */
            const int32_t n = chunks[c] < 7 ? 150 : TOKENS;
            float *const cut = logits_of(model, KV8_F32, page_sizes[p], ids, n, chunks[c]);
            const double error = max_difference(cut, whole, logits_count(n));
            if (!(error <= 1e-4))
                fail_msg("chunk %d, page_size %d: logits differ by %g", chunks[c], page_sizes[p],
                         error);
            free(cut);
        }
    }
    free(whole);
}

static void threads_do_not_matter(void **state) {
    (void)state;
    float *const alone = logits_of(model, KV8_F32, 16, ids, TOKENS, 100);
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 3));
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.threads = threads;
    kv8_model *threaded = NULL;
    assert_ok(kv8_model_open(&threaded, tiny_model, &options));
    float *const together = logits_of(threaded, KV8_F32, 16, ids, TOKENS, 100);
    assert_true(max_difference(together, alone, logits_count(TOKENS)) <= 1e-4);
    free(alone);
    free(together);
    kv8_model_close(threaded);
    kv8_threads_destroy(threads);
}

/* Lengths of a batch's prompts, and how many tokens each adds in the second step. */
enum { BATCH = 4 };
static const int32_t prompt_len[BATCH] = {140, 1, 17, 3}, more_len[BATCH] = {1, 9, 1, 130};

/* Appends len[i] tokens to each sequence in one step; logits of every row. */
static void run_batch(kv8_cache *cache, const kv8_seq *seqs, const int32_t *first,
                      const int32_t *len, float *logits) {
    int32_t indptr[BATCH + 1] = {0}, tokens[512], rows[512];
    for (int i = 0; i < BATCH; i++) {
        for (int32_t t = 0; t < len[i]; t++) {
            rows[indptr[i] + t] = indptr[i] + t;
            tokens[indptr[i] + t] = ids[100 * i + first[i] + t];
        }
        indptr[i + 1] = indptr[i] + len[i];
    }
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = BATCH,
                           .seqs = seqs,
                           .indptr = indptr,
                           .token_ids = tokens,
                           .num_logit_rows = indptr[BATCH],
                           .logit_rows = rows,
                           .logits_out = logits};
    assert_ok(kv8_model_step(model, cache, &step));
}

static void a_batch_equals_its_requests_alone(void **state) {
    (void)state;
    const kv8_dtype dtypes[] = {KV8_F32, KV8_BF16, KV8_E4M3, KV8_E5M2, KV8_INT8};
    float *const prompts = malloc(logits_count(512) * sizeof(float));
    float *const more = malloc(logits_count(512) * sizeof(float));
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        kv8_cache *const cache = open_cache(model, dtypes[d], 16, BATCH, 512, false);
        kv8_seq seqs[BATCH];
        for (int i = 0; i < BATCH; i++) assert_ok(kv8_cache_seq_create(cache, &seqs[i]));
        run_batch(cache, seqs, (const int32_t[BATCH]){0}, prompt_len, prompts);
        run_batch(cache, seqs, prompt_len, more_len, more);
        const float *prompt_at = prompts, *more_at = more;
        for (int i = 0; i < BATCH; i++) {
            const int32_t n = prompt_len[i] + more_len[i];
            kv8_cache *const single = open_cache(model, dtypes[d], 16, 1, n, false);
            kv8_seq seq = KV8_SEQ_NONE;
            assert_ok(kv8_cache_seq_create(single, &seq));
            float *const logits = malloc(logits_count(n) * sizeof *logits);
            run_ids(model, single, seq, ids + 100 * i, prompt_len[i], 512, logits);
            run_ids(model, single, seq, ids + 100 * i + prompt_len[i], more_len[i], 512,
                    logits + logits_count(prompt_len[i]));
            const double first = max_difference(prompt_at, logits, logits_count(prompt_len[i]));
            const double second = max_difference(more_at, logits + logits_count(prompt_len[i]),
                                                 logits_count(more_len[i]));
            if (!(first == 0 && second == 0)) /* the same bits */
                fail_msg("%s, request %d: logits differ by %g and %g", kv8_dtype_name(dtypes[d]), i,
                         first, second);
            prompt_at += logits_count(prompt_len[i]);
            more_at += logits_count(more_len[i]);
            free(logits);
            kv8_cache_destroy(single);
        }
        kv8_cache_destroy(cache);
    }
    free(prompts);
    free(more);
}

/* How the layer's attention would run over the sequences' tables. */
static const char *describe_layer(const kv8_cache *cache, int32_t layer, const kv8_seq *seqs) {
    static char text[512];
    int32_t indptr[BATCH + 1], pages[BATCH * 32], last[BATCH];
    assert_ok(kv8_cache_page_table(cache, layer, seqs, BATCH, indptr, pages, BATCH * 32, last));
    static const int32_t qo_indptr[] = {0, 1, 2, 3, 4};
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = BATCH;
    args.qo_indptr = qo_indptr;
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    table.page_indptr = indptr;
    table.page_indices = pages;
    table.last_page_len = last;
    args.pages = &table;
    const kv8_attention_plan *const plan = model->attention.layers[layer].plan;
    const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
    assert_ok(kv8_attention_prepare(plan, &args, workspace.data));
    assert_ok(kv8_attention_describe(plan, &args, workspace.data, text, sizeof text));
    guarded_free(workspace);
    return text;
}

/* 200 tokens, forked: 12 pages that layers without a window read once for all. */
static void forks_share_their_pages_and_equal_requests_alone(void **state) {
    (void)state;
    enum { STEM = 200 };
    kv8_model *const kept = model;
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.batch_invariant = -1;
    assert_ok(kv8_model_open(&model, tiny_model, &options));
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, BATCH, 256, false);
    kv8_cache *const single = open_cache(model, KV8_F32, 16, 1, 256, false);
    float *const together = malloc(logits_count(BATCH) * sizeof *together);
    float *const alone = malloc(logits_count(1) * sizeof *alone);
    kv8_seq seqs[BATCH];
    assert_ok(kv8_cache_seq_create(cache, &seqs[0]));
    run_ids(model, cache, seqs[0], ids, STEM, 512, NULL);
    for (int i = 1; i < BATCH; i++) assert_ok(kv8_cache_seq_fork(cache, seqs[0], &seqs[i]));
    static const int32_t first[BATCH] = {0, -50, -60, -70}, one[BATCH] = {1, 1, 1, 1};
    run_batch(cache, seqs, first, one, together);
    for (int32_t layer = 0; layer < info.num_layers; layer++) {
        const bool shared = strstr(describe_layer(cache, layer, seqs),
                                   "cascade: 4 requests in 1 group read 192 shared keys once");
        assert_int_equal(shared, model->window_left[layer] == -1);
    }
    for (int i = 0; i < BATCH; i++) {
        kv8_seq seq = KV8_SEQ_NONE;
        assert_ok(kv8_cache_seq_create(single, &seq));
        run_ids(model, single, seq, ids, STEM, 512, NULL);
        run_ids(model, single, seq, ids + 100 * i + first[i], 1, 1, alone);
        const double error = max_difference(together + logits_count(i), alone, logits_count(1));
        if (!(error <= 1e-4)) fail_msg("fork %d: logits differ by %g", i, error);
        assert_ok(kv8_cache_seq_destroy(single, seq));
    }
    free(alone);
    free(together);
    kv8_cache_destroy(single);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
    model = kept;
}

static float *logits_without(const kv8_model_options *options, int32_t n) {
    kv8_model *changed = NULL;
    assert_ok(kv8_model_open(&changed, tiny_model, options));
    float *const logits = logits_of(changed, KV8_F32, 16, ids, n, 512);
    kv8_model_close(changed);
    return logits;
}

/* The first 128 tokens see nothing of the window; sinks are there from the first. */
static void sinks_and_windows_can_be_left_out(void **state) {
    (void)state;
    enum { INSIDE = 128 };
    float *const whole = logits_of(model, KV8_F32, 16, ids, TOKENS, 512);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.without_window = 1;
    float *const wide = logits_without(&options, TOKENS);
    const size_t inside = logits_count(INSIDE), outside = logits_count(TOKENS - INSIDE);
    assert_true(max_difference(wide, whole, inside) <= 1e-4);
    assert_true(max_difference(wide + inside, whole + inside, outside) > 0.1);
    options = (kv8_model_options)KV8_MODEL_OPTIONS_INIT;
    options.without_sinks = 1;
    float *const bare = logits_without(&options, TOKENS);
    assert_true(max_difference(bare, whole, logits_count(1)) > 0.1);
    free(whole);
    free(wide);
    free(bare);
    kv8_model *changed = NULL;
    options.batch_invariant = 2;
    assert_refused(kv8_model_open(&changed, tiny_model, &options), KV8_ERR_INVALID,
                   "batch_invariant is 2");
}

/* Only the wanted rows are written, and they are those of a step that wants all. */
static void wanted_rows_are_picked(void **state) {
    (void)state;
    float *const all = logits_of(model, KV8_F32, 16, ids, 40, 512);
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, 40, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    const int32_t indptr[] = {0, 40}, rows[] = {0, 7, 39};
    const guarded logits = guarded_alloc(logits_count(3) * sizeof(float));
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = 1,
                           .seqs = &seq,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = 3,
                           .logit_rows = rows,
                           .logits_out = logits.data};
    assert_ok(kv8_model_step(model, cache, &step));
    for (size_t i = 0; i < 3; i++)
        assert_memory_equal((const float *)logits.data + logits_count((int32_t)i),
                            all + logits_count(rows[i]), logits_count(1) * sizeof(float));
    guarded_free(logits);
    free(all);
    kv8_cache_destroy(cache);
}

/* One model, caches that differ in one thing each, in turn: the plans follow. */
static void caches_may_alternate(void **state) {
    (void)state;
    enum { TURNS = 200, STEP = 50, KINDS = 5 }; /* the windows move on */
    static const struct {
        kv8_dtype k, v;
        int32_t page_size;
        bool keep_all;
    } kinds[KINDS] = {{KV8_F32, KV8_F32, 16, false},
                      {KV8_BF16, KV8_F32, 16, false},
                      {KV8_BF16, KV8_E4M3, 16, false},
                      {KV8_BF16, KV8_E4M3, 8, false},
                      {KV8_BF16, KV8_E4M3, 8, true}};
    kv8_cache *caches[KINDS], *again[KINDS];
    kv8_seq seqs[KINDS], again_seqs[KINDS];
    for (int i = 0; i < KINDS; i++) {
        kv8_cache_layer layers[64] = {KV8_CACHE_LAYER_INIT};
        kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
        assert_ok(kv8_model_cache_layers(model, kinds[i].k, kinds[i].v, layers, &options));
        for (int32_t l = 0; kinds[i].keep_all && l < info.num_layers; l++)
            layers[l].window_left = -1;
        options.page_size = kinds[i].page_size;
        options.num_pages = TURNS / 8;
        options.max_seqs = 1;
        options.max_seq_len = TURNS;
        assert_ok(kv8_cache_create(&caches[i], &options));
        assert_ok(kv8_cache_create(&again[i], &options));
        assert_ok(kv8_cache_seq_create(caches[i], &seqs[i]));
        assert_ok(kv8_cache_seq_create(again[i], &again_seqs[i]));
    }
    float *const whole = malloc(logits_count(KINDS * TURNS) * sizeof *whole);
    float *const logits = malloc(logits_count(STEP) * sizeof *logits);
    for (int i = KINDS - 1; i >= 0; i--) /* each alone: the same steps after another neighbour */
        run_ids(model, again[i], again_seqs[i], ids, TURNS, STEP, whole + logits_count(i * TURNS));
    for (int32_t begin = 0; begin < TURNS; begin += STEP) {
        for (int i = 0; i < KINDS; i++) {
            run_ids(model, caches[i], seqs[i], ids + begin, STEP, STEP, logits);
            assert_memory_equal(logits, whole + logits_count(i * TURNS + begin),
                                logits_count(STEP) * sizeof *logits);
        }
    }
    for (int i = 0; i < KINDS; i++) {
        kv8_cache_destroy(caches[i]);
        kv8_cache_destroy(again[i]);
    }
    free(whole);
    free(logits);
}

static int32_t length_of(const kv8_cache *cache, kv8_seq seq) {
    int32_t length = -1;
    assert_ok(kv8_cache_seq_length(cache, seq, &length));
    return length;
}

static void a_full_pool_changes_nothing(void **state) {
    (void)state;
    /* Six pages of 16 in each group: two requests of 40 fill them. */
    kv8_cache_layer layers[64] = {KV8_CACHE_LAYER_INIT};
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    assert_ok(kv8_model_cache_layers(model, KV8_F32, KV8_F32, layers, &options));
    options.page_size = 16;
    options.num_pages = 6;
    options.max_seqs = 2;
    options.max_seq_len = 512;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    kv8_seq seqs[2];
    assert_ok(kv8_cache_seq_create(cache, &seqs[0]));
    assert_ok(kv8_cache_seq_create(cache, &seqs[1]));
    run_ids(model, cache, seqs[0], ids, 40, 512, NULL);
    run_ids(model, cache, seqs[1], ids + 100, 40, 512, NULL);
    /* The first request has room for one token in its last page, the second asks for too much. */
    const int32_t indptr[] = {0, 1, 11};
    int32_t tokens[11] = {ids[40]};
    for (int t = 0; t < 10; t++) tokens[1 + t] = ids[140 + t];
    float *const logits = malloc(logits_count(20) * sizeof *logits);
    const int32_t row = 0;
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = 2,
                           .seqs = seqs,
                           .indptr = indptr,
                           .token_ids = tokens,
                           .num_logit_rows = 1,
                           .logit_rows = &row,
                           .logits_out = logits};
    assert_int_equal(kv8_model_step(model, cache, &step), KV8_ERR_FULL);
    assert_true(strlen(kv8_status_message()) > 0);
    assert_int_equal(length_of(cache, seqs[0]), 40);
    assert_int_equal(length_of(cache, seqs[1]), 40);
    /* Both go on as if nothing had been. */
    for (int s = 0; s < 2; s++) {
        run_ids(model, cache, seqs[s], ids + 100 * s + 40, 8, 512, logits);
        float *const alone = logits_of(model, KV8_F32, 16, ids + 100 * s, 48, 512);
        assert_true(max_difference(logits, alone + logits_count(40), logits_count(8)) <= 1e-4);
        free(alone);
    }
    free(logits);
    kv8_cache_destroy(cache);
}

static void bad_steps_are_refused(void **state) {
    (void)state;
    enum { SIZE = sizeof(kv8_step) };
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 2, 64, false);
    kv8_seq seqs[2];
    assert_ok(kv8_cache_seq_create(cache, &seqs[0]));
    assert_ok(kv8_cache_seq_create(cache, &seqs[1]));
    const kv8_seq twice[] = {seqs[0], seqs[0]}, stale[] = {seqs[0], seqs[1] + 12345};
    const int32_t indptr[] = {0, 2, 4}, empty[] = {0, 2, 2}, shifted[] = {1, 2, 4};
    const int32_t far[] = {0, 2, 513};
    const int32_t tokens[] = {1, 2, 3, 4}, high[] = {1, 2, 4096, 4}, low[] = {-1, 2, 3, 4};
    const int32_t rows[] = {1, 3}, same[] = {1, 1}, outside[] = {1, 4};
    float *const logits = malloc(logits_count(2) * sizeof *logits);
    const struct {
        kv8_step step;
        const char *part;
    } cases[] = {
        {{0, 2, seqs, indptr, tokens, 0, NULL, NULL}, "kv8_step.struct_size is 0, must be 64"},
        {{SIZE, 0, seqs, indptr, tokens, 0, NULL, NULL}, "a step of 0 requests, must be 1 to 16"},
        {{SIZE, 17, seqs, indptr, tokens, 0, NULL, NULL}, "a step of 17 requests"},
        {{SIZE, 2, NULL, indptr, tokens, 0, NULL, NULL}, "NULL"},
        {{SIZE, 2, seqs, empty, tokens, 0, NULL, NULL}, "request 1 of the step has no token"},
        {{SIZE, 2, seqs, shifted, tokens, 0, NULL, NULL}, "indptr[0] is 1"},
        {{SIZE, 2, seqs, far, tokens, 0, NULL, NULL},
         "513 tokens or more, this model was opened for 512"},
        {{SIZE, 2, seqs, indptr, high, 0, NULL, NULL},
         "token id 4096 at row 2 is not from 0 to 4095"},
        {{SIZE, 2, seqs, indptr, low, 0, NULL, NULL}, "token id -1 at row 0"},
        {{SIZE, 2, twice, indptr, tokens, 0, NULL, NULL},
         "requests 0 and 1 of the step are one sequence"},
        {{SIZE, 2, stale, indptr, tokens, 0, NULL, NULL}, ""},
        {{SIZE, 2, seqs, indptr, tokens, 2, rows, NULL}, "logits_out is NULL"},
        {{SIZE, 2, seqs, indptr, tokens, 5, rows, logits},
         "5 rows of logits wanted, must be 0 to 4"},
        {{SIZE, 2, seqs, indptr, tokens, 2, same, logits},
         "logit_rows[1] is 1, must be from 2 to 3"},
        {{SIZE, 2, seqs, indptr, tokens, 2, outside, logits}, "logit_rows[1] is 4"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const kv8_status status = kv8_model_step(model, cache, &cases[i].step);
        assert_true(status == KV8_ERR_INVALID || (cases[i].part[0] == '\0' && status != KV8_OK));
        if (strstr(kv8_status_message(), cases[i].part) == NULL)
            fail_msg("\"%s\" does not name \"%s\"", kv8_status_message(), cases[i].part);
        assert_int_equal(length_of(cache, seqs[0]), 0);
        assert_int_equal(length_of(cache, seqs[1]), 0);
    }
    free(logits);
    kv8_cache_destroy(cache);
}

static void lengths_beyond_the_limits_are_refused(void **state) {
    (void)state;
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.max_seq_len = 20;
    options.max_step_tokens = 16;
    kv8_model *short_model = NULL;
    assert_ok(kv8_model_open(&short_model, tiny_model, &options));
    kv8_cache *const cache = open_cache(short_model, KV8_F32, 16, 1, 64, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(short_model, cache, seq, ids, 16, 16, NULL);
    const int32_t indptr[] = {0, 5};
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = 1,
                           .seqs = &seq,
                           .indptr = indptr,
                           .token_ids = ids};
    assert_refused(kv8_model_step(short_model, cache, &step), KV8_ERR_INVALID,
                   "would have 21 tokens, the limit of max_seq_len is 20");
    assert_int_equal(length_of(cache, seq), 16);
    kv8_cache_destroy(cache);
    kv8_model_close(short_model);
    options.max_seq_len = 131073;
    assert_refused(kv8_model_open(&short_model, tiny_model, &options), KV8_ERR_INVALID,
                   "max_seq_len is 131073, must be 0 (131072) to 131072");
    assert_null(short_model);
}

/* What the layers of a younger caller have behind today's fields stays as it was. */
static void cache_layers_step_by_the_size_of_the_first(void **state) {
    (void)state;
    struct {
        kv8_cache_layer known;
        uint64_t future;
    } layers[64] = {{KV8_CACHE_LAYER_INIT, 0}};
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    layers->known.struct_size = 0;
    assert_refused(kv8_model_cache_layers(model, KV8_BF16, KV8_E4M3, &layers->known, &options),
                   KV8_ERR_INVALID, "kv8_cache_layer.struct_size is 0, must be 40");
    layers->known.struct_size = sizeof *layers;
    for (int32_t i = 0; i < info.num_layers; i++) layers[i].future = (uint64_t)i;
    assert_ok(kv8_model_cache_layers(model, KV8_BF16, KV8_E4M3, &layers->known, &options));
    assert_ptr_equal(options.layers, layers);
    for (int32_t i = 0; i < info.num_layers; i++) {
        assert_int_equal(layers[i].known.struct_size, sizeof *layers);
        assert_int_equal(layers[i].known.k_dtype, KV8_BF16);
        assert_int_equal(layers[i].known.v_dtype, KV8_E4M3);
        assert_int_equal(layers[i].known.window_left, kv8_model_layer_window(model, i));
        assert_int_equal(layers[i].future, i);
    }
}

static void foreign_caches_are_refused(void **state) {
    (void)state;
    kv8_cache_layer layers[64] = {KV8_CACHE_LAYER_INIT};
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    assert_ok(kv8_model_cache_layers(model, KV8_F32, KV8_F32, layers, &options));
    options.page_size = options.num_pages = 4;
    options.max_seqs = 1;
    options.max_seq_len = 16;
    const int32_t indptr[] = {0, 1};
    for (int which = 0; which < 4; which++) {
        kv8_cache_options changed = options;
        kv8_cache_layer windows[64];
        memcpy(windows, layers, sizeof windows);
        changed.layers = windows;
        if (which == 0) changed.num_layers--;
        if (which == 1) changed.num_kv_heads++;
        if (which == 2) windows[1].window_left = 127; /* a full layer */
        if (which == 3) windows[0].window_left = 126; /* a sliding one, a key too few */
        static const char *const parts[] = {"layers = 5, this model needs 6", "kv heads = 3",
                                            "layer 1: the cache keeps a window of 127",
                                            "layer 0: the cache keeps a window of 126"};
        kv8_cache *cache = NULL;
        assert_ok(kv8_cache_create(&cache, &changed));
        kv8_seq seq = KV8_SEQ_NONE;
        assert_ok(kv8_cache_seq_create(cache, &seq));
        const kv8_step step = {.struct_size = sizeof(kv8_step),
                               .num_seqs = 1,
                               .seqs = &seq,
                               .indptr = indptr,
                               .token_ids = ids};
        assert_refused(kv8_model_step(model, cache, &step), KV8_ERR_INVALID, parts[which]);
        assert_int_equal(length_of(cache, seq), 0);
        kv8_cache_destroy(cache);
    }
}

/* Every allocation of open, and of the first step on a cache, may fail. */
static void allocation_failures_leak_nothing(void **state) {
    (void)state;
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, 64, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    const int32_t indptr[] = {0, 4};
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = 1,
                           .seqs = &seq,
                           .indptr = indptr,
                           .token_ids = ids};
    int64_t failures = 0;
    for (bool done = false; !done; failures++) {
        failing_heap heap = {.fail_at = failures};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
        options.allocator = &allocator;
        options.max_step_tokens = 8;
        options.max_seq_len = 64;
        kv8_model *fragile = NULL;
        kv8_status status = kv8_model_open(&fragile, tiny_model, &options);
        assert_true((status == KV8_OK) == (fragile != NULL));
        if (status == KV8_OK) status = kv8_model_step(fragile, cache, &step);
        done = status == KV8_OK;
        if (!done) {
            assert_int_equal(status, KV8_ERR_NO_MEMORY);
            assert_int_equal(length_of(cache, seq), 0);
        }
        kv8_model_close(fragile);
        assert_int_equal(heap.live, 0);
    }
    assert_true(failures > 20);
    kv8_cache_destroy(cache);
}

/* A second step on the same cache allocates nothing. */
static void steps_allocate_nothing(void **state) {
    (void)state;
    failing_heap heap = {.fail_at = -1};
    const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.allocator = &allocator;
    options.max_seq_len = 64;
    kv8_model *counted = NULL;
    assert_ok(kv8_model_open(&counted, tiny_model, &options));
    assert_int_equal(kv8_model_get_options(counted)->max_step_tokens, 512);
    kv8_cache *const cache = open_cache(counted, KV8_E4M3, 16, 1, 64, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    run_ids(counted, cache, seq, ids, 4, 4, NULL);
    const int64_t calls = heap.calls;
    run_ids(counted, cache, seq, ids + 4, 20, 5, NULL);
    assert_int_equal(heap.calls, calls);
    kv8_cache_destroy(cache);
    kv8_model_close(counted);
    assert_int_equal(heap.live, 0);
}

static void the_tiny_models_facts(void **state) {
    (void)state;
    assert_int_equal(info.num_layers, 6);
    assert_int_equal(info.num_full_layers, 3);
    assert_int_equal(info.num_sliding_layers, 3);
    assert_int_equal(kv8_model_layer_window(model, 0), 127);
    assert_int_equal(kv8_model_layer_window(model, 1), -1);
    assert_int_equal(info.window_left, 127);
    assert_int_equal(info.max_seq_len, 131072);
    assert_int_equal(info.num_tensors, 117);
    assert_int_equal(info.num_files, 1);
    assert_int_equal(info.bytes, 13269976 - 12560 - 8);
    assert_int_equal(info.num_eos, 3);
    assert_int_equal(info.eos[0], 4084);
    assert_string_equal(info.architecture, "GptOssForCausalLM");
    /* README of the model: 13.56 M parameters. */
    assert_in_range(info.num_parameters, 13555000, 13565000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_tiny_models_facts),
        cmocka_unit_test(chunks_and_pages_do_not_matter),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(a_batch_equals_its_requests_alone),
        cmocka_unit_test(forks_share_their_pages_and_equal_requests_alone),
        cmocka_unit_test(sinks_and_windows_can_be_left_out),
        cmocka_unit_test(wanted_rows_are_picked),
        cmocka_unit_test(caches_may_alternate),
        cmocka_unit_test(a_full_pool_changes_nothing),
        cmocka_unit_test(bad_steps_are_refused),
        cmocka_unit_test(lengths_beyond_the_limits_are_refused),
        cmocka_unit_test(cache_layers_step_by_the_size_of_the_first),
        cmocka_unit_test(foreign_caches_are_refused),
        cmocka_unit_test(allocation_failures_leak_nothing),
        cmocka_unit_test(steps_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
