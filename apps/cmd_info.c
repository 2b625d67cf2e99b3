/* cmd_info.c - kv8 info: what this machine offers and what a checkpoint holds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#include <string.h>
#include <unistd.h>

#include "cli.h"

/* --- machine --- */

typedef struct machine {
    kv8_isa best;
    int32_t num_cpus;
    double memory_bytes;
    int32_t num_gpus;
    kv8_device_info gpu;      /* the first one, or that of --device */
    uint64_t available_bytes; /* of its memory */
    char no_gpu[256];         /* why there is none */
} machine;

static kv8_status open_gpu(machine *out, int32_t idx) {
    kv8_device *device = NULL;
    kv8_status status = kv8_device_count(&out->num_gpus);
    if (status == KV8_OK) status = kv8_device_open(&device, idx);
    if (status != KV8_OK) return status;
    out->gpu = *kv8_device_get_info(device);
    status = kv8_device_available(device, &out->available_bytes);
    kv8_device_close(device);
    return status;
}

/* idx < 0: none was asked for by name, so none may be there. */
static kv8_status find_machine(machine *out, int32_t idx) {
    *out = (machine){.num_cpus = kv8_machine_num_cpus()};
    out->memory_bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    const kv8_status found = open_gpu(out, idx < 0 ? 0 : idx);
    if (found != KV8_OK && idx >= 0) return found;
    if (found != KV8_OK) snprintf(out->no_gpu, sizeof out->no_gpu, "%s", kv8_status_message());
    return kv8_machine_isa(&out->best);
}

static int32_t count_words(const char *text) {
    int32_t num = 0;
    for (text += strspn(text, " "); *text != '\0'; text += strspn(text, " ")) {
        num++;
        text += strcspn(text, " ");
    }
    return num;
}

/* How many kernels of how many .cu files, and what the build left out. */
static void print_images(void) {
    const int32_t num_images = kv8_device_num_images();
    int32_t num_kernels = 0;
    double bytes = 0;
    for (int32_t i = 0; i < num_images; i++) {
        num_kernels += count_words(kv8_device_get_image(i)->kernels);
        bytes += (double)kv8_device_get_image(i)->bytes;
    }
    printf("  CUDA kernels      %s\n", kv8_device_images_note());
    if (num_images > 0)
        printf("                    %d from %d files, %.1f MB; --json names them\n", num_kernels,
               num_images, bytes * 1e-6);
}

static void print_machine(const machine *m) {
    printf("machine\n  instruction sets ");
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (kv8_machine_has_isa((kv8_isa)isa)) printf(" %s", kv8_isa_name((kv8_isa)isa));
    }
    printf(" (in use: %s)\n  threads           %d\n  memory            %.1f GiB\n",
           kv8_isa_name(m->best), m->num_cpus, m->memory_bytes / 0x1p30);
    if (m->no_gpu[0] != '\0') {
        printf("  GPU               none: %s\n", m->no_gpu);
    } else {
        printf("  GPU               %s, sm_%d, %d multiprocessors, %.1f GiB, driver of CUDA %d.%d",
               m->gpu.name, m->gpu.sm_version, m->gpu.num_sms, (double)m->gpu.memory_bytes / 0x1p30,
               m->gpu.driver_version / 1000, m->gpu.driver_version % 1000 / 10);
        if (m->num_gpus > 1) printf("; number %d of %d", m->gpu.device_idx, m->num_gpus);
        printf("\n                    %.1f GiB of it free, L2 %.0f MiB",
               (double)m->available_bytes / 0x1p30, (double)m->gpu.l2_bytes / 0x1p20);
        if (m->gpu.memory_gb_s > 0) printf(", %.0f GB/s by its clock", m->gpu.memory_gb_s);
        printf("\n");
    }
    print_images();
}

static json_t *gpu_json(const machine *m) {
    if (m->no_gpu[0] != '\0') return json_pack("{s:s}", "none", m->no_gpu);
    return json_pack("{s:s, s:i, s:i, s:i, s:I, s:I, s:I, s:i}", "name", m->gpu.name, "device_idx",
                     m->gpu.device_idx, "sm_version", m->gpu.sm_version, "num_sms", m->gpu.num_sms,
                     "memory_bytes", (json_int_t)m->gpu.memory_bytes, "available_bytes",
                     (json_int_t)m->available_bytes, "l2_bytes", (json_int_t)m->gpu.l2_bytes,
                     "driver_version", m->gpu.driver_version);
}

