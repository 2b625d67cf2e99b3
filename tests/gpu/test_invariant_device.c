/* test_invariant_device.c - batch_invariant on a GPU: whatever else is in a step, however a text is
 * cut into steps, read again or begun anew, a token's logits have the bits of the text run alone.
 *
 * KV8_INVARIANT_STEPS=10000 runs as many steps; without it some hundreds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpu_testing.h"
#include "model_runs.h"

enum { TEXTS = 24, MAX_LEN = 200, SEATS = 20, STEP_TOKENS = 256, VOCAB = 4096 };

typedef struct scene {
    kv8_model *model;
    kv8_safetensors golden;
    const int32_t *ids[TEXTS];
    int32_t lengths[TEXTS];
    float *alone[TEXTS]; /* [length, VOCAB] */
} scene;

static kv8_model *open_invariant(const gpu *g) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = g->device;
    options.stream = g->stream;
    options.batch_invariant = 1;
    options.max_step_seqs = SEATS;
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, tiny_model, &options));
    return model;
}

/* Texts of 1 to MAX_LEN tokens, each run alone. */
static void open_scene(scene *s, void **state, kv8_dtype dtype) {
    int32_t n = 0;
    test_rng rng = {77};
    *s = (scene){.model = open_invariant(gpu_get_with_kernels(state))};
    assert_ok(kv8_safetensors_open(&s->golden, "models/tiny-gpt-oss/golden.safetensors", NULL));
    const int32_t *const ids = golden(&s->golden, "window.ids", KV8_TENSOR_I32, &n);
    for (int i = 0; i < TEXTS; i++) {
        s->lengths[i] = i == 0 ? 1 : rng_range(&rng, 2, MAX_LEN);
        s->ids[i] = ids + rng_range(&rng, 0, n - MAX_LEN);
        s->alone[i] = logits_of(s->model, dtype, 16, s->ids[i], s->lengths[i], 512);
    }
}
static void close_scene(scene *s) {
    for (int i = 0; i < TEXTS; i++) free(s->alone[i]);
    kv8_model_close(s->model);
    kv8_safetensors_close(&s->golden);
}

/* A request under way. */
typedef struct seat_state {
    kv8_seq seq; /* KV8_SEQ_NONE: free */
    int32_t text, done;
} seat_state;

typedef struct storm {
    const scene *s;
    kv8_cache *cache;
    test_rng rng;
    seat_state seats[SEATS];
    float *logits; /* [STEP_TOKENS, VOCAB] */
    int64_t rows;
} storm;

/* Requests come, leave half done, lose their tokens, or some of them. */
static void move_people(storm *m) {
    for (int i = 0; i < SEATS; i++) {
        seat_state *const seat = &m->seats[i];
        const int event = rng_range(&m->rng, 0, 29);
        if (seat->seq == KV8_SEQ_NONE) {
            if (event > 5) continue;
            assert_ok(kv8_cache_seq_create(m->cache, &seat->seq));
            seat->text = rng_range(&m->rng, 0, TEXTS - 1);
            seat->done = 0;
        } else if (event == 0 || seat->done == m->s->lengths[seat->text]) {
            assert_ok(kv8_cache_seq_destroy(m->cache, seat->seq));
            seat->seq = KV8_SEQ_NONE;
        } else if (event == 1) {
            seat->done = 0;
            assert_ok(kv8_cache_truncate(m->cache, seat->seq, 0));
        }
    }
}

/* Half of the steps are of one token a request. */
static void step(storm *m) {
    kv8_seq seqs[SEATS];
    const seat_state *who[SEATS];
    int32_t indptr[SEATS + 1] = {0}, ids[STEP_TOKENS], rows[STEP_TOKENS], num = 0;
    const bool decodes = rng_range(&m->rng, 0, 1) == 0;
    for (int i = 0; i < SEATS; i++) {
        seat_state *const seat = &m->seats[i];
        if (seat->seq == KV8_SEQ_NONE) continue;
        const int32_t left = m->s->lengths[seat->text] - seat->done, begin = indptr[num];
        const int32_t room = STEP_TOKENS - begin < left ? STEP_TOKENS - begin : left;
        const int32_t most = decodes || rng_range(&m->rng, 0, 2) == 0 ? 1 : room;
        if (room == 0) continue;
        const int32_t count = rng_range(&m->rng, 1, most);
        memcpy(ids + begin, m->s->ids[seat->text] + seat->done, (size_t)count * sizeof *ids);
        seqs[num] = seat->seq;
        who[num] = seat;
        seat->done += count;
        indptr[++num] = begin + count;
    }
    if (num == 0) return;
    for (int32_t r = 0; r < indptr[num]; r++) rows[r] = r;
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = num,
                           .seqs = seqs,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = indptr[num],
                           .logit_rows = rows,
                           .logits_out = m->logits};
    assert_ok(kv8_model_step(m->s->model, m->cache, &step));
    for (int i = 0; i < num; i++) {
        const int32_t count = indptr[i + 1] - indptr[i], first = who[i]->done - count;
        for (int32_t r = 0; r < count; r++) {
            const float *const got = m->logits + (size_t)(indptr[i] + r) * VOCAB;
            const float *const want = m->s->alone[who[i]->text] + (size_t)(first + r) * VOCAB;
            if (memcmp(got, want, VOCAB * sizeof *got) != 0)
                fail_msg("text %d, token %d, row %d of %d of %d requests: off by %g", who[i]->text,
                         first + r, indptr[i] + r, indptr[num], num,
                         max_difference(got, want, VOCAB));
        }
    }
    m->rows += indptr[num];
}

