/* request.h - a request inside the engine: its tokens, how they are drawn, and what ends it.
 * Private to the room.
 *
 * Prompt and generated tokens are one list: the scheduler knows how far it is computed, and a step
 * takes some of the rest. Whoever has one token left is decoding.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_REQUEST_H
#define KV8_REQUEST_H

#include <kv8/engine.h>

#include "scheduler.h"

typedef struct kv8_running {
    /* What a step asks of most requests, in one line of the cache: while a GPU computes, the caches
     * forget what hundreds of requests have. */
    uint64_t id;
    kv8_request_id handle; /* the scheduler's name */
    int32_t *token_ids;    /* [capacity]: prompt, then generated; the scheduler writes */
    int32_t num_prompt, num_tokens, capacity;
    bool rests;    /* ended, but held */
    bool is_plain; /* of a step nothing but a token is wanted, from the logits as they are: spec has
                    * no visitor, mask, logprobs and min_tokens, sampling no penalty and bias */
    bool ends_at_eos, ends_at_stops; /* spec's ignore_eos and stop_ids */

    kv8_request_id parent;
    uint64_t arrived_ns;
    kv8_request spec;
    kv8_sampling sampling;
    size_t bytes;
} kv8_running;

/* Copies spec and its arrays behind `parent`'s tokens (NULL = none) into one block. */
kv8_status kv8_running_create(kv8_running **out, const kv8_request *spec, const kv8_running *parent,
                              const kv8_allocator *allocator);
void kv8_running_destroy(kv8_running *running, const kv8_allocator *allocator);
/* A token was generated, and stands in token_ids; what it means. */
kv8_finish kv8_running_take(kv8_running *running, int32_t token, const kv8_model_info *info);

#endif
