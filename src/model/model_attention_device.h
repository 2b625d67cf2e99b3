/* model_attention_device.h - a step's attention on a GPU: plans kept for the last caches, the
 * tables of the step's sequences, append and attention of a layer. Private to the room.
 *
 * A step of one token a request takes a plan of a decode class, by how many requests it is launched
 * for; any other step takes the plan for chunks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_ATTENTION_DEVICE_H
#define KV8_MODEL_ATTENTION_DEVICE_H

#include <kv8/append.h>
#include <kv8/attention_device.h>

#include "cache_impl.h"
#include "model_impl.h"

/* Requests of a decode class at most: 1, 4, 32, and as many as a step has. */
enum { KV8_DECODE_CLASSES = 4, KV8_CHUNK_CLASS = KV8_DECODE_CLASSES, KV8_NUM_CLASSES };

typedef struct kv8_device_plan {
    kv8_attention_device_plan *plan; /* NULL: a class no larger than the one below */
    void *workspace;
} kv8_device_plan;

/* What layers have in common that store and see alike. */
typedef struct kv8_layer_kind {
    kv8_cache_layer stored; /* dtypes and window; scales unset */
    kv8_dtype q_dtype;      /* as attention takes it */
    int32_t window_left;    /* that the model sees */
    int32_t layer;          /* the first of the kind */
    kv8_append_device_plan *append;
    kv8_device_plan classes[KV8_NUM_CLASSES];
} kv8_layer_kind;

/* Where a layer's rows lie: addresses that a recorded graph holds. */
typedef struct kv8_layer_place {
    kv8_paged k, v;
    kv8_cache_device_layer own;
    int32_t kind;
} kv8_layer_place;

typedef struct kv8_device_attention {
    const kv8_allocator *allocator;
    kv8_cache_shape shape;
    kv8_layer_kind *kinds;   /* [num_kinds] of num_layers */
    kv8_layer_place *layers; /* [num_layers] */
    int32_t num_layers, num_kinds;
    int32_t class_seqs[KV8_NUM_CLASSES]; /* requests of a run at most */
    uint64_t last_use;                   /* the number of the last step with it; 0: empty */
    uint64_t version;                    /* another one: addresses of before mean nothing now */
    const char *why_not_tokens;          /* the architecture's, of this cache */
    bool own_scales;                     /* the step's sequences have scales of their own: */
    const float **scales;                /* [num_layers, 2], K's and V's */
} kv8_device_attention;

/* The rows of a step in the GPU's memory, as many as its kernels are launched for. */
typedef struct kv8_device_batch {
    int32_t num_rows, num_seqs; /* the step's, or more: requests without a row */
    int32_t seq_rows;           /* of the request that has most */
    bool is_decode;             /* a row for each request */
    const int32_t *token_ids, *positions, *indptr, *logit_rows;
    /* [num_seqs + 1] of logit_rows, where those are the last rows of their sequences and not all:
     * the last layer attends for them alone. NULL: for all. */
    const int32_t *logit_indptr;
    int32_t num_logit_rows;
} kv8_device_batch;

/* Of the model's architecture on this GPU and such a cache, as kv8_device_architecture has it. */
const char *kv8_why_not_tokens(const kv8_model *model, kv8_device *device, const kv8_cache *cache);
/* KV8_ERR_UNSUPPORTED where no kernel of the GPU attends to the formats of the cache's layers. */
kv8_status kv8_device_attention_check(const kv8_model *model, kv8_device *device,
                                      const kv8_cache *cache, const kv8_cache_shape *shape);
/* Takes the set of this cache, or makes one, in place of the oldest, for a cache whose shape or
 * place no set has. Allocates only then. */
kv8_status kv8_device_attention_fit(kv8_model *model, const kv8_cache *cache);
void kv8_device_attention_release(kv8_model *model);
/* Page tables and scales of the step's sequences, after they were extended, onto the stream.
 * lists_alone: what else a table has is not read. */
kv8_status kv8_device_attention_load(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                     bool lists_alone);

/* Rows of one layer, [num_rows, heads, head_dim], heads side by side. */
typedef struct kv8_device_layer_rows {
    const void *q; /* rotated, of kv8_device_attention_q_dtype */
    const float *k, *v;
    int64_t kv_stride_row;   /* elements */
    const float *cos_sin;    /* for k */
    const float *sink_logit; /* NULL = none */
    void *attended;          /* f16 */
} kv8_device_layer_rows;
/* KV8_F16, or KV8_BF16 where K or V is that and no kernel multiplies them as f16. */
kv8_dtype kv8_device_attention_q_dtype(const kv8_model *model, int32_t layer);
/* Stores k, rotated on the way, and v. Can be captured, as kv8_device_attention_run. */
kv8_status kv8_device_attention_append(kv8_model *model, int32_t layer,
                                       const kv8_device_batch *batch,
                                       const kv8_device_layer_rows *rows);
/* Attends, for rows that are stored. The first layer of a kind has the step's work cut for all but
 * one whose indptr is logit_indptr. */
kv8_status kv8_device_attention_run(kv8_model *model, int32_t layer, const kv8_device_batch *batch,
                                    const kv8_device_layer_rows *rows);

#endif
