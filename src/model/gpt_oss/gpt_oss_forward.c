/* gpt_oss_forward.c - one step of gpt-oss over a batch: embed, layers, logits of the wanted rows.
 *
 *   x = x + Wo attention(norm(x))        rope, sinks, window: gpt_oss_attention.c
 *   x = x + experts(norm(x))             gpt_oss_experts.c
 *   logits = head norm(x)
 *
 * All activations are f32. Everything is checked before the cache is touched; what fails later
 * takes the new tokens back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss_model.h"

/* --- checks --- */

static kv8_status check_tokens(const kv8_model *model, const kv8_step *step) {
    const int32_t vocab = model->config.vocab_size, limit = model->options.max_step_tokens;
    if (step->num_seqs < 1 || step->num_seqs > model->options.max_step_seqs)
        return kv8_fail(KV8_ERR_INVALID, "a step of %d requests, must be 1 to %d", step->num_seqs,
                        model->options.max_step_seqs);
    if (step->seqs == NULL || step->indptr == NULL || step->token_ids == NULL)
        return kv8_fail(KV8_ERR_INVALID, "a step's seqs, indptr or token_ids is NULL");
    if (step->indptr[0] != 0)
        return kv8_fail(KV8_ERR_INVALID, "a step's indptr[0] is %d, must be 0", step->indptr[0]);
    for (int32_t i = 0; i < step->num_seqs; i++) {
        if (step->indptr[i + 1] <= step->indptr[i])
            return kv8_fail(KV8_ERR_INVALID, "request %d of the step has no token (indptr %d, %d)",
                            i, step->indptr[i], step->indptr[i + 1]);
        if (step->indptr[i + 1] > limit)
            return kv8_fail(KV8_ERR_INVALID,
                            "a step of %d tokens or more, this model was opened for %d",
                            step->indptr[i + 1], limit);
    }
    for (int32_t t = 0; t < step->indptr[step->num_seqs]; t++) {
        if (step->token_ids[t] < 0 || step->token_ids[t] >= vocab)
            return kv8_fail(KV8_ERR_INVALID, "token id %d at row %d is not from 0 to %d",
                            step->token_ids[t], t, vocab - 1);
    }
    return KV8_OK;
}

/* Fills old_lengths and positions. */
static kv8_status check_lengths(kv8_model *model, const kv8_cache *cache, const kv8_step *step) {
    int32_t *const lengths = model->act.old_lengths;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        for (int32_t other = 0; other < i; other++) {
            if (step->seqs[other] == step->seqs[i])
                return kv8_fail(KV8_ERR_INVALID, "requests %d and %d of the step are one sequence",
                                other, i);
        }
        KV8_TRY(kv8_cache_seq_length(cache, step->seqs[i], &lengths[i]));
        const int32_t first = step->indptr[i], count = step->indptr[i + 1] - first;
        const int64_t length = (int64_t)lengths[i] + count;
        if (length > model->options.max_seq_len)
            return kv8_fail(KV8_ERR_INVALID,
                            "request %d would have %lld tokens, the limit of max_seq_len is %d", i,
                            (long long)length, model->options.max_seq_len);
        for (int32_t t = 0; t < count; t++) model->act.positions[first + t] = lengths[i] + t;
    }
    return KV8_OK;
}

static kv8_status check_rows(const kv8_step *step) {
    const int32_t rows = step->indptr[step->num_seqs];
    if (step->num_logit_rows < 0 || step->num_logit_rows > rows)
        return kv8_fail(KV8_ERR_INVALID, "%d rows of logits wanted, must be 0 to %d",
                        step->num_logit_rows, rows);
    if (step->num_logit_rows > 0 && (step->logit_rows == NULL || step->logits_out == NULL))
        return kv8_fail(KV8_ERR_INVALID, "a step's logit_rows or logits_out is NULL");
    for (int32_t i = 0; i < step->num_logit_rows; i++) {
        const int32_t low = i == 0 ? 0 : step->logit_rows[i - 1] + 1;
        if (step->logit_rows[i] < low || step->logit_rows[i] >= rows)
            return kv8_fail(KV8_ERR_INVALID, "logit_rows[%d] is %d, must be from %d to %d", i,
                            step->logit_rows[i], low, rows - 1);
    }
    return KV8_OK;
}

/* --- computing --- */

static void embed(const kv8_model *model, const kv8_step *step) {
    for (int32_t t = 0; t < step->indptr[step->num_seqs]; t++)
        kv8_weight_row(&model->weights.embedding, step->token_ids[t],
                       model->act.residual + (size_t)t * (size_t)model->config.hidden_size);
}

