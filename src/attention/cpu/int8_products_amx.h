/* int8_products_amx.h - attention_int8_amx.c's products: K's rows and V's fours of keys laid out
 * for the tiles, S^T = K Q^T and O = P V of them, and the sums of O's limbs joined.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* --- K, V, O --- */

static void t_place(const kv8_attention_job *job, float *row) {
    t_turn_quarters(row, kv8_spec_v_head_dim(job->spec));
}

static void t_value_row(const kv8_attention_job *job, const uint8_t *row, float scale) {
    for (int32_t d = 0; d < kv8_spec_v_head_dim(job->spec); d += V_LANES)
        v_store(job->value + d, v_mul(v_widen_int8(row + d), v_set1(scale)));
}

/* Where the next tile's 128 rows are asked for: 32 beside V's, which come from the second level of
 * cache themselves, 80 beside the weights and the others between them (64, 48 and 16: 5 % slower).
 */
enum { T_ASK_BY_V = 0, T_ASK_BY_WEIGHTS = 32, T_ASK_BETWEEN = 112 };
static void t_ask_between(const t_queue *queue, int32_t from, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        kv8_ask_row(queue->ahead[T_ASK_BETWEEN + from + i], queue->ahead_bytes);
}

/* A tile unit left alone for about a thousand cycles sleeps and takes as long to wake: a product
 * whose sums are never read keeps it awake. */
V_INLINE void t_keep_awake(void) {
    _tile_dpbssd(7, 5, 6);
}

/* 64 codes of four keys, key beside key. */
V_INLINE void t_interleave(const uint8_t *const *rows, int32_t d, uint8_t *to) {
    __m512i x[4];
    V_UNROLL
    for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(rows[i] + d);
    const __m512i low = _mm512_unpacklo_epi8(x[0], x[1]), low2 = _mm512_unpacklo_epi8(x[2], x[3]);
    const __m512i high = _mm512_unpackhi_epi8(x[0], x[1]), high2 = _mm512_unpackhi_epi8(x[2], x[3]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low, low2));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low, low2));
    _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(high, high2));
    _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(high, high2));
}

/* --- products --- */

/* Bytes to the next places of each int32, zeros after them: shifts by 8 and 16 on the port that
 * floating point leaves free. */
static inline __m512i t_shift_by(int bytes) {
    const __m512i byte = _mm512_set4_epi32(0x0f0e0d0c, 0x0b0a0908, 0x07060504, 0x03020100);
    const __mmask64 kept = bytes == 1 ? 0xeeeeeeeeeeeeeeee : 0xcccccccccccccccc;
    __m512i from =
        _mm512_mask_sub_epi8(_mm512_set1_epi8(-128), kept, byte, _mm512_set1_epi8((char)bytes));
    V_KEEP(from);
    return from;
}

static t_joining t_joining_of(const t_lanes *at) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int32_t columns = t_columns(at);
    const __m512i column = _mm512_and_si512(lane, _mm512_set1_epi32(columns - 1));
    const __m512i first =
        _mm512_mullo_epi32(t_spread_from(at->fold), _mm512_set1_epi32(T_Q_LIMBS * columns));
    t_joining j = {.by_8 = t_shift_by(1), .by_16 = t_shift_by(2)};
    for (int limb = 0; limb < T_Q_LIMBS; limb++) {
        j.from[limb] =
            _mm512_add_epi32(_mm512_add_epi32(first, column), _mm512_set1_epi32(limb * columns));
        j.third[limb] = _mm512_cmpge_epi32_mask(j.from[limb], _mm512_set1_epi32(2 * V_LANES));
    }
    return j;
}

/* Tiles: 0 and 1 sums of S^T, 2 keys, 3 and 4 Q; 5 P, 6 values, 7 sums of O. */
static void t_begin(const kv8_attention_job *job, t_queue *queue) {
    const t_lanes at = t_lanes_of(job, 0);
    const int32_t columns = t_columns(&at), all = T_Q_LIMBS * columns;
    const int32_t first = all < T_SIDE ? all : T_SIDE, second = all > T_SIDE ? all - T_SIDE : 1;
    t_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const int32_t width = tile == 0 || tile == 3   ? first
                              : tile == 1 || tile == 4 ? second
                                                       : T_SIDE;
        config.row_bytes[tile] = (uint16_t)(width * (int32_t)sizeof(int32_t));
        config.rows[tile] = (uint8_t)(tile == 5 || tile == 7 ? 2 * columns : T_SIDE);
    }
    t_load_config(&config);
    queue->ahead_bytes = t_ask_bytes(job);
    queue->columns = columns;
    queue->turn = 0;
    queue->o = NULL;
    queue->joining = t_joining_of(&at);
}

