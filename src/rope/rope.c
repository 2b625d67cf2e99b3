/* rope.c - rotary position embedding: the frequencies of each kind, angles, rotation. Knows
 * positions; never the cache, a layer or a model.
 *
 * The frequencies are computed in f32 step by step, as the models were trained and as every other
 * implementation of them runs: at position 131071 one ulp of a frequency turns a pair by up to
 * 0.008 rad, so "more exact" would be another model. The f32 angle position * inv_freq then gets an
 * exact cosine and sine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "rope_impl.h"

#include <math.h>

#include "simd/subnormals.h"

static const double PI = 3.14159265358979323846;

/* The pair index at which a wave turns `rotations` times within the original context
 * (Peng et al. 2023, "find correction dimension"). */
static double correction_dim(const kv8_rope_options *o, double rotations) {
    return o->head_dim * log(o->original_max_position / (rotations * 2 * PI)) / (2 * log(o->theta));
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

/* From low on YaRN fades from the original to the interpolated frequency, until high. */
static float yarn(const kv8_rope_options *o, int32_t pair, float wave) {
    double low = 0, high = 0;
    correction_range(o, &low, &high);
    const float interpolated = 1.0f / ((float)o->factor * wave);
    const float ramp = ((float)pair - (float)low) / (float)(high - low);
    const float keep = 1.0f - fminf(fmaxf(ramp, 0.0f), 1.0f);
    return interpolated * (1.0f - keep) + 1.0f / wave * keep;
}

/* By the length of the wave, in tokens. */
static float llama3(const kv8_rope_options *o, float frequency) {
    const float original = (float)o->original_max_position;
    const float low = (float)o->low_freq_factor, high = (float)o->high_freq_factor;
    const float length = 2 * (float)PI / frequency, slowed = frequency / (float)o->factor;
    if (length > original / low) return slowed;
    if (length < original / high) return frequency;
    const float keep = (original / length - low) / (high - low);
    return (1.0f - keep) * slowed + keep * frequency;
}

static void fill_inv_freq(const kv8_rope_options *o, float *inv_freq) {
    for (int32_t i = 0; i < o->head_dim / 2; i++) {
        const float exponent = (float)(2 * i) / (float)o->head_dim;
        const float wave = (float)pow(o->theta, (double)exponent);
        switch (o->kind) {
            case KV8_ROPE_DEFAULT: inv_freq[i] = 1.0f / wave; break;
            case KV8_ROPE_LINEAR: inv_freq[i] = 1.0f / wave / (float)o->factor; break;
            case KV8_ROPE_YARN: inv_freq[i] = yarn(o, i, wave); break;
            case KV8_ROPE_LLAMA3: inv_freq[i] = llama3(o, 1.0f / wave); break;
        }
    }
}

/* --- options --- */

static kv8_status check_yarn(const kv8_rope_options *o) {
    if (!(o->beta_slow > 0) || isinf(o->beta_slow))
        return kv8_fail(KV8_ERR_INVALID, "rope beta_slow is %g, must be finite and > 0",
                        o->beta_slow);
    if (!(o->beta_fast >= o->beta_slow) || isinf(o->beta_fast))
        return kv8_fail(KV8_ERR_INVALID, "rope beta_fast is %g, must be finite and >= beta_slow %g",
                        o->beta_fast, o->beta_slow);
    if (o->truncate != 0 && o->truncate != 1)
        return kv8_fail(KV8_ERR_INVALID, "rope truncate is %d, must be 0 or 1", o->truncate);
    if (!(o->attention_factor >= 0) || isinf(o->attention_factor))
        return kv8_fail(KV8_ERR_INVALID, "rope attention_factor is %g, must be finite and >= 0",
                        o->attention_factor);
    return KV8_OK;
}

static kv8_status check_llama3(const kv8_rope_options *o) {
    if (!(o->low_freq_factor > 0) || isinf(o->low_freq_factor))
        return kv8_fail(KV8_ERR_INVALID, "rope low_freq_factor is %g, must be finite and > 0",
                        o->low_freq_factor);
    if (!(o->high_freq_factor > o->low_freq_factor) || isinf(o->high_freq_factor))
        return kv8_fail(KV8_ERR_INVALID,
                        "rope high_freq_factor is %g, must be finite and > low_freq_factor %g",
                        o->high_freq_factor, o->low_freq_factor);
    return KV8_OK;
}

/* A field that the kind has no use for is a mistake, not a wish to ignore. */
static kv8_status check_unused(const kv8_rope_options *o) {
    enum {
        DEFAULT = 1 << KV8_ROPE_DEFAULT,
        YARN = 1 << KV8_ROPE_YARN,
        LINEAR = 1 << KV8_ROPE_LINEAR,
        LLAMA3 = 1 << KV8_ROPE_LLAMA3
    };
    const struct {
        const char *name;
        double value;
        int kinds; /* that use it */
    } fields[] = {
        {"factor", o->factor, YARN | LINEAR | LLAMA3},
        {"original_max_position", o->original_max_position, YARN | LLAMA3},
        {"beta_fast", o->beta_fast, YARN},
        {"beta_slow", o->beta_slow, YARN},
        {"attention_factor", o->attention_factor, YARN},
        {"truncate", o->truncate, YARN},
        {"low_freq_factor", o->low_freq_factor, LLAMA3},
        {"high_freq_factor", o->high_freq_factor, LLAMA3},
    };
    static const char *const names[] = {"default", "YaRN", "linear", "llama3"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].value != 0 && (fields[i].kinds >> o->kind & 1) == 0)
            return kv8_fail(KV8_ERR_INVALID, "rope %s is %g, must be 0 for %s rope", fields[i].name,
                            fields[i].value, names[o->kind]);
    }
    return KV8_OK;
}

