/* evaluate_windows.c - KV settings in lock step beside f32 KV: the same chunk of the text through
 * every lane, logits compared row by row, so that memory holds the logits of one chunk of the
 * reference and of one lane.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "evaluation.h"
#include "logit_rows.h"

/* A lane and its sums over positions. */
typedef struct window_lane {
    kv8_cache *cache;
    kv8_seq seq; /* of the window under way */
    uint64_t step_ns;
    double kl, kl_squares, loss, dloss, dloss_squares;
    int64_t num_agree;
} window_lane;

typedef struct windows {
    kv8_evaluation *evaluation;
    window_lane *lanes;
    int32_t chunk;
    kv8_logit_rows rows;
    int32_t row_ids[KV8_EVALUATE_MAX_STEP]; /* 0, 1, ..: every row's logits are wanted */
} windows;

static void close_windows(windows *w) {
    for (int32_t i = 0; w->lanes != NULL && i < w->evaluation->num_lanes; i++)
        kv8_cache_destroy(w->lanes[i].cache);
    kv8_release(NULL, w->lanes, (size_t)w->evaluation->num_lanes, sizeof *w->lanes);
    kv8_logit_rows_close(&w->rows);
}

static kv8_status open_windows(windows *w, kv8_evaluation *evaluation) {
    const kv8_model_options *const model = kv8_model_get_options(evaluation->model);
    w->evaluation = evaluation;
    w->chunk = kv8_evaluate_chunk_tokens(evaluation->model);
    for (int32_t i = 0; i < w->chunk; i++) w->row_ids[i] = i;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)evaluation->num_lanes, sizeof *w->lanes, "lanes", &memory));
    w->lanes = memory;
    KV8_TRY(kv8_logit_rows_open(&w->rows, model->device, model->stream, model->threads, w->chunk,
                                evaluation->info.vocab_size, true));
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    cache_options.max_seq_len = evaluation->options->window_len;
    cache_options.step_tokens = w->chunk;
    for (int32_t i = 0; i < evaluation->num_lanes; i++)
        KV8_TRY(kv8_lane_open_cache(&w->lanes[i].cache, evaluation, i, &cache_options));
    return KV8_OK;
}

/* The step's row `row`, whose token is number `token` of the window, is no row of numbers. */
static kv8_status refuse_row(const windows *w, int32_t lane, int32_t token) {
    return kv8_fail(KV8_ERR_INVALID, "%s KV: the logits after token %d of a window are not finite",
                    w->evaluation->settings[lane].name, token);
}

/* Adds a chunk's rows to the sums of the lane, in order, so that the result does not depend on the
 * threads. */
static kv8_status add_rows(windows *w, int32_t lane, const int32_t *ids, int32_t first,
                           int32_t num_rows) {
    window_lane *const self = &w->lanes[lane];
    const int32_t length = w->evaluation->options->window_len;
    const int32_t num_next = (int32_t)kv8_min_i64(num_rows, length - 1 - first);
    KV8_TRY(kv8_logit_rows_judge(&w->rows, lane == 0, num_rows, ids + first + 1, num_next));
    const kv8_row_facts *const ref = w->rows.ref;
    const kv8_row_facts *const facts = lane == 0 ? ref : w->rows.facts;
    for (int32_t i = 0; i < num_rows; i++) {
        const double dloss = facts[i].loss - ref[i].loss;
        if (!isfinite(facts[i].lse) || !isfinite(facts[i].kl))
            return refuse_row(w, lane, first + i);
        self->kl += facts[i].kl;
        self->kl_squares += facts[i].kl * facts[i].kl;
        self->loss += facts[i].loss;
        self->dloss += dloss;
        self->dloss_squares += dloss * dloss;
        self->num_agree += facts[i].best == ref[i].best;
    }
    return KV8_OK;
}

static kv8_status step_lane(windows *w, int32_t lane, const int32_t *ids, int32_t first,
                            int32_t num_rows) {
    window_lane *const self = &w->lanes[lane];
    const int32_t indptr[] = {0, num_rows};
    const kv8_step step = {.struct_size = sizeof step,
                           .num_seqs = 1,
                           .seqs = &self->seq,
                           .indptr = indptr,
                           .token_ids = ids + first,
                           .num_logit_rows = num_rows,
                           .logit_rows = w->row_ids,
                           .logits_out = lane == 0 ? w->rows.ref_logits : w->rows.logits};
    const uint64_t begin = kv8_time_ns();
    KV8_TRY(kv8_model_step(w->evaluation->model, self->cache, &step));
    self->step_ns += kv8_time_ns() - begin;
    return add_rows(w, lane, ids, first, num_rows);
}

static kv8_status run_window(windows *w, const int32_t *ids) {
    kv8_evaluation *const evaluation = w->evaluation;
    const int32_t length = evaluation->options->window_len;
    for (int32_t i = 0; i < evaluation->num_lanes; i++)
        KV8_TRY(kv8_cache_seq_create(w->lanes[i].cache, &w->lanes[i].seq));
    for (int32_t first = 0; first < length; first += w->chunk) {
        const int32_t num_rows = (int32_t)kv8_min_i64(w->chunk, length - first);
        for (int32_t i = 0; i < evaluation->num_lanes; i++) {
            KV8_TRY(step_lane(w, i, ids, first, num_rows));
            KV8_TRY(kv8_evaluation_add_tokens(evaluation, "windows", num_rows));
        }
    }
    for (int32_t i = 0; i < evaluation->num_lanes; i++)
        KV8_TRY(kv8_cache_seq_destroy(w->lanes[i].cache, w->lanes[i].seq));
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
        KV8_MUST(kv8_cache_get_stats(self->cache, &stats));
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
