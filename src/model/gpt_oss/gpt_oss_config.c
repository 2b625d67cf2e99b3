/* gpt_oss_config.c - both forms of config.json into one struct.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss_config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_impl.h"

/* Limits far beyond any gpt-oss that keep every product of sizes below 2^62. */
enum {
    MAX_EXPERTS = 4096,
    MAX_WIDTH = 1 << 20,
    MAX_HEADS = 4096,
    MAX_HEAD_DIM = 576, /* of the cache and the attention kernels */
    MAX_VOCAB = 1 << 24,
    MAX_CONFIG_BYTES = 16 << 20
};

/* Constants of the published implementation that config.json may leave out. */
static const double default_swiglu_alpha = 1.702, default_swiglu_limit = 7.0;
static const double original_rms_norm_eps = 1e-5;
/* <|return|>, <|call|>, <|endoftext|>: what the original form, which names no ids, stops at. */
static const int32_t original_eos[] = {200002, 200012, 199999};

static kv8_status unsupported(const kv8_json_fields *fields, const char *key, const char *value,
                              const char *supported) {
    return kv8_fail(KV8_ERR_UNSUPPORTED, "%s: %s%s is %.80s, supported is %s", fields->file,
                    fields->prefix, key, value, supported);
}

/* --- what both forms share --- */

static kv8_status read_sizes(const kv8_json_fields *f, kv8_gpt_oss_config *c) {
    KV8_TRY(kv8_json_int(f, "num_hidden_layers", 1, KV8_MODEL_MAX_LAYERS, &c->num_layers));
    KV8_TRY(kv8_json_int(f, "hidden_size", 32, MAX_WIDTH, &c->hidden_size));
    KV8_TRY(kv8_json_int(f, "intermediate_size", 32, MAX_WIDTH, &c->intermediate_size));
    KV8_TRY(kv8_json_int(f, "vocab_size", 1, MAX_VOCAB, &c->vocab_size));
    KV8_TRY(kv8_json_int(f, "num_attention_heads", 1, MAX_HEADS, &c->num_qo_heads));
    KV8_TRY(kv8_json_int(f, "num_key_value_heads", 1, MAX_HEADS, &c->num_kv_heads));
    KV8_TRY(kv8_json_int(f, "head_dim", 2, MAX_HEAD_DIM, &c->head_dim));
    KV8_TRY(kv8_json_int(f, "sliding_window", 1, INT32_MAX, &c->sliding_window));
    double limit = default_swiglu_limit, alpha = default_swiglu_alpha;
    KV8_TRY(kv8_json_real_or(f, "swiglu_limit", 1e-37, 1e38, &limit));
    KV8_TRY(kv8_json_real_or(f, "swiglu_alpha", 1e-37, 1e38, &alpha));
    c->swiglu_limit = (float)limit;
    c->swiglu_alpha = (float)alpha;
    return KV8_OK;
}

static kv8_status check_sizes(const char *file, const kv8_gpt_oss_config *c) {
    const struct {
        const char *key;
        int32_t value;
    } packed[] = {{"hidden_size", c->hidden_size}, {"intermediate_size", c->intermediate_size}};
    for (int i = 0; i < 2; i++) {
        if (packed[i].value % KV8_MXFP4_BLOCK != 0)
            return kv8_fail(KV8_ERR_INVALID, "%s: %s is %d, must be a multiple of %d for MXFP4",
                            file, packed[i].key, packed[i].value, (int)KV8_MXFP4_BLOCK);
    }
    if (c->num_qo_heads % c->num_kv_heads != 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "%s: num_attention_heads is %d, must be a multiple of "
                        "num_key_value_heads = %d",
                        file, c->num_qo_heads, c->num_kv_heads);
    if (c->head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "%s: head_dim is %d, must be even for rope", file,
                        c->head_dim);
    if (c->num_experts_per_token > c->num_experts)
        return kv8_fail(KV8_ERR_INVALID, "%s: %d experts per token of only %d experts", file,
                        c->num_experts_per_token, c->num_experts);
    return KV8_OK;
}

