/* ceiling_tmpl.h - the two loops that show a rung's limits: read memory, multiply and add.
 *
 * The including file has chosen a vocabulary (simd/<rung>.h) and defines KV8_CEILING(name). A rung
 * with pairwise bf16 dots also defines KV8_CEILING_BF16, and its own loop there.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* Sums n floats (a multiple of 16 * V_LANES): one load and one add per vector, sixteen chains, so
 * that only the memory is waited for. Returns the sum, or the compiler would drop the reads. */
float KV8_CEILING(kv8_ceiling_read)(const float *data, size_t n) {
    enum { CHAINS = 16 };
    v_f32 sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) sum[c] = v_set1(0.0f);
    for (size_t i = 0; i < n; i += CHAINS * V_LANES) {
        for (int c = 0; c < CHAINS; c++) sum[c] = v_add(sum[c], v_load(data + i + c * V_LANES));
    }
    for (int c = 1; c < CHAINS; c++) sum[0] = v_add(sum[0], sum[c]);
    return v_reduce_add(sum[0]);
}

/* `rounds` times twelve fused multiply-adds without a load: latency 4 at two per cycle wants 8
 * chains, twelve leave room. 12 * V_LANES products per round. */
float KV8_CEILING(kv8_ceiling_fma)(size_t rounds) {
    enum { CHAINS = 12 };
    v_f32 sum[CHAINS];
    for (int c = 0; c < CHAINS; c++) sum[c] = v_set1((float)c);
    v_f32 a = v_set1(0.999f), b = v_set1(1e-3f);
    for (size_t i = 0; i < rounds; i++) {
        for (int c = 0; c < CHAINS; c++) sum[c] = v_fma(sum[c], a, b);
    }
    for (int c = 1; c < CHAINS; c++) sum[0] = v_add(sum[0], sum[c]);
    return v_reduce_add(sum[0]);
}
