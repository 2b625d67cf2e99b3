/* test_sampler_device.c - the draw on a GPU gives the tokens, and the bits of logprobs, that the
 * draw on the host gives for the same logits: every option, ties, infinities of masks and biases,
 * vocabularies of one to half a million ids, which a cluster does not hold.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpu_testing.h"
#include "sampler_device.h"

enum { MAX_ROWS = 300, FEW_ROWS = 40, HISTORY = 300, BIASES = 6, TOPS = 32 };

typedef struct row {
    kv8_sampling sampling;
    int32_t bias_ids[BIASES], history[HISTORY];
    float bias[BIASES];
} row;

typedef struct scene {
    const gpu *g;
    int32_t vocab;
    kv8_sampler *host;
    kv8_device_sampler *device;
    float *logits, *on_device; /* [rows, vocab] */
    float *maxima;             /* the device's, as kv8_model_device_maxima; NULL = none */
    row rows[MAX_ROWS];
    kv8_draw draws[MAX_ROWS];
    int64_t num_drawn;
} scene;

static void open_scene(scene *s, void **state, int32_t vocab, int32_t num) {
    *s = (scene){.g = gpu_get_with_kernels(state), .vocab = vocab};
    assert_ok(kv8_sampler_create(&s->host, vocab, NULL));
    assert_ok(kv8_device_sampler_create(&s->device, s->g->device, s->g->stream, NULL, vocab, num,
                                        num * (HISTORY + BIASES), NULL));
    s->logits = malloc(sizeof(float) * (size_t)num * (size_t)vocab);
    assert_non_null(s->logits);
    s->on_device = gpu_alloc(s->g, sizeof(float) * (size_t)num * (size_t)vocab);
}
static void close_scene(scene *s) {
    print_message("%d ids: %lld rows equal\n", s->vocab, (long long)s->num_drawn);
    kv8_device_free(s->g->device, s->on_device);
    kv8_device_free(s->g->device, s->maxima);
    free(s->logits);
    kv8_device_sampler_destroy(s->device);
    kv8_sampler_destroy(s->host);
}

static float pick_float(test_rng *rng, const float *values, int32_t num) {
    return values[rng_range(rng, 0, num - 1)];
}

/* Sharp, flat, full of ties, all but equal, around zero, of every size. */
static void fill_logits(test_rng *rng, float *logits, int32_t n) {
    const int kind = rng_range(rng, 0, 7);
    for (int32_t i = 0; i < n; i++) {
        const double sum = rng_unit(rng) + rng_unit(rng) + rng_unit(rng) - 1.5;
        switch (kind) {
            case 0: logits[i] = (float)rng_range(rng, -14, 8) * 0.5f; break;
            case 1: logits[i] = -3.25f; break;
            case 2: logits[i] = 1 + (float)rng_range(rng, 0, 3) * 1.1920929e-7f; break;
            case 3: logits[i] = (float)(sum * pow(10, rng_range(rng, -30, 30))); break;
            case 4: logits[i] = (float)(sum * 0.02); break;
            case 5: logits[i] = rng_range(rng, 0, 1) != 0 ? 0.0f : -0.0f; break;
            default: logits[i] = (float)(sum * 5);
        }
    }
    if (kind == 6) logits[rng_range(rng, 0, n - 1)] = 12;
}

/* Some of everything, each step on or off. */
static void fill_row(test_rng *rng, row *r, int32_t vocab) {
    kv8_sampling *const s = &r->sampling;
    *s = (kv8_sampling)KV8_SAMPLING_INIT;
    s->temperature = pick_float(rng, (const float[]){0, 0.3f, 0.7f, 1, 1, 2.5f, 1e-20f, 1e20f}, 8);
    s->top_k = rng_range(rng, 0, 1) * rng_range(rng, 1, rng_range(rng, 0, 1) ? 50 : vocab + 5);
    s->top_p = pick_float(rng, (const float[]){0, 0.1f, 0.5f, 0.9f, 0.99999f, 1, 1e-30f}, 7);
    s->min_p = pick_float(rng, (const float[]){0, 0, 0.05f, 0.4f, 1}, 5);
    if (rng_range(rng, 0, 1) != 0) {
        s->repetition_penalty = pick_float(rng, (const float[]){0, 1, 1.3f, 0.8f, 1e-30f}, 5);
        s->frequency_penalty = pick_float(rng, (const float[]){0, 0, 0.5f, -0.3f, 3e38f}, 5);
        s->presence_penalty = pick_float(rng, (const float[]){0, 0, 1.5f, -1}, 4);
    }
    s->num_bias = vocab < BIASES ? 0 : rng_range(rng, 0, BIASES);
    s->bias_ids = r->bias_ids;
    s->bias = r->bias;
    for (int32_t i = 0; i < s->num_bias; i++) {
        r->bias_ids[i] = (int32_t)((int64_t)vocab * i / BIASES);
        r->bias[i] = pick_float(rng, (const float[]){-3, 2, 20, -INFINITY}, 4);
    }
    for (int32_t i = 0; i < HISTORY; i++)
        r->history[i] = rng_range(rng, 0, rng_range(rng, 0, 1) ? vocab - 1 : (vocab - 1) / 8);
    s->seed = rng_u64(rng);
    s->stream = rng_u64(rng);
}

