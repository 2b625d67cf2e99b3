/* linear_args.h - the argument of the dense kernels, for C and CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LINEAR_ARGS_H
#define KV8_LINEAR_ARGS_H

#include <stdint.h>

/* y[i, r] = or += sum_c w[r, c] * x[i, c] + bias[r]. */
typedef struct kv8_linear_args {
    const void *w;              /* f16 [rows, cols], aligned to 16 */
    const void *bias;           /* bf16 [rows], NULL = none */
    const void *x;              /* f16 [n, cols], aligned to 16 */
    void *y;                    /* bf16 or f32 [n, rows] */
    int32_t rows, cols, n;      /* cols a multiple of 8 */
    int32_t is_f32, accumulate; /* of y; only f32 accumulates */
    /* The first rotated_rows of y are heads to rotate, and go into rotated [n, rotated_rows]
     * instead, rounded. Not in linear_tiles.cu. */
    int32_t half_dim; /* a multiple of 8; 32 but in linear_stream.cu */
    int32_t rotated_rows;
    int32_t rotated_is_f16; /* 0: bf16 */
    void *rotated;
    const float *cos_sin; /* [n, 2 * half_dim] */
    /* f32 [n, rows / KV8_LINEAR_HEAD], rows a multiple of it: the largest of so many rows of y, NaN
     * where one is NaN; of the kernels of linear_pairs.cu that leave them. */
    float *maxima;
} kv8_linear_args;

/* The same through the copy engine: maps of kv8_tensor_map_make, of w and x. */
typedef struct kv8_linear_mapped_args {
    uint64_t w_map[16], x_map[16];
    kv8_linear_args product;
    int32_t split_stages; /* of 64 columns, that each block of a cluster takes */
    int32_t padding[15];
} __attribute__((aligned(64))) kv8_linear_mapped_args;

/* The same by pairs of blocks (linear_pairs.cu). */
typedef struct kv8_linear_pairs_args {
    uint64_t w_map[16], x_map[16], y_map[16], rotated_map[16];
    kv8_linear_args product;
    int32_t num_tiles; /* of the kernel's rows by two blocks' tokens, */
    int32_t num_whole; /* the first of them each by one pair, the others' tokens by a pair each */
    int32_t padding[14];
} __attribute__((aligned(64))) kv8_linear_pairs_args;

enum {
    KV8_LINEAR_STREAM_THREADS = 256,
    KV8_LINEAR_STREAM_ROWS = 16, /* of w, a block */
    KV8_LINEAR_STREAM_MAX_N = 16,
    KV8_LINEAR_TILE_THREADS = 256,
    KV8_LINEAR_WGMMA_ROWS = 64,    /* of w, a warpgroup */
    KV8_LINEAR_PAIRS_TOKENS = 128, /* a block's tile */
    KV8_LINEAR_PAIRS_STAGES = 4,
    KV8_LINEAR_PAIRS_BOX = 64,      /* tokens copied at once, in or out */
    KV8_LINEAR_PAIRS_THREADS = 384, /* two warpgroups, and one that copies */
    KV8_LINEAR_MAX_SPLITS = 8,      /* of the columns: a cluster's blocks */
    KV8_LINEAR_HEAD = 64,           /* that linear_wgmma.cu and linear_pairs.cu rotate */
    KV8_LINEAR_GROUP = 8            /* tiles of rows that take turns over the tokens */
};

/* Shared memory of a shape of linear_kernels.inc: the ring, or the warps' sums in its place. */
#define KV8_LINEAR_RING_BYTES(rows, tokens, depth, stages) \
    ((stages) * ((rows) + (tokens)) * (depth)*2)
#define KV8_LINEAR_SUM_BYTES(rows, tokens, along_rows, along_tokens) \
    (KV8_LINEAR_TILE_THREADS / 32 / ((along_rows) * (along_tokens)) * (tokens) * ((rows) + 4) * 4)
#define KV8_LINEAR_TILE_BYTES(rows, tokens, depth, stages, along_rows, along_tokens) \
    (KV8_LINEAR_RING_BYTES(rows, tokens, depth, stages) >                            \
             KV8_LINEAR_SUM_BYTES(rows, tokens, along_rows, along_tokens)            \
         ? KV8_LINEAR_RING_BYTES(rows, tokens, depth, stages)                        \
         : KV8_LINEAR_SUM_BYTES(rows, tokens, along_rows, along_tokens))

/* Tokens that linear_wgmma.cu copies at once, of n by tiles of `tokens`: few past the last, which
 * cost more than those that are there. */
#define KV8_LINEAR_WGMMA_BOX(n, tokens) ((n) <= (tokens) ? ((n) + 7) / 8 * 8 : 32)

/* The same of linear_wgmma.cu, and 1024 bytes to align the ring; its threads. */
#define KV8_LINEAR_WGMMA_BYTES(groups, tokens, stages) \
    (1024 + (stages) * ((groups)*KV8_LINEAR_WGMMA_ROWS + (tokens)) * 128)
#define KV8_LINEAR_WGMMA_THREADS(groups) ((groups)*128 + 32)

/* Of a shape of linear_pairs.cu: alignment, the ring, two boxes of results a warpgroup. */
#define KV8_LINEAR_PAIRS_BYTES(rows)                                             \
    (1024 + KV8_LINEAR_PAIRS_STAGES * ((rows) + KV8_LINEAR_PAIRS_TOKENS) * 128 + \
     4 * KV8_LINEAR_PAIRS_BOX * 128)

#endif
