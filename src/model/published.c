/* published.c - the configurations of published models, by name.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "model.h"

/* Both have it in common but for layers and experts. */
#define GPT_OSS(layers, experts)                                                             \
    "{\"architectures\": [\"GptOssForCausalLM\"], \"model_type\": \"gpt_oss\", "             \
    "\"num_hidden_layers\": " layers ", \"num_local_experts\": " experts                     \
    ", "                                                                                     \
    "\"num_experts_per_tok\": 4, \"hidden_size\": 2880, \"intermediate_size\": 2880, "       \
    "\"num_attention_heads\": 64, \"num_key_value_heads\": 8, \"head_dim\": 64, "            \
    "\"vocab_size\": 201088, \"sliding_window\": 128, \"max_position_embeddings\": 131072, " \
    "\"rms_norm_eps\": 1e-05, \"swiglu_limit\": 7.0, \"hidden_act\": \"silu\", "             \
    "\"attention_bias\": true, \"tie_word_embeddings\": false, \"rope_theta\": 150000, "     \
    "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, "    \
    "\"beta_slow\": 1.0, \"truncate\": false, \"original_max_position_embeddings\": 4096}, " \
    "\"quantization_config\": {\"quant_method\": \"mxfp4\"}, "                               \
    "\"eos_token_id\": [200002, 199999, 200012]}"

const char *kv8_published_config(const char *name) {
    if (strcmp(name, "gpt-oss-20b") == 0) return GPT_OSS("24", "32");
    if (strcmp(name, "gpt-oss-120b") == 0) return GPT_OSS("36", "128");
    return NULL;
}
