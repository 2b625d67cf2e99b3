/* kv8/evaluate.h - what storing the KV cache in a format does to a model: loss, divergence,
 * agreement, greedy match, recall.
 *
 * Everything here runs on the model's threads and in steps as large as the model was opened for;
 * recall steps 8 requests at a time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_EVALUATE_H
#define KV8_EVALUATE_H

#include <kv8/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One way to store the cache: dtypes by layer kind, for K and V apart. */
typedef struct kv8_kv_setting {
    char name[64]; /* as the user wrote it */
    kv8_dtype full_k, full_v, sliding_k, sliding_v;
} kv8_kv_setting;

/* Parses "e4m3" (all layers), "e4m3@full" or "e4m3@sliding" (the other kind stays bf16),
 * "k=int8,v=e4m3" (and "k=int8,v=e4m3@full"). */
KV8_API kv8_status kv8_kv_setting_parse(const char *text, kv8_kv_setting *setting_out);
/* Splits a list: "bf16,e4m3,k=int8,v=e4m3@full" has three settings. More than capacity, none, or
 * an empty one is KV8_ERR_INVALID. */
KV8_API kv8_status kv8_kv_setting_parse_list(const char *text, kv8_kv_setting *settings_out,
                                             int32_t capacity, int32_t *num_out);

typedef struct kv8_kv_cache_options {
    size_t struct_size;
    int32_t max_seqs;    /* 0 = 1 */
    int32_t max_seq_len; /* tokens of one sequence, >= 1 */
    int64_t num_tokens;  /* of all sequences together; 0 = max_seqs * max_seq_len */
    int32_t step_tokens; /* most tokens one sequence takes in a step; 0 = max_seq_len */
    /* [num_layers] arrays of num_kv_heads, NULL = 1: e4m3 scales (absmax / 448), used by the 8-bit
     * float dtypes only. e4m3fnuz, whose codes are worth half, takes them twice. */
    const float *const *k_scale;
    const float *const *v_scale;
} kv8_kv_cache_options;
#define KV8_KV_CACHE_OPTIONS_INIT \
    { sizeof(kv8_kv_cache_options) }

/* A cache for this model that stores as the setting says. *out is NULL on failure. */
KV8_API kv8_status kv8_kv_setting_cache_create(kv8_cache **out, const kv8_model *model,
                                               const kv8_kv_setting *setting,
                                               const kv8_kv_cache_options *options);

/* Progress of long work: `done` of `total` units; return non-zero to stop (the call then returns
 * KV8_ERR_INVALID, "interrupted"). A unit is about the work of one prefilled token. */
typedef int (*kv8_progress)(void *cookie, const char *what, uint64_t done, uint64_t total);

typedef struct kv8_score_options {
    size_t struct_size;
    kv8_progress progress;
    void *progress_cookie;
} kv8_score_options;
#define KV8_SCORE_OPTIONS_INIT \
    { sizeof(kv8_score_options) }

/* Natural-log loss of token t+1 given tokens 0..t: nll_out[num_tokens-1], num_tokens >= 2. Ids and
 * length are checked before the first step. */
KV8_API kv8_status kv8_evaluate_score(kv8_model *model, const kv8_kv_setting *setting,
                                      const int32_t *token_ids, int32_t num_tokens,
                                      const kv8_score_options *options, float *nll_out);

typedef struct kv8_compare_options {
    size_t struct_size;
    const kv8_tokenizer *tokenizer; /* for recall; NULL = no recall */
    const int32_t *token_ids;       /* the text's token stream */
    int64_t num_tokens;
    int32_t num_windows, window_len; /* the first num_windows consecutive windows */
    const float *const *k_scale;     /* as in kv8_kv_cache_options */
    const float *const *v_scale;
    int32_t num_greedy; /* prompts of up to 512 tokens, spread over the text; 0 = none */
    int32_t greedy_len; /* tokens to continue each prompt by */
    int32_t num_recall; /* tables of 24 codes, 8 questions each; 0 = none. Models whose tokenizer
                         * lacks harmony's control tokens are not asked. */
    kv8_progress progress;
    void *progress_cookie;
} kv8_compare_options;
#define KV8_COMPARE_OPTIONS_INIT KV8_SIZED(kv8_compare_options)

typedef struct kv8_compare_row {
    kv8_kv_setting setting;
    double kl;           /* mean KL(f32 KV || this) over all positions, nats per token */
    double top1;         /* teacher-forced agreement of the argmax with f32 KV, all positions */
    double loss;         /* mean nats per token, positions whose next token is in the window */
    double dloss;        /* loss - loss with f32 KV */
    double greedy_match; /* mean share of greedy_len tokens before the first difference; NaN = not
                            run. Control tokens do not end a continuation. */
    double recall;       /* share of codes looked up right; NaN = not run */
    double bytes_per_token;     /* of the cache, all layers */
    double tokens_per_s;        /* prefill of the windows, logits of every position included */
    double decode_tokens_per_s; /* greedy decoding, one request; NaN = not run */
} kv8_compare_row;

/* Runs every setting beside f32 KV on the same tokens. rows_out[num_settings+1]: row 0 is f32.
 * Windows run in lock step, chunk by chunk, so that memory holds the logits of one chunk only. */
KV8_API kv8_status kv8_evaluate_compare(kv8_model *model, const kv8_kv_setting *settings,
                                        int32_t num_settings, const kv8_compare_options *options,
                                        kv8_compare_row *rows_out);

#ifdef __cplusplus
}
#endif
#endif
