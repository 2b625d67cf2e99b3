/* prefill_schedule_args.h - what the kernel that makes prefill's work list is told.
 *
 * Read by C and CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_SCHEDULE_ARGS_H
#define KV8_PREFILL_SCHEDULE_ARGS_H

#include "common/attention_args.h"

/* Where a launch of decode goes with prefill's, requests of up to decode_rows query rows are its
 * own. */
typedef struct kv8_prefill_schedule_args {
    kv8_kernel_args args; /* of the prefill kernel */
    int32_t *decode_lens; /* out: [batch] rows of each request that are decode's; may be 0 */
    int32_t decode_rows;
    int32_t shares_joins; /* splits of the prefill kernel that run at one time share their join */
} kv8_prefill_schedule_args;

#endif
