/* tile_queue_amx.h - tile products that wait to be issued between other work.
 *
 * A tile product takes 16 cycles, its operands and its sums as long again on their way, and the
 * core looks only some hundred instructions ahead: done at one place, products and the vector work
 * before and after them simply add up. So they are put in a queue, and the loaders and softmax
 * issue a few of them every eight rows: while one head's keys are widened, the last one's weights
 * multiply its values.
 *
 * Tiles: 0 and 1 sums of S^T, 2 keys, 3 Q; 4 and 5 sums of O, 6 weights, 7 values.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TILE_QUEUE_AMX_H
#define KV8_TILE_QUEUE_AMX_H

#define T_QUARTERS 1 /* see t_q_at, t_place */
#define T_RING     8 /* vectors: see row_prefetch_amx.h */
#include "pairs_avx512.h"
#include "tiles_amx.h"

enum { T_UNITS = KV8_TILE_KEYS / 2 }; /* of P */
/* A loader and a vector of softmax issue this often. */
enum { T_TICKS = 8 };

/* Q has `columns` rows in lanes, P and O `rows`. What the tiles held is lost. */
static void t_configure(int32_t columns, int32_t rows) {
    t_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const bool narrow = tile == 0 || tile == 1 || tile == 3;
        config.row_bytes[tile] = (uint16_t)((narrow ? columns : T_SIDE) * (int32_t)sizeof(float));
        config.rows[tile] = (uint8_t)(tile >= 4 && tile <= 6 ? rows : T_SIDE);
    }
    t_load_config(&config);
}

/* Sums begin at 0 (scores) or at what memory holds (values) and are stored by an operation of
 * their own, so that nothing waits for the product. */
typedef enum t_code {
    T_SCORES_BEGIN,
    T_SCORES,
    T_SCORES_STORE,
    T_VALUES_BEGIN,
    T_VALUES,
    T_VALUES_STORE,
    T_CONFIGURE, /* 16 columns, `size` rows */
} t_code;

/* Two products with one operand in common: of 32 keys and 16 columns of Q, of rows of P and 32
 * columns of V. */
typedef struct t_op {
    t_code code;
    int32_t size; /* bytes from one row of Q, and of the scores, to the next; or rows */
    const float *left, *right;
    float *sums;
} t_op;

/* Scores of one step of 16 rows, values of another; head dims up to 576. */
enum {
    T_MOST_TILES = KV8_MAX_HEAD_DIM / 2 / T_SIDE,
    T_MOST_OPS = 2 * (T_MOST_TILES + 1) + 3 * T_MOST_TILES + 2
};

typedef struct t_queue {
    size_t k_row, p_row, v_row; /* bytes */
    int32_t next, count, per_tick;
    /* decode_rows_amx.h's way: O's sums of older tiles, and of this one too, take turns. */
    bool doubled, spoiled; /* V has elements that are no numbers */
    int32_t turn, unseen;  /* unseen: the head whose sums are to be looked at, or -1 */
    float *sums[2];
    const uint8_t *const *ahead; /* the next of the next tile's rows to ask memory for */
    int32_t ahead_bytes;
    t_op ops[T_MOST_OPS];
} t_queue;

V_INLINE void t_issue(const t_queue *queue, const t_op *op) {
    const size_t k_row = queue->k_row, v_row = queue->v_row, q_row = (size_t)op->size;
    const char *const left = (const char *)op->left, *const right = (const char *)op->right;
    char *const sums = (char *)op->sums;
    switch (op->code) {
        case T_SCORES_BEGIN:
            _tile_zero(0);
            _tile_zero(1);
            /* fall through */
        case T_SCORES:
            _tile_loadd(3, right, q_row);
            _tile_loadd(2, left, k_row);
            _tile_dpbf16ps(0, 2, 3);
            _tile_loadd(2, left + T_SIDE * k_row, k_row);
            _tile_dpbf16ps(1, 2, 3);
            break;
        case T_SCORES_STORE:
            _tile_stored(0, sums, q_row);
            _tile_stored(1, sums + T_SIDE * q_row, q_row);
            break;
        case T_VALUES_BEGIN:
            _tile_loadd(4, sums, v_row);
            _tile_loadd(5, sums + 64, v_row);
            /* fall through */
        case T_VALUES:
            _tile_loadd(6, left, queue->p_row);
            _tile_loadd(7, right, v_row);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, right + 64, v_row);
            _tile_dpbf16ps(5, 6, 7);
            break;
        case T_VALUES_STORE:
            _tile_stored(4, sums, v_row);
            _tile_stored(5, sums + 64, v_row);
            break;
        case T_CONFIGURE: t_configure(T_SIDE, op->size); break;
    }
}

