/* model_step.c - a step of any architecture: everything is checked before the cache is touched, the
 * sequences grow, the architecture computes; what fails then takes the new tokens back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_device.h"

/* --- checks --- */

static kv8_status check_tokens(const kv8_model *model, const kv8_step *step) {
    const int32_t vocab = model->info.vocab_size, limit = model->options.max_step_tokens;
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

/* Fills old_lengths and positions; `extended` sequences have the step's tokens already. */
static kv8_status check_lengths(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                bool extended) {
    int32_t *const lengths = model->old_lengths;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        KV8_TRY(kv8_cache_seq_length(cache, step->seqs[i], &lengths[i]));
        const int32_t first = step->indptr[i], count = step->indptr[i + 1] - first;
        if (extended) lengths[i] -= count;
        if (lengths[i] < 0)
            return kv8_fail(KV8_ERR_INVALID,
                            "request %d of the step has %d tokens, its sequence %d", i, count,
                            lengths[i] + count);
        const int64_t length = (int64_t)lengths[i] + count;
        if (length > model->options.max_seq_len)
            return kv8_fail(KV8_ERR_INVALID,
                            "request %d would have %lld tokens, the limit of max_seq_len is %d", i,
                            (long long)length, model->options.max_seq_len);
        for (int32_t t = 0; t < count; t++) model->positions[first + t] = lengths[i] + t;
    }
    const int32_t twice = kv8_cache_find_twice(cache, step->seqs, step->num_seqs);
    if (twice < 0) return KV8_OK;
    int32_t first = 0;
    while (step->seqs[first] != step->seqs[twice]) first++;
    return kv8_fail(KV8_ERR_INVALID, "requests %d and %d of the step are one sequence", first,
                    twice);
}

/* `stay`: logits without a place to go to stay where they are computed. */
static kv8_status check_rows(const kv8_step *step, bool stay) {
    const int32_t rows = step->indptr[step->num_seqs];
    if (step->num_logit_rows < 0 || step->num_logit_rows > rows)
        return kv8_fail(KV8_ERR_INVALID, "%d rows of logits wanted, must be 0 to %d",
                        step->num_logit_rows, rows);
    if (step->num_logit_rows > 0 &&
        (step->logit_rows == NULL || (step->logits_out == NULL && !stay)))
        return kv8_fail(KV8_ERR_INVALID, "a step's logit_rows or logits_out is NULL");
    for (int32_t i = 0; i < step->num_logit_rows; i++) {
        const int32_t low = i == 0 ? 0 : step->logit_rows[i - 1] + 1;
        if (step->logit_rows[i] < low || step->logit_rows[i] >= rows)
            return kv8_fail(KV8_ERR_INVALID, "logit_rows[%d] is %d, must be from %d to %d", i,
                            step->logit_rows[i], low, rows - 1);
    }
    return KV8_OK;
}

/* --- the step --- */

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

static kv8_status check(kv8_model *model, kv8_cache *cache, const kv8_step *step, bool extended) {
    KV8_TRY(check_tokens(model, step));
    KV8_TRY(check_rows(step, extended && step->num_logit_rows <= kv8_model_held_logits(model)));
    KV8_TRY(model->on_device == NULL ? kv8_model_attention_fit(model, cache)
                                     : kv8_device_attention_fit(model, cache));
    return check_lengths(model, cache, step, extended);
}

static kv8_status compute(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                          const kv8_step_draw *draw, bool *draws_out) {
    KV8_RANGE("step of %d rows, %d requests", step->indptr[step->num_seqs], step->num_seqs);
    *draws_out = false;
    if (model->on_device != NULL) return kv8_model_device_step(model, cache, step, draw, draws_out);
    KV8_TRY(kv8_model_attention_load(model, cache, step));
    return model->architecture->compute(model, cache, step);
}

kv8_status kv8_model_step_extended(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                   const kv8_step_draw *draw, bool *draws_out) {
    KV8_TRY(check(model, cache, step, true));
    return compute(model, cache, step, draw, draws_out);
}

kv8_status kv8_model_step(kv8_model *model, kv8_cache *cache, const kv8_step *step) {
    if (model == NULL || cache == NULL || step == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_model_step: model, cache or step is NULL");
    KV8_TAKE_STRUCT(kv8_step, step);
    KV8_TRY(check(model, cache, step, false));
    int32_t extended = 0;
    kv8_status status = extend(cache, step, &extended);
    bool draws = false;
    if (status == KV8_OK) status = compute(model, cache, step, NULL, &draws);
    if (status != KV8_OK) {
        for (int32_t i = 0; i < extended; i++) {
            const kv8_status undone =
                kv8_cache_truncate(cache, step->seqs[i], model->old_lengths[i]);
            if (undone != KV8_OK) status = undone;
        }
    }
    return status;
}
