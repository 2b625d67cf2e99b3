/* gpt_oss_weights.c - binding tensor names to weights, with every dtype and shape checked.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss_weights.h"

#include <inttypes.h>
#include <string.h>

enum { NAME_SIZE = 128, SHAPE_TEXT = 160, BF16_BYTES = 2 };

/* The two name families. A layer's names follow "<layers>N."; fused qkv has one name for three. */
typedef struct name_family {
    const char *embedding, *head, *final_norm, *layers;
    const char *attention_norm, *mlp_norm, *sinks;
    const char *q, *k, *v, *qkv, *o, *router; /* + ".weight", ".bias" */
    const char *gate_up_blocks, *gate_up_scales, *gate_up_bias;
    const char *down_blocks, *down_scales, *down_bias;
} name_family;

static const name_family hugging_face = {
    .embedding = "model.embed_tokens.weight",
    .head = "lm_head.weight",
    .final_norm = "model.norm.weight",
    .layers = "model.layers.",
    .attention_norm = "input_layernorm.weight",
    .mlp_norm = "post_attention_layernorm.weight",
    .sinks = "self_attn.sinks",
    .q = "self_attn.q_proj",
    .k = "self_attn.k_proj",
    .v = "self_attn.v_proj",
    .o = "self_attn.o_proj",
    .router = "mlp.router",
    .gate_up_blocks = "mlp.experts.gate_up_proj_blocks",
    .gate_up_scales = "mlp.experts.gate_up_proj_scales",
    .gate_up_bias = "mlp.experts.gate_up_proj_bias",
    .down_blocks = "mlp.experts.down_proj_blocks",
    .down_scales = "mlp.experts.down_proj_scales",
    .down_bias = "mlp.experts.down_proj_bias",
};

static const name_family original = {
    .embedding = "embedding.weight",
    .head = "unembedding.weight",
    .final_norm = "norm.scale",
    .layers = "block.",
    .attention_norm = "attn.norm.scale",
    .mlp_norm = "mlp.norm.scale",
    .sinks = "attn.sinks",
    .qkv = "attn.qkv",
    .o = "attn.out",
    .router = "mlp.gate",
    .gate_up_blocks = "mlp.mlp1_weight.blocks",
    .gate_up_scales = "mlp.mlp1_weight.scales",
    .gate_up_bias = "mlp.mlp1_bias",
    .down_blocks = "mlp.mlp2_weight.blocks",
    .down_scales = "mlp.mlp2_weight.scales",
    .down_bias = "mlp.mlp2_bias",
};

/* What binding carries along. */
typedef struct binder {
    const kv8_checkpoint *checkpoint;
    const name_family *names;
    uint8_t *used;              /* one flag per tensor of the checkpoint */
    kv8_random_weights *listed; /* instead of a checkpoint: takes down what is asked for */
} binder;

/* --- one tensor --- */

typedef struct shape {
    int32_t num_dims;
    int64_t dims[4];
} shape;

static void print_shape(char *text, size_t size, const int64_t *dims, int32_t num_dims) {
    size_t at = 0;
    for (int32_t i = 0; i < num_dims && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, i == 0 ? "%" PRId64 : ", %" PRId64, dims[i]);
    if (num_dims == 0) text[0] = '\0';
}

/* A tensor of which nothing is known yet but that it is asked for. */
static kv8_status list_tensor(const binder *b, const char *name, uint32_t types, const shape *want,
                              const kv8_tensor **out) {
    static const uint8_t zeros[4096 * sizeof(float)]; /* as many sinks as a layer can have */
    static const kv8_tensor unknown = {.type = KV8_TENSOR_BF16, .data = zeros};
    const kv8_random_kind kind = (types & 1u << KV8_TENSOR_U8) != 0
                                     ? want->num_dims == 4 ? KV8_RANDOM_BLOCKS : KV8_RANDOM_SCALES
                                 : (types & 1u << KV8_TENSOR_F32) != 0 ? KV8_RANDOM_ONES
                                                                       : KV8_RANDOM_BF16;
    kv8_random_weights_add(b->listed, name, kind, want->dims, want->num_dims);
    *out = &unknown;
    return KV8_OK;
}

