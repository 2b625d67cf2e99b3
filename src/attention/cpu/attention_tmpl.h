/* attention_tmpl.h - one item of paged attention, written once for every rung.
 *
 * The including file has chosen a vocabulary (simd/<rung>.h) and defines
 *   T_NAME           the kernel's name, as in attention_kernels.inc
 *   T_KEYS           keys of one block of scores over one vector of rows: a multiple of V_LANES
 *   T_KEYS_2         keys of one block of scores over two vectors
 *   T_ROWS, T_VECS   accumulators of P V: T_ROWS (4 or 6) rows of T_VECS vectors
 *   T_PAIRS          0: f32 math. 1: bf16 math on pairs; then also
 *     T_PAIRS_OF(D, codes), T_PAIRS_OF_N(D, codes, n)   2*V_LANES codes to V_LANES pairs in order
 *     t_dot(a, b, sum)           sum + a.first * b.first + a.second * b.second
 *     t_round_zip(a, b)          pairs (a_i, b_i) of the rounded lanes
 *     t_zip_lo(a, b), t_zip_hi   pairs (a_i, b_i) of the first and of the second V_LANES elements
 *     T_LOAD_64, T_LOAD_V_64     optional: see widen_tmpl.h
 *
 * Per tile of 64 keys and head: widen K and V; then for at most two vectors of rows at a time
 * S^T = K Q^T, weigh, O = keep O + P V. Rows lie in lanes and keys follow one another, so neither
 * K nor V is ever transposed and softmax never sums across lanes. Q is laid out once per item: the
 * rows of one unit beside each other. When the rows fill at most half a vector, each lane takes
 * one of `fold` pieces of the row: consecutive units in S^T (its lanes are added at the end of the
 * block), keys afterwards. The tile is widened once for every row of the item, and the scores of
 * one step are all that exist. job->fold_rows decides the fold: an item has one.
 * The walk over the keys is walk_tmpl.h, which AMX shares, as it does what this includes but for
 * weigh_tmpl.h. Not here: which rows and keys (run.c); normalisation, sink and output dtype
 * (finish.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "rows_tmpl.h"

#if !T_PAIRS
static inline v_f32 t_dot(v_f32 a, v_f32 b, v_f32 sum) {
    return v_fma(a, b, sum);
}
#endif

#define T_WEIGHTS(job) ((job)->s) /* in place of the scores */
enum { T_KEY_STEP = 32 }; /* keys of a tile are padded to a multiple: two vectors at any fold */

/* The first key of each unit of V and P; the second of a pair is `fold` further. */
static inline void t_order_units(int32_t fold, uint8_t *order) {
    for (int32_t u = 0; u < KV8_TILE_KEYS; u++) order[u] = (uint8_t)(u / fold * fold * T_PAIRS + u);
}

#include "scores_tmpl.h"
#include "tile_tmpl.h"
#include "units_tmpl.h"
#include "weigh_tmpl.h"
#include "widen_tmpl.h"

static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin) {
    const int32_t left = job->item->num_rows - row_begin;
    t_lanes at = {.row_begin = row_begin, .num_rows = left, .fold = 1, .vecs = 1};
    if (left > 2 * V_LANES) at.num_rows = 2 * V_LANES;
    if (at.num_rows > V_LANES) at.vecs = 2;
    while (job->fold_rows * at.fold * 2 <= V_LANES) at.fold = 1 << ++at.shift;
    if (at.fold > 1) {
        at.vecs = 1;
        if (at.num_rows > V_LANES / at.fold) at.num_rows = V_LANES / at.fold;
    }
    at.row_step = at.sums = at.fold;
    at.key_step = 1;
    return at;
}

static inline int64_t t_q_at(const t_lanes *at, int32_t row, int32_t u) {
    return t_score_at(at, row, u);
}

/* Units to one turn of a product's loop: what a turn adds to the products (an addition, a branch)
 * takes their ports. AVX2's registers are too few for two units of depth. */
enum { T_DEPTHS_AT_ONCE = V_LANES == 16 ? 2 : 1, T_UNITS_AT_ONCE = 2 };

/* --- S^T = K Q^T --- */

/* Sums of key i and key i + step, a half of the lanes each, in key i. */
V_INLINE void t_fold_keys(v_f32 (*sum)[2], const int keys, const int step) {
    V_UNROLL
    for (int i = 0; i + step < keys; i += 2 * step)
        sum[i][0] = v_fold(sum[i][0], sum[i + step][0], step);
}

