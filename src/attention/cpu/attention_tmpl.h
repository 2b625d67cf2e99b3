/* attention_tmpl.h - one item of paged attention, written once for every rung.
 *
 * The including file has chosen a vocabulary (simd/<rung>.h) and defines
 *   T_NAME           the kernel's name, as in attention_kernels.inc
 *   T_ROWS, T_VECS   accumulators of the inner loop: T_ROWS (4 or 6) rows of T_VECS vectors
 *   T_PAIRS          0: f32 math. 1: bf16 math on pairs; then also
 *     T_PAIRS_OF(D, codes), T_PAIRS_OF_N(D, codes, n)   2*V_LANES codes to V_LANES pairs in order
 *     t_dot(a, b, sum)           sum + a.first * b.first + a.second * b.second
 *     t_round(a, b)              2*V_LANES floats rounded to pairs in order
 *     t_zip_lo(a, b), t_zip_hi   pairs (a_i, b_i) of the first and of the second V_LANES elements
 *   T_OWN_PRODUCT    the file brings its own t_product, which T_V_KEYS tells how many keys of the V
 *                    tile it reads: zeros stand from the last key up to a multiple of it
 *
 * Per tile of 64 keys: widen and transpose K, S = Q K^T, mask and weigh, widen V, O = keep O + P V.
 * Both products are the same small matrix product over 4-byte units (one f32, or two bf16), so the
 * tile is widened once for every row of the item, and the scores of one tile are all that exist.
 * Not here: which rows and keys (run.c); normalisation, sink and output dtype (finish.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "formats_simd.h"
#include "simd/unroll.h"
#include "tile.h"

#ifndef T_V_KEYS
#define T_V_KEYS T_ELEMENTS
#endif
#if T_PAIRS
#define T_ELEMENTS 2 /* per unit */
#else
#define T_ELEMENTS                1
#define T_PAIRS_OF(D, codes)      v_widen_##D(codes)
#define T_PAIRS_OF_N(D, codes, n) v_widen_##D##_n(codes, n)
static inline v_f32 t_dot(v_f32 a, v_f32 b, v_f32 sum) {
    return v_fma(a, b, sum);
}
#endif

/* --- widening --- */

/* For each dtype: V_LANES units of a row from element `at` on, `left` elements before its end; the
 * K tile; the V tile; one V row as f32. A NULL row (no such key, or nobody sees it) is zeros. */
#define T_LOADERS(D, size)                                                                   \
    static inline v_f32 t_units_##D(const uint8_t *row, int32_t at, int32_t dim) {           \
        const int32_t left = dim - at;                                                       \
        if (row == NULL || left <= 0) return v_set1(0.0f);                                   \
        const uint8_t *const codes = row + (int64_t)at * (size);                             \
        if (left >= T_ELEMENTS * V_LANES) return T_PAIRS_OF(D, codes);                       \
        return T_PAIRS_OF_N(D, codes, left);                                                 \
    }                                                                                        \
    static void t_load_k_##D(const kv8_attention_job *job, const kv8_tile *tile) {           \
        const int32_t dim = job->spec->head_dim, n = tile->end - tile->begin;                \
        for (int32_t i = 0; i < n; i += V_LANES) {                                           \
            for (int32_t u = 0; u < job->depth; u += V_LANES) {                              \
                v_f32 block[V_LANES];                                                        \
                V_UNROLL                                                                     \
                for (int32_t l = 0; l < V_LANES; l++)                                        \
                    block[l] =                                                               \
                        t_units_##D(i + l < n ? tile->k[i + l] : NULL, u * T_ELEMENTS, dim); \
                v_transpose(block);                                                          \
                V_UNROLL                                                                     \
                for (int32_t l = 0; l < V_LANES; l++)                                        \
                    v_store(job->k + (int64_t)(u + l) * KV8_TILE_KEYS + i, block[l]);        \
            }                                                                                \
        }                                                                                    \
    }                                                                                        \
    static void t_value_row_##D(const uint8_t *row, int32_t dim, float *out) {               \
        int32_t d = 0;                                                                       \
        for (; d + V_LANES <= dim; d += V_LANES)                                             \
            v_store(out + d, v_widen_##D(row + (int64_t)d * (size)));                        \
        if (d < dim) v_store(out + d, v_widen_##D##_n(row + (int64_t)d * (size), dim - d));  \
    }                                                                                        \
    static void t_load_v_##D(const kv8_attention_job *job, const kv8_tile *tile,             \
                             const float *scale) {                                           \
        const int32_t dim = kv8_spec_v_head_dim(job->spec), n = tile->end - tile->begin;     \
        for (int32_t i = 0; i < n || i % T_V_KEYS != 0; i += T_ELEMENTS) {                   \
            float *const out = job->v + (int64_t)(i / T_ELEMENTS) * job->v_row;              \
            T_LOAD_V_ROWS(D)                                                                 \
        }                                                                                    \
    }