static json_t *images_json(void) {
    json_t *const images = json_array();
    for (int32_t i = 0; i < kv8_device_num_images(); i++) {
        const kv8_device_image_info *const image = kv8_device_get_image(i);
        json_array_append_new(
            images, json_pack("{s:s, s:s, s:s, s:I}", "name", image->name, "archs", image->archs,
                              "kernels", image->kernels, "bytes", (json_int_t)image->bytes));
    }
    return images;
}

static json_t *machine_json(const machine *m) {
    json_t *const rungs = json_array();
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (kv8_machine_has_isa((kv8_isa)isa))
            json_array_append_new(rungs, json_string(kv8_isa_name((kv8_isa)isa)));
    }
    return json_pack("{s:o, s:s, s:i, s:I, s:i, s:o, s:o}", "isa", rungs, "isa_in_use",
                     kv8_isa_name(m->best), "threads", m->num_cpus, "memory_bytes",
                     (json_int_t)m->memory_bytes, "gpus", m->num_gpus, "gpu", gpu_json(m),
                     "cuda_images", images_json());
}

/* --- model --- */

/* Cache bytes of one token, all layers and those that keep every token; on a GPU also how a step of
 * one token is launched, or why none is. */
typedef struct kv_bytes {
    uint64_t all, unwindowed;
    kv8_step_plan plan;
    char why_none[256]; /* the kernels do not take the format; "": they do */
} kv_bytes;

static kv8_status find_kv_bytes(const kv8_model *model, kv8_device *device, kv8_dtype dtype,
                                kv_bytes *out) {
    kv8_kv_setting setting;
    kv8_status status = kv8_kv_setting_parse(kv8_dtype_name(dtype), &setting);
    kv8_kv_cache_options options = KV8_KV_CACHE_OPTIONS_INIT;
    options.max_seq_len = 1;
    kv8_cache *cache = NULL;
    if (status == KV8_OK) status = kv8_kv_setting_cache_create(&cache, model, &setting, &options);
    if (status != KV8_OK) return status;
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    status = kv8_cache_get_stats(cache, &stats);
    *out = (kv_bytes){.all = stats.bytes_per_token,
                      .unwindowed = stats.bytes_per_token_unwindowed,
                      .plan = KV8_STEP_PLAN_INIT};
    if (status == KV8_OK && device != NULL)
        status = kv8_model_plan_step(model, cache, device, 1, 1, &out->plan);
    if (status == KV8_ERR_UNSUPPORTED) {
        snprintf(out->why_none, sizeof out->why_none, "%s", kv8_status_message());
        status = KV8_OK;
    }
    kv8_cache_destroy(cache);
    return status;
}

static void print_model(const char *directory, const kv8_model_info *info,
                        const kv_bytes kv[KV8_DTYPE_COUNT]) {
    printf("\nmodel %s\n  architecture      %s\n", directory, info->architecture);
    printf("  tensors           %d in %d file%s, %llu bytes (%.2f GB)\n", info->num_tensors,
           info->num_files, info->num_files == 1 ? "" : "s", (unsigned long long)info->bytes,
           (double)info->bytes * 1e-9);
    printf("  parameters        %.2f M\n", (double)info->num_parameters * 1e-6);
    printf("  layers            %d: %d full, %d with a window of %d tokens\n", info->num_layers,
           info->num_full_layers, info->num_sliding_layers, info->window_left + 1);
    printf("  heads             %d query, %d KV, head_dim %d\n", info->num_qo_heads,
           info->num_kv_heads, info->head_dim);
    printf("  hidden            %d\n  experts           %d of width %d, %d per token\n",
           info->hidden_size, info->num_experts, info->intermediate_size,
           info->num_experts_per_token);
    printf("  vocabulary        %d\n  context           %d tokens\n", info->vocab_size,
           info->max_seq_len);
    printf("  read per token    %.2f MB of weights\n",
           (double)info->bytes_per_decoded_token * 1e-6);
    printf("\n  KV cache, bytes per token\n  %-10s %12s %20s\n", "dtype", "all layers",
           "full layers only");
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++)
        printf("  %-10s %12llu %20llu\n", kv8_dtype_name((kv8_dtype)dtype),
               (unsigned long long)kv[dtype].all, (unsigned long long)kv[dtype].unwindowed);
    printf("  Layers with a window keep its tokens only, however long the text.\n");
}

