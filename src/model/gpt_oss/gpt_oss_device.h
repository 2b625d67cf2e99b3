/* gpt_oss_device.h - gpt-oss in a GPU's memory: weights as the kernels read them, and the
 * activations of a step. Private to its folder.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPT_OSS_DEVICE_H
#define KV8_GPT_OSS_DEVICE_H

#include "gpt_oss_weights.h"
#include "model_device.h"
#include "token_args.h"

enum {
    KV8_TOKEN_BF16,
    KV8_TOKEN_F16,
    KV8_TOKEN_E4M3,
    KV8_TOKEN_E5M2,
    KV8_TOKEN_INT8,
    KV8_TOKEN_FORMATS
};

typedef struct kv8_gpt_oss_device_layer {
    uint8_t *attention_norm, *mlp_norm;       /* bf16 [hidden] */
    uint8_t *qkv, *o, *router;                /* f16; q, k and v in one */
    uint8_t *qkv_bias, *o_bias, *router_bias; /* bf16 */
    uint8_t *gate_up, *down;                  /* as kv8_device_experts_load writes */
} kv8_gpt_oss_device_layer;

/* Kernels of several tokens, by how many they take: 4 and 8. */
enum { KV8_TOKENS_X4, KV8_TOKENS_X8, KV8_TOKENS_SIZES };

/* The kernels of a whole token and of several, and their workspaces. */
typedef struct kv8_gpt_oss_token {
    const char *why_not;                   /* of the model and the GPU; NULL: there are */
    kv8_kernel kernels[KV8_TOKEN_FORMATS]; /* by the format of K and V */
    kv8_kernel several[KV8_TOKENS_SIZES][KV8_TOKEN_FORMATS];
    kv8_token_args args; /* layers and workspace, in device memory */
    kv8_tokens_args tokens;
    /* The plans that args.layers were written for; NULL: none. */
    const kv8_device_attention *set;
    uint64_t version;
    bool is_clear; /* the workspace has been set to 0 */
} kv8_gpt_oss_token;

typedef struct kv8_gpt_oss_device {
    kv8_device_ops *ops;
    kv8_device_experts *experts;
    kv8_experts_shape shape; /* of a layer's experts */
    float rope_factor;
    kv8_gpt_oss_device_layer *layers;       /* [num_layers] */
    uint8_t *embedding, *head, *final_norm; /* head f16, the others bf16 */
    float *sinks;                           /* [num_layers, num_qo_heads] */
    float *inv_freq;                        /* [head_dim / 2] */

    /* Of n rows: as many as a step or a graph has. */
    float *residual;    /* f32 [n, hidden] */
    uint16_t *normed;   /* f16 [n, hidden] */
    float *qkv;         /* f32 [n, qkv rows] */
    float *kept;        /* f32 [n, hidden], the residual of logit_rows: in qkv's place */
    uint16_t *q;        /* [n, num_qo_heads * head_dim], rotated */
    uint16_t *attended; /* f16 [n, num_qo_heads * head_dim] */
    float *cos_sin;     /* [n, head_dim] */
    kv8_gpt_oss_token token;
} kv8_gpt_oss_device;

extern const kv8_device_architecture kv8_gpt_oss_on_device;
void kv8_gpt_oss_device_close(kv8_model *model);
kv8_status kv8_gpt_oss_device_load(kv8_model *model, kv8_device_loader *loader);
kv8_status kv8_gpt_oss_device_layers(kv8_model *model, const kv8_device_batch *batch);
kv8_status kv8_gpt_oss_device_logits(kv8_model *model, const kv8_device_batch *batch, int32_t first,
                                     int32_t num);

/* --- a token each of few sequences by one kernel: gpt_oss_token.c --- */

kv8_status kv8_gpt_oss_token_create(kv8_model *model);
void kv8_gpt_oss_token_lay_out(const kv8_model *model, kv8_device_memory *memory);
const char *kv8_gpt_oss_why_not_tokens(const kv8_model *model, kv8_device *device,
                                       const kv8_cache *cache);
kv8_status kv8_gpt_oss_tokens_run(kv8_model *model, const kv8_step *step,
                                  const kv8_step_draw *draw);

/* Device memory that experts pass through on their way, a few at a time. */
size_t kv8_gpt_oss_staging_bytes(const kv8_gpt_oss_layer *layer, int32_t num_experts);

#endif
