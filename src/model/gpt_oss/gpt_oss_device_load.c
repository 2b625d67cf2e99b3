/* gpt_oss_device_load.c - the weights of gpt-oss from mapped files into a GPU's memory: dense ones
 * become f16 there, Q, K and V one under the other; experts by way of a staging area, from which a
 * kernel writes them in the order that the products read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "gpt_oss.h"
#include "gpt_oss_device.h"

enum { BF16_BYTES = 2, ALIGNMENT = 256, STAGED_BYTES = 64 << 20 };

/* --- dense --- */

/* Matrices are numbered: those of a layer, then the head. */
enum { MATRIX_Q, MATRIX_K, MATRIX_V, MATRIX_O, MATRIX_ROUTER, LAYER_MATRICES };

typedef struct loading {
    const kv8_model *model;
    kv8_device_loader *loader;
    uint8_t *staging;
    uint64_t *first_bad; /* in the GPU's memory, of kv8_device_to_f16 */
    uint64_t *bad; /* its copy here: lives until memory is freed, which waits for the stream */
} loading;

static const kv8_weight *matrix_of(const kv8_gpt_oss_weights *weights, int32_t idx) {
    if (idx == LAYER_MATRICES * weights->num_layers) return &weights->head;
    const kv8_gpt_oss_layer *const l = &weights->layers[idx / LAYER_MATRICES];
    const kv8_linear *const parts[] = {&l->q, &l->k, &l->v, &l->o, &l->router};
    return &parts[idx % LAYER_MATRICES]->weight;
}

static kv8_status send_matrix(const loading *l, int32_t idx, uint8_t *to) {
    const kv8_gpt_oss *const own = l->model->own;
    const kv8_weight *const from = matrix_of(&own->weights, idx);
    const int64_t n = from->rows * from->cols;
    KV8_TRY(kv8_device_loader_send(l->loader, to, from->data, (size_t)n * BF16_BYTES));
    return kv8_device_to_f16(own->device->ops, l->loader->stream, to, n, idx, l->first_bad);
}
static kv8_status send_bias(const loading *l, const kv8_linear *from, uint8_t *to) {
    return kv8_device_loader_send(l->loader, to, from->bias,
                                  (size_t)from->weight.rows * BF16_BYTES);
}

/* Refuses a matrix with a value that f16 does not hold; waits for all that was sent. */
static kv8_status check_matrices(const loading *l) {
    const kv8_gpt_oss *const own = l->model->own;
    const kv8_checkpoint *const checkpoint = &l->model->checkpoint;
    KV8_TRY(kv8_stream_copy(l->loader->stream, l->bad, l->first_bad, sizeof *l->bad));
    KV8_TRY(kv8_device_loader_finish(l->loader));
    const kv8_bad_weight bad = kv8_device_bad_weight(*l->bad);
    if (bad.tensor < 0) return KV8_OK;
    const uint8_t *const at = (const uint8_t *)matrix_of(&own->weights, bad.tensor)->data +
                              (size_t)bad.element * BF16_BYTES;
    kv8_bf16 code;
    memcpy(&code, at, sizeof code);
    size_t i = 0;
    while (i + 1 < checkpoint->num_tensors &&
           !(at >= checkpoint->by_name[i]->data &&
             at < checkpoint->by_name[i]->data + checkpoint->by_name[i]->bytes))
        i++;
    const kv8_tensor *const tensor = checkpoint->by_name[i];
    return kv8_fail(KV8_ERR_UNSUPPORTED,
                    "%s: tensor \"%s\"[%zu] is %g; on a GPU weights are f16, at most 65504",
                    tensor->file, tensor->name, (size_t)(at - tensor->data) / BF16_BYTES,
                    (double)kv8_bf16_to_f32(code));
}

