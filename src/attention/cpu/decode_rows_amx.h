/* decode_rows_amx.h - attention_amx.c's way for one or two rows of a head: V's rows as they are.
 *
 * A tile of P has 16 rows. Row 2 r of P holds pairs (weight, 0) of row r, row 2 r + 1 pairs
 * (0, weight): times V's rows as they are, two columns to a unit, they sum the even and the odd
 * columns. V needs no pairs of keys then and is widened like K. Eight rows gain nothing: what V
 * saves, twice as many rows of P and O cost.
 *
 * A value that is no number would spoil its neighbour (0 * NaN). So a head's sums are looked at
 * once its products are done: where they are spoiled, such values are taken out of V's tile and
 * added by themselves, and the products done again, from older sums to new ones as before. The
 * tiles behind go with pairs of keys. A row whose weights are no numbers has no other result.
 *
 * SPDX-License-Identifier: Apache-2.0 */

enum { T_FEW = 2 };
_Static_assert(T_FEW *KV8_ITEM_HEADS <= KV8_KEPT_ROWS, "job->kept holds the rows of few");

static void t_begin_doubled(const kv8_attention_job *job, t_queue *queue) {
    queue->doubled = job->item->num_rows <= T_FEW && kv8_spec_v_head_dim(job->spec) % 64 == 0 &&
                     job->piece_keys == 0;
    queue->sums[0] = job->o;
    queue->sums[1] = job->kept;
    queue->turn = 0;
    queue->unseen = -1;
    queue->spoiled = false;
}

/* to = a row in order, of which `row` holds the even columns and then the odd. */
static void t_place_doubled(const kv8_attention_job *job, const float *row, float *to) {
    float both[KV8_MAX_HEAD_DIM];
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int32_t d = 0; d < job->v_row; d += 2 * T_SIDE) {
        const v_f32 even = v_load(row + d / 2), odd = v_load(row + (job->v_row + d) / 2);
        const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(even, odd));
        const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(even, odd));
        v_store(both + d, _mm512_castpd_ps(_mm512_permutex2var_pd(low, first, high)));
        v_store(both + d + T_SIDE, _mm512_castpd_ps(_mm512_permutex2var_pd(low, last, high)));
    }
    memcpy(to, both, (size_t)job->v_row * sizeof *to);
    if (job->v_size > 1) return;
    /* The 8 of 64 codes at 16 x + 8 h are widened to quarter x of vector h. */
    for (int32_t d = 0; d < job->v_row; d += 64) {
        for (int32_t i = 0; i < 8; i++)
            memcpy(to + d + 16 * (i % 4) + 8 * (i / 4), both + d + 8 * i, 8 * sizeof *to);
    }
}

/* to = o + P V: 16 keys to a tile of V, for 2 * 32 columns at a time. */
static void t_push_doubled(t_queue *queue, const kv8_attention_job *job, float *o, float *to) {
    const int32_t units = job->v_row / 2;
    for (int32_t u = 0; u < units; u += 2 * T_SIDE) {
        t_op op = {.code = T_VALUES_BEGIN, .left = job->p, .right = job->v + u, .sums = o + u};
        for (int32_t key = 0; key < KV8_TILE_KEYS; key += T_SIDE) {
            t_push(queue, op);
            op.code = T_VALUES;
            op.left += T_SIDE;
            op.right += T_SIDE * (int64_t)units;
        }
        op.code = T_VALUES_STORE;
        op.sums = to + u;
        t_push(queue, op);
    }
}

/* --- weights, row by row --- */

/* Two vectors of keys by rows, `columns` rows: the lower half of the rows and the upper, of all
 * keys in order. */
V_INLINE void t_part_rows(v_f32 a, v_f32 b, v_f32 *lower, v_f32 *upper, const int columns) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int half = columns / 2;
    /* Lane l takes key l / half, row l % half; b's lanes are 16 on. */
    const __m512i from =
        _mm512_add_epi32(lane, _mm512_andnot_si512(_mm512_set1_epi32(half - 1), lane));
    *lower = _mm512_permutex2var_ps(a, from, b);
    *upper = _mm512_permutex2var_ps(a, _mm512_add_epi32(from, _mm512_set1_epi32(half)), b);
}

