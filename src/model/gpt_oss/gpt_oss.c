/* gpt_oss.c - gpt-oss as a row of the table of architectures: whose config it is, its facts, and
 * the memory its steps work in.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss.h"

#include <string.h>

#include "gpt_oss_device.h"

/* By model_type; the form of the original/ directory has none, but counts experts. */
static bool owns(const kv8_json_fields *config) {
    const char *const type = json_string_value(kv8_json_get(config, "model_type"));
    if (type != NULL) return strcmp(type, "gpt_oss") == 0;
    return kv8_json_get(config, "num_experts") != NULL ||
           kv8_json_get(config, "architectures") != NULL;
}

static void fill_info(kv8_model_info *info, const kv8_gpt_oss_config *c) {
    info->num_layers = c->num_layers;
    info->hidden_size = c->hidden_size;
    info->intermediate_size = c->intermediate_size;
    info->vocab_size = c->vocab_size;
    info->num_qo_heads = c->num_qo_heads;
    info->num_kv_heads = c->num_kv_heads;
    info->head_dim = c->head_dim;
    info->num_experts = c->num_experts;
    info->num_experts_per_token = c->num_experts_per_token;
    info->max_seq_len = c->max_seq_len;
    info->num_eos = c->num_eos;
    memcpy(info->eos, c->eos, sizeof info->eos);
    info->architecture = "GptOssForCausalLM";
}

static kv8_status create_own(kv8_model *model) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(model->options.allocator, 1, sizeof(kv8_gpt_oss), "model", &memory));
    kv8_gpt_oss *const own = model->own = memory;
    own->options = &model->options;
    return KV8_OK;
}

static void take_config(kv8_model *model) {
    const kv8_gpt_oss *const own = model->own;
    fill_info(&model->info, &own->config);
    memcpy(model->window_left, own->config.window_left, sizeof model->window_left);
}

static kv8_status read_config(kv8_model *model, const char *directory) {
    KV8_TRY(create_own(model));
    kv8_gpt_oss *const own = model->own;
    KV8_TRY(kv8_gpt_oss_config_read(&own->config, directory));
    take_config(model);
    return KV8_OK;
}

static kv8_status parse_config(kv8_model *model, const char *label, const char *text, size_t size) {
    KV8_TRY(create_own(model));
    kv8_gpt_oss *const own = model->own;
    KV8_TRY(kv8_gpt_oss_config_parse(&own->config, label, text, size));
    take_config(model);
    return KV8_OK;
}

static kv8_status list_weights(kv8_model *model, kv8_random_weights *listed) {
    const kv8_gpt_oss *const own = model->own;
    return kv8_gpt_oss_weights_list(&own->config, model->options.allocator, listed);
}

static kv8_status take_activations(kv8_buffers *b, kv8_activations *a, const kv8_gpt_oss_config *c,
                                   int64_t n) {
    const int64_t slots = n * c->num_experts_per_token;
    const int64_t q_width = (int64_t)c->num_qo_heads * c->head_dim;
    const int64_t kv_width = (int64_t)c->num_kv_heads * c->head_dim;
    KV8_TRY(kv8_buffers_take_floats(b, n, c->hidden_size, &a->residual));
    KV8_TRY(kv8_buffers_take_floats(b, n, c->hidden_size, &a->normed));
    KV8_TRY(kv8_buffers_take_floats(b, n, c->hidden_size, &a->projected));
    KV8_TRY(kv8_buffers_take_floats(b, n, q_width, &a->q));
    KV8_TRY(kv8_buffers_take_floats(b, n, q_width, &a->attended));
    KV8_TRY(kv8_buffers_take_floats(b, n, kv_width, &a->k));
    KV8_TRY(kv8_buffers_take_floats(b, n, kv_width, &a->v));
    KV8_TRY(kv8_buffers_take_floats(b, n, c->head_dim, &a->cos_sin));
    KV8_TRY(kv8_buffers_take_floats(b, n, c->num_experts, &a->router));
    KV8_TRY(kv8_buffers_take_floats(b, slots, 1, &a->expert_weight));
    KV8_TRY(kv8_buffers_take_floats(b, slots, 2 * (int64_t)c->intermediate_size, &a->gate_up));
    KV8_TRY(kv8_buffers_take_floats(b, slots, c->intermediate_size, &a->gated));
    KV8_TRY(kv8_buffers_take_floats(b, slots, c->hidden_size, &a->down));
    KV8_TRY(kv8_buffers_take_ints(b, slots, &a->expert_idx));
    KV8_TRY(kv8_buffers_take_ints(b, slots, &a->expert_slot));
    KV8_TRY(kv8_buffers_take_ints(b, slots, &a->slot_token));
    KV8_TRY(kv8_buffers_take_ints(b, (int64_t)c->num_experts + 1, &a->expert_first));
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(b, kv8_max_i64(c->num_experts, 3), sizeof *a->jobs, "matrix jobs",
                             &memory));
    a->jobs = memory;
    return KV8_OK;
}

static kv8_status open_weights(kv8_model *model) {
    kv8_gpt_oss *const own = model->own;
    KV8_TRY(kv8_gpt_oss_weights_bind(&own->weights, &own->config, &model->checkpoint,
                                     model->options.allocator));
    model->info.num_parameters = own->weights.num_parameters;
    model->info.bytes = own->weights.bytes;
    model->info.bytes_per_decoded_token = own->weights.bytes_per_decoded_token;
    KV8_TRY(kv8_rope_create(&own->rope, &own->config.rope));
    if (model->options.device != NULL) return KV8_OK;
    return take_activations(&model->buffers, &own->act, &own->config,
                            model->options.max_step_tokens);
}

static void close_weights(kv8_model *model) {
    kv8_gpt_oss *const own = model->own;
    if (own == NULL) return;
    kv8_gpt_oss_device_close(model);
    kv8_rope_destroy(own->rope);
    kv8_gpt_oss_weights_release(&own->weights);
    kv8_release(model->options.allocator, own, 1, sizeof *own);
}

const kv8_architecture kv8_architecture_gpt_oss = {.model_type = "gpt_oss",
                                                   .owns = owns,
                                                   .read = read_config,
                                                   .parse = parse_config,
                                                   .list = list_weights,
                                                   .open = open_weights,
                                                   .compute = kv8_gpt_oss_compute,
                                                   .close = close_weights,
                                                   .device = &kv8_gpt_oss_on_device};
