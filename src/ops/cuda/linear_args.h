/* linear_args.h - the argument of the dense kernels, for C and CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LINEAR_ARGS_H
#define KV8_LINEAR_ARGS_H

#include <stdint.h>

/* y[i, r] = or += sum_c w[r, c] * x[i, c] + bias[r]. */
typedef struct kv8_linear_args {
    const void *w;              /* bf16 [rows, cols], aligned to 16 */
    const void *bias;           /* bf16 [rows], NULL = none */
    const void *x;              /* bf16 [n, cols], aligned to 16 */
    void *y;                    /* bf16 or f32 [n, rows] */
    int32_t rows, cols, n;      /* cols a multiple of 8 */
    int32_t is_f32, accumulate; /* of y; only f32 accumulates */
    int32_t padding;
} kv8_linear_args;

enum {
    KV8_LINEAR_STREAM_THREADS = 256,
    KV8_LINEAR_STREAM_ROWS = 16, /* of w, a block */
    KV8_LINEAR_STREAM_MAX_N = 16,
    KV8_LINEAR_TILE_THREADS = 256,
    KV8_LINEAR_GROUP = 8 /* tiles of rows that take turns over the tokens */
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

#endif
