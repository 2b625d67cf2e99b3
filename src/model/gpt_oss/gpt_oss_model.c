/* gpt_oss_model.c - opening a checkpoint, its facts, and the memory its steps work in.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss_model.h"

enum { DEFAULT_STEP_TOKENS = 512, DEFAULT_STEP_SEQS = 16, MAX_STEP_TOKENS = 1 << 17 };

/* --- memory --- */

kv8_status kv8_buffers_take(kv8_buffers *buffers, int64_t count, size_t size, const char *what,
                            void **out) {
    if (buffers->num_held == KV8_MAX_BUFFERS)
        return kv8_fail(KV8_ERR_NO_MEMORY, "%s: more than %d buffers", what, (int)KV8_MAX_BUFFERS);
    void *ptr = NULL;
    KV8_TRY(kv8_alloc(buffers->allocator, (size_t)count, size, what, &ptr));
    const int32_t i = buffers->num_held++;
    buffers->held[i].ptr = ptr;
    buffers->held[i].count = (size_t)count;
    buffers->held[i].size = size;
    *out = ptr;
    return KV8_OK;
}

void kv8_buffers_release(kv8_buffers *buffers) {
    for (int32_t i = 0; i < buffers->num_held; i++)
        kv8_release(buffers->allocator, buffers->held[i].ptr, buffers->held[i].count,
                    buffers->held[i].size);
    *buffers = (kv8_buffers){.allocator = buffers->allocator};
}

static kv8_status take_floats(kv8_model *model, int64_t rows, int64_t width, float **out) {
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(&model->buffers, rows * width, sizeof(float), "step activations",
                             &memory));
    *out = memory;
    return KV8_OK;
}

static kv8_status take_ints(kv8_model *model, int64_t count, int32_t **out) {
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(&model->buffers, count, sizeof(int32_t), "step indices", &memory));
    *out = memory;
    return KV8_OK;
}

static kv8_status create_activations(kv8_model *model) {
    const kv8_gpt_oss_config *const c = &model->config;
    kv8_activations *const a = &model->act;
    const int64_t n = model->options.max_step_tokens, slots = n * c->num_experts_per_token;
    const int64_t q_width = (int64_t)c->num_qo_heads * c->head_dim;
    const int64_t kv_width = (int64_t)c->num_kv_heads * c->head_dim;
    KV8_TRY(take_floats(model, n, c->hidden_size, &a->residual));
    KV8_TRY(take_floats(model, n, c->hidden_size, &a->normed));
    KV8_TRY(take_floats(model, n, c->hidden_size, &a->projected));
    KV8_TRY(take_floats(model, n, q_width, &a->q));
    KV8_TRY(take_floats(model, n, q_width, &a->attended));
    KV8_TRY(take_floats(model, n, kv_width, &a->k));
    KV8_TRY(take_floats(model, n, kv_width, &a->v));
    KV8_TRY(take_floats(model, n, c->head_dim, &a->cos_sin));
    KV8_TRY(take_floats(model, n, c->num_experts, &a->router));
    KV8_TRY(take_floats(model, slots, 1, &a->expert_weight));
    KV8_TRY(take_floats(model, slots, 2 * (int64_t)c->intermediate_size, &a->gate_up));
    KV8_TRY(take_floats(model, slots, c->intermediate_size, &a->gated));
    KV8_TRY(take_floats(model, slots, c->hidden_size, &a->down));
    KV8_TRY(take_ints(model, n, &a->positions));
    KV8_TRY(take_ints(model, slots, &a->expert_idx));
    KV8_TRY(take_ints(model, slots, &a->expert_slot));
    KV8_TRY(take_ints(model, slots, &a->slot_token));
    KV8_TRY(take_ints(model, (int64_t)c->num_experts + 1, &a->expert_first));
    KV8_TRY(take_ints(model, model->options.max_step_seqs, &a->old_lengths));
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(&model->buffers, n * q_width, sizeof *a->q_rounded, "step activations",
                             &memory));
    a->q_rounded = memory;
    KV8_TRY(kv8_buffers_take(&model->buffers, kv8_max_i64(c->num_experts, 3), sizeof *a->jobs,
                             "matrix jobs", &memory));
    a->jobs = memory;
    return KV8_OK;
}