/* Even layers slide: how both forms mean it when they list no types. */
static void alternate_layers(kv8_gpt_oss_config *c) {
    for (int32_t i = 0; i < c->num_layers; i++)
        c->window_left[i] = i % 2 == 0 ? c->sliding_window - 1 : -1;
}

/* Also outside YaRN: base 1 or below turns no pair slower than the one before it. */
static kv8_status read_theta(const kv8_json_fields *r, double *theta) {
    KV8_TRY(kv8_json_real(r, "rope_theta", 1, 1e12, theta));
    if (!(*theta > 1))
        return kv8_fail(KV8_ERR_INVALID, "%s: %srope_theta is %g, must be above 1", r->file,
                        r->prefix, *theta);
    return KV8_OK;
}

static kv8_status check_yarn(const kv8_json_fields *f, const kv8_rope_options *rope) {
    if (!(rope->beta_fast > rope->beta_slow))
        return kv8_fail(KV8_ERR_INVALID,
                        "%s: YaRN's fast beta is %g, must be above the slow one, %g", f->file,
                        rope->beta_fast, rope->beta_slow);
    return KV8_OK;
}

/* --- Hugging Face form --- */

static kv8_status check_labels(const kv8_json_fields *f) {
    const char *model_type = "gpt_oss", *activation = "silu";
    KV8_TRY(kv8_json_string_or(f, "model_type", &model_type));
    if (strcmp(model_type, "gpt_oss") != 0)
        return unsupported(f, "model_type", model_type, "gpt_oss");
    const json_t *const architectures = kv8_json_get(f, "architectures");
    if (architectures != NULL) {
        const char *const name = json_string_value(json_array_get(architectures, 0));
        if (name == NULL || strcmp(name, "GptOssForCausalLM") != 0)
            return unsupported(f, "architectures[0]", name == NULL ? "no string" : name,
                               "GptOssForCausalLM");
    }
    KV8_TRY(kv8_json_string_or(f, "hidden_act", &activation));
    if (strcmp(activation, "silu") != 0) return unsupported(f, "hidden_act", activation, "silu");
    bool bias = true, tied = false;
    KV8_TRY(kv8_json_bool_or(f, "attention_bias", &bias));
    if (!bias) return unsupported(f, "attention_bias", "false", "true");
    KV8_TRY(kv8_json_bool_or(f, "tie_word_embeddings", &tied));
    if (tied) return unsupported(f, "tie_word_embeddings", "true", "false");
    return KV8_OK;
}

static kv8_status check_quantization(const kv8_json_fields *f) {
    const json_t *const object = kv8_json_get(f, "quantization_config");
    if (object == NULL) return KV8_OK; /* the tensors themselves say whether they are packed */
    const kv8_json_fields q = {f->file, "quantization_config.", object};
    const char *method = "missing";
    KV8_TRY(kv8_json_string_or(&q, "quant_method", &method));
    if (strcmp(method, "mxfp4") != 0) return unsupported(&q, "quant_method", method, "mxfp4");
    return KV8_OK;
}

static kv8_status read_layer_types(const kv8_json_fields *f, kv8_gpt_oss_config *c) {
    const json_t *const types = kv8_json_get(f, "layer_types");
    alternate_layers(c);
    if (types == NULL) return KV8_OK;
    if (!json_is_array(types) || json_array_size(types) != (size_t)c->num_layers)
        return kv8_fail(KV8_ERR_INVALID,
                        "%s: layer_types lists %zu layers, must be num_hidden_layers = %d", f->file,
                        json_array_size(types), c->num_layers);
    for (int32_t i = 0; i < c->num_layers; i++) {
        const char *const type = json_string_value(json_array_get(types, (size_t)i));
        if (type != NULL && strcmp(type, "sliding_attention") == 0)
            c->window_left[i] = c->sliding_window - 1;
        else if (type != NULL && strcmp(type, "full_attention") == 0)
            c->window_left[i] = -1;
        else
            return kv8_fail(KV8_ERR_UNSUPPORTED,
                            "%s: layer_types[%d] is %.80s, supported are sliding_attention and "
                            "full_attention",
                            f->file, i, type == NULL ? "no string" : type);
    }
    return KV8_OK;
}

