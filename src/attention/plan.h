/* plan.h - what a plan holds: the resolved spec, one kernel, the sizes of a run's workspace.
 *
 * Private to attention: made by plan.c, read by prepare.c, cascade.c, schedule.c, run.c, finish.c
 * and describe.c.
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
    bool codes;    /* only int8 K and V, head dims of whole 64 */
    int32_t spare; /* floats that it uses behind kv8_attention_job.p */
    kv8_attention_kernel kernel;
} kv8_attention_choice;

/* Rows whose keys were split: their partial results, num_splits of them in key order, stand one
 * after another from `first.partial` on. Whoever computes the last of them joins them. */
typedef struct kv8_attention_join {
    kv8_attention_item first;
    int32_t num_splits;
    _Atomic int32_t num_left;
} kv8_attention_join;

/* --- the cascade: keys that several requests share are computed once for all their rows --- */

/* What a request has in common with others. */
typedef struct kv8_attention_member {
    int32_t whole_pages; /* leading pages that all its rows see in full; 0 = it cannot share */
    int32_t num_keys;    /* shared; 0 = none */
    int32_t first_row;   /* then the first of its rows in the cascade */
} kv8_attention_member;

/* Requests in an order in which those of a prefix are neighbours; a prefix is noted where it
 * begins. */
typedef struct kv8_attention_sorted {
    int32_t request;
    int32_t end, pages; /* entries [this, end) share `pages` pages; 0 = it stands alone */
} kv8_attention_sorted;

typedef struct kv8_attention_prefix {
    int32_t first_row, num_rows; /* query rows of the cascade */
    int32_t num_keys;
} kv8_attention_prefix;

/* A query row of a prefix: whose it is and where its partial results lie. */
typedef struct kv8_attention_shared_row {
    int32_t request, q_row; /* row of the batch's q and o */
    int32_t part[2];        /* of the shared keys, of its request's own; -1 = there are none */
    int32_t row[2];         /* its first packed row in them */
} kv8_attention_shared_row;

/* The partial results of one cut block: from `first` on, by groups of at most `heads` heads, then
 * by splits. */
typedef struct kv8_attention_part {
    int64_t first; /* in floats */
    int32_t num_rows, num_splits, heads;
} kv8_attention_part;

typedef struct kv8_attention_cascade {
    kv8_attention_member *members; /* [batch] */
    kv8_attention_sorted *sorted;  /* [batch] */
    kv8_attention_prefix *prefixes;
    kv8_attention_shared_row *rows;
    kv8_attention_part *parts; /* filled when the work is cut */
    int32_t num_prefixes, num_rows;
} kv8_attention_cascade;

/* Offsets in floats into one thread's scratch; a kv8_attention_job points there. */
typedef struct kv8_attention_scratch {
    int64_t q, q_lanes, lane_scale, lane_max, lane_sum, k, v, s, p, o, keep, max, sum, scale;
    int64_t seen_from, seen_to, value, kept, pieces, size;
} kv8_attention_scratch;

struct kv8_attention_plan {
    kv8_attention_spec spec; /* resolved: isa, v_head_dim, o_dtype, window_right */
    kv8_attention_choice choice;
    kv8_threads *threads;
    const kv8_allocator *allocator;
    kv8_allocator allocator_copy;
    int32_t num_threads;
    int32_t group_size;
    int32_t block_rows;          /* most packed rows of an item over all its heads: whole groups */
    int32_t depth, q_row, v_row; /* as in kv8_attention_job */
    int32_t piece_keys;          /* the same; 0 = not batch_invariant */
    int32_t member_rows;         /* most packed rows of a request that shares; 0 = none ever does */
    kv8_attention_scratch scratch;
    /* Room in the workspace, and byte offsets. */
    int64_t max_items, max_joins, max_partial_floats;
    int64_t max_shared_rows, max_prefixes, max_parts; /* query rows; all 0 without a cascade */
    size_t items_at, joins_at, cascade_at, partials_at, scratch_at, workspace_size; /* head: 0 */
    size_t cascade_size;
};

/* Widening a key costs about as much as this many rows use it. */
enum { KV8_ROW_OVERHEAD = 16 };

/* Sizes what a cascade needs (plan.c); all 0 where the spec allows none. */
void kv8_attention_cascade_bounds(kv8_attention_plan *plan);
/* The cascade's arrays in `memory`: cascade_size bytes, aligned to 64; borrowed by the result. */
kv8_attention_cascade kv8_attention_cascade_at(const kv8_attention_plan *plan, void *memory);
/* Finds the requests whose tables begin with the same pages and whose shared keys it pays to read
 * once; `memory` as above. */
kv8_attention_cascade kv8_attention_cascade_find(const kv8_attention_plan *plan,
                                                 const kv8_attention_args *args, void *memory);

/* How the work of one run is cut. */
typedef struct kv8_attention_schedule {
    int64_t num_items, num_joins, partial_floats;
    int32_t max_splits, num_parts;
} kv8_attention_schedule;
/* Fills items and joins (both NULL: only counts) and the cascade's parts. Never more than the plan
 * has room for. */
kv8_attention_schedule kv8_attention_cut(const kv8_attention_plan *plan,
                                         const kv8_attention_args *args,
                                         const kv8_attention_cascade *cascade,
                                         kv8_attention_item *items, kv8_attention_join *joins);
/* Room that any run within the bounds needs: items, joins and partial floats. */
void kv8_attention_cut_bounds(kv8_attention_plan *plan);

/* The arrays by which a batch was cut: prepare's and run's must be the same. */
typedef struct kv8_attention_index {
    const void *arrays[10];
    int64_t block_table_stride;
    int64_t batch;
} kv8_attention_index;

/* The head of a prepared workspace. */
typedef struct kv8_attention_prepared {
    uint64_t mark; /* KV8_PREPARED */
    kv8_attention_spec spec;
    kv8_attention_index index;
    kv8_last_page last_page;
    int32_t num_threads;
    int32_t num_prefixes, num_shared_rows; /* of the cascade */
    kv8_attention_schedule cut;
} kv8_attention_prepared;
#define KV8_PREPARED UINT64_C(0x64657261706572d7)

/* What prepare left for these args in a workspace of this plan; refuses any other. */
kv8_status kv8_attention_find_prepared(const kv8_attention_plan *plan,
                                       const kv8_attention_args *args, const void *workspace,
                                       const kv8_attention_prepared **out);
/* The cascade that prepare found. */
kv8_attention_cascade kv8_attention_cascade_of(const kv8_attention_plan *plan,
                                               const kv8_attention_prepared *prepared);

/* Partial results of one row, in key order and `stride` floats apart: o, max and sum as a kernel
 * leaves them. */
typedef struct kv8_attention_partials {
    const float *o, *max, *sum;
    int64_t stride;
    int32_t num;
} kv8_attention_partials;
/* Joins the row's partial results (of `num` ranges of keys), divides, lets the sink in and writes o
 * and lse. q_row: of the batch; head: query head. */
void kv8_attention_finish_row(const kv8_attention_plan *plan, const kv8_attention_args *args,
                              int32_t request, int32_t q_row, int32_t head,
                              const kv8_attention_partials *partials, int32_t num);

#endif
