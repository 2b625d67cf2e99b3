/* evaluate.c - scoring a token stream, and running KV settings in lock step beside f32 KV: the
 * same chunk through every lane, logits compared row by row in f64, so that memory holds the
 * logits of one chunk and one lane besides the reference's.
 *
 * It knows logits, not how the model makes them nor how a cache stores.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "evaluate_impl.h"

/* Logits of a chunk: at most this many bytes for the reference and as many for the lane. */
static const size_t max_logits_bytes = (size_t)96 << 20;

/* Tokens of a chunk whose every row of logits is kept. */
static int32_t chunk_tokens(const kv8_model *model, const kv8_model_info *info) {
    const size_t rows = max_logits_bytes / ((size_t)info->vocab_size * sizeof(float));
    return (int32_t)kv8_max_i64(1, kv8_min_i64((int64_t)rows, kv8_evaluate_step_tokens(model)));
}

static kv8_status check_ids(const kv8_model_info *info, const int32_t *ids, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        if (ids[i] < 0 || ids[i] >= info->vocab_size)
            return kv8_fail(KV8_ERR_INVALID, "token %lld has id %d, the vocabulary has %d",
                            (long long)i, ids[i], info->vocab_size);
    }
    return KV8_OK;
}

/* --- steps --- */

int32_t kv8_evaluate_step_tokens(const kv8_model *model) {
    const int32_t limit = kv8_model_get_options(model)->max_step_tokens;
    return limit < KV8_EVALUATE_MAX_STEP ? limit : KV8_EVALUATE_MAX_STEP;
}

kv8_status kv8_evaluate_step(kv8_model *model, kv8_cache *cache, kv8_seq seq,
                             const int32_t *token_ids, int32_t num_tokens, int32_t num_rows,
                             float *logits_out, uint64_t *ns) {
    int32_t rows[KV8_EVALUATE_MAX_STEP];
    for (int32_t i = 0; i < num_rows; i++) rows[i] = num_tokens - num_rows + i;
    const int32_t indptr[2] = {0, num_tokens};
    const kv8_step step = {.num_seqs = 1,
                           .seqs = &seq,
                           .indptr = indptr,
                           .token_ids = token_ids,
                           .num_logit_rows = num_rows,
                           .logit_rows = rows,
                           .logits_out = logits_out};
    const uint64_t begin = kv8_time_ns();
    const kv8_status status = kv8_model_step(model, cache, &step);
    *ns += kv8_time_ns() - begin;
    return status;
}

static kv8_status report(kv8_progress progress, void *cookie, const char *what, uint64_t done,
                         uint64_t total) {
    if (progress != NULL && progress(cookie, what, done, total) != 0)
        return kv8_fail(KV8_ERR_INVALID, "interrupted");
    return KV8_OK;
}

kv8_status kv8_evaluate_advance(kv8_evaluation *evaluation, const char *what, uint64_t units) {
    evaluation->units_done += units;
    return report(evaluation->options->progress, evaluation->options->progress_cookie, what,
                  evaluation->units_done, evaluation->units_total);
}

kv8_status kv8_evaluate_prefill(kv8_evaluation *evaluation, const char *what, kv8_cache *cache,
                                kv8_seq seq, const int32_t *token_ids, int32_t num_tokens,
                                float *logits_out) {
    const int32_t step = kv8_evaluate_step_tokens(evaluation->model);
    uint64_t ns = 0;
    for (int32_t at = 0; at < num_tokens; at += step) {
        const int32_t num = (int32_t)kv8_min_i64(num_tokens - at, step);
        const int32_t num_rows = logits_out != NULL && at + num == num_tokens ? 1 : 0;
        KV8_TRY(kv8_evaluate_step(evaluation->model, cache, seq, token_ids + at, num, num_rows,
                                  logits_out, &ns));
        KV8_TRY(kv8_evaluate_advance(evaluation, what, (uint64_t)num));
    }
    return KV8_OK;
}

/* --- rows of logits --- */

/* ln sum exp, in f64; *best_out is the first index of the maximum. */
static double log_sum_exp(const float *logits, int32_t n, int32_t *best_out) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    const double top = (double)logits[best];
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp((double)logits[i] - top);
    *best_out = best;
    return top + log(sum);
}

/* sum_i p_i (ln p_i - ln q_i), p and q the softmax of ref and lane. */
static double kl_divergence(const float *ref, double ref_lse, const float *lane, double lane_lse,
                            int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        const double log_p = (double)ref[i] - ref_lse;
        sum += exp(log_p) * (log_p - ((double)lane[i] - lane_lse));
    }
    return sum;
}