static int append_tensor(void *cookie, const kv8_tensor_info *tensor) {
    json_t *const shape = json_array();
    for (int32_t i = 0; i < tensor->num_dims; i++)
        json_array_append_new(shape, json_integer(tensor->shape[i]));
    json_array_append_new(
        cookie, json_pack("{s:s, s:o, s:s, s:o, s:I}", "name", tensor->name, "file",
                          cli_json_text(tensor->file), "dtype", tensor->dtype, "shape", shape,
                          "bytes", (json_int_t)tensor->bytes));
    return 0;
}

static json_t *model_json(const cli_model *model, const char *directory,
                          const kv_bytes kv[KV8_DTYPE_COUNT]) {
    const kv8_model_info *const info = &model->info;
    json_t *const all = json_object(), *const full = json_object(), *const tensors = json_array();
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++) {
        const char *const name = kv8_dtype_name((kv8_dtype)dtype);
        json_object_set_new(all, name, json_integer((json_int_t)kv[dtype].all));
        json_object_set_new(full, name, json_integer((json_int_t)kv[dtype].unwindowed));
    }
    kv8_model_visit_tensors(model->model, append_tensor, tensors);
    return json_pack(
        "{s:o, s:s, s:i, s:i, s:I, s:I, s:I, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, "
        "s:i, s:i, s:i, s:o, s:o, s:o}",
        "directory", cli_json_text(directory), "architecture", info->architecture, "num_files",
        info->num_files, "num_tensors", info->num_tensors, "bytes", (json_int_t)info->bytes,
        "num_parameters", (json_int_t)info->num_parameters, "bytes_per_decoded_token",
        (json_int_t)info->bytes_per_decoded_token, "num_layers", info->num_layers,
        "num_full_layers", info->num_full_layers, "num_sliding_layers", info->num_sliding_layers,
        "window_left", info->window_left, "hidden_size", info->hidden_size, "intermediate_size",
        info->intermediate_size, "num_qo_heads", info->num_qo_heads, "num_kv_heads",
        info->num_kv_heads, "head_dim", info->head_dim, "num_experts", info->num_experts,
        "num_experts_per_token", info->num_experts_per_token, "vocab_size", info->vocab_size,
        "max_seq_len", info->max_seq_len, "kv_bytes_per_token", all,
        "kv_bytes_per_token_full_layers", full, "tensors", tensors);
}

/* --- the model's place on a GPU --- */

static kv8_status count_memory(const char *directory, kv8_device *device, kv8_threads *threads,
                               kv8_model_memory *out) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.threads = threads;
    options.device = device;
    kv8_status status = kv8_stream_create(&options.stream, device);
    if (status == KV8_OK) status = kv8_model_count_memory(directory, &options, out);
    kv8_stream_destroy(options.stream);
    return status;
}

static const char *path_name(const kv_bytes *kv) {
    return kv->why_none[0] != '\0' ? NULL : kv8_step_path_name(kv->plan.path);
}

/* Everything about the model's place; a model on the host. */
static kv8_status place(const char *directory, const cli_model *model, int32_t device_idx,
                        kv8_model_memory *memory, kv_bytes kv[KV8_DTYPE_COUNT]) {
    kv8_device *device = NULL;
    kv8_status status = device_idx < 0 ? KV8_OK : kv8_device_open(&device, device_idx);
    for (int dtype = KV8_F32; status == KV8_OK && dtype < KV8_DTYPE_COUNT; dtype++)
        status = find_kv_bytes(model->model, device, (kv8_dtype)dtype, &kv[dtype]);
    if (status == KV8_OK && device != NULL)
        status = count_memory(directory, device, model->threads, memory);
    kv8_device_close(device);
    return status;
}

/* Tokens whose KV fits beside the model, in the layers that keep every token. */
static uint64_t tokens_that_fit(const kv8_model_memory *m, const kv_bytes *kv) {
    const uint64_t left = m->available > m->total ? m->available - m->total : 0;
    return kv->unwindowed > 0 ? left / kv->unwindowed : 0;
}

static bool model_fits(const kv8_model_memory *m) {
    return m->total + m->loading <= m->available;
}

/* Why the steps that are not persistent are not, each reason once. */
static void print_why_not(const kv_bytes kv[KV8_DTYPE_COUNT]) {
    const char *said = NULL;
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++) {
        const char *const why = kv[dtype].plan.why_not_persistent;
        if (why == NULL || (said != NULL && strcmp(why, said) == 0)) continue;
        printf("  Not persistent: %s.\n", why);
        said = why;
    }
}

