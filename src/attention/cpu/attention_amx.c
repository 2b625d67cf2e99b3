/* attention_amx.c - the attention kernel in bf16 math with both products on AMX tiles.
 *
 * One tdpbf16ps multiplies 16 rows of 16 pairs with 16 pairs of 16 columns into f32: 8192 products
 * in 16 cycles. S^T = K Q^T takes K's rows and the laid-out Q as they are; P is turned once, in
 * registers, to become the left side of P V; V's pairs of keys are its right side. That leaves
 * widening and softmax, the template's, as the bound. Subnormal bf16 inputs count as 0 (no FP8 or
 * int8 code is one). Q, K and V enter exactly; P is rounded to bf16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tile_queue_amx.h"

#define T_NAME kv8_attention_bf16_any_dany_pany__amx
/* Behind P, which a piece's last row may be written past by a vector. */
#define T_WEIGHTS(job) ((job)->p + T_SIDE * T_UNITS + KV8_TILE_PAD)

/* Units in the order in which turning P leaves them: all of one fold lane, then the next. */
static inline void t_order_units(int32_t fold, uint8_t *order) {
    const int32_t per_lane = T_UNITS / fold;
    for (int32_t u = 0; u < T_UNITS; u++)
        order[u] = (uint8_t)(u % per_lane * 2 * fold + u / per_lane);
}

#include "rows_tmpl.h"
#include "scores_tmpl.h"
#include "tile_tmpl.h"
#include "units_tmpl.h"
#include "widen_tmpl.h"

static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin) {
    const int32_t left = job->item->num_rows - row_begin;
    t_lanes at = {.row_begin = row_begin, .num_rows = left, .fold = 1, .vecs = 1, .row_step = 1};
    if (left > T_SIDE) at.num_rows = T_SIDE;
    at.sums = 1;
    while (job->fold_rows * at.sums * 2 <= T_SIDE) at.sums *= 2;
    const bool folds = job->item->num_rows * at.sums <= T_SIDE;
    while (folds && at.fold < at.sums) at.fold = 1 << ++at.shift;
    at.key_step = T_SIDE / at.fold;
    at.num_quartered = job->k_size == 1 ? job->spec->head_dim / 64 * 32 : 0;
    return at;
}

/* Columns of a unit: its rows stand beside each other, `fold` units in a vector. */
static inline int32_t t_columns(const t_lanes *at) {
    return T_SIDE / at->fold;
}
/* Whole 64 codes of K are left as unpacking has them: unit 8 L + 4 h + j of 32 is 16 h + 4 L + j.
 */
static inline int64_t t_q_at(const t_lanes *at, int32_t row, int32_t u) {
    if (u < at->num_quartered) u = (u & ~31) | (u & 4) << 2 | (u & 24) >> 1 | (u & 3);
    return (int64_t)u * t_columns(at) + row;
}

/* t_place puts a row into the order of O's columns or back: V's codes too are left as unpacking has
 * them, quarter L of vector x of 64 columns in quarter x of vector L. */
static void t_place(const kv8_attention_job *job, float *row) {
    if (job->v_size == 1) t_turn_quarters(row, kv8_spec_v_head_dim(job->spec) / 64 * 64);
}

static void t_place_value(const kv8_attention_job *job) {
    t_place(job, job->value);
}

/* s = the step's scores: for 32 keys at a time, all of head_dim. */
static void t_push_scores(t_queue *queue, const kv8_attention_job *job, const t_lanes *at,
                          const float *q, float *s) {
    const int64_t columns = t_columns(at);
    const int32_t row = (int32_t)(columns * (int64_t)sizeof(float));
    for (int32_t key = 0; key < KV8_TILE_KEYS; key += 2 * T_SIDE) {
        t_op op = {.code = T_SCORES_BEGIN, .size = row, .left = job->k + key * job->q_row};
        op.right = q;
        op.sums = s + key * columns;
        for (int32_t u = 0; u < job->depth; u += T_SIDE) {
            t_push(queue, op);
            op.code = T_SCORES;
            op.left += T_SIDE;
            op.right += T_SIDE * columns;
        }
        op.code = T_SCORES_STORE;
        t_push(queue, op);
    }
}