/* Finds `name` and checks it; types is a mask of 1 << kv8_tensor_type. */
static kv8_status take(const binder *b, const char *name, uint32_t types, const shape *want,
                       const kv8_tensor **out) {
    if (b->listed != NULL) return list_tensor(b, name, types, want, out);
    const int64_t idx = kv8_checkpoint_find(b->checkpoint, name);
    if (idx < 0)
        return kv8_fail(KV8_ERR_NOT_FOUND, "tensor \"%s\" is missing (%zu tensors in %zu files)",
                        name, b->checkpoint->num_tensors, b->checkpoint->num_files);
    const kv8_tensor *const tensor = b->checkpoint->by_name[idx];
    if ((types >> tensor->type & 1) == 0)
        return kv8_fail(KV8_ERR_INVALID, "%s: tensor \"%s\" has dtype %s, must be %s%s",
                        tensor->file, name, kv8_tensor_type_name(tensor->type),
                        types & 1u << KV8_TENSOR_U8 ? "U8" : "BF16",
                        types & 1u << KV8_TENSOR_F32 ? " or F32" : "");
    bool same = tensor->num_dims == want->num_dims;
    for (int32_t i = 0; same && i < want->num_dims; i++) same = tensor->shape[i] == want->dims[i];
    if (!same) {
        char has[SHAPE_TEXT], must[SHAPE_TEXT];
        print_shape(has, sizeof has, tensor->shape, tensor->num_dims);
        print_shape(must, sizeof must, want->dims, want->num_dims);
        return kv8_fail(KV8_ERR_INVALID,
                        "%s: tensor \"%s\" has shape [%s], by config.json it must be [%s]",
                        tensor->file, name, has, must);
    }
    b->used[idx] = 1;
    *out = tensor;
    return KV8_OK;
}

enum {
    TYPE_BF16 = 1u << KV8_TENSOR_BF16,
    TYPE_BF16_OR_F32 = 1u << KV8_TENSOR_BF16 | 1u << KV8_TENSOR_F32,
    TYPE_BYTES = 1u << KV8_TENSOR_U8
};

static kv8_status take_gain(const binder *b, const char *name, int64_t width, kv8_gain *out) {
    const kv8_tensor *tensor = NULL;
    KV8_TRY(take(b, name, TYPE_BF16_OR_F32, &(shape){1, {width}}, &tensor));
    *out = (kv8_gain){tensor->data, tensor->type == KV8_TENSOR_F32 ? KV8_F32 : KV8_BF16};
    return KV8_OK;
}

static kv8_status take_matrix(const binder *b, const char *name, int64_t rows, int64_t cols,
                              kv8_weight *out) {
    const kv8_tensor *tensor = NULL;
    KV8_TRY(take(b, name, TYPE_BF16, &(shape){2, {rows, cols}}, &tensor));
    *out = (kv8_weight){.kind = KV8_WEIGHT_BF16, .data = tensor->data, .rows = rows, .cols = cols};
    return KV8_OK;
}

/* --- one layer --- */

/* "model.layers.7." + name + tail. */
static const char *layer_name(const binder *b, int32_t layer, const char *name, const char *tail,
                              char *text) {
    snprintf(text, NAME_SIZE, "%s%d.%s%s", b->names->layers, layer, name, tail);
    return text;
}

static kv8_status take_linear(const binder *b, int32_t layer, const char *name, int64_t rows,
                              int64_t cols, kv8_linear *out) {
    char text[NAME_SIZE];
    const kv8_tensor *bias = NULL;
    KV8_TRY(take_matrix(b, layer_name(b, layer, name, ".weight", text), rows, cols, &out->weight));
    KV8_TRY(
        take(b, layer_name(b, layer, name, ".bias", text), TYPE_BF16, &(shape){1, {rows}}, &bias));
    out->bias = bias->data;
    return KV8_OK;
}

