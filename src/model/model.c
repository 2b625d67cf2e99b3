/* model.c - the table of architectures, opening a checkpoint by it, and a model's facts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_STEP_TOKENS = 512, DEFAULT_STEP_SEQS = 16, MAX_STEP_TOKENS = 1 << 17 };

/* --- the table --- */

enum { MAX_CONFIG_BYTES = 16 << 20 };

#define KV8_ARCHITECTURE(name) extern const kv8_architecture kv8_architecture_##name;
#include "architectures.inc"
#undef KV8_ARCHITECTURE

static const kv8_architecture *const architectures[] = {
#define KV8_ARCHITECTURE(name) &kv8_architecture_##name,
#include "architectures.inc"
#undef KV8_ARCHITECTURE
};

static kv8_status refuse_config(const kv8_json_fields *config) {
    char known[256] = "";
    for (size_t i = 0; i < sizeof architectures / sizeof architectures[0]; i++) {
        const size_t at = strlen(known);
        snprintf(known + at, sizeof known - at, "%s%s", i == 0 ? "" : ", ",
                 architectures[i]->model_type);
    }
    const char *const type = json_string_value(kv8_json_get(config, "model_type"));
    return kv8_fail(KV8_ERR_UNSUPPORTED, "%s: model_type is %.80s, supported is %s", config->file,
                    type == NULL ? "no string" : type, known);
}

static kv8_status choose_architecture(const char *path, const char *text, size_t size,
                                      const kv8_architecture **out) {
    json_t *root = NULL;
    KV8_TRY(kv8_json_parse_object(&root, path, text, size));
    const kv8_json_fields config = {path, "", root};
    *out = NULL;
    for (size_t i = 0; *out == NULL && i < sizeof architectures / sizeof architectures[0]; i++) {
        if (architectures[i]->owns(&config)) *out = architectures[i];
    }
    const kv8_status status = *out == NULL ? refuse_config(&config) : KV8_OK;
    json_decref(root);
    return status;
}

static kv8_status find_architecture(const char *directory, const kv8_architecture **out) {
    char *const path = kv8_path_join(directory, "config.json");
    if (path == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "config.json: no memory for its path");
    char *text = NULL;
    size_t size = 0;
    kv8_status status = kv8_file_read(path, MAX_CONFIG_BYTES, &text, &size);
    if (status == KV8_OK) {
        status = choose_architecture(path, text, size, out);
        kv8_release(NULL, text, size + 1, 1);
    }
    free(path);
    return status;
}

/* --- opening --- */

/* Fills in the defaults; the caller has read the config. */
static kv8_status resolve_options(kv8_model *model) {
    kv8_model_options *const o = &model->options;
    const struct {
        const char *what;
        int32_t *value, fallback, limit;
    } bounds[] = {
        {"max_step_tokens", &o->max_step_tokens, DEFAULT_STEP_TOKENS, MAX_STEP_TOKENS},
        {"max_step_seqs", &o->max_step_seqs, DEFAULT_STEP_SEQS, MAX_STEP_TOKENS},
        {"max_seq_len", &o->max_seq_len, model->info.max_seq_len, model->info.max_seq_len}};
    for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++) {
        if (*bounds[i].value < 0 || *bounds[i].value > bounds[i].limit)
            return kv8_fail(KV8_ERR_INVALID, "%s is %d, must be 0 (%d) to %d", bounds[i].what,
                            *bounds[i].value, bounds[i].fallback, bounds[i].limit);
        if (*bounds[i].value == 0) *bounds[i].value = bounds[i].fallback;
    }
    if (o->batch_invariant < -1 || o->batch_invariant > 1)
        return kv8_fail(KV8_ERR_INVALID, "batch_invariant is %d, must be -1, 0 or 1",
                        o->batch_invariant);
    if (o->batch_invariant == 0) o->batch_invariant = o->device == NULL ? 1 : -1;
    if (o->device == NULL && o->stream != NULL)
        return kv8_fail(KV8_ERR_INVALID, "stream is set and device is NULL");
    KV8_TRY(kv8_model_check_layer_inputs(model));
    return kv8_machine_resolve_isa(o->isa, &o->isa);
}

/* What is left out to see what it is worth. */
static void leave_out(kv8_model *model) {
    if (!model->options.without_window) return;
    for (int32_t i = 0; i < model->info.num_layers; i++) model->window_left[i] = -1;
}

