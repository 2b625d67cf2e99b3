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
    const float *const sines = cos_sin + half_dim;
    for (int32_t i = 0; interleaved && i < half_dim; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos_sin[i] - b * sines[i];
        x[2 * i + 1] = b * cos_sin[i] + a * sines[i];
    }
    for (int32_t i = 0; !interleaved && i < half_dim; i++) {
        const float a = x[i], b = x[i + half_dim];
        x[i] = a * cos_sin[i] - b * sines[i];
        x[i + half_dim] = b * cos_sin[i] + a * sines[i];
    }
}

#endif