/* The tokens before YaRN: in the rope object or beside it, and the same where in both. */
static kv8_status read_original_context(const kv8_json_fields *f, const kv8_json_fields *r,
                                        int32_t *out) {
    int32_t inner = 0, outer = 0;
    KV8_TRY(kv8_json_int_or(r, "original_max_position_embeddings", 1, INT32_MAX, &inner));
    KV8_TRY(kv8_json_int_or(f, "initial_context_length", 1, INT32_MAX, &outer));
    if (inner == 0 && outer == 0)
        return kv8_fail(KV8_ERR_INVALID, "%s: %soriginal_max_position_embeddings is missing",
                        r->file, r->prefix);
    if (inner != 0 && outer != 0 && inner != outer)
        return kv8_fail(KV8_ERR_INVALID,
                        "%s: %soriginal_max_position_embeddings is %d, but "
                        "initial_context_length is %d",
                        r->file, r->prefix, inner, outer);
    *out = inner != 0 ? inner : outer;
    return KV8_OK;
}

static kv8_status read_yarn(const kv8_json_fields *f, const kv8_json_fields *r,
                            kv8_rope_options *rope) {
    static const char *const foreign[] = {"mscale", "mscale_all_dim"};
    for (int i = 0; i < 2; i++) {
        if (kv8_json_get(r, foreign[i]) != NULL)
            return unsupported(r, foreign[i], "given", "attention_factor");
    }
    bool truncate = true; /* transformers' default */
    rope->kind = KV8_ROPE_YARN;
    rope->beta_fast = 32;
    rope->beta_slow = 1;
    KV8_TRY(kv8_json_real(r, "factor", 1, 1e6, &rope->factor));
    KV8_TRY(kv8_json_real_or(r, "beta_fast", 1e-6, 1e6, &rope->beta_fast));
    KV8_TRY(kv8_json_real_or(r, "beta_slow", 1e-6, 1e6, &rope->beta_slow));
    KV8_TRY(kv8_json_real_or(r, "attention_factor", 1e-6, 1e6, &rope->attention_factor));
    KV8_TRY(kv8_json_bool_or(r, "truncate", &truncate));
    rope->truncate = truncate;
    KV8_TRY(read_original_context(f, r, &rope->original_max_position));
    return check_yarn(f, rope);
}

/* rope_parameters (transformers v5, rope_theta inside), or rope_scaling and rope_theta. */
static kv8_status read_rope(const kv8_json_fields *f, kv8_gpt_oss_config *c) {
    const json_t *const newer = kv8_json_get(f, "rope_parameters");
    const json_t *const older = kv8_json_get(f, "rope_scaling");
    if (newer != NULL && older != NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s: rope_parameters and rope_scaling are both given",
                        f->file);
    const json_t *const object = newer != NULL ? newer : older;
    if (object != NULL && !json_is_object(object))
        return kv8_fail(KV8_ERR_INVALID, "%s: %s is no object", f->file,
                        newer != NULL ? "rope_parameters" : "rope_scaling");
    const kv8_json_fields r = {f->file, newer != NULL ? "rope_parameters." : "rope_scaling.",
                               object};
    kv8_rope_options *const rope = &c->rope;
    KV8_TRY(read_theta(newer != NULL ? &r : f, &rope->theta));
    if (object == NULL) return KV8_OK;
    const char *type = NULL;
    KV8_TRY(kv8_json_string_or(&r, "type", &type)); /* the key's name before rope_type */
    KV8_TRY(kv8_json_string_or(&r, "rope_type", &type));
    if (type == NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s: %srope_type is missing, must be yarn or default",
                        f->file, r.prefix);
    if (strcmp(type, "yarn") == 0) return read_yarn(f, &r, rope);
    if (strcmp(type, "default") != 0) return unsupported(&r, "rope_type", type, "yarn or default");
    if (kv8_json_get(&r, "factor") != NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s: %sfactor is given, but rope_type is default", f->file,
                        r.prefix);
    return KV8_OK;
}

