/* gpt_oss_config.h - config.json and generation_config.json of a gpt-oss checkpoint, validated.
 *
 * Reads the Hugging Face form (with rope_scaling, or with transformers v5's rope_parameters) and
 * the form of the original/ directory. Every value is checked for type and range here, so that
 * products of the sizes fit into 63 bits everywhere else. Never opens a tensor file.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPT_OSS_CONFIG_H
#define KV8_GPT_OSS_CONFIG_H

#include "model_impl.h"

#include <kv8/attention.h>

enum { KV8_MODEL_MAX_EOS = 8 };

typedef struct kv8_gpt_oss_config {
    int32_t num_layers, num_experts, num_experts_per_token;
    int32_t hidden_size, intermediate_size, vocab_size;
    int32_t num_qo_heads, num_kv_heads, head_dim;
    int32_t sliding_window; /* keys a sliding layer sees, itself included */
    int32_t max_seq_len;
    float rms_norm_eps, swiglu_alpha, swiglu_limit;
    kv8_rope_options rope;
    int32_t window_left[KV8_MODEL_MAX_LAYERS]; /* sliding_window - 1, or -1: a full layer */
    int32_t num_eos, eos[KV8_MODEL_MAX_EOS];
} kv8_gpt_oss_config;

/* From memory: texts need no terminating 0; `file` names the text in messages. *out is written on
 * success only. */
kv8_status kv8_gpt_oss_config_parse(kv8_gpt_oss_config *out, const char *file, const char *text,
                                    size_t size);
/* generation_config.json: its eos_token_id, when it has one, replaces the config's. */
kv8_status kv8_gpt_oss_generation_parse(kv8_gpt_oss_config *config, const char *file,
                                        const char *text, size_t size);
/* Both files of a directory; the second may be absent. */
kv8_status kv8_gpt_oss_config_read(kv8_gpt_oss_config *out, const char *directory);

#endif
