/* widen_tmpl.h - K and V rows of a tile from codes to units, in the tile's scratch.
 *
 * Part of attention_tmpl.h, which says what the including file defines, and of attention_amx.c.
 * Rows keep their order and nothing is transposed; for bf16 math two V rows become one row of
 * pairs. While a row is widened the lines of one row of the next tile are asked for: requests in a
 * steady stream, no bursts.
 *
 * SPDX-License-Identifier: Apache-2.0 */

#if !T_PAIRS
#define T_PAIRS_OF(D, codes)      v_widen_##D(codes)
#define T_PAIRS_OF_N(D, codes, n) v_widen_##D##_n(codes, n)
#endif

/* What a loader asks for beside row i + j of K, and beside unit u + j of V; i and u are multiples
 * of what a turn takes, j is a constant. */
#ifndef T_AHEAD_BYTES
#define T_AHEAD_BYTES(job, rows) t_ask_bytes(job)
#define T_AHEAD_BY_K(rows)       ((rows)->ahead)
#define T_AHEAD_BY_V(rows)       ((rows)->ahead + KV8_TILE_KEYS / 2)
#define T_ASK_BY_K(l, i, j)      kv8_ask_row((l).ahead[(i) + (j)], (l).ahead_bytes)
#define T_ASK_BY_V(l, u, j)          \
    if (T_PAIRS || (u + j) % 2 == 0) \
    kv8_ask_row((l).ahead[((u) + (j)) * T_ELEMENTS / 2], (l).ahead_bytes)
#endif

/* One tile of one head for a loader: `n` units from what lies `at` bytes behind `rows` (two rows to
 * a unit for V in bf16 math) to out, `row` floats apart. */
typedef struct t_load {
    float *out;
    int64_t row, at;
    const uint8_t *const *rows, *const *ahead;
    const uint8_t *order; /* of V in bf16 math: the first row of a unit, `fold` before the second */
    int32_t n, dim, fold, ahead_bytes; /* half of the rows are asked for */
    t_queue *queue;
} t_load;

/* The usual head dims as constants: the loops over a row disappear. */
#ifdef T_RING
#include "row_prefetch_amx.h"
#else
#define T_LOAD_K_FIXED(D, load, dim) t_load_k_of_##D(load, dim)
#define T_LOAD_V_FIXED(D, load, dim) t_load_v_of_##D(load, dim)
#endif
#define T_BY_DIM(D, name, fixed, any)                 \
    static V_NOINLINE void name(const t_load *load) { \
        switch (load->dim) {                          \
            case 64: fixed(D, load, 64); break;       \
            case 128: fixed(D, load, 128); break;     \
            default: any(load, load->dim); break;     \
        }                                             \
    }

/* For each dtype: V_LANES units of a row from element `at` on, of `dim`; K rows to units; V rows to
 * units; one V row as f32. */
