/* evaluate_score.c - the loss of every token of a list: by an engine's visitor on the host; where a
 * GPU computes, step by step, and the logits stay there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

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

/* Until the request has ended. */
static kv8_status run(kv8_engine *engine, int32_t num_tokens, const kv8_score_options *options) {
    for (uint64_t ns = 0;;) {
        int32_t num_events = 0;
        KV8_TRY(kv8_evaluate_step(engine, &num_events, &ns));
        if (num_events == 0) return KV8_OK;
        KV8_TRY(kv8_evaluate_report(options->progress, options->progress_cookie, "score",
                                    (uint64_t)kv8_engine_event(engine, 0)->num_computed,
                                    (uint64_t)num_tokens));
    }
}

static kv8_status run_on_host(kv8_model *model, kv8_cache *cache, scoring *s, int32_t num_tokens,
                              const kv8_score_options *options) {
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    engine_options.step_tokens = engine_options.logit_rows = kv8_evaluate_chunk_tokens(model);
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = s->token_ids;
    request.num_tokens = num_tokens;
    request.visit = score_rows;
    request.visit_cookie = s;
    kv8_engine *engine = NULL;
    uint64_t id = 0;
    KV8_TRY(kv8_engine_create(&engine, model, cache, &engine_options));
    kv8_status status = kv8_engine_submit(engine, &request, &id);
    if (status == KV8_OK) status = run(engine, num_tokens, options);
    kv8_engine_destroy(engine);
    return status;
}

/* --- where a GPU computes --- */

/* Tokens first and on of the sequence, all of which are followed by one. */
static kv8_status score_step(kv8_model *model, kv8_cache *cache, kv8_seq seq, kv8_logit_rows *rows,
                             const scoring *s, int32_t first, int32_t num_rows) {
    int32_t all[KV8_EVALUATE_MAX_STEP];
    for (int32_t i = 0; i < num_rows; i++) all[i] = i;
    const int32_t indptr[] = {0, num_rows};
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = 1,
                           .seqs = &seq,
                           .indptr = indptr,
                           .token_ids = s->token_ids + first,
                           .num_logit_rows = num_rows,
                           .logit_rows = all,
                           .logits_out = rows->ref_logits};
    KV8_TRY(kv8_model_step(model, cache, &step));
    KV8_TRY(kv8_logit_rows_judge(rows, true, num_rows, s->token_ids + first + 1, num_rows));
    for (int32_t i = 0; i < num_rows; i++) {
        if (!isfinite(rows->ref[i].lse))
            return kv8_fail(KV8_ERR_INVALID, "the logits after token %d are not finite", first + i);
        s->nll[first + i] = (float)rows->ref[i].loss;
    }
    return KV8_OK;
}

static kv8_status run_on_device(kv8_model *model, kv8_cache *cache, scoring *s, int32_t num_tokens,
                                const kv8_score_options *options) {
    const kv8_model_options *const o = kv8_model_get_options(model);
    const int32_t chunk = kv8_evaluate_chunk_tokens(model);
    kv8_seq seq = KV8_SEQ_NONE;
    kv8_logit_rows rows;
    kv8_status status =
        kv8_logit_rows_open(&rows, o->device, o->stream, o->threads, chunk, s->vocab_size, false);
    if (status == KV8_OK) status = kv8_cache_seq_create(cache, &seq);
    for (int32_t first = 0; status == KV8_OK && first < num_tokens; first += chunk) {
        const int32_t num_rows = (int32_t)kv8_min_i64(chunk, num_tokens - first);
        status = score_step(model, cache, seq, &rows, s, first, num_rows);
        if (status == KV8_OK)
            status = kv8_evaluate_report(options->progress, options->progress_cookie, "score",
                                         (uint64_t)(first + num_rows), (uint64_t)num_tokens);
    }
    kv8_logit_rows_close(&rows);
    return status;
}

/* --- */

/* The last token is only predicted: those before it go in. */
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
    cache_options.max_seq_len = num_tokens - 1;
    cache_options.step_tokens = kv8_evaluate_chunk_tokens(model);
    const kv8_model_options *const model_options = kv8_model_get_options(model);
    scoring s = {.token_ids = token_ids,
                 .vocab_size = info.vocab_size,
                 .threads = model_options->threads,
                 .nll = nll_out};
    kv8_cache *cache = NULL;
    KV8_TRY(kv8_kv_setting_cache_create(&cache, model, setting, &cache_options));
    const kv8_status status = model_options->device == NULL
                                  ? run_on_host(model, cache, &s, num_tokens - 1, options)
                                  : run_on_device(model, cache, &s, num_tokens - 1, options);
    kv8_cache_destroy(cache);
    return status;
}
