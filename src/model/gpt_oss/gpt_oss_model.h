/* gpt_oss_model.h - an open model: its files, weights and everything a step works in, allocated
 * once. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPT_OSS_MODEL_H
#define KV8_GPT_OSS_MODEL_H

#include "cache_impl.h"
#include "gpt_oss_weights.h"
#include "model_impl.h"

/* Memory that lives as long as its owner and is given back all at once. */
enum { KV8_MAX_BUFFERS = 32 };
typedef struct kv8_buffers {
    const kv8_allocator *allocator;
    struct {
        void *ptr;
        size_t count, size;
    } held[KV8_MAX_BUFFERS];
    int32_t num_held;
} kv8_buffers;
/* count * size zeroed bytes; *out is untouched on failure. */
kv8_status kv8_buffers_take(kv8_buffers *buffers, int64_t count, size_t size, const char *what,
                            void **out);
void kv8_buffers_release(kv8_buffers *buffers);

/* f32 activations of one step of at most n = max_step_tokens rows; k = experts per token. */
typedef struct kv8_activations {
    float *residual, *normed, *projected; /* [n, hidden] */
    float *q, *attended;                  /* [n, num_qo_heads * head_dim] */
    kv8_bf16 *q_rounded;                  /* the same shape: q as most plans take it */
    float *k, *v;                         /* [n, num_kv_heads * head_dim] */
    float *cos_sin;                       /* [n, head_dim] */
    int32_t *positions;                   /* [n] */
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
    int32_t *old_lengths;                 /* [max_step_seqs] */
} kv8_activations;

/* Attention over caches of one shape: a page table per group of layers that share pages, a plan and
 * its workspace for those of a group that store and see alike. */
typedef struct kv8_layer_attention {
    kv8_attention_plan *plan; /* the owner's, as the workspace */
    void *workspace;
    int32_t owner;          /* the first layer with this plan */
    kv8_cache_layer stored; /* dtypes and window the plan was made for; scales unset */
    kv8_dtype q_dtype;      /* what the plan takes */
    int32_t group;          /* which table */
} kv8_layer_attention;
typedef struct kv8_group_table {
    int32_t *indptr, *indices, *last_page_len;
    int32_t layer; /* the first of the group */
} kv8_group_table;
typedef struct kv8_attention_set {
    kv8_buffers buffers;
    bool ready;
    kv8_cache_shape shape;
    kv8_layer_attention *layers;
    kv8_group_table *tables;
    int32_t num_layers, num_groups;
    int64_t capacity;         /* of indices */
    float *k_scale, *v_scale; /* [max_step_seqs, num_kv_heads] */
} kv8_attention_set;

struct kv8_model {
    kv8_model_options options; /* as resolved */
    kv8_gpt_oss_config config;
    kv8_checkpoint checkpoint;
    kv8_gpt_oss_weights weights;
    kv8_rope *rope;
    kv8_buffers buffers;
    kv8_activations act;
    kv8_attention_set attention;
    kv8_observer *observer; /* borrowed; NULL = none */
};

/* --- gpt_oss_attention.c --- */

/* Makes the set fit the cache: checks that the cache holds this model's layers and rebuilds plans
 * and tables when its shape is another than before. Allocates only then. */
kv8_status kv8_attention_set_fit(kv8_model *model, const kv8_cache *cache);
void kv8_attention_set_release(kv8_attention_set *set);
/* Reads the page tables of the step's sequences, after they were extended, and prepares every plan
 * for them. */
kv8_status kv8_attention_set_load(kv8_model *model, const kv8_cache *cache, const kv8_step *step);
/* act.q, k, v (unrotated) of the step's rows -> the cache, and act.attended. */
kv8_status kv8_attention_set_run(kv8_model *model, kv8_cache *cache, int32_t layer,
                                 const kv8_step *step);

/* --- gpt_oss_experts.c --- */

/* residual += mixture of experts over act.normed, n rows. */
void kv8_experts_run(kv8_model *model, const kv8_gpt_oss_layer *layer, int32_t n);

#endif
