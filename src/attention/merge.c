/* merge.c - partial results over disjoint keys become one; the sink joins last.
 *
 * On finished rows (o divided, lse natural and without sink), as callers hold them; the parts
 * inside one run are joined undivided by finish.c. Weights in f64: n rows cost n exponentials.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdbool.h>

#include <kv8/attention.h>

/* An empty part (lse infinite) counts nothing, whatever its o holds. */
static void merge_row(float *o_a, float *lse_a, const float *o_b, float lse_b, size_t dim) {
    const double a = (double)*lse_a, b = (double)lse_b;
    const bool a_empty = isinf(*lse_a), b_empty = isinf(lse_b);
    if (b_empty) {
        for (size_t d = 0; a_empty && d < dim; d++) o_a[d] = 0;
        if (a_empty) *lse_a = -INFINITY;
        return;
    }
    if (a_empty) {
        for (size_t d = 0; d < dim; d++) o_a[d] = o_b[d];
        *lse_a = lse_b;
        return;
    }
    const double top = a > b ? a : b;
    const double weight_a = exp(a - top), weight_b = exp(b - top), sum = weight_a + weight_b;
    for (size_t d = 0; d < dim; d++)
        o_a[d] = (float)(((double)o_a[d] * weight_a + (double)o_b[d] * weight_b) / sum);
    *lse_a = (float)(top + log(sum));
}

void kv8_attention_merge(float *o_a, float *lse_a, const float *o_b, const float *lse_b, size_t n,
                         size_t dim) {
    for (size_t i = 0; i < n; i++)
        merge_row(o_a + i * dim, lse_a + i, o_b + i * dim, lse_b[i], dim);
}

void kv8_attention_apply_sink(float *o, const float *lse, const float *sink_logit, size_t n,
                              size_t dim) {
    for (size_t i = 0; i < n; i++) {
        float *const row = o + i * dim;
        if (isinf(lse[i]) || sink_logit[i] == INFINITY) {
            for (size_t d = 0; d < dim; d++) row[d] = 0;
            continue;
        }
        /* exp overflows to infinity, and the factor to the 0 that it should be. */
        const double factor = 1 / (1 + exp((double)sink_logit[i] - (double)lse[i]));
        for (size_t d = 0; d < dim; d++) row[d] = (float)((double)row[d] * factor);
    }
}