/* o += P V: for 32 columns at a time, all keys. O's rows are padded to 32. */
static void t_push_values(t_queue *queue, const kv8_attention_job *job, const t_lanes *at,
                          float *o) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    /* The last rows of an item of more than 16: O has no others to spare. */
    const bool partial = at->num_rows < T_SIDE && job->item->num_rows > T_SIDE;
    if (partial) t_push(queue, (t_op){.code = T_CONFIGURE, .size = at->num_rows});
    for (int32_t d = 0; d < dim; d += 2 * T_SIDE) {
        t_op op = {.code = T_VALUES_BEGIN, .left = job->p, .right = job->v + d, .sums = o + d};
        for (int32_t u = 0; u < T_UNITS; u += T_SIDE) {
            t_push(queue, op);
            op.code = T_VALUES;
            op.left += T_SIDE;
            op.right += T_SIDE * (int64_t)job->v_row;
        }
        op.code = T_VALUES_STORE;
        t_push(queue, op);
    }
    if (partial) t_push(queue, (t_op){.code = T_CONFIGURE, .size = T_SIDE});
}

/* --- softmax --- */

/* What the weights of a lane's keys of one tile may add up to before the maximum moves on. After an
 * item's first tile it hardly ever does: older sums need no scaling, and weighing waits for no
 * maximum. The size of sums and weights costs no precision, and a score that lies 40 (in log2
 * units) above the maximum is rounded by 2e-6 when it is taken off. */
static const float t_most = 0x1p40f;

/* One vector of rows: where its scores are, where the weights go (p: P with doubled rows, or NULL),
 * and what the scores are multiplied with; int8's row scales or NULL, and from which of `fold` of
 * them each lane takes its own. Each of `step` vectors has a sum of its own. */
typedef struct t_pass {
    const float *s;
    float *w, *p;
    int32_t count, fold, step;
    v_f32 scale;
    const float *k_scale, *v_scale;
    __m512i from;
} t_pass;

V_INLINE v_f32 t_pass_scale(const t_pass *p, const float *per_key, int32_t i) {
    if (p->fold == 1) return v_set1(per_key[i]);
    if (p->fold == 2)
        return _mm512_mask_broadcastss_ps(v_set1(per_key[2 * i]), 0xff00,
                                          _mm_load_ss(per_key + 2 * i + 1));
    return _mm512_permutexvar_ps(p->from, v_load_n(per_key + i * p->fold, p->fold));
}

V_INLINE v_f32 t_pass_score(const t_pass *p, int32_t i, const bool k_scaled) {
    const v_f32 x = v_mul(v_load(p->s + i * V_LANES), p->scale);
    return k_scaled ? v_mul(x, t_pass_scale(p, p->k_scale, i)) : x;
}

/* w = 2^(scaled scores - shift) as pairs of keys; their sums per lane. `asks` rows are asked for
 * beside every pair of scores. `alone`: pass->step is 1. */
