/* topk.c - choosing among few scores: top-k with its softmax. Portable code only: the routers it
 * sees are a ten-thousandth of the work around them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <math.h>

#include "ops_impl.h"

/* Softmax over k values in descending order. When the largest is infinite the limit is taken: the
 * values equal to it share everything. */
static void softmax_descending(float *values, size_t k) {
    const float max = values[0];
    float sum = 0;
    for (size_t i = 0; i < k; i++) {
        values[i] = values[i] == max ? 1.0f : expf(values[i] - max);
        sum += values[i];
    }
    for (size_t i = 0; i < k; i++) values[i] /= sum;
}

void kv8_topk_softmax(const float *values, size_t n, size_t k, int32_t *idx_out,
                      float *weight_out) {
    assert(k >= 1 && k <= n);
    size_t held = 0; /* weight_out[0..held) is sorted descending, equal values by index */
    for (size_t i = 0; i < n; i++) {
        const float value = isnan(values[i]) ? -INFINITY : values[i];
        if (held == k && !(value > weight_out[k - 1])) continue;
        size_t at = held < k ? held++ : k - 1;
        for (; at > 0 && value > weight_out[at - 1]; at--) {
            weight_out[at] = weight_out[at - 1];
            idx_out[at] = idx_out[at - 1];
        }
        weight_out[at] = value;
        idx_out[at] = (int32_t)i;
    }
    softmax_descending(weight_out, k);
}
