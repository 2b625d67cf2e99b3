/* engine_state.h - the objects inside a kv8_engine, for the files of this room: engine.c has its
 * life and its requests, step.c what a step does, service.c the thread. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ENGINE_STATE_H
#define KV8_ENGINE_STATE_H

#include "cache_impl.h"
#include "model_impl.h"
#include "request.h"
#include "sampler_device.h"
#include "scheduler.h"

enum { KV8_MAX_LOGPROBS = 32, KV8_ENGINE_MESSAGE = 160 };

/* A request's part in one step; its event has the same index. */
typedef struct kv8_share {
    kv8_running *running;
    const kv8_scheduled_row *row;
    int32_t first_logits; /* of row->num_logits rows of logits */
} kv8_share;

struct kv8_engine {
    const kv8_allocator *allocator;
    kv8_model *model;
    kv8_cache *cache;
    kv8_threads *threads;
    kv8_scheduler *scheduler;
    kv8_model_info info;
    int32_t step_tokens, max_running, max_seq_len;
    uint64_t last_id;

    kv8_running **requests; /* [num_requests] of max_alive, by id */
    int32_t num_requests, max_requests, max_alive;

    /* The step, as kv8_step has it. */
    kv8_seq *seqs;       /* [max_running] */
    int32_t *indptr;     /* [max_running + 1] */
    int32_t *token_ids;  /* [step_tokens] */
    int32_t *logit_rows; /* [num_rows] of max_rows */
    int32_t num_rows, max_rows;
    float *logits, *own_logits; /* [max_rows, vocab_size]; own: NULL when the caller's */

    /* What became of it. */
    kv8_share *shares; /* [num_shares] of max_running */
    int32_t num_shares;
    char (*messages)[KV8_ENGINE_MESSAGE]; /* [max_running] of shares that failed */
    int32_t *share_of;                    /* [max_rows] */
    int32_t *bad_ids;  /* [max_rows] first id whose logit is not finite; -1 = none */
    float *bad_logits; /* [max_rows] of that id */
    float *logprobs;   /* [max_rows] */
    kv8_logprob *tops; /* [max_rows, KV8_MAX_LOGPROBS], those of a share side by side */
    int32_t *chosen;   /* [max_running] as kv8_scheduler_commit takes it */
    /* [max_running + max_alive]: shares, then requests that expired; those of the step before are
     * good until the step under way is finished. */
    kv8_event *events, *events_before;

    /* From kv8_engine_begin to kv8_engine_finish. */
    bool is_under_way;
    bool is_computing; /* the GPU is, since */
    uint64_t compute_ns;
    kv8_schedule schedule;

    kv8_sampler **samplers; /* [num_samplers]: one for each thread */
    uint32_t *masks;        /* [num_samplers, mask_words] */
    int32_t num_samplers, mask_words;

    /* In their place where a GPU computes and nobody wants to see logits. */
    kv8_device_sampler *device_sampler; /* NULL: the host computes */
    bool draws_on_device;               /* this step's */
    bool step_draws;                    /* the model's own kernel does */
    kv8_draw *draws;                    /* [max_rows] a row each */
    kv8_drawn *drawn;                   /* [max_rows] */

    double kv_bytes, window_kv_bytes; /* of a token, in layers without a window and with one */
    kv8_engine_stats stats;           /* what only counts */
};

/* Checks a request and copies it; reads of the engine what never changes, so any thread may call
 * it. `parent` is NULL, or at rest. */
kv8_status kv8_engine_prepare(const kv8_engine *engine, const kv8_request *request,
                              const kv8_running *parent, kv8_running **out);
/* A prepared request joins the others, of which there are fewer than max_alive. Its id is above all
 * before. */
void kv8_engine_admit(kv8_engine *engine, kv8_running *running);
/* What kv8_engine_get_stats gives, without the cache's counters, which may lie on a device. */
void kv8_engine_count(const kv8_engine *engine, kv8_engine_stats *stats_out);
/* Forgets a request that the scheduler has forgotten. */
void kv8_engine_forget(kv8_engine *engine, kv8_running *running);

/* kv8_engine_step in two calls, between which no request comes or goes, and the events of the step
 * before are still there. Of a step whose draws are the GPU's the first has it computed without
 * waiting; masks are asked for in the second. On failure no step is under way. */
kv8_status kv8_engine_begin(kv8_engine *engine);
kv8_status kv8_engine_finish(kv8_engine *engine, int32_t *num_events_out);

#endif
