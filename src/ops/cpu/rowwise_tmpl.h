/* rowwise_tmpl.h - rmsnorm, the clamped SwiGLU and axpy on one rung. Included by ops_<rung>.c
 * after base/simd/<rung>.h, formats_simd.h and this word:
 *
 *   void w_even_odd(a, b, v_f32 *even, v_f32 *odd)   the 2*V_LANES elements of (a, b) apart
 *
 * SPDX-License-Identifier: Apache-2.0 */

static float sum_of_squares(const float *x, size_t n) {
    enum { ACCUMULATORS = 4 }; /* enough to hide an FMA's latency */
    v_f32 acc[ACCUMULATORS];
    for (int k = 0; k < ACCUMULATORS; k++) acc[k] = v_set1(0.0f);
    size_t i = 0;
    for (; i + ACCUMULATORS * V_LANES <= n; i += ACCUMULATORS * V_LANES) {
        for (int k = 0; k < ACCUMULATORS; k++) {
            const v_f32 v = v_load(x + i + (size_t)k * V_LANES);
            acc[k] = v_fma(v, v, acc[k]);
        }
    }
    for (int k = 0; i < n; i += V_LANES, k++) {
        const v_f32 v = v_load_n(x + i, n - i < V_LANES ? (int)(n - i) : V_LANES);
        acc[k] = v_fma(v, v, acc[k]);
    }
    return v_reduce_add(v_add(v_add(acc[0], acc[1]), v_add(acc[2], acc[3])));
}

static void rmsnorm_row(const float *x, size_t dim, const void *gain, kv8_dtype gain_dtype,
                        float eps, float *y) {
    const v_f32 scale = v_set1(1.0f / sqrtf(sum_of_squares(x, dim) / (float)dim + eps));
    const uint8_t *const gain_bytes = gain;
    for (size_t i = 0; i < dim; i += V_LANES) {
        const int n = dim - i < V_LANES ? (int)(dim - i) : V_LANES;
        const v_f32 g = gain_dtype == KV8_F32 ? v_widen_f32_n(gain_bytes + 4 * i, n)
                                              : v_widen_bf16_n(gain_bytes + 2 * i, n);
        v_store_n(y + i, v_mul(v_mul(v_load_n(x + i, n), scale), g), n);
    }
}

/* g * sigmoid(alpha*g) * (l + 1), the sigmoid from exp(-|t|) so that nothing overflows: a large
 * negative gate gives 0. A NaN stays one: v_min and v_max return their second operand. */
static v_f32 swiglu(v_f32 gate, v_f32 up, float alpha, float limit) {
    const v_f32 zero = v_set1(0.0f), one = v_set1(1.0f);
    const v_f32 g = v_min(v_set1(limit), gate);
    const v_f32 l = v_max(v_set1(-limit), v_min(v_set1(limit), up));
    const v_f32 t = v_mul(v_set1(alpha), g);
    const v_f32 p = v_exp(v_min(t, v_sub(zero, t)));
    const v_f32 sigmoid = v_div(v_select_lt(t, zero, p, one), v_add(one, p));
    return v_mul(v_mul(g, sigmoid), v_add(l, one));
}

static void swiglu_values(const float *u, size_t n, float alpha, float limit, float *y) {
    v_f32 gate, up;
    size_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        w_even_odd(v_load(u + 2 * i), v_load(u + 2 * i + V_LANES), &gate, &up);
        v_store(y + i, swiglu(gate, up, alpha, limit));
    }
    if (i == n) return;
    const int left = (int)(n - i), first = 2 * left < V_LANES ? 2 * left : V_LANES;
    w_even_odd(v_load_n(u + 2 * i, first), v_load_n(u + 2 * i + first, 2 * left - first), &gate,
               &up);
    v_store_n(y + i, swiglu(gate, up, alpha, limit), left);
}

static void axpy_values(float a, const float *x, size_t n, float *y) {
    const v_f32 factor = v_set1(a);
    size_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES)
        v_store(y + i, v_fma(factor, v_load(x + i), v_load(y + i)));
    const int tail = (int)(n - i);
    if (tail > 0)
        v_store_n(y + i, v_fma(factor, v_load_n(x + i, tail), v_load_n(y + i, tail)), tail);
}
