/* evaluate_impl.h - what the files of the evaluation share: lanes, progress. Private to them.
 *
 * A lane is one KV setting with its cache, running the same tokens as the other lanes. Lane 0
 * stores f32 and is what the others are held against.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_EVALUATE_IMPL_H
#define KV8_EVALUATE_IMPL_H

#include <kv8/evaluate.h>

#include "model_impl.h"

/* A decoded token costs about this many prefilled ones: weights are read for it alone. */
enum { KV8_EVALUATE_DECODE_UNITS = 8 };

typedef struct kv8_evaluation {
    kv8_model *model;
    kv8_model_info info;
    const kv8_compare_options *options;
    const kv8_kv_setting *settings; /* [num_lanes] */
    int32_t num_lanes;
    kv8_compare_row *rows; /* [num_lanes] */
    uint64_t units_done, units_total;
} kv8_evaluation;

/* Tokens of one step: at most MAX_STEP, at most what the model was opened for. */
enum { KV8_EVALUATE_MAX_STEP = 512 };
int32_t kv8_evaluate_step_tokens(const kv8_model *model);

/* Steps one sequence by num_tokens <= kv8_evaluate_step_tokens; logits_out [num_rows, vocab_size]
 * for the last num_rows tokens. Adds the time to *ns. */
kv8_status kv8_evaluate_step(kv8_model *model, kv8_cache *cache, kv8_seq seq,
                             const int32_t *token_ids, int32_t num_tokens, int32_t num_rows,
                             float *logits_out, uint64_t *ns);
/* The same for any number of tokens, chunk by chunk; logits of the last token only (may be NULL).
 */
kv8_status kv8_evaluate_prefill(kv8_evaluation *evaluation, const char *what, kv8_cache *cache,
                                kv8_seq seq, const int32_t *token_ids, int32_t num_tokens,
                                float *logits_out);
/* Counts work done and asks whether to go on. */
kv8_status kv8_evaluate_advance(kv8_evaluation *evaluation, const char *what, uint64_t units);

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
