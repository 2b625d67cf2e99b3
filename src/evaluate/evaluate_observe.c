/* evaluate_observe.c - a text past a model's layers, window by window, with an observer on.
 *
 * A window's rows do not depend on what else runs, so that ranks which share the windows out count
 * what one process counts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/evaluate.h>

#include "model_impl.h"

static kv8_status check_observe(const kv8_model_info *info,
                                const kv8_observe_text_options *options) {
    if (options->window_len < 1 || options->window_len > info->max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "windows of %d tokens, must be at least 1 and at most the context of %d",
                        options->window_len, info->max_seq_len);
    if (options->num_tokens < 1)
        return kv8_fail(KV8_ERR_INVALID, "%lld tokens to observe, must be at least 1",
                        (long long)options->num_tokens);
    if (options->num_ranks < 0 || options->rank < 0 ||
        options->rank >= kv8_max_i64(options->num_ranks, 1))
        return kv8_fail(KV8_ERR_INVALID, "rank %d of %d", options->rank, options->num_ranks);
    return KV8_OK;
}

static kv8_status run_window(kv8_model *model, kv8_cache *cache,
                             const kv8_observe_text_options *options, int64_t at, uint64_t *done) {
    const int32_t *const ids = options->token_ids + at;
    const int64_t num = kv8_min_i64(options->window_len, options->num_tokens - at);
    const int32_t step = kv8_model_get_options(model)->max_step_tokens;
    kv8_seq seq = KV8_SEQ_NONE;
    KV8_TRY(kv8_cache_seq_create(cache, &seq));
    for (int64_t begin = 0; begin < num; begin += step) {
        const int32_t indptr[2] = {0, (int32_t)kv8_min_i64(num - begin, step)};
        const kv8_step chunk = {.struct_size = sizeof chunk,
                                .num_seqs = 1,
                                .seqs = &seq,
                                .indptr = indptr,
                                .token_ids = ids + begin};
        KV8_TRY(kv8_model_step(model, cache, &chunk));
        *done += (uint64_t)indptr[1];
        if (options->progress != NULL &&
            options->progress(options->progress_cookie, "observe", *done,
                              (uint64_t)(options->num_tokens / kv8_max_i64(options->num_ranks, 1))))
            return kv8_fail(KV8_ERR_CANCELLED, "interrupted");
    }
    return kv8_cache_seq_destroy(cache, seq);
}

kv8_status kv8_evaluate_observe(kv8_model *model, kv8_observer *observer,
                                const kv8_observe_text_options *options) {
    KV8_REQUIRE(model, observer, options);
    KV8_TAKE_STRUCT(kv8_observe_text_options, options);
    KV8_TRY(check_observe(kv8_model_facts(model), options));
    kv8_kv_setting setting;
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_cache *cache = NULL;
    uint64_t done = 0;
    /* A GPU has no fast kernel for f32 keys, and what is counted is not what is stored. */
    const bool on_device = kv8_model_get_options(model)->device != NULL;
    KV8_TRY(kv8_kv_setting_parse(on_device ? "bf16" : "f32", &setting));
    cache_options.max_seq_len = (int32_t)kv8_min_i64(options->window_len, options->num_tokens);
    cache_options.step_tokens = (int32_t)kv8_min_i64(kv8_model_get_options(model)->max_step_tokens,
                                                     cache_options.max_seq_len);
    KV8_TRY(kv8_kv_setting_cache_create(&cache, model, &setting, &cache_options));
    kv8_status status = kv8_model_set_observer(model, observer);
    if (status == KV8_OK) {
        const int64_t stride = (int64_t)options->window_len * kv8_max_i64(options->num_ranks, 1);
        kv8_observer_start(observer);
        for (int64_t at = (int64_t)options->rank * options->window_len;
             status == KV8_OK && at < options->num_tokens; at += stride)
            status = run_window(model, cache, options, at, &done);
        kv8_observer_stop(observer);
        const kv8_status taken = kv8_model_set_observer(model, NULL);
        if (status == KV8_OK) status = taken;
    }
    kv8_cache_destroy(cache);
    return status;
}