/* One word in four of a mask's is empty. */
static void fill_mask(test_rng *rng, uint32_t *mask, int32_t vocab) {
    for (int32_t i = 0; i < (vocab + 31) / 32; i++)
        mask[i] = rng_range(rng, 0, 3) == 0 ? 0 : (uint32_t)rng_u64(rng);
}

static void check_row(scene *s, int32_t i, const kv8_drawn *got, const kv8_logprob *tops) {
    const kv8_draw *const d = &s->draws[i];
    const float *const logits = s->logits + (size_t)i * (size_t)s->vocab;
    const uint32_t *const mask = d->mask < 0 ? NULL : kv8_device_sampler_mask(s->device, d->mask);
    const int32_t want = d->token >= 0
                             ? d->token
                             : kv8_sampler_draw(s->host, d->sampling, &d->history, mask, logits);
    const kv8_sampling *const p = d->sampling;
    if (got->bad_id != -1 || got->token != want)
        fail_msg(
            "%d ids, row %d: token %d (bad %d), the host's is %d: T %g, top_k %d, top_p %g, "
            "min_p %g, penalties %g %g %g, %d biases, mask %d",
            s->vocab, i, got->token, got->bad_id, want, (double)p->temperature, p->top_k,
            (double)p->top_p, (double)p->min_p, (double)p->repetition_penalty,
            (double)p->frequency_penalty, (double)p->presence_penalty, p->num_bias, d->mask);
    s->num_drawn++;
    if (d->num_logprobs == 0) return;
    kv8_logprob want_tops[TOPS];
    const float logprob = kv8_sampler_logprobs(s->host, logits, want, d->num_logprobs, want_tops);
    assert_memory_equal(&logprob, &got->logprob, sizeof logprob);
    for (int32_t k = 0; k < d->num_logprobs; k++) {
        if (tops[k].token != want_tops[k].token || tops[k].logprob != want_tops[k].logprob)
            fail_msg("%d ids, row %d: likeliest %d of %d is %d (%g), not %d (%g)", s->vocab, i, k,
                     d->num_logprobs, tops[k].token, (double)tops[k].logprob, want_tops[k].token,
                     (double)want_tops[k].logprob);
    }
}

/* `num` rows in one run. */
static void run_round(scene *s, test_rng *rng, int32_t num) {
    const size_t vocab = (size_t)s->vocab;
    kv8_drawn drawn[MAX_ROWS];
    kv8_logprob tops[MAX_ROWS][TOPS];
    int32_t num_masks = 0;
    int64_t num_changes = 0;
    for (int32_t i = 0; i < num; i++) {
        row *const r = &s->rows[i];
        fill_row(rng, r, s->vocab);
        fill_logits(rng, s->logits + (size_t)i * vocab, s->vocab);
        const int32_t most = s->vocab < TOPS ? s->vocab : TOPS;
        s->draws[i] =
            (kv8_draw){.sampling = &r->sampling,
                       .history = {r->history, rng_range(rng, 1, HISTORY), HISTORY},
                       .mask = rng_range(rng, 0, 3) == 0 ? num_masks++ : -1,
                       .token = rng_range(rng, 0, 5) == 0 ? rng_range(rng, 0, s->vocab - 1) : -1,
                       .num_logprobs = rng_range(rng, 0, 1) * rng_range(rng, 1, most)};
        if (s->draws[i].mask >= 0)
            fill_mask(rng, kv8_device_sampler_mask(s->device, s->draws[i].mask), s->vocab);
        num_changes += kv8_device_sampler_changes(s->device, &r->sampling, HISTORY);
    }
    const size_t bytes = (size_t)num * vocab * sizeof(float);
    float *const after = malloc(bytes);
    assert_non_null(after);
    assert_true(kv8_device_sampler_takes(s->device, num, num_changes));
    assert_ok(kv8_stream_copy(s->g->stream, s->on_device, s->logits, bytes));
    assert_ok(kv8_device_sampler_begin(s->device, s->on_device, s->maxima, s->draws, num));
    assert_ok(kv8_device_sampler_end(s->device, s->draws, num, drawn, tops[0], TOPS));
    for (int32_t i = 0; i < num; i++) check_row(s, i, &drawn[i], tops[i]);
    gpu_download(s->g, after, s->on_device, bytes);
    assert_memory_equal(after, s->logits, bytes);
    free(after);
}