static void print_memory(const kv8_model_memory *m, const kv_bytes kv[KV8_DTYPE_COUNT]) {
    const struct {
        const char *part;
        uint64_t bytes;
    } parts[] = {{"dense weights", m->dense},     {"experts", m->experts},
                 {"activations", m->activations}, {"logits", m->logits},
                 {"workspaces", m->workspaces},   {"the model", m->total},
                 {"while it loads", m->loading},  {"free", m->available}};
    printf("\n  memory on the GPU, GB\n");
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        printf("  %-17s %9.3f\n", parts[i].part, (double)parts[i].bytes * 1e-9);
    if (!model_fits(m)) {
        printf("  The model does not fit; experts in host memory are not offered.\n");
        return;
    }
    printf("\n  tokens of KV that fit beside it, and how a step of one token is launched\n");
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++)
        printf("  %-10s %12llu  %s%s\n", kv8_dtype_name((kv8_dtype)dtype),
               (unsigned long long)tokens_that_fit(m, &kv[dtype]),
               path_name(&kv[dtype]) == NULL ? "none: " : path_name(&kv[dtype]),
               kv[dtype].why_none);
    print_why_not(kv);
    printf("  Layers with a window take theirs besides, once a sequence.\n");
}

static json_t *plans_json(const kv_bytes kv[KV8_DTYPE_COUNT]) {
    json_t *const plans = json_object();
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++)
        json_object_set_new(
            plans, kv8_dtype_name((kv8_dtype)dtype),
            json_pack("{s:s*, s:s*, s:s*}", "path", path_name(&kv[dtype]), "why_none",
                      path_name(&kv[dtype]) == NULL ? kv[dtype].why_none : NULL,
                      "why_not_persistent", kv[dtype].plan.why_not_persistent));
    return plans;
}

static json_t *memory_json(const kv8_model_memory *m, const kv_bytes kv[KV8_DTYPE_COUNT]) {
    json_t *const tokens = json_object();
    for (int dtype = KV8_F32; dtype < KV8_DTYPE_COUNT; dtype++)
        json_object_set_new(tokens, kv8_dtype_name((kv8_dtype)dtype),
                            json_integer((json_int_t)tokens_that_fit(m, &kv[dtype])));
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:o, s:o}", "dense",
                     (json_int_t)m->dense, "experts", (json_int_t)m->experts, "activations",
                     (json_int_t)m->activations, "logits", (json_int_t)m->logits, "workspaces",
                     (json_int_t)m->workspaces, "total", (json_int_t)m->total, "loading",
                     (json_int_t)m->loading, "available", (json_int_t)m->available, "fits",
                     model_fits(m), "kv_tokens", tokens, "one_token", plans_json(kv));
}

/* --- scales --- */

static void print_side(const float *scales, int32_t num) {
    for (int32_t i = 0; i < num; i++) printf(" %10.4g", (double)scales[i]);
}

/* What a cache would be loaded with: a line per layer and side. */
static void print_scales(const cli_scales *scales, const kv8_scale_data *data, const char *path) {
    printf("\nscales %s\n  form              %s, of %s codes, %s\n  layers, KV heads  %d, %d\n",
           path, kv8_scale_format_name(data->format), kv8_dtype_name(data->dtype),
           data->per_tensor ? "one for each of K and V" : "by head", data->num_layers,
           data->num_kv_heads);
    if (data->num_tokens > 0)
        printf("  fitted            by %s to %llu tokens\n", data->method,
               (unsigned long long)data->num_tokens);
    for (int32_t i = 0; i < 2 * data->num_layers; i++) {
        printf("  %3d %c", i / 2, i % 2 == 0 ? 'K' : 'V');
        if (data->kv_dtypes != NULL) printf(" %-8s", kv8_dtype_name(data->kv_dtypes[i]));
        print_side(i % 2 == 0 ? scales->k[i / 2] : scales->v[i / 2], data->num_kv_heads);
        printf("\n");
    }
}

static json_t *scales_json(const cli_scales *scales, const kv8_scale_data *data) {
    json_t *const rows = json_array();
    for (int32_t i = 0; i < 2 * data->num_layers; i++) {
        const float *const side = i % 2 == 0 ? scales->k[i / 2] : scales->v[i / 2];
        json_t *const numbers = json_array();
        for (int32_t h = 0; h < data->num_kv_heads; h++)
            json_array_append_new(numbers, json_real((double)side[h]));
        json_array_append_new(
            rows,
            json_pack("{s:i, s:s, s:s*, s:o}", "layer", i / 2, "tensor", i % 2 == 0 ? "K" : "V",
                      "kv", data->kv_dtypes == NULL ? NULL : kv8_dtype_name(data->kv_dtypes[i]),
                      "scales", numbers));
    }
    return json_pack("{s:s, s:s, s:b, s:o}", "format", kv8_scale_format_name(data->format), "dtype",
                     kv8_dtype_name(data->dtype), "per_tensor", data->per_tensor, "rows", rows);
}