/* --- opening --- */

/* Fills in the defaults; the caller has read the config. */
static kv8_status resolve_options(kv8_model *model) {
    kv8_model_options *const o = &model->options;
    const struct {
        const char *what;
        int32_t *value, fallback, limit;
    } bounds[] = {
        {"max_step_tokens", &o->max_step_tokens, DEFAULT_STEP_TOKENS, MAX_STEP_TOKENS},
        {"max_step_seqs", &o->max_step_seqs, DEFAULT_STEP_SEQS, MAX_STEP_TOKENS},
        {"max_seq_len", &o->max_seq_len, model->config.max_seq_len, model->config.max_seq_len}};
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++) {
        if (*bounds[i].value < 0 || *bounds[i].value > bounds[i].limit)
            return kv8_fail(KV8_ERR_INVALID, "%s is %d, must be 0 (%d) to %d", bounds[i].what,
                            *bounds[i].value, bounds[i].fallback, bounds[i].limit);
        if (*bounds[i].value == 0) *bounds[i].value = bounds[i].fallback;
    }
    return kv8_machine_resolve_isa(o->isa, &o->isa);
}

static kv8_status open_model(kv8_model *model, const char *directory) {
    const kv8_allocator *const allocator = model->options.allocator;
    KV8_TRY(kv8_gpt_oss_config_read(&model->config, directory));
    KV8_TRY(resolve_options(model));
    KV8_TRY(kv8_checkpoint_open(&model->checkpoint, directory, allocator));
    kv8_status status =
        kv8_gpt_oss_weights_bind(&model->weights, &model->config, &model->checkpoint, allocator);
    if (status == KV8_ERR_NOT_FOUND) return kv8_fail_within(status, "%s", directory);
    KV8_TRY(status);
    KV8_TRY(kv8_rope_create(&model->rope, &model->config.rope));
    return create_activations(model);
}

kv8_status kv8_model_open(kv8_model **out, const char *directory,
                          const kv8_model_options *options) {
    if (out == NULL || directory == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_model_open: out or directory is NULL");
    *out = NULL;
    KV8_TAKE_STRUCT(kv8_model_options, options);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_model), "model", &memory));
    kv8_model *const model = memory;
    model->options = *options;
    model->buffers.allocator = options->allocator;
    const kv8_status status = open_model(model, directory);
    if (status != KV8_OK) {
        kv8_model_close(model);
        return status;
    }
    *out = model;
    return KV8_OK;
}

void kv8_model_close(kv8_model *model) {
    if (model == NULL) return;
    kv8_attention_set_release(&model->attention);
    kv8_buffers_release(&model->buffers);
    kv8_rope_destroy(model->rope);
    kv8_gpt_oss_weights_release(&model->weights);
    kv8_checkpoint_close(&model->checkpoint);
    kv8_release(model->options.allocator, model, 1, sizeof *model);
}

/* --- facts --- */

const kv8_model_options *kv8_model_get_options(const kv8_model *model) {
    return &model->options;
}

void kv8_model_get_info(const kv8_model *model, kv8_model_info *info_out) {
    const kv8_gpt_oss_config *const c = &model->config;
    kv8_model_info info = {.num_layers = c->num_layers,
                           .hidden_size = c->hidden_size,
                           .intermediate_size = c->intermediate_size,
                           .vocab_size = c->vocab_size,
                           .num_qo_heads = c->num_qo_heads,
                           .num_kv_heads = c->num_kv_heads,
                           .head_dim = c->head_dim,
                           .num_experts = c->num_experts,
                           .num_experts_per_token = c->num_experts_per_token,
                           .window_left = c->sliding_window - 1,
                           .max_seq_len = c->max_seq_len,
                           .num_tensors = (int32_t)model->checkpoint.num_tensors,
                           .num_files = (int32_t)model->checkpoint.num_files,
                           .num_parameters = model->weights.num_parameters,
                           .bytes = model->weights.bytes,
                           .bytes_per_decoded_token = model->weights.bytes_per_decoded_token,
                           .num_eos = c->num_eos,
                           .architecture = "GptOssForCausalLM"};
    for (int32_t i = 0; i < c->num_layers; i++) {
        if (c->layer_kind[i] == KV8_LAYER_SLIDING)
            info.num_sliding_layers++;
        else
            info.num_full_layers++;
    }
    for (int32_t i = 0; i < c->num_eos; i++) info.eos[i] = c->eos[i];
    *info_out = info;
}