/* Where the tiles leave the scores of 64 keys, [key][limb][column], or, of two tiles, what the
 * second leaves behind all of the first; where they leave the values, [limb of P][row][dim], behind
 * K; and the weights as f32, behind P. job->s begins with a vector of scores for each `fold` keys,
 * where these must be looked at before they are weighed. */
static inline int32_t *t_score_sums(const kv8_attention_job *job) {
    return (int32_t *)job->s + KV8_TILE_KEYS / 2 * V_LANES;
}
enum { T_SECOND_SUMS = KV8_TILE_KEYS * T_SIDE };
static inline int32_t *t_value_sums(const kv8_attention_job *job) {
    return (int32_t *)job->k + T_SIDE * (int64_t)job->spec->head_dim;
}
static inline float *t_weights(const kv8_attention_job *job) {
    return job->p + T_SIDE * T_STEP / (int32_t)sizeof(float);
}
/* Two of them: while one head's values are formed, the next head's V is laid out. */
static inline uint8_t *t_v_of(const kv8_attention_job *job, const t_queue *queue) {
    return (uint8_t *)(job->v + queue->turn * T_SIDE * (int64_t)job->v_row);
}

/* Where 16 keys' rows of K lie: in the page where that is one piece, else copied. */
typedef struct t_keys {
    const uint8_t *rows;
    size_t stride;
} t_keys;

static t_keys t_keys_of(const kv8_attention_job *job, const uint8_t *const *rows, int32_t key,
                        bool in_pages) {
    if (in_pages) return (t_keys){rows[key], (size_t)(rows[key + 1] - rows[key])};
    const int32_t dim = job->spec->head_dim;
    uint8_t *const to = (uint8_t *)job->k;
    for (int32_t i = 0; i < T_SIDE; i++) memcpy(to + i * dim, rows[key + i], (size_t)dim);
    return (t_keys){to, (size_t)dim};
}

/* What a head's products are formed of. */
typedef struct t_sources {
    const float *q;
    const uint8_t *const *k, *const *v, *order;
    bool in_pages;
} t_sources;

/* Tile loads are no memory accesses to the compiler. */
#define T_BARRIER() __asm__ volatile("" ::: "memory")

/* The scores of 16 keys, in tiles 0 and 1. */
V_INLINE void t_form_scores(const kv8_attention_job *job, const t_sources *w, int32_t columns,
                            int32_t key, const int32_t dim) {
    const int32_t all = T_Q_LIMBS * columns, first = all < T_SIDE ? all : T_SIDE;
    const size_t step = (size_t)first * sizeof(int32_t);
    const size_t step2 = (size_t)(all - first) * sizeof(int32_t);
    const t_keys k = t_keys_of(job, w->k, key, w->in_pages);
    T_BARRIER();
    _tile_zero(0);
    _tile_zero(1);
    for (int32_t d = 0; d < dim; d += T_STEP) {
        const float *const right = w->q + d / T_STEP * T_Q_STEP;
        _tile_loadd(2, k.rows + d, k.stride);
        if (key == 0 || dim > T_STEP) _tile_loadd(3, right, step);
        _tile_dpbssd(0, 2, 3);
        if (all == first) continue;
        if (key == 0 || dim > T_STEP) _tile_loadd(4, right + T_Q_FIRST, step2);
        _tile_dpbssd(1, 2, 4);
    }
}
V_INLINE void t_store_scores(const kv8_attention_job *job, int32_t columns, int32_t key) {
    const int32_t all = T_Q_LIMBS * columns, first = all < T_SIDE ? all : T_SIDE;
    int32_t *const sums = t_score_sums(job);
    _tile_stored(0, sums + key * first, (size_t)first * sizeof(int32_t));
    if (all > first)
        _tile_stored(1, sums + T_SECOND_SUMS + key * (all - first),
                     (size_t)(all - first) * sizeof(int32_t));
}

