/* logit_rows.h - what rows of logits say, in f64: loss, divergence from a reference, argmax. Knows
 * logits, not how a model makes them. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LOGIT_ROWS_H
#define KV8_LOGIT_ROWS_H

#include "base_impl.h"

/* What one row gives. */
typedef struct kv8_row_facts {
    double lse;  /* ln sum exp */
    double loss; /* of the row's next token; 0 without one */
    double kl;   /* sum_i p_i (ln p_i - ln q_i), p the reference's softmax; 0 without one */
    int32_t best;
} kv8_row_facts;

typedef struct kv8_row_job {
    const float *logits, *ref_logits; /* [num_rows, vocab_size]; ref_logits NULL = no reference */
    const kv8_row_facts *ref;         /* [num_rows] of ref_logits */
    const int32_t *next_ids; /* [num_next]: the tokens that the first rows should predict */
    int32_t num_rows, num_next, vocab_size;
    kv8_row_facts *out; /* [num_rows] */
} kv8_row_job;

void kv8_row_job_run(const kv8_row_job *job, kv8_threads *threads);

#endif
