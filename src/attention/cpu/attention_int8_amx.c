/* attention_int8_amx.c - the attention kernel for int8 K and V on AMX's int8 tiles: decode.
 *
 * One tdpbssd multiplies 16 rows of 64 codes with 64 codes of 16 columns into int32, exactly. So
 * K and V enter as they are stored, and nothing is widened: K's rows are the left side of
 * S^T = K Q^T, V's, four keys beside each other, the right side of O = P V. Q and P are cut into
 * limbs of a signed byte each:
 *   Q  three limbs, 23 bits, in units of at most 2^-22 of the sum of the row's magnitudes (a power
 *      of two): elements of bf16 above 2^-14 of that sum are exact, smaller ones rounded to a unit,
 *      and no sum overflows
 *   P  (a weight times V's row scale) two limbs, in units of at most 2^-14 of the largest of its
 *      row and tile (a power of two): rounded by at most 2^-15 of that, where bf16 rounds each
 *      weight by 2^-9 of itself
 * Weights that are powers of two of one another, scales included, are so exact. Sums come back as
 * int32 for each limb, are joined and enter softmax, and O, as f32.
 *
 * Items whose rows need more than half a vector a head, where softmax is the bound and not the
 * loaders, are left to the kernel in bf16 math, and heads with several infinities in a row of Q, or
 * their item, but for rows that these make NaN at once.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "tiles_amx.h"

#include "formats_simd.h"
#include "tile.h"

#define T_PAIRS       1 /* the precision that bf16 math promises */
#define T_NAME        t_item
#define T_TICK(queue) ((void)(queue))

enum {
    T_STEP = 64, /* codes that one product adds up */
    T_Q_LIMBS = 3,
    T_Q_BITS = 23,
    T_INFINITE = 0x18, /* of fpclass */
    /* int32 of one step of Q: of 16 fours of head_dim, at most 8 rows' limbs in two tiles. */
    T_Q_FIRST = 16 * T_SIDE,
    T_Q_STEP = 16 * T_Q_LIMBS * 8
};

/* How a vector of sums is put together from the 48 numbers [fold lane][limb][column]. */
typedef struct t_joining {
    __m512i from[T_Q_LIMBS]; /* where each lane's number stands */
    __mmask16 third[T_Q_LIMBS];
    __m512i by_8, by_16;
} t_joining;

/* The values of a head are formed while the next head's V is laid out, and added then. */
typedef struct t_queue {
    const uint8_t *const *ahead; /* the next tile's rows to ask memory for */
    int32_t ahead_bytes, columns;
    float *o;           /* the rows that the values which wait are to be added to, or NULL */
    int32_t turn;       /* which half of job->v theirs lie in */
    float unit[T_SIDE]; /* of P, by row */
    t_joining joining;
} t_queue;

static void t_item(const kv8_attention_job *job);

/* The keys in the order of P's bytes and V's: packing leaves vectors i, i + 2, i + 1, i + 3 of
 * weights beside each other, four and four, of one fold lane and then of the next. */
static inline void t_order_units(int32_t fold, uint8_t *order) {
    const int32_t per_lane = KV8_TILE_KEYS / fold;
    for (int32_t i = 0; i < KV8_TILE_KEYS; i++) {
        const int32_t vec = i % per_lane, turned = (vec & ~3) | (vec & 1) << 1 | (vec & 2) >> 1;
        order[i] = (uint8_t)(turned * fold + i / per_lane);
    }
}

/* to[head][key] of 64 keys and the 8 heads from `head` on: 8x8 words turned, four at a time. */
V_INLINE void t_turn_scales(const kv8_f16 *const *first, int32_t head,
                            kv8_f16 (*to)[KV8_TILE_KEYS]) {
    for (int32_t key = 0; key < KV8_TILE_KEYS; key += 32) {
        __m512i x[8], y[8];
        V_UNROLL
        for (int i = 0; i < 8; i++) { /* keys 8 q + i in quarter q */
            const kv8_f16 *const *const at = first + key + i;
            x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(at[0] + head)));
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(at[8] + head)), 1);
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(at[16] + head)), 2);
            x[i] = _mm512_inserti32x4(x[i], _mm_loadu_si128((const __m128i *)(at[24] + head)), 3);
        }
        V_UNROLL
        for (int i = 0; i < 8; i += 2) {
            y[i] = _mm512_unpacklo_epi16(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_epi16(x[i], x[i + 1]);
        }
        V_UNROLL
        for (int i = 0; i < 4; i++) { /* x[2 * i ..]: heads 2i, 2i + 1 of keys 0..3, of keys 4..7 */
            const int at = i / 2, low = i % 2;
            const __m512i a = y[at], b = y[at + 2], c = y[at + 4], d = y[at + 6];
            x[2 * i] = low == 0 ? _mm512_unpacklo_epi32(a, b) : _mm512_unpackhi_epi32(a, b);
            x[2 * i + 1] = low == 0 ? _mm512_unpacklo_epi32(c, d) : _mm512_unpackhi_epi32(c, d);
        }
        V_UNROLL
        for (int i = 0; i < 4; i++) {
            _mm512_storeu_si512(to[2 * i] + key, _mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]));
            _mm512_storeu_si512(to[2 * i + 1] + key, _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
        }
    }
}
#define T_TURN_SCALES(first, head, to) t_turn_scales(first, head, to)