kv8_layer_kind kv8_model_layer_kind(const kv8_model *model, int32_t layer) {
    return (kv8_layer_kind)model->config.layer_kind[layer];
}

void kv8_model_visit_tensors(const kv8_model *model,
                             int (*visit)(void *cookie, const kv8_tensor_info *tensor),
                             void *cookie) {
    for (size_t f = 0; f < model->checkpoint.num_files; f++) {
        const kv8_safetensors *const file = &model->checkpoint.files[f];
        for (size_t t = 0; t < file->num_tensors; t++) {
            const kv8_tensor *const tensor = &file->tensors[t];
            kv8_tensor_info info = {.name = tensor->name,
                                    .file = tensor->file,
                                    .dtype = kv8_tensor_type_name(tensor->type),
                                    .num_dims = tensor->num_dims,
                                    .bytes = tensor->bytes};
            for (int32_t d = 0; d < tensor->num_dims; d++) info.shape[d] = tensor->shape[d];
            if (visit(cookie, &info) != 0) return;
        }
    }
}

void kv8_model_cache_layers(const kv8_model *model, kv8_dtype k_dtype, kv8_dtype v_dtype,
                            kv8_cache_layer *layers_out, kv8_cache_options *options_out) {
    const kv8_gpt_oss_config *const c = &model->config;
    for (int32_t i = 0; i < c->num_layers; i++) {
        const bool sliding = c->layer_kind[i] == KV8_LAYER_SLIDING;
        layers_out[i] = (kv8_cache_layer){.struct_size = sizeof(kv8_cache_layer),
                                          .k_dtype = k_dtype,
                                          .v_dtype = v_dtype,
                                          .window_left = sliding ? c->sliding_window - 1 : -1};
    }
    options_out->num_layers = c->num_layers;
    options_out->num_kv_heads = c->num_kv_heads;
    options_out->k_head_dim = c->head_dim;
    options_out->v_head_dim = c->head_dim;
    options_out->layers = layers_out;
}

/* --- observing --- */

void kv8_model_observer_options(const kv8_model *model, kv8_observer_options *options_out) {
    const kv8_gpt_oss_config *const c = &model->config;
    options_out->threads = model->options.threads;
    options_out->isa = model->options.isa;
    options_out->num_layers = c->num_layers;
    options_out->num_kv_heads = c->num_kv_heads;
    options_out->num_qo_heads = c->num_qo_heads;
    options_out->k_head_dim = c->head_dim;
    options_out->v_head_dim = c->head_dim;
}

kv8_status kv8_model_set_observer(kv8_model *model, kv8_observer *observer) {
    kv8_observer_options must = KV8_OBSERVER_OPTIONS_INIT, has = must;
    kv8_model_observer_options(model, &must);
    if (observer != NULL) {
        KV8_TRY(kv8_observer_get_options(observer, &has));
        if (has.num_layers != must.num_layers || has.num_kv_heads != must.num_kv_heads ||
            (has.num_qo_heads != must.num_qo_heads && has.num_qo_heads != 0) ||
            has.k_head_dim != must.k_head_dim || has.v_head_dim != must.v_head_dim)
            return kv8_fail(KV8_ERR_INVALID,
                            "the observer has %d layers of %d KV heads (%d, %d) and %d query "
                            "heads, this model %d of %d (%d, %d) and %d",
                            has.num_layers, has.num_kv_heads, has.k_head_dim, has.v_head_dim,
                            has.num_qo_heads, must.num_layers, must.num_kv_heads, must.k_head_dim,
                            must.v_head_dim, must.num_qo_heads);
    }
    model->observer = observer;
    return KV8_OK;
}
