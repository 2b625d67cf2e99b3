/* widen_tmpl.h - K and V rows of a tile from codes to units, in the tile's scratch.
 *
 * Part of attention_tmpl.h, which says what the including file defines. Rows keep their order and
 * nothing is transposed; for bf16 math two V rows become one row of pairs. While a row is widened
 * the lines of one row of the next tile are asked for, in the order of their addresses: as many
 * requests as the memory needs to stay busy, and no bursts.
 *
 * SPDX-License-Identifier: Apache-2.0 */

#if T_PAIRS
#define T_ELEMENTS 2 /* per unit */
#else
#define T_ELEMENTS                1
#define T_PAIRS_OF(D, codes)      v_widen_##D(codes)
#define T_PAIRS_OF_N(D, codes, n) v_widen_##D##_n(codes, n)
#endif

/* Rows of one head: addresses as in kv8_tile, scales of int8 rows (else 1). */
typedef struct t_rows {
    const uint8_t *k[KV8_TILE_KEYS], *v[KV8_TILE_KEYS];
    float k_scale[KV8_TILE_KEYS], v_scale[KV8_TILE_KEYS];
} t_rows;

/* Which row of the next tile to ask for: `key` of head `head`, in the order of addresses. */
typedef struct t_ahead {
    const uint8_t *const *row; /* [num_keys] of the item's first head; NULL = no next tile */
    int32_t num_keys, num_heads, key, head;
    bool heads_inside; /* a token's heads are neighbours (NHD), else a head's tokens (HND) */
    int64_t head_bytes;
    int32_t row_bytes;
} t_ahead;

static t_ahead t_ahead_of(const kv8_attention_job *job, const kv8_tile *next, bool is_v,
                          int32_t head) {
    t_ahead a = {.row = NULL};
    if (next == NULL) return a;
    const kv8_paged *const paged = is_v ? &job->args->v : &job->args->k;
    a.row = is_v ? next->v : next->k;
    a.num_keys = next->end - next->begin;
    a.num_heads = job->item->num_heads;
    a.heads_inside = paged->stride_head < paged->stride_slot;
    a.key = a.heads_inside ? head * KV8_TILE_KEYS / a.num_heads : 0;
    a.head = a.heads_inside ? head * KV8_TILE_KEYS % a.num_heads : head;
    a.head_bytes = is_v ? job->v_head : job->k_head;
    a.row_bytes =
        is_v ? kv8_spec_v_head_dim(job->spec) * job->v_size : job->spec->head_dim * job->k_size;
    return a;
}
static inline void t_ask_ahead(t_ahead *a) {
    if (a->row == NULL || a->key >= a->num_keys) return;
    const uint8_t *const row = a->row[a->key];
    if (row != NULL) {
        for (int32_t byte = 0; byte < a->row_bytes; byte += 64)
            V_PREFETCH_L2(row + a->head * a->head_bytes + byte);
    }
    if (!a->heads_inside || ++a->head == a->num_heads) {
        a->key++;
        if (a->heads_inside) a->head = 0;
    }
}

/* For each dtype: V_LANES units of a row from element `at` on, of `dim` (NULL and what lies behind
 * the row is zeros); a whole row; the K tile; the V tile; one V row as f32. */
