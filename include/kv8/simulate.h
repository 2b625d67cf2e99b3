/* kv8/simulate.h - what a server would do under load: the engine's own scheduler over pages that
 * hold nothing, on a clock that moves by what a step would take on some machine, present or not.
 *
 * What the simulation leaves out: prefixes that requests share, windows (every key is read and
 * kept), and all time outside steps.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SIMULATE_H
#define KV8_SIMULATE_H

#include <kv8/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- the time of a step --- */

enum { KV8_STEP_SIZES = 16 };

/* ns[i] for a step of sizes[i] tokens, in proportion between two sizes, as the first before it, and
 * behind the last as between the last two; and for each request of the step that decodes, tokens it
 * then has * decode_key_ns, and for each that reads its prompt, pairs of a new token and one that
 * it sees (itself too) * prefill_key_ns. Times are >= 0 and finite. */
typedef struct kv8_step_time {
    size_t struct_size;
    int32_t num_sizes;             /* 1 to KV8_STEP_SIZES */
    int32_t sizes[KV8_STEP_SIZES]; /* rising, from 1 token on */
    double ns[KV8_STEP_SIZES];
    double decode_key_ns, prefill_key_ns;
} kv8_step_time;
#define KV8_STEP_TIME_INIT KV8_SIZED(kv8_step_time)

/* A measurement as kv8 bench model makes it: one sequence takes num_prompt tokens in steps of at
 * most `chunk`, or num_seqs together num_gen tokens each, one by one, after `depth` others each. */
typedef struct kv8_speed_row {
    size_t struct_size;
    int32_t num_prompt, num_gen; /* one of them is 0 */
    int32_t depth, chunk;
    double ns;        /* of all its steps */
    int32_t num_seqs; /* 0 = 1; 1 with a prompt */
} kv8_speed_row;
#define KV8_SPEED_ROW_INIT KV8_SIZED(kv8_speed_row)

/* The terms, none negative, that are nearest to the rows in relative squares. KV8_ERR_INVALID when
 * the rows do not tell the terms apart: it takes decode at two depths and prompts of two lengths or
 * depths; or have steps of more than KV8_STEP_SIZES sizes. The array steps by its first row's
 * struct_size. */
KV8_API KV8_NODISCARD kv8_status kv8_step_time_fit(const kv8_speed_row *rows, int32_t num_rows,
                                                   kv8_step_time *time_out);

/* --- the simulation --- */

typedef struct kv8_simulation_options {
    size_t struct_size;
    const kv8_allocator *allocator;
    const kv8_step_time *time;
    double requests_per_s; /* arrive at random (Poisson); 0 = all at the beginning; else at least
                            * num_requests / 1e8: all have come within three years */
    int32_t num_requests, prompt_len, max_tokens; /* >= 1; every request generates max_tokens */
    int32_t max_requests;                         /* run at once; 0 = 64 */
    int32_t step_tokens;                          /* most of a step; 0 = 2048 */
    int64_t pool_tokens;   /* of KV cache, in pages of 16; 0 = enough for max_requests */
    uint64_t seed;         /* of the arrivals */
    int32_t paced;         /* as kv8_engine_options has it */
    kv8_progress progress; /* of requests that have ended; NULL = none */
    void *progress_cookie;
} kv8_simulation_options;
#define KV8_SIMULATION_OPTIONS_INIT KV8_SIZED(kv8_simulation_options)

/* Milliseconds; half of the values are at most p50, 99 of a hundred at most p99. */
typedef struct kv8_spread {
    double mean, p50, p99;
} kv8_spread;

typedef struct kv8_simulation {
    size_t struct_size;
    double seconds;                      /* from the first arrival to the last token */
    double requests_per_s, tokens_per_s; /* ended, generated, over those seconds */
    kv8_spread ttft;                     /* from arrival to a request's first token */
    kv8_spread itl;      /* from each token to the next of its request; 0 with max_tokens 1 */
    double mean_running; /* requests of a step, over the time of steps */
    uint64_t num_steps, num_preemptions;
} kv8_simulation;
#define KV8_SIMULATION_INIT KV8_SIZED(kv8_simulation)

/* Equal options give equal results. *simulation_out begins as KV8_SIMULATION_INIT. */
KV8_API KV8_NODISCARD kv8_status kv8_simulate(const kv8_simulation_options *options,
                                              kv8_simulation *simulation_out);

#ifdef __cplusplus
}
#endif
#endif
