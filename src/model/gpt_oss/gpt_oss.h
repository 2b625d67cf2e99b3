/* gpt_oss.h - gpt-oss opened: its configuration, weights and the activations of a step. Private to
 * its folder.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPT_OSS_H
#define KV8_GPT_OSS_H

#include "gpt_oss_weights.h"
#include "model.h"

/* f32 activations of one step of at most n = max_step_tokens rows; k = experts per token. */
typedef struct kv8_activations {
    float *residual, *normed, *projected; /* [n, hidden] */
    float *q, *attended;                  /* [n, num_qo_heads * head_dim] */
    float *k, *v;                         /* [n, num_kv_heads * head_dim] */
    float *cos_sin;                       /* [n, head_dim] */
    float *router;                        /* [n, num_experts] */
    int32_t *expert_idx;                  /* [n, k] chosen experts, best first */
    float *expert_weight;                 /* [n, k] */
    int32_t *expert_slot;                 /* [n, k] row of the choice in the arrays below */
    int32_t *expert_first;                /* [num_experts + 1] first row of each expert */
    int32_t *slot_token;                  /* [n * k] */
    float *gate_up;                       /* [n * k, 2 * intermediate], grouped by expert */
    float *gated;                         /* [n * k, intermediate] */
    float *down;                          /* [n * k, hidden] */
    kv8_matmul_job *jobs;                 /* [num_experts], at least 3 */
} kv8_activations;

typedef struct kv8_gpt_oss {
    const kv8_model_options *options; /* the model's */
    kv8_gpt_oss_config config;
    kv8_gpt_oss_weights weights;
    kv8_rope *rope;
    kv8_activations act;               /* of a model on the host */
    struct kv8_gpt_oss_device *device; /* NULL = the host computes */
} kv8_gpt_oss;

/* What the model's step runs: gpt_oss_forward.c. */
kv8_status kv8_gpt_oss_compute(kv8_model *model, kv8_cache *cache, const kv8_step *step);
/* residual += mixture of experts over act.normed, n rows: gpt_oss_experts.c. */
void kv8_gpt_oss_experts_run(kv8_gpt_oss *own, const kv8_gpt_oss_layer *layer, int32_t n);

#endif