/* Rows [first, first + rows) of a fused linear. */
static kv8_linear linear_rows(const kv8_linear *fused, int64_t first, int64_t rows) {
    kv8_linear part = *fused;
    part.weight.data =
        (const uint8_t *)fused->weight.data + first * fused->weight.cols * BF16_BYTES;
    part.weight.rows = rows;
    part.bias = fused->bias + first * BF16_BYTES;
    return part;
}

static kv8_status bind_qkv(const binder *b, const kv8_gpt_oss_config *c, int32_t idx,
                           kv8_gpt_oss_layer *layer) {
    const name_family *const n = b->names;
    const int64_t q_rows = (int64_t)c->num_qo_heads * c->head_dim;
    const int64_t kv_rows = (int64_t)c->num_kv_heads * c->head_dim;
    if (n->qkv == NULL) {
        KV8_TRY(take_linear(b, idx, n->q, q_rows, c->hidden_size, &layer->q));
        KV8_TRY(take_linear(b, idx, n->k, kv_rows, c->hidden_size, &layer->k));
        return take_linear(b, idx, n->v, kv_rows, c->hidden_size, &layer->v);
    }
    kv8_linear fused;
    KV8_TRY(take_linear(b, idx, n->qkv, q_rows + 2 * kv_rows, c->hidden_size, &fused));
    layer->q = linear_rows(&fused, 0, q_rows);
    layer->k = linear_rows(&fused, q_rows, kv_rows);
    layer->v = linear_rows(&fused, q_rows + kv_rows, kv_rows);
    return KV8_OK;
}

static kv8_status bind_sinks(const binder *b, const kv8_gpt_oss_config *c, int32_t idx,
                             float *sinks) {
    char text[NAME_SIZE];
    const kv8_tensor *tensor = NULL;
    KV8_TRY(take(b, layer_name(b, idx, b->names->sinks, "", text), TYPE_BF16_OR_F32,
                 &(shape){1, {c->num_qo_heads}}, &tensor));
    for (int32_t h = 0; h < c->num_qo_heads; h++) {
        if (tensor->type == KV8_TENSOR_F32) {
            memcpy(&sinks[h], tensor->data + (size_t)h * sizeof(float), sizeof(float));
        } else {
            kv8_bf16 code;
            memcpy(&code, tensor->data + (size_t)h * sizeof code, sizeof code);
            sinks[h] = kv8_bf16_to_f32(code);
        }
        if (sinks[h] != sinks[h])
            return kv8_fail(KV8_ERR_INVALID, "%s: tensor \"%s\": the sink of head %d is NaN",
                            tensor->file, text, h);
    }
    return KV8_OK;
}

static kv8_status bind_experts(const binder *b, int32_t idx, const char *blocks, const char *scales,
                               const char *bias, int64_t num_experts, int64_t rows, int64_t cols,
                               kv8_gpt_oss_experts *out) {
    char text[NAME_SIZE];
    const int64_t groups = cols / KV8_MXFP4_BLOCK;
    const kv8_tensor *tensor = NULL;
    *out = (kv8_gpt_oss_experts){.rows = rows, .cols = cols};
    KV8_TRY(take(b, layer_name(b, idx, blocks, "", text), TYPE_BYTES,
                 &(shape){4, {num_experts, rows, groups, KV8_MXFP4_BLOCK_BYTES}}, &tensor));
    out->blocks = tensor->data;
    KV8_TRY(take(b, layer_name(b, idx, scales, "", text), TYPE_BYTES,
                 &(shape){3, {num_experts, rows, groups}}, &tensor));
    out->scales = tensor->data;
    KV8_TRY(take(b, layer_name(b, idx, bias, "", text), TYPE_BF16, &(shape){2, {num_experts, rows}},
                 &tensor));
    out->bias = tensor->data;
    return KV8_OK;
}