#include "rows_tmpl.h"
#include "scores_tmpl.h"
#include "tile_tmpl.h"

/* --- rows in lanes, Q in limbs --- */

static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin) {
    t_lanes at = {.row_begin = row_begin, .num_rows = job->item->num_rows - row_begin, .fold = 1};
    while (job->item->num_rows * at.fold * 2 <= T_SIDE) at.fold = 1 << ++at.shift;
    at.vecs = at.row_step = 1;
    at.sums = at.fold;
    at.key_step = T_SIDE / at.fold;
    return at;
}
/* Rows of a lane group: columns that one limb of Q takes, rows that one limb of P does. */
static inline int32_t t_columns(const t_lanes *at) {
    return at->key_step;
}

/* The sum of the magnitudes of a row of Q; not a number, or infinite, where one of them is. */
static float t_size_of(const kv8_attention_job *job, int64_t row) {
    const uint8_t *const q = (const uint8_t *)(job->q + row * job->q_row);
    v_f32 sum = v_set1(0.0f);
    for (int32_t d = 0; d < job->spec->head_dim; d += V_LANES)
        sum = v_add(sum, _mm512_abs_ps(v_widen_bf16(q + (int64_t)d * 2)));
    return v_reduce_add(sum);
}

/* Infinities in a row of Q. */
static V_NOINLINE int32_t t_infinities_in(const kv8_attention_job *job, int64_t row) {
    const uint8_t *const q = (const uint8_t *)(job->q + row * job->q_row);
    int32_t count = 0;
    for (int32_t d = 0; d < job->spec->head_dim; d += V_LANES)
        count += __builtin_popcount(
            _mm512_fpclass_ps_mask(v_widen_bf16(q + (int64_t)d * 2), T_INFINITE));
    return count;
}

/* 16 elements of one row and limb, four to an int32, at `step` int32 from each other. */
static inline void t_store_limb(int32_t *to, int32_t step, __m512i limb) {
    int32_t fours[4];
    _mm_storeu_si128((__m128i *)fours, _mm512_cvtepi32_epi8(limb));
    for (int i = 0; i < 4; i++) to[i * step] = fours[i];
}

/* 16 elements of a row of Q as integers: units of 2^unit, or, of a row with an infinity, its sign.
 */
V_INLINE __m512i t_integers(v_f32 x, float unit, bool infinite) {
    if (!infinite) return _mm512_cvtps_epi32(v_scale2(x, v_set1(-unit)));
    const __m512i sign =
        _mm512_or_si512(_mm512_srai_epi32(_mm512_castps_si512(x), 31), _mm512_set1_epi32(1));
    return _mm512_maskz_mov_epi32(_mm512_fpclass_ps_mask(x, T_INFINITE), sign);
}

/* Column limb * columns + row of the 16 fours of every 64 elements: in two tiles where they are
 * more than 16. Returns what a row's sums are to be multiplied with: an infinity where Q holds one,
 * whose products decide every score; NaN where it holds a NaN, or several infinities. */
static float t_lay_out_row(const kv8_attention_job *job, int64_t row, int32_t column,
                           int32_t columns, int32_t *to) {
    const uint8_t *const q = (const uint8_t *)(job->q + row * job->q_row);
    /* 1.004: 23 bits as signed bytes, 127 first, end below 2^23; and rounding may add up. */
    const float size = t_size_of(job, row) * 1.004f;
    const int32_t infinities = isinf(size) ? t_infinities_in(job, row) : 0;
    int32_t bits = 0;
    memcpy(&bits, &size, sizeof bits);
    const float unit = (float)((bits >> 23) - 127 + 1 - T_Q_BITS);
    const __m512i half = _mm512_set1_epi32(128);
    const int32_t all = T_Q_LIMBS * columns, step = all < T_SIDE ? all : T_SIDE;
    for (int32_t d = 0; d < job->spec->head_dim; d += V_LANES) {
        __m512i rest = t_integers(v_widen_bf16(q + (int64_t)d * 2), unit, infinities > 0);
        int32_t *const at = to + d / T_STEP * T_Q_STEP;
        const int32_t four = d % T_STEP / 4;
        for (int limb = T_Q_LIMBS - 1; limb >= 0; limb--) { /* the last is the smallest */
            const int32_t here = limb * columns + column;
            if (here < T_SIDE)
                t_store_limb(at + four * step + here, step, rest);
            else
                t_store_limb(at + T_Q_FIRST + four * (all - T_SIDE) + here - T_SIDE, all - T_SIDE,
                             rest);
            rest = _mm512_srai_epi32(_mm512_add_epi32(rest, half), 8);
        }
    }
    if (infinities == 1) return job->scale[row] * INFINITY;
    if (!isfinite(size)) return NAN;
    return _mm512_cvtss_f32(v_scale2(v_set1(job->scale[row]), v_set1(unit)));
}