#define T_LOADERS(D, size)                                                                  \
    V_INLINE v_f32 t_units_##D(const uint8_t *row, int32_t at, int32_t dim) {               \
        const int32_t left = dim - at;                                                      \
        if (left <= 0) return v_set1(0.0f);                                                 \
        const uint8_t *const codes = row + (int64_t)at * (size);                            \
        if (left >= T_ELEMENTS * V_LANES) return T_PAIRS_OF(D, codes);                      \
        return T_PAIRS_OF_N(D, codes, left);                                                \
    }                                                                                       \
    V_INLINE void t_load_k_of_##D(const t_load *load, const int32_t dim) {                  \
        const t_load l = *load;                                                             \
        const int32_t depth = (int32_t)kv8_round_up((size_t)dim, T_ELEMENTS * V_LANES);     \
        float *out = l.out;                                                                 \
        for (int32_t i = 0; i < l.n; i += T_TICK_ROWS) {                                    \
            T_TICK(l.queue);                                                                \
            V_UNROLL                                                                        \
            for (int32_t j = 0; j < T_TICK_ROWS; j++, out += l.row) {                       \
                const uint8_t *const row = l.rows[i + j] + l.at;                            \
                int32_t d = 0;                                                              \
                T_LOAD_64(D, row, dim, out, d)                                              \
                for (; d < depth; d += T_ELEMENTS * V_LANES)                                \
                    v_store(out + d / T_ELEMENTS, t_units_##D(row, d, dim));                \
                T_ASK_BY_K(l, i, j);                                                        \
            }                                                                               \
        }                                                                                   \
    }                                                                                       \
    V_INLINE void t_load_v_of_##D(const t_load *load, const int32_t dim) {                  \
        enum { TURN = (T_TICK_ROWS + T_ELEMENTS - 1) / T_ELEMENTS };                        \
        const t_load l = *load;                                                             \
        float *out = l.out;                                                                 \
        for (int32_t u = 0; u < l.n; u += TURN) {                                           \
            T_TICK(l.queue);                                                                \
            V_UNROLL                                                                        \
            for (int32_t j = 0; j < TURN; j++, out += l.row) {                              \
                T_LOAD_V_UNIT(D, u + j)                                                     \
                T_ASK_BY_V(l, u, j);                                                        \
            }                                                                               \
        }                                                                                   \
    }                                                                                       \
    T_BY_DIM(D, t_load_k_##D, T_LOAD_K_FIXED, t_load_k_of_##D)                              \
    T_BY_DIM(D, t_load_v_##D, T_LOAD_V_FIXED, t_load_v_of_##D)                              \
    static void t_value_row_##D(const uint8_t *row, int32_t dim, float *out) {              \
        int32_t d = 0;                                                                      \
        for (; d + V_LANES <= dim; d += V_LANES)                                            \
            v_store(out + d, v_widen_##D(row + (int64_t)d * (size)));                       \
        if (d < dim) v_store(out + d, v_widen_##D##_n(row + (int64_t)d * (size), dim - d)); \
    }

/* 64 codes at a time where the rung can: of a row, and of two V rows as pairs. */
#ifndef T_LOAD_64
#define T_LOAD_64(D, row, dim, out, d)
#define T_LOAD_V_64(D, even, odd, dim, out, d)
#endif
#if T_PAIRS
#define T_LOAD_V_UNIT(D, u)                                                       \
    const uint8_t *const *const first = l.rows + l.order[u];                      \
    const uint8_t *const even = *first + l.at, *const odd = first[l.fold] + l.at; \
    int32_t d = 0;                                                                \
    T_LOAD_V_64(D, even, odd, dim, out, d)                                        \
    for (; d < dim; d += 2 * V_LANES) {                                           \
        const v_f32 a = t_units_##D(even, d, dim), b = t_units_##D(odd, d, dim);  \
        v_store(out + d, t_zip_lo(a, b));                                         \
        v_store(out + d + V_LANES, t_zip_hi(a, b));                               \
    }
#else
#define T_LOAD_V_UNIT(D, u)                      \
    const uint8_t *const row = l.rows[u] + l.at; \
    int32_t d = 0;                               \
    T_LOAD_64(D, row, dim, out, d)               \
    for (; d < dim; d += V_LANES) v_store(out + d, t_units_##D(row, d, dim));
#endif

#if !T_PAIRS /* plan.c sends no f32 and no f16 to bf16 math, which would round them */
T_LOADERS(f32, 4)
T_LOADERS(f16, 2)
#define T_CASES_F32                   \
    case KV8_F32: T_CALL(f32); break; \
    case KV8_F16:                     \
        T_CALL(f16);                  \
        break;
#else
#define T_CASES_F32
#endif
T_LOADERS(bf16, 2)
#define T_FLOAT8_LOADERS(words, rule, name, which, mantissa, bias, max) T_LOADERS(name, 1)
KV8_FLOAT8_FORMATS(T_FLOAT8_LOADERS)
T_LOADERS(int8, 1)
#define T_FLOAT8_CASE(words, rule, name, which, mantissa, bias, max) \
    case which: T_CALL(name); break;
/* T_CALL(D) for the dtype's D. */
#define T_BY_DTYPE(dtype)                     \
    switch (dtype) {                          \
        T_CASES_F32                           \
        case KV8_BF16:                        \
            T_CALL(bf16);                     \
            break;                            \
            KV8_FLOAT8_FORMATS(T_FLOAT8_CASE) \
        case KV8_INT8: T_CALL(int8); break;   \
        default: break;                       \
    }

/* The head's rows of K, of which there are `padded`. */
static void t_load_k(const kv8_attention_job *job, const t_rows *rows, int32_t padded) {
    const t_load load = {.out = job->k,
                         .row = job->q_row,
                         .at = rows->k_at,
                         .rows = rows->k_from,
                         .ahead = T_AHEAD_BY_K(rows),
                         .n = padded,
                         .dim = job->spec->head_dim,
                         .ahead_bytes = T_AHEAD_BYTES(job, rows),
                         .queue = rows->queue};
#define T_CALL(D) t_load_k_##D(&load)
    T_BY_DTYPE(job->spec->k_dtype)
#undef T_CALL
}
/* The head's rows of V. order[u]: the first key of unit u, the second is `fold` further: softmax
 * leaves their weights in the same lane. */
static void t_load_v(const kv8_attention_job *job, const t_rows *rows, int32_t padded,
                     const uint8_t *order, int32_t fold) {
    const t_load load = {.out = job->v,
                         .row = job->v_row,
                         .at = rows->v_at,
                         .rows = rows->v_from,
                         .ahead = T_AHEAD_BY_V(rows),
                         .order = order,
                         .n = padded / T_ELEMENTS,
                         .dim = kv8_spec_v_head_dim(job->spec),
                         .fold = fold,
                         .ahead_bytes = T_AHEAD_BYTES(job, rows),
                         .queue = rows->queue};
#define T_CALL(D) t_load_v_##D(&load)
    T_BY_DTYPE(job->spec->v_dtype)
#undef T_CALL
}
/* job->value = one V row as f32, codes times their own scale. */
static void t_value_row(const kv8_attention_job *job, const uint8_t *row, float scale) {
    const int32_t dim = kv8_spec_v_head_dim(job->spec);
#define T_CALL(D) t_value_row_##D(row, dim, job->value)
    T_BY_DTYPE(job->spec->v_dtype)
#undef T_CALL
    if (job->spec->v_dtype != KV8_INT8) return;
    for (int32_t d = 0; d < dim; d++) job->value[d] *= scale;
}
