/* device_ops.h - what ops shows the rooms above for the GPU: the dense products of a step and what
 * happens to each token's row between them. Weights and activations f16, biases and gains bf16, the
 * residual stream f32; every sum is f32, in an order that depends on the shapes alone, so that a
 * result does not change from run to run. The experts are device_experts.h.
 *
 * Pointers are device memory but for those that the host reads, aligned to 16 bytes; rows follow
 * one another without a gap where no stride is given. Nothing here allocates after create, waits or
 * reads back: every call launches, and may be captured. n is the number of rows that the launch
 * covers, at most KV8_DEVICE_MAX_ROWS; rows of a padded launch are computed from whatever lies
 * there, and 0 rows launch nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_OPS_H
#define KV8_DEVICE_OPS_H

#include <kv8/formats.h>

#include "device_impl.h"

enum {
    KV8_DEVICE_MAX_ROWS = 1 << 20,
    KV8_DEVICE_COLS_MULTIPLE = 8 /* of hidden and of a product's columns: 16 bytes of bf16 */
};

/* The kernels on one device. */
typedef struct kv8_device_ops kv8_device_ops;
/* *out is NULL on failure; KV8_ERR_UNSUPPORTED in a build without the kernels. */
kv8_status kv8_device_ops_create(kv8_device_ops **out, kv8_device *device);
/* After the stream's work is done. NULL is fine. */
void kv8_device_ops_destroy(kv8_device_ops *ops);
/* From here on a row's bits do not depend on n: every number of rows takes kernels that sum the
 * columns in one order. */
void kv8_device_ops_fix_order(kv8_device_ops *ops);

/* --- dense products --- */

typedef struct kv8_device_linear {
    const void *w;      /* f16 [rows, cols] */
    const void *bias;   /* bf16 [rows], NULL = none */
    int32_t rows, cols; /* cols a multiple of KV8_DEVICE_COLS_MULTIPLE */
} kv8_device_linear;

/* y[n, rows] = x[n, cols] w^T + bias, x f16, y_dtype KV8_BF16 or KV8_F32; accumulate: y, f32, +=
 * that. */
kv8_status kv8_device_linear_run(const kv8_device_ops *ops, kv8_stream *stream,
                                 const kv8_device_linear *w, const void *x, int32_t n, void *y,
                                 kv8_dtype y_dtype, bool accumulate);

/* The same into f32, and of each row the largest of every KV8_DEVICE_MAXIMA_ROWS neighbours, NaN
 * where one is NaN: maxima [n, w->rows / KV8_DEVICE_MAXIMA_ROWS]. *has_maxima_out: few rows,
 * and a w->rows that is no multiple, have none. */
enum { KV8_DEVICE_MAXIMA_ROWS = 64 };
kv8_status kv8_device_linear_maxima(const kv8_device_ops *ops, kv8_stream *stream,
                                    const kv8_device_linear *w, const void *x, int32_t n, float *y,
                                    float *maxima, bool *has_maxima_out);

/* A product of normed rows, and what stands around it in a layer. The norm is a kernel of its own,
 * unless the rows come normed; the product's rotates heads of 64, and of up to 16 rows any; others
 * are rotated by one more. */
typedef struct kv8_device_norm_linear {
    kv8_device_linear w;
    const float *x;   /* [n, cols]: the residual stream */
    const void *gain; /* bf16 [cols] */
    float eps;
    void *normed;   /* f16 [n, cols] to work in */
    bool is_normed; /* it has them already */
    /* The product's first num_rotated heads come rotated as by kv8_device_rope, [n, num_rotated,
     * head_dim] of rotated_dtype; what y has in their place is undefined. 0 = none. */
    int32_t num_rotated, head_dim; /* head_dim a multiple of 16 */
    const float *cos_sin;          /* [n, head_dim] */
    void *rotated;
    kv8_dtype rotated_dtype; /* KV8_BF16 or KV8_F16 */
    void *y;                 /* [n, rows] of y_dtype */
    kv8_dtype y_dtype;
} kv8_device_norm_linear;
kv8_status kv8_device_norm_linear_run(const kv8_device_ops *ops, kv8_stream *stream,
                                      const kv8_device_norm_linear *args, int32_t n);

/* --- rows --- */

/* residual[n, hidden] = rows ids[n] of table, bf16 [.., hidden]. */
kv8_status kv8_device_embed(const kv8_device_ops *ops, kv8_stream *stream, const void *table,
                            const int32_t *ids, int32_t n, int32_t hidden, float *residual);

/* Row i of out is row row_ids[i] of x, for n rows of row_bytes, a multiple of 16. out is not x. */
kv8_status kv8_device_gather(const kv8_device_ops *ops, kv8_stream *stream, const void *x,
                             const int32_t *row_ids, int32_t n, int32_t row_bytes, void *out);

/* Row i of out [n, hidden], f16: x_i * rsqrt(mean(x_i^2) + eps) * gain, x_i being row row_ids[i] of
 * x (row_ids NULL: row i), gain bf16. */
kv8_status kv8_device_rmsnorm(const kv8_device_ops *ops, kv8_stream *stream, const float *x,
                              const void *gain, float eps, int32_t n, int32_t hidden,
                              const int32_t *row_ids, void *out);

/* cos_sin[n, head_dim] of positions[n], as kv8_rope_angles: inv_freq [head_dim/2] (device memory)
 * and factor are kv8_rope_inv_freq's. */
kv8_status kv8_device_rope_angles(const kv8_device_ops *ops, kv8_stream *stream,
                                  const int32_t *positions, int32_t n, const float *inv_freq,
                                  float factor, int32_t head_dim, float *cos_sin);

/* Heads of half-split pairs: x [n, num_heads, head_dim] of x_dtype (KV8_BF16 or KV8_F32), rows
 * x_stride_row elements apart, rotated and rounded to y_dtype (KV8_BF16 or KV8_F16) into y, rows
 * y_stride_row apart. y may be x where both are bf16. */
kv8_status kv8_device_rope(const kv8_device_ops *ops, kv8_stream *stream, const float *cos_sin,
                           int32_t n, int32_t num_heads, int32_t head_dim, const void *x,
                           kv8_dtype x_dtype, int64_t x_stride_row, void *y, kv8_dtype y_dtype,
                           int64_t y_stride_row);

/* --- weights --- */

/* codes[n], n a multiple of KV8_DEVICE_COLS_MULTIPLE: bf16 becomes f16 in place, exactly but for
 * values under 2^-14, which keep multiples of 2^-24. A value that f16 does not hold is counted:
 * first_bad, device memory of ~0 before, becomes the least kv8_device_bad_weight() of all calls. */
kv8_status kv8_device_to_f16(const kv8_device_ops *ops, kv8_stream *stream, void *codes, int64_t n,
                             int32_t tensor, uint64_t *first_bad);
typedef struct kv8_bad_weight {
    int32_t tensor; /* -1 = none */
    int64_t element;
} kv8_bad_weight;
kv8_bad_weight kv8_device_bad_weight(uint64_t first_bad);

#endif