static void run_storm(void **state, kv8_dtype dtype, int32_t steps) {
    scene s;
    open_scene(&s, state, dtype);
    storm m = {.s = &s, .rng = {9}};
    m.cache = open_cache(s.model, dtype, 16, SEATS, MAX_LEN, false);
    m.logits = malloc(sizeof(float) * STEP_TOKENS * VOCAB);
    assert_non_null(m.logits);
    for (int i = 0; i < SEATS; i++) m.seats[i].seq = KV8_SEQ_NONE;
    for (int32_t i = 0; i < steps; i++) {
        move_people(&m);
        step(&m);
    }
    print_message("%s: %lld rows of %d steps have the bits of their text alone\n",
                  kv8_dtype_name(dtype), (long long)m.rows, steps);
    free(m.logits);
    kv8_cache_destroy(m.cache);
    close_scene(&s);
}

static int32_t num_steps(int32_t usual) {
    const char *const asked = getenv("KV8_INVARIANT_STEPS");
    return asked == NULL ? usual : (int32_t)strtol(asked, NULL, 10);
}

static void steps_of_an_8_bit_cache(void **state) {
    run_storm(state, KV8_E4M3, num_steps(300));
}
static void steps_of_a_bf16_cache(void **state) {
    run_storm(state, KV8_BF16, 150);
}

/* The same texts cut into chunks of one length. */
static void chunks_alone(void **state) {
    static const int32_t chunks[] = {1, 2, 5, 16, 17, 64, 100};
    scene s;
    open_scene(&s, state, KV8_E4M3);
    for (int i = 0; i < TEXTS; i += 5) {
        for (size_t k = 0; k < sizeof chunks / sizeof chunks[0]; k++) {
            float *const got = logits_of(s.model, KV8_E4M3, 16, s.ids[i], s.lengths[i], chunks[k]);
            for (int32_t t = 0; t < s.lengths[i]; t++) {
                if (memcmp(got + (size_t)t * VOCAB, s.alone[i] + (size_t)t * VOCAB,
                           VOCAB * sizeof *got) != 0)
                    fail_msg("text %d in chunks of %d: token %d is off by %g", i, chunks[k], t,
                             max_difference(got + (size_t)t * VOCAB, s.alone[i] + (size_t)t * VOCAB,
                                            VOCAB));
            }
            free(got);
        }
    }
    close_scene(&s);
}

/* --- requests --- */

enum { REQUESTS = 64, MOST_NEW = 100, LONGEST = 80 };

typedef struct answer {
    kv8_request request;
    kv8_sampling sampling;
    int32_t tokens[MOST_NEW], num;
    float logprobs[MOST_NEW];
    bool done;
} answer;

static void fill_answers(const scene *s, answer *answers) {
    test_rng rng = {31};
    for (int i = 0; i < REQUESTS; i++) {
        answer *const a = &answers[i];
        const int text = rng_range(&rng, 0, TEXTS - 1);
        a->sampling = (kv8_sampling)KV8_SAMPLING_INIT;
        a->sampling.temperature = i % 3 == 0 ? 0 : 0.9f;
        a->sampling.top_p = i % 4 == 1 ? 0.9f : 0;
        a->sampling.top_k = i % 5 == 2 ? 40 : 0;
        a->sampling.repetition_penalty = i % 7 == 3 ? 1.2f : 0;
        a->sampling.seed = rng_u64(&rng);
        a->request = (kv8_request)KV8_REQUEST_INIT;
        a->request.token_ids = s->ids[text];
        a->request.num_tokens =
            rng_range(&rng, 1, s->lengths[text] < LONGEST ? s->lengths[text] : LONGEST);
        a->request.max_tokens = rng_range(&rng, 1, MOST_NEW);
        a->request.sampling = &a->sampling;
        a->request.num_logprobs = i % 2 * 3;
        a->request.max_chunk = i % 6 == 0 ? 7 : 0;
        a->request.ignore_eos = 1;
        a->request.user = a;
        a->num = 0;
        a->done = false;
    }
}

