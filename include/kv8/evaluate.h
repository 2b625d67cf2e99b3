/* kv8/evaluate.h - what storing the KV cache in a format does to a model: loss, divergence,
 * agreement, greedy match, recall.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_EVALUATE_H
#define KV8_EVALUATE_H

#include <kv8/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One way to store the cache: dtypes by layer kind, for K and V apart, with optional scales. */
typedef struct kv8_kv_setting {
    char name[64]; /* as the user wrote it */
    kv8_dtype full_k, full_v, sliding_k, sliding_v;
} kv8_kv_setting;

/* Parses "e4m3" (all layers), "e4m3@full" or "e4m3@sliding" (the other kind stays bf16),
 * "k=int8,v=e4m3" (and "k=int8,v=e4m3@full"). */
KV8_API kv8_status kv8_kv_setting_parse(const char *text, kv8_kv_setting *setting_out);
/* Splits a list: "bf16,e4m3,k=int8,v=e4m3@full" has three settings. Writes at most capacity. */
KV8_API kv8_status kv8_kv_setting_parse_list(const char *text, kv8_kv_setting *settings_out,
                                             int32_t capacity, int32_t *num_out);

/* Natural-log loss of token t+1 given tokens 0..t: nll_out[num_tokens-1]. */
KV8_API kv8_status kv8_evaluate_score(kv8_model *model, const kv8_kv_setting *setting,
                                      const int32_t *token_ids, int32_t num_tokens, float *nll_out);

/* Progress of long work: `done` of `total` units; return non-zero to stop (the call then returns
 * KV8_ERR_INVALID, "interrupted"). */
typedef int (*kv8_progress)(void *cookie, const char *what, uint64_t done, uint64_t total);

typedef struct kv8_compare_options {
    size_t struct_size;
    const kv8_tokenizer *tokenizer; /* needed for greedy prompts and recall */
    const int32_t *token_ids;       /* the text's token stream */
    int64_t num_tokens;
    int32_t num_windows, window_len; /* the first num_windows consecutive windows */
    const float *const *k_scale;     /* [num_layers] arrays of num_kv_heads, or NULL = 1; used by */
    const float *const *v_scale;     /* the 8-bit float dtypes only */
    int32_t num_greedy;              /* prompts, taken from the text; 0 = none */
    int32_t greedy_len;
    int32_t num_recall; /* tables of codes; 0 = none */
    kv8_progress progress;
    void *progress_cookie;
} kv8_compare_options;
#define KV8_COMPARE_OPTIONS_INIT \
    { sizeof(kv8_compare_options) }

typedef struct kv8_compare_row {
    kv8_kv_setting setting;
    double kl;           /* mean KL(f32 KV || this), nats per token */
    double top1;         /* teacher-forced agreement of the argmax with f32 KV */
    double loss;         /* mean nats per token */
    double dloss;        /* loss - loss with f32 KV */
    double greedy_match; /* mean share of greedy_len tokens before the first difference; NaN = not
                            run */
    double recall;       /* share of codes looked up right; NaN = not run */
    double bytes_per_token;     /* of the cache, all layers */
    double tokens_per_s;        /* prefill and scoring of the windows */
    double decode_tokens_per_s; /* greedy decoding; NaN = not run */
} kv8_compare_row;

/* Runs every setting beside f32 KV on the same tokens. rows_out[num_settings+1]: row 0 is f32. */
KV8_API kv8_status kv8_evaluate_compare(kv8_model *model, const kv8_kv_setting *settings,
                                        int32_t num_settings, const kv8_compare_options *options,
                                        kv8_compare_row *rows_out);

#ifdef __cplusplus
}
#endif
#endif
