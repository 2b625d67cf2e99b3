/* tile_tmpl.h - a tile of an item: the rows of each head, their scales, values that are no numbers.
 *
 * Part of attention_tmpl.h and of the AMX kernels.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* job->value = one V row as f32, codes times their own scale. */
static void t_value_row(const kv8_attention_job *job, const uint8_t *row, float scale);
/* The weight of key i, as a key that was set aside has it. */
static inline float t_weight(const kv8_attention_job *job, const t_lanes *at, int32_t row,
                             int32_t i);
/* Brings job->value into the order of O's columns. */
static void t_place_value(const kv8_attention_job *job);

/* --- values that are no numbers --- */

/* In P V a masked key has weight 0, and 0 * NaN is NaN: a row would see what it must not. Keys of
 * a mixed tile whose V row holds NaN or infinities are taken out of the tile here (and their row
 * scale out of P) and added afterwards, only to the rows that see them. */
typedef struct t_nonfinite {
    int32_t count;
    int32_t at[KV8_TILE_KEYS];
    const uint8_t *row[KV8_TILE_KEYS];
    float scale[KV8_TILE_KEYS];
} t_nonfinite;

static void t_take_nonfinite(const kv8_attention_job *job, t_rows *rows, int32_t n,
                             t_nonfinite *nonfinite) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    for (int32_t i = 0; i < n; i++) {
        if (rows->v[i] == t_zeros) continue;
        const float scale = job->spec->v_dtype == KV8_INT8 ? rows->v_scale[i] : 1;
        t_value_row(job, rows->v[i], scale);
        float probe = 0; /* x * 0 is 0 for every number, NaN for all else */
        for (int32_t d = 0; d < dim; d++) probe += job->value[d] * 0.0f;
        if (probe == 0) continue;
        const int32_t k = nonfinite->count++;
        nonfinite->at[k] = i;
        nonfinite->row[k] = rows->v[i];
        nonfinite->scale[k] = scale;
        rows->v[i] = t_zeros;
        rows->v_scale[i] = 1;
    }
}

static void t_add_nonfinite(const kv8_attention_job *job, const t_lanes *at, const kv8_tile *tile,
                            const t_nonfinite *nonfinite, float *o) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    for (int32_t k = 0; k < nonfinite->count; k++) {
        t_value_row(job, nonfinite->row[k], nonfinite->scale[k]);
        t_place_value(job);
        for (int32_t row = 0; row < at->num_rows; row++) {
            if (!kv8_job_sees(job, at->row_begin + row, tile->begin + nonfinite->at[k])) continue;
            const float weight = t_weight(job, at, row, nonfinite->at[k]);
            float *const to = o + (int64_t)row * job->v_row;
            for (int32_t d = 0; d < dim; d++) to[d] += weight * job->value[d];
        }
    }
}

/* --- rows --- */

/* The first n rows of a head that lies `bytes` behind the item's first; zeros for the others,
 * and where a mask has taken a key out. */
static void t_rows_at(const uint8_t *const *first, int32_t n, int64_t bytes, bool has_holes,
                      const uint8_t **restrict rows) {
    if (has_holes) {
        for (int32_t i = 0; i < n; i++) rows[i] = first[i] == NULL ? t_zeros : first[i] + bytes;
    } else {
        for (int32_t i = 0; i < n; i++) rows[i] = first[i] + bytes;
    }
    for (int32_t i = n; i < KV8_TILE_KEYS; i++) rows[i] = t_zeros;
}

/* What of a tile is asked for while head number `head` of the item is worked on: a part of all
 * heads' rows. */
static void t_ahead_of(const kv8_attention_job *job, const kv8_tile *tile, int32_t head,
                       const uint8_t **ahead) {
    const kv8_paged *const k = job->args->k, *const v = job->args->v;
    const int32_t num_heads = job->item->num_heads, n = tile->end - tile->begin;
    for (int32_t i = n; i < KV8_TILE_KEYS; i++)
        ahead[t_ahead_at(i)] = ahead[T_GROUP + t_ahead_at(i)] = (const uint8_t *)job->k;
    t_ask_rows(tile->k, n, num_heads, head, job->k_head, k->stride_head < k->stride_slot, ahead);
    t_ask_rows(tile->v, n, num_heads, head, job->v_head, v->stride_head < v->stride_slot,
               ahead + T_GROUP);
}

/* The tile's rows of the item's head number `head`, copied where asked for; and what to read ahead.
 */
static void t_rows_of(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                      int32_t head, bool copied, t_rows *rows) {
    const int32_t n = tile->end - tile->begin, num_heads = job->item->num_heads;
    rows->k_from = tile->k, rows->v_from = tile->v;
    rows->k_at = head * job->k_head, rows->v_at = head * job->v_head;
    if (copied || tile->mixed || n != KV8_TILE_KEYS) {
        t_rows_at(tile->k, n, rows->k_at, tile->has_holes, rows->k);
        t_rows_at(tile->v, n, rows->v_at, tile->has_holes, rows->v);
        rows->k_from = rows->k, rows->v_from = rows->v;
        rows->k_at = rows->v_at = 0;
    }
    if (next != NULL && !next->has_holes) {
        const int32_t count = next->end - next->begin;
        t_ahead_of(job, next, head, rows->ahead);
        for (int32_t i = head * count / num_heads; i < (head + 1) * count / num_heads; i++) {
            if (job->spec->k_dtype == KV8_INT8) V_PREFETCH(next->k_scale[i]);
            if (job->spec->v_dtype == KV8_INT8) V_PREFETCH(next->v_scale[i]);
        }
    } else {
        for (int32_t i = 0; i < 2 * KV8_TILE_KEYS; i++) rows->ahead[i] = (const uint8_t *)job->k;
    }
    for (int32_t i = 0; job->spec->k_dtype == KV8_INT8 && i < KV8_TILE_KEYS; i += V_LANES)
        v_store(rows->k_scale + i, v_widen_f16((const uint8_t *)(tile->row_scale[0][head] + i)));
    for (int32_t i = 0; job->spec->v_dtype == KV8_INT8 && i < KV8_TILE_KEYS; i += V_LANES)
        v_store(rows->v_scale + i, v_widen_f16((const uint8_t *)(tile->row_scale[1][head] + i)));
}

/* K's or V's row scales of a tile, head by head; 0 for a key that nobody sees. Once for all heads:
 * in the usual layout a token's scales are neighbours. */
static void t_gather_scales(const kv8_attention_job *job, const kv8_tile *tile,
                            const uint8_t *const *rows, const kv8_f16 *const *first,
                            int64_t stride_head, kv8_f16 (*to)[KV8_TILE_KEYS]) {
    const int32_t num_heads = job->item->num_heads, n = tile->end - tile->begin;
#ifdef T_TURN_SCALES
    if (n == KV8_TILE_KEYS && num_heads % 8 == 0 && stride_head == 1 && !tile->has_holes) {
        for (int32_t head = 0; head < num_heads; head += 8) T_TURN_SCALES(first, head, to + head);
        return;
    }
#endif
    for (int32_t head = 0; head < num_heads; head++) {
        const int64_t at = head * stride_head;
        if (tile->has_holes) {
            for (int32_t i = 0; i < n; i++)
                to[head][i] = rows[i] != NULL ? first[i][at] : (kv8_f16){0};
        } else {
            for (int32_t i = 0; i < n; i++) to[head][i] = first[i][at];
        }
        for (int32_t i = n; i < KV8_TILE_KEYS; i++) to[head][i] = (kv8_f16){0};
    }
}