static void tokens_are_those_of_the_host(void **state) {
    static const struct {
        int32_t vocab, rounds;
    } cases[] = {{1, 2},    {2, 10},    {31, 20},   {60, 40},
                 {513, 40}, {4096, 50}, {32000, 4}, {201088, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        scene s;
        test_rng rng = {(uint64_t)cases[i].vocab};
        open_scene(&s, state, cases[i].vocab, FEW_ROWS);
        for (int32_t k = 0; k < cases[i].rounds; k++)
            run_round(&s, &rng, k == 0 ? 1 : rng_range(&rng, 1, FEW_ROWS));
        if (cases[i].rounds == 1) run_round(&s, &rng, FEW_ROWS);
        close_scene(&s);
    }
}

/* More ids than the blocks of a cluster hold: one block has the row where it lies. */
static void a_vocabulary_beyond_shared_memory(void **state) {
    scene s;
    test_rng rng = {5};
    open_scene(&s, state, 500000, 24);
    run_round(&s, &rng, 24);
    close_scene(&s);
}

/* Of `num` rows of logits, to the device. */
static void send_maxima(scene *s, int32_t num) {
    const size_t pieces = (size_t)s->vocab / 64, all = (size_t)num * pieces;
    float *const maxima = malloc(all * sizeof *maxima);
    assert_non_null(maxima);
    for (size_t i = 0; i < all; i++) {
        const float *const piece = s->logits + i / pieces * (size_t)s->vocab + i % pieces * 64;
        maxima[i] = piece[0];
        for (int k = 0; k < 64; k++) {
            if (piece[k] > maxima[i]) maxima[i] = piece[k];
            if (isnan(piece[k])) maxima[i] = NAN;
        }
    }
    assert_ok(kv8_stream_copy(s->g->stream, s->maxima, maxima, all * sizeof *maxima));
    assert_ok(kv8_stream_synchronize(s->g->stream));
    free(maxima);
}

/* Where the model knows the largest of every 64 logits, blocks that have a row each begin from
 * them; rows that are changed or not finite look at all logits as ever, and so do all where one is
 * cut, which rounds 1 and 3 have. Of the last but one round rows are plain. */
static void maxima_give_the_same(void **state) {
    enum { VOCAB = 79 * 64 };
    static const float temperatures[] = {0, 0.7f, 1, 1e-20f}, bad[] = {NAN, INFINITY, -INFINITY};
    scene s;
    test_rng rng = {9};
    open_scene(&s, state, VOCAB, MAX_ROWS);
    s.maxima = gpu_alloc(s.g, sizeof(float) * MAX_ROWS * (VOCAB / 64));
    kv8_drawn drawn[MAX_ROWS];
    kv8_logprob tops[MAX_ROWS][TOPS];
    for (int round = 0; round < 4; round++) {
        for (int32_t i = 0; i < MAX_ROWS; i++) {
            row *const r = &s.rows[i];
            fill_row(&rng, r, VOCAB);
            fill_logits(&rng, s.logits + (size_t)i * VOCAB, VOCAB);
            r->sampling.temperature = temperatures[i % 4];
            if (round % 2 == 0) {
                r->sampling.top_k = 0;
                r->sampling.top_p = r->sampling.min_p = 0;
            }
            if (i % 3 != 0 || round == 2) {
                r->sampling.num_bias = 0;
                r->sampling.repetition_penalty = 0;
                r->sampling.frequency_penalty = r->sampling.presence_penalty = 0;
            }
            s.draws[i] = (kv8_draw){.sampling = &r->sampling,
                                    .history = {r->history, 10, HISTORY},
                                    .mask = -1,
                                    .token = -1,
                                    .num_logprobs = i % 5 == 0 && round != 2 ? 3 : 0};
            for (int32_t id = 65 * i % VOCAB; i % 50 < 3 && id < VOCAB; id++)
                s.logits[i * VOCAB + id] = bad[i % 50];
        }
        assert_ok(
            kv8_stream_copy(s.g->stream, s.on_device, s.logits, sizeof(float) * VOCAB * MAX_ROWS));
        send_maxima(&s, MAX_ROWS);
        assert_ok(kv8_device_sampler_begin(s.device, s.on_device, s.maxima, s.draws, MAX_ROWS));
        assert_ok(kv8_device_sampler_end(s.device, s.draws, MAX_ROWS, drawn, tops[0], TOPS));
        for (int32_t i = 0; i < MAX_ROWS; i++) {
            if (i % 50 < 3)
                assert_int_equal(drawn[i].bad_id, 65 * i % VOCAB);
            else
                check_row(&s, i, &drawn[i], tops[i]);
        }
    }
    close_scene(&s);
}

/* So many that blocks have a row each, and no more than clusters have, on 132 multiprocessors. */
static void many_rows(void **state) {
    scene s;
    test_rng rng = {7};
    open_scene(&s, state, 5003, MAX_ROWS);
    for (int32_t num = 220; num <= MAX_ROWS; num += 40) run_round(&s, &rng, num);
    close_scene(&s);
}

/* Cuts far below the likeliest go over all ids several times, the blocks of a cluster together. */
static void wide_cuts_end_time_after_time(void **state) {
    enum { VOCAB = 201088, ROWS = 64, RUNS = 300, AT_ONCE = 10 };
    static const int32_t counts[] = {1, 8, ROWS};
    scene s;
    test_rng rng = {8};
    open_scene(&s, state, VOCAB, ROWS);
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.temperature = 1.5f;
    sampling.top_p = 0.999f;
    kv8_drawn drawn[ROWS];
    kv8_logprob tops[ROWS];
    for (int32_t i = 0; i < ROWS; i++) {
        s.rows[i].sampling = sampling;
        s.rows[i].sampling.seed = (uint64_t)i;
        s.draws[i] = (kv8_draw){.sampling = &s.rows[i].sampling, .mask = -1, .token = -1};
        for (int32_t id = 0; id < VOCAB; id++)
            s.logits[i * VOCAB + id] = (float)(9 * rng_unit(&rng) * rng_unit(&rng));
    }
    assert_ok(kv8_stream_copy(s.g->stream, s.on_device, s.logits, sizeof(float) * VOCAB * ROWS));
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        int32_t tokens[ROWS];
        for (int32_t run = 0; run < RUNS; run++) {
            for (int i = 0; i < AT_ONCE; i++)
                assert_ok(
                    kv8_device_sampler_begin(s.device, s.on_device, NULL, s.draws, counts[c]));
            assert_ok(kv8_device_sampler_end(s.device, s.draws, counts[c], drawn, tops, 1));
            for (int32_t i = 0; i < counts[c]; i++) {
                if (run == 0) check_row(&s, i, &drawn[i], &tops[i]);
                if (run == 0) tokens[i] = drawn[i].token;
                assert_int_equal(drawn[i].token, tokens[i]);
            }
        }
    }
    close_scene(&s);
}

