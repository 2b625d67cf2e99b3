/* model_device.h - a model open on a GPU, and what an architecture adds for it: its memory, its
 * weights, its layers as work on a stream. Private to the room.
 *
 * A step's inputs go over in one copy; its kernels are launched one by one, or, where every request
 * has one token, as a graph recorded for that many rows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_DEVICE_H
#define KV8_MODEL_DEVICE_H

#include <kv8/calibrate_device.h>

#include "device_loader.h"
#include "device_memory.h"
#include "model.h"
#include "model_attention_device.h"
#include "model_profile.h"

struct kv8_device_architecture {
    /* Kernels and what else the host needs, of a model whose tensors are bound. */
    kv8_status (*create)(kv8_model *model);
    /* Weights and activations; called to count, and again to hand out. */
    void (*lay_out)(kv8_model *model, kv8_device_memory *memory);
    kv8_status (*load)(kv8_model *model, kv8_device_loader *loader);
    /* Of a batch: the residual stream after all layers, where batch->logit_indptr is not NULL of
     * logit_rows alone. Neither allocates nor waits, as logits. */
    kv8_status (*layers)(kv8_model *model, const kv8_device_batch *batch);
    /* Why no one kernel computes a whole token each of up to max_tokens sequences of this model on
     * this GPU and a cache of its shape, which may lie on the host: a message's words; NULL: one
     * does. NULL in place of the function: none ever. */
    const char *(*why_not_tokens)(const kv8_model *model, kv8_device *device,
                                  const kv8_cache *cache);
    int32_t max_tokens;
    /* layers and logits of a step of a token a sequence, by that kernel, and of one token the draw
     * of the next; draw NULL: none. */
    kv8_status (*tokens)(kv8_model *model, const kv8_step *step, const kv8_step_draw *draw);
    /* on_device->logits [num, vocab_size] of rows logit_rows[first..first + num) of the batch whose
     * layers ran; and maxima of them, where has_maxima says so. */
    kv8_status (*logits)(kv8_model *model, const kv8_device_batch *batch, int32_t first,
                         int32_t num);
};

/* A graph for each number of rows up to 16, then for every 8 up to 64 and every 32 up to 512. */
enum { KV8_MAX_GRAPHS = 36, KV8_MAX_GRAPH_ROWS = 512 };

typedef struct kv8_device_graphs {
    kv8_graph *recorded[KV8_MAX_GRAPHS]; /* NULL = not yet */
    bool have_maxima[KV8_MAX_GRAPHS];    /* as on_device->has_maxima */
    uint64_t version;                    /* of attention, that they were recorded with */
} kv8_device_graphs;

/* Caches that take turns cost nothing, so many of them. */
enum { KV8_MAX_CACHES = 8 };

struct kv8_model_device {
    kv8_device_memory memory;
    kv8_device_attention attentions[KV8_MAX_CACHES];
    kv8_device_attention *attention; /* of the step's cache; NULL before the first step */
    uint64_t num_uses;
    int32_t *input_host, *input_device; /* of a step: page-locked, and the GPU's */
    float *logits;                      /* [logit_rows, vocab_size] */
    float *maxima;                      /* [logit_rows, vocab_size / KV8_MAXIMUM_IDS], of logits */
    bool has_maxima;                    /* the last step's are there */
    int32_t logit_rows;
    kv8_device_graphs graphs[KV8_MAX_CACHES]; /* as attentions */
    kv8_device_observer *observer;            /* counts for model->observer; NULL = none */
    kv8_model_profile *profile;               /* NULL = none */
    bool observes, observes_q;                /* it was started; it has Q */
};

/* Opens model->on_device: counts, takes memory, loads. Tensors are bound, options resolved. */
kv8_status kv8_model_device_open(kv8_model *model);
/* Counts alone. */
kv8_status kv8_model_device_count(kv8_model *model, kv8_model_memory *out);
void kv8_model_device_close(kv8_model *model);
/* Counts for `observer` from the next step on, in place of model->observer, which gets what was
 * counted for it, even where this fails; NULL: for nobody. */
kv8_status kv8_model_device_observe(kv8_model *model, const kv8_observer *observer);
/* kv8_model_begin_profile and kv8_model_end_profile. */
kv8_status kv8_model_device_begin_profile(kv8_model *model, bool by_kernel);
kv8_status kv8_model_device_end_profile(kv8_model *model, kv8_profile *out);
/* kv8_model_plan_step; of a model on the host too. */
kv8_status kv8_model_device_plan(const kv8_model *model, const kv8_cache *cache, kv8_device *device,
                                 int32_t num_seqs, int32_t num_rows, kv8_step_plan *out);
/* A step whose sequences are extended; waits until its logits are there. draw, draws_out: of
 * kv8_model_step_extended. */
kv8_status kv8_model_device_step(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                 const kv8_step_draw *draw, bool *draws_out);

#endif