static void t_lay_out_q(const kv8_attention_job *job) {
    const t_lanes at = t_lanes_of(job, 0);
    const int32_t columns = t_columns(&at), lanes = t_rows_per_head(job);
    for (int32_t head = 0; head < job->item->num_heads; head++) {
        int32_t *const to = (int32_t *)(job->q_lanes + (int64_t)head * lanes * job->q_row);
        for (int32_t row = 0; row < at.num_rows; row++) {
            const float scale =
                t_lay_out_row(job, (int64_t)head * at.num_rows + row, row, columns, to);
            for (int32_t f = 0; f < at.fold; f++)
                job->lane_scale[head * lanes + t_score_at(&at, row, f)] = scale;
        }
    }
}

#include "int8_products_amx.h"

#include "int8_weigh_amx.h"

/* --- a head --- */

static void t_place_value(const kv8_attention_job *job) {
    t_place(job, job->value);
}

static bool t_all_finite(const float *scale) {
    __mmask16 odd = 0;
    for (int32_t i = 0; i < KV8_TILE_KEYS; i += V_LANES)
        odd |= _mm512_fpclass_ps_mask(v_load(scale + i), 0x99); /* NaN, infinities */
    return odd == 0;
}

/* Softmax of the head's scores: P in job->p. */
static void t_weigh(const kv8_attention_job *job, const t_lanes *at, const kv8_tile *tile,
                    const t_rows *rows, int32_t head, float *o) {
    const int64_t lane = (int64_t)head * t_rows_per_head(job);
    const bool masked = tile->mixed || tile->end - tile->begin != KV8_TILE_KEYS;
    const v_f32 scale = v_load(job->lane_scale + lane);
    t_pass pass = {.limbs = t_score_sums(job),
                   .s = job->s,
                   .w = t_weights(job),
                   .count = KV8_TILE_KEYS >> at->shift,
                   .fold = at->fold,
                   .scale = v_mul(scale, v_set1(t_log2e)),
                   .k_scale = rows->k_scale,
                   .v_scale = rows->v_scale,
                   .from = t_spread_from(at->fold),
                   .joining = &rows->queue->joining,
                   .ahead = rows->ahead + T_ASK_BY_WEIGHTS,
                   .ahead_bytes = rows->queue->ahead_bytes};
    if (masked || job->args->logits_soft_cap > 0) {
        for (int32_t i = 0; i < pass.count; i++)
            v_store(job->s + i * V_LANES, t_join(pass.joining, pass.limbs, i, at->fold == 2));
        t_finish_scores(job, at, 0, pass.count, scale, rows->k_scale);
        if (masked) t_mask(job, at, tile, KV8_TILE_KEYS);
        pass.limbs = NULL;
    }
    const v_f32 top = t_weigh_rows(job, &pass, at, lane, o, rows->queue);
    t_settle(job, rows->queue);
    t_pack(job, at, t_rounder(at, top, rows->queue->unit));
}

static void t_tile_of_head(const kv8_attention_job *job, const kv8_tile *tile, const kv8_tile *next,
                           const uint8_t *order, int32_t head, t_queue *queue) {
    t_rows rows;
    t_rows_of(job, tile, next, head, true, &rows);
    rows.queue = queue;
    queue->ahead = rows.ahead;
    t_nonfinite nonfinite;
    nonfinite.count = 0;
    const int32_t n = tile->end - tile->begin;
    if (tile->mixed || !t_all_finite(rows.v_scale)) t_take_nonfinite(job, &rows, n, &nonfinite);
    const t_lanes at = t_lanes_of(job, 0);
    float *const o = job->o + (int64_t)head * at.num_rows * job->v_row;
    const t_sources sources = {
        .q = job->q_lanes + (int64_t)head * job->q_row * T_SIDE,
        .k = rows.k,
        .v = rows.v,
        .order = order,
        .in_pages = n == KV8_TILE_KEYS && !tile->has_holes && job->spec->page_size % T_SIDE == 0};
    t_products(job, &sources, queue);
    t_ask_between(queue, 0, 8);
    t_weigh(job, &at, tile, &rows, head, o);
    t_ask_between(queue, 8, 8);
    t_add_nonfinite(job, &at, tile, &nonfinite, o);
    queue->o = o;
}

