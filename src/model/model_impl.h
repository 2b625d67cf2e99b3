/* model_impl.h - what model shows the rooms above beside its public headers: the limits a model
 * was opened with, and the step over sequences that somebody else has extended.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_IMPL_H
#define KV8_MODEL_IMPL_H

#include "base_impl.h"

#include <kv8/model.h>

enum { KV8_MODEL_MAX_LAYERS = 1024 };

/* The options of kv8_model_open with their defaults filled in and the rung resolved. Borrowed. */
const kv8_model_options *kv8_model_get_options(const kv8_model *model);
/* What kv8_model_get_info copies. Borrowed. */
const kv8_model_info *kv8_model_facts(const kv8_model *model);
/* Rows of logits that stay in a GPU's memory after a step, 0 on the host; and where they lie. */
int32_t kv8_model_held_logits(const kv8_model *model);
float *kv8_model_device_logits(const kv8_model *model);
/* Of those that the last step left, the largest of every KV8_MAXIMUM_IDS: [rows, vocab_size /
 * KV8_MAXIMUM_IDS], NaN where one is NaN; NULL: it has them not. Weights are finite: a row that has
 * a logit which is not has no other. */
enum { KV8_MAXIMUM_IDS = 64 };
const float *kv8_model_device_maxima(const kv8_model *model);
/* kv8_model_step over sequences that were extended by the step's tokens. On failure they keep them:
 * whoever extended takes them back. Logits wanted and logits_out NULL: nothing is waited for; at
 * most kv8_model_held_logits rows, they lie at kv8_model_device_logits when the stream gets there.
 */
/* A token to be drawn as kv8/engine.h defines it from the one row of logits that a step has, all
 * ids alike: by their weights, or the likeliest. */
typedef struct kv8_step_draw {
    uint64_t random; /* u */
    float factor;    /* of differences of logits; 0 = greedy */
    int32_t *drawn;  /* page-locked, filled when the stream gets there: the token; the first id
                        whose logit is not finite, -1 = none; that logit's bits */
} kv8_step_draw;
/* *draws_out: such a step draws by itself, with draw not NULL; else the logits alone are there. */
kv8_status kv8_model_step_extended(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                   const kv8_step_draw *draw, bool *draws_out);

#endif