/* --- the verb --- */

static int print_tensor(void *cookie, const kv8_tensor_info *tensor) {
    (void)cookie;
    char shape[128] = "";
    size_t at = 0;
    for (int32_t i = 0; i < tensor->num_dims && at < sizeof shape; i++)
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lld", i > 0 ? ", " : "",
                               (long long)tensor->shape[i]);
    printf("  %-52s %-5s [%s]\n", tensor->name, tensor->dtype, shape);
    return 0;
}

typedef struct info_args {
    const char *model, *scales, *device;
    int32_t device_idx; /* -1 = none named */
    bool tensors, json;
} info_args;

static int parse(info_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"tensors", NULL, "list every tensor", CLI_FLAG, &args->tensors},
        {"scales", "FILE", "show the K and V scales that MODEL would take from a file", CLI_TEXT,
         &args->scales},
        {"device", "DEVICE",
         "cuda or cuda:N: that GPU, and what MODEL takes of its memory\n"
         "and how much KV fits beside it, without loading it",
         CLI_TEXT, &args->device},
        {"json", NULL, "print one JSON object: machine, model, scales", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 info [MODEL] [options]",
        .about =
            "Prints what this machine offers and, with MODEL, what the checkpoint holds and\n"
            "what its KV cache takes in each format.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
        .model_is_optional = true,
    };
    const int status = cli_parse(&command, argc, argv, &args->model);
    if (status >= 0) return status;
    if (args->scales != NULL && args->model == NULL) return cli_fail("--scales needs a MODEL");
    const int named = cli_device(args->device, &args->device_idx);
    if (named != CLI_OK) return named;
    if (!args->tensors) return -1;
    if (args->json) return cli_fail("--tensors is for the text, --json lists them always");
    return args->model == NULL ? cli_fail("--tensors needs a MODEL") : -1;
}

static int print_all(const info_args *args, const machine *m, const cli_model *model,
                     const cli_scales *scales) {
    kv_bytes kv[KV8_DTYPE_COUNT] = {{0}};
    kv8_model_memory memory = KV8_MODEL_MEMORY_INIT;
    const bool is_placed = model != NULL && args->device_idx >= 0;
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    if (scales != NULL && kv8_scale_file_get(scales->file, &data) != KV8_OK)
        return cli_fail_status(KV8_ERR_INVALID);
    const kv8_status placed =
        model == NULL ? KV8_OK : place(args->model, model, args->device_idx, &memory, kv);
    if (placed != KV8_OK) return cli_fail_status(placed);
    if (args->json) {
        json_t *root =
            json_pack("{s:s, s:o}", "version", kv8_version(), "machine", machine_json(m));
        if (model != NULL &&
            json_object_set_new(root, "model", model_json(model, args->model, kv)) != 0) {
            json_decref(root);
            root = NULL; /* no memory, says the writer */
        }
        if (root != NULL && is_placed)
            json_object_set_new(root, "gpu_memory", memory_json(&memory, kv));
        if (root != NULL && scales != NULL)
            json_object_set_new(root, "scales", scales_json(scales, &data));
        const int status = cli_write_json(root, stdout, "stdout");
        return status == CLI_OK ? cli_finish_stdout() : status;
    }
    print_machine(m);
    if (model != NULL) {
        print_model(args->model, &model->info, kv);
        if (is_placed) print_memory(&memory, kv);
        if (args->tensors) {
            printf("\n");
            kv8_model_visit_tensors(model->model, print_tensor, NULL);
        }
    }
    if (scales != NULL) print_scales(scales, &data, args->scales);
    return cli_finish_stdout();
}

int cmd_info(int argc, char **argv) {
    info_args args = {0};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    machine m;
    const kv8_status found = find_machine(&m, args.device_idx);
    if (found != KV8_OK) return cli_fail_status(found);
    if (args.model == NULL) return print_all(&args, &m, NULL, NULL);
    cli_model model;
    status = cli_model_open(&model, &(cli_opening){.directory = args.model, .threads = 1});
    cli_scales scales = {0};
    if (status == CLI_OK) status = cli_scales_open(&scales, args.scales, &model);
    if (status == CLI_OK)
        status = print_all(&args, &m, &model, args.scales == NULL ? NULL : &scales);
    cli_scales_close(&scales);
    cli_model_close(&model);
    return status;
}
