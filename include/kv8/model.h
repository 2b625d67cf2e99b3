/* kv8/model.h - checkpoints of models: opening, facts, and one forward step through a paged cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_H
#define KV8_MODEL_H

#include <kv8/cache.h>
#include <kv8/calibrate.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_model kv8_model;

/* Progress of long work: `done` of `total` units (bytes loaded, or the work of about one prefilled
 * token each); return non-zero to stop (the call then returns KV8_ERR_CANCELLED). */
typedef int (*kv8_progress)(void *cookie, const char *what, uint64_t done, uint64_t total);

/* How a step of a model on a GPU is launched. */
typedef enum kv8_step_path {
    KV8_PATH_AUTO = 0, /* persistent where it can be, else graph */
    KV8_PATH_EAGER,    /* kernel by kernel */
    KV8_PATH_GRAPH,    /* steps of a token a request as a recorded graph, others kernel by kernel */
    /* steps of a token each of up to 8 sequences as one kernel, others as by the graph; a step of
     * one token is refused where no kernel can */
    KV8_PATH_PERSISTENT
} kv8_step_path;
/* "persistent", as options of the program spell it; NULL for no path. */
KV8_API const char *kv8_step_path_name(kv8_step_path path);

typedef struct kv8_model_options {
    size_t struct_size;
    const kv8_allocator *allocator;
    kv8_threads *threads; /* NULL = the calling thread. Borrowed; must outlive the model. */
    kv8_isa isa;
    int32_t max_step_tokens; /* rows of one step, all requests together; 0 = 512 */
    int32_t max_step_seqs;   /* requests of one step; 0 = 16 */
    int32_t max_seq_len;     /* longest sequence of this run; 0 = the model's limit */
    /* 1: a token's bits do not depend on the step's other requests, nor on how its own prompt is
     * cut into steps; -1: they may, and forks read shared pages once. 0 = 1 on the host, -1 on a
     * GPU, where 1 costs more. */
    int32_t batch_invariant;
    /* 1: the model without its sinks, or with every layer seeing everything: to see what these are
     * worth. */
    int32_t without_sinks, without_window;
    /* NULL = the host computes. Else weights lie in this GPU's memory, and steps run on `stream`
     * and take caches whose pages lie there, on the same stream. Both borrowed. */
    kv8_device *device;
    kv8_stream *stream;
    kv8_step_path path;
    kv8_progress progress; /* of loading weights into a GPU's memory; NULL = none */
    void *progress_cookie;
    /* Layers whose input every step keeps, of all its rows, for a draft head:
     * kv8_model_layer_input. Strictly ascending, from 0, where the embedding enters, to the number
     * of layers, where the residual stream enters the final norm. Copied. None costs nothing; with
     * any, a token on a GPU is a graph's and not one kernel's. */
    const int32_t *input_layers;
    int32_t num_input_layers;
} kv8_model_options;
#define KV8_MODEL_OPTIONS_INIT KV8_SIZED(kv8_model_options)

/* "random:gpt-oss-20b", "random:gpt-oss-120b" and "random:PATH" of a config.json in place of a
 * directory: a model of that shape with random weights. */
#define KV8_RANDOM_PREFIX "random:"

/* Opens a checkpoint directory: config.json (Hugging Face or original form) and safetensors
 * (one file, or shards with or without index; no tensor in two of them; Hugging Face or original
 * tensor names). Files are mapped, not read: whoever cuts one short while
 * the model is open ends the process by SIGBUS when a lost page is touched. Expert weights stay
 * packed. Every tensor is checked for name, dtype, shape and
 * bounds here. *out is NULL on failure; the message names file, key or tensor, value and limit. */
KV8_API KV8_NODISCARD kv8_status kv8_model_open(kv8_model **out, const char *directory,
                                                const kv8_model_options *options);
KV8_API void kv8_model_close(kv8_model *model);

/* Bytes of a GPU's memory. */
typedef struct kv8_model_memory {
    size_t struct_size;
    uint64_t dense, experts;      /* weights */
    uint64_t activations, logits; /* of a step, by max_step_tokens and max_step_seqs */
    uint64_t workspaces;          /* of the experts' kernels */
    uint64_t total;               /* of these, while the model is open */
    uint64_t loading;             /* beside that, while it is opened */
    uint64_t available;           /* that nobody has taken now */
} kv8_model_memory;
#define KV8_MODEL_MEMORY_INIT KV8_SIZED(kv8_model_memory)
/* What kv8_model_open with these options, whose device and stream are set, takes of the GPU's
 * memory before there is a KV cache: checks the checkpoint as open does, loads nothing. */