/* Fours of V's keys, side by side, from key `key` of the order on. */
V_INLINE void t_lay_out_v(const t_sources *w, const t_queue *queue, uint8_t *to, int32_t key,
                          int32_t end, const int32_t v_dim) {
    for (; key < end; key += 4) {
        const uint8_t *const four[4] = {w->v[w->order[key]], w->v[w->order[key + 1]],
                                        w->v[w->order[key + 2]], w->v[w->order[key + 3]]};
        for (int32_t d = 0; d < v_dim; d += T_STEP)
            t_interleave(four, d, to + (key * (int64_t)v_dim + 4 * d));
        for (int i = 0; i < 2; i++) kv8_ask_row(queue->ahead[T_ASK_BY_V + key / 2 + i], v_dim);
    }
}

/* Lays V out and meanwhile forms this head's scores, and then the values of the head before: sums
 * are stored long after their product was issued, or all behind would wait for them, and looked at
 * later still. */
V_INLINE void t_products_of(const kv8_attention_job *job, const t_sources *sources, t_queue *queue,
                            const int32_t dim, const int32_t v_dim) {
    enum { HALF = KV8_TILE_KEYS / 2 };
    const t_sources w = *sources;
    const int32_t columns = queue->columns;
    const size_t v_step = (size_t)v_dim * sizeof(int32_t);
    const bool values = queue->o != NULL;
    const uint8_t *const v = t_v_of(job, queue);
    queue->turn ^= 1;
    uint8_t *const to = t_v_of(job, queue);
    int32_t *const value_sums = t_value_sums(job);
    for (int32_t key = 0; key < KV8_TILE_KEYS; key += T_SIDE) {
        t_form_scores(job, &w, columns, key, dim);
        t_lay_out_v(&w, queue, to, key / 2, key / 2 + T_SIDE / 2, v_dim);
        t_store_scores(job, columns, key);
    }
    if (values) _tile_loadd(5, job->p, T_STEP);
    for (int32_t d = 0, key = HALF; d < v_dim; d += T_SIDE) {
        if (values) {
            _tile_zero(7);
            _tile_loadd(6, v + d * (int64_t)sizeof(int32_t), v_step);
            _tile_dpbssd(7, 5, 6);
        }
        const int32_t end = HALF + (d + T_SIDE) * (HALF / 4) / v_dim * 4;
        t_lay_out_v(&w, queue, to, key, end, v_dim);
        key = end;
        if (values) _tile_stored(7, value_sums + d, v_step);
    }
    T_BARRIER();
}
static V_NOINLINE void t_products(const kv8_attention_job *job, const t_sources *sources,
                                  t_queue *queue) {
    const int32_t dim = job->spec->head_dim, v_dim = kv8_spec_v_head_dim(job->spec);
    if (dim == 64 && v_dim == 64)
        t_products_of(job, sources, queue, 64, 64);
    else if (dim == 128 && v_dim == 128)
        t_products_of(job, sources, queue, 128, 128);
    else
        t_products_of(job, sources, queue, dim, v_dim);
}

/* o += what the tiles have left for the head before. */
static void t_settle(const kv8_attention_job *job, t_queue *queue) {
    if (queue->o == NULL) return;
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    const __m512i by_8 = queue->joining.by_8;
    for (int32_t row = 0; row < job->item->num_rows; row++) {
        const int32_t *const high = t_value_sums(job) + row * dim;
        const int32_t *const low = high + queue->columns * dim;
        const v_f32 unit = v_set1(queue->unit[row]);
        float *const o = queue->o + (int64_t)row * job->v_row;
        for (int32_t d = 0; d < dim; d += V_LANES) {
            const __m512i sum =
                _mm512_add_epi32(_mm512_shuffle_epi8(_mm512_loadu_si512(high + d), by_8),
                                 _mm512_loadu_si512(low + d));
            v_store(o + d, v_fma(_mm512_cvtepi32_ps(sum), unit, v_load(o + d)));
        }
    }
    queue->o = NULL;
}

static void t_end(const kv8_attention_job *job, t_queue *queue) {
    const uint8_t *none[KV8_TILE_KEYS];
    const uint8_t order[KV8_TILE_KEYS] = {0};
    for (int i = 0; i < KV8_TILE_KEYS; i++) none[i] = t_zeros;
    queue->ahead = none;
    const t_sources sources = {.q = job->q_lanes, .k = none, .v = none, .order = order};
    t_products(job, &sources, queue);
    t_settle(job, queue);
    _tile_release();
    const int64_t rows = (int64_t)job->item->num_heads * job->item->num_rows;
    for (int64_t row = 0; row < rows; row++) t_place(job, job->o + row * job->v_row);
}
