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
    kv8_dtype scale_dtype; /* as in kv8_kv_cache_options */
} kv8_compare_options;
#define KV8_COMPARE_OPTIONS_INIT KV8_SIZED(kv8_compare_options)

/* Errors are standard errors of the means beside them: of positions for kl, top1 and dloss (paired
 * with f32's), of prompts for greedy_match, of questions for recall. Positions of a window are not
 * independent and KL is heavy-tailed (one position of hundreds may make a quarter of the mean), so
 * kl_error is a lower bound. Shares of n are taken as (hits + 1) of (n + 2), so that a share of 1
 * has an error too. NaN where the mean is, and for one prompt. */
typedef struct kv8_compare_row {
    size_t struct_size;
    char kv[64];  /* the setting's name */
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
#define KV8_COMPARE_ROW_INIT KV8_SIZED(kv8_compare_row)

/* Runs every setting beside f32 KV on the same tokens. rows_out[num_settings+1], of which the first
 * names the size of all: row 0 is f32.
 * Windows run in lock step, chunk by chunk, so that memory holds the logits of one chunk only. */
KV8_API KV8_NODISCARD kv8_status kv8_evaluate_compare(kv8_model *model,
                                                      const kv8_kv_setting *settings,
                                                      int32_t num_settings,
                                                      const kv8_compare_options *options,
                                                      kv8_compare_row *rows_out);

/* --- observing a text --- */

typedef struct kv8_observe_text_options {
    size_t struct_size;
    const int32_t *token_ids;
    int64_t num_tokens;
    int32_t window_len;      /* each window starts from an empty f32 cache; the last may be short */
    int32_t rank, num_ranks; /* this call runs windows rank, rank + num_ranks, ...; 0 ranks = all */
    kv8_progress progress;
    void *progress_cookie;
} kv8_observe_text_options;
#define KV8_OBSERVE_TEXT_OPTIONS_INIT KV8_SIZED(kv8_observe_text_options)

/* Runs the text past the model's layers with `observer` on, and leaves it stopped and taken away.
 */
KV8_API KV8_NODISCARD kv8_status kv8_evaluate_observe(kv8_model *model, kv8_observer *observer,
                                                      const kv8_observe_text_options *options);

/* --- choosing what each layer stores --- */

typedef enum kv8_budget_kind {
    KV8_BUDGET_KL = 0, /* the fewest bytes with at most this KL from f32 KV, nats per token */
    KV8_BUDGET_TOP1,   /* the fewest bytes with at least this top-1 agreement */
    KV8_BUDGET_BYTES   /* the least KL with at most these bytes per token */
} kv8_budget_kind;

typedef struct kv8_choose_options {
    size_t struct_size;
    const int32_t *token_ids; /* text to measure single damages on */
    int64_t num_tokens;
    const int32_t *held_ids; /* text to verify on: another one */
    int64_t num_held;
    int32_t window_len;
    const float *const *k_scale; /* as in kv8_kv_cache_options */
    const float *const *v_scale;
    kv8_budget_kind budget_kind;
    double budget;
    int32_t num_points; /* mixes of the frontier to measure; 0 = 12, at least 3 */
    kv8_progress progress;
    void *progress_cookie;
} kv8_choose_options;
#define KV8_CHOOSE_OPTIONS_INIT KV8_SIZED(kv8_choose_options)

/* A mix: a format of bf16, int8 and e4m3 for K and for V of every layer. Predicted figures are
 * bf16's and the sum of what each format of the mix does alone (for top-1: the root of the sum of
 * squares), of the text; measured ones are of the held text, their errors standard errors over its
 * windows (NaN for one window). */
typedef struct kv8_mix {
    size_t struct_size;
    double bytes; /* per token, all layers */
    double predicted_kl, predicted_top1;
    double kl, kl_error, top1, top1_error;
    const kv8_dtype *layers; /* [num_layers, 2]; borrowed from the choice */
} kv8_mix;
#define KV8_MIX_INIT KV8_SIZED(kv8_mix)

typedef struct kv8_choice kv8_choice;

/* Measures every layer's K and V in int8 and e4m3 alone, beside bf16; finds the mixes that no other
 * predicted mix beats in both bytes and damage; measures some of these, from all-bf16 to the
 * smallest, on the held text; and chooses. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_evaluate_choose(kv8_choice **out, kv8_model *model,
                                                     const kv8_choose_options *options);
KV8_API void kv8_choice_destroy(kv8_choice *choice);
/* The measured mixes, most bytes (bf16 everywhere: the noise floor) first. */
KV8_API int32_t kv8_choice_num_mixes(const kv8_choice *choice);
KV8_API KV8_NODISCARD kv8_status kv8_choice_get_mix(const kv8_choice *choice, int32_t idx,
                                                    kv8_mix *mix_out);
/* Index of the chosen mix: that with the fewest bytes which the prediction and the held text both
 * find within the budget (for bytes: the least predicted damage). -1 when none is. */
KV8_API int32_t kv8_choice_chosen(const kv8_choice *choice);
/* KL of one layer's K (0) or V (1) alone in `dtype` (INT8 or E4M3), all else bf16; NaN for others.
 */
KV8_API double kv8_choice_damage(const kv8_choice *choice, int32_t layer, int kv, kv8_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
