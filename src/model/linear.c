/* linear.c - jobs and rows of bound matrices.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "linear.h"

#include <string.h>

kv8_matmul_job kv8_linear_job(const kv8_linear *linear, const float *x, float *y, int64_t n) {
    return (kv8_matmul_job){.w = linear->weight,
                            .bias = linear->bias,
                            .x = x,
                            .x_stride = linear->weight.cols,
                            .y = y,
                            .y_stride = linear->weight.rows,
                            .num_rows = n};
}

void kv8_weight_row(const kv8_weight *weight, int64_t row, float *out) {
    const uint8_t *const codes =
        (const uint8_t *)weight->data + row * weight->cols * (int64_t)sizeof(kv8_bf16);
    for (int64_t i = 0; i < weight->cols; i++) {
        kv8_bf16 code;
        memcpy(&code, codes + (size_t)i * sizeof code, sizeof code);
        out[i] = kv8_bf16_to_f32(code);
    }
}