static void normalize(const kv8_model *model, const float *x, const kv8_gain *gain, int32_t n) {
    kv8_rmsnorm(model->options.isa, x, (size_t)n, (size_t)model->config.hidden_size, gain->data,
                gain->dtype, model->config.rms_norm_eps, model->act.normed);
}

static kv8_matmul_job linear_job(const kv8_linear *linear, const float *x, float *y, int32_t n) {
    return (kv8_matmul_job){.w = linear->weight,
                            .bias = linear->bias,
                            .x = x,
                            .x_stride = linear->weight.cols,
                            .y = y,
                            .y_stride = linear->weight.rows,
                            .num_rows = n};
}

static kv8_status run_layer(kv8_model *model, kv8_cache *cache, int32_t idx, const kv8_step *step) {
    const kv8_gpt_oss_layer *const layer = &model->weights.layers[idx];
    const kv8_activations *const a = &model->act;
    const int32_t n = step->indptr[step->num_seqs];
    normalize(model, a->residual, &layer->attention_norm, n);
    a->jobs[0] = linear_job(&layer->q, a->normed, a->q, n);
    a->jobs[1] = linear_job(&layer->k, a->normed, a->k, n);
    a->jobs[2] = linear_job(&layer->v, a->normed, a->v, n);
    kv8_matmul_run(model->options.isa, model->options.threads, a->jobs, 3);
    KV8_TRY(kv8_attention_set_run(model, cache, idx, step));
    a->jobs[0] = linear_job(&layer->o, a->attended, a->projected, n);
    kv8_matmul_run(model->options.isa, model->options.threads, a->jobs, 1);
    kv8_axpy(model->options.isa, 1.0f, a->projected, (size_t)n * (size_t)model->config.hidden_size,
             a->residual);
    normalize(model, a->residual, &layer->mlp_norm, n);
    kv8_experts_run(model, layer, n);
    return KV8_OK;
}

/* Norm and head over the wanted rows only: a vocabulary of logits is large. */
static void write_logits(kv8_model *model, const kv8_step *step) {
    const kv8_activations *const a = &model->act;
    const kv8_weight *const head = &model->weights.head;
    const size_t hidden = (size_t)model->config.hidden_size;
    const kv8_gain *const gain = &model->weights.final_norm;
    if (step->num_logit_rows == 0) return;
    for (int32_t i = 0; i < step->num_logit_rows; i++)
        kv8_rmsnorm(model->options.isa, a->residual + (size_t)step->logit_rows[i] * hidden, 1,
                    hidden, gain->data, gain->dtype, model->config.rms_norm_eps,
                    a->normed + (size_t)i * hidden);
    a->jobs[0] = (kv8_matmul_job){.w = *head,
                                  .x = a->normed,
                                  .x_stride = head->cols,
                                  .y = step->logits_out,
                                  .y_stride = head->rows,
                                  .num_rows = step->num_logit_rows};
    kv8_matmul_run(model->options.isa, model->options.threads, a->jobs, 1);
}

static kv8_status compute(kv8_model *model, kv8_cache *cache, const kv8_step *step) {
    KV8_TRY(kv8_attention_set_load(model, cache, step));
    kv8_rope_angles(model->rope, model->act.positions, (size_t)step->indptr[step->num_seqs],
                    model->act.cos_sin);
    embed(model, step);
    for (int32_t i = 0; i < model->config.num_layers; i++)
        KV8_TRY(run_layer(model, cache, i, step));
    write_logits(model, step);
    return KV8_OK;
}

/* Takes room for the new tokens; *done_out counts the sequences that got it. */
static kv8_status extend(kv8_cache *cache, const kv8_step *step, int32_t *done_out) {
    for (int32_t i = 0; i < step->num_seqs; i++) {
        *done_out = i;
        KV8_TRY(kv8_cache_extend(cache, step->seqs[i], step->indptr[i + 1] - step->indptr[i],
                                 step->token_ids + step->indptr[i]));
    }
    *done_out = step->num_seqs;
    return KV8_OK;
}

kv8_status kv8_model_step(kv8_model *model, kv8_cache *cache, const kv8_step *step) {
    if (model == NULL || cache == NULL || step == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_model_step: model, cache or step is NULL");
    KV8_TRY(check_tokens(model, step));
    KV8_TRY(check_rows(step));
    KV8_TRY(kv8_attention_set_fit(model, cache));
    KV8_TRY(check_lengths(model, cache, step));
    int32_t extended = 0;
    kv8_status status = extend(cache, step, &extended);
    if (status == KV8_OK) status = compute(model, cache, step);
    if (status != KV8_OK) {
        for (int32_t i = 0; i < extended; i++) {
            const kv8_status undone =
                kv8_cache_truncate(cache, step->seqs[i], model->act.old_lengths[i]);
            if (undone != KV8_OK) status = undone;
        }
    }
    return status;
}
