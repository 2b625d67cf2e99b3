/* step_time.h - what a step's time counts. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_STEP_TIME_H
#define KV8_STEP_TIME_H

#include <kv8/simulate.h>

/* Pairs of one of num_tokens new tokens, after `first` others, and a token that it sees. */
double kv8_prefill_keys(double first, double num_tokens);
/* Of a step of num_tokens, what it takes besides keys. */
double kv8_step_time_of(const kv8_step_time *time, int32_t num_tokens);

#endif
