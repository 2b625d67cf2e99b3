/* checkpoint_files.h - writing gpt-oss checkpoints of any shape: tensor lists in both name
 * families, config.json, safetensors files with data or holes, indices, temporary directories.
 * For tests and for make_checkpoint; aborts when the disk refuses.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CHECKPOINT_FILES_H
#define KV8_CHECKPOINT_FILES_H

#include <dirent.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct checkpoint_shape {
    int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, experts, experts_per_token;
    int64_t vocab, window, max_seq_len;
} checkpoint_shape;

typedef struct file_tensor {
    char name[96];
    const char *dtype;
    int32_t num_dims;
    int64_t shape[4];
    uint64_t bytes;
    const void *data; /* NULL = a hole, zeros */
} file_tensor;

/* 19 per layer in Hugging Face names, 3 beside them; the original names fuse three into one. */
static inline size_t num_checkpoint_tensors(const checkpoint_shape *s) {
    return (size_t)(19 * s->layers + 3);
}

static inline void add_tensor(file_tensor *tensors, size_t *count, const char *prefix,
                              const char *name, const char *dtype, int32_t num_dims, int64_t a,
                              int64_t b, int64_t c, int64_t d) {
    file_tensor *const t = &tensors[(*count)++];
    *t = (file_tensor){.dtype = dtype, .num_dims = num_dims, .shape = {a, b, c, d}};
    snprintf(t->name, sizeof t->name, "%.40s%.50s", prefix, name);
    t->bytes = strcmp(dtype, "BF16") == 0 ? 2 : 1;
    for (int32_t i = 0; i < num_dims; i++) t->bytes *= (uint64_t)t->shape[i];
}

/* tensors[num_checkpoint_tensors], Hugging Face names; returns their number. */
static inline size_t list_tensors(const checkpoint_shape *s, file_tensor *tensors) {
    size_t n = 0;
    const int64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    const int64_t h = s->hidden, i = s->intermediate, e = s->experts;
    add_tensor(tensors, &n, "", "model.embed_tokens.weight", "BF16", 2, s->vocab, h, 0, 0);
    for (int64_t layer = 0; layer < s->layers; layer++) {
        char p[40];
        snprintf(p, sizeof p, "model.layers.%" PRId64 ".", layer);
        add_tensor(tensors, &n, p, "input_layernorm.weight", "BF16", 1, h, 0, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.q_proj.weight", "BF16", 2, q, h, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.q_proj.bias", "BF16", 1, q, 0, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.k_proj.weight", "BF16", 2, kv, h, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.k_proj.bias", "BF16", 1, kv, 0, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.v_proj.weight", "BF16", 2, kv, h, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.v_proj.bias", "BF16", 1, kv, 0, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.o_proj.weight", "BF16", 2, h, q, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.o_proj.bias", "BF16", 1, h, 0, 0, 0);
        add_tensor(tensors, &n, p, "self_attn.sinks", "BF16", 1, s->heads, 0, 0, 0);
        add_tensor(tensors, &n, p, "post_attention_layernorm.weight", "BF16", 1, h, 0, 0, 0);
        add_tensor(tensors, &n, p, "mlp.router.weight", "BF16", 2, e, h, 0, 0);
        add_tensor(tensors, &n, p, "mlp.router.bias", "BF16", 1, e, 0, 0, 0);
        add_tensor(tensors, &n, p, "mlp.experts.gate_up_proj_blocks", "U8", 4, e, 2 * i, h / 32,
                   16);
        add_tensor(tensors, &n, p, "mlp.experts.gate_up_proj_scales", "U8", 3, e, 2 * i, h / 32, 0);
        add_tensor(tensors, &n, p, "mlp.experts.gate_up_proj_bias", "BF16", 2, e, 2 * i, 0, 0);
        add_tensor(tensors, &n, p, "mlp.experts.down_proj_blocks", "U8", 4, e, h, i / 32, 16);
        add_tensor(tensors, &n, p, "mlp.experts.down_proj_scales", "U8", 3, e, h, i / 32, 0);
        add_tensor(tensors, &n, p, "mlp.experts.down_proj_bias", "BF16", 2, e, h, 0, 0);
    }
    add_tensor(tensors, &n, "", "model.norm.weight", "BF16", 1, h, 0, 0, 0);
    add_tensor(tensors, &n, "", "lm_head.weight", "BF16", 2, s->vocab, h, 0, 0);
    return n;
}

/* Random values that keep a forward pass finite, the first `size` bytes of a tensor's data. */
static inline void fill_tensor(const file_tensor *t, uint64_t *rng, uint8_t *out, size_t size) {
    const bool norm = strstr(t->name, "norm") != NULL;
    const bool scales = strstr(t->name, "scales") != NULL;
    for (size_t i = 0; i < size; i++) {
        *rng = *rng * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
        const uint8_t bits = (uint8_t)(*rng >> 56);
        if (norm)
            out[i] = i % 2 == 0 ? 0x80 : 0x3f; /* bf16 1.0 */
        else if (scales)
            out[i] = (uint8_t)(127 - 6 + bits % 2);
        else if (strcmp(t->dtype, "BF16") == 0) /* +-2^-8 .. 2^-4 */
            out[i] = i % 2 == 0 ? bits : (uint8_t)((bits & 0x80) | 0x3c | (bits & 1));
        else
            out[i] = bits;
    }
}

static inline FILE *open_or_abort(const char *directory, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *const file = fopen(path, "wb");
    if (file == NULL) {
        perror(path);
        abort();
    }
    return file;
}

