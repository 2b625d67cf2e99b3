/* prefill_schedule_args.h - what the kernels that make prefill's work list are told.
 *
 * Read by C and CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_SCHEDULE_ARGS_H
#define KV8_PREFILL_SCHEDULE_ARGS_H

#include "common/attention_args.h"

/* Of a block: of the list's kernel, and of that which looks at masks. */
enum { KV8_PREFILL_SCHEDULE_THREADS = 1024, KV8_PREFILL_MASK_THREADS = 256 };

/* Rows of one request that share items, between the steps of the scheduling kernel. */
typedef struct kv8_prefill_block {
    int32_t request, row_begin;
    int32_t tile_begin, tile_end;
} kv8_prefill_block;

/* Where a launch of decode goes with prefill's, requests of up to decode_rows query rows are its
 * own. */
typedef struct kv8_prefill_schedule_args {
    kv8_kernel_args args; /* of the prefill kernel */
    int32_t *decode_lens; /* out: [batch] rows of each request that are decode's; may be 0 */
    int32_t *unmasked_to; /* of runs with a mask: of each query row the first key that it hides, or
                           * INT32_MAX */
    int32_t decode_rows;
    int32_t shares_joins; /* splits of the prefill kernel that run at one time share their join */
} kv8_prefill_schedule_args;

#endif
