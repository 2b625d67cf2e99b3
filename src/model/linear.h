/* linear.h - norms' gains and matrices with a bias, as architectures bind them. Private to the
 * room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_LINEAR_H
#define KV8_LINEAR_H

#include "ops_impl.h"

/* A norm's gain as the file has it. */
typedef struct kv8_gain {
    const void *data;
    kv8_dtype dtype; /* BF16 or F32 */
} kv8_gain;

/* A matrix and its bias (bf16, any alignment; NULL = none). */
typedef struct kv8_linear {
    kv8_weight weight;
    const uint8_t *bias;
} kv8_linear;

/* y = W x + bias of n rows that lie side by side. */
kv8_matmul_job kv8_linear_job(const kv8_linear *linear, const float *x, float *y, int64_t n);
/* Row `row` of a BF16 matrix, at any alignment, into f32. */
void kv8_weight_row(const kv8_weight *weight, int64_t row, float *out);

#endif