#define T_LOADERS(D, size)                                                                  \
    V_INLINE v_f32 t_units_##D(const uint8_t *row, int32_t at, int32_t dim) {               \
        const int32_t left = dim - at;                                                      \
        if (left <= 0) return v_set1(0.0f);                                                 \
        const uint8_t *const codes = row + (int64_t)at * (size);                            \
        if (left >= T_ELEMENTS * V_LANES) return T_PAIRS_OF(D, codes);                      \
        return T_PAIRS_OF_N(D, codes, left);                                                \
    }                                                                                       \
    static void t_load_k_##D(const kv8_attention_job *job, const t_rows *rows, int32_t n,   \
                             int32_t padded, t_ahead ahead) {                               \
        const int32_t dim = job->spec->head_dim;                                            \
        const int32_t depth = (int32_t)kv8_round_up((size_t)job->depth, T_DEPTH_STEP);      \
        for (int32_t i = 0; i < padded; i++) {                                              \
            float *const out = job->k + (int64_t)i * job->q_row;                            \
            const uint8_t *const row = i < n ? rows->k[i] : NULL;                           \
            int32_t u = 0;                                                                  \
            if (row != NULL) {                                                              \
                T_LOAD_64(D, row, dim, out, u)                                              \
                for (; u < depth; u += V_LANES)                                             \
                    v_store(out + u, t_units_##D(row, u * T_ELEMENTS, dim));                \
            }                                                                               \
            for (; u < depth; u += V_LANES) v_store(out + u, v_set1(0.0f));                 \
            t_ask_ahead(&ahead);                                                            \
        }                                                                                   \
    }                                                                                       \
    static void t_value_row_##D(const uint8_t *row, int32_t dim, float *out) {              \
        int32_t d = 0;                                                                      \
        for (; d + V_LANES <= dim; d += V_LANES)                                            \
            v_store(out + d, v_widen_##D(row + (int64_t)d * (size)));                       \
        if (d < dim) v_store(out + d, v_widen_##D##_n(row + (int64_t)d * (size), dim - d)); \
    }                                                                                       \
    static void t_load_v_##D(const kv8_attention_job *job, const t_rows *rows, int32_t n,   \
                             int32_t padded, int32_t fold, t_ahead ahead) {                 \
        const int32_t dim = kv8_spec_v_head_dim(job->spec);                                 \
        for (int32_t u = 0; u < padded / T_ELEMENTS; u++) {                                 \
            float *const out = job->v + (int64_t)u * job->v_row;                            \
            T_LOAD_V_UNIT(D)                                                                \
        }                                                                                   \
    }

#if T_PAIRS
/* 64 codes at a time where the rung can, both of K and of two V rows. */
#ifndef T_LOAD_64
#define T_LOAD_64(D, row, dim, out, u)
#define T_LOAD_V_64(D, even, odd, dim, out, d)
#endif
/* Keys `fold` apart become one row of pairs: softmax leaves their weights in the same lane. */
#define T_LOAD_V_UNIT(D)                                                         \
    const int32_t first = t_unit_key(u, fold), second = first + fold;            \
    const uint8_t *const even = first < n ? rows->v[first] : NULL;               \
    const uint8_t *const odd = second < n ? rows->v[second] : NULL;              \
    int32_t d = 0;                                                               \
    T_LOAD_V_64(D, even, odd, dim, out, d)                                       \
    for (; d < dim; d += 2 * V_LANES) {                                          \
        const v_f32 a = even == NULL ? v_set1(0.0f) : t_units_##D(even, d, dim); \
        const v_f32 b = odd == NULL ? v_set1(0.0f) : t_units_##D(odd, d, dim);   \
        v_store(out + d, t_zip_lo(a, b));                                        \
        v_store(out + d + V_LANES, t_zip_hi(a, b));                              \
    }                                                                            \
    t_ask_ahead(&ahead);                                                         \
    t_ask_ahead(&ahead);
#else
#define T_LOAD_64(D, row, dim, out, u)
#define T_LOAD_V_UNIT(D)                                                         \
    (void)fold;                                                                  \
    const uint8_t *const row = u < n ? rows->v[u] : NULL;                        \
    for (int32_t d = 0; d < dim; d += V_LANES)                                   \
        v_store(out + d, row == NULL ? v_set1(0.0f) : t_units_##D(row, d, dim)); \
    t_ask_ahead(&ahead);
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

/* The head's rows of K: n of them, zeros up to `padded`. */
static void t_load_k(const kv8_attention_job *job, const t_rows *rows, int32_t n, int32_t padded,
                     t_ahead ahead) {
#define T_CALL(D) t_load_k_##D(job, rows, n, padded, ahead)
    T_BY_DTYPE(job->spec->k_dtype, T_CALL)
#undef T_CALL
}
/* The same of V, in units. */
static void t_load_v(const kv8_attention_job *job, const t_rows *rows, int32_t n, int32_t padded,
                     int32_t fold, t_ahead ahead) {
#define T_CALL(D) t_load_v_##D(job, rows, n, padded, fold, ahead)
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
