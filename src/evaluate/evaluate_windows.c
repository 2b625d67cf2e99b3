/* evaluate_windows.c - KV settings in lock step beside f32 KV: the same chunk of the text through
 * every lane, logits compared row by row, so that memory holds the logits of one chunk of the
 * reference and of one lane.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "evaluation.h"
#include "logit_rows.h"

/* A lane and its sums over positions. */
typedef struct window_lane {
    kv8_lane lane;
    uint64_t step_ns;
    double kl, kl_squares, loss, dloss, dloss_squares;
    int64_t num_agree;
} window_lane;

typedef struct windows {
    kv8_evaluation *evaluation;
    window_lane *lanes;
    int32_t chunk;
    float *ref_logits, *logits; /* [chunk, vocab_size]: of lane 0, of the lane running */
    kv8_row_facts ref[KV8_EVALUATE_MAX_STEP], facts[KV8_EVALUATE_MAX_STEP];
    /* The visitor's: */
    const int32_t *ids; /* [window_len] */
    window_lane *running;
    uint64_t visit_ns;
} windows;

static size_t num_logits(const windows *w) {
    return (size_t)w->chunk * (size_t)w->evaluation->info.vocab_size;
}

static void close_windows(windows *w) {
    for (int32_t i = 0; w->lanes != NULL && i < w->evaluation->num_lanes; i++)
        kv8_lane_close(&w->lanes[i].lane);
    kv8_release(NULL, w->lanes, (size_t)w->evaluation->num_lanes, sizeof *w->lanes);
    kv8_release(NULL, w->ref_logits, num_logits(w), sizeof(float));
    kv8_release(NULL, w->logits, num_logits(w), sizeof(float));
}

static kv8_status open_windows(windows *w, kv8_evaluation *evaluation) {
    w->evaluation = evaluation;
    w->chunk = kv8_evaluate_chunk_tokens(evaluation->model);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)evaluation->num_lanes, sizeof *w->lanes, "lanes", &memory));
    w->lanes = memory;
    KV8_TRY(kv8_alloc(NULL, num_logits(w), sizeof(float), "logits", &memory));
    w->ref_logits = memory;
    KV8_TRY(kv8_alloc(NULL, num_logits(w), sizeof(float), "logits", &memory));
    w->logits = memory;
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    cache_options.max_seq_len = evaluation->options->window_len;
    cache_options.step_tokens = engine_options.step_tokens = engine_options.logit_rows = w->chunk;
    for (int32_t i = 0; i < evaluation->num_lanes; i++) {
        engine_options.logits = i == 0 ? w->ref_logits : w->logits;
        KV8_TRY(kv8_lane_open(&w->lanes[i].lane, evaluation, i, &cache_options, &engine_options));
    }
    return KV8_OK;
}

/* A kv8_logits_visitor: adds a chunk's rows to the sums of the lane running. */
static void compare_rows(void *cookie, int32_t first, int32_t num_rows, const float *logits) {
    windows *const w = cookie;
    const uint64_t begin = kv8_time_ns();
    window_lane *const self = w->running;
    const bool is_ref = self == w->lanes;
    kv8_row_facts *const facts = is_ref ? w->ref : w->facts;
    const int32_t length = w->evaluation->options->window_len;
    const kv8_row_job job = {.logits = logits,
                             .ref_logits = is_ref ? NULL : w->ref_logits,
                             .ref = w->ref,
                             .next_ids = w->ids + first + 1,
                             .num_rows = num_rows,
                             .num_next = (int32_t)kv8_min_i64(num_rows, length - 1 - first),
                             .vocab_size = w->evaluation->info.vocab_size,
                             .out = facts};
    kv8_row_job_run(&job, kv8_model_get_options(w->evaluation->model)->threads);
    /* Summed in order, so that the result does not depend on the threads. */
    for (int32_t i = 0; i < num_rows; i++) {
        const double dloss = facts[i].loss - w->ref[i].loss;
        self->kl += facts[i].kl;
        self->kl_squares += facts[i].kl * facts[i].kl;
        self->loss += facts[i].loss;
        self->dloss += dloss;
        self->dloss_squares += dloss * dloss;
        self->num_agree += facts[i].best == w->ref[i].best;
    }
    w->visit_ns = kv8_time_ns() - begin;
}

static kv8_status submit_window(windows *w, const int32_t *ids) {
    w->ids = ids;
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = ids;
    request.num_tokens = w->evaluation->options->window_len;
    request.visit = compare_rows;
    request.visit_cookie = w;
    uint64_t id = 0;
    for (int32_t i = 0; i < w->evaluation->num_lanes; i++)
        KV8_TRY(kv8_engine_submit(w->lanes[i].lane.engine, &request, &id));
    return KV8_OK;
}

static kv8_status run_window(windows *w, const int32_t *ids) {
    KV8_TRY(submit_window(w, ids));
    for (int32_t done = 0; done < w->evaluation->options->window_len; done += w->chunk) {
        for (int32_t i = 0; i < w->evaluation->num_lanes; i++) {
            int32_t num_events = 0;
            uint64_t ns = 0;
            w->running = &w->lanes[i];
            KV8_TRY(kv8_evaluation_step(w->evaluation, "windows", w->running->lane.engine,
                                        &num_events, &ns));
            w->running->step_ns += ns - w->visit_ns;
        }
    }
    return KV8_OK;
}

static void fill_rows(const windows *w) {
    const kv8_compare_options *const options = w->evaluation->options;
    const double num = (double)options->num_windows * options->window_len;
    const double num_losses = (double)options->num_windows * (options->window_len - 1);
    for (int32_t i = 0; i < w->evaluation->num_lanes; i++) {
        const window_lane *const self = &w->lanes[i];
        kv8_compare_row *const row = &w->evaluation->rows[i];
        kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
        KV8_MUST(kv8_cache_get_stats(self->lane.cache, &stats));
        row->kl = self->kl / num;
        row->kl_error = kv8_mean_error(self->kl, self->kl_squares, num);
        row->top1 = (double)self->num_agree / num;
        row->top1_error = kv8_share_error((double)self->num_agree, num);
        row->loss = self->loss / num_losses;
        row->dloss = self->dloss / num_losses;
        row->dloss_error = kv8_mean_error(self->dloss, self->dloss_squares, num_losses);
        row->bytes_per_token = (double)stats.bytes_per_token;
        row->tokens_per_s = num / ((double)self->step_ns * 1e-9);
    }
}

kv8_status kv8_evaluate_windows(kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    void *memory = NULL; /* too large for a thread's stack */
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(windows), "evaluation", &memory));
    windows *const w = memory;
    kv8_status status = open_windows(w, evaluation);
    for (int32_t i = 0; status == KV8_OK && i < options->num_windows; i++)
        status = run_window(w, options->token_ids + (int64_t)i * options->window_len);
    if (status == KV8_OK) fill_rows(w);
    close_windows(w);
    kv8_release(NULL, w, 1, sizeof(windows));
    return status;
}