/* 16 keys in `columns` vectors to as many rows of 16 keys. */
V_INLINE void t_rows_of_keys(v_f32 *x, const int columns) {
    V_UNROLL
    for (int left = columns; left > 1; left /= 2) { /* rows that a vector still holds */
        v_f32 y[T_FEW];
        /* Vectors of the same rows are neighbours: columns / left groups of `left`. */
        V_UNROLL
        for (int i = 0; i < columns; i += 2) {
            const int at = i / left * left + i % left / 2;
            t_part_rows(x[i], x[i + 1], &y[at], &y[at + left / 2], left);
        }
        V_UNROLL
        for (int i = 0; i < columns; i++) x[i] = y[i];
    }
}

/* How many of the 128 rows that a head asks for go beside half of softmax: 32 go beside K's, 32
 * beside V's, and the rest in four bursts. Rows of more than a line are better asked for less
 * densely. */
static int32_t t_few_asks(const t_queue *queue) {
    return queue->ahead_bytes > 64 ? 12 : 24;
}

/* As t_weigh_pass, straight into P: 16 keys in the lower halves of units, 16 in the upper, then
 * row by row. For every 32 keys `asks` rows are asked for. */
V_INLINE v_f32 t_weigh_doubled(const t_pass *pass, v_f32 shift, t_queue *queue, const bool scaled,
                               int32_t asks, const int columns) {
    const t_pass p = *pass;
    const __m512i high = _mm512_set1_epi32(-0x10000);
    t_keep_awake(queue);
    v_f32 sum = v_set1(0.0f), sum2 = sum;
    for (int32_t begin = 0; begin < KV8_TILE_KEYS / T_SIDE; begin += 2) {
        v_f32 x[T_FEW];
        V_UNROLL
        for (int j = 0; j < columns; j++) {
            const int32_t i = begin * columns + j, k = i + columns;
            /* Not fused with the product: equal scores must differ by exactly 0. */
            v_f32 a = v_sub(t_pass_score(&p, i, scaled && p.k_scale != NULL), shift);
            v_f32 b = v_sub(t_pass_score(&p, k, scaled && p.k_scale != NULL), shift);
            a = v_exp2(a, T_EXP_DEGREE), b = v_exp2(b, T_EXP_DEGREE);
            sum = v_add(sum, a);
            sum2 = v_add(sum2, b);
            if (scaled && p.v_scale != NULL) {
                a = v_mul(a, t_pass_scale(&p, p.v_scale, i));
                b = v_mul(b, t_pass_scale(&p, p.v_scale, k));
            }
            x[j] = t_round_zip(a, b);
            t_ask_more(queue, asks / columns);
        }
        t_rows_of_keys(x, columns);
        float *to = p.p + begin * T_SIDE;
        V_UNROLL
        for (int row = 0; row < columns; row++, to += 2 * KV8_TILE_KEYS) {
            const __m512i both = _mm512_castps_si512(x[row]);
            _mm512_store_si512(to, _mm512_andnot_si512(high, both));
            _mm512_store_si512(to + T_SIDE, _mm512_srli_epi32(both, 16));
            _mm512_store_si512(to + KV8_TILE_KEYS, _mm512_slli_epi32(both, 16));
            _mm512_store_si512(to + KV8_TILE_KEYS + T_SIDE, _mm512_and_si512(both, high));
        }
    }
    return v_add(sum, sum2);
}
static V_NOINLINE v_f32 t_weigh_doubled_of(const t_pass *pass, v_f32 shift, t_queue *queue,
                                           bool first) {
    const bool scaled = pass->k_scale != NULL || pass->v_scale != NULL;
    const int32_t asks = first ? t_few_asks(queue) : 0;
#define T_WEIGH(COLUMNS)                                                         \
    if (scaled) return t_weigh_doubled(pass, shift, queue, true, asks, COLUMNS); \
    return t_weigh_doubled(pass, shift, queue, false, asks, COLUMNS)
    switch (pass->fold) {
        case 8: T_WEIGH(2);
        default: T_WEIGH(1);
    }
#undef T_WEIGH
}

