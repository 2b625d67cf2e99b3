/* run.c - one run over a prepared batch: compute the items, join what was split.
 *
 * Everything lives in the caller's workspace; nothing is allocated. One parallel call, and a second
 * to join the rows whose shared keys were computed together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "plan.h"
#include "simd/subnormals.h"

typedef struct run {
    const kv8_attention_plan *plan;
    const kv8_attention_args *args;
    const kv8_attention_item *items;
    kv8_attention_join *joins;
    const kv8_attention_cascade *cascade;
    float *partials, *scratch;
    int64_t num_items;
    _Atomic int64_t num_taken;
} run;

/* A row of an item: whose it is, its row of the batch's q and o, its head. */
typedef struct row_place {
    int32_t request, q_row, kv_head, in_group;
} row_place;

static row_place place_of(const run *r, const kv8_attention_item *item, int32_t row) {
    const int32_t group_size = r->plan->group_size;
    const int32_t packed = item->row_begin + row % item->num_rows;
    row_place place = {.request = item->request,
                       .kv_head = item->kv_head + row / item->num_rows,
                       .in_group = packed % group_size};
    if (item->shared < 0) {
        place.q_row = r->args->qo_indptr[item->request] + packed / group_size;
        return place;
    }
    const kv8_attention_shared_row *const shared =
        &r->cascade->rows[item->shared + packed / group_size];
    place.request = shared->request;
    place.q_row = shared->q_row;
    return place;
}

/* The item's rows of Q, as units: f32, or bf16 pairs in their own order. */
static void load_q(const run *r, const kv8_attention_item *item, float *q) {
    const kv8_attention_plan *const plan = r->plan;
    const kv8_attention_spec *const spec = &plan->spec;
    const size_t head_dim = (size_t)spec->head_dim, size = kv8_dtype_size(spec->q_dtype);
    for (int32_t row = 0; row < item->num_heads * item->num_rows; row++, q += plan->q_row) {
        const row_place p = place_of(r, item, row);
        const int64_t at = p.q_row * r->args->q_stride_row +
                           (p.kv_head * plan->group_size + p.in_group) * r->args->q_stride_head;
        const uint8_t *const codes = (const uint8_t *)r->args->q + at * (int64_t)size;
        memset(q, 0, (size_t)plan->q_row * sizeof *q);
        if (plan->choice.math == KV8_MATH_BF16 && spec->q_dtype == KV8_BF16) {
            memcpy(q, codes, head_dim * size);
            continue;
        }
        float values[KV8_MAX_HEAD_DIM];
        const bool narrows = plan->choice.math == KV8_MATH_BF16;
        KV8_MUST(kv8_widen(spec->isa, spec->q_dtype, codes, head_dim, narrows ? values : q));
        if (narrows) kv8_bf16_from_f32_row(values, head_dim, (kv8_bf16 *)(void *)q);
    }
}

/* sm_scale * k_scale * q_scale of every row. */
static void load_scales(const run *r, const kv8_attention_item *item, float *scale) {
    const kv8_attention_args *const a = r->args;
    const float sm_scale = (float)kv8_args_sm_scale(&r->plan->spec, a);
    for (int32_t row = 0; row < item->num_heads * item->num_rows; row++) {
        const row_place p = place_of(r, item, row);
        scale[row] = sm_scale;
        if (a->k_scale != NULL)
            scale[row] *= a->k_scale[p.request * a->k_scale_stride_batch +
                                     p.kv_head * a->k_scale_stride_head];
        if (a->q_scale != NULL)
            scale[row] *=
                a->q_scale[p.request * a->q_scale_stride_batch + p.q_row * a->q_scale_stride_row +
                           p.kv_head * a->q_scale_stride_kv_head +
                           p.in_group * a->q_scale_stride_group];
    }
}

/* The keys that every row of a head sees. */
static void load_sight(const run *r, const kv8_attention_item *item, const kv8_request *request,
                       int32_t *seen_from, int32_t *seen_to) {
    for (int32_t row = 0; row < item->num_rows; row++) {
        kv8_key_range keys = {item->key_begin, item->key_end};
        if (item->shared < 0)
            keys = kv8_row_keys(&r->plan->spec, r->args, request,
                                (item->row_begin + row) / r->plan->group_size);
        seen_from[row] = keys.begin;
        seen_to[row] = keys.end;
    }
}