static void logits_that_are_not_finite_are_named(void **state) {
    enum { VOCAB = 5000 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    scene s;
    test_rng rng = {6};
    open_scene(&s, state, VOCAB, 4);
    const kv8_sampling greedy = KV8_SAMPLING_INIT;
    kv8_drawn drawn[4];
    kv8_logprob tops[4];
    for (int i = 0; i < 4; i++) {
        for (int32_t id = 0; id < VOCAB; id++) s.logits[i * VOCAB + id] = (float)rng_unit(&rng);
        s.draws[i] =
            (kv8_draw){.sampling = &greedy, .mask = -1, .token = -1, .num_logprobs = i % 2};
    }
    for (int i = 0; i < 3; i++) {
        s.logits[i * VOCAB + 4000] = NAN;
        s.logits[i * VOCAB + 1700 * i] = bad[i];
    }
    assert_ok(kv8_stream_copy(s.g->stream, s.on_device, s.logits, sizeof(float) * 4 * VOCAB));
    assert_ok(kv8_device_sampler_begin(s.device, s.on_device, NULL, s.draws, 4));
    assert_ok(kv8_device_sampler_end(s.device, s.draws, 4, drawn, tops, 1));
    for (int i = 0; i < 3; i++) {
        assert_int_equal(drawn[i].bad_id, 1700 * i);
        assert_true(isnan(bad[i]) ? isnan(drawn[i].bad) : drawn[i].bad == bad[i]);
    }
    check_row(&s, 3, &drawn[3], &tops[3]);
    close_scene(&s);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_are_those_of_the_host),
        cmocka_unit_test(a_vocabulary_beyond_shared_memory),
        cmocka_unit_test(maxima_give_the_same),
        cmocka_unit_test(many_rows),
        cmocka_unit_test(wide_cuts_end_time_after_time),
        cmocka_unit_test(logits_that_are_not_finite_are_named),
    };
    return cmocka_run_group_tests_name("sampler_device", tests, gpu_open, gpu_close);
}