static void count_layers(kv8_model *model) {
    kv8_model_info *const info = &model->info;
    info->window_left = -1;
    for (int32_t i = 0; i < info->num_layers; i++) {
        if (model->window_left[i] < 0) {
            info->num_full_layers++;
        } else {
            info->num_sliding_layers++;
            info->window_left = (int32_t)kv8_max_i64(info->window_left, model->window_left[i]);
        }
    }
    info->num_tensors = (int32_t)model->checkpoint.num_tensors;
    info->num_files = (int32_t)model->checkpoint.num_files;
}

static kv8_status take_step_memory(kv8_model *model) {
    KV8_TRY(kv8_model_take_layer_inputs(model));
    KV8_TRY(
        kv8_buffers_take_ints(&model->buffers, model->options.max_step_tokens, &model->positions));
    return kv8_buffers_take_ints(&model->buffers, model->options.max_step_seqs,
                                 &model->old_lengths);
}

static kv8_status open_files(kv8_model *model, const char *directory) {
    KV8_TRY(find_architecture(directory, &model->architecture));
    KV8_TRY(model->architecture->read(model, directory));
    return kv8_checkpoint_open(&model->checkpoint, directory, model->options.allocator);
}

static kv8_status make_random(kv8_model *model, const char *label, const char *text, size_t size) {
    KV8_TRY(choose_architecture(label, text, size, &model->architecture));
    KV8_TRY(model->architecture->parse(model, label, text, size));
    KV8_TRY(model->architecture->list(model, &model->random));
    return kv8_random_weights_fill(&model->random, label, model->info.hidden_size,
                                   model->options.threads, &model->checkpoint);
}

/* random:NAME of a published model, or random:PATH of a config.json. */
static kv8_status open_random(kv8_model *model, const char *label) {
    const char *const name = label + strlen(KV8_RANDOM_PREFIX);
    const char *const published = kv8_published_config(name);
    if (published != NULL) return make_random(model, label, published, strlen(published));
    char *text = NULL;
    size_t size = 0;
    const kv8_status found = kv8_file_read(name, MAX_CONFIG_BYTES, &text, &size);
    if (found != KV8_OK)
        return kv8_fail_within(found, "%s is neither gpt-oss-20b, gpt-oss-120b nor a config.json",
                               label);
    const kv8_status status = make_random(model, label, text, size);
    kv8_release(NULL, text, size + 1, 1);
    return status;
}

static kv8_status open_model(kv8_model *model, const char *directory) {
    KV8_TRY(strncmp(directory, KV8_RANDOM_PREFIX, strlen(KV8_RANDOM_PREFIX)) == 0
                ? open_random(model, directory)
                : open_files(model, directory));
    KV8_TRY(resolve_options(model));
    leave_out(model);
    const kv8_status status = model->architecture->open(model);
    if (status == KV8_ERR_NOT_FOUND) return kv8_fail_within(status, "%s", directory);
    KV8_TRY(status);
    count_layers(model);
    return take_step_memory(model);
}

/* A model whose tensors are bound and options resolved; to be closed after a failure too. */
static kv8_status create_model(kv8_model **out, const char *directory,
                               const kv8_model_options *options) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_model), "model", &memory));
    kv8_model *const model = *out = memory;
    model->info.struct_size = sizeof model->info;
    model->options = *options;
    model->buffers.allocator = options->allocator;
    return open_model(model, directory);
}

