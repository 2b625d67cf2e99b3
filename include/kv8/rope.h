/* kv8/rope.h - rotary position embedding: inverse frequencies, angles, rotation. It knows positions
 * and head dims, no cache and no model.
 *
 * Pair i of a head turns by position * inv_freq[i]: (a, b) becomes (a cos - b sin, b cos + a sin).
 * Of the half-split form pair i is elements (i, i + head_dim/2), of the interleaved one
 * (2i, 2i + 1); cos_sin is the same for both.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ROPE_H
#define KV8_ROPE_H

#include <kv8/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv8_rope_kind {
    KV8_ROPE_DEFAULT = 0, /* inv_freq[i] = theta^(-2i/head_dim) */
    KV8_ROPE_YARN,        /* Peng et al. 2023 */
    KV8_ROPE_LINEAR,      /* inv_freq / factor */
    KV8_ROPE_LLAMA3       /* waves longer than the original context / factor, shorter ones not */
} kv8_rope_kind;

/* What a kind does not use must be 0. */
typedef struct kv8_rope_options {
    size_t struct_size;
    kv8_rope_kind kind;
    int32_t head_dim; /* even, 2..576 */
    double theta;
    double factor;                 /* YARN, LINEAR, LLAMA3: >= 1 */
    int32_t original_max_position; /* YARN, LLAMA3 */
    int32_t interleaved;           /* 0 = half-split pairs, 1 = neighbours */
    /* YARN: */
    double beta_fast, beta_slow;
    double attention_factor; /* 0 = 0.1*ln(factor) + 1; multiplies both cos and sin */
    int32_t truncate;        /* round the correction bounds to whole dimensions */
    /* LLAMA3: waves of more than original_max_position / low_freq_factor tokens are slowed by
     * factor, those of less than original_max_position / high_freq_factor are kept, and between
     * them both are blended. */
    double low_freq_factor, high_freq_factor;
} kv8_rope_options;
#define KV8_ROPE_OPTIONS_INIT KV8_SIZED(kv8_rope_options)

typedef struct kv8_rope kv8_rope;

/* *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_rope_create(kv8_rope **out, const kv8_rope_options *options);
KV8_API void kv8_rope_destroy(kv8_rope *rope);
/* Inverse frequencies, [head_dim/2] floats, borrowed, and the factor on cos and sin. */
KV8_API const float *kv8_rope_inv_freq(const kv8_rope *rope, float *factor_out);
/* cos_sin_out[n, head_dim]: head_dim/2 cosines then head_dim/2 sines of each position, both times
 * the attention factor. The angle is the f32 product position * inv_freq. */
KV8_API void kv8_rope_angles(const kv8_rope *rope, const int32_t *positions, size_t n,
                             float *cos_sin_out);
/* Rotates x [n, num_heads, head_dim] in place (strides in elements); f32. On x86-64 subnormal
 * floats (below 2^-126) count as 0. */
KV8_API void kv8_rope_apply(const kv8_rope *rope, const float *cos_sin, size_t n, float *x,
                            int32_t num_heads, int64_t stride_row, int64_t stride_head);

#ifdef __cplusplus
}
#endif
#endif
