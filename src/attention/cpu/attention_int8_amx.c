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
 * loaders, and items with NaN or infinities in Q are left to the kernel in bf16 math.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "tiles_amx.h"

#include "formats_simd.h"
#include "tile.h"

#define T_PAIRS        1 /* the precision that bf16 math promises */
#define T_CODES        1
#define T_OWN_PRODUCTS 1
#define T_OWN_WEIGH    1
#define T_NAME         t_item
#define T_TICK(queue)  ((void)(queue))

enum {
    T_STEP = 64, /* codes that one product adds up */
    T_Q_LIMBS = 3,
    T_Q_BITS = 23,
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
static void t_place(const kv8_attention_job *job, float *row);
#define T_PLACE_VALUE(job) t_place(job, (job)->value)

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

#include "attention_tmpl.h"

/* --- rows in lanes, Q in limbs --- */

static t_lanes t_lanes_of(const kv8_attention_job *job, int32_t row_begin) {
    t_lanes at = {.row_begin = row_begin, .num_rows = job->item->num_rows - row_begin, .fold = 1};
    while (job->item->num_rows * at.fold * 2 <= T_SIDE) at.fold = 1 << ++at.shift;
    at.vecs = at.row_step = 1;
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

/* 16 elements of one row and limb, four to an int32, at `step` int32 from each other. */
static inline void t_store_limb(int32_t *to, int32_t step, __m512i limb) {
    int32_t fours[4];
    _mm_storeu_si128((__m128i *)fours, _mm512_cvtepi32_epi8(limb));
    for (int i = 0; i < 4; i++) to[i * step] = fours[i];
}

/* Column limb * columns + row of the 16 fours of every 64 elements: in two tiles where they are
 * more than 16. Returns what a row's sums are to be multiplied with. */
static float t_lay_out_row(const kv8_attention_job *job, int64_t row, int32_t column,
                           int32_t columns, int32_t *to) {
    const uint8_t *const q = (const uint8_t *)(job->q + row * job->q_row);
    /* 1.004: 23 bits as signed bytes, 127 first, end below 2^23; and rounding may add up. */
    const float size = t_size_of(job, row) * 1.004f;
    int32_t bits = 0;
    memcpy(&bits, &size, sizeof bits);
    const v_f32 unit = v_set1((float)((bits >> 23) - 127 + 1 - T_Q_BITS));
    const __m512i half = _mm512_set1_epi32(128);
    const int32_t all = T_Q_LIMBS * columns, step = all < T_SIDE ? all : T_SIDE;
    for (int32_t d = 0; d < job->spec->head_dim; d += V_LANES) {
        const v_f32 x = v_scale2(v_widen_bf16(q + (int64_t)d * 2), v_sub(v_set1(0.0f), unit));
        __m512i rest = _mm512_cvtps_epi32(x);
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
    return _mm512_cvtss_f32(v_scale2(v_set1(job->scale[row]), unit));
}

static void t_lay_out_q(const kv8_attention_job *job) {
    const t_lanes at = t_lanes_of(job, 0);
    const int32_t columns = t_columns(&at), lanes = t_lanes_per_head(job);
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

/* --- K, V, O --- */

static void t_place(const kv8_attention_job *job, float *row) {
    t_turn_quarters(row, kv8_spec_v_head_dim(job->spec));
}

static void t_value_row(const kv8_attention_job *job, const uint8_t *row, float scale) {
    for (int32_t d = 0; d < kv8_spec_v_head_dim(job->spec); d += V_LANES)
        v_store(job->value + d, v_mul(v_widen_int8(row + d), v_set1(scale)));
}

/* Of the next tile's 128 rows, 32 are asked for beside V's, which come from the second level of
 * cache themselves, 80 beside the weights and the others between them (64,
 * 48 and 16: 5 % slower). */
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
static void t_begin(const kv8_attention_job *job, bool careful, t_queue *queue) {
    (void)careful;
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
    _tile_loadconfig(&config);
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

static bool t_end(const kv8_attention_job *job, t_queue *queue) {
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
    return true;
}

/* --- softmax --- */

/* What the weights of a lane's keys of one tile may add up to before the maximum moves on: as in
 * the kernel in bf16 math. */
static const float t_most = 0x1p40f;

static inline float t_weight(const kv8_attention_job *job, const t_lanes *at, int32_t row,
                             int32_t i) {
    return t_weights(job)[t_score_at(at, row, i)];
}

/* Vector i of the scores. */
V_INLINE v_f32 t_join(const t_joining *j, const int32_t *sums, int32_t i, const bool fold_2) {
    __m512i x[T_Q_LIMBS];
    if (fold_2) { /* two keys' first and second limbs, and both their third */
        const __m512i a = _mm512_loadu_si512(sums + 2 * i * V_LANES);
        const __m512i b = _mm512_loadu_si512(sums + (2 * i + 1) * V_LANES);
        x[0] = _mm512_shuffle_i64x2(a, b, 0x44);
        x[1] = _mm512_shuffle_i64x2(a, b, 0xee);
        x[2] = _mm512_loadu_si512(sums + T_SECOND_SUMS + i * V_LANES);
    } else {
        const int32_t *const at = sums + i * T_Q_LIMBS * V_LANES;
        const __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + V_LANES);
        const __m512i c = _mm512_loadu_si512(at + 2 * V_LANES);
        V_UNROLL
        for (int l = 0; l < T_Q_LIMBS; l++)
            x[l] = _mm512_mask_permutexvar_epi32(_mm512_permutex2var_epi32(a, j->from[l], b),
                                                 j->third[l], j->from[l], c);
    }
    const __m512i high =
        _mm512_add_epi32(_mm512_shuffle_epi8(x[0], j->by_16), _mm512_shuffle_epi8(x[1], j->by_8));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(high, x[2]));
}

/* One head's rows: where their limbs or finished scores are, what these are multiplied with, and
 * int8's row scales; of `fold` of them each lane takes its own. */
typedef struct t_pass {
    const int32_t *limbs; /* NULL: the scores are finished */
    const float *s;
    float *w;
    int32_t count, fold;
    const uint8_t *const *ahead; /* what to ask for meanwhile, or NULL */
    int32_t ahead_bytes;
    v_f32 scale;
    const float *k_scale, *v_scale;
    __m512i from;
    const t_joining *joining;
} t_pass;

V_INLINE v_f32 t_pass_scale(const t_pass *p, const float *per_key, int32_t i, const bool fold_2) {
    if (fold_2)
        return _mm512_mask_broadcastss_ps(v_set1(per_key[2 * i]), 0xff00,
                                          _mm_load_ss(per_key + 2 * i + 1));
    return _mm512_permutexvar_ps(p->from, v_load_n(per_key + i * p->fold, p->fold));
}

V_INLINE v_f32 t_pass_score(const t_pass *p, int32_t i, const bool plain, const bool fold_2) {
    if (!plain) return v_load(p->s + i * V_LANES);
    const v_f32 x = t_join(p->joining, p->limbs, i, fold_2);
    return v_mul(x, v_mul(p->scale, t_pass_scale(p, p->k_scale, i, fold_2)));
}

/* The sums of the lanes' weights w = 2^(scaled scores - shift), which are left times V's row scale,
 * and the largest magnitude of what is left. */
typedef struct t_weighed {
    v_f32 sum, top;
} t_weighed;

V_INLINE t_weighed t_weigh_pass(const t_pass *pass, v_f32 shift, const bool plain,
                                const bool fold_2, const int32_t ask_bytes) {
    const t_pass p = *pass;
    const int32_t asks = p.ahead == NULL ? 0 : fold_2 ? 5 : 5 * p.fold / 2;
    v_f32 sum[2] = {v_set1(0.0f), v_set1(0.0f)}, top[2] = {v_set1(0.0f), v_set1(0.0f)};
    for (int32_t i = 0; i < p.count; i += 2) {
        if (i % 8 == 0) t_keep_awake();
        V_UNROLL
        for (int j = 0; j < 2; j++) {
            /* Not fused with the product: equal scores must differ by exactly 0. */
            const v_f32 x = v_sub(t_pass_score(&p, i + j, plain, fold_2), shift);
            const v_f32 weight = v_exp2(x, T_EXP_DEGREE);
            const v_f32 w = v_mul(weight, t_pass_scale(&p, p.v_scale, i + j, fold_2));
            sum[j] = v_add(sum[j], weight);
            top[j] = v_max(_mm512_abs_ps(w), top[j]);
            v_store(p.w + (i + j) * V_LANES, w);
        }
        for (int32_t j = 0; j < asks; j++) kv8_ask_row(p.ahead[i / 2 * asks + j], ask_bytes);
    }
    return (t_weighed){v_add(sum[0], sum[1]), v_max(top[0], top[1])};
}
static V_NOINLINE t_weighed t_weigh_pass_of(const t_pass *pass, v_f32 shift) {
    const int32_t bytes = pass->ahead_bytes;
    if (pass->limbs == NULL) return t_weigh_pass(pass, shift, false, false, bytes);
    if (pass->fold == 2 && bytes == 64) return t_weigh_pass(pass, shift, true, true, 64);
    if (pass->fold == 2) return t_weigh_pass(pass, shift, true, true, bytes);
    return t_weigh_pass(pass, shift, true, false, bytes);
}

/* While all scores are -inf any finite shift does: their weights are 0. */
static inline v_f32 t_finite(v_f32 max) {
    return v_select_lt(max, v_set1(-FLT_MAX), v_set1(0.0f), max);
}

/* The rows' older sums times keep[]. */
static void t_rescale(const kv8_attention_job *job, const t_lanes *at, float *o) {
    for (int32_t row = 0; row < at->num_rows; row++) {
        float *const sums = o + (int64_t)row * job->v_row;
        for (int32_t d = 0; d < job->v_row; d += V_LANES)
            v_store(sums + d, v_mul(v_set1(job->keep[row]), v_load(sums + d)));
    }
}

/* The maxima and sums of the head's rows, and what is in o, move on. Returns the largest magnitude
 * of each lane's weights. A NaN score leaves the maximum alone and makes the sum NaN, as a score
 * of +inf does. */
static v_f32 t_weigh_rows(const kv8_attention_job *job, t_pass *pass, const t_lanes *at,
                          int64_t lane, float *o, t_queue *queue) {
    float *const lane_max = job->lane_max + lane, *const lane_sum = job->lane_sum + lane;
    const v_f32 old = v_load(lane_max), one = v_set1(1.0f);
    __mmask16 over = _mm512_cmp_ps_mask(old, v_set1(-FLT_MAX), _CMP_LT_OQ);
    t_weighed now = {one, one};
    if (over != 0xffff) { /* some row has a maximum */
        now = t_weigh_pass_of(pass, t_finite(old));
        over |= _mm512_cmp_ps_mask(now.sum, v_set1(t_most), _CMP_GT_OQ);
        if (over == 0) {
            v_store(lane_sum, v_add(v_load(lane_sum), now.sum));
            return now.top;
        }
        pass->ahead = NULL;
    }
    v_f32 top = v_set1(-INFINITY);
    for (int32_t i = 0; i < pass->count; i++)
        top = v_max(t_pass_score(pass, i, pass->limbs != NULL, pass->fold == 2), top);
    top = v_max(t_max_of_row(at, top), old);
    /* Only rows that are over move on: no row's bits may depend on its neighbours. */
    const v_f32 moved = t_max_of_row(at, _mm512_maskz_mov_ps(over, one));
    const v_f32 max = v_select_lt(moved, one, old, top), shift = t_finite(max);
    const v_f32 factor = v_select_lt(moved, one, one, v_exp2(v_sub(old, shift), 5));
    now = t_weigh_pass_of(pass, shift);
    v_store(lane_max, max);
    v_store(lane_sum, v_fma(v_load(lane_sum), factor, now.sum));
    v_store(job->keep, factor);
    t_settle(job, queue); /* the head before may be this one, a tile ago */
    t_rescale(job, at, o);
    return now.top;
}

/* What is added to a weight so that its lowest 16 bits are its number of units, and 128 more. */
static v_f32 t_rounder(const t_lanes *at, v_f32 top, float *unit) {
    const __m512i lowest = _mm512_set1_epi32(15), highest = _mm512_set1_epi32(230);
    /* 1.00396: as two signed bytes, 127 first, 16 bits end at 32639. */
    const v_f32 size = v_mul(t_max_of_row(at, top), v_set1(1.00396f));
    __m512i e = _mm512_srli_epi32(_mm512_castps_si512(size), 23);
    e = _mm512_max_epi32(_mm512_min_epi32(e, highest), lowest);
    const v_f32 one =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(14)), 23));
    v_store(unit, one);
    return v_mul(one, v_set1(12582912.0f + 128.0f)); /* 1.5 * 2^23 */
}

