/* engine_runs.h - engines over the shipped model for tests: opening, submitting, running to the
 * end, and what one request gives alone.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ENGINE_RUNS_H
#define KV8_ENGINE_RUNS_H

#include "open_tiny.h"

enum { MAX_LEN = 512, MAX_REQUESTS = 8 };

/* An engine over a cache of its own. */
typedef struct bench {
    kv8_cache *cache;
    kv8_engine *engine;
} bench;

static inline bench open_bench(int32_t step_tokens, int32_t logit_rows) {
    bench b = {.cache = open_cache(model, KV8_F32, 16, MAX_REQUESTS, MAX_LEN, false)};
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.max_requests = MAX_REQUESTS;
    options.step_tokens = step_tokens;
    options.logit_rows = logit_rows;
    assert_ok(kv8_engine_create(&b.engine, model, b.cache, &options));
    return b;
}

/* An engine whose requests share num_pages pages of 16 tokens, and more wait than run. */
static inline bench open_pool_bench(int32_t num_pages, int32_t max_requests,
                                    const kv8_engine_options *wanted) {
    bench b = {.cache = open_pool(model, KV8_F32, 16, max_requests, MAX_LEN, false, num_pages)};
    kv8_engine_options options = *wanted;
    options.max_requests = max_requests;
    options.max_waiting = 64;
    assert_ok(kv8_engine_create(&b.engine, model, b.cache, &options));
    return b;
}

static inline void close_bench(bench *b) {
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    kv8_engine_destroy(b->engine);
    assert_ok(kv8_cache_get_stats(b->cache, &stats));
    assert_int_equal(stats.num_seqs, 0);
    kv8_cache_destroy(b->cache);
}

static inline kv8_request request_of(const int32_t *token_ids, int32_t num_tokens,
                                     int32_t max_tokens) {
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = token_ids;
    request.num_tokens = num_tokens;
    request.max_tokens = max_tokens;
    request.ignore_eos = 1;
    return request;
}

/* What a request gave. */
typedef struct outcome {
    uint64_t id;
    int32_t tokens[MAX_LEN], num_tokens, num_computed;
    int32_t num_cached;
    kv8_finish finish;
    char message[200];
} outcome;

/* Steps until nothing is left to do; every event goes to the outcome of its request. */
static inline void run_engine(kv8_engine *engine, outcome *outcomes, int32_t num) {
    int32_t num_events = 1;
    while (num_events > 0) {
        assert_ok(kv8_engine_step(engine, &num_events));
        for (int32_t i = 0; i < num_events; i++) {
            const kv8_event *const event = kv8_engine_event(engine, i);
            int32_t o = 0;
            while (o < num && outcomes[o].id != event->request) o++;
            if (o == num) continue; /* nobody asks for this one */
            assert_int_equal(outcomes[o].finish, KV8_FINISH_NONE);
            if (event->token >= 0) outcomes[o].tokens[outcomes[o].num_tokens++] = event->token;
            /* One that was preempted begins again. */
            if (event->num_taken < event->num_computed && outcomes[o].num_computed > 0)
                assert_true(event->num_computed - event->num_taken <= outcomes[o].num_computed);
            outcomes[o].num_computed = event->num_computed;
            outcomes[o].num_cached = event->num_cached;
            outcomes[o].finish = event->finish;
            if (event->message != NULL)
                snprintf(outcomes[o].message, sizeof outcomes[o].message, "%s", event->message);
        }
    }
}

static inline void submit(kv8_engine *engine, const kv8_request *request, outcome *out) {
    *out = (outcome){0};
    assert_ok(kv8_engine_submit(engine, request, &out->id));
}

/* Greedy tokens by hand: one request, the model alone. */
static inline void continue_by_hand(const int32_t *prompt, int32_t num_prompt, int32_t *tokens_out,
                                    int32_t num) {
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 1, MAX_LEN, false);
    kv8_seq seq = KV8_SEQ_NONE;
    float *const logits = malloc((size_t)info.vocab_size * sizeof *logits);
    assert_ok(kv8_cache_seq_create(cache, &seq));
    if (num_prompt > 1) run_ids(model, cache, seq, prompt, num_prompt - 1, 512, NULL);
    int32_t next = prompt[num_prompt - 1];
    for (int32_t i = 0; i < num; i++) {
        run_ids(model, cache, seq, &next, 1, 1, logits);
        tokens_out[i] = next = argmax_of(logits, info.vocab_size);
    }
    free(logits);
    kv8_cache_destroy(cache);
}

#endif
