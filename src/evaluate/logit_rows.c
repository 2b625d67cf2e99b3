/* logit_rows.c - one task per row of logits; every row is computed by one thread, in f64.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "logit_rows.h"

#include <math.h>

/* ln sum exp; *best_out is the first index of the maximum. */
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

static double kl_divergence(const float *ref, double ref_lse, const float *logits, double lse,
                            int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        const double log_p = (double)ref[i] - ref_lse;
        sum += exp(log_p) * (log_p - ((double)logits[i] - lse));
    }
    return sum;
}

static void row_task(void *cookie, size_t row, int32_t thread_idx) {
    (void)thread_idx;
    const kv8_row_job *const job = *(const kv8_row_job *const *)cookie;
    const size_t offset = row * (size_t)job->vocab_size;
    const float *const logits = job->logits + offset;
    kv8_row_facts facts = {0};
    facts.lse = log_sum_exp(logits, job->vocab_size, &facts.best);
    if (row < (size_t)job->num_next) facts.loss = facts.lse - (double)logits[job->next_ids[row]];
    if (job->ref_logits != NULL)
        facts.kl = kl_divergence(job->ref_logits + offset, job->ref[row].lse, logits, facts.lse,
                                 job->vocab_size);
    job->out[row] = facts;
}

void kv8_row_job_run(const kv8_row_job *job, kv8_threads *threads) {
    kv8_threads_run(threads, (size_t)job->num_rows, row_task, &job);
}
