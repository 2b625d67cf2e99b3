/* kv8/scale_file.h - scale files: the K and V scales of a model by layer and head, how they were
 * found, and which format each layer is best stored in. value = code * scale.
 *
 * kv8's own file is JSON: LightLLM's kv_cache_calib.json, whose nine keys it holds unchanged
 * (version, architectures, quant_type, qmin, qmax, num_layers, num_head, scales_shape, scales), and
 * more keys that LightLLM skips. A row of "scales" is a layer: K's heads, then V's, or [k, v] per
 * tensor. num_head is the model's number of KV heads, whatever ran it.
 *
 * Also read and written: SGLang's and vLLM's quantization-param JSON, and safetensors with the
 * names of compressed-tensors or ModelOpt, alone or in a checkpoint. Whatever a file says that the
 * model contradicts, and every scale that is missing or not above 0, is refused by its key; nothing
 * becomes 1 in silence.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SCALE_FILE_H
#define KV8_SCALE_FILE_H

#include <kv8/formats.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv8_scale_format {
    KV8_SCALES_KV8 = 0,
    KV8_SCALES_LIGHTLLM,           /* the nine keys alone */
    KV8_SCALES_SGLANG,             /* one scale for K and V per layer and rank */
    KV8_SCALES_COMPRESSED_TENSORS, /* self_attn.k_scale [1] or [heads, 1, 1] */
    KV8_SCALES_MODELOPT,           /* self_attn.k_proj.k_scale, one per layer */
    KV8_SCALES_COUNT
} kv8_scale_format;
/* "kv8", "lightllm", "sglang", "compressed-tensors", "modelopt"; NULL for none of these. */
KV8_API const char *kv8_scale_format_name(kv8_scale_format format);

/* What a file holds. columns = 2 * num_kv_heads, or 2 per tensor. A NULL array or string is not in
 * the file, a number that is not is 0. */
typedef struct kv8_scale_data {
    size_t struct_size;
    kv8_scale_format format;  /* that was read; ignored by create */
    const char *architecture; /* "GptOssForCausalLM" */
    kv8_dtype dtype;          /* of the codes, a float of 8 bits; NONE = E4M3 */
    int32_t num_layers, num_kv_heads;
    int per_tensor;
    const float *scales;               /* [num_layers, columns], finite and > 0 */
    const float *amax;                 /* the same shape, finite and >= 0 */
    const double *sqnr_db, *clip_rate; /* the same shape; NaN = none */
    const kv8_dtype *kv_dtypes;        /* [num_layers, 2]: the best format of K and of V */
    int32_t num_qo_heads;              /* of q_scales */
    const float *q_scales;             /* [num_layers, num_qo_heads] */
    const char *method;                /* "absmax" */
    double margin;
    uint64_t num_tokens;
    uint64_t model_hash; /* kv8_model_hash */
    /* Counts of |x| by column, eight bins to a power of two from 2^histogram_exponent on; beside
     * it, what is in none of the bins. Read back as kv8/calibrate.h counts: 512 bins from 2^-32. */
    const uint64_t *histogram; /* [num_layers, columns, num_bins] */
    int32_t num_bins, histogram_exponent;
    const uint64_t *zeros, *nans, *infs; /* [num_layers, columns] */
} kv8_scale_data;
#define KV8_SCALE_DATA_INIT KV8_SIZED(kv8_scale_data)

typedef struct kv8_scale_file kv8_scale_file;

/* Copies the data. Every value is checked. *out is NULL on failure, as below. */
KV8_API KV8_NODISCARD kv8_status kv8_scale_file_create(kv8_scale_file **out,
                                                       const kv8_scale_data *data);

/* The model a file is meant for; 0 or NULL = any. Files of one scale per layer fit any number of
 * heads. */
typedef struct kv8_scale_expect {
    size_t struct_size;
    int32_t num_layers, num_kv_heads;
    const char *architecture;
    uint64_t model_hash; /* compared when the file has one */
} kv8_scale_expect;
#define KV8_SCALE_EXPECT_INIT KV8_SIZED(kv8_scale_expect)

/* Reads a file of any of the formats: JSON, a .safetensors file, or a checkpoint directory whose
 * tensors include scales. A file with amax, fitted to it, must agree with itself: a scale that is
 * not amax * margin / qmax (or its power of two) is refused. The message names file, key, value and
 * limit. */
KV8_API KV8_NODISCARD kv8_status kv8_scale_file_open(kv8_scale_file **out, const char *path,
                                                     const kv8_scale_expect *expect);
KV8_API void kv8_scale_file_close(kv8_scale_file *file);

/* Borrowed arrays of num_kv_heads scales of one layer (per-tensor files repeat one value). */
KV8_API const float *kv8_scale_file_k(const kv8_scale_file *file, int32_t layer);
KV8_API const float *kv8_scale_file_v(const kv8_scale_file *file, int32_t layer);
/* Borrowed. */
KV8_API KV8_NODISCARD kv8_status kv8_scale_file_get(const kv8_scale_file *file,
                                                    kv8_scale_data *data_out);

/* The heads [first, first + num) alone, of K and of V: what one rank holds. */
KV8_API KV8_NODISCARD kv8_status kv8_scale_file_split(kv8_scale_file **out,
                                                      const kv8_scale_file *file,
                                                      int32_t first_head, int32_t num_heads);

/* Writes the whole file or none. A form coarser than the data takes the largest of the scales it
 * puts together, which clips nothing: SGLang's of K and V and the heads of each of num_ranks ranks
 * (0 = 1), ModelOpt's of the heads of a layer. Where `path` is a checkpoint directory, the two
 * safetensors forms go into it as a shard of their own, and into its index, which is written anew
 * if there is one; no other file is touched. Per-head and per-layer facts beyond the form are left
 * out. Only e4m3 scales can be written in a foreign form. */
KV8_API KV8_NODISCARD kv8_status kv8_scale_file_write(const kv8_scale_file *file, const char *path,
                                                      kv8_scale_format format, int32_t num_ranks);

#ifdef __cplusplus
}
#endif
#endif
