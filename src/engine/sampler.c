/* sampler.c - drawing a token from logits, as kv8/engine.h defines it: penalties, weights in whole
 * numbers, three cuts, one Philox number.
 *
 * A cut never sorts: it finds the logit at which it falls by counting mass in 256 buckets, four
 * times, one byte of the logit's bits after the other.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base_impl.h"
#include "philox.h"
#include "simd/scalar.h"

enum { WEIGHT_BITS = 36 };              /* sums of 2^24 ids fit into 64 bits */
static const float negligible = -25.0f; /* exp below is less than 2^-36: weight 0 */

struct kv8_sampler {
    const kv8_allocator *allocator;
    int32_t vocab_size;
    float *logits;     /* with bias and penalties */
    uint64_t *weights; /* 0 = cannot be drawn */
    int32_t *counts;   /* times generated; SEEN in the prompt only */
};

/* --- life --- */

kv8_status kv8_sampler_create(kv8_sampler **out, int32_t vocab_size,
                              const kv8_allocator *allocator) {
    *out = NULL;
    if (vocab_size < 1 || vocab_size > 1 << 24)
        return kv8_fail(KV8_ERR_INVALID, "a vocabulary of %d ids, must be 1 to %d", vocab_size,
                        1 << 24);
    const size_t n = (size_t)vocab_size;
    void *memory = NULL;
    kv8_status status = kv8_alloc(allocator, 1, sizeof(kv8_sampler), "sampler", &memory);
    if (status != KV8_OK) return status;
    kv8_sampler *const sampler = memory;
    sampler->allocator = allocator;
    sampler->vocab_size = vocab_size;
    KV8_TRY_GOTO(kv8_alloc(allocator, n, sizeof(float), "sampler's logits", &memory));
    sampler->logits = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, n, sizeof(uint64_t), "sampler's weights", &memory));
    sampler->weights = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, n, sizeof(int32_t), "sampler's counts", &memory));
    sampler->counts = memory;
    *out = sampler;
    return KV8_OK;
fail:
    kv8_sampler_destroy(sampler);
    return status;
}

void kv8_sampler_destroy(kv8_sampler *sampler) {
    if (sampler == NULL) return;
    const size_t n = (size_t)sampler->vocab_size;
    kv8_release(sampler->allocator, sampler->logits, n, sizeof(float));
    kv8_release(sampler->allocator, sampler->weights, n, sizeof(uint64_t));
    kv8_release(sampler->allocator, sampler->counts, n, sizeof(int32_t));
    kv8_release(sampler->allocator, sampler, 1, sizeof *sampler);
}

/* --- checks --- */

static kv8_status check_bias(const kv8_sampling *s, int32_t vocab_size) {
    if (s->num_bias < 0 || (s->num_bias > 0 && (s->bias_ids == NULL || s->bias == NULL)))
        return kv8_fail(KV8_ERR_INVALID, "%d biases, and their ids or values are NULL",
                        s->num_bias);
    for (int32_t i = 0; i < s->num_bias; i++) {
        if (s->bias_ids[i] < 0 || s->bias_ids[i] >= vocab_size)
            return kv8_fail(KV8_ERR_INVALID, "a bias for id %d, must be from 0 to %d",
                            s->bias_ids[i], vocab_size - 1);
        if (!(s->bias[i] < INFINITY))
            return kv8_fail(KV8_ERR_INVALID, "the bias of id %d is %g, must be below +inf",
                            s->bias_ids[i], (double)s->bias[i]);
    }
    return KV8_OK;
}

kv8_status kv8_sampling_check(const kv8_sampling *sampling, int32_t vocab_size) {
    KV8_TAKE_STRUCT(kv8_sampling, sampling);
    const struct {
        const char *name;
        float value, low, high;
    } bounds[] = {
        {"temperature", sampling->temperature, 0, FLT_MAX},
        {"top_p", sampling->top_p, 0, 1},
        {"min_p", sampling->min_p, 0, 1},
        {"repetition_penalty", sampling->repetition_penalty, 0, FLT_MAX},
        {"frequency_penalty", sampling->frequency_penalty, -FLT_MAX, FLT_MAX},
        {"presence_penalty", sampling->presence_penalty, -FLT_MAX, FLT_MAX},
    };
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++) {
        if (!(bounds[i].value >= bounds[i].low && bounds[i].value <= bounds[i].high))
            return kv8_fail(KV8_ERR_INVALID, "%s is %g, must be from %g to %g", bounds[i].name,
                            (double)bounds[i].value, (double)bounds[i].low, (double)bounds[i].high);
    }
    if (sampling->top_k < 0)
        return kv8_fail(KV8_ERR_INVALID, "top_k is %d, must not be < 0", sampling->top_k);
    return check_bias(sampling, vocab_size);
}