static kv8_status check_options(const kv8_rope_options *o) {
    if ((int)o->kind < KV8_ROPE_DEFAULT || (int)o->kind > KV8_ROPE_LLAMA3)
        return kv8_fail(KV8_ERR_INVALID, "rope kind is %d, must be %d to %d", (int)o->kind,
                        (int)KV8_ROPE_DEFAULT, (int)KV8_ROPE_LLAMA3);
    enum { MAX_HEAD_DIM = 576 };
    if (o->head_dim < 2 || o->head_dim > MAX_HEAD_DIM || o->head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "rope head_dim is %d, must be even, 2 to %d", o->head_dim,
                        (int)MAX_HEAD_DIM);
    if (!(o->theta > 1) || isinf(o->theta))
        return kv8_fail(KV8_ERR_INVALID, "rope theta is %g, must be finite and > 1", o->theta);
    if (o->interleaved != 0 && o->interleaved != 1)
        return kv8_fail(KV8_ERR_INVALID, "rope interleaved is %d, must be 0 or 1", o->interleaved);
    KV8_TRY(check_unused(o));
    if (o->kind == KV8_ROPE_DEFAULT) return KV8_OK;
    if (!(o->factor >= 1) || isinf(o->factor))
        return kv8_fail(KV8_ERR_INVALID, "rope factor is %g, must be finite and >= 1", o->factor);
    if (o->kind == KV8_ROPE_LINEAR) return KV8_OK;
    if (o->original_max_position < 1)
        return kv8_fail(KV8_ERR_INVALID, "rope original_max_position is %d, must be >= 1",
                        o->original_max_position);
    return o->kind == KV8_ROPE_YARN ? check_yarn(o) : check_llama3(o);
}

/* --- the object --- */

static size_t rope_bytes(int32_t head_dim) {
    return sizeof(kv8_rope) + (size_t)(head_dim / 2) * sizeof(float);
}

kv8_status kv8_rope_create(kv8_rope **out, const kv8_rope_options *options) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(options);
    KV8_TAKE_STRUCT(kv8_rope_options, options);
    KV8_TRY(check_options(options));
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, rope_bytes(options->head_dim), "rope", &memory));
    kv8_rope *const rope = memory;
    rope->head_dim = options->head_dim;
    rope->interleaved = options->interleaved != 0;
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
    const unsigned before = kv8_subnormals_off();
    for (size_t row = 0; row < n; row++) {
        const float *const row_cos_sin = cos_sin + row * (size_t)rope->head_dim;
        for (int32_t head = 0; head < num_heads; head++) {
            float *const head_x = x + (int64_t)row * stride_row + head * stride_head;
            kv8_rope_rotate(row_cos_sin, rope->head_dim / 2, rope->interleaved, head_x);
        }
    }
    kv8_subnormals_restore(before);
}
