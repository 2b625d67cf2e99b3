/* sampler.h - the draw of a token, as kv8/engine.h defines it for kv8_sampling: scratch for one
 * vocabulary, and pure functions of logits, settings and history. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SAMPLER_H
#define KV8_SAMPLER_H

#include <kv8/engine.h>
#include <stdbool.h>

/* The tokens before the one to draw; its position is num_tokens. */
typedef struct kv8_history {
    const int32_t *token_ids; /* the prompt, then what was generated */
    int32_t num_prompt, num_tokens;
} kv8_history;

/* Scratch for one vocabulary; one thread at a time per sampler. */
typedef struct kv8_sampler kv8_sampler;
kv8_status kv8_sampler_create(kv8_sampler **out, int32_t vocab_size,
                              const kv8_allocator *allocator);
void kv8_sampler_destroy(kv8_sampler *sampler);
/* KV8_ERR_INVALID names the field that is out of range. */
kv8_status kv8_sampling_check(const kv8_sampling *sampling, int32_t vocab_size);
/* The settings as numbers of the draw: 1 / temperature, 0 = greedy; 2^64 * top_p, 0 = no cut; the
 * weight below which min_p drops an id; the random bits of a position; whether the history counts.
 */
float kv8_sampling_factor(const kv8_sampling *sampling);
uint64_t kv8_sampling_top_p(const kv8_sampling *sampling);
uint64_t kv8_sampling_least(const kv8_sampling *sampling);
uint64_t kv8_sampling_random(const kv8_sampling *sampling, int32_t position);
bool kv8_sampling_penalises(const kv8_sampling *sampling);

/* Draws from finite logits [vocab_size] by a checked `sampling`, among the ids i of which bit i %
 * 32 of mask[i / 32] is set (NULL = all); one that is not set comes out only when none can.
 * Allocates nothing; equal arguments give an equal token. */
int32_t kv8_sampler_draw(kv8_sampler *sampler, const kv8_sampling *sampling,
                         const kv8_history *history, const uint32_t *mask, const float *logits);

/* ln of the sum of exp(logits), of which `high` is the largest and `sum` that of all weights at
 * temperature 1. */
float kv8_sampler_lse(float high, uint64_t sum);

/* The n <= vocab_size likeliest ids, falling, lower id first on ties. The result is the logprob of
 * `token`. */
float kv8_sampler_logprobs(kv8_sampler *sampler, const float *logits, int32_t token, int32_t n,
                           kv8_logprob *top_out);

#endif
