/* gpt_oss_forward.c - one step of gpt-oss over a batch: embed, layers, logits of the wanted rows.
 *
 *   x = x + Wo attention(norm(x))        rope, sinks, window: model_attention.c
 *   x = x + experts(norm(x))             gpt_oss_experts.c
 *   logits = head norm(x)
 *
 * All activations are f32.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "gpt_oss.h"

static void embed(const kv8_gpt_oss *own, const kv8_step *step) {
    for (int32_t t = 0; t < step->indptr[step->num_seqs]; t++)
        kv8_weight_row(&own->weights.embedding, step->token_ids[t],
                       own->act.residual + (size_t)t * (size_t)own->config.hidden_size);
}

static void normalize(const kv8_gpt_oss *own, const float *x, const kv8_gain *gain, int32_t n) {
    kv8_rmsnorm(own->options->isa, x, (size_t)n, (size_t)own->config.hidden_size, gain->data,
                gain->dtype, own->config.rms_norm_eps, own->act.normed);
}

/* Moves the rows whose logits are wanted to the front: nothing more is computed of the others. */
static int32_t keep_logit_rows(const kv8_gpt_oss *own, const kv8_step *step) {
    const kv8_activations *const a = &own->act;
    const size_t hidden = (size_t)own->config.hidden_size;
    const size_t width = (size_t)own->config.num_qo_heads * (size_t)own->config.head_dim;
    for (int32_t i = 0; i < step->num_logit_rows; i++) {
        const size_t from = (size_t)step->logit_rows[i], to = (size_t)i;
        if (from == to) continue;
        memcpy(a->residual + to * hidden, a->residual + from * hidden, hidden * sizeof(float));
        memcpy(a->attended + to * width, a->attended + from * width, width * sizeof(float));
    }
    return step->num_logit_rows;
}

static void keep_input(const kv8_model *model, int32_t layer, int32_t n) {
    const kv8_gpt_oss *const own = model->own;
    float *const to = kv8_model_input_place(model, layer);
    if (to != NULL)
        memcpy(to, own->act.residual, (size_t)n * (size_t)own->config.hidden_size * sizeof *to);
}

static kv8_status run_layer(kv8_model *model, kv8_cache *cache, int32_t idx, const kv8_step *step) {
    kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_layer *const layer = &own->weights.layers[idx];
    const kv8_activations *const a = &own->act;
    const bool keeps_all = kv8_model_input_place(model, own->config.num_layers) != NULL;
    int32_t n = step->indptr[step->num_seqs];
    keep_input(model, idx, n);
    normalize(own, a->residual, &layer->attention_norm, n);
    a->jobs[0] = kv8_linear_job(&layer->q, a->normed, a->q, n);
    a->jobs[1] = kv8_linear_job(&layer->k, a->normed, a->k, n);
    a->jobs[2] = kv8_linear_job(&layer->v, a->normed, a->v, n);
    kv8_matmul_run(own->options->isa, own->options->threads, a->jobs, 3);
    const kv8_layer_rows rows = {.q = a->q,
                                 .k = a->k,
                                 .v = a->v,
                                 .rope = own->rope,
                                 .cos_sin = a->cos_sin,
                                 .sink_logit = layer->sink_logit,
                                 .attended = a->attended};
    KV8_TRY(kv8_model_attention_run(model, cache, idx, step, &rows));
    if (idx == own->config.num_layers - 1 && !keeps_all) n = keep_logit_rows(own, step);
    if (n == 0) return KV8_OK;
    a->jobs[0] = kv8_linear_job(&layer->o, a->attended, a->projected, n);
    kv8_matmul_run(own->options->isa, own->options->threads, a->jobs, 1);
    kv8_axpy(own->options->isa, 1.0f, a->projected, (size_t)n * (size_t)own->config.hidden_size,
             a->residual);
    normalize(own, a->residual, &layer->mlp_norm, n);
    kv8_gpt_oss_experts_run(own, layer, n);
    return KV8_OK;
}

/* Norm and head of the rows that the last layer kept. */
static void write_logits(const kv8_gpt_oss *own, const kv8_step *step) {
    const kv8_activations *const a = &own->act;
    const kv8_weight *const head = &own->weights.head;
    if (step->num_logit_rows == 0) return;
    normalize(own, a->residual, &own->weights.final_norm, step->num_logit_rows);
    a->jobs[0] = (kv8_matmul_job){.w = *head,
                                  .x = a->normed,
                                  .x_stride = head->cols,
                                  .y = step->logits_out,
                                  .y_stride = head->rows,
                                  .num_rows = step->num_logit_rows};
    kv8_matmul_run(own->options->isa, own->options->threads, a->jobs, 1);
}

kv8_status kv8_gpt_oss_compute(kv8_model *model, kv8_cache *cache, const kv8_step *step) {
    const kv8_gpt_oss *const own = model->own;
    kv8_rope_angles(own->rope, model->positions, (size_t)step->indptr[step->num_seqs],
                    own->act.cos_sin);
    embed(own, step);
    for (int32_t i = 0; i < own->config.num_layers; i++) KV8_TRY(run_layer(model, cache, i, step));
    if (kv8_model_input_place(model, own->config.num_layers) != NULL) {
        keep_input(model, own->config.num_layers, step->indptr[step->num_seqs]);
        keep_logit_rows(own, step);
    }
    write_logits(own, step);
    return KV8_OK;
}
