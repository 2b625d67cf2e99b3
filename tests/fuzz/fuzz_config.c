/* fuzz_config.c - any bytes as config.json and as generation_config.json: refused with a message,
 * or a config whose sizes the model can rely on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "gpt_oss_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int holds) {
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    kv8_gpt_oss_config c;
    const char *const text = (const char *)data;
    if (kv8_gpt_oss_config_parse(&c, "fuzz", text, size) == KV8_OK) {
        check(c.num_layers >= 1 && c.num_layers <= KV8_MODEL_MAX_LAYERS);
        check(c.hidden_size % 32 == 0 && c.intermediate_size % 32 == 0);
        check(c.num_kv_heads >= 1 && c.num_qo_heads % c.num_kv_heads == 0);
        check(c.head_dim >= 2 && c.head_dim % 2 == 0 && c.rope.head_dim == c.head_dim);
        check(c.num_experts_per_token >= 1 && c.num_experts_per_token <= c.num_experts);
        check(c.sliding_window >= 1 && c.max_seq_len >= 1 && c.vocab_size >= 1);
        check(c.rms_norm_eps > 0 && c.swiglu_limit > 0);
        for (int32_t i = 0; i < c.num_eos; i++) check(c.eos[i] >= 0 && c.eos[i] < c.vocab_size);
        kv8_rope *rope = NULL;
        check(kv8_rope_create(&rope, &c.rope) == KV8_OK);
        kv8_rope_destroy(rope);
    } else {
        check(kv8_status_message()[0] != '\0');
    }
    kv8_gpt_oss_config generation = {.vocab_size = 4096};
    if (kv8_gpt_oss_generation_parse(&generation, "fuzz", text, size) == KV8_OK)
        check(generation.num_eos >= 0 && generation.num_eos <= KV8_MODEL_MAX_EOS);
    return 0;
}
