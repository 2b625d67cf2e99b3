/* rowwise.c - rmsnorm, the clamped SwiGLU and axpy: one row at a time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "ops_impl.h"

static float load_gain(const void *gain, kv8_dtype dtype, size_t i) {
    if (dtype == KV8_F32) {
        float value;
        memcpy(&value, (const uint8_t *)gain + i * sizeof value, sizeof value);
        return value;
    }
    kv8_bf16 code;
    memcpy(&code, (const uint8_t *)gain + i * sizeof code, sizeof code);
    return kv8_bf16_to_f32(code);
}

void kv8_rmsnorm(kv8_isa isa, const float *x, size_t n, size_t dim, const void *gain,
                 kv8_dtype gain_dtype, float eps, float *y) {
    (void)isa;
    assert(gain_dtype == KV8_BF16 || gain_dtype == KV8_F32);
    for (size_t row = 0; row < n; row++, x += dim, y += dim) {
        float sum = 0;
        for (size_t i = 0; i < dim; i++) sum += x[i] * x[i];
        const float scale = 1.0f / sqrtf(sum / (float)dim + eps);
        for (size_t i = 0; i < dim; i++) y[i] = x[i] * scale * load_gain(gain, gain_dtype, i);
    }
}

void kv8_swiglu_clamped(kv8_isa isa, const float *u, size_t n, size_t dim, float alpha, float limit,
                        float *y) {
    (void)isa;
    for (size_t i = 0; i < n * dim; i++) {
        const float gate = u[2 * i] > limit ? limit : u[2 * i];
        float up = u[2 * i + 1] > limit ? limit : u[2 * i + 1];
        if (up < -limit) up = -limit;
        y[i] = gate / (1.0f + expf(-alpha * gate)) * (up + 1.0f);
    }
}

void kv8_axpy(kv8_isa isa, float a, const float *x, size_t n, float *y) {
    (void)isa;
    for (size_t i = 0; i < n; i++) y[i] += a * x[i];
}
