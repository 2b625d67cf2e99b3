/* serve_args.h - the command line of kv8 serve: its own words, and vLLM's, which are taken where
 * they mean the same here and refused by name where they do not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVE_ARGS_H
#define KV8_SERVE_ARGS_H

#include "cli.h"

enum { SERVE_MAX_NAMES = 16, SERVE_MAX_KEYS = 64 };

typedef struct serve_args {
    const char *model, *kv, *scales, *host, *device, *date, *log, *snapshot_dir;
    kv8_kv_setting setting;
    int32_t port, threads, http_threads;
    int32_t max_model_len, max_num_seqs, step_tokens, max_waiting; /* 0 = not given */
    float max_waiting_seconds;
    uint64_t kv_bytes;             /* of --kv-memory; 0 = by fraction */
    double kv_fraction, gpu_share; /* gpu_share: of all its memory; 0 = not given */
    bool harmony, share_prefixes, eager, batch_invariant;
    const char *calibrate; /* NULL = not asked for */
    int32_t calibrate_warmup, calibrate_tokens;

    const char *names[SERVE_MAX_NAMES];
    size_t num_names;
    const char *keys[SERVE_MAX_KEYS];
    size_t num_keys;
    char *names_text, *keys_text; /* what the lists point into */
} serve_args;

/* Returns -1 to go on, or the exit status. */
int serve_args_parse(serve_args *args, int argc, char **argv);
void serve_args_free(serve_args *args);

#endif
