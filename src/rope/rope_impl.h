/* rope_impl.h - what rope shows the rooms above beside kv8/rope.h: the object, and the rotation of
 * one head.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ROPE_IMPL_H
#define KV8_ROPE_IMPL_H

#include "base_impl.h"

#include <kv8/rope.h>

struct kv8_rope {
    int32_t head_dim;
    bool interleaved;
    float factor;     /* on cos and sin */
    float inv_freq[]; /* [head_dim/2] */
};

/* Rotates x[2 * half_dim] in place by one row of cos_sin (half_dim cosines, half_dim sines). Two
 * products and one sum, each rounded to f32: the same bits wherever it is called. */
static inline void kv8_rope_rotate(const float *cos_sin, int32_t half_dim, bool interleaved,
                                   float *x) {
    const int32_t step = interleaved ? 2 : 1, partner = interleaved ? 1 : half_dim;
    for (int32_t i = 0; i < half_dim; i++) {
        float *const pair = x + i * step;
        const float a = pair[0], b = pair[partner];
        const float cosine = cos_sin[i], sine = cos_sin[i + half_dim];
        pair[0] = a * cosine - b * sine;
        pair[partner] = b * cosine + a * sine;
    }
}

#endif