/* --- values that are no numbers --- */

/* The head's sums of the tile at hand. */
static float *t_sums(const kv8_attention_job *job, const t_queue *queue, int32_t head, bool older) {
    const int64_t row = (int64_t)head * job->item->num_rows;
    return queue->sums[queue->turn ^ older] + row * job->v_row;
}

/* Whether V has spoiled sums of the head: then it has those of every row whose weights are numbers,
 * in even columns and in odd. */
static bool t_is_spoiled(const kv8_attention_job *job, const t_queue *queue, int32_t head) {
    const t_lanes at = t_lanes_of(job, 0);
    const v_f32 sum = v_load(job->lane_sum + t_first_lane(job, &at, head));
    const uint32_t sick = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    const uint32_t lanes = 0xffffu / ((1u << at.key_step) - 1); /* of the first row */
    int32_t row = 0;
    while (row < at.num_rows && (sick & lanes << row) != 0) row++;
    if (row == at.num_rows) return false;
    const float *const o = t_sums(job, queue, head, false) + (int64_t)row * job->v_row;
    v_f32 probe = v_set1(0.0f); /* x * 0 is 0 for every number, NaN for all else */
    for (int32_t d = 0; d < job->v_row / 2; d += T_SIDE)
        probe = v_fma(v_load(o + d), v_set1(0.0f), probe);
    return _mm512_cmp_ps_mask(probe, probe, _CMP_UNORD_Q) != 0;
}

/* Keys of a mixed tile whose row scale of V is no number have it in `apart`, and 1 in its place:
 * a weight of 0 would make a NaN of it. All else in `apart` is 1. */
static void t_part_scales(float *scale, float *apart) {
    for (int32_t key = 0; key < KV8_TILE_KEYS; key++) {
        const bool well = isfinite(scale[key]);
        apart[key] = well ? 1 : scale[key];
        if (!well) scale[key] = 1;
    }
}

/* o += a vector of one key's values (pairs of columns), for the rows that see the key. mixed: a
 * tile of which some rows do not see all keys, or NULL. */
static void t_add_apart(const kv8_attention_job *job, const kv8_tile *mixed, int32_t key,
                        __m512i values, float scale, float *o) {
    const v_f32 even = _mm512_castsi512_ps(_mm512_slli_epi32(values, 16));
    const v_f32 odd = _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32(-0x10000)));
    for (int32_t row = 0; row < job->item->num_rows; row++, o += job->v_row) {
        if (mixed != NULL && !kv8_job_sees(job, row, mixed->begin + key)) continue;
        uint32_t unit; /* (weight, 0) */
        memcpy(&unit, job->p + 2 * row * KV8_TILE_KEYS + key, sizeof unit);
        const v_f32 weight =
            v_mul(_mm512_castsi512_ps(_mm512_set1_epi32((int32_t)(unit << 16))), v_set1(scale));
        v_store(o, v_fma(weight, even, v_load(o)));
        v_store(o + job->v_row / 2, v_fma(weight, odd, v_load(o + job->v_row / 2)));
    }
}

/* Moves what is no number from V's tile to o. `apart`: as t_part_scales left it, or NULL. */
static void t_set_apart(const kv8_attention_job *job, const kv8_tile *mixed, const float *apart,
                        float *o) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    const int32_t units = job->v_row / 2;
    float *v = job->v;
    for (int32_t key = 0; key < KV8_TILE_KEYS; key++, v += units) {
        const float scale = apart != NULL ? apart[key] : 1;
        for (int32_t u = 0; u < units; u += T_SIDE) {
            const __m512i x = _mm512_loadu_si512(v + u);
            __mmask32 sick = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
            if (!isfinite(scale)) sick = 0xffffffff;
            if (sick == 0) continue;
            _mm512_storeu_si512(v + u, _mm512_maskz_mov_epi16(~sick, x));
            t_add_apart(job, mixed, key, _mm512_maskz_mov_epi16(sick, x), scale, o + u);
        }
    }
}