/* `keys` keys from k on, over `vecs` vectors of rows; sums of `fold` lanes when vecs is 1. */
V_INLINE void t_scores_block(const float *k, int64_t k_row, const float *q, int32_t depth, float *s,
                             const int keys, const int vecs, const int fold) {
    v_f32 sum[T_KEYS][2];
    V_UNROLL
    for (int i = 0; i < keys; i++) {
        V_UNROLL
        for (int v = 0; v < vecs; v++) sum[i][v] = v_set1(0.0f);
    }
    const int at_once = T_DEPTHS_AT_ONCE * fold <= V_LANES ? T_DEPTHS_AT_ONCE : 1;
    for (int32_t u = 0; u < depth; u += at_once * fold) {
        V_UNROLL
        for (int j = 0; j < at_once; j++, k += fold, q += vecs * V_LANES) {
            v_f32 right[2];
            V_UNROLL
            for (int v = 0; v < vecs; v++) {
                right[v] = v_load(q + v * V_LANES);
                V_KEEP(right[v]);
            }
            V_UNROLL
            for (int i = 0; i < keys; i++) {
                const v_f32 left = v_load_fold(k + i * k_row, fold);
                V_UNROLL
                for (int v = 0; v < vecs; v++) sum[i][v] = t_dot(left, right[v], sum[i][v]);
            }
        }
    }
    if (fold >= 2) t_fold_keys(sum, keys, 1);
    if (fold >= 4) t_fold_keys(sum, keys, 2);
    if (fold >= 8) t_fold_keys(sum, keys, 4);
    if (fold >= 16) t_fold_keys(sum, keys, 8);
    V_UNROLL
    for (int i = 0; i < keys; i += fold) {
        V_UNROLL
        for (int v = 0; v < vecs; v++) v_store(s + (i / fold * vecs + v) * V_LANES, sum[i][v]);
    }
}

/* job->s = the step's scores of `padded` keys. */
static void t_scores(const kv8_attention_job *job, const t_lanes *at, const float *q,
                     int32_t padded) {
    const int32_t depth = (int32_t)kv8_round_up((size_t)job->depth, V_LANES);
    const int32_t keys = at->vecs == 2 ? T_KEYS_2 : T_KEYS;
    for (int32_t i = 0; i < padded; i += keys) {
        /* The last block may repeat keys of the one before, with the same bits. */
        if (i + keys > padded) i = padded - keys;
        const float *const k = job->k + (int64_t)i * job->q_row;
        float *const s = job->s + (int64_t)(i / at->fold) * at->vecs * V_LANES;
        if (at->vecs == 2) {
            t_scores_block(k, job->q_row, q, depth, s, T_KEYS_2, 2, 1);
            continue;
        }
        switch (at->fold) {
            case 1: t_scores_block(k, job->q_row, q, depth, s, T_KEYS, 1, 1); break;
#if V_LANES >= 2
            case 2: t_scores_block(k, job->q_row, q, depth, s, T_KEYS, 1, 2); break;
#endif
#if V_LANES >= 4
            case 4: t_scores_block(k, job->q_row, q, depth, s, T_KEYS, 1, 4); break;
#endif
#if V_LANES >= 8
            case 8: t_scores_block(k, job->q_row, q, depth, s, T_KEYS, 1, 8); break;
#endif
#if V_LANES >= 16
            case 16: t_scores_block(k, job->q_row, q, depth, s, T_KEYS, 1, 16); break;
#endif
            default: break;
        }
    }
}

/* --- O = keep O + P V --- */

/* Where the next unit of a row of P lies: the next fold lane, or lane 0 of the next vector. */
typedef struct t_weights {
    const float *at; /* of the block's first row and unit 0 */
    int32_t row_step, key_step, fold;
    int64_t wrap; /* from the last fold lane to the next vector's first */
} t_weights;

/* c[r][..] = keep[r] * c[r][..] + sum_u P[r][u] * v[u][..] over vecs vectors. rows and vecs are
 * constants at every call. */
V_INLINE void t_values_block(t_weights p, const float *v, int64_t v_row, float *c, int64_t c_row,
                             int32_t units, const float *keep, const int rows, const int vecs) {
    v_f32 sum[T_ROWS][T_VECS];
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        V_UNROLL
        for (int x = 0; x < vecs; x++) sum[r][x] = v_set1(0.0f);
    }
    for (int32_t u = 0; u < units; u += T_UNITS_AT_ONCE) {
        V_UNROLL
        for (int i = 0; i < T_UNITS_AT_ONCE; i++, v += v_row) {
            v_f32 right[T_VECS];
            V_UNROLL
            for (int x = 0; x < vecs; x++) {
                right[x] = v_load(v + x * V_LANES);
                V_KEEP(right[x]);
            }
            V_UNROLL
            for (int r = 0; r < rows; r++) {
                const v_f32 left = v_set1(p.at[r * p.row_step]);
                V_UNROLL
                for (int x = 0; x < vecs; x++) sum[r][x] = t_dot(left, right[x], sum[r][x]);
            }
            p.at += ((u + i + 1) & (p.fold - 1)) != 0 ? p.key_step : p.wrap;
        }
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        V_UNROLL
        for (int x = 0; x < vecs; x++) {
            float *const out = c + r * c_row + x * V_LANES;
            v_store(out, v_fma(v_set1(keep[r]), v_load(out), sum[r][x]));
        }
    }
}

