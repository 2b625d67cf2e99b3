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

static int64_t t_all_lanes(const kv8_attention_job *job) {
    const t_lanes at = t_lanes_of(job, 0);
    return (int64_t)job->item->num_heads * t_lanes_per_head(job, &at);
}
static int64_t t_all_rows(const kv8_attention_job *job) {
    return (int64_t)job->item->num_heads * job->item->num_rows;
}

/* Clears the sums. */
static void t_clear(const kv8_attention_job *job) {
    const int64_t lanes = t_all_lanes(job);
    for (int64_t i = 0; i < lanes; i++) {
        job->lane_sum[i] = 0;
        job->lane_max[i] = -INFINITY;
    }
    memset(job->o, 0, (size_t)(t_all_rows(job) * job->v_row) * sizeof *job->o);
}

static void t_prepare(const kv8_attention_job *job) {
    const int64_t rows = (int64_t)job->item->num_heads * t_rows_per_head(job);
    memset(job->lane_scale, 0, (size_t)t_all_lanes(job) * sizeof *job->lane_scale);
    memset(job->q_lanes, 0, (size_t)(rows * job->q_row) * sizeof *job->q_lanes);
    t_clear(job);
    t_lay_out_q(job);
}

/* Maxima and sums of rows from those of their lanes. */
static void t_finish(const kv8_attention_job *job) {
    const kv8_attention_item *const item = job->item;
    for (int32_t head = 0; head < item->num_heads; head++) {
        for (int32_t begin = 0; begin < item->num_rows;) {
            const t_lanes at = t_lanes_of(job, begin);
            const int64_t lane = t_first_lane(job, &at, head);
            for (int32_t row = 0; row < at.num_rows; row++) {
                float sum = 0;
                for (int32_t f = 0; f < at.sums; f++)
                    sum += job->lane_sum[lane + t_score_at(&at, row, f)];
                const int64_t out = (int64_t)head * item->num_rows + begin + row;
                job->max[out] = job->lane_max[lane + t_score_at(&at, row, 0)] * t_ln2;
                job->sum[out] = sum;
            }
            begin += at.num_rows;
        }
    }
}

/* Ends the piece of keys under way and adds it to those before. */
static void t_end_piece(const kv8_attention_job *job, t_queue *queue, bool is_first) {
    t_finish(job);
    t_end(job, queue);
    kv8_attention_add_piece(job, is_first);
}

/* The item's keys from first to last. */
void T_NAME(const kv8_attention_job *job) {
    kv8_tile tiles[2];
    int32_t key = job->item->key_begin, num_pieces = 0;
    if (job->piece_keys > 0) key = key / KV8_TILE_KEYS * KV8_TILE_KEYS;
    bool more = kv8_tile_next(job, &key, &tiles[0]);
    if (more && !job->cursor->asked) t_ask_tile(job, &tiles[0]);
    job->cursor->asked = false;
    t_prepare(job);
    t_queue queue;
    t_begin(job, &queue);
    uint8_t order[KV8_TILE_KEYS];
    t_order_units(t_lanes_of(job, 0).sums, order);
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
        if (!more || job->piece_keys == 0 || other->begin % job->piece_keys != 0) continue;
        t_end_piece(job, &queue, num_pieces++ == 0);
        t_clear(job);
        t_begin(job, &queue);
    }
    if (num_pieces == 0) {
        t_finish(job);
        t_end(job, &queue);
        return;
    }
    t_end_piece(job, &queue, false);
    kv8_attention_take_pieces(job);
}
