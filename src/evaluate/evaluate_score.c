/* evaluate_score.c - the loss of every token of a list.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "evaluation.h"
#include "logit_rows.h"

typedef struct scoring {
    const int32_t *token_ids;
    int32_t vocab_size;
    kv8_threads *threads;
    float *nll;
    kv8_row_facts facts[KV8_EVALUATE_MAX_STEP];
} scoring;

/* A kv8_logits_visitor. */
static void score_rows(void *cookie, int32_t first, int32_t num_rows, const float *logits) {
    scoring *const s = cookie;
    const kv8_row_job job = {.logits = logits,
                             .next_ids = s->token_ids + first + 1,
                             .num_rows = num_rows,
                             .num_next = num_rows,
                             .vocab_size = s->vocab_size,
                             .out = s->facts};
    kv8_row_job_run(&job, s->threads);
    for (int32_t i = 0; i < num_rows; i++) s->nll[first + i] = (float)s->facts[i].loss;
}

/* The last token is only predicted: num_tokens of the list go in, and one more follows them. */
static kv8_status run(kv8_engine *engine, scoring *s, int32_t num_tokens,
                      const kv8_score_options *options) {
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = s->token_ids;
    request.num_tokens = num_tokens;
    request.visit = score_rows;
    request.visit_cookie = s;
    uint64_t id = 0, ns = 0;
    KV8_TRY(kv8_engine_submit(engine, &request, &id));
    for (;;) {
        int32_t num_events = 0;
        KV8_TRY(kv8_evaluate_step(engine, &num_events, &ns));
        if (num_events == 0) return KV8_OK;
        KV8_TRY(kv8_evaluate_report(options->progress, options->progress_cookie, "score",
                                    (uint64_t)kv8_engine_event(engine, 0)->num_computed,
                                    (uint64_t)num_tokens));
    }
}

kv8_status kv8_evaluate_score(kv8_model *model, const kv8_kv_setting *setting,
                              const int32_t *token_ids, int32_t num_tokens,
                              const kv8_score_options *options, float *nll_out) {
    KV8_REQUIRE(model, setting, token_ids, options, nll_out);
    KV8_TAKE_STRUCT(kv8_score_options, options);
    const kv8_model_info info = *kv8_model_facts(model);
    if (num_tokens < 2 || num_tokens > info.max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "%d tokens to score, must be at least 2 and at most the context of %d",
                        num_tokens, info.max_seq_len);
    KV8_TRY(kv8_evaluate_check_ids(&info, token_ids, num_tokens));
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    cache_options.max_seq_len = num_tokens - 1;
    cache_options.step_tokens = engine_options.step_tokens = engine_options.logit_rows =
        kv8_evaluate_chunk_tokens(model);
    scoring s = {.token_ids = token_ids,
                 .vocab_size = info.vocab_size,
                 .threads = kv8_model_get_options(model)->threads,
                 .nll = nll_out};
    kv8_cache *cache = NULL;
    kv8_engine *engine = NULL;
    kv8_status status = kv8_kv_setting_cache_create(&cache, model, setting, &cache_options);
    if (status == KV8_OK) status = kv8_engine_create(&engine, model, cache, &engine_options);
    if (status == KV8_OK) status = run(engine, &s, num_tokens - 1, options);
    kv8_engine_destroy(engine);
    kv8_cache_destroy(cache);
    return status;
}
