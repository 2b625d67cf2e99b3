/* bench_samples.c - what the benchmarks draw and what they make of their times: random numbers to
 * measure on, and medians.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

uint64_t bench_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u); /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The sum of four uniforms. */
float bench_random_value(uint64_t *state) {
    const uint64_t bits = bench_random(state);
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)((bits >> (16 * i)) & 0xffff) / 65536.0f - 0.5f;
    return sum * 1.7320508f;
}

float *bench_random_values(size_t num) {
    float *const values = malloc(num * sizeof *values);
    uint64_t state = num;
    for (size_t i = 0; values != NULL && i < num; i++) values[i] = bench_random_value(&state);
    return values;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bench_times bench_summary(double *samples, int32_t num) {
    qsort(samples, (size_t)num, sizeof *samples, compare_doubles);
    return (bench_times){
        .median = num % 2 == 1 ? samples[num / 2] : (samples[num / 2 - 1] + samples[num / 2]) / 2,
        .least = samples[0],
        .most = samples[num - 1],
        .num = num,
    };
}