/* What one position gives. */
typedef struct position {
    double lse, loss, kl;
    int32_t best;
} position;

/* One chunk of one lane; the reference's own chunk has ref_logits NULL. */
typedef struct row_job {
    const float *logits, *ref_logits; /* [rows, vocab_size] */
    const position *ref;
    const int32_t *next_ids; /* [rows - 1 or rows]: the token each row should predict */
    int32_t num_next, vocab_size;
    position *out;
} row_job;

static void row_task(void *cookie, size_t row, int32_t thread_idx) {
    (void)thread_idx;
    const row_job *const job = cookie;
    const size_t offset = row * (size_t)job->vocab_size;
    const float *const logits = job->logits + offset;
    position p = {0};
    p.lse = log_sum_exp(logits, job->vocab_size, &p.best);
    if (row < (size_t)job->num_next) p.loss = p.lse - (double)logits[job->next_ids[row]];
    if (job->ref_logits != NULL)
        p.kl = kl_divergence(job->ref_logits + offset, job->ref[row].lse, logits, p.lse,
                             job->vocab_size);
    job->out[row] = p;
}

/* --- score --- */

kv8_status kv8_evaluate_score(kv8_model *model, const kv8_kv_setting *setting,
                              const int32_t *token_ids, int32_t num_tokens,
                              const kv8_score_options *options, float *nll_out) {
    KV8_TAKE_STRUCT(kv8_score_options, options);
    kv8_model_info info;
    kv8_model_get_info(model, &info);
    if (num_tokens < 2 || num_tokens > info.max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "%d tokens to score, must be at least 2 and at most the context of %d",
                        num_tokens, info.max_seq_len);
    KV8_TRY(check_ids(&info, token_ids, num_tokens));

    const int32_t chunk = chunk_tokens(model, &info), num_rows = num_tokens - 1;
    const size_t num_logits = (size_t)chunk * (size_t)info.vocab_size;
    position positions[KV8_EVALUATE_MAX_STEP];
    kv8_cache *cache = NULL;
    kv8_seq seq = KV8_SEQ_NONE;
    void *logits = NULL;
    uint64_t ns = 0;
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    cache_options.max_seq_len = num_rows;
    cache_options.step_tokens = chunk;
    kv8_status status = kv8_alloc(NULL, num_logits, sizeof(float), "logits", &logits);
    if (status != KV8_OK) goto fail;
    KV8_TRY_GOTO(kv8_kv_setting_cache_create(&cache, model, setting, &cache_options));
    KV8_TRY_GOTO(kv8_cache_seq_create(cache, &seq));
    for (int32_t at = 0; at < num_rows; at += chunk) {
        const int32_t num = (int32_t)kv8_min_i64(num_rows - at, chunk);
        KV8_TRY_GOTO(kv8_evaluate_step(model, cache, seq, token_ids + at, num, num, logits, &ns));
        row_job job = {.logits = logits,
                       .next_ids = token_ids + at + 1,
                       .num_next = num,
                       .vocab_size = info.vocab_size,
                       .out = positions};
        kv8_threads_run(kv8_model_get_options(model)->threads, (size_t)num, row_task, &job);
        for (int32_t i = 0; i < num; i++) nll_out[at + i] = (float)positions[i].loss;
        KV8_TRY_GOTO(report(options->progress, options->progress_cookie, "score",
                            (uint64_t)(at + num), (uint64_t)num_rows));
    }
fail:
    kv8_cache_destroy(cache);
    kv8_release(NULL, logits, num_logits, sizeof(float));
    return status;
}

/* --- windows --- */

typedef struct lane {
    kv8_cache *cache;
    kv8_seq seq;
    uint64_t step_ns;
    double kl, loss; /* sums over positions */
    int64_t num_agree;
} lane;

typedef struct windows {
    kv8_evaluation *evaluation;
    lane *lanes;
    int32_t chunk;
    float *ref_logits, *logits; /* [chunk, vocab_size] */
    position ref[KV8_EVALUATE_MAX_STEP], positions[KV8_EVALUATE_MAX_STEP];
} windows;

static size_t windows_num_logits(const windows *w) {
    return (size_t)w->chunk * (size_t)w->evaluation->info.vocab_size;
}