/* --- bias and penalties --- */

enum { SEEN = INT32_MIN }; /* a count of 0 that the prompt has */

static void count_history(kv8_sampler *sampler, const kv8_history *history) {
    int32_t *const counts = sampler->counts;
    memset(counts, 0, (size_t)sampler->vocab_size * sizeof *counts);
    for (int32_t i = 0; i < history->num_prompt; i++) counts[history->token_ids[i]] = SEEN;
    for (int32_t i = history->num_prompt; i < history->num_tokens; i++) {
        int32_t *const count = &counts[history->token_ids[i]];
        *count = *count == SEEN ? 1 : *count + 1;
    }
}

/* -inf where infinities cancel. */
static float penalised(float l, const kv8_sampling *s, int32_t count) {
    if (s->repetition_penalty != 0)
        l = l > 0 ? l / s->repetition_penalty : l * s->repetition_penalty;
    if (count != SEEN) {
        l -= s->frequency_penalty * (float)count;
        l -= s->presence_penalty;
    }
    return isnan(l) ? -INFINITY : l;
}

bool kv8_sampling_penalises(const kv8_sampling *s) {
    return (s->repetition_penalty != 0 && s->repetition_penalty != 1) ||
           s->frequency_penalty != 0 || s->presence_penalty != 0;
}

/* The logits that the rest works on: the model's own where nothing changes them. */
static const float *adjust(kv8_sampler *sampler, const kv8_sampling *s, const kv8_history *history,
                           const uint32_t *mask, const float *logits) {
    const bool penalties = kv8_sampling_penalises(s);
    if (!penalties && s->num_bias == 0 && mask == NULL) return logits;
    float *const own = sampler->logits;
    memcpy(own, logits, (size_t)sampler->vocab_size * sizeof *own);
    for (int32_t i = 0; i < s->num_bias; i++) own[s->bias_ids[i]] += s->bias[i];
    if (penalties) count_history(sampler, history);
    for (int32_t i = 0; penalties && i < sampler->vocab_size; i++) {
        if (sampler->counts[i] != 0) own[i] = penalised(own[i], s, sampler->counts[i]);
    }
    for (int32_t i = 0; mask != NULL && i < sampler->vocab_size; i++) {
        if ((mask[i / 32] >> (i % 32) & 1) == 0) own[i] = -INFINITY;
    }
    return own;
}

/* --- weights --- */

static int32_t argmax(const float *logits, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}

/* Weights of all ids; their sum. */
static uint64_t weigh(kv8_sampler *sampler, const float *logits, float high, float factor) {
    const float one = (float)(1ull << WEIGHT_BITS);
    uint64_t sum = 0;
    for (int32_t i = 0; i < sampler->vocab_size; i++) {
        const float x = (logits[i] - high) * factor;
        sampler->weights[i] = x >= negligible ? (uint64_t)(v_exp(x) * one) : 0;
        sum += sampler->weights[i];
    }
    return sum;
}

static uint64_t sum_weights(const kv8_sampler *sampler) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < sampler->vocab_size; i++) sum += sampler->weights[i];
    return sum;
}

/* floor(a * b / 2^64). */
static uint64_t multiply_high(uint64_t a, uint64_t b) {
    const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
    const uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32);
    const uint64_t other = a0 * b1 + (middle & 0xffffffffu);
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

/* --- cuts --- */

/* Whole numbers in the order of the floats; both zeros are one. */
static uint32_t order_of(float logit) {
    const float x = logit + 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

/* Drops every id before which, by falling logit and rising id, `limit` (>= 1) or more of mass
 * stands. An id's mass is 1, or its weight. */
static void cut(kv8_sampler *sampler, const float *logits, bool by_weight, uint64_t limit) {
    uint64_t *const weights = sampler->weights;
    const int32_t n = sampler->vocab_size;
    uint64_t before = 0; /* mass above the buckets looked at */
    uint64_t edge = 0;   /* the high bytes, found so far, of the logit where the cut falls */
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint64_t mass[256] = {0};
        for (int32_t i = 0; i < n; i++) {
            const uint64_t order = order_of(logits[i]);
            if (weights[i] != 0 && order >> (shift + 8) == edge)
                mass[order >> shift & 255] += by_weight ? weights[i] : 1;
        }
        int bucket = 255;
        while (bucket > 0 && before + mass[bucket] < limit) before += mass[bucket--];
        edge = edge << 8 | (uint64_t)bucket;
    }
    for (int32_t i = 0; i < n; i++) {
        const uint64_t order = order_of(logits[i]);
        if (weights[i] == 0 || order > edge) continue;
        const uint64_t mass = by_weight ? weights[i] : 1;
        if (order < edge || before >= limit) weights[i] = 0;
        if (order == edge) before += mass;
    }
}

