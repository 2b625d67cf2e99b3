/* finish.c - the end of a row: join its parts, divide, let the sink in, store.
 *
 * The sink enters here, once, after the last join; lse never has it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "plan.h"

/* One row: sums over its parts relative to their common maximum. */
typedef struct row_total {
    float max, sum;
    float lse;
    float factor; /* o = numerator * factor / denominator, times v_scale */
    float denominator;
    bool empty; /* o is 0 */
} row_total;

/* exp(max - shift), where -inf (no key yet, or only scores of -inf) weighs nothing. */
static float part_weight(float max, float shift) {
    if (max == -INFINITY) return 0.0f;
    return max == shift && max < INFINITY ? 1.0f : expf(max - shift); /* a single part: no call */
}

static row_total total_of(const kv8_attention_partials *partials, int32_t num, float sink) {
    row_total t = {.max = -INFINITY};
    for (int32_t n = 0; n < num; n++) {
        const kv8_attention_partials *const p = &partials[n];
        for (int32_t i = 0; i < p->num; i++) t.max = fmaxf(t.max, p->max[i * p->stride]);
    }
    for (int32_t n = 0; n < num; n++) {
        const kv8_attention_partials *const p = &partials[n];
        for (int32_t i = 0; i < p->num; i++) {
            /* NaN scores without any other leave max at -inf and sum at NaN, which must stay. */
            const float sum = p->sum[i * p->stride];
            t.sum += isnan(sum) ? sum : sum * part_weight(p->max[i * p->stride], t.max);
        }
    }
    t.empty = t.sum == 0 || sink == INFINITY;
    t.lse = t.sum == 0 ? -INFINITY : t.max + logf(t.sum);
    t.factor = 1;
    t.denominator = t.sum;
    if (sink > t.max) { /* both exponentials at most 1 */
        t.factor = expf(t.max - sink);
        t.denominator = t.sum * t.factor + 1;
    } else if (sink > -INFINITY) {
        t.denominator = t.sum + expf(sink - t.max);
    }
    return t;
}

static void store(kv8_dtype dtype, float scale, void *out, int64_t at, const float *values,
                  int32_t n) {
    if (kv8_is_float8(dtype)) {
        KV8_MUST(
            kv8_narrow(KV8_ISA_BEST, dtype, values, (size_t)n, scale, (uint8_t *)out + at, NULL));
        return;
    }
    switch (dtype) {
        case KV8_BF16: kv8_bf16_from_f32_row(values, (size_t)n, (kv8_bf16 *)out + at); break;
        case KV8_F16:
            for (int32_t d = 0; d < n; d++) ((kv8_f16 *)out)[at + d] = kv8_f16_from_f32(values[d]);
            break;
        default: memcpy((float *)out + at, values, (size_t)n * sizeof *values); break;
    }
}

static void store_lse(const kv8_attention_args *args, int32_t num_qo_heads, int64_t q_row,
                      int64_t head, float lse) {
    static const double log2_e = 1.4426950408889634;
    if (args->lse == NULL) return;
    const bool contiguous = args->lse_stride_row == 0 && args->lse_stride_head == 0;
    const int64_t at = contiguous ? q_row * num_qo_heads + head
                                  : q_row * args->lse_stride_row + head * args->lse_stride_head;
    args->lse[at] = args->lse_base2 ? (float)((double)lse * log2_e) : lse;
}

/* Rows are padded (KV8_TILE_PAD), so that loops over a row run in steps of this many floats, a
 * constant length that compilers make vectors of. */
enum { STEP = 16 };

static void add_part(const float *part, float weight, int32_t dim, float *sum) {
    for (int32_t d = 0; d < dim; d += STEP) {
        for (int32_t i = 0; i < STEP; i++) sum[d + i] += part[d + i] * weight;
    }
}

/* --- pieces --- */

/* Sums of one row, o [dim] of them not divided. */
typedef struct row_sums {
    float *o, max, sum;
} row_sums;

/* The next piece of a row's keys joins those before it, always in the order of keys and by this
 * function: who has computed a piece does not show. */
static V_NOINLINE void add_sums(row_sums *to, const float *o, float max, float sum, int32_t dim) {
    const float top = fmaxf(to->max, max);
    const float before = part_weight(to->max, top), now = part_weight(max, top);
    to->sum = isnan(to->sum) || isnan(sum) ? (float)NAN : to->sum * before + sum * now;
    to->max = top;
    for (int32_t d = 0; d < dim; d += STEP) {
        for (int32_t i = 0; i < STEP; i++) to->o[d + i] = to->o[d + i] * before + o[d + i] * now;
    }
}