static kv8_status read_one_eos(const char *file, const json_t *value, kv8_gpt_oss_config *c) {
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) >= c->vocab_size)
        return kv8_fail(KV8_ERR_INVALID, "%s: eos_token_id %lld is no id from 0 to %d", file,
                        (long long)json_integer_value(value), c->vocab_size - 1);
    if (c->num_eos == KV8_MODEL_MAX_EOS)
        return kv8_fail(KV8_ERR_INVALID, "%s: eos_token_id lists more than %d ids", file,
                        (int)KV8_MODEL_MAX_EOS);
    c->eos[c->num_eos++] = (int32_t)json_integer_value(value);
    return KV8_OK;
}

/* One id or a list; leaves what was there when the key is absent or null. */
static kv8_status read_eos(const kv8_json_fields *f, kv8_gpt_oss_config *c) {
    const json_t *const value = kv8_json_get(f, "eos_token_id");
    if (value == NULL) return KV8_OK;
    c->num_eos = 0;
    if (!json_is_array(value)) return read_one_eos(f->file, value, c);
    for (size_t i = 0; i < json_array_size(value); i++)
        KV8_TRY(read_one_eos(f->file, json_array_get(value, i), c));
    return KV8_OK;
}

static kv8_status read_hugging_face(const kv8_json_fields *f, kv8_gpt_oss_config *c) {
    KV8_TRY(check_labels(f));
    KV8_TRY(check_quantization(f));
    KV8_TRY(read_sizes(f, c));
    KV8_TRY(kv8_json_int(f, "num_local_experts", 1, MAX_EXPERTS, &c->num_experts));
    int32_t per_tok = 0, per_token = 0; /* transformers reads both spellings */
    KV8_TRY(kv8_json_int_or(f, "num_experts_per_tok", 1, MAX_EXPERTS, &per_tok));
    KV8_TRY(kv8_json_int_or(f, "experts_per_token", 1, MAX_EXPERTS, &per_token));
    if (per_tok == 0 && per_token == 0)
        return kv8_fail(KV8_ERR_INVALID, "%s: num_experts_per_tok is missing", f->file);
    if (per_tok != 0 && per_token != 0 && per_tok != per_token)
        return kv8_fail(KV8_ERR_INVALID,
                        "%s: num_experts_per_tok is %d, but experts_per_token is %d", f->file,
                        per_tok, per_token);
    c->num_experts_per_token = per_tok != 0 ? per_tok : per_token;
    KV8_TRY(kv8_json_int(f, "max_position_embeddings", 1, INT32_MAX, &c->max_seq_len));
    double eps = 0;
    KV8_TRY(kv8_json_real(f, "rms_norm_eps", 1e-37, 1, &eps));
    c->rms_norm_eps = (float)eps;
    KV8_TRY(read_layer_types(f, c));
    KV8_TRY(read_rope(f, c));
    return read_eos(f, c);
}

/* --- original form --- */