/* --- rows that are done --- */

/* The item's rows: `num` partial results of each, `stride` floats apart. */
static void finish_rows(const run *r, const kv8_attention_item *item, int32_t num, int64_t stride,
                        const float *o, const float *max, const float *sum) {
    const kv8_attention_plan *const plan = r->plan;
    for (int32_t row = 0; row < item->num_heads * item->num_rows; row++) {
        const row_place p = place_of(r, item, row);
        const kv8_attention_partials partials = {.o = o + (int64_t)row * plan->v_row,
                                                 .max = max + row,
                                                 .sum = sum + row,
                                                 .stride = stride,
                                                 .num = num};
        kv8_attention_finish_row(plan, r->args, p.request, p.q_row,
                                 p.kv_head * plan->group_size + p.in_group, &partials, 1);
    }
}

/* A partial result is o, then max, then sum, of all rows of its item. */
static void join_parts(const run *r, const kv8_attention_join *join) {
    const int64_t rows = (int64_t)join->first.num_heads * join->first.num_rows;
    const float *const o = r->partials + join->first.partial;
    const float *const max = o + rows * r->plan->v_row;
    finish_rows(r, &join->first, join->num_splits, rows * (r->plan->v_row + 2), o, max, max + rows);
}

/* Where a part of the cascade keeps its row `row` of a head. */
static kv8_attention_partials part_of_row(const run *r, const kv8_attention_part *part,
                                          int32_t kv_head, int32_t row) {
    const int64_t v_row = r->plan->v_row;
    const int32_t first_head = kv_head / part->heads * part->heads;
    const int64_t num_heads = kv8_min_i64(part->heads, r->plan->spec.num_kv_heads - first_head);
    const int64_t rows = num_heads * part->num_rows;
    const int64_t at = (int64_t)(kv_head - first_head) * part->num_rows + row;
    const float *const o = r->partials + part->first +
                           (int64_t)first_head * part->num_splits * part->num_rows * (v_row + 2);
    const float *const max = o + rows * v_row;
    return (kv8_attention_partials){.o = o + at * v_row,
                                    .max = max + at,
                                    .sum = max + rows + at,
                                    .stride = rows * (v_row + 2),
                                    .num = part->num_splits};
}

/* One query row of the cascade, all its heads: the shared keys, then its own. */
static void join_shared_row(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const run *const r = cookie;
    const kv8_attention_shared_row *const shared = &r->cascade->rows[index];
    const int32_t group_size = r->plan->group_size;
    const unsigned subnormals = kv8_subnormals_off();
    for (int32_t head = 0; head < r->plan->spec.num_qo_heads; head++) {
        kv8_attention_partials partials[2];
        int32_t num = 0;
        for (int i = 0; i < 2; i++) {
            if (shared->part[i] < 0) continue;
            partials[num++] = part_of_row(r, &r->cascade->parts[shared->part[i]], head / group_size,
                                          shared->row[i] + head % group_size);
        }
        kv8_attention_finish_row(r->plan, r->args, shared->request, shared->q_row, head, partials,
                                 num);
    }
    kv8_subnormals_restore(subnormals);
}

/* --- one item --- */

