/* kv8/engine.h - what stands between a model and a request: how a cache stores, and the draw of the
 * next token.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ENGINE_H
#define KV8_ENGINE_H

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
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_parse(const char *text,
                                                      kv8_kv_setting *setting_out);
/* Splits a list: "bf16,e4m3,k=int8,v=e4m3@full" has three settings. More than capacity, none, or
 * an empty one is KV8_ERR_INVALID. */
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_parse_list(const char *text,
                                                           kv8_kv_setting *settings_out,
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
#define KV8_KV_CACHE_OPTIONS_INIT KV8_SIZED(kv8_kv_cache_options)

/* A cache for this model that stores as the setting says. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_cache_create(kv8_cache **out,
                                                             const kv8_model *model,
                                                             const kv8_kv_setting *setting,
                                                             const kv8_kv_cache_options *options);

/* Draws from softmax(logits / temperature); temperature 0 is argmax (lowest id on ties).
 * *rng_state is any 64-bit seed, advanced by the call. */
KV8_API int32_t kv8_sample(const float *logits, int32_t vocab_size, float temperature,
                           uint64_t *rng_state);

#ifdef __cplusplus
}
#endif
#endif
