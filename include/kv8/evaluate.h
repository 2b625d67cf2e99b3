/* kv8/evaluate.h - what storing the KV cache in a format does to a model: loss, divergence,
 * agreement, greedy match, recall.
 *
 * Everything here runs on the model's threads and in steps as large as the model was opened for;
 * recall steps 8 requests at a time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_EVALUATE_H
#define KV8_EVALUATE_H

#include <kv8/engine.h>
#include <kv8/tokenizer.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Progress of long work: `done` of `total` units; return non-zero to stop (the call then returns
 * KV8_ERR_CANCELLED). A unit is about the work of one prefilled token. */
typedef int (*kv8_progress)(void *cookie, const char *what, uint64_t done, uint64_t total);

typedef struct kv8_score_options {
    size_t struct_size;
    kv8_progress progress;
    void *progress_cookie;
} kv8_score_options;
#define KV8_SCORE_OPTIONS_INIT KV8_SIZED(kv8_score_options)

/* Natural-log loss of token t+1 given tokens 0..t: nll_out[num_tokens-1], num_tokens >= 2. Ids and
 * length are checked before the first step. Logits that are not finite are KV8_ERR_INVALID, here
 * and below; the message names the position. */
KV8_API KV8_NODISCARD kv8_status kv8_evaluate_score(kv8_model *model, const kv8_kv_setting *setting,
                                                    const int32_t *token_ids, int32_t num_tokens,
                                                    const kv8_score_options *options,
                                                    float *nll_out);

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

/* Errors are standard errors of the means beside them: of positions for kl, top1 and dloss (paired
 * with f32's), of prompts for greedy_match, of questions for recall. Positions of a window are not
 * independent and KL is heavy-tailed (one position of hundreds may make a quarter of the mean), so
 * kl_error is a lower bound. Shares of n are taken as (hits + 1) of (n + 2), so that a share of 1
 * has an error too. NaN where the mean is, and for one prompt. */
typedef struct kv8_compare_row {
    kv8_kv_setting setting;
    double kl;    /* mean KL(f32 KV || this) over all positions, nats per token */
    double top1;  /* teacher-forced agreement of the argmax with f32 KV, all positions */
    double loss;  /* mean nats per token, positions whose next token is in the window */
    double dloss; /* loss - loss with f32 KV */
    double kl_error, top1_error, dloss_error, greedy_error, recall_error;
    double greedy_match; /* mean share of greedy_len tokens before the first difference; NaN = not
                            run. Control tokens do not end a continuation. */
    double recall;       /* share of codes looked up right; NaN = not run */
    double bytes_per_token;     /* of the cache, all layers */
    double tokens_per_s;        /* prefill of the windows, logits of every position included */
    double decode_tokens_per_s; /* greedy decoding, one request; NaN = not run */
} kv8_compare_row;

/* Runs every setting beside f32 KV on the same tokens. rows_out[num_settings+1]: row 0 is f32.
 * Windows run in lock step, chunk by chunk, so that memory holds the logits of one chunk only. */
KV8_API KV8_NODISCARD kv8_status kv8_evaluate_compare(kv8_model *model,
                                                      const kv8_kv_setting *settings,
                                                      int32_t num_settings,
                                                      const kv8_compare_options *options,
                                                      kv8_compare_row *rows_out);

#ifdef __cplusplus
}
#endif
#endif
