/* gpt_oss_device.c - gpt-oss on a GPU: what lies where in its memory, and a step's layers as
 * launches.
 *
 *   QKV, rope of q            of rows that come normed; k and v f32: what is stored is rounded once
 *   append, attention         model_attention_device.c, k rotated as it is stored
 *   O into the residual
 *   experts into the residual device_experts.h: from the norm on, and with the next layer's
 *
 * From the last layer's attention on only rows whose logits are wanted go on, where they are the
 * last ones of their sequences.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss_device.h"

#include "gpt_oss.h"

enum { WORD_BYTES = 2 }; /* of bf16 and f16 */

static int32_t q_width(const kv8_gpt_oss_config *c) {
    return c->num_qo_heads * c->head_dim;
}
static int32_t kv_width(const kv8_gpt_oss_config *c) {
    return c->num_kv_heads * c->head_dim;
}
static int32_t qkv_width(const kv8_gpt_oss_config *c) {
    return q_width(c) + 2 * kv_width(c);
}

static kv8_status create(kv8_model *model) {
    kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    kv8_device *const device = model->options.device;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(model->options.allocator, 1, sizeof(kv8_gpt_oss_device), "model on a GPU",
                      &memory));
    kv8_gpt_oss_device *const d = own->device = memory;
    KV8_TRY(kv8_alloc(model->options.allocator, (size_t)c->num_layers, sizeof *d->layers,
                      "layers on a GPU", &memory));
    d->layers = memory;
    d->shape = (kv8_experts_shape){.num_experts = c->num_experts,
                                   .top_k = c->num_experts_per_token,
                                   .hidden = c->hidden_size,
                                   .intermediate = c->intermediate_size,
                                   .alpha = c->swiglu_alpha,
                                   .limit = c->swiglu_limit};
    KV8_TRY(kv8_device_ops_create(&d->ops, device));
    if (model->options.batch_invariant == 1) kv8_device_ops_fix_order(d->ops);
    return kv8_gpt_oss_token_create(model);
}

void kv8_gpt_oss_device_close(kv8_model *model) {
    kv8_gpt_oss *const own = model->own;
    kv8_gpt_oss_device *const d = own->device;
    if (d == NULL) return;
    kv8_device_experts_destroy(d->experts);
    kv8_device_ops_destroy(d->ops);
    kv8_release(model->options.allocator, d->layers, (size_t)own->config.num_layers,
                sizeof *d->layers);
    kv8_release(model->options.allocator, d, 1, sizeof *d);
    own->device = NULL;
}

/* --- memory --- */

static void *take_words(kv8_device_memory *memory, int64_t rows, int64_t cols) {
    return kv8_device_memory_take(memory, KV8_PART_DENSE, (size_t)(rows * cols) * WORD_BYTES);
}

static void lay_out_layer(const kv8_gpt_oss_config *c, const kv8_experts_shape *shape,
                          kv8_device_memory *memory, kv8_gpt_oss_device_layer *layer) {
    const size_t experts = (size_t)c->num_experts;
    layer->attention_norm = take_words(memory, 1, c->hidden_size);
    layer->qkv = take_words(memory, qkv_width(c), c->hidden_size);
    layer->qkv_bias = take_words(memory, 1, qkv_width(c));
    layer->o = take_words(memory, c->hidden_size, q_width(c));
    layer->o_bias = take_words(memory, 1, c->hidden_size);
    layer->mlp_norm = take_words(memory, 1, c->hidden_size);
    layer->router = take_words(memory, c->num_experts, c->hidden_size);
    layer->router_bias = take_words(memory, 1, c->num_experts);
    layer->gate_up = kv8_device_memory_take(
        memory, KV8_PART_EXPERTS, experts * kv8_experts_part_bytes(shape, KV8_EXPERTS_GATE_UP));
    layer->down = kv8_device_memory_take(memory, KV8_PART_EXPERTS,
                                         experts * kv8_experts_part_bytes(shape, KV8_EXPERTS_DOWN));
}

static void *take_rows(kv8_device_memory *memory, int64_t rows, int64_t cols, size_t size) {
    return kv8_device_memory_take(memory, KV8_PART_ACTIVATIONS, (size_t)(rows * cols) * size);
}

static void lay_out_activations(kv8_model *model, const kv8_gpt_oss_config *c,
                                kv8_device_memory *memory, kv8_gpt_oss_device *d) {
    const int64_t n = kv8_model_most_rows(model);
    const int64_t normed = kv8_max_i64(n, model->on_device->logit_rows);
    d->residual = take_rows(memory, n, c->hidden_size, sizeof *d->residual);
    d->normed = take_rows(memory, normed, c->hidden_size, sizeof *d->normed);
    d->qkv = d->kept =
        take_rows(memory, n, kv8_max_i64(qkv_width(c), c->hidden_size), sizeof *d->qkv);
    d->q = take_rows(memory, n, q_width(c), sizeof *d->q);
    d->attended = take_rows(memory, n, q_width(c), sizeof *d->attended);
    d->cos_sin = take_rows(memory, n, c->head_dim, sizeof *d->cos_sin);
    if (model->options.num_input_layers > 0)
        model->layer_inputs = take_rows(memory, n * model->options.num_input_layers, c->hidden_size,
                                        sizeof *model->layer_inputs);
}

