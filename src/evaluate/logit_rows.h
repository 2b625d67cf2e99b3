/* logit_rows.h - what rows of logits say, in f64: loss, divergence from a reference, argmax. Knows
 * logits, not how a model makes them. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LOGIT_ROWS_H
#define KV8_LOGIT_ROWS_H

#include "device_impl.h"
#include "logit_rows_args.h"

typedef struct kv8_row_job {
    const float *logits, *ref_logits; /* [num_rows, vocab_size]; ref_logits NULL = no reference */
    const kv8_row_facts *ref;         /* [num_rows] of ref_logits */
    const int32_t *next_ids; /* [num_next]: the tokens that the first rows should predict */
    int32_t num_rows, num_next, vocab_size;
    kv8_row_facts *out; /* [num_rows] */
} kv8_row_job;

void kv8_row_job_run(const kv8_row_job *job, kv8_threads *threads);

/* Logits of a chunk, of the reference and of what is held against it, where a model leaves them. */
typedef struct kv8_logit_rows {
    kv8_threads *threads;
    kv8_device *device; /* NULL = the host; borrowed, as the stream */
    kv8_stream *stream;
    int32_t max_rows, vocab_size;
    float *ref_logits, *logits; /* [max_rows, vocab_size], in device memory where there is one;
                                 * logits NULL: nothing is held against the reference */
    kv8_row_facts *ref, *facts; /* [max_rows] of them, as judged, in host memory */
    kv8_kernel kernel;
    kv8_row_facts *ref_on_device, *facts_on_device;
    int32_t *next_on_device;
} kv8_logit_rows;

/* device NULL: in host memory. On failure too it is to be closed. */
kv8_status kv8_logit_rows_open(kv8_logit_rows *rows, kv8_device *device, kv8_stream *stream,
                               kv8_threads *threads, int32_t max_rows, int32_t vocab_size,
                               bool compares);
void kv8_logit_rows_close(kv8_logit_rows *rows);
/* Judges the first num_rows: ref_logits into ref where is_ref, else logits beside them into facts.
 */
kv8_status kv8_logit_rows_judge(kv8_logit_rows *rows, bool is_ref, int32_t num_rows,
                                const int32_t *next_ids, int32_t num_next);

#endif
