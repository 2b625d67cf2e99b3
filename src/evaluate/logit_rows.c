/* logit_rows.c - one task per row of logits, computed by one thread in f64; on a GPU one block.
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

/* --- logits of a chunk, and where they lie --- */

static kv8_status open_on_device(kv8_logit_rows *r, bool compares) {
    void *memory = NULL;
    const size_t rows = (size_t)r->max_rows;
    KV8_TRY(kv8_kernel_get(&r->kernel, r->device, "kv8_logit_rows_f32__sm80",
                           sizeof(kv8_logit_rows_args), 0));
    KV8_TRY(kv8_device_alloc(r->device, rows * sizeof *r->ref, &memory));
    r->ref_on_device = memory;
    KV8_TRY(kv8_device_alloc(r->device, rows * sizeof *r->facts, &memory));
    r->facts_on_device = memory;
    KV8_TRY(kv8_device_alloc(r->device, rows * sizeof *r->next_on_device, &memory));
    r->next_on_device = memory;
    const size_t bytes = rows * (size_t)r->vocab_size * sizeof(float);
    KV8_TRY(kv8_device_alloc(r->device, bytes, &memory));
    r->ref_logits = memory;
    if (!compares) return KV8_OK;
    KV8_TRY(kv8_device_alloc(r->device, bytes, &memory));
    r->logits = memory;
    return KV8_OK;
}

static size_t num_logits(const kv8_logit_rows *r) {
    return (size_t)r->max_rows * (size_t)r->vocab_size;
}

kv8_status kv8_logit_rows_open(kv8_logit_rows *r, kv8_device *device, kv8_stream *stream,
                               kv8_threads *threads, int32_t max_rows, int32_t vocab_size,
                               bool compares) {
    void *memory = NULL;
    *r = (kv8_logit_rows){.threads = threads,
                          .device = device,
                          .stream = stream,
                          .max_rows = max_rows,
                          .vocab_size = vocab_size};
    KV8_TRY(kv8_alloc(NULL, (size_t)max_rows, sizeof *r->ref, "rows of logits", &memory));
    r->ref = memory;
    KV8_TRY(kv8_alloc(NULL, (size_t)max_rows, sizeof *r->facts, "rows of logits", &memory));
    r->facts = memory;
    if (device != NULL) return open_on_device(r, compares);
    KV8_TRY(kv8_alloc(NULL, num_logits(r), sizeof(float), "logits", &memory));
    r->ref_logits = memory;
    if (!compares) return KV8_OK;
    KV8_TRY(kv8_alloc(NULL, num_logits(r), sizeof(float), "logits", &memory));
    r->logits = memory;
    return KV8_OK;
}

void kv8_logit_rows_close(kv8_logit_rows *r) {
    if (r->device == NULL) {
        kv8_release(NULL, r->ref_logits, num_logits(r), sizeof(float));
        kv8_release(NULL, r->logits, num_logits(r), sizeof(float));
    } else {
        kv8_device_free(r->device, r->ref_logits);
        kv8_device_free(r->device, r->logits);
        kv8_device_free(r->device, r->ref_on_device);
        kv8_device_free(r->device, r->facts_on_device);
        kv8_device_free(r->device, r->next_on_device);
    }
    kv8_release(NULL, r->ref, (size_t)r->max_rows, sizeof *r->ref);
    kv8_release(NULL, r->facts, (size_t)r->max_rows, sizeof *r->facts);
    *r = (kv8_logit_rows){0};
}

static kv8_status judge_on_device(const kv8_logit_rows *r, const kv8_row_job *job, bool is_ref) {
    const size_t next_bytes = (size_t)job->num_next * sizeof *job->next_ids;
    KV8_TRY(kv8_stream_copy(r->stream, r->next_on_device, job->next_ids, next_bytes));
    const kv8_logit_rows_args args = {.logits = job->logits,
                                      .ref_logits = job->ref_logits,
                                      .ref = r->ref_on_device,
                                      .next_ids = r->next_on_device,
                                      .out = is_ref ? r->ref_on_device : r->facts_on_device,
                                      .num_next = job->num_next,
                                      .vocab_size = job->vocab_size};
    const kv8_launch launch = {.grid = {(uint32_t)job->num_rows},
                               .block = {KV8_LOGIT_ROWS_THREADS}};
    KV8_TRY(kv8_kernel_launch(&r->kernel, r->stream, &launch, &args));
    KV8_TRY(
        kv8_stream_copy(r->stream, job->out, args.out, (size_t)job->num_rows * sizeof *job->out));
    return kv8_stream_synchronize(r->stream);
}

kv8_status kv8_logit_rows_judge(kv8_logit_rows *r, bool is_ref, int32_t num_rows,
                                const int32_t *next_ids, int32_t num_next) {
    const kv8_row_job job = {.logits = is_ref ? r->ref_logits : r->logits,
                             .ref_logits = is_ref ? NULL : r->ref_logits,
                             .ref = r->ref,
                             .next_ids = next_ids,
                             .num_rows = num_rows,
                             .num_next = num_next,
                             .vocab_size = r->vocab_size,
                             .out = is_ref ? r->ref : r->facts};
    if (r->device != NULL) return judge_on_device(r, &job, is_ref);
    kv8_row_job_run(&job, r->threads);
    return KV8_OK;
}
