/* logit_rows_args.h - what the kernel of logit_rows.cu takes and gives, in C and in CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LOGIT_ROWS_ARGS_H
#define KV8_LOGIT_ROWS_ARGS_H

#include <stdint.h>

enum { KV8_LOGIT_ROWS_THREADS = 512 };

/* What one row gives. */
typedef struct kv8_row_facts {
    double lse;   /* ln sum exp */
    double loss;  /* of the row's next token; 0 without one */
    double kl;    /* sum_i p_i (ln p_i - ln q_i), p the reference's softmax; 0 without one */
    int32_t best; /* the first of the largest */
    int32_t padding;
} kv8_row_facts;

typedef struct kv8_logit_rows_args {
    const float *logits, *ref_logits; /* [rows, vocab_size]; ref_logits NULL = no reference */
    const kv8_row_facts *ref;         /* [rows] of ref_logits */
    const int32_t *next_ids;          /* [num_next] */
    kv8_row_facts *out;               /* [rows] */
    int32_t num_next, vocab_size;
} kv8_logit_rows_args;

#endif