/* Four vectors of weights to one of their high and one of their low bytes, as t_order_units says;
 * rows of limbs of P from them. fold is a constant. */
V_INLINE void t_pack_of(const float *w, v_f32 rounder, float *p, const int fold) {
    const int fours = T_SIDE / fold, columns = T_SIDE / fold;
    const __m512i byte = _mm512_set4_epi32(0x0f0e0d0c, 0x0b0a0908, 0x07060504, 0x03020100);
    const __m512i up_2 = _mm512_sub_epi8(byte, _mm512_set1_epi8(2));
    const __m512i up_1 = _mm512_sub_epi8(byte, _mm512_set1_epi8(1));
    const __m512i down_1 = _mm512_add_epi8(byte, _mm512_set1_epi8(1));
    v_f32 block[T_SIDE];
    V_UNROLL
    for (int i = 0; i < T_SIDE; i++) block[i] = v_set1(0.0f);
    V_UNROLL
    for (int i = 0; i < fours; i++) {
        __m512i x[4];
        V_UNROLL
        for (int j = 0; j < 4; j++)
            x[j] = _mm512_castps_si512(v_add(v_load(w + (4 * i + j) * V_LANES), rounder));
        const __m512i a = _mm512_mask_shuffle_epi8(x[0], 0xcccccccccccccccc, x[1], up_2);
        const __m512i b = _mm512_mask_shuffle_epi8(x[2], 0xcccccccccccccccc, x[3], up_2);
        const __m512i high = _mm512_mask_shuffle_epi8(b, 0x5555555555555555, a, down_1);
        const __m512i low = _mm512_mask_shuffle_epi8(a, 0xaaaaaaaaaaaaaaaa, b, up_1);
        block[i] = _mm512_castsi512_ps(high);
        block[fours + i] = _mm512_castsi512_ps(_mm512_xor_si512(low, _mm512_set1_epi8((char)0x80)));
    }
    v_transpose(block);
    float *const p_low = p + columns * T_SIDE;
    V_UNROLL
    for (int lane = 0; fold == 2 && lane < columns; lane++) {
        const v_f32 x = block[lane], y = block[columns + lane];
        v_store(p + lane * T_SIDE, _mm512_shuffle_f32x4(x, y, 0x44));
        v_store(p_low + lane * T_SIDE, _mm512_shuffle_f32x4(x, y, 0xee));
    }
    V_UNROLL
    for (int lane = 0; fold > 2 && lane < T_SIDE; lane++) {
        const int row = lane % columns, at = lane / columns * fours;
        const __mmask16 some = (__mmask16)((1u << fours) - 1);
        _mm512_mask_storeu_ps(p + row * T_SIDE + at, some, block[lane]);
        _mm512_mask_storeu_ps(p_low + row * T_SIDE + at - fours, (__mmask16)(some << fours),
                              block[lane]);
    }
}
static V_NOINLINE void t_pack(const kv8_attention_job *job, const t_lanes *at, v_f32 rounder) {
    switch (at->fold) {
        case 2: t_pack_of(t_weights(job), rounder, job->p, 2); break;
        case 4: t_pack_of(t_weights(job), rounder, job->p, 4); break;
        case 8: t_pack_of(t_weights(job), rounder, job->p, 8); break;
        default: t_pack_of(t_weights(job), rounder, job->p, 16); break;
    }
}