static kv8_status bind_layer(const binder *b, const kv8_gpt_oss_config *c, int32_t idx,
                             kv8_gpt_oss_layer *layer, float *sinks) {
    const name_family *const n = b->names;
    const int64_t hidden = c->hidden_size, inner = c->intermediate_size;
    char text[NAME_SIZE];
    KV8_TRY(take_gain(b, layer_name(b, idx, n->attention_norm, "", text), hidden,
                      &layer->attention_norm));
    KV8_TRY(bind_qkv(b, c, idx, layer));
    KV8_TRY(bind_sinks(b, c, idx, sinks));
    layer->sink_logit = sinks;
    KV8_TRY(take_linear(b, idx, n->o, hidden, (int64_t)c->num_qo_heads * c->head_dim, &layer->o));
    KV8_TRY(take_gain(b, layer_name(b, idx, n->mlp_norm, "", text), hidden, &layer->mlp_norm));
    KV8_TRY(take_linear(b, idx, n->router, c->num_experts, hidden, &layer->router));
    KV8_TRY(bind_experts(b, idx, n->gate_up_blocks, n->gate_up_scales, n->gate_up_bias,
                         c->num_experts, 2 * inner, hidden, &layer->gate_up));
    return bind_experts(b, idx, n->down_blocks, n->down_scales, n->down_bias, c->num_experts,
                        hidden, inner, &layer->down);
}

/* --- all of them --- */

/* Scales of the KV cache lie beside the weights and are opened as a scale file, when asked for. */
static kv8_status check_all_used(const binder *b) {
    for (size_t i = 0; i < b->checkpoint->num_tensors; i++) {
        const kv8_tensor *const tensor = b->checkpoint->by_name[i];
        if (!b->used[i] && !kv8_is_kv_scale(tensor->name))
            return kv8_fail(KV8_ERR_INVALID,
                            "%s: unexpected tensor \"%.200s\": no part of this model", tensor->file,
                            tensor->name);
    }
    return KV8_OK;
}

/* Sizes by group, gpt_oss.md's formula for one decoded token at batch 1: all dense layers, the
 * chosen experts, one row of the embedding, the head. */
static void count_bytes(kv8_gpt_oss_weights *w, const kv8_gpt_oss_config *c,
                        const kv8_checkpoint *checkpoint) {
    uint64_t experts = 0, packed_scales = 0, packed_blocks = 0;
    const uint64_t embedding = (uint64_t)w->embedding.rows * (uint64_t)w->embedding.cols * 2;
    for (size_t i = 0; i < checkpoint->num_tensors; i++) w->bytes += checkpoint->by_name[i]->bytes;
    for (size_t i = 0; i < checkpoint->num_tensors; i++) {
        const kv8_tensor *const tensor = checkpoint->by_name[i];
        if (tensor->type == KV8_TENSOR_U8) {
            const bool is_blocks = tensor->num_dims == 4;
            packed_blocks += is_blocks ? tensor->bytes : 0;
            packed_scales += is_blocks ? 0 : tensor->bytes;
        } else {
            w->num_parameters += tensor->bytes / (tensor->type == KV8_TENSOR_F32 ? 4 : 2);
        }
    }
    w->num_parameters += packed_blocks * 2;
    const uint64_t expert_rows = 2 * (uint64_t)c->intermediate_size + (uint64_t)c->hidden_size;
    experts = packed_blocks + packed_scales +
              (uint64_t)c->num_layers * (uint64_t)c->num_experts * expert_rows * BF16_BYTES;
    w->bytes_per_decoded_token =
        w->bytes - experts - embedding + (uint64_t)c->hidden_size * BF16_BYTES +
        experts / (uint64_t)c->num_experts * (uint64_t)c->num_experts_per_token;
}

