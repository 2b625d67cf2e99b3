/* bench.h - what the two benchmarks share: lists of numbers, medians, a random source; the plot.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BENCH_H
#define KV8_BENCH_H

#include <stdlib.h>

#include "cli.h"

int bench_attention(int argc, char **argv);
int bench_model(int argc, char **argv);

/* bench attention --device cuda (bench_attention_device.c): every format, batch, context and phase
 * is a row. */
typedef struct bench_device_args {
    const char *shape;
    int32_t num_qo_heads, num_kv_heads, head_dim, window, page_size, pool_mib, qo_len;
    int32_t longest; /* keys of the first request; 0 = as the others */
    kv8_dtype q;
    const kv8_dtype *kv;
    const int32_t *batch, *context;
    int32_t num_kv, num_batch, num_context;
    float seconds;
    bool decode, prefill, check, no_sink, hnd, batch_invariant, json, csv;
} bench_device_args;
int bench_attention_device(const bench_device_args *args);

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

/* --- the plot of shares (bench_plot.c) --- */

typedef struct bench_bar {
    const char *panel;          /* a picture of its own, one below the other */
    char group[32], series[64]; /* the place on the axis; the colour */
    double share, us;           /* the height; the figure above it */
} bench_bar;
/* Whether `path` names a format and so many series can be told apart. */
int bench_plot_check(const char *path, int32_t num_series);
/* Panels, groups and series stand in the order in which the bars name them. */
int bench_plot_draw(const bench_bar *bars, int32_t num_bars, const char *title, const char *path,
                    FILE *file);

#endif