static kv8_engine *open_engine(const scene *s, kv8_cache *cache) {
    kv8_engine *engine = NULL;
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.max_requests = SEATS;
    options.max_waiting = REQUESTS + 8;
    options.step_tokens = STEP_TOKENS;
    options.share_prefixes = 1;
    assert_ok(kv8_engine_create(&engine, s->model, cache, &options));
    return engine;
}

static void take_events(const kv8_engine *engine, int32_t num) {
    for (int32_t i = 0; i < num; i++) {
        const kv8_event *const event = kv8_engine_event(engine, i);
        answer *const a = event->user;
        if (a == NULL) continue;
        assert_int_not_equal(event->finish, KV8_FINISH_FAILED);
        if (event->token >= 0) {
            a->logprobs[a->num] = a->request.num_logprobs > 0 ? event->logprob : 0;
            a->tokens[a->num++] = event->token;
        }
        a->done |= event->finish != KV8_FINISH_NONE;
    }
}

static void answer_alone(const scene *s, answer *a) {
    kv8_cache *const cache = open_cache(s->model, KV8_E4M3, 16, 1, MAX_LEN + MOST_NEW, false);
    kv8_engine *const engine = open_engine(s, cache);
    uint64_t id = 0;
    int32_t num = 1;
    assert_ok(kv8_engine_submit(engine, &a->request, &id));
    while (num > 0) {
        assert_ok(kv8_engine_step(engine, &num));
        take_events(engine, num);
    }
    kv8_engine_destroy(engine);
    kv8_cache_destroy(cache);
}

/* Few pages, so that some lose theirs; every eighth has a neighbour that is cancelled on its way.
 */
static void answer_together(const scene *s, answer *answers) {
    enum { PAGES = 64 };
    kv8_cache *const cache =
        open_pool(s->model, KV8_E4M3, 16, SEATS, MAX_LEN + MOST_NEW, false, PAGES);
    kv8_engine *const engine = open_engine(s, cache);
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    uint64_t leaving[REQUESTS / 8], id = 0;
    int32_t num = 1, num_leaving = 0;
    for (int i = 0; i < REQUESTS; i++) {
        assert_ok(kv8_engine_submit(engine, &answers[i].request, &id));
        if (i % 8 != 0) continue;
        kv8_request other = answers[i].request;
        other.user = NULL;
        other.max_tokens = MOST_NEW;
        assert_ok(kv8_engine_submit(engine, &other, &leaving[num_leaving++]));
    }
    for (int step = 0; num > 0; step++) {
        assert_ok(kv8_engine_step(engine, &num));
        take_events(engine, num);
        if (num_leaving > 0 && step % 5 == 4 &&
            kv8_engine_cancel(engine, leaving[num_leaving - 1]) == KV8_OK)
            num_leaving--;
    }
    assert_ok(kv8_engine_get_stats(engine, &stats));
    print_message("%d requests in %d steps, %d preempted, %d of %d tokens of prompts shared\n",
                  REQUESTS, (int)stats.num_steps, (int)stats.num_preemptions,
                  (int)stats.prefix_hits, (int)stats.prefix_queries);
    assert_true(stats.num_preemptions > 0 && stats.prefix_hits > 0);
    kv8_engine_destroy(engine);
    kv8_cache_destroy(cache);
}

static void requests_together_are_answered_as_alone(void **state) {
    static answer alone[REQUESTS], together[REQUESTS];
    scene s;
    open_scene(&s, state, KV8_E4M3);
    fill_answers(&s, alone);
    fill_answers(&s, together);
    for (int i = 0; i < REQUESTS; i++) answer_alone(&s, &alone[i]);
    answer_together(&s, together);
    for (int i = 0; i < REQUESTS; i++) {
        assert_true(together[i].done);
        assert_int_equal(together[i].num, alone[i].num);
        for (int32_t k = 0; k < alone[i].num; k++) {
            if (together[i].tokens[k] != alone[i].tokens[k] ||
                memcmp(&together[i].logprobs[k], &alone[i].logprobs[k], sizeof(float)) != 0)
                fail_msg("request %d, token %d: %d (%g) beside others, %d (%g) alone", i, k,
                         together[i].tokens[k], (double)together[i].logprobs[k], alone[i].tokens[k],
                         (double)alone[i].logprobs[k]);
        }
    }
    close_scene(&s);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_alone),
        cmocka_unit_test(steps_of_an_8_bit_cache),
        cmocka_unit_test(steps_of_a_bf16_cache),
        cmocka_unit_test(requests_together_are_answered_as_alone),
    };
    return cmocka_run_group_tests_name("invariant_device", tests, gpu_open, gpu_close);
}