#if T_PAIRS
/* Two keys become one row of pairs. int8's row scales go into P: code * scale is no bf16. */
#define T_LOAD_V_ROWS(D)                                          \
    (void)scale;                                                  \
    const uint8_t *const even = i < n ? tile->v[i] : NULL;        \
    const uint8_t *const odd = i + 1 < n ? tile->v[i + 1] : NULL; \
    for (int32_t d = 0; d < dim; d += 2 * V_LANES) {              \
        const v_f32 a = t_units_##D(even, d, dim);                \
        const v_f32 b = t_units_##D(odd, d, dim);                 \
        v_store(out + d, t_zip_lo(a, b));                         \
        v_store(out + d + V_LANES, t_zip_hi(a, b));               \
    }
#else
/* scale: int8's row scales, multiplied in; else NULL. */
#define T_LOAD_V_ROWS(D)                                                  \
    for (int32_t d = 0; d < dim; d += V_LANES) {                          \
        const v_f32 x = t_units_##D(tile->v[i], d, dim);                  \
        v_store(out + d, scale == NULL ? x : v_mul(x, v_set1(scale[i]))); \
    }
#endif

#if !T_PAIRS /* plan.c sends no f32 and no f16 to bf16 math, which would round them */
T_LOADERS(f32, 4)
T_LOADERS(f16, 2)
#define T_CASES_F32(call)           \
    case KV8_F32: call(f32); break; \
    case KV8_F16:                   \
        call(f16);                  \
        break;
#else
#define T_CASES_F32(call)
#endif
T_LOADERS(bf16, 2)
T_LOADERS(e4m3, 1)
T_LOADERS(e4m3fnuz, 1)
T_LOADERS(e5m2, 1)
T_LOADERS(int8, 1)
#define T_BY_DTYPE(dtype, call)                   \
    switch (dtype) {                              \
        T_CASES_F32(call)                         \
        case KV8_BF16: call(bf16); break;         \
        case KV8_E4M3: call(e4m3); break;         \
        case KV8_E4M3FNUZ: call(e4m3fnuz); break; \
        case KV8_E5M2: call(e5m2); break;         \
        case KV8_INT8: call(int8); break;         \
        default: break;                           \
    }

static void t_load_k(const kv8_attention_job *job, const kv8_tile *tile) {
#define T_CALL(D) t_load_k_##D(job, tile)
    T_BY_DTYPE(job->spec->k_dtype, T_CALL)
#undef T_CALL
}
static void t_load_v(const kv8_attention_job *job, const kv8_tile *tile, const float *scale) {
#define T_CALL(D) t_load_v_##D(job, tile, scale)
    T_BY_DTYPE(job->spec->v_dtype, T_CALL)
#undef T_CALL
}
/* job->value = one V row as f32, codes times their own scale. */
static void t_value_row(const kv8_attention_job *job, const uint8_t *row, float scale) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
#define T_CALL(D) t_value_row_##D(row, dim, job->value)
    T_BY_DTYPE(job->spec->v_dtype, T_CALL)
#undef T_CALL
    if (job->spec->v_dtype != KV8_INT8) return;
    for (int32_t d = 0; d < dim; d++) job->value[d] *= scale;
}

/* --- products --- */

#ifndef T_OWN_PRODUCT

/* c[r][..] = keep[r] * c[r][..] + sum_u a[r][u] * b[u][..] over vecs vectors; the old c is left out
 * when keep is NULL. rows and vecs are constants at every call. */