V_INLINE v_f32 t_weigh_pass(const t_pass *pass, v_f32 shift, t_queue *queue, const bool k_scaled,
                            const bool v_scaled, const int asks, const bool alone) {
    enum { STEP = KV8_TILE_KEYS / T_TICKS };
    const t_pass p = *pass;
    const int32_t step = alone ? 1 : p.step;
    t_keep_awake(queue);
    v_f32 sum = v_set1(0.0f), sum2 = sum;
    for (int32_t begin = 0; begin < p.count; begin += STEP) {
        t_tick(queue);
        const int32_t end = begin + STEP < p.count ? begin + STEP : p.count;
        for (int32_t i = begin; i < end; i += 2) {
            /* Not fused with the product: equal scores must differ by exactly 0. */
            const v_f32 x = v_sub(t_pass_score(&p, i * step, k_scaled), shift);
            const v_f32 y = v_sub(t_pass_score(&p, (i + 1) * step, k_scaled), shift);
            v_f32 a = v_exp2(x, T_EXP_DEGREE), b = v_exp2(y, T_EXP_DEGREE);
            sum = v_add(sum, a);
            sum2 = v_add(sum2, b);
            if (v_scaled) {
                a = v_mul(a, t_pass_scale(&p, p.v_scale, i * step));
                b = v_mul(b, t_pass_scale(&p, p.v_scale, (i + 1) * step));
            }
            v_store(p.w + i / 2 * step * V_LANES, t_round_zip(a, b));
            if (asks > 0) t_ask_more(queue, asks);
        }
    }
    return v_add(sum, sum2);
}
static v_f32 t_weigh_doubled_of(const t_pass *pass, v_f32 shift, t_queue *queue, bool first);
static V_NOINLINE v_f32 t_weigh_pass_of(const t_pass *pass, v_f32 shift, t_queue *queue,
                                        bool first) {
    if (pass->p != NULL) return t_weigh_doubled_of(pass, shift, queue, first);
    const bool asks = first && pass->fold == T_ASKING_FOLD;
    const bool k_scaled = pass->k_scale != NULL, v_scaled = pass->v_scale != NULL;
    if (pass->step > 1) {
        if (!k_scaled && !v_scaled) return t_weigh_pass(pass, shift, queue, false, false, 0, false);
        return t_weigh_pass(pass, shift, queue, k_scaled, v_scaled, 0, false);
    }
    if (k_scaled && v_scaled && asks)
        return t_weigh_pass(pass, shift, queue, true, true, T_ASKS, true);
    if (k_scaled || v_scaled)
        return t_weigh_pass(pass, shift, queue, k_scaled, v_scaled, asks ? T_ASKS : 0, true);
    if (asks) return t_weigh_pass(pass, shift, queue, false, false, T_ASKS, true);
    return t_weigh_pass(pass, shift, queue, false, false, 0, true);
}

/* sum[0 .. pass->step): a pass for each. */
V_INLINE void t_weigh_sums(const t_pass *pass, v_f32 shift, t_queue *queue, bool first, v_f32 *sum,
                           const bool alone) {
    if (alone) {
        sum[0] = t_weigh_pass_of(pass, shift, queue, first);
        return;
    }
    t_pass one = *pass;
    one.count /= pass->step;
    for (int32_t i = 0; i < pass->step; i++) {
        sum[i] = t_weigh_pass_of(&one, shift, queue, first);
        one.s += V_LANES;
        one.w += V_LANES;
        if (one.k_scale != NULL) one.k_scale++;
        if (one.v_scale != NULL) one.v_scale++;
    }
}

/* The maxima and sums of a vector of rows move on. True when maxima did; then keep[] = what the
 * older sums are to be multiplied with. A NaN score leaves the maximum alone and makes the sum
 * NaN, as a score of +inf does. */
V_INLINE bool t_weigh_vector(const t_pass *pass, const t_lanes *at, float *lane_max,
                             float *lane_sum, float *keep, t_queue *queue, const bool alone) {
    const int32_t num_sums = alone ? 1 : pass->step;
    const v_f32 old = v_load(lane_max), one = v_set1(1.0f);
    __mmask16 over = _mm512_cmp_ps_mask(old, v_set1(-FLT_MAX), _CMP_LT_OQ);
    const bool first = over == 0xffff; /* no row has a maximum yet */
    v_f32 sum[T_SIDE];
    if (!first) {
        t_weigh_sums(pass, t_finite(old), queue, true, sum, alone);
        for (int32_t i = 0; i < num_sums; i++)
            over |= _mm512_cmp_ps_mask(sum[i], v_set1(t_most), _CMP_GT_OQ);
        if (over == 0) {
            for (int32_t i = 0; i < num_sums; i++)
                v_store(lane_sum + i * V_LANES, v_add(v_load(lane_sum + i * V_LANES), sum[i]));
            return false;
        }
    }
    v_f32 top = v_set1(-INFINITY);
    for (int32_t i = 0; i < pass->count; i++)
        top = v_max(t_pass_score(pass, i, pass->k_scale != NULL), top);
    top = v_max(t_max_of_row(at, top), old);
    /* Only rows that are over move on: no row's bits may depend on its neighbours. */
    const v_f32 moved = t_max_of_row(at, _mm512_maskz_mov_ps(over, one));
    const v_f32 max = v_select_lt(moved, one, old, top), shift = t_finite(max);
    const v_f32 factor = v_select_lt(moved, one, one, v_exp2(v_sub(old, shift), 5));
    t_weigh_sums(pass, shift, queue, first, sum, alone);
    v_f32 kept = max;
    for (int32_t i = 0; i < num_sums; i++) {
        sum[i] = v_fma(v_load(lane_sum + i * V_LANES), factor, sum[i]);
        kept = t_kept_max(kept, sum[i]);
        v_store(lane_sum + i * V_LANES, sum[i]);
    }
    v_store(lane_max, kept);
    v_store(keep, factor);
    return true;
}

