/* bench.h - what the benchmarks share: what is to be measured, rows of results and their printing,
 * medians, a random source, a filled cache, the plot.
 *
 * kv8 bench attention: attention_args.c reads the options, bench_attention.c walks over formats,
 * batches and contexts, attention_cpu.c and attention_cuda.c measure the rows of one of them,
 * report.c prints all rows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BENCH_H
#define KV8_BENCH_H

#include <stdlib.h>

#include "cli.h"

int bench_attention(int argc, char **argv);
int bench_model(int argc, char **argv);
int bench_load(int argc, char **argv);

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
/* Normal enough: mean 0, variance 1. */
float bench_random_value(uint64_t *state);
/* free() them; NULL = no memory. */
float *bench_random_values(size_t num);

/* --- attention: what to measure (attention_args.c) --- */

enum { BENCH_MAX_VALUES = 16, BENCH_MAX_ROWS = 512 };

/* Values beside the random ones, of which no time may depend (attention_args.c names them). */
typedef enum bench_sick { SICK_NONE = 0, SICK_Q, SICK_K, SICK_V, SICK_SCALES, NUM_SICK } bench_sick;

/* Formats of K and V, and their name: "int8", or of two "int8/e4m3". */
typedef struct bench_kv {
    kv8_dtype k, v;
    char name[32];
} bench_kv;

typedef struct bench_args {
    const char *shape; /* its name */
    int32_t num_qo_heads, num_kv_heads, head_dim;
    int32_t window, page_size, pool_mib, qo_len, shared_prefix;
    int32_t longest;                       /* keys of the first request; 0 = as the others */
    int32_t chunk;                         /* query rows of the first request; 0 = as the others */
    int32_t left_padding, attention_chunk; /* ranges of keys; 0 = none */
    kv8_dtype q, o;                        /* o: NONE = the plan's default */
    bench_kv kv[BENCH_MAX_VALUES];
    kv8_isa isa[KV8_ISA_COUNT];
    kv8_attention_math math;
    int32_t batch[BENCH_MAX_VALUES], context[BENCH_MAX_VALUES], threads[BENCH_MAX_VALUES];
    int32_t num_kv, num_isa, num_batch, num_context, num_threads;
    float seconds;
    const char *plot;
    bench_sick sick;
    bool decode, prefill, check, no_sink, hnd, batch_invariant, bounded, tree, prepare, cuda, csv,
        json;
} bench_args;
/* Whether a rung of the processor is called so. */
bool bench_isa(const char *name, kv8_isa *isa_out);
/* Returns -1 to go on, or the exit status. */
int bench_args_parse(bench_args *args, int argc, char **argv);

/* --- attention: rows (bench_rows.c) --- */

/* One line of the result. */
typedef struct bench_row {
    const char *phase;
    bench_kv kv;
    int32_t batch, context, qo_len, shared_prefix;
    kv8_isa isa;               /* asked for; BEST on a GPU */
    int32_t threads;           /* 0 on a GPU */
    char kernel[96], math[16]; /* the plan's: its name, and what it multiplies in */
    bench_times us;
    double kv_bytes, macs;        /* visible K and V, each byte once; multiply-adds */
    double read_gb_s, dot_gmac_s; /* limits of that kernel; the second is 0 when not known */
    double error;                 /* relative, of the rows that --check samples; else NaN */
} bench_row;

typedef struct bench_rows {
    const char *device; /* "cpu", or the GPU's name */
    bench_row row[BENCH_MAX_ROWS];
    int32_t num;
} bench_rows;

/* What measures rows: the processor or a GPU. `measure` adds the rows of one format, batch and
 * context. */
typedef struct bench_machine {
    const char *name;
    int (*measure)(void *self, const bench_row *of, bench_rows *rows);
    void (*close)(void *self);
    void *self;
} bench_machine;
int bench_cpu_open(bench_machine *out, const bench_args *args);
int bench_cuda_open(bench_machine *out, const bench_args *args);

/* A new row like `of` for phase 0 (decode) or 1 (prefill), its work counted. *row_out is NULL when
 * the phase was not asked for. */
int bench_rows_add(bench_rows *rows, const bench_args *args, const bench_row *of, int phase,
                   bench_row **row_out);
/* Keys of a request of the row. */
int32_t bench_request_rows(const bench_args *args, const bench_row *row, int32_t request);
int32_t bench_total_rows(const bench_args *args, const bench_row *row);
int32_t bench_request_keys(const bench_args *args, const bench_row *row, int32_t request);
/* The NaN of --sick: in a query row of the first request, or in K or V of a key, whose page is
 * given, each the middle one; int8's is its scale. */
typedef struct bench_nan {
    void *at;
    size_t size;
    uint8_t code[4];
} bench_nan;
kv8_status bench_sick_value(const bench_args *args, const bench_row *row,
                            const kv8_attention_args *of, int32_t page, bench_nan *out);
/* Keys [*begin, *end) that query `query` of a request sees. */
void bench_seen_keys(const bench_args *args, const bench_row *row, int32_t request, int32_t query,
                     int32_t *begin, int32_t *end);
/* Whether queries have ranges of keys of their own. */
bool bench_has_ranges(const bench_args *args);
/* Of the plan that runs the row. */
kv8_attention_spec bench_spec(const bench_args *args, const bench_row *row);
/* Mask bits of a row whose requests' newest tokens, as many as their queries, are a binary heap of
 * continuations: each sees what came before, itself and its ancestors. indptr [batch + 1]: byte
 * offsets. free() them; NULL = no memory. */
uint8_t *bench_tree_mask(const bench_args *args, const bench_row *row, int64_t *indptr);
/* Bytes of K and V of one token. */
double bench_slot_bytes(const bench_args *args, const bench_kv *kv);
/* Tokens that the sequences of a set really share: a fork that goes on copies a begun page. */
int32_t bench_shared_tokens(int32_t shared_prefix, int32_t context, int32_t page_size);
/* Of the nearer limit. */
double bench_row_share(const bench_row *row);

/* Prints the rows as a table, CSV or JSON (report.c). */
int bench_report(const bench_args *args, const bench_rows *rows);

/* --- a cache to attend over (random_cache.c) --- */

/* One layer, filled with random rows: sets of `batch` sequences. */
typedef struct bench_cache {
    kv8_cache *cache;
    kv8_seq *seqs;
    int32_t num_seqs;
} bench_cache;
/* Close it also when opening fails. An interrupt leaves it unfilled. */
kv8_status bench_cache_open(bench_cache *b, const bench_args *args, const bench_row *row,
                            kv8_threads *threads);
void bench_cache_close(bench_cache *b);

/* --- the plot of shares (share_plot.c) --- */

/* Whether `path` names a format and so many series can be told apart. */
int bench_plot_check(const bench_args *args);
int bench_plot_draw(const bench_args *args, const bench_rows *rows, FILE *file);

#endif