static kv8_status read_original(const kv8_json_fields *f, kv8_gpt_oss_config *c) {
    KV8_TRY(read_sizes(f, c));
    KV8_TRY(kv8_json_int(f, "num_experts", 1, MAX_EXPERTS, &c->num_experts));
    KV8_TRY(kv8_json_int(f, "experts_per_token", 1, MAX_EXPERTS, &c->num_experts_per_token));
    kv8_rope_options *const rope = &c->rope;
    KV8_TRY(read_theta(f, &rope->theta));
    double factor = 0;
    int32_t original_context = 0;
    KV8_TRY(kv8_json_real(f, "rope_scaling_factor", 1, 1e6, &factor));
    KV8_TRY(kv8_json_int(f, "initial_context_length", 1, INT32_MAX, &original_context));
    if (factor > 1) { /* the published code leaves YaRN out at factor 1 */
        rope->kind = KV8_ROPE_YARN;
        rope->factor = factor;
        rope->original_max_position = original_context;
        KV8_TRY(kv8_json_real(f, "rope_ntk_beta", 1e-6, 1e6, &rope->beta_fast));
        KV8_TRY(kv8_json_real(f, "rope_ntk_alpha", 1e-6, 1e6, &rope->beta_slow));
        KV8_TRY(check_yarn(f, rope));
    }
    const double longest = original_context * factor;
    c->max_seq_len = longest < INT32_MAX ? (int32_t)longest : INT32_MAX;
    c->rms_norm_eps = (float)original_rms_norm_eps;
    alternate_layers(c);
    for (size_t i = 0; i < sizeof original_eos / sizeof original_eos[0]; i++) {
        if (original_eos[i] < c->vocab_size) c->eos[c->num_eos++] = original_eos[i];
    }
    return KV8_OK;
}

/* --- entry points --- */

kv8_status kv8_gpt_oss_config_parse(kv8_gpt_oss_config *out, const char *file, const char *text,
                                    size_t size) {
    json_t *root = NULL;
    KV8_TRY(kv8_json_parse_object(&root, file, text, size));
    const kv8_json_fields f = {file, "", root};
    kv8_gpt_oss_config c = {.rope = KV8_ROPE_OPTIONS_INIT};
    kv8_status status;
    if (kv8_json_get(&f, "model_type") != NULL || kv8_json_get(&f, "architectures") != NULL)
        status = read_hugging_face(&f, &c);
    else if (kv8_json_get(&f, "num_experts") != NULL)
        status = read_original(&f, &c);
    else
        status = kv8_fail(KV8_ERR_INVALID,
                          "%s: neither the Hugging Face form (no model_type) nor the original form "
                          "(no num_experts) of a gpt-oss config",
                          file);
    if (status == KV8_OK) status = check_sizes(file, &c);
    json_decref(root);
    KV8_TRY(status);
    c.rope.head_dim = c.head_dim;
    *out = c;
    return KV8_OK;
}

kv8_status kv8_gpt_oss_generation_parse(kv8_gpt_oss_config *config, const char *file,
                                        const char *text, size_t size) {
    json_t *root = NULL;
    KV8_TRY(kv8_json_parse_object(&root, file, text, size));
    const kv8_json_fields f = {file, "", root};
    const kv8_status status = read_eos(&f, config);
    json_decref(root);
    return status;
}

typedef kv8_status (*parse_function)(kv8_gpt_oss_config *config, const char *file, const char *text,
                                     size_t size);

static kv8_status read_file(kv8_gpt_oss_config *config, const char *directory, const char *name,
                            parse_function parse) {
    char *const path = kv8_path_join(directory, name);
    if (path == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for its path", name);
    char *text = NULL;
    size_t size = 0;
    kv8_status status = kv8_file_read(path, MAX_CONFIG_BYTES, &text, &size);
    if (status == KV8_OK) {
        status = parse(config, path, text, size);
        kv8_release(NULL, text, size + 1, 1);
    }
    free(path);
    return status;
}

kv8_status kv8_gpt_oss_config_read(kv8_gpt_oss_config *out, const char *directory) {
    kv8_gpt_oss_config config = {0};
    KV8_TRY(read_file(&config, directory, "config.json", kv8_gpt_oss_config_parse));
    const kv8_status status =
        read_file(&config, directory, "generation_config.json", kv8_gpt_oss_generation_parse);
    if (status != KV8_OK && status != KV8_ERR_NOT_FOUND) return status;
    *out = config;
    return KV8_OK;
}
