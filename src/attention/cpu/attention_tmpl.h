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
 *   T_OWN_PRODUCTS   the file brings its own t_lanes_of, t_q_at, t_order_units, t_tile_of_head
 *                    (and t_begin, t_end around a walk; t_end false: walk again, carefully)
 *   T_OWN_WEIGH      the file brings its own t_weigh and T_WEIGHTS(job), where it leaves weights
 *   T_CODES          with both: int8 codes enter the products as they are. The file brings
 *                    t_lay_out_q, t_value_row and t_weight; nothing is widened
 *   T_TURN_SCALES    optional: see t_row_scales
 *   T_PLACE_VALUE(job)  optional: brings job->value into the order of O's columns
 *   T_TICK(queue)    optional, with its own t_queue: issue some of the work that waits
 *
 * Per tile of 64 keys and head: widen K and V; then for at most two vectors of rows at a time
 * S^T = K Q^T, weigh, O = keep O + P V. Rows lie in lanes and keys follow one another, so neither
 * K nor V is ever transposed and softmax never sums across lanes. Q is laid out once per item: the
 * rows of one unit beside each other. When the rows fill at most half a vector, each lane takes
 * one of `fold` pieces of the row: consecutive units in S^T (its lanes are added at the end of the
 * block), keys afterwards. The tile is widened once for every row of the item, and the scores of
 * one step are all that exist.
 * Not here: which rows and keys (run.c); normalisation, sink and output dtype (finish.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats_simd.h"
#include "simd/unroll.h"
#include "tile.h"

#if !T_PAIRS
#define T_EXP_DEGREE 5
static inline v_f32 t_dot(v_f32 a, v_f32 b, v_f32 sum) {
    return v_fma(a, b, sum);
}
#else
#define T_EXP_DEGREE 3
#endif

/* Lanes that the rows of one head take. */
static inline int32_t t_lanes_per_head(const kv8_attention_job *job) {
    return (int32_t)kv8_round_up((size_t)job->item->num_rows, V_LANES);
}

#ifndef T_OWN_PRODUCTS
#define T_DEPTH_STEP                 V_LANES
#define T_KEY_STEP                   32 /* keys of a tile are padded to a multiple: two vectors at any fold */
#define t_begin(job, careful, queue) ((void)(careful), (void)(queue))
#define t_end(job, queue)            ((void)(queue), true)

/* The first key of each unit of V and P; the second of a pair is `fold` further. */
static inline void t_order_units(int32_t fold, uint8_t *order) {
    for (int32_t u = 0; u < KV8_TILE_KEYS; u++) order[u] = (uint8_t)(u / fold * fold * T_PAIRS + u);
}
#endif

#include "widen_tmpl.h"

#include "weigh_tmpl.h"

/* --- what depends on who multiplies --- */

/* Rows from row_begin on: at most two vectors. */
static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin);
#ifdef T_CODES
/* Q and the scales in lanes. */
static void t_lay_out_q(const kv8_attention_job *job);
/* job->value = one V row as f32, codes times their own scale. */
static void t_value_row(const kv8_attention_job *job, const uint8_t *row, float scale);
/* The weight of key i, as a key that was set aside has it. */
static inline float t_weight(const kv8_attention_job *job, const t_lanes *at, int32_t row,
                             int32_t i);
#else
/* Where unit u of the step's row lies in the step's part of q_lanes. */
static inline int64_t t_q_at(const t_lanes *at, int32_t row, int32_t u);
#endif
/* One tile for the item's head number `head`: o, lane_max and lane_sum move on, or will when what
 * was put into the queue is done. `next`: the tile to read ahead, or NULL. */
static void t_tile_of_head(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                           const uint8_t *order, int32_t head, t_queue *queue);

#ifdef T_OWN_PRODUCTS
static void t_begin(const kv8_attention_job *job, bool careful, t_queue *queue);
static bool t_end(const kv8_attention_job *job, t_queue *queue);
#else

