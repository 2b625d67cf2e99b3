/* evaluation.c - a lane's engine, its steps, and how far a comparison is.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "evaluation.h"

#include <math.h>

/* --- sizes and checks --- */

/* Logits of a chunk: at most this many bytes for the reference and as many for the lane. */
static const size_t max_logits_bytes = (size_t)96 << 20;
static const size_t max_device_logits_bytes = (size_t)512 << 20; /* the same of a GPU's memory */

int32_t kv8_evaluate_step_tokens(const kv8_model *model) {
    const int32_t limit = kv8_model_get_options(model)->max_step_tokens;
    return limit < KV8_EVALUATE_MAX_STEP ? limit : KV8_EVALUATE_MAX_STEP;
}

int32_t kv8_evaluate_chunk_tokens(const kv8_model *model) {
    const size_t vocab = (size_t)kv8_model_facts(model)->vocab_size;
    const size_t limit =
        kv8_model_get_options(model)->device == NULL ? max_logits_bytes : max_device_logits_bytes;
    const size_t rows = limit / (vocab * sizeof(float));
    return (int32_t)kv8_max_i64(1, kv8_min_i64((int64_t)rows, kv8_evaluate_step_tokens(model)));
}

kv8_status kv8_evaluate_check_ids(const kv8_model_info *info, const int32_t *ids, int64_t num) {
    for (int64_t i = 0; i < num; i++) {
        if (ids[i] < 0 || ids[i] >= info->vocab_size)
            return kv8_fail(KV8_ERR_INVALID, "token %lld has id %d, the vocabulary has %d",
                            (long long)i, ids[i], info->vocab_size);
    }
    return KV8_OK;
}

/* --- lanes --- */

kv8_status kv8_lane_open_cache(kv8_cache **out, const kv8_evaluation *evaluation, int32_t lane_idx,
                               const kv8_kv_cache_options *options) {
    kv8_kv_cache_options own = *options;
    own.k_scale = evaluation->options->k_scale;
    own.v_scale = evaluation->options->v_scale;
    own.scale_dtype = evaluation->options->scale_dtype;
    return kv8_kv_setting_cache_create(out, evaluation->model, &evaluation->settings[lane_idx],
                                       &own);
}

kv8_status kv8_lane_open(kv8_lane *lane, const kv8_evaluation *evaluation, int32_t lane_idx,
                         const kv8_kv_cache_options *cache_options,
                         const kv8_engine_options *engine_options) {
    *lane = (kv8_lane){0};
    KV8_TRY(kv8_lane_open_cache(&lane->cache, evaluation, lane_idx, cache_options));
    const kv8_status status =
        kv8_engine_create(&lane->engine, evaluation->model, lane->cache, engine_options);
    if (status != KV8_OK) kv8_lane_close(lane);
    return status;
}

void kv8_lane_close(kv8_lane *lane) {
    kv8_engine_destroy(lane->engine);
    kv8_cache_destroy(lane->cache);
    *lane = (kv8_lane){0};
}

/* --- steps --- */

kv8_status kv8_evaluate_report(kv8_progress progress, void *cookie, const char *what, uint64_t done,
                               uint64_t total) {
    if (progress != NULL && progress(cookie, what, done, total) != 0)
        return kv8_fail(KV8_ERR_CANCELLED, "interrupted");
    return KV8_OK;
}

kv8_status kv8_evaluate_step(kv8_engine *engine, int32_t *num_events_out, uint64_t *ns_out) {
    const uint64_t begin = kv8_time_ns();
    KV8_TRY(kv8_engine_step(engine, num_events_out));
    *ns_out = kv8_time_ns() - begin;
    for (int32_t i = 0; i < *num_events_out; i++) {
        const kv8_event *const event = kv8_engine_event(engine, i);
        if (event->finish == KV8_FINISH_FAILED)
            return kv8_fail(KV8_ERR_INVALID, "%s", event->message);
    }
    return KV8_OK;
}

kv8_status kv8_evaluation_step(kv8_evaluation *evaluation, const char *what, kv8_engine *engine,
                               int32_t *num_events_out, uint64_t *ns_out) {
    KV8_TRY(kv8_evaluate_step(engine, num_events_out, ns_out));
    int64_t num_tokens = 0;
    for (int32_t i = 0; i < *num_events_out; i++)
        num_tokens += kv8_engine_event(engine, i)->num_taken;
    return kv8_evaluation_add_tokens(evaluation, what, num_tokens);
}

kv8_status kv8_evaluation_add_tokens(kv8_evaluation *evaluation, const char *what,
                                     int64_t num_tokens) {
    evaluation->units_done += (uint64_t)kv8_max_i64(num_tokens, KV8_EVALUATE_STEP_UNITS);
    if (evaluation->units_done > evaluation->units_total)
        evaluation->units_done = evaluation->units_total;
    return kv8_evaluate_report(evaluation->options->progress, evaluation->options->progress_cookie,
                               what, evaluation->units_done, evaluation->units_total);
}

/* --- errors --- */

double kv8_mean_error(double sum, double squares, double n) {
    const double mean = sum / n;
    return n > 1 ? sqrt(fmax(0, squares / n - mean * mean) / (n - 1)) : (double)NAN;
}

double kv8_share_error(double hits, double n) {
    const double share = (hits + 1) / (n + 2);
    return sqrt(share * (1 - share) / (n + 2));
}
