/* rowwise_args.h - the arguments of the kernels in rowwise.cu, for C and CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ROWWISE_ARGS_H
#define KV8_ROWWISE_ARGS_H

#include <stdint.h>

enum { KV8_ROWWISE_THREADS = 256 };

typedef struct kv8_embed_args {
    const void *table;  /* bf16 [.., hidden], aligned to 16 */
    const int32_t *ids; /* [n] */
    float *residual;    /* [n, hidden] */
    int32_t hidden;     /* a multiple of 8 */
    int32_t padding;
} kv8_embed_args;

typedef struct kv8_gather_args {
    const void *x;          /* rows, aligned to 16 */
    const int32_t *row_ids; /* [n] */
    void *out;              /* [n] rows */
    int64_t row_words;      /* 16 bytes each */
} kv8_gather_args;

typedef struct kv8_rmsnorm_args {
    const float *x;         /* [.., hidden] */
    const void *gain;       /* bf16 [hidden] */
    const int32_t *row_ids; /* [n]: row i of the results is row row_ids[i] of x; NULL = i */
    void *out;              /* f16 [n, hidden] */
    int32_t hidden;         /* a multiple of 8 */
    float eps;
} kv8_rmsnorm_args;

typedef struct kv8_rope_angles_args {
    const int32_t *positions; /* [n] */
    const float *inv_freq;    /* [head_dim / 2] */
    float *cos_sin;           /* [n, head_dim] */
    float factor;
    int32_t n, half_dim;
    int32_t padding;
} kv8_rope_angles_args;

typedef struct kv8_rope_args {
    const float *cos_sin; /* [n, head_dim] */
    const void *x; /* bf16 or f32 [n, num_heads, head_dim], rows x_stride_row elements apart */
    void *y;       /* bf16 or f16 */
    int64_t x_stride_row, y_stride_row;
    int32_t num_heads, half_dim;
    int32_t y_is_f16, padding;
} kv8_rope_args;

/* What no f16 holds: the least index of all launches, by tensor first. */
enum { KV8_TO_F16_ELEMENT_BITS = 40 };
typedef struct kv8_to_f16_args {
    void *codes;         /* [n] bf16 that become f16, aligned to 16 */
    int64_t n;           /* a multiple of 8 */
    int64_t tensor;      /* its number */
    uint64_t *first_bad; /* tensor << KV8_TO_F16_ELEMENT_BITS | element */
} kv8_to_f16_args;

#endif