/* --- a head --- */

static bool t_all_finite(const float *scale) {
    __mmask16 odd = 0;
    for (int32_t i = 0; i < KV8_TILE_KEYS; i += V_LANES)
        odd |= _mm512_fpclass_ps_mask(v_load(scale + i), 0x99); /* NaN, infinities */
    return odd == 0;
}

/* Softmax of the head's scores: P in job->p. */
static void t_weigh(const kv8_attention_job *job, const t_lanes *at, const kv8_tile *tile,
                    const t_rows *rows, int32_t head, float *o) {
    const int64_t lane = (int64_t)head * t_lanes_per_head(job);
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
    t_rows_of(job, tile, next, head, &rows);
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
        .in_pages = n == KV8_TILE_KEYS && !job->has_holes && job->spec->page_size % T_SIDE == 0};
    t_products(job, &sources, queue);
    t_ask_between(queue, 0, 8);
    t_weigh(job, &at, tile, &rows, head, o);
    t_ask_between(queue, 8, 8);
    t_add_nonfinite(job, &at, tile, &nonfinite, o);
    queue->o = o;
}

/* What this kernel computes; see the head of the file. */
static bool t_takes(const kv8_attention_job *job) {
    if (job->item->num_rows > T_SIDE / 2) return false;
    float size = 0;
    for (int64_t row = 0; row < (int64_t)job->item->num_heads * job->item->num_rows; row++)
        size += t_size_of(job, row) * 0.0f; /* 0 for every number */
    return size == 0;
}

void kv8_attention_bf16_int8_d64n_pany__amx(const kv8_attention_job *job) {
    if (t_takes(job))
        t_item(job);
    else
        kv8_attention_bf16_any_dany_pany__amx(job);
}
