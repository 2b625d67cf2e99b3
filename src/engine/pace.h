/* pace.h - how many tokens of prompts a step takes beside requests that decode.
 *
 * A step that only decodes takes a time that depends on how many requests it has. Every request
 * that reads its prompt, or waits, may make it PACE_SHARE longer: beside one long prompt nobody of
 * a crowd that decodes waits twice as long as usual for a token, and a queue is worked off as fast
 * as without a pace. Fewer than PACE_CROWD wait longer in proportion: together they lose no more,
 * and the prompt gains. Both times are learnt from the steps themselves: what is known about a
 * number of requests is measured again, by a step without prompts, after PACE_AGE steps with some.
 *
 * It knows times alone, of a clock or of a simulation; equal times give equal steps.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PACE_H
#define KV8_PACE_H

#include <stdint.h>

enum { KV8_PACE_CLASSES = 120 };

/* All 0 at the beginning. */
typedef struct kv8_pace {
    double decode_ns[KV8_PACE_CLASSES]; /* of a step, by its number of requests; 0 = not known */
    int32_t age[KV8_PACE_CLASSES];      /* steps with prompts since it was measured */
    double token_ns;                    /* of a prompt's token beside decode; 0 = not known */
} kv8_pace;

/* Tokens of prompts, at most `most`, for a step in which num_decoding requests decode and
 * num_reading others have more than a token to compute, or wait. */
int32_t kv8_pace_tokens(const kv8_pace *pace, int32_t num_decoding, int32_t num_reading,
                        int32_t most);
/* A step took this long. */
void kv8_pace_learn(kv8_pace *pace, int32_t num_decoding, int32_t prompt_tokens, double ns);

#endif
