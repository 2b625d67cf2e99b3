/* bench.h - what the two benchmarks share: lists of numbers, medians, a random source.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BENCH_H
#define KV8_BENCH_H

#include <stdlib.h>

#include "cli.h"

int bench_attention(int argc, char **argv);
int bench_model(int argc, char **argv);

/* Reads "1,16,64", every number in [min, max]. */
int bench_list(const char *option, const char *text, int32_t min, int32_t max, int32_t *values_out,
               int32_t capacity, int32_t *num_out);

typedef struct bench_times {
    double median, least, most;
    int32_t num;
} bench_times;
/* Sorts the samples. */
bench_times bench_summary(double *samples, int32_t num);

uint64_t bench_random(uint64_t *state);

#endif