/* `rows` rows, all vectors of c: panels of T_VECS, then single ones. */
V_INLINE void t_values_rows(t_weights p, const float *v, int64_t v_row, float *c, int64_t c_row,
                            int32_t units, const float *keep, int32_t vecs, const int rows) {
    int32_t x = 0;
    for (; x + T_VECS <= vecs; x += T_VECS)
        t_values_block(p, v + x * V_LANES, v_row, c + x * V_LANES, c_row, units, keep, rows,
                       T_VECS);
    for (; x < vecs; x++)
        t_values_block(p, v + x * V_LANES, v_row, c + x * V_LANES, c_row, units, keep, rows, 1);
}

/* o[r][..] = keep[r] * o[r][..] + P V. Rows go in blocks of nearly equal size, at most T_ROWS. A
 * row's bits do not depend on its block: each element is its own chain over the units. */
static void t_values(const kv8_attention_job *job, const t_lanes *at, float *o, int32_t padded) {
    const int32_t vecs = (kv8_spec_v_head_dim(job->spec) + V_LANES - 1) / V_LANES;
    const int32_t units = padded / T_ELEMENTS;
    int32_t blocks = (at->num_rows + T_ROWS - 1) / T_ROWS;
    for (int32_t r = 0; r < at->num_rows; blocks--) {
        const int32_t n = (at->num_rows - r + blocks - 1) / blocks;
        const t_weights p = {.at = job->s + (int64_t)r * at->row_step,
                             .row_step = at->row_step,
                             .key_step = at->key_step,
                             .fold = at->fold,
                             .wrap = (int64_t)at->vecs * V_LANES - (at->fold - 1) * at->key_step};
        float *const c = o + (int64_t)r * job->v_row;
        /* Many rows: the steps as constants, so that the loop is products and little else. */
        const bool wide = at->fold == 1 && at->vecs == 2;
        const t_weights q = {.at = p.at, .row_step = 1, .fold = 1, .wrap = 2 * V_LANES};
#define T_CASE(N)                                                                               \
    case N:                                                                                     \
        if (wide)                                                                               \
            t_values_rows(q, job->v, job->v_row, c, job->v_row, units, job->keep + r, vecs, N); \
        else                                                                                    \
            t_values_rows(p, job->v, job->v_row, c, job->v_row, units, job->keep + r, vecs, N); \
        break
        switch (n) {
            T_CASE(1);
            T_CASE(2);
            T_CASE(3);
            T_CASE(4);
#if T_ROWS > 4
            T_CASE(5);
            T_CASE(6);
#endif
            default: break;
        }
#undef T_CASE
        r += n;
    }
}

/* --- a head --- */

static inline void t_place_value(const kv8_attention_job *job) {
    (void)job;
}

/* A quarter of the rows of V, between the steps of the work that widen nothing. */
static void t_ask_quarter(const kv8_attention_job *job, const t_rows *rows, int32_t quarter) {
    enum { COUNT = KV8_TILE_KEYS / 4 };
    for (int32_t i = 0; i < COUNT; i++)
        kv8_ask_row(rows->ahead[KV8_TILE_KEYS + quarter * COUNT + i], t_ask_bytes(job));
}

/* One tile for the item's head number `head`. `next`: the tile to read ahead, or NULL. */
static void t_tile_of_head(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                           const uint8_t *order, int32_t head, t_queue *queue) {
    const int32_t n = tile->end - tile->begin;
    const int32_t padded = (int32_t)kv8_round_up((size_t)n, T_KEY_STEP);
    t_rows rows;
    t_rows_of(job, tile, next, head, false, &rows);
    rows.queue = queue;
    t_nonfinite nonfinite;
    nonfinite.count = 0;
    if (tile->mixed) t_take_nonfinite(job, &rows, n, &nonfinite);
    t_load_k(job, &rows, padded);
    t_load_v(job, &rows, padded, order, t_lanes_of(job, 0).fold);
    const int32_t num_rows = job->item->num_rows;
    const float *const q = job->q_lanes + (int64_t)head * job->q_row * t_rows_per_head(job);
    float *const o = job->o + (int64_t)head * num_rows * job->v_row;
    for (int32_t row = 0; row < num_rows;) {
        const t_lanes at = t_lanes_of(job, row);
        const bool first = row == 0;
        if (first) t_ask_quarter(job, &rows, 0);
        t_scores(job, &at, q + (int64_t)row * job->q_row, padded);
        if (first) t_ask_quarter(job, &rows, 1);
        t_weigh(job, &at, tile, &rows, head, padded);
        if (first) t_ask_quarter(job, &rows, 2);
        t_values(job, &at, o + (int64_t)row * job->v_row, padded);
        if (first) t_ask_quarter(job, &rows, 3);
        t_add_nonfinite(job, &at, tile, &nonfinite, o + (int64_t)row * job->v_row);
        row += at.num_rows;
    }
}

static inline void t_begin(const kv8_attention_job *job, t_queue *queue) {
    (void)job, (void)queue;
}
static inline void t_end(const kv8_attention_job *job, t_queue *queue) {
    (void)job, (void)queue;
}

#include "walk_tmpl.h"
