/* test_sampler.c - the draw of a token against its definition, written again with sorted lists and
 * f64; Philox against its authors' known answers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "philox.h"
#include "sampler.h"
#include "testing.h"

enum { VOCAB = 60 };

/* Random123's kat_vectors, philox4x32 10. */
static void philox_gives_the_known_answers(void **state) {
    (void)state;
    static const struct {
        uint32_t counter[4];
        uint64_t key;
        uint32_t out[4];
    } cases[] = {
        {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         0xffffffffffffffff,
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         0x299f31d0a4093822,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t words[4];
        memcpy(words, cases[i].counter, sizeof words);
        kv8_philox4x32(words, cases[i].key);
        assert_memory_equal(words, cases[i].out, sizeof words);
    }
}

/* --- the definition again --- */

typedef struct candidate {
    int32_t id;
    double logit, weight;
    bool in;
} candidate;

static int by_logit(const void *a, const void *b) {
    const candidate *const x = a, *const y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id - y->id;
}

static double adjusted(const kv8_sampling *s, const kv8_history *h, const float *logits,
                       int32_t id) {
    double l = (double)logits[id];
    int in_prompt = 0, generated = 0;
    for (int32_t i = 0; i < s->num_bias; i++) {
        if (s->bias_ids[i] == id) l += (double)s->bias[i];
    }
    for (int32_t i = 0; i < h->num_tokens; i++) {
        if (h->token_ids[i] != id) continue;
        in_prompt += i < h->num_prompt;
        generated += i >= h->num_prompt;
    }
    const double r = (double)s->repetition_penalty;
    if (r != 0 && in_prompt + generated > 0) l = l > 0 ? l / r : l * r;
    l -= (double)s->frequency_penalty * generated;
    return generated > 0 ? l - (double)s->presence_penalty : l;
}

static double sum_of(const candidate *c) {
    double sum = 0;
    for (int i = 0; i < VOCAB; i++) sum += c[i].in ? c[i].weight : 0;
    return sum;
}

/* Everything but the draw: c sorted by falling logit, `in` for those that stay. False when a cut
 * falls too near to a boundary for f32 and f64 to agree on. */
static bool define(candidate *c, const kv8_sampling *s, const kv8_history *h, const float *logits) {
    for (int32_t i = 0; i < VOCAB; i++) c[i] = (candidate){i, adjusted(s, h, logits, i), 0, true};
    qsort(c, VOCAB, sizeof *c, by_logit);
    for (int i = 0; i < VOCAB; i++) {
        c[i].weight = exp((c[i].logit - c[0].logit) / (double)s->temperature);
        if (s->top_k > 0 && i >= s->top_k) c[i].in = false;
    }
    bool clear = true;
    if (s->top_p > 0) {
        const double limit = sum_of(c) * (double)s->top_p;
        double before = 0;
        for (int i = 0; i < VOCAB && c[i].in; i++) {
            if (i > 0 && fabs(before - limit) < 1e-5) clear = false;
            before += c[i].weight;
            if (i > 0 && before - c[i].weight >= limit) c[i].in = false;
        }
    }
    for (int i = 0; i < VOCAB; i++) {
        if (fabs(c[i].weight - (double)s->min_p) < 1e-5 && s->min_p > 0 && s->min_p < 1)
            clear = false;
        if (c[i].weight < (double)s->min_p) c[i].in = false;
    }
    return clear;
}

static const candidate *find(const candidate *c, int32_t id) {
    while (c->id != id) c++;
    return c;
}

/* Does u lie in the token's part of [0, 1), the ids that stay laid end to end by id? */
static bool owns(const candidate *c, int32_t token, double u) {
    double before = 0;
    for (int32_t id = 0; id < token; id++) {
        const candidate *const other = find(c, id);
        before += other->in ? other->weight : 0;
    }
    const double sum = sum_of(c), weight = find(c, token)->weight;
    return find(c, token)->in && u >= before / sum - 1e-5 && u <= (before + weight) / sum + 1e-5;
}

static double uniform(const kv8_sampling *s, int32_t position) {
    uint32_t words[4] = {(uint32_t)position, 0, (uint32_t)s->stream, (uint32_t)(s->stream >> 32)};
    kv8_philox4x32(words, s->seed);
    return words[1] * 0x1p-32 + words[0] * 0x1p-64;
}

static float pick_float(test_rng *rng, const float *values, int32_t num) {
    return values[rng_range(rng, 0, num - 1)];
}

/* Some of everything, each step on or off. */
static kv8_sampling random_sampling(test_rng *rng, int32_t *bias_ids, float *bias) {
    kv8_sampling s = KV8_SAMPLING_INIT;
    s.temperature = pick_float(rng, (const float[]){0.3f, 0.7f, 1, 2.5f}, 4);
    s.top_k = rng_range(rng, 0, 1) * rng_range(rng, 1, VOCAB + 5);
    s.top_p = pick_float(rng, (const float[]){0, 0.1f, 0.5f, 0.9f, 0.999f, 1}, 6);
    s.min_p = pick_float(rng, (const float[]){0, 0, 0.05f, 0.4f}, 4);
    s.repetition_penalty = pick_float(rng, (const float[]){0, 1, 1.3f, 0.8f}, 4);
    s.frequency_penalty = pick_float(rng, (const float[]){0, 0, 0.5f, -0.3f}, 4);
    s.presence_penalty = pick_float(rng, (const float[]){0, 0, 1.5f, -1}, 4);
    s.num_bias = rng_range(rng, 0, 3);
    s.bias_ids = bias_ids;
    s.bias = bias;
    for (int32_t i = 0; i < s.num_bias; i++) {
        bias_ids[i] = i * 7 + rng_range(rng, 0, 6);
        bias[i] = pick_float(rng, (const float[]){-3, 2, -INFINITY}, 3);
    }
    s.seed = rng_u64(rng);
    s.stream = rng_u64(rng);
    return s;
}

static void draws_follow_the_definition(void **state) {
    (void)state;
    kv8_sampler *sampler = NULL;
    assert_ok(kv8_sampler_create(&sampler, VOCAB, NULL));
    test_rng rng = {11};
    int num_clear = 0;
    for (int round = 0; round < 4000; round++) {
        int32_t bias_ids[3], ids[40];
        float bias[3], logits[VOCAB];
        /* Halves: ties are frequent, and f32 adds them exactly. */
        for (int i = 0; i < VOCAB; i++) logits[i] = (float)rng_range(&rng, -14, 8) * 0.5f;
        for (int i = 0; i < 40; i++) ids[i] = rng_range(&rng, 0, VOCAB - 1);
        const kv8_sampling s = random_sampling(&rng, bias_ids, bias);
        const kv8_history history = {ids, rng_range(&rng, 1, 40), 40};
        assert_ok(kv8_sampling_check(&s, VOCAB));
        candidate c[VOCAB];
        const int32_t token = kv8_sampler_draw(sampler, &s, &history, NULL, logits);
        assert_true(token >= 0 && token < VOCAB);
        if (!define(c, &s, &history, logits)) continue;
        num_clear++;
        if (!owns(c, token, uniform(&s, history.num_tokens)))
            fail_msg("round %d: token %d is not what the definition draws", round, token);
        /* Greedy: the same, first of the sorted list. */
        kv8_sampling cold = s;
        cold.temperature = 0;
        assert_int_equal(kv8_sampler_draw(sampler, &cold, &history, NULL, logits), c[0].id);
        assert_int_equal(kv8_sampler_draw(sampler, &s, &history, NULL, logits), token);
    }
    assert_true(num_clear > 3000);
    kv8_sampler_destroy(sampler);
}

/* top_k over logits so close that all weights are equal: the logits decide, not the weights. */
static void cuts_go_by_logits_then_ids(void **state) {
    (void)state;
    kv8_sampler *sampler = NULL;
    assert_ok(kv8_sampler_create(&sampler, 6, NULL));
    const float logits[6] = {1, 1.0000001f, 1, -0.0f, 0.0f, 1.0000002f};
    kv8_sampling s = KV8_SAMPLING_INIT;
    s.temperature = 100;
    static const int32_t order[6] = {5, 1, 0, 2, 3, 4};
    for (int32_t k = 1; k <= 6; k++) {
        bool seen[6] = {false};
        s.top_k = k;
        for (s.seed = 0; s.seed < 200; s.seed++) {
            const kv8_history history = {NULL, 0, 0};
            seen[kv8_sampler_draw(sampler, &s, &history, NULL, logits)] = true;
        }
        for (int i = 0; i < 6; i++) assert_int_equal(seen[order[i]], i < k);
    }
    /* Two halves: the first of them is already half of the probability. */
    const float halves[6] = {0, 0, -90, -90, -90, -90};
    s = (kv8_sampling)KV8_SAMPLING_INIT;
    s.temperature = 1;
    s.top_p = 0.5f;
    for (s.seed = 0; s.seed < 50; s.seed++) {
        const kv8_history history = {NULL, 0, 0};
        assert_int_equal(kv8_sampler_draw(sampler, &s, &history, NULL, halves), 0);
    }
    kv8_sampler_destroy(sampler);
}

/* Frequencies of 40000 draws against the softmax, within five standard deviations. */
static void draws_follow_the_softmax(void **state) {
    (void)state;
    enum { IDS = 5, DRAWS = 40000 };
    const float logits[IDS] = {1.0f, 2.0f, -9.0f, -60.0f, 0.0f};
    const float temperatures[] = {0.5f, 1.0f, 3.0f, 1e30f};
    kv8_sampler *sampler = NULL;
    assert_ok(kv8_sampler_create(&sampler, IDS, NULL));
    for (size_t t = 0; t < 4; t++) {
        kv8_sampling s = KV8_SAMPLING_INIT;
        s.temperature = temperatures[t];
        s.seed = 42;
        double p[IDS], total = 0;
        for (int i = 0; i < IDS; i++)
            total += p[i] = exp((double)logits[i] / (double)s.temperature);
        int32_t count[IDS] = {0};
        for (int i = 0; i < DRAWS; i++) {
            const kv8_history history = {NULL, 0, i};
            count[kv8_sampler_draw(sampler, &s, &history, NULL, logits)]++;
        }
        for (int i = 0; i < IDS; i++) {
            const double share = p[i] / total, spread = 5 * sqrt(share * (1 - share) * DRAWS);
            assert_true(fabs(count[i] - share * DRAWS) <= spread + 1e-6);
        }
    }
    kv8_sampler_destroy(sampler);
}

/* Position, stream and seed each draw other numbers; nothing else does. */
static void a_draw_depends_on_seed_stream_and_position(void **state) {
    (void)state;
    const float logits[8] = {0};
    kv8_sampler *sampler = NULL;
    assert_ok(kv8_sampler_create(&sampler, 8, NULL));
    int same[3] = {0};
    for (int i = 0; i < 200; i++) {
        kv8_sampling s = KV8_SAMPLING_INIT;
        s.temperature = 1;
        const kv8_history history = {NULL, 0, i}, next = {NULL, 0, i + 1000};
        const int32_t x = kv8_sampler_draw(sampler, &s, &history, NULL, logits);
        assert_int_equal(x, kv8_sampler_draw(sampler, &s, &history, NULL, logits));
        same[0] += x == kv8_sampler_draw(sampler, &s, &next, NULL, logits);
        s.seed = 1ull << 40;
        same[1] += x == kv8_sampler_draw(sampler, &s, &history, NULL, logits);
        s.seed = 0;
        s.stream = 1ull << 40;
        same[2] += x == kv8_sampler_draw(sampler, &s, &history, NULL, logits);
    }
    for (int i = 0; i < 3; i++) assert_true(same[i] < 60); /* 25 are expected */
    kv8_sampler_destroy(sampler);
}

static void logprobs_are_the_models_own(void **state) {
    (void)state;
    enum { TOP = 7 };
    kv8_sampler *sampler = NULL;
    assert_ok(kv8_sampler_create(&sampler, VOCAB, NULL));
    test_rng rng = {5};
    for (int round = 0; round < 200; round++) {
        float logits[VOCAB];
        double total = 0;
        candidate c[VOCAB];
        for (int32_t i = 0; i < VOCAB; i++) {
            logits[i] = (float)rng_range(&rng, -40, 40) * 0.25f;
            c[i] = (candidate){i, (double)logits[i], 0, true};
            total += exp(c[i].logit);
        }
        qsort(c, VOCAB, sizeof *c, by_logit);
        kv8_logprob top[TOP];
        const float own = kv8_sampler_logprobs(sampler, logits, round % VOCAB, TOP, top);
        assert_true(fabs((double)own - ((double)logits[round % VOCAB] - log(total))) < 1e-5);
        for (int i = 0; i < TOP; i++) {
            assert_int_equal(top[i].token, c[i].id);
            assert_true(fabs((double)top[i].logprob - (c[i].logit - log(total))) < 1e-5);
        }
    }
    kv8_sampler_destroy(sampler);
}

static void what_is_out_of_range_is_refused_by_name(void **state) {
    (void)state;
    const struct {
        kv8_sampling s;
        const char *part;
    } cases[] = {
        {{.temperature = -1}, "temperature is -1"},
        {{.temperature = NAN}, "temperature is"},
        {{.top_p = 1.5f}, "top_p is 1.5"},
        {{.min_p = -0.1f}, "min_p is -0.1"},
        {{.repetition_penalty = -2}, "repetition_penalty is -2"},
        {{.frequency_penalty = INFINITY}, "frequency_penalty is inf"},
        {{.presence_penalty = NAN}, "presence_penalty is"},
        {{.top_k = -3}, "top_k is -3"},
        {{.num_bias = 1, .bias_ids = (const int32_t[]){9}, .bias = (const float[]){1}}, "id 9"},
        {{.num_bias = 1, .bias_ids = (const int32_t[]){2}, .bias = (const float[]){INFINITY}},
         "bias of id 2 is inf"},
        {{.num_bias = 1}, "1 biases"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kv8_sampling s = cases[i].s;
        s.struct_size = sizeof s;
        assert_refused(kv8_sampling_check(&s, 9), KV8_ERR_INVALID, cases[i].part);
    }
    kv8_sampler *sampler = NULL;
    assert_refused(kv8_sampler_create(&sampler, 0, NULL), KV8_ERR_INVALID, "vocabulary of 0");
    assert_null(sampler);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_known_answers),
        cmocka_unit_test(draws_follow_the_definition),
        cmocka_unit_test(cuts_go_by_logits_then_ids),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(a_draw_depends_on_seed_stream_and_position),
        cmocka_unit_test(logprobs_are_the_models_own),
        cmocka_unit_test(what_is_out_of_range_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
