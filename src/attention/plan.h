/* plan.h - what a plan holds: the resolved spec, one kernel, the sizes of a run's workspace.
 *
 * Private to attention: made by plan.c, read by schedule.c, run.c, finish.c and describe.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_PLAN_H
#define KV8_ATTENTION_PLAN_H

#include <stdatomic.h>

#include "tile.h"

/* One row of attention_kernels.inc. */
typedef struct kv8_attention_choice {
    const char *name;
    kv8_isa isa;
    kv8_attention_math math;
    kv8_attention_kernel kernel;
} kv8_attention_choice;

/* Rows whose keys were split: their partial results, num_splits of them in key order, stand one
 * after another from `first.partial` on. Whoever computes the last of them joins them. */
typedef struct kv8_attention_join {
    kv8_attention_item first;
    int32_t num_splits;
    _Atomic int32_t num_left;
} kv8_attention_join;

/* Offsets in floats into one thread's scratch; a kv8_attention_job points there. */
typedef struct kv8_attention_scratch {
    int64_t q, q_lanes, lane_scale, lane_max, lane_sum, k, v, s, p, o, keep, max, sum, scale;
    int64_t seen_from, seen_to, value, size;
} kv8_attention_scratch;

struct kv8_attention_plan {
    kv8_attention_spec spec; /* resolved: isa, v_head_dim, o_dtype, sm_scale; sink_logit is ours */
    kv8_attention_choice choice;
    kv8_threads *threads;
    const kv8_allocator *allocator;
    kv8_allocator allocator_copy;
    float *sink_logit;
    int32_t num_threads;
    int32_t group_size;
    int32_t block_rows;          /* most packed rows of an item over all its heads: whole groups */
    int32_t depth, q_row, v_row; /* as in kv8_attention_job */
    kv8_attention_scratch scratch;
    /* Room in the workspace, and byte offsets. */
    int64_t max_items, max_joins, max_partial_floats;
    size_t items_at, joins_at, partials_at, scratch_at, workspace_size;
};

/* How the work of one run is cut. */
typedef struct kv8_attention_schedule {
    int64_t num_items, num_joins, partial_floats;
    int32_t max_splits;
} kv8_attention_schedule;
/* Fills items and joins (both NULL: only counts). Never more than the plan has room for. */
kv8_attention_schedule kv8_attention_cut(const kv8_attention_plan *plan,
                                         const kv8_attention_args *args, kv8_attention_item *items,
                                         kv8_attention_join *joins);
/* Room that any run within the bounds needs: items, joins and partial floats. */
void kv8_attention_cut_bounds(kv8_attention_plan *plan);

/* Joins num_partials results of the item's rows (o, max, sum as a kernel leaves them, `stride`
 * floats apart), divides, lets the sink in and writes o and lse. */
void kv8_attention_finish(const kv8_attention_plan *plan, const kv8_attention_args *args,
                          const kv8_attention_item *item, int32_t num_partials, int64_t stride,
                          const float *o, const float *max, const float *sum);

#endif