KV8_API KV8_NODISCARD kv8_status kv8_model_count_memory(const char *directory,
                                                        const kv8_model_options *options,
                                                        kv8_model_memory *memory_out);

typedef struct kv8_model_info {
    size_t struct_size;
    int32_t num_layers, hidden_size, intermediate_size, vocab_size;
    int32_t num_qo_heads, num_kv_heads, head_dim;
    int32_t num_experts, num_experts_per_token;
    int32_t window_left; /* of sliding layers, the widest: sliding_window - 1; -1 = none slide */
    int32_t max_seq_len; /* max_position_embeddings */
    int32_t num_full_layers, num_sliding_layers;
    int32_t num_tensors, num_files;
    uint64_t num_parameters;          /* weights, MXFP4 blocks counted as 32 */
    uint64_t bytes;                   /* of tensor data */
    uint64_t bytes_per_decoded_token; /* weights read for one token, without KV */
    int32_t num_eos;
    int32_t eos[8];           /* generation stops: generation_config.json, else config.json */
    const char *architecture; /* "GptOssForCausalLM"; borrowed */
} kv8_model_info;
#define KV8_MODEL_INFO_INIT KV8_SIZED(kv8_model_info)
KV8_API KV8_NODISCARD kv8_status kv8_model_get_info(const kv8_model *model,
                                                    kv8_model_info *info_out);
/* Bytes of weights that a step of so many tokens reads, with so many distinct experts of each
 * layer; 0 = as many as choices by chance come to. */
KV8_API double kv8_model_step_bytes(const kv8_model_info *info, int32_t num_tokens,
                                    double num_experts);
/* Seconds that such a step takes at least where reading and multiplying are as fast as told: of
 * dense weights and of experts, one part after the other, the longer of reading them once and of
 * two operations for each weight and token. Without KV. */
KV8_API double kv8_model_step_seconds(const kv8_model_info *info, int32_t num_tokens,
                                      double num_experts, double read_gb_s, double product_tflop_s);
/* Keys before its own that a query of this layer sees; -1 = all. */
KV8_API int32_t kv8_model_layer_window(const kv8_model *model, int32_t layer);
/* Tells checkpoints apart: of every tensor's name, type, shape and first and last 4 KiB. Not 0. */
KV8_API uint64_t kv8_model_hash(const kv8_model *model);

/* Calls `visit` for every tensor in file order; stops when it returns non-zero. */
typedef struct kv8_tensor_info {
    const char *name, *file;
    const char *dtype; /* as the header spells it: "BF16", "U8" */
    int32_t num_dims;
    int64_t shape[8];
    uint64_t bytes;
} kv8_tensor_info;
KV8_API void kv8_model_visit_tensors(const kv8_model *model,
                                     int (*visit)(void *cookie, const kv8_tensor_info *tensor),
                                     void *cookie);

/* Fills the shape fields of cache options (layers, heads, head_dim) and layers_out[num_layers], of
 * which the first names the size of all: every layer k_dtype/v_dtype, no scales, sliding layers
 * their window. The caller sets pages, sequences and scales. */
KV8_API KV8_NODISCARD kv8_status kv8_model_cache_layers(const kv8_model *model, kv8_dtype k_dtype,
                                                        kv8_dtype v_dtype,
                                                        kv8_cache_layer *layers_out,
                                                        kv8_cache_options *options_out);

/* One step over a batch: appends the tokens of each request to its sequence and attends over what
 * the cache then holds, so every key (the running tokens' too) is read back as stored. */
typedef struct kv8_step {
    size_t struct_size;
    int32_t num_seqs;
    const kv8_seq *seqs;
    const int32_t *indptr;    /* [num_seqs+1] into token_ids; each request at least one token */
    const int32_t *token_ids; /* all in [0, vocab_size) */
    int32_t num_logit_rows;
    const int32_t *logit_rows; /* strictly ascending row numbers whose logits are wanted */
    float *logits_out; /* [num_logit_rows, vocab_size]; of a model on a GPU also its memory */
} kv8_step;
#define KV8_STEP_INIT KV8_SIZED(kv8_step)
/* On failure no sequence has changed length. KV8_ERR_FULL when the cache's pages run out,
 * KV8_ERR_INVALID for ids or lengths out of range, naming value and limit. Allocates only in the
 * first step on a cache whose dtypes or page size differ from the last one's. Publishes nothing:
 * a caller that wants its prefixes found calls kv8_cache_publish once the step's tokens stay. */
KV8_API KV8_NODISCARD kv8_status kv8_model_step(kv8_model *model, kv8_cache *cache,
                                                const kv8_step *step);

