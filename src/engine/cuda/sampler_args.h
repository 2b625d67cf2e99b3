/* sampler_args.h - the argument of the sampler's kernels, for C and CUDA. Every pointer is the
 * device's; rows, drawn and tops the host's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SAMPLER_ARGS_H
#define KV8_SAMPLER_ARGS_H

#include <stdint.h>

enum {
    KV8_DRAW_THREADS = 512,
    KV8_DRAW_BLOCKS = 8, /* of a cluster, which has one row */
    KV8_DRAW_WARPS = KV8_DRAW_THREADS / 32,
    KV8_DRAW_TOPS = 32, /* likeliest ids of a row, at most */
    KV8_DRAW_PIECE = 64,
    KV8_DRAW_STATIC_BYTES = 12 * 1024, /* at most, of the kernel's own */
    KV8_SEEN_IN_PROMPT = INT32_MIN     /* a count of 0 that the prompt has */
};

/* An id whose logit bias or penalties change. Ids of a row differ. */
typedef struct kv8_draw_change {
    int32_t id;
    int32_t count; /* times generated; KV8_SEEN_IN_PROMPT, or 0: neither */
    float bias;
    float before; /* for the kernel: the logit as it was */
} kv8_draw_change;

/* A row of logits, and how its token is drawn: kv8_sampling in the kernel's terms. */
typedef struct kv8_draw_row {
    uint64_t random; /* u */
    uint64_t top_p;  /* 2^64 * top_p; 0 = no cut */
    uint64_t least;  /* weight that stays */
    float factor;    /* of differences of logits; 0 = greedy */
    float repetition, frequency, presence;
    int32_t top_k; /* 0 = no cut */
    int32_t first_change, num_changes;
    int32_t mask;     /* idx among masks; -1 = every id may come */
    int32_t num_tops; /* >= 0: sum and tops are wanted; -1 = not */
    int32_t token;    /* that is given, and not drawn; -1 = none */
} kv8_draw_row;

typedef struct kv8_drawn_top {
    int32_t id;
    float logit;
} kv8_drawn_top;

/* What became of it. */
typedef struct kv8_drawn_row {
    uint64_t sum; /* of the weights of the model's own logits */
    int32_t token;
    float logit;    /* the token's, as high the model's own */
    float high;     /* the largest */
    int32_t bad_id; /* the first whose logit is not finite, -1 = none */
    float bad;      /* that logit */
    int32_t padding;
} kv8_drawn_row;

typedef struct kv8_draw_args {
    float *logits; /* [rows, vocab_size]; as before when the kernel ends */
    /* Of them the largest of every KV8_DRAW_PIECE ids, of which vocab_size is a multiple, as
     * kv8_model_device_maxima has them; NULL: not known, or a row is cut. Clusters do not read it.
     */
    const float *maxima;
    const kv8_draw_row *rows;
    kv8_draw_change *changes;
    const uint32_t *masks; /* [.., (vocab_size + 31) / 32] */
    kv8_drawn_row *drawn;
    kv8_drawn_top (*tops)[KV8_DRAW_TOPS]; /* of each row, where they are wanted */
    int32_t vocab_size;
    int32_t warp_ids; /* of each warp, a multiple of 32 */
} kv8_draw_args;

#endif