kv8_status kv8_model_open(kv8_model **out, const char *directory,
                          const kv8_model_options *options) {
    if (out == NULL || directory == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_model_open: out or directory is NULL");
    *out = NULL;
    KV8_RANGE("load %s", directory);
    KV8_TAKE_STRUCT(kv8_model_options, options);
    kv8_status status = create_model(out, directory, options);
    if (status == KV8_OK && options->device != NULL) status = kv8_model_device_open(*out);
    if (status != KV8_OK) {
        kv8_model_close(*out);
        *out = NULL;
    }
    return status;
}

kv8_status kv8_model_count_memory(const char *directory, const kv8_model_options *options,
                                  kv8_model_memory *memory_out) {
    KV8_REQUIRE(directory, options, memory_out);
    KV8_TAKE_STRUCT(kv8_model_options, options);
    if (options->device == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_model_count_memory: options->device is NULL");
    kv8_model *model = NULL;
    kv8_model_memory counted = KV8_MODEL_MEMORY_INIT;
    kv8_status status = create_model(&model, directory, options);
    if (status == KV8_OK) status = kv8_model_device_count(model, &counted);
    kv8_model_close(model);
    if (status == KV8_OK) KV8_WRITE_STRUCT(kv8_model_memory, memory_out, &counted);
    return status;
}

void kv8_model_close(kv8_model *model) {
    if (model == NULL) return;
    kv8_model_device_close(model);
    kv8_model_attention_release(model);
    kv8_buffers_release(&model->buffers);
    if (model->architecture != NULL) model->architecture->close(model);
    kv8_checkpoint_close(&model->checkpoint);
    kv8_random_weights_close(&model->random);
    kv8_release(model->options.allocator, model, 1, sizeof *model);
}

/* --- facts --- */

const kv8_model_options *kv8_model_get_options(const kv8_model *model) {
    return &model->options;
}

const kv8_model_info *kv8_model_facts(const kv8_model *model) {
    return &model->info;
}

kv8_status kv8_model_get_info(const kv8_model *model, kv8_model_info *info_out) {
    KV8_REQUIRE(model, info_out);
    KV8_WRITE_STRUCT(kv8_model_info, info_out, &model->info);
    return KV8_OK;
}

/* The weights that a step reads, in two parts. */
typedef struct step_weights {
    double dense, experts;         /* bytes */
    double dense_num, experts_num; /* weights that a token is multiplied by */
} step_weights;

static step_weights count_step(const kv8_model_info *info, int32_t num_tokens, double num_experts) {
    const double chosen = (double)info->num_experts_per_token / info->num_experts;
    const double row = 2.0 * info->hidden_size; /* of the embedding */
    const double one = (double)info->bytes_per_decoded_token;
    const double unread = (double)info->bytes - row * info->vocab_size - one + row;
    const double experts = chosen < 1 ? unread / (1 - chosen) : 0; /* of all layers, all of them */
    const double by_chance = 1 - pow(1 - chosen, num_tokens);
    const double share = num_experts > 0 ? num_experts / info->num_experts : by_chance;
    const double dense = one - experts * chosen;
    const double dense_num = ((double)info->bytes - experts) / 2; /* all but experts are 16 bits */
    return (step_weights){.dense = dense,
                          .experts = experts * share,
                          .dense_num = dense / 2,
                          .experts_num = chosen * ((double)info->num_parameters - dense_num)};
}

double kv8_model_step_bytes(const kv8_model_info *info, int32_t num_tokens, double num_experts) {
    const step_weights w = count_step(info, num_tokens, num_experts);
    return w.dense + w.experts;
}

double kv8_model_step_seconds(const kv8_model_info *info, int32_t num_tokens, double num_experts,
                              double read_gb_s, double product_tflop_s) {
    const step_weights w = count_step(info, num_tokens, num_experts);
    const double a_byte = 1e-9 / read_gb_s, a_weight = 2e-12 * num_tokens / product_tflop_s;
    return fmax(w.dense * a_byte, w.dense_num * a_weight) +
           fmax(w.experts * a_byte, w.experts_num * a_weight);
}

int32_t kv8_model_layer_window(const kv8_model *model, int32_t layer) {
    return model->window_left[layer];
}

uint64_t kv8_model_hash(const kv8_model *model) {
    return kv8_checkpoint_hash(&model->checkpoint);
}

void kv8_model_visit_tensors(const kv8_model *model,
                             int (*visit)(void *cookie, const kv8_tensor_info *tensor),
                             void *cookie) {
    for (size_t f = 0; f < model->checkpoint.num_files; f++) {
        const kv8_safetensors *const file = &model->checkpoint.files[f];
        for (size_t t = 0; t < file->num_tensors; t++) {
            const kv8_tensor *const tensor = &file->tensors[t];
            kv8_tensor_info info = {.name = tensor->name,
                                    .file = tensor->file,
                                    .dtype = kv8_tensor_type_name(tensor->type),
                                    .num_dims = tensor->num_dims,
                                    .bytes = tensor->bytes};
            for (int32_t d = 0; d < tensor->num_dims; d++) info.shape[d] = tensor->shape[d];
            if (visit(cookie, &info) != 0) return;
        }
    }
}

kv8_status kv8_model_cache_layers(const kv8_model *model, kv8_dtype k_dtype, kv8_dtype v_dtype,
                                  kv8_cache_layer *layers_out, kv8_cache_options *options_out) {
    KV8_REQUIRE(model, layers_out, options_out);
    const kv8_model_info *const c = &model->info;
    for (int32_t i = 0; i < c->num_layers; i++) {
        const kv8_cache_layer layer = {.struct_size = sizeof layer,
                                       .k_dtype = k_dtype,
                                       .v_dtype = v_dtype,
                                       .window_left = model->window_left[i]};
        KV8_WRITE_ELEMENT(kv8_cache_layer, layers_out, (size_t)i, &layer);
    }
    options_out->num_layers = c->num_layers;
    options_out->num_kv_heads = c->num_kv_heads;
    options_out->k_head_dim = c->head_dim;
    options_out->v_head_dim = c->head_dim;
    options_out->layers = layers_out;
    return KV8_OK;
}

/* --- paths --- */

const char *kv8_step_path_name(kv8_step_path path) {
    static const char *const names[] = {[KV8_PATH_AUTO] = "auto",
                                        [KV8_PATH_EAGER] = "eager",
                                        [KV8_PATH_GRAPH] = "graph",
                                        [KV8_PATH_PERSISTENT] = "persistent"};
    return (int)path >= KV8_PATH_AUTO && path <= KV8_PATH_PERSISTENT ? names[path] : NULL;
}

kv8_status kv8_model_plan_step(const kv8_model *model, const kv8_cache *cache, kv8_device *device,
                               int32_t num_seqs, int32_t num_rows, kv8_step_plan *plan_out) {
    KV8_REQUIRE(model, cache, plan_out);
    kv8_step_plan plan = KV8_STEP_PLAN_INIT;
    if (device == NULL) device = model->options.device;
    if (device == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "the path of a step is that of a model on a GPU, this "
                        "one is on the host and device is NULL");
    if (model->on_device != NULL && device != model->options.device)
        return kv8_fail(KV8_ERR_INVALID, "device is not the model's");
    if (num_seqs < 1 || num_rows < num_seqs)
        return kv8_fail(KV8_ERR_INVALID,
                        "a step of %d requests and %d rows, must be 1 or more, "
                        "and a row each",
                        num_seqs, num_rows);
    KV8_TRY(kv8_model_device_plan(model, cache, device, num_seqs, num_rows, &plan));
    KV8_WRITE_STRUCT(kv8_step_plan, plan_out, &plan);
    return KV8_OK;
}

/* --- profiles --- */

kv8_status kv8_model_begin_profile(kv8_model *model, int32_t by_kernel) {
    KV8_REQUIRE(model);
    if (model->on_device == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "a profile is of a model on a GPU, this one is on the "
                        "host");
    return kv8_model_device_begin_profile(model, by_kernel != 0);
}

kv8_status kv8_model_end_profile(kv8_model *model, kv8_profile *profile_out) {
    KV8_REQUIRE(model);
    kv8_profile profile = KV8_PROFILE_INIT;
    if (model->on_device == NULL || model->on_device->profile == NULL)
        return kv8_fail(KV8_ERR_INVALID, "no profile has begun");
    KV8_TRY(kv8_model_device_end_profile(model, &profile));
    if (profile_out != NULL) KV8_WRITE_STRUCT(kv8_profile, profile_out, &profile);
    return KV8_OK;
}

/* --- observing --- */

void kv8_model_observer_options(const kv8_model *model, kv8_observer_options *options_out) {
    const kv8_model_info *const c = &model->info;
    options_out->threads = model->options.threads;
    options_out->isa = model->options.isa;
    options_out->num_layers = c->num_layers;
    options_out->num_kv_heads = c->num_kv_heads;
    options_out->num_qo_heads = c->num_qo_heads;
    options_out->k_head_dim = c->head_dim;
    options_out->v_head_dim = c->head_dim;
}

kv8_status kv8_model_set_observer(kv8_model *model, kv8_observer *observer) {
    KV8_REQUIRE(model);
    kv8_observer_options must = KV8_OBSERVER_OPTIONS_INIT, has = must;
    kv8_model_observer_options(model, &must);
    if (observer != NULL) {
        KV8_TRY(kv8_observer_get_options(observer, &has));
        if (has.num_layers != must.num_layers || has.num_kv_heads != must.num_kv_heads ||
            (has.num_qo_heads != must.num_qo_heads && has.num_qo_heads != 0) ||
            has.k_head_dim != must.k_head_dim || has.v_head_dim != must.v_head_dim)
            return kv8_fail(KV8_ERR_INVALID,
                            "the observer has %d layers of %d KV heads (%d, %d) and %d query "
                            "heads, this model %d of %d (%d, %d) and %d",
                            has.num_layers, has.num_kv_heads, has.k_head_dim, has.v_head_dim,
                            has.num_qo_heads, must.num_layers, must.num_kv_heads, must.k_head_dim,
                            must.v_head_dim, must.num_qo_heads);
    }
    const kv8_status status =
        model->on_device == NULL ? KV8_OK : kv8_model_device_observe(model, observer);
    model->observer = status == KV8_OK ? observer : NULL;
    return status;
}