static kv8_status bind_all(kv8_gpt_oss_weights *w, const binder *b, const kv8_gpt_oss_config *c) {
    const name_family *const n = b->names;
    KV8_TRY(take_matrix(b, n->embedding, c->vocab_size, c->hidden_size, &w->embedding));
    for (int32_t i = 0; i < c->num_layers; i++)
        KV8_TRY(bind_layer(b, c, i, &w->layers[i], w->sinks + (size_t)i * (size_t)c->num_qo_heads));
    KV8_TRY(take_gain(b, n->final_norm, c->hidden_size, &w->final_norm));
    return take_matrix(b, n->head, c->vocab_size, c->hidden_size, &w->head);
}

static kv8_status take_tables(kv8_gpt_oss_weights *out, const kv8_gpt_oss_config *config,
                              const kv8_allocator *allocator) {
    *out = (kv8_gpt_oss_weights){.allocator = allocator, .num_layers = config->num_layers};
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, (size_t)config->num_layers, sizeof *out->layers, "layer table",
                      &memory));
    out->layers = memory;
    const size_t num_sinks = (size_t)config->num_layers * (size_t)config->num_qo_heads;
    KV8_TRY(kv8_alloc(allocator, num_sinks, sizeof *out->sinks, "sinks", &memory));
    out->sinks = memory;
    out->num_sinks = num_sinks;
    return KV8_OK;
}

kv8_status kv8_gpt_oss_weights_list(const kv8_gpt_oss_config *config,
                                    const kv8_allocator *allocator, kv8_random_weights *listed) {
    enum { LAYER_TENSORS = 19, OTHER_TENSORS = 3 };
    kv8_gpt_oss_weights passing;
    const binder b = {.names = &hugging_face, .listed = listed};
    KV8_TRY(kv8_random_weights_open(
        listed, (size_t)config->num_layers * LAYER_TENSORS + OTHER_TENSORS, allocator));
    kv8_status status = take_tables(&passing, config, allocator);
    if (status == KV8_OK) status = bind_all(&passing, &b, config);
    kv8_gpt_oss_weights_release(&passing);
    return status;
}

kv8_status kv8_gpt_oss_weights_bind(kv8_gpt_oss_weights *out, const kv8_gpt_oss_config *config,
                                    const kv8_checkpoint *checkpoint,
                                    const kv8_allocator *allocator) {
    void *used = NULL;
    kv8_status status;
    KV8_TRY_GOTO(take_tables(out, config, allocator));
    KV8_TRY_GOTO(kv8_alloc(NULL, checkpoint->num_tensors, 1, "tensor flags", &used));
    const bool is_original = kv8_checkpoint_find(checkpoint, original.embedding) >= 0;
    const binder b = {checkpoint, is_original ? &original : &hugging_face, used, NULL};
    KV8_TRY_GOTO(bind_all(out, &b, config));
    KV8_TRY_GOTO(check_all_used(&b));
    count_bytes(out, config, checkpoint);
    kv8_release(NULL, used, checkpoint->num_tensors, 1);
    return KV8_OK;
fail:
    kv8_release(NULL, used, checkpoint->num_tensors, 1);
    kv8_gpt_oss_weights_release(out);
    return status;
}

void kv8_gpt_oss_weights_release(kv8_gpt_oss_weights *weights) {
    kv8_release(weights->allocator, weights->layers, (size_t)weights->num_layers,
                sizeof *weights->layers);
    kv8_release(weights->allocator, weights->sinks, weights->num_sinks, sizeof *weights->sinks);
    *weights = (kv8_gpt_oss_weights){0};
}

kv8_weight kv8_gpt_oss_experts_weight(const kv8_gpt_oss_experts *experts, int64_t expert) {
    const int64_t groups = experts->rows * (experts->cols / KV8_MXFP4_BLOCK);
    return (kv8_weight){.kind = KV8_WEIGHT_MXFP4,
                        .data = experts->blocks + expert * groups * KV8_MXFP4_BLOCK_BYTES,
                        .scales = experts->scales + expert * groups,
                        .rows = experts->rows,
                        .cols = experts->cols};
}

const void *kv8_gpt_oss_experts_bias(const kv8_gpt_oss_experts *experts, int64_t expert) {
    return experts->bias + expert * experts->rows * BF16_BYTES;
}
