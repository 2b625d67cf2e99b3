/* model.h - an open model, and what an architecture is: its facts, its weights, its layers. What
 * architectures have in common is written once, here and in the files beside it: options, files,
 * checks, pages, attention. Private to the room.
 *
 * An architecture knows the names of tensors and the order of layers; nothing here does.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_PRIVATE_H
#define KV8_MODEL_PRIVATE_H

#include <kv8/attention.h>

#include "cache_impl.h"
#include "checkpoint_impl.h"
#include "linear.h"
#include "model_impl.h"
#include "random_weights.h"

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
/* [rows, width] of a step's activations, and [count] of its indices. */
kv8_status kv8_buffers_take_floats(kv8_buffers *buffers, int64_t rows, int64_t width, float **out);
kv8_status kv8_buffers_take_ints(kv8_buffers *buffers, int64_t count, int32_t **out);
void kv8_buffers_release(kv8_buffers *buffers);

/* Attention over caches of one shape: a plan for all layers that store and see alike, and a page
 * table for each group of layers. */
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
typedef struct kv8_model_attention {
    kv8_buffers buffers;
    bool ready;
    kv8_cache_shape shape;
    kv8_layer_attention *layers;
    kv8_group_table *tables;
    int32_t num_layers, num_groups;
    int64_t capacity;         /* of indices */
    float *k_scale, *v_scale; /* [max_step_seqs, num_kv_heads] */
    kv8_bf16 *q_rounded;      /* [max_step_tokens, num_qo_heads * head_dim]: as most plans take q */
} kv8_model_attention;

typedef struct kv8_model_device kv8_model_device;
typedef struct kv8_device_architecture kv8_device_architecture;

/* A row of architectures.inc. */
typedef struct kv8_architecture {
    const char *model_type; /* as config.json spells it */
    /* Whether a config.json is this architecture's. */
    bool (*owns)(const kv8_json_fields *config);
    /* Reads the directory's configuration: fills model->info but for what is counted from the
     * tensors, and model->window_left. */
    kv8_status (*read)(kv8_model *model, const char *directory);
    /* The same from the text of a config.json, which `label` names in messages. */
    kv8_status (*parse)(kv8_model *model, const char *label, const char *text, size_t size);
    /* Every tensor that open asks for, as random ones; to be closed after a failure too. */
    kv8_status (*list)(kv8_model *model, kv8_random_weights *listed);
    /* Binds model->checkpoint's tensors and takes the memory that steps work in; options are
     * resolved. */
    kv8_status (*open)(kv8_model *model);
    /* The step's layers and logits: positions are known, tables loaded, sequences extended. */
    kv8_status (*compute)(kv8_model *model, kv8_cache *cache, const kv8_step *step);
    /* Releases model->own, which may be NULL, or half made. */
    void (*close)(kv8_model *model);
    const kv8_device_architecture *device; /* model_device.h */
} kv8_architecture;

struct kv8_model {
    const kv8_architecture *architecture;
    kv8_model_options options; /* as resolved */
    kv8_model_info info;
    int32_t window_left[KV8_MODEL_MAX_LAYERS]; /* -1 = the layer sees everything */
    kv8_checkpoint checkpoint;
    kv8_random_weights random; /* what the checkpoint is made of, where it is no file */
    kv8_buffers buffers;
    kv8_model_attention attention;
    kv8_model_device *on_device; /* NULL = the host computes */
    kv8_observer *observer;      /* borrowed; NULL = none */
    /* [num_input_layers, kv8_model_most_rows, hidden_size] where the model computes */
    float *layer_inputs;
    int32_t *positions;   /* [max_step_tokens] of the step's rows */
    int32_t *old_lengths; /* [max_step_seqs] before the step */
    void *own;            /* the architecture's */
};

/* config.json of a published model, NULL for a name that is none's: published.c. */
const char *kv8_published_config(const char *name);

/* --- layer_inputs.c --- */

/* Rows of a step, or of a graph, at most. */
int32_t kv8_model_most_rows(const kv8_model *model);
/* The options name layers that there are. */
kv8_status kv8_model_check_layer_inputs(const kv8_model *model);
/* Copies the options' list, and takes a host's memory for the rows; a GPU's is laid out with its
 * other memory. */
kv8_status kv8_model_take_layer_inputs(kv8_model *model);
/* Where a step keeps what enters the layer, or the final norm; NULL: it does not. */
float *kv8_model_input_place(const kv8_model *model, int32_t layer);

/* --- model_attention.c --- */

/* The cache holds this model's layers, where the model computes. */
kv8_status kv8_model_check_cache(const kv8_model *model, const kv8_cache *cache,
                                 kv8_cache_shape *shape_out);
/* Dtypes and window of a layer, no scales; a window that is too short is refused. */
kv8_status kv8_model_read_layer(const kv8_model *model, const kv8_cache *cache, int32_t layer,
                                kv8_cache_layer *stored_out);
/* Plans made for `stored` compute on `layer`. */
bool kv8_same_layer(const kv8_cache_layer *stored, const kv8_cache_layer *layer);

/* Makes the set fit the cache: checks that the cache holds this model's layers and rebuilds plans
 * and tables when its shape is another than before. Allocates only then. */
kv8_status kv8_model_attention_fit(kv8_model *model, const kv8_cache *cache);
void kv8_model_attention_release(kv8_model *model);
/* Reads the page tables of the step's sequences, after they were extended, and prepares every plan
 * for them. */
kv8_status kv8_model_attention_load(kv8_model *model, const kv8_cache *cache, const kv8_step *step);

/* One layer's rows of the step, f32, heads side by side. */
typedef struct kv8_layer_rows {
    float *q, *k; /* unrotated; the call may rotate them in place */
    const float *v;
    const kv8_rope *rope;
    const float *cos_sin;    /* kv8_rope_angles of model->positions */
    const float *sink_logit; /* [num_qo_heads]; NULL = none */
    float *attended;         /* [rows, num_qo_heads * head_dim] */
} kv8_layer_rows;
/* Stores k and v, and attends. */
kv8_status kv8_model_attention_run(kv8_model *model, kv8_cache *cache, int32_t layer,
                                   const kv8_step *step, const kv8_layer_rows *rows);

#endif