/* A gain in f32 goes over as bf16 where that holds every value. */
static kv8_status send_gain(const kv8_model *model, kv8_device_loader *loader, const kv8_gain *gain,
                            const char *name, uint8_t *to) {
    const size_t n = (size_t)model->info.hidden_size;
    if (gain->dtype == KV8_BF16) return kv8_device_loader_send(loader, to, gain->data, n * 2);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(model->options.allocator, n, sizeof(kv8_bf16), name, &memory));
    kv8_bf16 *const codes = memory;
    kv8_status status = KV8_OK;
    for (size_t i = 0; status == KV8_OK && i < n; i++) {
        float value;
        memcpy(&value, (const uint8_t *)gain->data + i * sizeof value, sizeof value);
        codes[i] = kv8_bf16_from_f32(value);
        if (kv8_bf16_to_f32(codes[i]) != value)
            status = kv8_fail(KV8_ERR_UNSUPPORTED,
                              "%s[%zu] is %.9g, which bf16 does not hold; on a GPU gains are bf16",
                              name, i, (double)value);
    }
    if (status == KV8_OK) status = kv8_device_loader_send(loader, to, codes, n * sizeof *codes);
    kv8_release(model->options.allocator, codes, n, sizeof *codes);
    return status;
}

/* --- experts --- */

/* Bytes of the checkpoint's tensors of one expert's part, and how many are staged at once. */
typedef struct expert_bytes {
    size_t blocks, scales, bias;
    int32_t at_once;
} expert_bytes;

static expert_bytes bytes_of(const kv8_gpt_oss_experts *experts, int32_t num_experts) {
    const size_t groups = (size_t)(experts->rows * (experts->cols / KV8_MXFP4_BLOCK));
    expert_bytes bytes = {.blocks = groups * KV8_MXFP4_BLOCK_BYTES,
                          .scales = groups,
                          .bias = (size_t)experts->rows * BF16_BYTES};
    const size_t each = bytes.blocks + bytes.scales + bytes.bias;
    bytes.at_once = (int32_t)kv8_max_i64(1, (int64_t)(STAGED_BYTES / each));
    if (bytes.at_once > num_experts) bytes.at_once = num_experts;
    return bytes;
}

static size_t staged_size(size_t each, int32_t count) {
    return kv8_round_up(each * (size_t)count, ALIGNMENT);
}

static size_t staged_part(const kv8_gpt_oss_experts *experts, int32_t num_experts) {
    const expert_bytes b = bytes_of(experts, num_experts);
    return staged_size(b.blocks, b.at_once) + staged_size(b.scales, b.at_once) +
           staged_size(b.bias, b.at_once);
}
size_t kv8_gpt_oss_staging_bytes(const kv8_gpt_oss_layer *layer, int32_t num_experts) {
    const size_t gate_up = staged_part(&layer->gate_up, num_experts);
    const size_t down = staged_part(&layer->down, num_experts);
    return gate_up > down ? gate_up : down;
}

/* Experts first, first + 1, .. of a part. */
static kv8_status load_some(const kv8_gpt_oss_device *d, kv8_device_loader *loader,
                            const kv8_gpt_oss_experts *from, const expert_bytes *bytes,
                            kv8_experts_part part, int32_t first, int32_t count, uint8_t *staging,
                            uint8_t *to) {
    uint8_t *const scales = staging + staged_size(bytes->blocks, bytes->at_once);
    uint8_t *const bias = scales + staged_size(bytes->scales, bytes->at_once);
    const size_t at = (size_t)first, n = (size_t)count;
    KV8_TRY(kv8_device_loader_send(loader, staging, from->blocks + at * bytes->blocks,
                                   n * bytes->blocks));
    KV8_TRY(kv8_device_loader_send(loader, scales, from->scales + at * bytes->scales,
                                   n * bytes->scales));
    KV8_TRY(kv8_device_loader_send(loader, bias, from->bias + at * bytes->bias, n * bytes->bias));
    const kv8_experts_source source = {staging, scales, bias, count};
    return kv8_device_experts_load(d->experts, loader->stream, part, &source,
                                   to + at * kv8_experts_part_bytes(&d->shape, part));
}

static kv8_status load_part(const kv8_gpt_oss_device *d, kv8_device_loader *loader,
                            const kv8_gpt_oss_experts *from, kv8_experts_part part,
                            uint8_t *staging, uint8_t *to) {
    const int32_t num = d->shape.num_experts;
    const expert_bytes bytes = bytes_of(from, num);
    for (int32_t first = 0; first < num; first += bytes.at_once) {
        const int32_t count = (int32_t)kv8_min_i64(bytes.at_once, num - first);
        KV8_TRY(load_some(d, loader, from, &bytes, part, first, count, staging, to));
    }
    return KV8_OK;
}