/* The step's scores to weights. True when some maximum moved on: then job->keep has a factor for
 * each row. */
static bool t_weigh(const kv8_attention_job *job, const t_lanes *at, const kv8_tile *tile,
                    const t_rows *rows, int32_t head) {
    const kv8_attention_spec *const spec = job->spec;
    const int64_t lane = t_first_lane(job, at, head);
    const bool masked = tile->mixed || tile->end - tile->begin != KV8_TILE_KEYS;
    const bool plain = !masked && !(job->args->logits_soft_cap > 0);
    const float *const k_scale = spec->k_dtype == KV8_INT8 ? rows->k_scale : NULL;
    const v_f32 scale = v_load(job->lane_scale + lane);
    t_pass pass = {.s = job->s,
                   .w = T_WEIGHTS(job),
                   .p = rows->queue->doubled ? job->p : NULL,
                   .count = KV8_TILE_KEYS / at->fold,
                   .fold = at->fold,
                   .step = at->sums / at->fold,
                   .scale = v_mul(scale, v_set1(t_log2e)),
                   .k_scale = k_scale,
                   .v_scale = spec->v_dtype == KV8_INT8 ? rows->v_scale : NULL,
                   .from = t_spread_from(at->fold)};
    if (!plain) {
        t_finish_scores(job, at, 0, pass.count, scale, k_scale);
        if (masked) t_mask(job, at, tile, KV8_TILE_KEYS);
        pass.scale = v_set1(1.0f);
        pass.k_scale = NULL;
    }
    float *const max = job->lane_max + lane, *const sum = job->lane_sum + lane;
    if (pass.step == 1) return t_weigh_vector(&pass, at, max, sum, job->keep, rows->queue, true);
    return t_weigh_vector(&pass, at, max, sum, job->keep, rows->queue, false);
}

/* 16 units of every lane to rows of p, lane by lane: `fold` lanes are one row's. Whole vectors are
 * written: what spills over the end of a piece is overwritten by the next. fold is a constant. */
V_INLINE void t_turn_block(v_f32 *block, float *p, const int fold) {
    v_transpose(block);
    V_UNROLL
    for (int i = 0; i < T_SIDE; i++) { /* rows in order, of each its lanes in order */
        const int row = i / fold, f = i % fold;
        v_store(p + row * T_UNITS + f * T_UNITS / fold, block[f * T_SIDE / fold + row]);
    }
}

/* job->p [rows, T_UNITS] from the weights in lanes. */
static void t_turn(const kv8_attention_job *job, const t_lanes *at) {
    const int32_t per_lane = T_UNITS / at->fold, step = at->sums / at->fold;
    for (int32_t unit = 0; unit < per_lane; unit += T_SIDE) {
        v_f32 block[T_SIDE];
        float *const p = job->p + unit;
        if (step == 1) {
            V_UNROLL
            for (int i = 0; i < T_SIDE; i++) /* past the last unit: of older steps, overwritten */
                block[i] = v_load(T_WEIGHTS(job) + (int64_t)(unit + i) * T_SIDE);
        } else {
            const int32_t per_sum = per_lane / step, shift = __builtin_ctz((uint32_t)per_sum);
            for (int i = 0; i < T_SIDE; i++) {
                const int32_t u = unit + i, from = (u & (per_sum - 1)) * step + (u >> shift);
                block[i] = v_load(T_WEIGHTS(job) + (int64_t)from * T_SIDE);
            }
        }
        switch (at->fold) {
            case 1: t_turn_block(block, p, 1); break;
            case 2: t_turn_block(block, p, 2); break;
            case 4: t_turn_block(block, p, 4); break;
            case 8: t_turn_block(block, p, 8); break;
            default: t_turn_block(block, p, 16); break;
        }
    }
}

/* The rows' older sums times job->keep. */
static void t_rescale(const kv8_attention_job *job, const t_lanes *at, float *o) {
    for (int32_t row = 0; row < at->num_rows; row++) {
        const v_f32 factor = v_set1(job->keep[row]);
        for (int32_t d = 0; d < job->v_row; d += T_SIDE, o += T_SIDE)
            v_store(o, v_mul(factor, v_load(o)));
    }
}