static void run_item(const run *r, const kv8_attention_item *item, kv8_attention_cursor *cursor,
                     float *base) {
    const kv8_attention_plan *const plan = r->plan;
    const kv8_attention_args *const args = r->args;
    const kv8_attention_scratch *const at = &plan->scratch;
    const kv8_request request = kv8_request_of(&plan->spec, args, item->request);
    int32_t *const seen_from = (int32_t *)(base + at->seen_from);
    int32_t *const seen_to = (int32_t *)(base + at->seen_to);
    load_sight(r, item, &request, seen_from, seen_to);
    kv8_key_range common = {0, INT32_MAX};
    for (int32_t row = 0; row < item->num_rows; row++) {
        if (seen_from[row] > common.begin) common.begin = seen_from[row];
        if (seen_to[row] < common.end) common.end = seen_to[row];
    }
    load_q(r, item, base + at->q);
    load_scales(r, item, base + at->scale);
    const bool partly = item->partial >= 0;
    const int64_t rows = (int64_t)item->num_heads * item->num_rows;
    float *const partial = r->partials + (partly ? item->partial : 0);
    float *const partial_max = partial + rows * plan->v_row;
    const int32_t k_size = (int32_t)kv8_dtype_size(plan->spec.k_dtype);
    const int32_t v_size = (int32_t)kv8_dtype_size(plan->spec.v_dtype);
    const kv8_attention_job job = {
        .spec = &plan->spec,
        .args = args,
        .item = item,
        .cursor = cursor,
        .pages = kv8_request_pages(args->pages, item->request),
        .group_size = plan->group_size,
        .kv_len = request.kv_len,
        .fold_rows = plan->piece_keys > 0 ? plan->group_size : item->num_rows,
        .piece_keys = plan->piece_keys,
        .common = common,
        .has_holes = plan->spec.has_mask || plan->spec.has_key_range,
        .k_size = k_size,
        .v_size = v_size,
        .k_head = args->k->stride_head * k_size,
        .v_head = args->v->stride_head * v_size,
        .depth = plan->depth,
        .q_row = plan->q_row,
        .v_row = plan->v_row,
        .q = base + at->q,
        .q_lanes = base + at->q_lanes,
        .lane_scale = base + at->lane_scale,
        .lane_max = base + at->lane_max,
        .lane_sum = base + at->lane_sum,
        .k = base + at->k,
        .v = base + at->v,
        .s = base + at->s,
        .p = base + at->p,
        .keep = base + at->keep,
        .value = base + at->value,
        .kept = base + at->kept,
        .pieces = base + at->pieces,
        .scale = base + at->scale,
        .seen_from = seen_from,
        .seen_to = seen_to,
        .o = partly ? partial : base + at->o,
        .max = partly ? partial_max : base + at->max,
        .sum = partly ? partial_max + rows : base + at->sum,
    };
    plan->choice.kernel(&job);
    if (!partly) finish_rows(r, item, 1, 0, job.o, job.max, job.sum);
    if (item->join < 0) return;
    kv8_attention_join *const join = &r->joins[item->join];
    if (atomic_fetch_sub_explicit(&join->num_left, 1, memory_order_acq_rel) != 1) return;
    join_parts(r, join);
    atomic_store_explicit(&join->num_left, join->num_splits, memory_order_relaxed); /* next run's */
}

/* A thread's items, until none is left. */
static void run_items(void *cookie, size_t index, int32_t thread_idx) {
    (void)index;
    run *const r = cookie;
    kv8_attention_cursor cursor = {
        .items = r->items, .num_items = r->num_items, .num_taken = &r->num_taken};
    const unsigned subnormals = kv8_subnormals_off();
    for (;;) {
        const kv8_attention_item *const item = kv8_attention_take_item(&cursor);
        if (item == NULL) break;
        cursor.taken = false;
        run_item(r, item, &cursor, r->scratch + thread_idx * r->plan->scratch.size);
    }
    kv8_subnormals_restore(subnormals);
}

kv8_status kv8_attention_run(const kv8_attention_plan *plan, const kv8_attention_args *given,
                             void *workspace) {
    KV8_REQUIRE(plan, given);
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    if (args->batch == 0) return KV8_OK;
    const kv8_attention_prepared *prepared = NULL;
    KV8_TRY(kv8_attention_find_prepared(plan, args, workspace, &prepared));
    if (prepared->cut.num_items == 0) return KV8_OK;
    KV8_TRY(kv8_attention_check_values(&plan->spec, args, &prepared->last_page));
    if (args->o == NULL) return kv8_fail(KV8_ERR_INVALID, "o is NULL");
    uint8_t *const bytes = workspace;
    const kv8_attention_cascade cascade = kv8_attention_cascade_of(plan, prepared);
    run r = {.plan = plan,
             .args = args,
             .items = (const kv8_attention_item *)(const void *)(bytes + plan->items_at),
             .joins = (kv8_attention_join *)(void *)(bytes + plan->joins_at),
             .cascade = &cascade,
             .partials = (float *)(void *)(bytes + plan->partials_at),
             .scratch = (float *)(void *)(bytes + plan->scratch_at),
             .num_items = prepared->cut.num_items};
    const int64_t num_workers = kv8_min_i64(r.num_items, plan->num_threads);
    kv8_threads_run(plan->threads, (size_t)num_workers, run_items, &r);
    kv8_threads_run(plan->threads, (size_t)cascade.num_rows, join_shared_row, &r);
    return KV8_OK;
}
