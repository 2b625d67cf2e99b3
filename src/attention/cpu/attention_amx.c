/* attention_amx.c - the attention kernel in bf16 math with both products on AMX tiles.
 *
 * One tdpbf16ps multiplies 16 rows of 16 pairs with 16 pairs of 16 columns into f32: 8192 products
 * in 16 cycles. S^T = K Q^T takes K's rows and the laid-out Q as they are; P is turned once, in
 * registers, to become the left side of P V; V's pairs of keys are its right side. That leaves
 * widening and softmax, the template's, as the bound. Subnormal bf16 inputs count as 0 (no FP8 or
 * int8 code is one). Q, K and V enter exactly; P is rounded to bf16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pairs_avx512.h"

enum { T_SIDE = 16, T_UNITS = KV8_TILE_KEYS / 2 }; /* rows, columns, pairs of a tile; units of P */

#define T_NAME         kv8_attention_bf16_any_dany_pany__amx
#define T_OWN_PRODUCTS 1
#define T_DEPTH_STEP   T_SIDE
#define T_KEY_STEP     KV8_TILE_KEYS

/* per_key[f] in every lane f * 16 / fold + row. */
static inline v_f32 t_spread(int32_t fold, const float *per_key) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = _mm512_srli_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(fold)), 4);
    return _mm512_permutexvar_ps(from, v_load_n(per_key, fold));
}
#define T_KEY_LANES(fold, per_key) t_spread(fold, per_key)

/* Units in the order in which turning P leaves them: all of one fold lane, then the next. */
static inline void t_order_units(int32_t fold, uint8_t *order) {
    const int32_t per_lane = T_UNITS / fold;
    for (int32_t u = 0; u < T_UNITS; u++)
        order[u] = (uint8_t)(u % per_lane * 2 * fold + u / per_lane);
}

/* The operand of ldtilecfg: palette 1; per tile its bytes per row and its rows. */
typedef struct t_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} t_config;

/* S^T: tiles 0 and 1 sums, 2 keys, 3 Q of `columns` rows. P V: 4 and 5 sums, 6 P, of `rows` rows
 * each, 7 V. */
static void t_configure(int32_t columns, int32_t rows) {
    t_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const bool narrow = tile == 0 || tile == 1 || tile == 3;
        config.row_bytes[tile] = (uint16_t)((narrow ? columns : T_SIDE) * (int32_t)sizeof(float));
        config.rows[tile] = (uint8_t)(tile >= 4 && tile <= 6 ? rows : T_SIDE);
    }
    _tile_loadconfig(&config);
}

/* A tile unit left alone for about a thousand cycles sleeps, and its next product takes as long to
 * begin (measured on Sapphire Rapids). This one's sums are never read. */
#define T_KEEP_AWAKE() _tile_dpbf16ps(4, 6, 7)

#include "attention_tmpl.h"

static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin) {
    const int32_t left = job->item->num_rows - row_begin;
    t_lanes at = {.row_begin = row_begin, .num_rows = left, .fold = 1, .vecs = 1, .row_step = 1};
    if (left > 2 * T_SIDE) at.num_rows = 2 * T_SIDE;
    if (at.num_rows > T_SIDE) at.vecs = 2;
    while (job->item->num_rows * at.fold * 2 <= T_SIDE) at.fold = 1 << ++at.shift;
    at.key_step = T_SIDE / at.fold;
    return at;
}

/* A unit's rows stand beside each other: fold of them in a vector. */
static inline int32_t t_columns(const t_lanes *at) {
    return at->vecs * T_SIDE / at->fold;
}
static inline int64_t t_q_at(const t_lanes *at, int32_t row, int32_t u) {
    return (int64_t)u * t_columns(at) + row;
}

static void t_begin(const kv8_attention_job *job) {
    const t_lanes at = t_lanes_of(job, 0);
    t_configure(T_SIDE / at.fold, at.num_rows < T_SIDE ? at.num_rows : T_SIDE);
}
static void t_end(const kv8_attention_job *job) {
    (void)job;
    _tile_release();
}