static void lay_out(kv8_model *model, kv8_device_memory *memory) {
    kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    kv8_gpt_oss_device *const d = own->device;
    d->embedding = take_words(memory, c->vocab_size, c->hidden_size);
    d->head = take_words(memory, c->vocab_size, c->hidden_size);
    d->final_norm = take_words(memory, 1, c->hidden_size);
    d->sinks = kv8_device_memory_take(
        memory, KV8_PART_DENSE, (size_t)c->num_layers * (size_t)c->num_qo_heads * sizeof *d->sinks);
    d->inv_freq = kv8_device_memory_take(memory, KV8_PART_DENSE,
                                         (size_t)c->head_dim / 2 * sizeof *d->inv_freq);
    for (int32_t i = 0; i < c->num_layers; i++) lay_out_layer(c, &d->shape, memory, &d->layers[i]);
    lay_out_activations(model, c, memory, d);
    kv8_gpt_oss_token_lay_out(model, memory);
    kv8_device_memory_count(
        memory, KV8_PART_WORKSPACES,
        kv8_device_experts_workspace_bytes(&d->shape, kv8_model_most_rows(model)));
    memory->passing = kv8_gpt_oss_staging_bytes(&own->weights.layers[0], c->num_experts);
}

/* --- a step --- */

/* Does the kernel that adds up the experts before layer idx norm its rows too? */
static bool experts_norm(const kv8_gpt_oss *own, int32_t idx) {
    return idx > 0 && idx < own->config.num_layers;
}

/* The rows of a step that go on: all, or from the last layer's attention on those of logits. */
typedef struct active_rows {
    kv8_device_batch batch;
    float *residual;
    uint16_t *q, *attended;
} active_rows;

/* All do where what leaves the last layer is kept. */
static bool keeps_logit_rows(const kv8_model *model, const kv8_device_batch *batch) {
    return batch->logit_indptr != NULL &&
           kv8_model_input_place(model, model->info.num_layers) == NULL;
}

static kv8_status keep_input(const kv8_model *model, int32_t layer, const active_rows *active) {
    float *const to = kv8_model_input_place(model, layer);
    const size_t num = (size_t)active->batch.num_rows * (size_t)model->info.hidden_size;
    return to == NULL
               ? KV8_OK
               : kv8_stream_copy(model->options.stream, to, active->residual, num * sizeof *to);
}

/* Buffers change places: q and k and v have been read. */
static kv8_status keep_logit_rows(const kv8_model *model, active_rows *rows) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_gpt_oss_device *const d = own->device;
    kv8_device_batch *const b = &rows->batch;
    kv8_stream *const stream = model->options.stream;
    const int32_t residual_bytes = c->hidden_size * (int32_t)sizeof *rows->residual;
    const int32_t q_bytes = q_width(c) * WORD_BYTES, n = b->num_logit_rows;
    KV8_TRY(kv8_device_gather(d->ops, stream, rows->residual, b->logit_rows, n, residual_bytes,
                              d->kept));
    KV8_TRY(kv8_device_gather(d->ops, stream, rows->q, b->logit_rows, n, q_bytes, rows->attended));
    b->num_rows = n;
    b->seq_rows = 1; /* or few */
    b->indptr = b->logit_indptr;
    rows->residual = d->kept;
    rows->q = d->attended;
    rows->attended = d->q;
    return KV8_OK;
}

