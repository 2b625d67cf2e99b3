/* quantize_q_args.h - the argument of the kernels that make e4m3 of Q, for C and CUDA. Every
 * pointer is the device's; strides count elements.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_QUANTIZE_Q_ARGS_H
#define KV8_QUANTIZE_Q_ARGS_H

#include <stdint.h>

typedef struct kv8_quantize_q_kernel_args {
    const void *q;
    int64_t q_stride_row, q_stride_head;
    void *codes;
    int64_t codes_stride_row, codes_stride_head;
    const int32_t *qo_indptr; /* [batch + 1] */
    const float *head_scale;  /* [num_qo_heads]; NULL = scales follow from amax */
    uint32_t *amax;           /* [batch, num_kv_heads]: f32 bits, which order as their values do */
    float *q_scale;           /* the same shape */
    int32_t batch, max_rows, num_kv_heads, group_size, head_dim;
    int32_t padding;
} kv8_quantize_q_kernel_args;

enum { KV8_QUANTIZE_Q_THREADS = 256, KV8_QUANTIZE_Q_ROWS = 32, KV8_QUANTIZE_Q_VECTOR = 8 };

#ifdef __cplusplus
static_assert(sizeof(kv8_quantize_q_kernel_args) == 104, "layout");
#else
_Static_assert(sizeof(kv8_quantize_q_kernel_args) == 104, "layout");
#endif

#endif
