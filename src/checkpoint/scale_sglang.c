/* scale_sglang.c - the quantization-param JSON of SGLang and earlier vLLM:
 *
 *   {"model_type": "gpt_oss", "kv_cache": {"dtype": "float8_e4m3fn",
 *     "scaling_factor": {"<rank>": {"<layer>": scale for K and V}}}}
 *
 * A rank's number stands for all heads of the rank.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "scale_rows.h"

enum { MAX_TYPE = 128 };

/* "GptOssForCausalLM" -> "gpt_oss": how Transformers names the model of an architecture. */
static void model_type_of(const char *architecture, char *out) {
    const char *const end = strstr(architecture, "For");
    const size_t length = end == NULL ? strlen(architecture) : (size_t)(end - architecture);
    size_t used = 0;
    for (size_t i = 0; i < length && used + 2 < MAX_TYPE; i++) {
        if (i > 0 && isupper((unsigned char)architecture[i])) out[used++] = '_';
        out[used++] = (char)tolower((unsigned char)architecture[i]);
    }
    out[used] = '\0';
}

static kv8_status check_words(const json_t *root, const json_t *cache,
                              const kv8_scale_expect *expect) {
    const char *const type = json_string_value(json_object_get(root, "model_type"));
    const char *const dtype = json_string_value(json_object_get(cache, "dtype"));
    if (type == NULL) return kv8_fail(KV8_ERR_CORRUPT, "key \"model_type\" is no string");
    if (expect->architecture != NULL) {
        char wanted[MAX_TYPE];
        model_type_of(expect->architecture, wanted);
        if (strcmp(type, wanted) != 0)
            return kv8_fail(KV8_ERR_INVALID, "\"model_type\" is \"%.80s\", the model is \"%s\"",
                            type, wanted);
    }
    if (dtype == NULL || strcmp(dtype, "float8_e4m3fn") != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "\"kv_cache\".\"dtype\" is \"%.80s\", known is \"float8_e4m3fn\"",
                        dtype == NULL ? "?" : dtype);
    return KV8_OK;
}

static kv8_status get_factor(const json_t *factors, int32_t rank, int32_t layer, float *out) {
    char rank_key[16], layer_key[16];
    snprintf(rank_key, sizeof rank_key, "%d", rank);
    snprintf(layer_key, sizeof layer_key, "%d", layer);
    const json_t *const value = json_object_get(json_object_get(factors, rank_key), layer_key);
    if (value == NULL)
        return kv8_fail(KV8_ERR_CORRUPT, "\"scaling_factor\".\"%s\".\"%s\" is missing", rank_key,
                        layer_key);
    *out = json_is_number(value) ? (float)json_number_value(value) : NAN;
    if (!(*out > 0) || !isfinite(*out))
        return kv8_fail(KV8_ERR_INVALID,
                        "\"scaling_factor\".\"%s\".\"%s\" is %g, must be a finite f32 number above "
                        "0",
                        rank_key, layer_key, (double)*out);
    return KV8_OK;
}

/* The factor of every rank, to all heads of it; copies of a head must agree. */
static kv8_status spread(const json_t *factors, int32_t num_ranks, const kv8_scale_data *data,
                         float *scales) {
    const int32_t heads = data->num_kv_heads, num = kv8_scale_num_heads(heads, num_ranks);
    for (int32_t layer = 0; layer < data->num_layers; layer++) {
        float *const row = scales + (size_t)layer * 2 * (size_t)heads;
        for (int32_t rank = 0; rank < num_ranks; rank++) {
            const int32_t first = kv8_scale_first_head(heads, num_ranks, rank);
            float factor = 0;
            KV8_TRY(get_factor(factors, rank, layer, &factor));
            for (int32_t head = first; head < first + num; head++) {
                if (row[head] != 0 && row[head] != factor)
                    return kv8_fail(KV8_ERR_INVALID,
                                    "\"scaling_factor\".\"%d\".\"%d\" is %g, another copy of head "
                                    "%d has %g",
                                    rank, layer, (double)factor, head, (double)row[head]);
                row[head] = row[heads + head] = factor;
            }
        }
    }
    return KV8_OK;
}

kv8_status kv8_scale_sglang_read(kv8_scale_file **out, const json_t *root,
                                 const kv8_scale_expect *expect) {
    const json_t *const cache = json_object_get(root, "kv_cache");
    const json_t *const factors = json_object_get(cache, "scaling_factor");
    KV8_TRY(check_words(root, cache, expect));
    const size_t num_ranks = json_object_size(factors);
    const size_t num_layers = json_object_size(json_object_get(factors, "0"));
    if (num_ranks < 1 || num_ranks > 1 << 16 || num_layers < 1 || num_layers > 1 << 16)
        return kv8_fail(KV8_ERR_CORRUPT, "\"scaling_factor\" has %zu ranks, rank 0 %zu layers",
                        num_ranks, num_layers);
    const char *rank_key;
    json_t *rank_factors;
    json_object_foreach((json_t *)(uintptr_t)factors, rank_key, rank_factors) {
        if (json_object_size(rank_factors) != num_layers)
            return kv8_fail(KV8_ERR_CORRUPT,
                            "\"scaling_factor\".\"%.20s\" has %zu layers, \"0\" %zu", rank_key,
                            json_object_size(rank_factors), num_layers);
    }
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    data.format = KV8_SCALES_SGLANG;
    data.architecture = expect->architecture;
    data.num_layers = (int32_t)num_layers;
    data.num_kv_heads = expect->num_kv_heads != 0 ? expect->num_kv_heads : (int32_t)num_ranks;
    data.per_tensor = 0;
    if (data.num_kv_heads % (int32_t)num_ranks != 0 && (int32_t)num_ranks % data.num_kv_heads != 0)
        return kv8_fail(KV8_ERR_INVALID, "%zu ranks for %d heads: neither divides the other",
                        num_ranks, data.num_kv_heads);
    float *const scales = calloc(num_layers * 2 * (size_t)data.num_kv_heads, sizeof *scales);
    if (scales == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "no memory for scales");
    data.scales = scales;
    kv8_status status = spread(factors, (int32_t)num_ranks, &data, scales);
    if (status == KV8_OK) status = kv8_scale_file_create(out, &data);
    free(scales);
    return status;
}

json_t *kv8_scale_sglang_dump(const kv8_scale_file *file, int32_t num_ranks) {
    const int32_t heads = file->data.num_kv_heads, num = kv8_scale_num_heads(heads, num_ranks);
    json_t *const factors = json_object();
    for (int32_t rank = 0; rank < num_ranks; rank++) {
        const int32_t first = kv8_scale_first_head(heads, num_ranks, rank);
        json_t *const layers = json_object();
        char key[16];
        for (int32_t layer = 0; layer < file->data.num_layers; layer++) {
            float largest = 0;
            for (int32_t head = first; head < first + num; head++) {
                largest = fmaxf(largest, kv8_scale_file_k(file, layer)[head]);
                largest = fmaxf(largest, kv8_scale_file_v(file, layer)[head]);
            }
            snprintf(key, sizeof key, "%d", layer);
            json_object_set_new(layers, key, json_real((double)largest));
        }
        snprintf(key, sizeof key, "%d", rank);
        json_object_set_new(factors, key, layers);
    }
    char type[MAX_TYPE] = "unknown";
    if (file->data.architecture != NULL) model_type_of(file->data.architecture, type);
    return json_pack("{s:s, s:{s:s, s:o}}", "model_type", type, "kv_cache", "dtype",
                     "float8_e4m3fn", "scaling_factor", factors);
}