/* t_tick issues what is due. Tile loads are no memory accesses to the compiler: hence the barrier.
 */
V_INLINE void t_tick(t_queue *queue) {
    int32_t due = queue->count - queue->next;
    if (due > queue->per_tick) due = queue->per_tick;
    for (; due > 0; due--) {
        __asm__ volatile("" ::: "memory");
        t_issue(queue, &queue->ops[queue->next++]);
    }
}
#define T_TICK(queue) t_tick(queue)
#define T_TICK_ROWS   (KV8_TILE_KEYS / T_TICKS)
/* t_keep_awake: a tile unit left alone for about a thousand cycles sleeps and takes as long to
 * wake. Where nothing waits, a product whose sums are never read keeps it awake. */
V_INLINE void t_keep_awake(const t_queue *queue) {
    if (queue->next == queue->count) _tile_dpbf16ps(4, 6, 7);
}

/* The next n rows to ask for. All the work on a head does so, in a steady stream: long bursts fill
 * the core's sixteen line buffers, which the loaders need too. */
static inline const uint8_t *const *t_take_ahead(t_queue *queue, int32_t n) {
    const uint8_t *const *const rows = queue->ahead;
    queue->ahead += n;
    return rows;
}
static inline void t_ask_more(t_queue *queue, int32_t n) {
    const uint8_t *const *const rows = t_take_ahead(queue, n);
    for (int32_t i = 0; i < n; i++) kv8_ask_row(rows[i], queue->ahead_bytes);
}
/* How the next tile's 128 rows, 64 of K and 64 of V in turn, are asked for: 32 beside K's, 48
 * beside V's, the rest in four bursts between them: of 12, or in decode with up to 8 rows, the
 * usual one, of 8 and 16 beside softmax's sixteen pairs of vectors. */
enum { T_ASKING_FOLD = 2, T_ASKS = 1, T_BURST = 12, T_BURST_ASKING = 8 };
#define T_AHEAD_BYTES(job, rows) ((rows)->queue->ahead_bytes)
#define T_AHEAD_BY_K(r)          t_take_ahead((r)->queue, KV8_TILE_KEYS / 2)
#define T_AHEAD_BY_V(r)          t_take_ahead((r)->queue, KV8_TILE_KEYS * 3 / 4)
#define T_ASK_BY_K(l, i, j) \
    if ((j) % 2 != 0) kv8_ask_row((l).ahead[((i) + (j)) / 2], (l).ahead_bytes)
#define T_ASK_BY_V(l, u, j)                                                  \
    do {                                                                     \
        const uint8_t *const *const rows = (l).ahead + (u)*3 / 2;            \
        kv8_ask_row(rows[(j)*3 / 2], (l).ahead_bytes);                       \
        if ((j) % 2 != 0) kv8_ask_row(rows[(j)*3 / 2 + 1], (l).ahead_bytes); \
    } while (0)

/* Issues all that is left, and empties the queue. */
static void t_drain(t_queue *queue) {
    queue->per_tick = queue->count;
    t_tick(queue);
    queue->next = queue->count = 0;
}

static inline void t_push(t_queue *queue, t_op op) {
    queue->ops[queue->count++] = op;
}
/* What has been pushed goes out in `ticks` ticks. */
static inline void t_spread_over(t_queue *queue, int32_t ticks) {
    queue->per_tick = (queue->count + ticks - 1) / ticks;
}

#endif
