/* gpt_oss_weights.h - every tensor of a gpt-oss checkpoint found, checked and pointed at.
 *
 * Accepts Hugging Face names and the names of the original/ directory (whose fused qkv is split by
 * row offset). All weights stay where they are mapped, packed as stored; only the sinks, a few
 * floats per layer, are widened.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPT_OSS_WEIGHTS_H
#define KV8_GPT_OSS_WEIGHTS_H

#include "checkpoint_impl.h"
#include "gpt_oss_config.h"
#include "linear.h"
#include "random_weights.h"

/* One matrix [rows, cols] per expert, MXFP4, and its bias. */
typedef struct kv8_gpt_oss_experts {
    const uint8_t *blocks, *scales, *bias;
    int64_t rows, cols;
} kv8_gpt_oss_experts;

typedef struct kv8_gpt_oss_layer {
    kv8_gain attention_norm, mlp_norm;
    kv8_linear q, k, v, o, router;
    const float *sink_logit;     /* [num_qo_heads] */
    kv8_gpt_oss_experts gate_up; /* rows interleaved: gate 0, up 0, gate 1, .. */
    kv8_gpt_oss_experts down;
} kv8_gpt_oss_layer;

typedef struct kv8_gpt_oss_weights {
    const kv8_allocator *allocator;
    kv8_gpt_oss_layer *layers;
    int32_t num_layers;
    float *sinks; /* [num_layers, num_qo_heads] */
    size_t num_sinks;
    kv8_weight embedding, head;
    kv8_gain final_norm;
    uint64_t num_parameters, bytes, bytes_per_decoded_token;
} kv8_gpt_oss_weights;

/* Borrows the checkpoint's mapped bytes. Every tensor must be there with its dtype and shape, and
 * no other. On failure *out is empty. */
kv8_status kv8_gpt_oss_weights_bind(kv8_gpt_oss_weights *out, const kv8_gpt_oss_config *config,
                                    const kv8_checkpoint *checkpoint,
                                    const kv8_allocator *allocator);
/* The tensors that bind asks for, as random ones; to be closed after a failure too. */
kv8_status kv8_gpt_oss_weights_list(const kv8_gpt_oss_config *config,
                                    const kv8_allocator *allocator, kv8_random_weights *listed);
void kv8_gpt_oss_weights_release(kv8_gpt_oss_weights *weights);

/* Expert e's matrix, borrowed. */
kv8_weight kv8_gpt_oss_experts_weight(const kv8_gpt_oss_experts *experts, int64_t expert);
/* Its bias, [rows] bf16. */
const void *kv8_gpt_oss_experts_bias(const kv8_gpt_oss_experts *experts, int64_t expert);

#endif
