/* rowwise.c - the ops that work on one row at a time: which rung runs them. The arithmetic is in
 * cpu/rowwise_tmpl.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>

#include "ops_kernels.h"

void kv8_rmsnorm(kv8_isa isa, const float *x, size_t n, size_t dim, const void *gain,
                 kv8_dtype gain_dtype, float eps, float *y) {
    assert(gain_dtype == KV8_BF16 || gain_dtype == KV8_F32);
    const kv8_rmsnorm_kernel kernel = kv8_ops_kernels_get(isa)->rmsnorm;
    for (size_t i = 0; i < n; i++) kernel(x + i * dim, dim, gain, gain_dtype, eps, y + i * dim);
}

void kv8_swiglu_clamped(kv8_isa isa, const float *u, size_t n, size_t dim, float alpha, float limit,
                        float *y) {
    kv8_ops_kernels_get(isa)->swiglu(u, n * dim, alpha, limit, y);
}

void kv8_axpy(kv8_isa isa, float a, const float *x, size_t n, float *y) {
    kv8_ops_kernels_get(isa)->axpy(a, x, n, y);
}