static kv8_status run_attention(kv8_model *model, int32_t idx, active_rows *active) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_gpt_oss_device *const d = own->device;
    const kv8_gpt_oss_device_layer *const l = &d->layers[idx];
    kv8_stream *const stream = model->options.stream;
    const kv8_device_linear o = {l->o, l->o_bias, c->hidden_size, q_width(c)};
    const int32_t n = active->batch.num_rows;
    const kv8_device_norm_linear qkv = {.w = {l->qkv, l->qkv_bias, qkv_width(c), c->hidden_size},
                                        .is_normed = experts_norm(own, idx),
                                        .x = active->residual,
                                        .gain = l->attention_norm,
                                        .eps = c->rms_norm_eps,
                                        .normed = d->normed,
                                        .num_rotated = c->num_qo_heads,
                                        .head_dim = c->head_dim,
                                        .cos_sin = d->cos_sin,
                                        .rotated = active->q,
                                        .rotated_dtype = kv8_device_attention_q_dtype(model, idx),
                                        .y = d->qkv,
                                        .y_dtype = KV8_F32};
    KV8_TRY(kv8_device_norm_linear_run(d->ops, stream, &qkv, n));
    kv8_device_layer_rows rows = {.q = active->q,
                                  .k = d->qkv + q_width(c),
                                  .v = d->qkv + q_width(c) + kv_width(c),
                                  .kv_stride_row = qkv_width(c),
                                  .cos_sin = d->cos_sin,
                                  .sink_logit = d->sinks + (size_t)idx * (size_t)c->num_qo_heads};
    KV8_TRY(kv8_device_attention_append(model, idx, &active->batch, &rows));
    if (idx == c->num_layers - 1 && keeps_logit_rows(model, &active->batch))
        KV8_TRY(keep_logit_rows(model, active));
    if (active->batch.num_rows == 0) return KV8_OK;
    rows.q = active->q;
    rows.attended = active->attended;
    KV8_TRY(kv8_device_attention_run(model, idx, &active->batch, &rows));
    return kv8_device_linear_run(d->ops, stream, &o, active->attended, active->batch.num_rows,
                                 active->residual, KV8_F32, true);
}

static kv8_status run_experts(kv8_model *model, int32_t idx, const active_rows *active) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_gpt_oss_device *const d = own->device;
    const kv8_gpt_oss_device_layer *const l = &d->layers[idx];
    const kv8_device_batch *const batch = &active->batch;
    kv8_stream *const stream = model->options.stream;
    const kv8_experts_router router = {.w = l->router,
                                       .bias = l->router_bias,
                                       .gain = l->mlp_norm,
                                       .eps = c->rms_norm_eps,
                                       .normed = d->normed};
    kv8_experts_args args = {.gate_up = l->gate_up,
                             .down = l->down,
                             .router = &router,
                             .residual = active->residual,
                             .live_rows = batch->indptr + batch->num_seqs,
                             .n = batch->num_rows,
                             .seq_rows = batch->seq_rows};
    if (experts_norm(own, idx + 1)) {
        args.normed = d->normed;
        args.next_gain = d->layers[idx + 1].attention_norm;
        args.eps = c->rms_norm_eps;
    }
    KV8_TRY(kv8_device_experts_run(d->experts, stream, &args));
    return kv8_model_profile_count(model->on_device->profile, stream, idx,
                                   kv8_device_experts_get_offsets(d->experts));
}

kv8_status kv8_gpt_oss_device_layers(kv8_model *model, const kv8_device_batch *batch) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_gpt_oss_device *const d = own->device;
    kv8_stream *const stream = model->options.stream;
    active_rows active = {*batch, d->residual, d->q, d->attended};
    KV8_TRY(kv8_device_embed(d->ops, stream, d->embedding, batch->token_ids, batch->num_rows,
                             c->hidden_size, d->residual));
    KV8_TRY(kv8_device_rope_angles(d->ops, stream, batch->positions, batch->num_rows, d->inv_freq,
                                   d->rope_factor, c->head_dim, d->cos_sin));
    for (int32_t i = 0; i < c->num_layers; i++) {
        KV8_RANGE("layer %d", i);
        KV8_TRY(keep_input(model, i, &active));
        KV8_TRY(run_attention(model, i, &active));
        if (active.batch.num_rows > 0) KV8_TRY(run_experts(model, i, &active));
    }
    return keep_input(model, c->num_layers, &active);
}

kv8_status kv8_gpt_oss_device_logits(kv8_model *model, const kv8_device_batch *batch, int32_t first,
                                     int32_t num) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    const kv8_gpt_oss_device *const d = own->device;
    kv8_stream *const stream = model->options.stream;
    const kv8_device_linear head = {d->head, NULL, c->vocab_size, c->hidden_size};
    const bool kept = keeps_logit_rows(model, batch);
    KV8_TRY(kv8_device_rmsnorm(
        d->ops, stream, kept ? d->kept + (size_t)first * (size_t)c->hidden_size : d->residual,
        d->final_norm, c->rms_norm_eps, num, c->hidden_size,
        kept ? NULL : batch->logit_rows + first, d->normed));
    return kv8_device_linear_maxima(d->ops, stream, &head, d->normed, num, model->on_device->logits,
                                    model->on_device->maxima, &model->on_device->has_maxima);
}

const kv8_device_architecture kv8_gpt_oss_on_device = {.create = create,
                                                       .lay_out = lay_out,
                                                       .load = kv8_gpt_oss_device_load,
                                                       .layers = kv8_gpt_oss_device_layers,
                                                       .why_not_tokens = kv8_gpt_oss_why_not_tokens,
                                                       .max_tokens = KV8_TOKENS_MAX,
                                                       .tokens = kv8_gpt_oss_tokens_run,
                                                       .logits = kv8_gpt_oss_device_logits};