static void windows_close(windows *w) {
    for (int32_t i = 0; w->lanes != NULL && i < w->evaluation->num_lanes; i++)
        kv8_cache_destroy(w->lanes[i].cache);
    kv8_release(NULL, w->lanes, (size_t)w->evaluation->num_lanes, sizeof(lane));
    kv8_release(NULL, w->ref_logits, windows_num_logits(w), sizeof(float));
    kv8_release(NULL, w->logits, windows_num_logits(w), sizeof(float));
}

static kv8_status windows_open(windows *w, kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    w->evaluation = evaluation;
    w->chunk = chunk_tokens(evaluation->model, &evaluation->info);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)evaluation->num_lanes, sizeof(lane), "lanes", &memory));
    w->lanes = memory;
    KV8_TRY(kv8_alloc(NULL, windows_num_logits(w), sizeof(float), "logits", &memory));
    w->ref_logits = memory;
    KV8_TRY(kv8_alloc(NULL, windows_num_logits(w), sizeof(float), "logits", &memory));
    w->logits = memory;
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    cache_options.max_seq_len = options->window_len;
    cache_options.step_tokens = w->chunk;
    cache_options.k_scale = options->k_scale;
    cache_options.v_scale = options->v_scale;
    for (int32_t i = 0; i < evaluation->num_lanes; i++)
        KV8_TRY(kv8_kv_setting_cache_create(&w->lanes[i].cache, evaluation->model,
                                            &evaluation->settings[i], &cache_options));
    return KV8_OK;
}

/* ids[0..num) through lane lane_idx; num_next of the rows have a next token in the window. */
static kv8_status lane_chunk(windows *w, int32_t lane_idx, const int32_t *ids, int32_t num,
                             int32_t num_next) {
    kv8_evaluation *const evaluation = w->evaluation;
    lane *const self = &w->lanes[lane_idx];
    const bool is_ref = lane_idx == 0;
    float *const logits = is_ref ? w->ref_logits : w->logits;
    position *const positions = is_ref ? w->ref : w->positions;
    KV8_TRY(kv8_evaluate_step(evaluation->model, self->cache, self->seq, ids, num, num, logits,
                              &self->step_ns));
    row_job job = {.logits = logits,
                   .ref_logits = is_ref ? NULL : w->ref_logits,
                   .ref = w->ref,
                   .next_ids = ids + 1,
                   .num_next = num_next,
                   .vocab_size = evaluation->info.vocab_size,
                   .out = positions};
    kv8_threads_run(kv8_model_get_options(evaluation->model)->threads, (size_t)num, row_task, &job);
    /* Summed in order, so that the result does not depend on the threads. */
    for (int32_t i = 0; i < num; i++) {
        self->kl += positions[i].kl;
        self->loss += positions[i].loss;
        self->num_agree += positions[i].best == w->ref[i].best;
    }
    return kv8_evaluate_advance(evaluation, "windows", (uint64_t)num);
}

static kv8_status run_window(windows *w, const int32_t *ids) {
    const int32_t length = w->evaluation->options->window_len;
    for (int32_t i = 0; i < w->evaluation->num_lanes; i++)
        KV8_TRY(kv8_cache_seq_create(w->lanes[i].cache, &w->lanes[i].seq));
    for (int32_t at = 0; at < length; at += w->chunk) {
        const int32_t num = (int32_t)kv8_min_i64(length - at, w->chunk);
        const int32_t num_next = at + num == length ? num - 1 : num;
        for (int32_t i = 0; i < w->evaluation->num_lanes; i++)
            KV8_TRY(lane_chunk(w, i, ids + at, num, num_next));
    }
    for (int32_t i = 0; i < w->evaluation->num_lanes; i++)
        KV8_TRY(kv8_cache_seq_destroy(w->lanes[i].cache, w->lanes[i].seq));
    return KV8_OK;
}

static void fill_rows(const windows *w) {
    const kv8_compare_options *const options = w->evaluation->options;
    const double num = (double)options->num_windows * options->window_len;
    const double num_losses = (double)options->num_windows * (options->window_len - 1);
    for (int32_t i = 0; i < w->evaluation->num_lanes; i++) {
        const lane *const self = &w->lanes[i];
        kv8_compare_row *const row = &w->evaluation->rows[i];
        kv8_cache_stats stats;
        kv8_cache_get_stats(self->cache, &stats);
        row->kl = self->kl / num;
        row->top1 = (double)self->num_agree / num;
        row->loss = self->loss / num_losses;
        row->dloss = (self->loss - w->lanes[0].loss) / num_losses;
        row->bytes_per_token = (double)stats.bytes_per_token;
        row->tokens_per_s = num / ((double)self->step_ns * 1e-9);
    }
}