static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin) {
    const int32_t left = job->item->num_rows - row_begin;
    t_lanes at = {.row_begin = row_begin, .num_rows = left, .fold = 1, .vecs = 1};
    if (left > 2 * V_LANES) at.num_rows = 2 * V_LANES;
    if (at.num_rows > V_LANES) at.vecs = 2;
    /* By the item's rows, not by what is left of them: a head has one fold. */
    while (job->item->num_rows * at.fold * 2 <= V_LANES) at.fold = 1 << ++at.shift;
    at.row_step = at.fold;
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

#endif

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
#ifdef T_PLACE_VALUE
        T_PLACE_VALUE(job);
#endif
        for (int32_t row = 0; row < at->num_rows; row++) {
            if (!kv8_job_sees(job, at->row_begin + row, tile->begin + nonfinite->at[k])) continue;
            const float weight = t_weight(job, at, row, nonfinite->at[k]);
            float *const to = o + (int64_t)row * job->v_row;
            for (int32_t d = 0; d < dim; d++) to[d] += weight * job->value[d];
        }
    }
}

/* --- the tile, the item --- */

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

#ifdef T_CODES
enum { T_COPIES_ROWS = 1 };
#else
enum { T_COPIES_ROWS = 0 };
#endif

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

/* The tile's rows of the item's head number `head`; and what to read ahead. */
static void t_rows_of(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                      int32_t head, t_rows *rows) {
    const int32_t n = tile->end - tile->begin, num_heads = job->item->num_heads;
    rows->k_from = tile->k, rows->v_from = tile->v;
    rows->k_at = head * job->k_head, rows->v_at = head * job->v_head;
    if (T_COPIES_ROWS || tile->mixed || n != KV8_TILE_KEYS) {
        t_rows_at(tile->k, n, rows->k_at, job->has_holes, rows->k);
        t_rows_at(tile->v, n, rows->v_at, job->has_holes, rows->v);
        rows->k_from = rows->k, rows->v_from = rows->v;
        rows->k_at = rows->v_at = 0;
    }
    if (next != NULL && !job->has_holes) {
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
static void t_gather_scales(const kv8_attention_job *job, const uint8_t *const *rows,
                            const kv8_f16 *const *first, int32_t n, int64_t stride_head,
                            kv8_f16 (*to)[KV8_TILE_KEYS]) {
    const int32_t num_heads = job->item->num_heads;
#ifdef T_TURN_SCALES
    if (n == KV8_TILE_KEYS && num_heads % 8 == 0 && stride_head == 1 && !job->has_holes) {
        for (int32_t head = 0; head < num_heads; head += 8) T_TURN_SCALES(first, head, to + head);
        return;
    }
#endif
    for (int32_t head = 0; head < num_heads; head++) {
        const int64_t at = head * stride_head;
        if (job->has_holes) {
            for (int32_t i = 0; i < n; i++)
                to[head][i] = rows[i] != NULL ? first[i][at] : (kv8_f16){0};
        } else {
            for (int32_t i = 0; i < n; i++) to[head][i] = first[i][at];
        }
        for (int32_t i = n; i < KV8_TILE_KEYS; i++) to[head][i] = (kv8_f16){0};
    }
}

#ifndef T_OWN_PRODUCTS
static void t_tile_of_head(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                           const uint8_t *order, int32_t head, t_queue *queue) {
    const int32_t n = tile->end - tile->begin;
    const int32_t padded = (int32_t)kv8_round_up((size_t)n, T_KEY_STEP);
    t_rows rows;
    t_rows_of(job, tile, next, head, &rows);
    rows.queue = queue;
    t_nonfinite nonfinite;
    nonfinite.count = 0;
    if (tile->mixed) t_take_nonfinite(job, &rows, n, &nonfinite);
    t_load_k(job, &rows, padded);
    t_load_v(job, &rows, padded, order, t_lanes_of(job, 0).fold);
    const int32_t num_rows = job->item->num_rows;
    const float *const q = job->q_lanes + (int64_t)head * job->q_row * t_lanes_per_head(job);
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
#endif

/* Where nothing has asked for an item's first tile: all of it at once, while Q is laid out. */
static void t_ask_tile(const kv8_attention_job *job, const kv8_tile *tile) {
    if (job->has_holes) return;
    const int32_t bytes = t_ask_bytes(job);
    for (int32_t key = 0; key < tile->end - tile->begin; key++) {
        for (int32_t head = 0; head < job->item->num_heads; head++) {
            kv8_ask_row(tile->k[key] + head * job->k_head, bytes);
            kv8_ask_row(tile->v[key] + head * job->v_head, bytes);
        }
    }
}

#ifndef T_CODES
/* Q and the scales in lanes. */
static void t_lay_out_q(const kv8_attention_job *job) {
    const kv8_attention_item *const item = job->item;
    const int32_t lanes = t_lanes_per_head(job);
    const int32_t depth = (int32_t)kv8_round_up((size_t)job->depth, T_DEPTH_STEP);
    const bool scaled = t_scales_q(job);
    for (int32_t head = 0; head < item->num_heads; head++) {
        for (int32_t begin = 0; begin < item->num_rows;) {
            const t_lanes at = t_lanes_of(job, begin);
            const int64_t lane = (int64_t)head * lanes + begin;
            float *const to = job->q_lanes + lane * job->q_row;
            const int64_t step = t_q_at(&at, 0, at.fold); /* between units of a lane */
            int64_t place[KV8_MAX_HEAD_DIM];
            for (int32_t u = 0; at.num_quartered > 0 && u < depth; u++)
                place[u] = t_q_at(&at, 0, u);
            for (int32_t row = 0; row < at.num_rows; row++) {
                const int64_t from = (int64_t)head * item->num_rows + begin + row;
                const float *const q = job->q + from * job->q_row;
                const float factor = job->scale[from] * t_log2e;
                for (int32_t f = 0; f < at.fold; f++) {
                    float *unit = to + t_q_at(&at, row, f);
                    if (at.num_quartered > 0) {
                        for (int32_t u = f; u < depth; u += at.fold) to[place[u] + row] = q[u];
                    } else {
                        for (int32_t u = f; u < depth; u += at.fold, unit += step)
                            *unit = scaled ? q[u] * factor : q[u];
                    }
                    job->lane_scale[lane + t_score_at(&at, row, f)] = job->scale[from];
                }
            }
            begin += at.num_rows;
        }
    }
}
#endif

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

/* The item's keys from first to last. False: the result is not to be used. */
static bool t_walk(const kv8_attention_job *job, bool careful) {
    kv8_tile tiles[2];
    int32_t key = job->item->key_begin;
    bool more = kv8_tile_next(job, &key, &tiles[0]);
    if (more && !job->cursor->asked) t_ask_tile(job, &tiles[0]);
    job->cursor->asked = false;
    t_prepare(job);
    t_queue queue;
    t_begin(job, careful, &queue);
    uint8_t order[KV8_TILE_KEYS];
    t_order_units(t_lanes_of(job, 0).fold, order);
    for (int now = 0; more; now ^= 1) {
        const bool last = !kv8_tile_next(job, &key, &tiles[now ^ 1]);
        kv8_tile *const tile = &tiles[now], *const other = &tiles[now ^ 1];
        const kv8_tile *const next = last ? kv8_tile_of_next_item(job, other) : other;
        const int32_t n = tile->end - tile->begin;
        if (job->spec->k_dtype == KV8_INT8)
            t_gather_scales(job, tile->k, tile->k_scale, n, job->args->k->row_scale_stride_head,
                            tile->row_scale[0]);
        if (job->spec->v_dtype == KV8_INT8)
            t_gather_scales(job, tile->v, tile->v_scale, n, job->args->v->row_scale_stride_head,
                            tile->row_scale[1]);
        for (int32_t head = 0; head < job->item->num_heads; head++)
            t_tile_of_head(job, tile, next, order, head, &queue);
        more = !last;
    }
    if (!t_end(job, &queue)) return false;
    t_finish(job);
    return true;
}

void T_NAME(const kv8_attention_job *job) {
    if (!t_walk(job, false)) (void)t_walk(job, true);
}