/* The residual stream as it entered input_layers[idx] in the last step, before any norm: f32
 * [rows of the step, hidden_size], on the host, or in the memory of the model's GPU, written on its
 * stream. The model's, good until the next step; after a step that failed it is anything. NULL: idx
 * is not from 0 to num_input_layers - 1. */
KV8_API const float *kv8_model_layer_input(const kv8_model *model, int32_t idx);

/* How a model on a GPU is given a step. */
typedef struct kv8_step_plan {
    size_t struct_size;
    kv8_step_path path;             /* not KV8_PATH_AUTO */
    const char *why_not_persistent; /* why the step is not one kernel's, in words; NULL: it is */
} kv8_step_plan;
#define KV8_STEP_PLAN_INIT KV8_SIZED(kv8_step_plan)
/* Of a step now of num_seqs requests with num_rows tokens together, with logits wanted of the last
 * of each, on this cache, of whose sequences none has scales of its own. device NULL: the model's.
 * A model on the host takes a device, and its answer is that of the model opened there with
 * default options. KV8_ERR_UNSUPPORTED where path is persistent and a step of one row cannot be so,
 * where no kernel of the device attends to a layer's formats, and for a model on the host without a
 * device. */
KV8_API KV8_NODISCARD kv8_status kv8_model_plan_step(const kv8_model *model, const kv8_cache *cache,
                                                     kv8_device *device, int32_t num_seqs,
                                                     int32_t num_rows, kv8_step_plan *plan_out);

/* Every later step counts its K (after rope), V and, where the observer has Q, Q (after rope) into
 * `observer` while that is on; NULL ends it. Borrowed: it must outlive the model or be taken away.
 * An observer of other layers, heads or dims is KV8_ERR_INVALID. A step that fails may have been
 * counted in part. On a GPU the counts come when the observer is taken away or another takes its
 * place; when reading them fails, none is set. */
KV8_API KV8_NODISCARD kv8_status kv8_model_set_observer(kv8_model *model, kv8_observer *observer);
/* An observer of this model's shape on its threads: fills those fields of the options. */
KV8_API void kv8_model_observer_options(const kv8_model *model, kv8_observer_options *options_out);

/* --- what the steps of a model on a GPU spend their time on --- */

typedef enum kv8_work {
    KV8_WORK_DENSE = 0, /* products with weights, but experts' and the head's */
    KV8_WORK_EXPERTS,   /* theirs */
    KV8_WORK_ROUTING,   /* experts chosen, rows by expert, the sum of what experts made */
    KV8_WORK_ATTENTION, /* append and attention */
    KV8_WORK_ROWS,      /* embedding, norms, rotation */
    KV8_WORK_HEAD,      /* logits */
    KV8_WORK_SAMPLING,
    KV8_WORK_MOVEMENT, /* copies */
    KV8_WORK_WHOLE,    /* what is not told apart: graphs, whole tokens in one kernel */
    KV8_WORK_COUNT
} kv8_work;
KV8_API const char *kv8_work_name(kv8_work work);

typedef struct kv8_profile_row {
    const char *name; /* of a kernel, "copy", "fill", "graph" or "step"; a literal */
    kv8_work work;
    int32_t num_launches;
    double seconds;
} kv8_profile_row;
typedef struct kv8_profile {
    size_t struct_size;
    int64_t num_steps;
    double busy_seconds, idle_seconds; /* of the GPU, from the first launch to the last */
    double experts_read;               /* distinct ones a layer, the mean of all steps; by kernel */
    int32_t num_rows;
    const kv8_profile_row
        *rows; /* [num_rows]; valid until the model is profiled again, or closed */
} kv8_profile;
#define KV8_PROFILE_INIT KV8_SIZED(kv8_profile)

/* Times the work on the model's stream until kv8_model_end_profile. by_kernel 0: graphs as wholes,
 * and so steps that are launched kernel by kernel, at the cost of a few events a step. 1: every
 * kernel; a graph is then recorded anew at each step, and the time that takes is idle; only what is
 * busy tells something; a step of one token is a graph's, since within one kernel nothing is told
 * apart. KV8_ERR_UNSUPPORTED for a model on the host. */
KV8_API KV8_NODISCARD kv8_status kv8_model_begin_profile(kv8_model *model, int32_t by_kernel);
/* Ends it, even where that fails; what was measured where profile_out is not NULL. */
KV8_API KV8_NODISCARD kv8_status kv8_model_end_profile(kv8_model *model, kv8_profile *profile_out);

#ifdef __cplusplus
}
#endif
#endif