/* Looks at the sums of the last head whose products were begun; all are done. */
static void t_look(const kv8_attention_job *job, t_queue *queue) {
    const int32_t head = queue->unseen;
    queue->unseen = -1;
    if (head < 0 || !t_is_spoiled(job, queue, head)) return;
    float *const older = t_sums(job, queue, head, true);
    t_set_apart(job, NULL, NULL, older);
    t_push_doubled(queue, job, older, t_sums(job, queue, head, false));
    t_drain(queue);
    queue->spoiled = true;
}

/* On with pairs of keys. */
static void t_stop_doubling(const kv8_attention_job *job, t_queue *queue) {
    const int64_t rows = (int64_t)job->item->num_heads * job->item->num_rows;
    t_drain(queue);
    t_look(job, queue);
    for (int64_t row = 0; row < rows; row++) {
        float *const o = job->o + row * job->v_row;
        t_place_doubled(job, queue->sums[queue->turn] + row * job->v_row, o);
        t_place(job, o);
    }
    queue->doubled = queue->spoiled = false;
    t_shape(job, queue);
}

/* --- a tile --- */

/* V's rows as they are, like K's. */
static void t_load_v_rows(const kv8_attention_job *job, const t_rows *rows) {
    const t_load load = {.out = job->v,
                         .row = job->v_row / 2,
                         .at = rows->v_at,
                         .rows = rows->v_from,
                         .ahead = T_AHEAD_BY_K(rows),
                         .n = KV8_TILE_KEYS,
                         .dim = kv8_spec_v_head_dim(job->spec),
                         .ahead_bytes = T_AHEAD_BYTES(job, rows),
                         .queue = rows->queue};
#define T_CALL(D) t_load_k_##D(&load)
    T_BY_DTYPE(job->spec->v_dtype)
#undef T_CALL
}

/* What waits, and for what, is as in t_tile_of_head. */
static void t_tile_of_few(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                          int32_t head, t_queue *queue) {
    const t_lanes at = t_lanes_of(job, 0);
    const float *const q = job->q_lanes + (int64_t)head * job->q_row * t_rows_per_head(job);
    const int32_t burst = (KV8_TILE_KEYS - 2 * t_few_asks(queue)) / 4;
    const bool scales_part = tile->mixed && job->spec->v_dtype == KV8_INT8;
    float apart[KV8_TILE_KEYS];
    t_rows rows;
    t_rows_of(job, tile, next, head, false, &rows);
    rows.queue = queue;
    queue->ahead = rows.ahead;
    if (scales_part) t_part_scales(rows.v_scale, apart);
    t_load_k(job, &rows, KV8_TILE_KEYS);
    t_drain(queue);
    t_look(job, queue);
    if (head == 0) queue->turn ^= 1;
    float *const older = t_sums(job, queue, head, true);
    t_ask_more(queue, burst);
    t_push_scores(queue, job, &at, q, job->s);
    t_spread_over(queue, T_TICKS);
    t_load_v_rows(job, &rows);
    t_drain(queue);
    t_ask_more(queue, burst);
    const bool moved = t_weigh(job, &at, tile, &rows, head);
    t_ask_more(queue, burst);
    if (moved) t_rescale(job, &at, older);
    if (tile->mixed) t_set_apart(job, tile, scales_part ? apart : NULL, older);
    t_push_doubled(queue, job, older, t_sums(job, queue, head, false));
    queue->unseen = head;
    t_ask_more(queue, burst);
    t_spread_over(queue, T_TICKS);
}