/* --- the draw --- */

static int32_t pick(const kv8_sampler *sampler, uint64_t target) {
    uint64_t sum = 0;
    int32_t i = 0;
    while ((sum += sampler->weights[i]) <= target) i++;
    return i;
}

float kv8_sampling_factor(const kv8_sampling *s) {
    return s->temperature == 0 ? 0 : fminf(1 / s->temperature, FLT_MAX);
}
uint64_t kv8_sampling_top_p(const kv8_sampling *s) {
    if (s->top_p == 0 || s->top_p == 1) return 0;
    const uint64_t part = (uint64_t)ldexp((double)s->top_p, 64);
    return part > 0 ? part : 1;
}
uint64_t kv8_sampling_least(const kv8_sampling *s) {
    return (uint64_t)(s->min_p * (float)(1ull << WEIGHT_BITS));
}
uint64_t kv8_sampling_random(const kv8_sampling *s, int32_t position) {
    uint32_t words[4] = {(uint32_t)position, 0, (uint32_t)s->stream, (uint32_t)(s->stream >> 32)};
    kv8_philox4x32(words, s->seed);
    return words[0] | (uint64_t)words[1] << 32;
}

int32_t kv8_sampler_draw(kv8_sampler *sampler, const kv8_sampling *sampling,
                         const kv8_history *history, const uint32_t *mask, const float *logits) {
    const float *const adjusted = adjust(sampler, sampling, history, mask, logits);
    const int32_t best = argmax(adjusted, sampler->vocab_size);
    const float high = adjusted[best];
    const float factor = kv8_sampling_factor(sampling);
    if (factor == 0 || !isfinite(high)) return best;
    uint64_t sum = weigh(sampler, adjusted, high, factor);
    if (sampling->top_k > 0) cut(sampler, adjusted, false, (uint64_t)sampling->top_k);
    const uint64_t top_p = kv8_sampling_top_p(sampling);
    if (top_p != 0) {
        sum = sum_weights(sampler);
        const uint64_t part = multiply_high(sum, top_p);
        cut(sampler, adjusted, true, part > 0 ? part : 1);
    }
    const uint64_t least = kv8_sampling_least(sampling);
    for (int32_t i = 0; i < sampler->vocab_size; i++) {
        if (sampler->weights[i] < least) sampler->weights[i] = 0;
    }
    sum = sum_weights(sampler);
    return pick(sampler, multiply_high(sum, kv8_sampling_random(sampling, history->num_tokens)));
}

/* --- logprobs --- */

/* Puts the id where it belongs among the best so far. */
static void insert_top(kv8_logprob *top, int32_t num, int32_t n, int32_t id, float logit) {
    if (num == n && !(logit > top[n - 1].logprob)) return;
    int32_t at = num < n ? num : n - 1;
    for (; at > 0 && logit > top[at - 1].logprob; at--) top[at] = top[at - 1];
    top[at] = (kv8_logprob){id, logit};
}

float kv8_sampler_lse(float high, uint64_t sum) {
    return high + (float)log(ldexp((double)sum, -WEIGHT_BITS));
}

float kv8_sampler_logprobs(kv8_sampler *sampler, const float *logits, int32_t token, int32_t n,
                           kv8_logprob *top_out) {
    const float high = logits[argmax(logits, sampler->vocab_size)];
    const uint64_t sum = weigh(sampler, logits, high, 1.0f);
    const float lse = kv8_sampler_lse(high, sum);
    for (int32_t i = 0; n > 0 && i < sampler->vocab_size; i++)
        insert_top(top_out, i < n ? i : n, n, i, logits[i]);
    for (int32_t i = 0; i < n; i++) top_out[i].logprob -= lse;
    return logits[token] - lse;
}