static inline void close_or_abort(FILE *file) {
    if (ferror(file) != 0 || fclose(file) != 0) {
        perror("checkpoint file");
        abort();
    }
}

static inline void write_text(const char *directory, const char *name, const char *text) {
    FILE *const file = open_or_abort(directory, name);
    fputs(text, file);
    close_or_abort(file);
}

/* Length and JSON header; `pad` spaces more shift the data to any alignment. */
static inline void write_header(FILE *file, const file_tensor *tensors, size_t count, size_t pad) {
    char *text = NULL;
    size_t size = 0;
    FILE *const json = open_memstream(&text, &size);
    if (json == NULL) abort();
    uint64_t offset = 0;
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", json);
    for (size_t i = 0; i < count; i++) {
        const file_tensor *const t = &tensors[i];
        fprintf(json, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
        for (int32_t d = 0; d < t->num_dims; d++)
            fprintf(json, d == 0 ? "%" PRId64 : ",%" PRId64, t->shape[d]);
        fprintf(json, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", offset, offset + t->bytes);
        offset += t->bytes;
    }
    fprintf(json, "}%*s", (int)pad, "");
    fclose(json);
    for (int i = 0; i < 8; i++) fputc((int)(size >> (8 * i) & 0xff), file);
    fwrite(text, 1, size, file);
    free(text);
}

static inline void write_safetensors(const char *directory, const char *name,
                                     const file_tensor *tensors, size_t count, size_t pad) {
    FILE *const file = open_or_abort(directory, name);
    write_header(file, tensors, count, pad);
    for (size_t i = 0; i < count; i++) {
        if (tensors[i].data != NULL) {
            fwrite(tensors[i].data, 1, tensors[i].bytes, file);
        } else {
            for (uint64_t b = 0; b < tensors[i].bytes; b++) fputc(0, file);
        }
    }
    close_or_abort(file);
}

/* model.safetensors.index.json: tensor i lies in files[file_of[i]]. */
static inline void write_index(const char *directory, const file_tensor *tensors, size_t count,
                               const char *const *files, const int *file_of) {
    FILE *const index = open_or_abort(directory, "model.safetensors.index.json");
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) total += tensors[i].bytes;
    fprintf(index, "{\"metadata\":{\"total_size\":%" PRIu64 "},\"weight_map\":{", total);
    for (size_t i = 0; i < count; i++)
        fprintf(index, "%s\"%s\":\"%s\"", i == 0 ? "" : ",", tensors[i].name, files[file_of[i]]);
    fputs("}}", index);
    close_or_abort(index);
}

/* config.json in Hugging Face form. */
static inline void write_config(const char *directory, const checkpoint_shape *s) {
    FILE *const file = open_or_abort(directory, "config.json");
    fprintf(file, "{\"architectures\":[\"GptOssForCausalLM\"],\"model_type\":\"gpt_oss\",");
    fprintf(file, "\"num_hidden_layers\":%" PRId64 ",\"hidden_size\":%" PRId64 ",", s->layers,
            s->hidden);
    fprintf(file, "\"intermediate_size\":%" PRId64 ",\"num_attention_heads\":%" PRId64 ",",
            s->intermediate, s->heads);
    fprintf(file, "\"num_key_value_heads\":%" PRId64 ",\"head_dim\":%" PRId64 ",", s->kv_heads,
            s->head_dim);
    fprintf(file, "\"num_local_experts\":%" PRId64 ",\"num_experts_per_tok\":%" PRId64 ",",
            s->experts, s->experts_per_token);
    fprintf(file, "\"vocab_size\":%" PRId64 ",\"sliding_window\":%" PRId64 ",", s->vocab,
            s->window);
    fprintf(file, "\"max_position_embeddings\":%" PRId64 ",\"initial_context_length\":4096,",
            s->max_seq_len);
    fprintf(file, "\"rope_theta\":150000.0,\"rope_scaling\":{\"rope_type\":\"yarn\",");
    fprintf(file, "\"factor\":32.0,\"beta_fast\":32.0,\"beta_slow\":1.0,\"truncate\":false,");
    fprintf(file, "\"original_max_position_embeddings\":4096},\"rms_norm_eps\":1e-05,");
    fprintf(file, "\"swiglu_limit\":7.0,\"attention_bias\":true,\"tie_word_embeddings\":false,");
    fprintf(file, "\"hidden_act\":\"silu\",\"eos_token_id\":%" PRId64 ",\"layer_types\":[",
            s->vocab > 200002 ? 200002 : s->vocab - 1);
    for (int64_t i = 0; i < s->layers; i++)
        fprintf(file, "%s\"%s_attention\"", i == 0 ? "" : ",", i % 2 == 0 ? "sliding" : "full");
    fprintf(file, "],\"quantization_config\":{\"quant_method\":\"mxfp4\"}}\n");
    close_or_abort(file);
}

/* A fresh directory under $TMPDIR or /tmp; path has room for 256 bytes. */
static inline void make_directory(char *path) {
    const char *const root = getenv("TMPDIR");
    snprintf(path, 256, "%s/kv8_checkpoint_XXXXXX", root != NULL ? root : "/tmp");
    if (mkdtemp(path) == NULL) {
        perror(path);
        abort();
    }
}

/* Removes a directory of plain files. */
static inline void remove_directory(const char *path) {
    DIR *const directory = opendir(path);
    if (directory == NULL) return;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        char file[768];
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        unlink(file);
    }
    closedir(directory);
    rmdir(path);
}

#endif
