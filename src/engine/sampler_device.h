/* sampler_device.h - the draw of tokens from logits in a GPU's memory: the tokens of sampler.h, and
 * the figures from which logprobs follow, come back. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SAMPLER_DEVICE_H
#define KV8_SAMPLER_DEVICE_H

#include <kv8/device.h>

#include "model_impl.h"
#include "sampler.h"

/* Of a row of logits: what kv8_sampler_draw takes, and what is wanted of it. */
typedef struct kv8_draw {
    const kv8_sampling *sampling; /* checked */
    kv8_history history;
    int32_t mask;         /* the slot of kv8_device_sampler_mask that was filled; -1 = all ids */
    int32_t token;        /* that is given, and nothing drawn; -1 = none */
    int32_t num_logprobs; /* n >= 1: the token's and the n likeliest; 0 = none */
} kv8_draw;

typedef struct kv8_drawn {
    int32_t token;  /* of kv8_sampler_draw, or given; undefined where bad_id >= 0 */
    int32_t bad_id; /* the first id whose logit is not finite, -1 = none */
    float bad;      /* that logit */
    float logprob;
} kv8_drawn;

/* Scratch for one vocabulary and up to max_rows rows a run, of which all together have up to
 * max_changes ids with a bias or a penalty; one stream at a time. */
typedef struct kv8_device_sampler kv8_device_sampler;
/* `stream` is the device's; threads (NULL = the caller) list what has a bias or a penalty. *out is
 * NULL on failure; KV8_ERR_UNSUPPORTED in a build without the kernels. */
kv8_status kv8_device_sampler_create(kv8_device_sampler **out, kv8_device *device,
                                     kv8_stream *stream, kv8_threads *threads, int32_t vocab_size,
                                     int32_t max_rows, int32_t max_changes,
                                     const kv8_allocator *allocator);
/* After the stream's work is done. NULL is fine. */
void kv8_device_sampler_destroy(kv8_device_sampler *sampler);
/* Words of a mask, [(vocab_size + 31) / 32], slots 0 to max_rows - 1: filled before a run, the
 * first ones first. */
uint32_t *kv8_device_sampler_mask(const kv8_device_sampler *sampler, int32_t slot);
/* The most ids with a bias or a penalty that a draw after num_tokens has. */
int64_t kv8_device_sampler_changes(const kv8_device_sampler *sampler, const kv8_sampling *sampling,
                                   int32_t num_tokens);
/* A run holds so many draws, and such ids of them together. */
bool kv8_device_sampler_takes(const kv8_device_sampler *sampler, int32_t num, int64_t num_changes);
/* Whether a step of the model can draw this by itself: from all ids, the logits as they are; then
 * how. */
bool kv8_device_sampler_simplify(const kv8_device_sampler *sampler, const kv8_draw *draw,
                                 kv8_step_draw *out);
/* Waits for such a draw. */
kv8_status kv8_device_sampler_take(const kv8_device_sampler *sampler, kv8_drawn *drawn_out);
/* Puts the draw from device logits [num, vocab_size] on the stream; maxima: of those, as
 * kv8_model_device_maxima has them, or NULL. Allocates nothing. */
kv8_status kv8_device_sampler_begin(kv8_device_sampler *sampler, float *logits, const float *maxima,
                                    const kv8_draw *draws, int32_t num);
/* Waits for it. tops_out [num, tops_stride]: of each draw its n likeliest. */
kv8_status kv8_device_sampler_end(kv8_device_sampler *sampler, const kv8_draw *draws, int32_t num,
                                  kv8_drawn *drawn_out, kv8_logprob *tops_out, int32_t tops_stride);

#endif
