/* scheduler.h - which tokens of which requests enter the next step of the model.
 *
 * Decisions alone: no clock, no model, no thread, no text. The caller says what time it is, runs
 * the step that was planned, and hands back the tokens that came of it; so a simulated clock and a
 * stub of a model drive it as well as a GPU does. Pages are those of a kv8_pages, taken here.
 *
 *   submit -> waiting --plan--> running --end--> gone
 *                ^                 |    `-rest-> resting: its pages stay, children begin there
 *                `---- preempted --'   its pages given back, its tokens kept
 *
 * Requests stand in one fixed order, by `arrival + priority * patience`: one level of priority is
 * worth `patience` of waiting, so that none waits for ever, and within a priority the first to come
 * is the first to go. Under a budget of tokens a step, decode rows enter first, then chunks of
 * prompts under way, then waiting requests whose whole text finds room; paced (pace.h), these two
 * take no more than lets the decode rows have their tokens in good time. When pages run out, the
 * last of the order gives its own back; the first of the order therefore always gets on, unless
 * what rests holds too much.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SCHEDULER_H
#define KV8_SCHEDULER_H

#include "pages_impl.h"

typedef struct kv8_scheduler_options {
    const kv8_allocator *allocator; /* NULL = the system's heap */
    kv8_pages *pages;               /* borrowed; nobody else creates or extends sequences in it */
    int32_t max_running;            /* requests of one step, >= 1 */
    int32_t max_waiting;            /* requests that wait, preempted ones not counted */
    int32_t max_step_tokens;        /* budget of a step, >= max_running */
    int32_t max_step_logits;        /* rows of logits of a step, >= max_running */
    bool share_prefixes;            /* finds pages of other requests by their tokens */
    int64_t patience_ns;            /* of waiting that one level of priority is worth, >= 0 */
    bool paced;                     /* tokens of prompts beside decode by the time of steps */
} kv8_scheduler_options;

/* Names a request; stale ones are recognised. Never 0. */
typedef int64_t kv8_request_id;

/* A request as it is submitted. */
typedef struct kv8_arrival {
    /* [prompt_len + max_new_tokens], borrowed until the request is gone: the prompt, behind which
     * commit writes what was chosen. */
    int32_t *tokens;
    int32_t prompt_len; /* >= 1, a parent's tokens included */
    int32_t max_new_tokens;
    int32_t max_chunk;    /* most tokens in one step; 0 = what the step holds */
    int32_t priority;     /* lower goes first; 0 = usual */
    uint64_t deadline_ns; /* a request that has not begun by then expires; 0 = none */
    bool all_logits;      /* of every token that no parent had; none is taken from other requests */
    uint64_t salt;        /* pages are shared among requests of one salt alone */
    /* A request at rest, with whose tokens this one begins: its pages are shared. Once it has gone,
     * they are read anew. 0 = none. */
    kv8_request_id parent;
    void *owner; /* handed back in rows and lists */
} kv8_arrival;

/* One request's part of a step: its tokens [first, first + num_tokens), for which the cache's
 * sequence already has room. */
typedef struct kv8_scheduled_row {
    kv8_request_id request;
    void *owner;
    kv8_seq seq;
    const int32_t *token_ids; /* [num_tokens], valid until the next call */
    int32_t first, num_tokens;
    int32_t num_cached; /* tokens of the prompt that other requests had computed */
    int32_t num_logits; /* of its last tokens the logits are wanted, none of them twice */
    bool samples;       /* the logits of the last token choose the next one */
} kv8_scheduled_row;

typedef struct kv8_schedule {
    int32_t num_rows, num_tokens;
    const kv8_scheduled_row *rows; /* in the order of requests; decode rows first */
    int32_t num_expired;
    void *const *expired; /* owners of requests whose deadline came; they are gone */
} kv8_schedule;

typedef struct kv8_scheduler_stats {
    int32_t num_running, num_waiting, num_resting; /* preempted ones wait */
    uint64_t num_preemptions;
    uint64_t prefix_queries, prefix_hits; /* prompt tokens asked for, found */
} kv8_scheduler_stats;

typedef struct kv8_scheduler kv8_scheduler;

/* *out is NULL on failure. */
kv8_status kv8_scheduler_create(kv8_scheduler **out, const kv8_scheduler_options *options);
void kv8_scheduler_destroy(kv8_scheduler *scheduler);

/* KV8_ERR_INVALID when the request could not run even alone, naming what it needs and what there
 * is. Reads what never changes: any thread may call it. */
kv8_status kv8_scheduler_check(const kv8_scheduler *scheduler, const kv8_arrival *arrival);
/* Takes a request that passes the check; KV8_ERR_FULL when max_waiting requests wait. */
kv8_status kv8_scheduler_submit(kv8_scheduler *scheduler, const kv8_arrival *arrival,
                                uint64_t now_ns, kv8_request_id *request_out);
/* Ends a request, waiting, running or resting, and gives its pages back. KV8_ERR_NOT_FOUND when it
 * is gone. Not between plan and commit. */
kv8_status kv8_scheduler_end(kv8_scheduler *scheduler, kv8_request_id request);

/* A running request has ended and keeps its pages until end. Not between plan and commit. */
void kv8_scheduler_rest(kv8_scheduler *scheduler, kv8_request_id request);

/* Takes pages for the next step and lists its rows, none when nothing is left to do. On failure, of
 * which KV8_ERR_FULL is that requests at rest hold what the others need, there are no rows, and
 * those that expired are gone and listed all the same. */
kv8_status kv8_scheduler_plan(kv8_scheduler *scheduler, uint64_t now_ns,
                              kv8_schedule *schedule_out);
/* The planned step took this long: paced, the next ones are sized by it. Before commit. */
void kv8_scheduler_took(kv8_scheduler *scheduler, double ns);
/* The planned step was computed: tokens[i] is what row i chose, for rows that sample, or
 * KV8_ROW_FAILED for any: it chose nothing, and nobody finds its pages. A request that is admitted
 * later finds the full pages of the rest. A request that failed, or has nothing left to compute or
 * to choose, is to be ended, or rest, before the next plan. */
enum { KV8_ROW_FAILED = INT32_MIN };
void kv8_scheduler_commit(kv8_scheduler *scheduler, const int32_t *tokens);
/* Lets other requests find the full pages that commit leaves for later: for a caller that has time,
 * between any two calls. A plan that admits and a request that ends or rests do not need it. */
void kv8_scheduler_publish(kv8_scheduler *scheduler);
/* The planned step was not computed: its tokens leave the sequences again. */
void kv8_scheduler_abandon(kv8_scheduler *scheduler);

/* Tokens of a request, prompt and chosen ones; NULL when it is gone. Valid until the next call. */
const int32_t *kv8_scheduler_tokens(const kv8_scheduler *scheduler, kv8_request_id request,
                                    int32_t *num_out);
void kv8_scheduler_get_stats(const kv8_scheduler *scheduler, kv8_scheduler_stats *stats_out);

#endif