static void t_scores(const kv8_attention_job *job, const t_lanes *at, const float *q,
                     int32_t padded) {
    const size_t k_row = (size_t)job->q_row * sizeof(float);
    const size_t columns = (size_t)t_columns(at), row = columns * sizeof(float);
    for (int32_t v = 0; v < at->vecs; v++) {
        for (int32_t key = 0; key < padded; key += 2 * T_SIDE) {
            const float *const k = job->k + (int64_t)key * job->q_row;
            float *const s = job->s + key * (int64_t)columns + v * T_SIDE;
            _tile_zero(0);
            _tile_zero(1);
            for (int32_t u = 0; u < job->depth; u += T_SIDE) {
                _tile_loadd(3, q + u * (int64_t)columns + v * T_SIDE, row);
                _tile_loadd(2, k + u, k_row);
                _tile_dpbf16ps(0, 2, 3);
                _tile_loadd(2, k + T_SIDE * (int64_t)job->q_row + u, k_row);
                _tile_dpbf16ps(1, 2, 3);
            }
            _tile_stored(0, s, row);
            _tile_stored(1, s + T_SIDE * columns, row);
        }
    }
}

/* job->p [rows, T_UNITS] from the weights in lanes. Rows are written in order and whole vectors at
 * a time: what spills over the end of a piece is overwritten by the next. */
static void t_turn(const kv8_attention_job *job, const t_lanes *at) {
    const int32_t per_lane = T_UNITS / at->fold;
    for (int32_t v = 0; v < at->vecs; v++) {
        for (int32_t unit = 0; unit < per_lane; unit += T_SIDE) {
            v_f32 block[T_SIDE];
            V_UNROLL
            for (int i = 0; i < T_SIDE; i++)
                block[i] = unit + i < per_lane
                               ? v_load(job->s + ((int64_t)(unit + i) * at->vecs + v) * T_SIDE)
                               : v_set1(0.0f);
            v_transpose(block);
            float turned[T_SIDE][T_SIDE];
            V_UNROLL
            for (int i = 0; i < T_SIDE; i++) v_store(turned[i], block[i]);
            for (int32_t row = 0; row < T_SIDE / at->fold; row++) {
                float *const p = job->p + (int64_t)(v * T_SIDE + row) * T_UNITS + unit;
                for (int32_t f = 0; f < at->fold; f++)
                    v_store(p + f * per_lane, v_load(turned[f * at->key_step + row]));
            }
        }
    }
}

/* The configured rows of P V, 32 columns at a time; O's rows are padded to that. */
static void t_values_tile(const kv8_attention_job *job, const float *p, float *o) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    const size_t p_row = T_UNITS * sizeof(float), v_row = (size_t)job->v_row * sizeof(float);
    for (int32_t d = 0; d < dim; d += 2 * T_SIDE) {
        _tile_loadd(4, o + d, v_row);
        _tile_loadd(5, o + d + T_SIDE, v_row);
        for (int32_t u = 0; u < T_UNITS; u += T_SIDE) {
            const float *const v = job->v + (int64_t)u * job->v_row + d;
            _tile_loadd(6, p + u, p_row);
            _tile_loadd(7, v, v_row);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, v + T_SIDE, v_row);
            _tile_dpbf16ps(5, 6, 7);
        }
        _tile_stored(4, o + d, v_row);
        _tile_stored(5, o + d + T_SIDE, v_row);
    }
}

static void t_values(const kv8_attention_job *job, const t_lanes *at, float *o, bool changed,
                     int32_t padded) {
    (void)padded; /* the tile's keys are always filled up */
    if (at->vecs > 1) T_KEEP_AWAKE();
    t_turn(job, at);
    for (int32_t row = 0; changed && row < at->num_rows; row++) {
        float *const sums = o + (int64_t)row * job->v_row;
        for (int32_t d = 0; d < job->v_row; d += T_SIDE)
            v_store(sums + d, v_mul(v_set1(job->keep[row]), v_load(sums + d)));
    }
    for (int32_t row = 0; row < at->num_rows; row += T_SIDE) {
        const int32_t left = at->num_rows - row;
        const bool partial = at->fold == 1 && left < T_SIDE && job->item->num_rows > T_SIDE;
        if (partial) t_configure(T_SIDE, left);
        t_values_tile(job, job->p + (int64_t)row * T_UNITS, o + (int64_t)row * job->v_row);
        if (partial) t_configure(T_SIDE, T_SIDE);
    }
}