V_INLINE void t_product_block(const float *a, int64_t a_row, const float *b, int64_t b_row,
                              float *c, int64_t c_row, int32_t units, const float *keep,
                              const int rows, const int vecs) {
    v_f32 sum[T_ROWS][T_VECS];
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        V_UNROLL
        for (int v = 0; v < vecs; v++) sum[r][v] = v_set1(0.0f);
    }
    for (int32_t u = 0; u < units; u++) {
        v_f32 right[T_VECS];
        V_UNROLL
        for (int v = 0; v < vecs; v++) right[v] = v_load(b + u * b_row + v * V_LANES);
        V_UNROLL
        for (int r = 0; r < rows; r++) {
            const v_f32 left = v_set1(a[r * a_row + u]);
            V_UNROLL
            for (int v = 0; v < vecs; v++) sum[r][v] = t_dot(left, right[v], sum[r][v]);
        }
    }
    V_UNROLL
    for (int r = 0; r < rows; r++) {
        V_UNROLL
        for (int v = 0; v < vecs; v++) {
            float *const out = c + r * c_row + v * V_LANES;
            v_store(out, keep == NULL ? sum[r][v] : v_fma(v_set1(keep[r]), v_load(out), sum[r][v]));
        }
    }
}

/* `rows` rows, all vectors of c: panels of T_VECS, then single ones. */
V_INLINE void t_product_rows(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c,
                             int64_t c_row, int32_t units, const float *keep, int32_t vecs,
                             const int rows) {
    int32_t v = 0;
    for (; v + T_VECS <= vecs; v += T_VECS)
        t_product_block(a, a_row, b + v * V_LANES, b_row, c + v * V_LANES, c_row, units, keep, rows,
                        T_VECS);
    for (; v < vecs; v++)
        t_product_block(a, a_row, b + v * V_LANES, b_row, c + v * V_LANES, c_row, units, keep, rows,
                        1);
}

/* All rows, in blocks of nearly equal size, at most T_ROWS. A row's bits do not depend on its
 * block: each element is its own chain over the units. */
