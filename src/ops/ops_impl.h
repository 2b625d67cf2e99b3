/* ops_impl.h - what ops shows the rooms above: a weight times an activation, norms, gates, top-k.
 * Knows weights and f32 activations; never the cache, a layer number or a tensor name.
 *
 * Every result accumulates in f32. Nothing here allocates; matrix products split their work over
 * the threads given.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_OPS_IMPL_H
#define KV8_OPS_IMPL_H

#include "base_impl.h"

#include <kv8/formats.h>

/* A matrix [rows, cols], row-major, as stored in a checkpoint: borrowed, any alignment. */
typedef enum kv8_weight_kind {
    KV8_WEIGHT_BF16 = 0,
    KV8_WEIGHT_F32,
    KV8_WEIGHT_MXFP4
} kv8_weight_kind;
typedef struct kv8_weight {
    kv8_weight_kind kind;
    const void *data;   /* BF16, F32: rows*cols elements; MXFP4: rows*cols/32 blocks of 16 bytes */
    const void *scales; /* MXFP4: rows*cols/32 e8m0 bytes; else NULL */
    int64_t rows, cols; /* MXFP4: cols a multiple of 32 */
} kv8_weight;

/* y[i, r] = sum_c w[r, c] * x[x_rows[i], c] + bias[r], i < num_rows. */
typedef struct kv8_matmul_job {
    kv8_weight w;
    const void *bias; /* [w.rows] bf16, any alignment; NULL = none */
    const float *x;   /* [.., w.cols] */
    int64_t x_stride;
    const int32_t *x_rows; /* NULL = row i */
    float *y;              /* [num_rows, w.rows] */
    int64_t y_stride;
    int64_t num_rows;
} kv8_matmul_job;

/* All jobs at once; they may share inputs but not outputs. isa is resolved. A row's bits depend
 * neither on the number of threads nor on the other jobs. */
void kv8_matmul_run(kv8_isa isa, kv8_threads *threads, const kv8_matmul_job *jobs, size_t num_jobs);

/* y[n, dim] = x * rsqrt(mean(x^2) + eps) * gain, gain bf16 or f32 (gain_dtype), any alignment. */
void kv8_rmsnorm(kv8_isa isa, const float *x, size_t n, size_t dim, const void *gain,
                 kv8_dtype gain_dtype, float eps, float *y);

/* gpt-oss' gate: u [n, 2*dim] holds gate and up interleaved (even, odd); g = min(gate, limit),
 * l = clamp(up, -limit, limit); y[n, dim] = g * sigmoid(alpha*g) * (l + 1). */
void kv8_swiglu_clamped(kv8_isa isa, const float *u, size_t n, size_t dim, float alpha, float limit,
                        float *y);

/* Indices of the k largest of n values, descending, the lowest index first on ties (NaN counts as
 * -inf), and the softmax over those k values. */
void kv8_topk_softmax(const float *values, size_t n, size_t k, int32_t *idx_out, float *weight_out);

/* y += a * x, n elements. */
void kv8_axpy(kv8_isa isa, float a, const float *x, size_t n, float *y);

/* The room's work on a GPU. */
#include "device_experts.h"
#include "device_ops.h"

#endif
