/* bench.h - what the benchmarks share: lists of numbers, medians, a random source, a filled cache;
 * the plot.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BENCH_H
#define KV8_BENCH_H

#include <stdlib.h>

#include "cli.h"

int bench_attention(int argc, char **argv);
int bench_model(int argc, char **argv);

/* bench attention --device cuda (attention_cuda.c): every format, batch, context and phase
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
/* Normal enough: mean 0, variance 1. free() them; NULL = no memory. */
float *bench_random_values(size_t num);

/* --- a cache to attend over (random_cache.c) --- */

typedef struct bench_cache_shape {
    int32_t num_kv_heads, head_dim, page_size;
    int32_t batch, context; /* sequences of a set, tokens of each */
    int32_t shared_prefix;  /* its first tokens are one sequence, forked */
    int32_t pool_mib;       /* of other sets before one comes again */
    kv8_dtype dtype;
    bool hnd;
} bench_cache_shape;
/* One layer, filled with random rows: sets of `batch` sequences. */
typedef struct bench_cache {
    kv8_cache *cache;
    kv8_seq *seqs;
    int32_t num_seqs;
} bench_cache;
/* Close it also when opening fails. */
kv8_status bench_cache_open(bench_cache *b, const bench_cache_shape *s, kv8_threads *threads);
void bench_cache_close(bench_cache *b);
/* Tokens that the sequences of a set really share: a fork that goes on copies a begun page. */
int32_t bench_shared_tokens(int32_t shared_prefix, int32_t context, int32_t page_size);

/* --- the plot of shares (share_plot.c) --- */

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