static void t_product(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c,
                      int64_t c_row, int32_t units, const float *keep, int32_t rows, int32_t vecs) {
    int32_t blocks = (rows + T_ROWS - 1) / T_ROWS;
    for (int32_t r = 0; r < rows; blocks--) {
        const int32_t n = (rows - r + blocks - 1) / blocks;
        const float *const left = a + r * a_row, *const kept = keep == NULL ? NULL : keep + r;
        float *const out = c + r * c_row;
#define T_CASE(N) \
    case N: t_product_rows(left, a_row, b, b_row, out, c_row, units, kept, vecs, N); break
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

/* --- scores and weights --- */

/* tanh: an odd polynomial near 0 (relative error 1e-7 up to 0.625; coefficients fitted by Cephes,
 * Moshier 1989), 1 - 2/(exp(2x)+1) beyond. */
static inline v_f32 t_tanh(v_f32 x) {
    const v_f32 size = v_max(x, v_sub(v_set1(0.0f), x));
    const v_f32 square = v_mul(x, x);
    v_f32 p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, square, v_set1(2.06390887954e-2f));
    p = v_fma(p, square, v_set1(-5.37397155531e-2f));
    p = v_fma(p, square, v_set1(1.33314422036e-1f));
    p = v_fma(p, square, v_set1(-3.33332819422e-1f));
    const v_f32 small = v_fma(v_mul(p, square), x, x);
    const v_f32 e = v_exp(v_add(size, size));
    const v_f32 large = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
    const v_f32 sign = v_select_lt(x, v_set1(0.0f), v_set1(-1.0f), v_set1(1.0f));
    return v_select_lt(size, v_set1(0.625f), small, v_mul(sign, large));
}

/* One row's products become scores: scaled (k_scale: int8 K's row scales, else NULL), capped. */
static inline void t_finish_scores(const kv8_attention_job *job, int32_t row, int32_t padded,
                                   const float *k_scale) {
    float *const s = job->s + (int64_t)row * KV8_TILE_KEYS;
    const v_f32 scale = v_set1(job->scale[row]);
    const float cap = job->spec->logits_soft_cap;
    for (int32_t i = 0; i < padded; i += V_LANES) {
        v_f32 x = v_mul(v_load(s + i), scale);
        if (k_scale != NULL) x = v_mul(x, v_load(k_scale + i));
        if (cap > 0) x = v_mul(v_set1(cap), t_tanh(v_div(x, v_set1(cap))));
        v_store(s + i, x);
    }
}

/* -INFINITY wherever the row sees nothing, up to the padded end. */
static inline void t_mask(const kv8_attention_job *job, const kv8_tile *tile, int32_t row,
                          int32_t padded) {
    float *const s = job->s + (int64_t)row * KV8_TILE_KEYS;
    const int32_t n = tile->end - tile->begin;
    const int64_t from = kv8_min_i64(n, job->seen_from[row] - (int64_t)tile->begin);
    const int64_t to = kv8_min_i64(n, job->seen_to[row] - (int64_t)tile->begin);
    for (int64_t i = 0; i < from; i++) s[i] = -INFINITY;
    for (int64_t i = kv8_max_i64(to, 0); i < padded; i++) s[i] = -INFINITY;
    if (!job->spec->has_mask) return;
    for (int32_t i = 0; i < n; i++) {
        if (!kv8_job_sees(job, row, tile->begin + i)) s[i] = -INFINITY;
    }
}

/* Scores become weights exp(s - max); the running maximum and sum move on, and keep[row] is what
 * the older sums are to be multiplied with. v_scale: int8 V's row scales when they go into P, else
 * NULL. A NaN score leaves the maximum alone and makes the sum NaN, as a score of +inf does. */
static inline void t_weigh(const kv8_attention_job *job, int32_t row, int32_t padded,
                           const float *v_scale) {
    float *const s = job->s + (int64_t)row * KV8_TILE_KEYS;
    v_f32 top = v_set1(-INFINITY);
    for (int32_t i = 0; i < padded; i += V_LANES) top = v_max(v_load(s + i), top);
    const float highest = v_reduce_max(top), old = job->max[row];
    const float max = highest > old ? highest : old;
    /* While all scores are -inf any finite shift does: their weights are 0. */
    const v_f32 shift = v_set1(max == -INFINITY ? 0.0f : max);
    float keep[V_LANES];
    v_store(keep, v_exp(v_sub(v_set1(old), shift)));
    v_f32 sum = v_set1(0.0f);
#if T_PAIRS
    for (int32_t i = 0; i < padded; i += 2 * V_LANES) {
        v_f32 a = v_exp(v_sub(v_load(s + i), shift));
        v_f32 b = v_exp(v_sub(v_load(s + i + V_LANES), shift));
        sum = v_add(sum, v_add(a, b));
        if (v_scale != NULL) {
            a = v_mul(a, v_load(v_scale + i));
            b = v_mul(b, v_load(v_scale + i + V_LANES));
        }
        v_store(s + i / 2, t_round(a, b)); /* never ahead of what is still to be read */
    }
#else
    (void)v_scale;
    for (int32_t i = 0; i < padded; i += V_LANES) {
        const v_f32 p = v_exp(v_sub(v_load(s + i), shift));
        sum = v_add(sum, p);
        v_store(s + i, p);
    }
#endif
    job->max[row] = max;
    job->keep[row] = keep[0];
    job->sum[row] = job->sum[row] * keep[0] + v_reduce_add(sum);
}

/* The weight as it enters P V. */
static inline float t_weight(const kv8_attention_job *job, int32_t row, int32_t i) {
    const float *const p = job->s + (int64_t)row * KV8_TILE_KEYS;
#if T_PAIRS
    uint16_t half;
    memcpy(&half, (const char *)p + 2 * i, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
#else
    return p[i];
#endif
}

/* --- values that are no numbers --- */

/* In P V a masked key has weight 0, and 0 * NaN is NaN: a row would see what it must not. Keys of
 * a mixed tile whose V row holds NaN or infinities are taken out of the tile here (and their row
 * scale out of P) and added afterwards, only to the rows that see them. */
typedef struct t_aside {
    int32_t count;
    int32_t at[KV8_TILE_KEYS];
    const uint8_t *row[KV8_TILE_KEYS];
    float scale[KV8_TILE_KEYS];
} t_aside;

static void t_set_aside(const kv8_attention_job *job, kv8_tile *tile, float *v_scale,
                        t_aside *aside) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    for (int32_t i = 0; i < tile->end - tile->begin; i++) {
        if (tile->v[i] == NULL) continue;
        t_value_row(job, tile->v[i], v_scale[i]);
        float probe = 0; /* x * 0 is 0 for every number, NaN for all else */
        for (int32_t d = 0; d < dim; d++) probe += job->value[d] * 0.0f;
        if (probe == 0) continue;
        const int32_t n = aside->count++;
        aside->at[n] = i;
        aside->row[n] = tile->v[i];
        aside->scale[n] = v_scale[i];
        tile->v[i] = NULL;
        v_scale[i] = 1;
    }
}

static void t_add_aside(const kv8_attention_job *job, const kv8_tile *tile, const t_aside *aside) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
    for (int32_t n = 0; n < aside->count; n++) {
        t_value_row(job, aside->row[n], aside->scale[n]);
        for (int32_t row = 0; row < job->item->num_rows; row++) {
            if (!kv8_job_sees(job, row, tile->begin + aside->at[n])) continue;
            const float weight = t_weight(job, row, aside->at[n]);
            float *const o = job->o + (int64_t)row * job->v_row;
            for (int32_t d = 0; d < dim; d++) o[d] += weight * job->value[d];
        }
    }
}

