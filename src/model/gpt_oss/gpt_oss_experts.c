/* gpt_oss_experts.c - the mixture of experts of one layer: route, group rows by expert, two packed
 * products around the gate, weighted sum.
 *
 * Rows are grouped so that each expert's weights are read once per step however many tokens chose
 * it. The sum goes token by token, best expert first: the same order in every batch.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "gpt_oss.h"

/* Chooses the experts of every row. */
static void route(const kv8_gpt_oss *own, const kv8_gpt_oss_layer *layer, int32_t n) {
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_activations *const a = &own->act;
    const kv8_matmul_job job = kv8_linear_job(&layer->router, a->normed, a->router, n);
    kv8_matmul_run(own->options->isa, own->options->threads, &job, 1);
    const size_t k = (size_t)c->num_experts_per_token, experts = (size_t)c->num_experts;
    for (size_t t = 0; t < (size_t)n; t++)
        kv8_topk_softmax(a->router + t * experts, experts, k, a->expert_idx + t * k,
                         a->expert_weight + t * k);
}

/* Counting sort of the choices by expert: fills expert_first, slot_token and expert_slot. */
static void group_rows(const kv8_gpt_oss *own, int32_t n) {
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_activations *const a = &own->act;
    const int32_t k = c->num_experts_per_token, choices = n * k;
    int32_t *const first = a->expert_first;
    memset(first, 0, ((size_t)c->num_experts + 1) * sizeof *first);
    for (int32_t i = 0; i < choices; i++) first[a->expert_idx[i] + 1]++;
    for (int32_t e = 0; e < c->num_experts; e++) first[e + 1] += first[e];
    for (int32_t i = 0; i < choices; i++) {
        const int32_t slot = first[a->expert_idx[i]]++;
        a->slot_token[slot] = i / k;
        a->expert_slot[i] = slot;
    }
    /* Each entry has moved up to the next expert's first row: move them back. */
    for (int32_t e = c->num_experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

/* One job for every expert that somebody chose. x_rows NULL: x is grouped already. */
static void multiply(const kv8_gpt_oss *own, const kv8_gpt_oss_experts *experts, const float *x,
                     const int32_t *x_rows, float *y) {
    const kv8_activations *const a = &own->act;
    size_t num_jobs = 0;
    for (int32_t e = 0; e < own->config.num_experts; e++) {
        const int64_t first = a->expert_first[e], rows = a->expert_first[e + 1] - first;
        if (rows == 0) continue;
        a->jobs[num_jobs++] = (kv8_matmul_job){.w = kv8_gpt_oss_experts_weight(experts, e),
                                               .bias = kv8_gpt_oss_experts_bias(experts, e),
                                               .x = x_rows != NULL ? x : x + first * experts->cols,
                                               .x_stride = experts->cols,
                                               .x_rows = x_rows != NULL ? x_rows + first : NULL,
                                               .y = y + first * experts->rows,
                                               .y_stride = experts->rows,
                                               .num_rows = rows};
    }
    kv8_matmul_run(own->options->isa, own->options->threads, a->jobs, num_jobs);
}

/* Fewer gates than this are the caller's: 20 us of work, about, as in ops' matmul.c. */
enum { MIN_PARALLEL_GATES = 1 << 16 };

static void gate_row(void *cookie, size_t row, int32_t thread_idx) {
    const kv8_gpt_oss *const own = cookie;
    const size_t width = (size_t)own->config.intermediate_size;
    (void)thread_idx;
    kv8_swiglu_clamped(own->options->isa, own->act.gate_up + row * 2 * width, 1, width,
                       own->config.swiglu_alpha, own->config.swiglu_limit,
                       own->act.gated + row * width);
}

void kv8_gpt_oss_experts_run(kv8_gpt_oss *own, const kv8_gpt_oss_layer *layer, int32_t n) {
    const kv8_activations *const a = &own->act;
    const size_t hidden = (size_t)own->config.hidden_size;
    const int32_t k = own->config.num_experts_per_token;
    route(own, layer, n);
    group_rows(own, n);
    multiply(own, &layer->gate_up, a->normed, a->slot_token, a->gate_up);
    const int64_t gates = (int64_t)n * k * own->config.intermediate_size;
    kv8_threads_run(gates < MIN_PARALLEL_GATES ? NULL : own->options->threads,
                    (size_t)n * (size_t)k, gate_row, own);
    multiply(own, &layer->down, a->gated, NULL, a->down);
    for (int32_t i = 0; i < n * k; i++)
        kv8_axpy(own->options->isa, a->expert_weight[i],
                 a->down + (size_t)a->expert_slot[i] * hidden, hidden,
                 a->residual + (size_t)(i / k) * hidden);
}