#include "walk_tmpl.h"

/* --- rows of Q that limbs do not hold --- */

/* Whether a key's score by a row of Q with infinities is NaN, or +inf that no cap makes finite: it
 * makes the row NaN. */
static bool t_score_spoils(const kv8_attention_job *job, int64_t row, const int8_t *k,
                           uint16_t row_scale) {
    const uint8_t *const q = (const uint8_t *)(job->q + row * job->q_row);
    const __m512i infinity = _mm512_set1_epi16(0x7f80), bits = _mm512_set1_epi16(0x7fff);
    const float scale = job->scale[row];
    if ((row_scale & 0x7fff) == 0 || (row_scale & 0x7fff) > 0x7c00 || scale == 0 || isnan(scale))
        return true;
    bool any[2] = {false, false}; /* a term of +inf, of -inf */
    for (int32_t d = 0; d < job->spec->head_dim; d += 32) {
        const __m512i x = _mm512_loadu_si512(q + (int64_t)d * 2);
        const uint32_t negative = _mm512_movepi16_mask(x);
        uint32_t at = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, bits), infinity);
        for (; at != 0; at &= at - 1) {
            const int i = __builtin_ctz(at);
            if (k[d + i] == 0) return true;
            any[(negative >> i & 1) ^ (k[d + i] < 0)] = true;
            if (any[0] && any[1]) return true;
        }
    }
    return job->args->logits_soft_cap == 0 && any[(scale < 0) ^ row_scale >> 15];
}

/* Whether a key of the item's first tile makes the row NaN. */
static bool t_tile_spoils(const kv8_attention_job *job, const kv8_tile *tile, int64_t row) {
    const int32_t rows = job->item->num_rows;
    const int64_t head = row / rows, at = head * job->args->k->row_scale_stride_head;
    for (int32_t i = 0; i < tile->end - tile->begin; i++) {
        if (tile->k[i] == NULL || !kv8_job_sees(job, (int32_t)(row % rows), tile->begin + i))
            continue;
        if (t_score_spoils(job, row, (const int8_t *)tile->k[i] + head * job->k_head,
                           tile->k_scale[i][at].bits))
            return true;
    }
    return false;
}

/* The heads that the kernel in bf16 math is for, a bit each: with rows whose sum of magnitudes
 * overflows, or of several infinities that are not seen to make them NaN. */
static uint32_t t_heads_left(const kv8_attention_job *job) {
    uint32_t left = 0;
    kv8_tile tile; /* the item's first, once it is asked for */
    bool have_tile = false;
    int32_t begin = job->item->key_begin;
    for (int64_t row = 0; row < t_all_rows(job); row++) {
        if (!isinf(t_size_of(job, row))) continue;
        const int32_t infinities = t_infinities_in(job, row);
        if (infinities == 1) continue;
        if (infinities > 1) {
            if (!have_tile && !kv8_tile_next(job, &begin, &tile)) return 0;
            have_tile = true;
            if (t_tile_spoils(job, &tile, row)) continue;
        }
        left |= 1u << row / job->item->num_rows;
    }
    return left;
}

/* Leaves one head of an item to the kernel in bf16 math, as an item of its own. */
static V_NOINLINE void t_leave_head(const kv8_attention_job *job, int32_t head) {
    kv8_attention_item item = *job->item;
    item.kv_head += head;
    item.num_heads = 1;
    const int64_t row = (int64_t)head * item.num_rows;
    kv8_attention_job one = *job;
    one.item = &item;
    one.q += row * job->q_row;
    one.scale += row;
    one.o += row * job->v_row;
    one.max += row;
    one.sum += row;
    kv8_attention_bf16_any_dany_pany__amx(&one);
}

void kv8_attention_bf16_int8_d64n_pany__amx(const kv8_attention_job *job) {
    uint32_t left = job->item->num_rows <= T_SIDE / 2 ? t_heads_left(job) : ~0u;
    /* More than one head of eight: both kernels would take longer than the other alone. */
    if (__builtin_popcount(left) > job->item->num_heads / 8) {
        kv8_attention_bf16_any_dany_pany__amx(job);
        return;
    }
    t_item(job);
    for (int32_t head = 0; left != 0; head++, left >>= 1)
        if ((left & 1) != 0) t_leave_head(job, head);
}
