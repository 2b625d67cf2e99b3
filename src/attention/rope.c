/* rope.c - rotary position embedding, default and YaRN: frequencies, angles, rotation. Knows
 * positions; never the cache, a layer or a model.
 *
 * The frequencies are computed in f32 step by step, as the models were trained and as every other
 * implementation of them runs: at position 131071 one ulp of a frequency turns a pair by up to
 * 0.008 rad, so "more exact" would be another model. The f32 angle position * inv_freq then gets an
 * exact cosine and sine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "rope.h"

#include <math.h>

/* The pair index at which a wave turns `rotations` times within the original context
 * (Peng et al. 2023, "find correction dimension"). */
static double correction_dim(const kv8_rope_options *o, double rotations) {
    const double pi = 3.14159265358979323846;
    return o->head_dim * log(o->original_max_position / (rotations * 2 * pi)) / (2 * log(o->theta));
}

/* low..high: the pairs over which YaRN fades from the original to the interpolated frequency. */
static void correction_range(const kv8_rope_options *o, double *low_out, double *high_out) {
    double low = correction_dim(o, o->beta_fast), high = correction_dim(o, o->beta_slow);
    if (o->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, o->head_dim - 1);
    if (low == high) high += 0.001; /* a step instead of a division by zero */
    *low_out = low;
    *high_out = high;
}

static void fill_inv_freq(const kv8_rope_options *o, float *inv_freq) {
    double low = 0, high = 0;
    if (o->kind == KV8_ROPE_YARN) correction_range(o, &low, &high);
    for (int32_t i = 0; i < o->head_dim / 2; i++) {
        const float exponent = (float)(2 * i) / (float)o->head_dim;
        const float wave = (float)pow(o->theta, (double)exponent);
        const float original = 1.0f / wave;
        inv_freq[i] = original;
        if (o->kind != KV8_ROPE_YARN) continue;
        const float interpolated = 1.0f / ((float)o->factor * wave);
        const float ramp = ((float)i - (float)low) / (float)(high - low);
        const float keep = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
        inv_freq[i] = interpolated * (1.0f - keep) + original * keep;
    }
}

static kv8_status check_yarn(const kv8_rope_options *o) {
    if (!(o->factor >= 1) || isinf(o->factor))
        return kv8_fail(KV8_ERR_INVALID, "rope factor is %g, must be finite and >= 1", o->factor);
    if (!(o->beta_slow > 0) || isinf(o->beta_slow))
        return kv8_fail(KV8_ERR_INVALID, "rope beta_slow is %g, must be finite and > 0",
                        o->beta_slow);
    if (!(o->beta_fast >= o->beta_slow) || isinf(o->beta_fast))
        return kv8_fail(KV8_ERR_INVALID, "rope beta_fast is %g, must be finite and >= beta_slow %g",
                        o->beta_fast, o->beta_slow);
    if (o->truncate != 0 && o->truncate != 1)
        return kv8_fail(KV8_ERR_INVALID, "rope truncate is %d, must be 0 or 1", o->truncate);
    if (o->original_max_position < 1)
        return kv8_fail(KV8_ERR_INVALID, "rope original_max_position is %d, must be >= 1",
                        o->original_max_position);
    if (!(o->attention_factor >= 0) || isinf(o->attention_factor))
        return kv8_fail(KV8_ERR_INVALID, "rope attention_factor is %g, must be finite and >= 0",
                        o->attention_factor);
    return KV8_OK;
}

static kv8_status check_options(const kv8_rope_options *o) {
    KV8_CHECK_OPTIONS(o, kv8_rope_options);
    if (o->kind != KV8_ROPE_DEFAULT && o->kind != KV8_ROPE_YARN)
        return kv8_fail(KV8_ERR_INVALID, "rope kind is %d, must be %d (default) or %d (YaRN)",
                        (int)o->kind, (int)KV8_ROPE_DEFAULT, (int)KV8_ROPE_YARN);
    enum { MAX_HEAD_DIM = 576 };
    if (o->head_dim < 2 || o->head_dim > MAX_HEAD_DIM || o->head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "rope head_dim is %d, must be even, 2 to %d", o->head_dim,
                        (int)MAX_HEAD_DIM);
    if (!(o->theta > 1) || isinf(o->theta))
        return kv8_fail(KV8_ERR_INVALID, "rope theta is %g, must be finite and > 1", o->theta);
    if (o->kind == KV8_ROPE_YARN) return check_yarn(o);
    if (o->factor != 0 || o->beta_fast != 0 || o->beta_slow != 0 || o->truncate != 0 ||
        o->original_max_position != 0 || o->attention_factor != 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "default rope with YaRN fields set (factor %g, beta_fast %g, beta_slow %g, "
                        "truncate %d, original_max_position %d, attention_factor %g), must be 0",
                        o->factor, o->beta_fast, o->beta_slow, o->truncate,
                        o->original_max_position, o->attention_factor);
    return KV8_OK;
}

static size_t rope_bytes(int32_t head_dim) {
    return sizeof(kv8_rope) + (size_t)(head_dim / 2) * sizeof(float);
}

kv8_status kv8_rope_create(kv8_rope **out, const kv8_rope_options *options) {
    *out = NULL;
    KV8_TRY(check_options(options));
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, rope_bytes(options->head_dim), "rope", &memory));
    kv8_rope *const rope = memory;
    rope->head_dim = options->head_dim;
    rope->factor = 1.0f;
    if (options->kind == KV8_ROPE_YARN)
        rope->factor = (float)(options->attention_factor != 0 ? options->attention_factor
                                                              : 0.1 * log(options->factor) + 1);
    fill_inv_freq(options, rope->inv_freq);
    *out = rope;
    return KV8_OK;
}

void kv8_rope_destroy(kv8_rope *rope) {
    if (rope != NULL) kv8_release(NULL, rope, 1, rope_bytes(rope->head_dim));
}

const float *kv8_rope_inv_freq(const kv8_rope *rope, float *factor_out) {
    *factor_out = rope->factor;
    return rope->inv_freq;
}

void kv8_rope_angles(const kv8_rope *rope, const int32_t *positions, size_t n, float *cos_sin_out) {
    const int32_t half_dim = rope->head_dim / 2;
    for (size_t row = 0; row < n; row++) {
        float *const cosines = cos_sin_out + row * (size_t)rope->head_dim;
        float *const sines = cosines + half_dim;
        for (int32_t i = 0; i < half_dim; i++) {
            const float angle = (float)positions[row] * rope->inv_freq[i];
            cosines[i] = (float)cos((double)angle) * rope->factor;
            sines[i] = (float)sin((double)angle) * rope->factor;
        }
    }
}

void kv8_rope_apply(const kv8_rope *rope, const float *cos_sin, size_t n, float *x,
                    int32_t num_heads, int64_t stride_row, int64_t stride_head) {
    for (size_t row = 0; row < n; row++) {
        const float *const row_cos_sin = cos_sin + row * (size_t)rope->head_dim;
        for (int32_t head = 0; head < num_heads; head++) {
            float *const head_x = x + (int64_t)row * stride_row + head * stride_head;
            kv8_rope_rotate(row_cos_sin, rope->head_dim / 2, head_x, head_x);
        }
    }
}
