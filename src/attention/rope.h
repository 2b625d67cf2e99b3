/* rope.h - the rotary embedding inside the attention room: the object and the rotation of one
 * head. Public face: kv8/attention.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ROPE_H
#define KV8_ROPE_H

#include "base_impl.h"

#include <kv8/attention.h>

struct kv8_rope {
    int32_t head_dim;
    float factor;     /* on cos and sin */
    float inv_freq[]; /* [head_dim/2] */
};

/* out[head_dim] = in rotated by one row of cos_sin (half_dim cosines, half_dim sines); out may be
 * in. Two products and one sum, each rounded to f32: the same bits wherever it is called. */
static inline void kv8_rope_rotate(const float *cos_sin, int32_t half_dim, const float *in,
                                   float *out) {
    for (int32_t i = 0; i < half_dim; i++) {
        const float a = in[i], b = in[i + half_dim];
        const float cosine = cos_sin[i], sine = cos_sin[i + half_dim];
        out[i] = a * cosine - b * sine;
        out[i + half_dim] = b * cosine + a * sine;
    }
}

#endif
