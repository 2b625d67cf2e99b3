/* step_time.h - what a step's time counts. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_STEP_TIME_H
#define KV8_STEP_TIME_H

#include <kv8/simulate.h>

/* Pairs of one of num_tokens new tokens, after `first` others, and a token that it sees. */
double kv8_prefill_keys(double first, double num_tokens);

#endif