/* Tiles for the item's rows, doubled or not. */
static void t_shape(const kv8_attention_job *job, t_queue *queue) {
    const t_lanes at = t_lanes_of(job, 0);
    const int32_t doubled = queue->doubled ? 2 : 1;
    queue->k_row = (size_t)job->q_row * sizeof(float);
    queue->p_row = (size_t)(T_UNITS * doubled) * sizeof(float);
    queue->v_row = (size_t)(job->v_row / doubled) * sizeof(float);
    t_configure(T_SIDE / at.fold, doubled * at.num_rows);
}

#include "decode_rows_amx.h"

static void t_begin(const kv8_attention_job *job, t_queue *queue) {
    queue->next = queue->count = 0;
    queue->ahead_bytes = t_ask_bytes(job);
    t_begin_doubled(job, queue);
    t_shape(job, queue);
}

static void t_end(const kv8_attention_job *job, t_queue *queue) {
    t_drain(queue);
    if (queue->doubled) t_look(job, queue);
    _tile_release();
    const int64_t rows = (int64_t)job->item->num_heads * job->item->num_rows;
    for (int64_t row = 0; row < rows; row++) {
        float *const o = job->o + row * job->v_row;
        if (queue->doubled)
            t_place_doubled(job, queue->sums[queue->turn] + row * job->v_row, o);
        else
            t_place(job, o);
    }
}

/* Products wait in the queue under the work that does not need them: the first step's scores under
 * the widening of V; a step's values, and the next step's scores, under softmax; the last step's
 * values under the widening of the next head's K. */
static void t_tile_of_head(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                           const uint8_t *order, int32_t head, t_queue *queue) {
    if (queue->spoiled && head == 0) t_stop_doubling(job, queue);
    if (queue->doubled) {
        t_tile_of_few(job, tile, next, head, queue);
        return;
    }
    t_rows rows;
    t_rows_of(job, tile, next, head, false, &rows);
    rows.queue = queue;
    queue->ahead = rows.ahead;
    t_nonfinite nonfinite;
    nonfinite.count = 0;
    if (tile->mixed) t_take_nonfinite(job, &rows, tile->end - tile->begin, &nonfinite);
    t_load_k(job, &rows, KV8_TILE_KEYS);
    t_drain(queue);
    const int32_t num_rows = job->item->num_rows;
    const float *const q = job->q_lanes + (int64_t)head * job->q_row * t_rows_per_head(job);
    float *const o = job->o + (int64_t)head * num_rows * job->v_row;
    kv8_attention_job step = *job;
    t_lanes at = t_lanes_of(job, 0);
    const int32_t burst = at.fold == T_ASKING_FOLD ? T_BURST_ASKING : T_BURST;
    t_ask_more(queue, burst);
    t_push_scores(queue, job, &at, q, step.s);
    t_spread_over(queue, T_TICKS);
    t_load_v(job, &rows, KV8_TILE_KEYS, order, at.sums);
    t_drain(queue);
    for (int32_t row = 0, end; row < num_rows; row = end) {
        end = row + at.num_rows;
        const t_lanes now = at;
        float *const other = step.s == job->s ? job->s + KV8_TILE_KEYS * T_SIDE : job->s;
        if (end < num_rows) {
            at = t_lanes_of(job, end);
            t_push_scores(queue, job, &at, q + (int64_t)end * job->q_row, other);
        }
        t_spread_over(queue, T_TICKS);
        if (row == 0) t_ask_more(queue, burst);
        const bool moved = t_weigh(&step, &now, tile, &rows, head);
        t_drain(queue);
        if (row == 0) t_ask_more(queue, burst);
        t_turn(&step, &now);
        float *const sums = o + (int64_t)row * job->v_row;
        if (moved) t_rescale(job, &now, sums);
        t_add_nonfinite(&step, &now, tile, &nonfinite, sums);
        t_push_values(queue, job, &now, sums);
        if (row == 0) t_ask_more(queue, burst);
        step.s = other;
    }
    t_spread_over(queue, T_TICKS);
}

#include "walk_tmpl.h"
