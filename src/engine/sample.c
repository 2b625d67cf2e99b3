/* sample.c - drawing a token from logits.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include <kv8/engine.h>

/* splitmix64 (Steele, Lea, Flood 2014): every seed is good, one addition advances it. */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* NaN never wins; all NaN gives 0. */
static int32_t argmax(const float *logits, int32_t vocab_size) {
    int32_t best = 0;
    float high = -INFINITY;
    for (int32_t i = 0; i < vocab_size; i++) {
        if (logits[i] > high) {
            high = logits[i];
            best = i;
        }
    }
    return best;
}

/* exp((logit - high) / temperature); what is not a number has no chance. */
static double chance(float logit, float high, double temperature) {
    const double weight = exp(((double)logit - (double)high) / temperature);
    return weight > 0 ? weight : 0;
}

int32_t kv8_sample(const float *logits, int32_t vocab_size, float temperature,
                   uint64_t *rng_state) {
    const uint64_t bits = next_random(rng_state);
    const int32_t best = argmax(logits, vocab_size);
    const float high = logits[best];
    if (!(temperature > 0) || !isfinite(high)) return best;
    double total = 0;
    for (int32_t i = 0; i < vocab_size; i++) total += chance(logits[i], high, (double)temperature);
    double left = (double)(bits >> 11) * 0x1p-53 * total; /* uniform in [0, total) */
    for (int32_t i = 0; i < vocab_size; i++) {
        const double weight = chance(logits[i], high, (double)temperature);
        if (left < weight) return i;
        left -= weight;
    }
    return best; /* rounding ate the last share */
}