/* --- the tile, the item --- */

static void t_widen_scales(const uint16_t *bits, float *scale) {
    for (int32_t i = 0; i < KV8_TILE_KEYS; i += V_LANES)
        v_store(scale + i, v_widen_f16((const uint8_t *)(bits + i)));
}

static void t_tile(const kv8_attention_job *job, kv8_tile *tile) {
    const int32_t n = tile->end - tile->begin, rows = job->item->num_rows;
    const int32_t padded = (int32_t)kv8_round_up((size_t)n, T_ELEMENTS * V_LANES);
    const bool k_int8 = job->spec->k_dtype == KV8_INT8, v_int8 = job->spec->v_dtype == KV8_INT8;
    float k_scale[KV8_TILE_KEYS], v_scale[KV8_TILE_KEYS];
    t_widen_scales(tile->k_scale, k_scale);
    t_widen_scales(tile->v_scale, v_scale);

    t_load_k(job, tile);
    t_product(job->q, job->q_row, job->k, KV8_TILE_KEYS, job->s, KV8_TILE_KEYS, job->depth, NULL,
              rows, padded / V_LANES);
    t_aside aside;
    aside.count = 0;
    if (tile->mixed) t_set_aside(job, tile, v_scale, &aside);
    for (int32_t row = 0; row < rows; row++) {
        t_finish_scores(job, row, padded, k_int8 ? k_scale : NULL);
        if (tile->mixed || padded != n) t_mask(job, tile, row, padded);
        t_weigh(job, row, padded, v_int8 ? v_scale : NULL);
    }
    t_load_v(job, tile, v_int8 ? v_scale : NULL);
    const int32_t vecs = (kv8_spec_v_head_dim(job->spec) + V_LANES - 1) / V_LANES;
    t_product(job->s, KV8_TILE_KEYS, job->v, job->v_row, job->o, job->v_row,
              (n + T_ELEMENTS - 1) / T_ELEMENTS, job->keep, rows, vecs);
    t_add_aside(job, tile, &aside);
}

void T_NAME(const kv8_attention_job *job) {
    const kv8_attention_item *const item = job->item;
    for (int32_t row = 0; row < item->num_rows; row++) {
        job->max[row] = -INFINITY;
        job->sum[row] = 0;
    }
    memset(job->o, 0, (size_t)item->num_rows * (size_t)job->v_row * sizeof(float));
    for (int32_t begin = item->key_begin; begin < item->key_end;) {
        const int64_t edge = ((int64_t)begin / KV8_TILE_KEYS + 1) * KV8_TILE_KEYS;
        const int32_t end = (int32_t)kv8_min_i64(edge, item->key_end);
        kv8_tile tile;
        if (kv8_tile_gather(job, begin, end, &tile)) t_tile(job, &tile);
        begin = end;
    }
}
