/* evaluate.c - a comparison of KV settings: checks what was asked for and runs its parts: windows
 * of the text, greedy continuations, recall.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "evaluation.h"

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
    return kv8_evaluate_check_ids(info, options->token_ids, options->num_tokens);
}

static kv8_status run_all(kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    kv8_recall *recall = NULL;
    KV8_TRY(kv8_recall_create(&recall, evaluation));
    evaluation->units_total = (uint64_t)evaluation->num_lanes * (uint64_t)options->num_windows *
                                  (uint64_t)options->window_len +
                              kv8_evaluate_greedy_units(evaluation) +
                              kv8_recall_units(recall, evaluation);
    kv8_status status = kv8_evaluate_windows(evaluation);
    if (status == KV8_OK) status = kv8_evaluate_greedy(evaluation);
    if (status == KV8_OK && recall != NULL) status = kv8_recall_run(recall, evaluation);
    kv8_recall_destroy(recall);
    return status;
}

/* Settings and empty results of all lanes; lane 0 is f32. */
static kv8_status open_lanes(kv8_evaluation *evaluation, const kv8_kv_setting *settings) {
    const size_t num_lanes = (size_t)evaluation->num_lanes;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, num_lanes, sizeof *evaluation->settings, "settings", &memory));
    evaluation->settings = memory;
    KV8_TRY(kv8_alloc(NULL, num_lanes, sizeof *evaluation->rows, "rows", &memory));
    evaluation->rows = memory;
    KV8_TRY(kv8_kv_setting_parse("f32", &evaluation->settings[0]));
    for (size_t i = 0; i < num_lanes; i++) {
        if (i > 0) evaluation->settings[i] = settings[i - 1];
        kv8_compare_row *const row = &evaluation->rows[i];
        *row = (kv8_compare_row){.struct_size = sizeof *row,
                                 .greedy_match = (double)NAN,
                                 .greedy_error = (double)NAN,
                                 .recall = (double)NAN,
                                 .recall_error = (double)NAN,
                                 .decode_tokens_per_s = (double)NAN};
        memcpy(row->kv, evaluation->settings[i].name, sizeof row->kv);
    }
    return KV8_OK;
}

static kv8_status write_rows(const kv8_evaluation *evaluation, kv8_compare_row *rows_out) {
    for (size_t i = 0; i < (size_t)evaluation->num_lanes; i++)
        KV8_WRITE_ELEMENT(kv8_compare_row, rows_out, i, &evaluation->rows[i]);
    return KV8_OK;
}

kv8_status kv8_evaluate_compare(kv8_model *model, const kv8_kv_setting *settings,
                                int32_t num_settings, const kv8_compare_options *options,
                                kv8_compare_row *rows_out) {
    KV8_REQUIRE(model, options, rows_out);
    if (num_settings > 0) KV8_REQUIRE(settings);
    KV8_TAKE_STRUCT(kv8_compare_options, options);
    if (num_settings < 0)
        return kv8_fail(KV8_ERR_INVALID, "%d settings, must not be < 0", num_settings);
    kv8_evaluation evaluation = {.model = model,
                                 .options = options,
                                 .num_lanes = num_settings + 1,
                                 .info = *kv8_model_facts(model)};
    KV8_TRY(check_compare(&evaluation.info, options));
    const size_t num_lanes = (size_t)evaluation.num_lanes;
    kv8_status status = open_lanes(&evaluation, settings);
    /* Empty rows first: what cannot be written is refused before the work. */
    if (status == KV8_OK) status = write_rows(&evaluation, rows_out);
    if (status == KV8_OK) status = run_all(&evaluation);
    if (status == KV8_OK) status = write_rows(&evaluation, rows_out);
    kv8_release(NULL, evaluation.settings, num_lanes, sizeof *evaluation.settings);
    kv8_release(NULL, evaluation.rows, num_lanes, sizeof *evaluation.rows);
    return status;
}