void kv8_attention_add_piece(const kv8_attention_job *job, bool is_first) {
    const int64_t rows = (int64_t)job->item->num_heads * job->item->num_rows;
    for (int64_t row = 0; row < rows; row++) {
        float *const piece = job->pieces + row * (job->v_row + 2);
        float *const o = job->o + row * job->v_row;
        row_sums sums = {piece, piece[job->v_row], piece[job->v_row + 1]};
        if (is_first) {
            memcpy(piece, o, (size_t)job->v_row * sizeof *o);
            sums.max = job->max[row], sums.sum = job->sum[row];
        } else {
            add_sums(&sums, o, job->max[row], job->sum[row], job->v_row);
        }
        piece[job->v_row] = sums.max, piece[job->v_row + 1] = sums.sum;
    }
}

void kv8_attention_take_pieces(const kv8_attention_job *job) {
    const int64_t rows = (int64_t)job->item->num_heads * job->item->num_rows;
    for (int64_t row = 0; row < rows; row++) {
        const float *const piece = job->pieces + row * (job->v_row + 2);
        memcpy(job->o + row * job->v_row, piece, (size_t)job->v_row * sizeof *piece);
        job->max[row] = piece[job->v_row], job->sum[row] = piece[job->v_row + 1];
    }
}

/* The parts of a row one after another as one. */
static kv8_attention_partials join_pieces(const kv8_attention_partials *parts, row_sums *to,
                                          int32_t v_row) {
    memcpy(to->o, parts->o, (size_t)v_row * sizeof *to->o);
    to->max = *parts->max, to->sum = *parts->sum;
    for (int32_t i = 1; i < parts->num; i++)
        add_sums(to, parts->o + i * parts->stride, parts->max[i * parts->stride],
                 parts->sum[i * parts->stride], v_row);
    return (kv8_attention_partials){.o = to->o, .max = &to->max, .sum = &to->sum, .num = 1};
}

/* --- rows --- */

void kv8_attention_finish_row(const kv8_attention_plan *plan, const kv8_attention_args *args,
                              int32_t request, int32_t q_row, int32_t head,
                              const kv8_attention_partials *partials, int32_t num) {
    const kv8_attention_spec *const spec = &plan->spec;
    const int32_t kv_head = head / plan->group_size;
    float joined_o[KV8_MAX_HEAD_DIM + KV8_TILE_PAD];
    row_sums joined_sums = {joined_o, 0, 0};
    kv8_attention_partials joined;
    if (plan->piece_keys > 0 && partials->num > 1) { /* the only ones: nothing is shared */
        joined = join_pieces(partials, &joined_sums, plan->v_row);
        partials = &joined;
    }
    const float v_scale = args->v_scale == NULL
                              ? 1.0f
                              : args->v_scale[request * args->v_scale_stride_batch +
                                              kv_head * args->v_scale_stride_head];
    const float sink = args->sink_logit == NULL ? -INFINITY : args->sink_logit[head];
    const row_total t = total_of(partials, num, sink);
    const int64_t out = q_row * args->o_stride_row + head * args->o_stride_head;
    const int32_t dim = spec->v_head_dim;
    float row[KV8_MAX_HEAD_DIM];
    for (int32_t d = 0; d < dim; d += STEP) memset(row + d, 0, STEP * sizeof *row);
    for (int32_t n = 0; n < num; n++) {
        const kv8_attention_partials *const p = &partials[n];
        for (int32_t i = 0; i < p->num; i++) {
            const float weight = part_weight(p->max[i * p->stride], t.max);
            add_part(p->o + i * p->stride, weight, dim, row);
        }
    }
    /* Divided first: equal weights over equal values give the value exactly. */
    for (int32_t d = 0; d < dim; d += STEP) {
        for (int32_t i = 0; i < STEP; i++)
            row[d + i] = row[d + i] * t.factor / t.denominator * v_scale;
    }
    if (t.empty) memset(row, 0, (size_t)dim * sizeof *row);
    store(spec->o_dtype, args->o_scale == NULL ? 1 : *args->o_scale, args->o, out, row, dim);
    store_lse(args, spec->num_qo_heads, q_row, head, t.lse);
}
