/* rows_tmpl.h - the rows of one head of a tile: where they lie, and which rows of the next tile are
 * asked for meanwhile.
 *
 * Part of attention_tmpl.h and of the AMX kernels.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "formats_simd.h"
#include "simd/unroll.h"
#include "tile.h"

#if T_PAIRS
#define T_ELEMENTS   2 /* per unit */
#define T_EXP_DEGREE 3
#else
#define T_ELEMENTS   1
#define T_EXP_DEGREE 5
#endif

/* Rows that those of one head take in laid-out Q. */
static inline int32_t t_rows_per_head(const kv8_attention_job *job) {
    return (int32_t)kv8_round_up((size_t)job->item->num_rows, V_LANES);
}

#ifndef T_TICK
#define T_TICK(queue) ((void)0)
#define T_TICK_ROWS   1 /* a loader's rows to a tick, in one turn of its loop */
typedef struct t_queue {
    char none;
} t_queue;
#endif

/* The row of a key that does not exist, or that nobody sees: loaders ask nothing of a row. */
static const _Alignas(64) uint8_t t_zeros[KV8_MAX_HEAD_DIM * 4];

/* Rows of one head. Loaders read k_from[i] + k_at and v_from[i] + v_at: the first head's rows in
 * the tile itself or, where keys lack or not all rows see them, k and v. */
typedef struct t_rows {
    const uint8_t *k[KV8_TILE_KEYS], *v[KV8_TILE_KEYS];
    const uint8_t *const *k_from, *const *v_from;
    int64_t k_at, v_at;
    float k_scale[KV8_TILE_KEYS], v_scale[KV8_TILE_KEYS]; /* of int8 rows; else not set */
    /* What to ask memory for meanwhile, in this order: a row of the next tile for each row of this
     * one; where there is none, scratch, which costs nothing. */
    const uint8_t *ahead[2 * KV8_TILE_KEYS];
    t_queue *queue; /* see T_TICK */
} t_rows;

/* The processor fetches ahead by itself where lines of 4 KB are asked for one after another, but it
 * needs some ten requests to begin and never runs far ahead: in one sequence requests overtake it.
 * So they go round eight groups of eight keys, a row of each, K's and then V's: sixteen sequences,
 * each at a sixteenth of the pace. */
enum { T_GROUP = 8, T_ROUND = 2 * T_GROUP };

/* In the order of asking, row i of 64 of K; V's are T_GROUP behind. */
static inline int32_t t_ahead_at(int32_t i) {
    return i / T_GROUP * T_ROUND + i % T_GROUP;
}

/* T_GROUP rows of each group: `heads` heads, from `head` on, of its keys from `key` on. `heads` is
 * a constant. */
V_INLINE void t_ask_groups(const uint8_t *const *rows, int32_t key, int32_t head, const int heads,
                           int64_t head_bytes, const uint8_t **restrict ahead) {
    V_UNROLL
    for (int i = 0; i < T_GROUP / heads; i++, ahead += heads * T_ROUND) {
        const uint8_t *first[T_GROUP];
        V_UNROLL
        for (int g = 0; g < T_GROUP; g++)
            first[g] = rows[g * T_GROUP + key + i] + head * head_bytes;
        V_UNROLL
        for (int h = 0; h < heads; h++) {
            for (int g = 0; g < T_GROUP; g++) ahead[h * T_ROUND + g] = first[g] + h * head_bytes;
        }
    }
}

/* The `part`th of num_heads equal parts of a tile's rows of all heads: token by token where a
 * token's heads are neighbours (NHD), else head by head. */
static void t_ask_rows(const uint8_t *const *rows, int32_t n, int32_t num_heads, int32_t part,
                       int64_t head_bytes, bool heads_inside, const uint8_t **restrict ahead) {
    const bool whole = n == KV8_TILE_KEYS;
    if (whole && (num_heads == 1 || !heads_inside)) {
        t_ask_groups(rows, 0, part, 1, head_bytes, ahead);
    } else if (whole && num_heads == 2) {
        t_ask_groups(rows, part * T_GROUP / 2, 0, 2, head_bytes, ahead);
    } else if (whole && num_heads == 4) {
        t_ask_groups(rows, part * T_GROUP / 4, 0, 4, head_bytes, ahead);
    } else if (whole && num_heads % T_GROUP == 0) {
        const int32_t parts = num_heads / T_GROUP; /* of a token */
        t_ask_groups(rows, part / parts, part % parts * T_GROUP, T_GROUP, head_bytes, ahead);
    } else {
        const int32_t width = heads_inside ? num_heads : 1, first = heads_inside ? 0 : part;
        int32_t key = heads_inside ? part * n / width : 0;
        int32_t head = heads_inside ? part * n % width : 0;
        for (int32_t i = 0; i < n; key++, head = 0) {
            for (; head < width && i < n; head++, i++)
                ahead[t_ahead_at(i)] = rows[key] + (first + head) * head_bytes;
        }
    }
}

/* The longer of K's and V's rows: how much is asked for at an address of either. */
static inline int32_t t_ask_bytes(const kv8_attention_job *job) {
    const int32_t k_bytes = job->spec->head_dim * job->k_size;
    const int32_t v_bytes = kv8_spec_v_head_dim(job->spec) * job->v_size;
    return k_bytes > v_bytes ? k_bytes : v_bytes;
}
