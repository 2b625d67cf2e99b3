/* evaluation.h - what the parts of a comparison share: settings, results, progress, and a lane's
 * engine. Private to the room.
 *
 * A lane is one KV setting with its cache, running the same tokens as the other lanes. Lane 0
 * stores f32 and is what the others are held against.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_EVALUATION_H
#define KV8_EVALUATION_H

#include <kv8/evaluate.h>

#include "model_impl.h"

/* A step costs as much as this many prefilled tokens at least: it reads the weights. */
enum { KV8_EVALUATE_STEP_UNITS = 8 };

typedef struct kv8_evaluation {
    kv8_model *model;
    kv8_model_info info;
    const kv8_compare_options *options;
    kv8_kv_setting *settings; /* [num_lanes] */
    int32_t num_lanes;
    kv8_compare_row *rows; /* [num_lanes] */
    uint64_t units_done, units_total;
} kv8_evaluation;

/* Tokens of one step: at most MAX_STEP, at most what the model was opened for. */
enum { KV8_EVALUATE_MAX_STEP = 512 };
int32_t kv8_evaluate_step_tokens(const kv8_model *model);
/* Tokens of a step whose every row of logits is kept: these take a bounded amount of memory. */
int32_t kv8_evaluate_chunk_tokens(const kv8_model *model);
kv8_status kv8_evaluate_check_ids(const kv8_model_info *info, const int32_t *ids, int64_t num);
kv8_status kv8_evaluate_report(kv8_progress progress, void *cookie, const char *what, uint64_t done,
                               uint64_t total);

/* The cache of one setting and an engine over it. */
typedef struct kv8_lane {
    kv8_cache *cache;
    kv8_engine *engine;
} kv8_lane;
/* Fills in scales of the options. */
kv8_status kv8_lane_open_cache(kv8_cache **out, const kv8_evaluation *evaluation, int32_t lane_idx,
                               const kv8_kv_cache_options *options);
/* On failure the lane is empty. */
kv8_status kv8_lane_open(kv8_lane *lane, const kv8_evaluation *evaluation, int32_t lane_idx,
                         const kv8_kv_cache_options *cache_options,
                         const kv8_engine_options *engine_options);
void kv8_lane_close(kv8_lane *lane);

/* One step of an engine, and its time; a request that failed is an error. */
kv8_status kv8_evaluate_step(kv8_engine *engine, int32_t *num_events_out, uint64_t *ns_out);
/* The same, counted as work done; asks whether to go on. */
kv8_status kv8_evaluation_step(kv8_evaluation *evaluation, const char *what, kv8_engine *engine,
                               int32_t *num_events_out, uint64_t *ns_out);

/* A step of so many tokens is done; asks whether to go on. */
kv8_status kv8_evaluation_add_tokens(kv8_evaluation *evaluation, const char *what,
                                     int64_t num_tokens);

/* Standard errors: of a mean of n values from their sum and sum of squares, and of a share. */
double kv8_mean_error(double sum, double squares, double n);
double kv8_share_error(double hits, double n);

/* Runs the text's windows: fills kl, top1, loss, dloss, bytes_per_token, tokens_per_s. */
kv8_status kv8_evaluate_windows(kv8_evaluation *evaluation);

/* Greedy continuations of prompts from the text: fills greedy_match and decode_tokens_per_s. */
uint64_t kv8_evaluate_greedy_units(const kv8_evaluation *evaluation);
kv8_status kv8_evaluate_greedy(kv8_evaluation *evaluation);

/* Codes looked up in tables: fills recall. The tables are rendered first, so that the amount of
 * work is known before any is done. */
typedef struct kv8_recall kv8_recall;
/* *out is NULL, with KV8_OK, when the tokenizer knows no harmony or no table was asked for. */
kv8_status kv8_recall_create(kv8_recall **out, const kv8_evaluation *evaluation);
void kv8_recall_destroy(kv8_recall *recall);
uint64_t kv8_recall_units(const kv8_recall *recall, const kv8_evaluation *evaluation);
kv8_status kv8_recall_run(kv8_recall *recall, kv8_evaluation *evaluation);

#endif