/* --- all of it --- */

static kv8_status load_layer(const loading *l, int32_t idx) {
    const kv8_gpt_oss *const own = l->model->own;
    const kv8_gpt_oss_layer *const from = &own->weights.layers[idx];
    const kv8_gpt_oss_device_layer *const to = &own->device->layers[idx];
    const kv8_linear *const parts[] = {&from->q, &from->k, &from->v};
    const int32_t first = idx * LAYER_MATRICES;
    uint8_t *weight = to->qkv, *bias = to->qkv_bias;
    KV8_TRY(send_gain(l->model, l->loader, &from->attention_norm, "attention norm",
                      to->attention_norm));
    for (int i = 0; i < 3; i++) {
        const size_t rows = (size_t)parts[i]->weight.rows;
        KV8_TRY(send_matrix(l, first + MATRIX_Q + i, weight));
        KV8_TRY(send_bias(l, parts[i], bias));
        weight += rows * (size_t)parts[i]->weight.cols * BF16_BYTES;
        bias += rows * BF16_BYTES;
    }
    KV8_TRY(send_matrix(l, first + MATRIX_O, to->o));
    KV8_TRY(send_bias(l, &from->o, to->o_bias));
    KV8_TRY(send_gain(l->model, l->loader, &from->mlp_norm, "expert norm", to->mlp_norm));
    KV8_TRY(send_matrix(l, first + MATRIX_ROUTER, to->router));
    KV8_TRY(send_bias(l, &from->router, to->router_bias));
    KV8_TRY(load_part(own->device, l->loader, &from->gate_up, KV8_EXPERTS_GATE_UP, l->staging,
                      to->gate_up));
    return load_part(own->device, l->loader, &from->down, KV8_EXPERTS_DOWN, l->staging, to->down);
}

static kv8_status load_all(const loading *l) {
    const kv8_gpt_oss *const own = l->model->own;
    const kv8_gpt_oss_weights *const w = &own->weights;
    kv8_device_loader *const loader = l->loader;
    kv8_gpt_oss_device *const d = own->device;
    const size_t table = (size_t)(w->embedding.rows * w->embedding.cols) * BF16_BYTES;
    const float *const inv_freq = kv8_rope_inv_freq(own->rope, &d->rope_factor);
    KV8_TRY(kv8_stream_fill(loader->stream, l->first_bad, 0xff, sizeof *l->first_bad));
    KV8_TRY(kv8_device_loader_send(loader, d->embedding, w->embedding.data, table));
    KV8_TRY(send_matrix(l, LAYER_MATRICES * w->num_layers, d->head));
    KV8_TRY(send_gain(l->model, loader, &w->final_norm, "final norm", d->final_norm));
    KV8_TRY(kv8_device_loader_send(loader, d->sinks, w->sinks, w->num_sinks * sizeof *w->sinks));
    KV8_TRY(kv8_device_loader_send(loader, d->inv_freq, inv_freq,
                                   (size_t)own->config.head_dim / 2 * sizeof *inv_freq));
    for (int32_t i = 0; i < own->config.num_layers; i++) KV8_TRY(load_layer(l, i));
    return check_matrices(l);
}

kv8_status kv8_gpt_oss_device_load(kv8_model *model, kv8_device_loader *loader) {
    const kv8_gpt_oss *const own = model->own;
    kv8_gpt_oss_device *const d = own->device;
    kv8_device *const device = model->options.device;
    void *staging = NULL, *first_bad = NULL;
    KV8_TRY(kv8_device_experts_create(&d->experts, device, &d->shape, kv8_model_most_rows(model)));
    if (model->options.batch_invariant == 1) kv8_device_experts_fix_order(d->experts);
    kv8_status status = kv8_device_alloc(device, model->on_device->memory.passing, &staging);
    if (status == KV8_OK) status = kv8_device_alloc(device, sizeof(uint64_t), &first_bad);
    uint64_t bad = 0;
    const loading l = {model, loader, staging, first_bad, &bad};
    if (status == KV8_OK) status = load_all(&l);
    kv8_device_free(device, first_bad);
    kv8_device_free(device, staging);
    return status;
}