static kv8_status run_windows(kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    void *memory = NULL; /* too large for a thread's stack */
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(windows), "evaluation", &memory));
    windows *const w = memory;
    kv8_status status = windows_open(w, evaluation);
    for (int32_t i = 0; status == KV8_OK && i < options->num_windows; i++)
        status = run_window(w, options->token_ids + (int64_t)i * options->window_len);
    if (status == KV8_OK) fill_rows(w);
    windows_close(w);
    kv8_release(NULL, w, 1, sizeof(windows));
    return status;
}

/* --- compare --- */

static kv8_status check_compare(const kv8_model_info *info, const kv8_compare_options *options) {
    const int32_t length = options->window_len;
    if (options->num_windows < 1)
        return kv8_fail(KV8_ERR_INVALID, "%d windows, must be at least 1", options->num_windows);
    if (length < 2 || length > info->max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "windows of %d tokens, must be at least 2 and at most the context of %d",
                        length, info->max_seq_len);
    if ((int64_t)options->num_windows * length > options->num_tokens)
        return kv8_fail(KV8_ERR_INVALID,
                        "the text has %lld tokens: %lld windows of %d fit, %d were asked for",
                        (long long)options->num_tokens, (long long)(options->num_tokens / length),
                        length, options->num_windows);
    if (options->num_greedy < 0 || options->num_recall < 0)
        return kv8_fail(KV8_ERR_INVALID, "%d greedy prompts and %d tables of codes: neither < 0",
                        options->num_greedy, options->num_recall);
    if (options->num_greedy > 0 && (options->greedy_len < 1 || options->greedy_len >= length))
        return kv8_fail(KV8_ERR_INVALID,
                        "greedy continuations of %d tokens, must be at least 1 and less than a "
                        "window of %d",
                        options->greedy_len, length);
    return check_ids(info, options->token_ids, options->num_tokens);
}

static kv8_status run_all(kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    kv8_recall *recall = NULL;
    KV8_TRY(kv8_recall_create(&recall, evaluation));
    evaluation->units_total = (uint64_t)evaluation->num_lanes * (uint64_t)options->num_windows *
                                  (uint64_t)options->window_len +
                              kv8_evaluate_greedy_units(evaluation) +
                              kv8_recall_units(recall, evaluation);
    kv8_status status = run_windows(evaluation);
    if (status == KV8_OK) status = kv8_evaluate_greedy(evaluation);
    if (status == KV8_OK && recall != NULL) status = kv8_recall_run(recall, evaluation);
    kv8_recall_destroy(recall);
    return status;
}

kv8_status kv8_evaluate_compare(kv8_model *model, const kv8_kv_setting *settings,
                                int32_t num_settings, const kv8_compare_options *options,
                                kv8_compare_row *rows_out) {
    KV8_TAKE_STRUCT(kv8_compare_options, options);
    if (num_settings < 0)
        return kv8_fail(KV8_ERR_INVALID, "%d settings, must not be < 0", num_settings);
    kv8_evaluation evaluation = {
        .model = model, .options = options, .num_lanes = num_settings + 1, .rows = rows_out};
    kv8_model_get_info(model, &evaluation.info);
    KV8_TRY(check_compare(&evaluation.info, options));

    void *memory = NULL;
    const size_t num_lanes = (size_t)evaluation.num_lanes;
    KV8_TRY(kv8_alloc(NULL, num_lanes, sizeof(kv8_kv_setting), "settings", &memory));
    kv8_kv_setting *const lane_settings = memory;
    kv8_status status = kv8_kv_setting_parse("f32", &lane_settings[0]);
    for (size_t i = 1; i < num_lanes; i++) lane_settings[i] = settings[i - 1];
    evaluation.settings = lane_settings;
    for (size_t i = 0; i < num_lanes; i++)
        rows_out[i] = (kv8_compare_row){.setting = lane_settings[i],
                                        .greedy_match = (double)NAN,
                                        .recall = (double)NAN,
                                        .decode_tokens_per_s = (double)NAN};
    if (status == KV8_OK) status = run_all(&evaluation);
    kv8_release(NULL, lane_settings, num_lanes, sizeof(kv8_kv_setting));
    return status;
}
