/* walk_tmpl.h - an item from its first key to its last, whoever multiplies.
 *
 * Part of attention_tmpl.h and of the AMX kernels, which bring t_lay_out_q, t_order_units,
 * t_tile_of_head, and t_begin and t_end around the walk.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* Where nothing has asked for an item's first tile: all of it at once, while Q is laid out. */
static void t_ask_tile(const kv8_attention_job *job, const kv8_tile *tile) {
    if (tile->has_holes) return;
    const int32_t bytes = t_ask_bytes(job);
    for (int32_t key = 0; key < tile->end - tile->begin; key++) {
        for (int32_t head = 0; head < job->item->num_heads; head++) {
            kv8_ask_row(tile->k[key] + head * job->k_head, bytes);
            kv8_ask_row(tile->v[key] + head * job->v_head, bytes);
        }
    }
}

/* Clears the sums and lays out Q. */
static void t_prepare(const kv8_attention_job *job) {
    const kv8_attention_item *const item = job->item;
    const int64_t all = (int64_t)item->num_heads * t_lanes_per_head(job);
    for (int64_t i = 0; i < all; i++) {
        job->lane_scale[i] = job->lane_sum[i] = 0;
        job->lane_max[i] = -INFINITY;
    }
    memset(job->q_lanes, 0, (size_t)(all * job->q_row) * sizeof *job->q_lanes);
    memset(job->o, 0,
           (size_t)((int64_t)item->num_heads * item->num_rows * job->v_row) * sizeof *job->o);
    t_lay_out_q(job);
}

/* Maxima and sums of rows from those of their lanes. */
static void t_finish(const kv8_attention_job *job) {
    const kv8_attention_item *const item = job->item;
    for (int32_t head = 0; head < item->num_heads; head++) {
        for (int32_t begin = 0; begin < item->num_rows;) {
            const t_lanes at = t_lanes_of(job, begin);
            const int64_t lane = (int64_t)head * t_lanes_per_head(job) + begin;
            for (int32_t row = 0; row < at.num_rows; row++) {
                float sum = 0;
                for (int32_t f = 0; f < at.fold; f++)
                    sum += job->lane_sum[lane + t_score_at(&at, row, f)];
                const int64_t out = (int64_t)head * item->num_rows + begin + row;
                job->max[out] = job->lane_max[lane + t_score_at(&at, row, 0)] * t_ln2;
                job->sum[out] = sum;
            }
            begin += at.num_rows;
        }
    }
}

/* The item's keys from first to last. */
void T_NAME(const kv8_attention_job *job) {
    kv8_tile tiles[2];
    int32_t key = job->item->key_begin;
    bool more = kv8_tile_next(job, &key, &tiles[0]);
    if (more && !job->cursor->asked) t_ask_tile(job, &tiles[0]);
    job->cursor->asked = false;
    t_prepare(job);
    t_queue queue;
    t_begin(job, &queue);
    uint8_t order[KV8_TILE_KEYS];
    t_order_units(t_lanes_of(job, 0).fold, order);
    for (int now = 0; more; now ^= 1) {
        const bool last = !kv8_tile_next(job, &key, &tiles[now ^ 1]);
        kv8_tile *const tile = &tiles[now], *const other = &tiles[now ^ 1];
        const kv8_tile *const next = last ? kv8_tile_of_next_item(job, other) : other;
        if (job->spec->k_dtype == KV8_INT8)
            t_gather_scales(job, tile, tile->k, tile->k_scale, job->args->k->row_scale_stride_head,
                            tile->row_scale[0]);
        if (job->spec->v_dtype == KV8_INT8)
            t_gather_scales(job, tile, tile->v, tile->v_scale, job->args->v->row_scale_stride_head,
                            tile->row_scale[1]);
        for (int32_t head = 0; head < job->item->num_heads; head++)
            t_tile_of_head(job, tile, next, order, head, &queue);
        more = !last;
    }
    t_finish(job);
    t_end(job, &queue);
}
