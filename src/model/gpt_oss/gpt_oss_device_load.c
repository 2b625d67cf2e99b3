/* gpt_oss_device_load.c - the weights of gpt-oss from mapped files into a GPU's memory: dense ones
 * as they are, Q, K and V one under the other; experts by way of a staging area, from which a
 * kernel writes them in the order that the products read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "gpt_oss.h"
#include "gpt_oss_device.h"

enum { BF16_BYTES = 2, ALIGNMENT = 256, STAGED_BYTES = 64 << 20 };

/* --- dense --- */

static kv8_status send_rows(kv8_device_loader *loader, const kv8_linear *linear, uint8_t *weight,
                            uint8_t *bias) {
    const size_t rows = (size_t)linear->weight.rows, cols = (size_t)linear->weight.cols;
    KV8_TRY(kv8_device_loader_send(loader, weight, linear->weight.data, rows * cols * BF16_BYTES));
    return kv8_device_loader_send(loader, bias, linear->bias, rows * BF16_BYTES);
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

static kv8_status load_layer(const kv8_model *model, kv8_device_loader *loader, int32_t idx,
                             uint8_t *staging) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_layer *const from = &own->weights.layers[idx];
    const kv8_gpt_oss_device_layer *const to = &own->device->layers[idx];
    const kv8_linear *const parts[] = {&from->q, &from->k, &from->v};
    uint8_t *weight = to->qkv, *bias = to->qkv_bias;
    KV8_TRY(send_gain(model, loader, &from->attention_norm, "attention norm", to->attention_norm));
    for (int i = 0; i < 3; i++) {
        const size_t rows = (size_t)parts[i]->weight.rows;
        KV8_TRY(send_rows(loader, parts[i], weight, bias));
        weight += rows * (size_t)parts[i]->weight.cols * BF16_BYTES;
        bias += rows * BF16_BYTES;
    }
    KV8_TRY(send_rows(loader, &from->o, to->o, to->o_bias));
    KV8_TRY(send_gain(model, loader, &from->mlp_norm, "expert norm", to->mlp_norm));
    KV8_TRY(send_rows(loader, &from->router, to->router, to->router_bias));
    KV8_TRY(
        load_part(own->device, loader, &from->gate_up, KV8_EXPERTS_GATE_UP, staging, to->gate_up));
    return load_part(own->device, loader, &from->down, KV8_EXPERTS_DOWN, staging, to->down);
}

static kv8_status load_all(const kv8_model *model, kv8_device_loader *loader, uint8_t *staging) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_weights *const w = &own->weights;
    kv8_gpt_oss_device *const d = own->device;
    const size_t table = (size_t)(w->embedding.rows * w->embedding.cols) * BF16_BYTES;
    const float *const inv_freq = kv8_rope_inv_freq(own->rope, &d->rope_factor);
    KV8_TRY(kv8_device_loader_send(loader, d->embedding, w->embedding.data, table));
    KV8_TRY(kv8_device_loader_send(loader, d->head, w->head.data, table));
    KV8_TRY(send_gain(model, loader, &w->final_norm, "final norm", d->final_norm));
    KV8_TRY(kv8_device_loader_send(loader, d->sinks, w->sinks, w->num_sinks * sizeof *w->sinks));
    KV8_TRY(kv8_device_loader_send(loader, d->inv_freq, inv_freq,
                                   (size_t)own->config.head_dim / 2 * sizeof *inv_freq));
    for (int32_t i = 0; i < own->config.num_layers; i++)
        KV8_TRY(load_layer(model, loader, i, staging));
    return KV8_OK;
}

kv8_status kv8_gpt_oss_device_load(kv8_model *model, kv8_device_loader *loader) {
    const kv8_gpt_oss *const own = model->own;
    kv8_gpt_oss_device *const d = own->device;
    const size_t bytes = model->on_device->memory.passing;
    void *staging = NULL;
    KV8_TRY(kv8_device_experts_create(&d->experts, model->options.device, &d->shape,
                                      kv8_gpt_oss_device_rows(model)));
    if (model->options.batch_invariant == 1) kv8_device_experts_fix_order(d->experts);
    KV8_TRY(kv8_device_alloc(model->options.device, bytes, &staging));
    kv8_status status = load_all(model, loader, staging);
    if (status == KV8_OK) status = kv8_device_loader_finish(loader);
    kv8_device_free(model->options.device, staging);
    return status;
}
