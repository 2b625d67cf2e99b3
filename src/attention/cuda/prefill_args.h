/* prefill_args.h - the work list of a prefill launch, which lies in the workspace, and the shared
 * memory of its kernels. What the launch is told: attention_args.h.
 *
 * Read by C and CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_ARGS_H
#define KV8_PREFILL_ARGS_H

#include <stdint.h>

/* Keys of one tile, on every machine: items count their keys in tiles. */
enum { KV8_PREFILL_TILE_KEYS = 128 };

/* The work of one block at a time: up to block_rows packed query rows of one request and KV head
 * (packed row r is query r / group_size, head r % group_size of the group) over the key tiles
 * [tile_begin, tile_end). Splits of one block leave partial results in slots side by side, in key
 * order; the one that ends last combines them, or all of them those of some rows each. */
typedef struct kv8_prefill_item {
    int32_t request, kv_head, row_begin;
    int32_t tile_begin, tile_end;
    int32_t slot;             /* of the rows' first split; -1 = the rows are whole */
    int8_t split, num_splits; /* this one, of so many */
    int8_t has_gaps;          /* keys that no row sees may lie between keys that some do */
    int8_t is_together;       /* all splits run at one time, each in a block of its own */
    /* Of the request, so that a block need not look: */
    int32_t q_begin, qo_len, kv_len;
    int32_t seen_from, seen_to;     /* keys that some row of the block may see */
    int32_t shared_from, shared_to; /* keys that all of them see, by a mask too; may be none */
    int64_t pages_at;               /* of its first page in the table */
} kv8_prefill_item;
/* Items under way in a block on sm_90, in slots; what a block keeps of a packed row. */
enum { KV8_PREFILL_ITEM_BYTES = 64, KV8_PREFILL_ITEM_SLOT_BYTES = 80, KV8_PREFILL_ITEM_SLOTS = 4 };
enum { KV8_PREFILL_ROW_BYTES = 16 };

/* Block b of num_blocks computes items [own[b], own[b + 1]), then what it takes of the others. */
typedef struct kv8_prefill_queue {
    int32_t num_items;
    int32_t next; /* item to be taken; own[num_blocks] at the start */
    int32_t own[];
} kv8_prefill_queue;

/* Rows of an item in which V may not be finite: bits of every warp's sixteen. And the block's next
 * item that has such rows: its place in the queue and one more, 0 at the end. */
enum { KV8_PREFILL_MAX_WARPS = 14 };
typedef struct kv8_prefill_broken {
    uint16_t rows[KV8_PREFILL_MAX_WARPS];
    uint32_t next;
} kv8_prefill_broken;

/* Bytes of shared memory of a kernel on sm_90: Q, the widened tiles of every stage, the codes under
 * way, int8's scales and powers, barriers, items, a record a row. */
#define KV8_PREFILL_WIDENS(dtype) ((dtype) != KV8_BF16 && (dtype) != KV8_F16)
#define KV8_PREFILL_SM90_SHARED(k, v, head_dim, num_math, num_stages, num_ahead)              \
    ((num_math)*128 * (head_dim) + (num_stages)*512 * (head_dim) +                            \
     (KV8_PREFILL_WIDENS(k) + KV8_PREFILL_WIDENS(v)) * ((num_ahead) + 1) * 128 * (head_dim) + \
     ((k) == KV8_INT8 ? (num_stages)*256 : 0) +                                               \
     8 * (4 * (num_stages) + 2 * KV8_PREFILL_ITEM_SLOTS) +                                    \
     KV8_PREFILL_ITEM_SLOTS * KV8_PREFILL_ITEM_SLOT_BYTES +                                   \
     (num_math)*64 * KV8_PREFILL_ROW_BYTES + 16 + ((v) == KV8_INT8 ? (num_stages)*4 : 0))

/* Kernels for short windows, at head_dim 64: an item's keys are one tile of 160, of which a
 * warpgroup of 64 rows multiplies 144, from a multiple of 8 on. */
enum {
    KV8_PREFILL_WINDOW_CONSUMERS = 3,
    KV8_PREFILL_WINDOW_KEYS = 160,
    KV8_PREFILL_WINDOW_SEEN = 144
};
/* Beside O's rows there is room for two stages where codes are widened, else for four. */
#define KV8_PREFILL_WINDOW_STAGES(k, v) (KV8_PREFILL_WIDENS(k) || KV8_PREFILL_WIDENS(v) ? 2 : 4)
#define KV8_PREFILL_WINDOW_SHARED(k, v)                                                           \
    (KV8_PREFILL_WINDOW_CONSUMERS * 64 * (256 + KV8_PREFILL_ROW_BYTES) +                          \
     KV8_PREFILL_WINDOW_STAGES(k, v) *                                                            \
         (KV8_PREFILL_WINDOW_KEYS * (256 + 2 * ((k) == KV8_INT8)) + 8 * ((v) == KV8_INT8) + 32) + \
     (KV8_PREFILL_WIDENS(k) + KV8_PREFILL_WIDENS(v)) * 8 * 2048 +                                 \
     KV8_PREFILL_ITEM_SLOTS * (KV8_PREFILL_ITEM_SLOT_BYTES + 16) + 16)

/* Kernels on mma.sync. Bytes of a row of a tile of head_dim values, and of the tile to come: 16-bit
 * K and V where both are, else as they lie in pages. */
#define KV8_PREFILL_MMA_PITCH(head_dim) \
    ((head_dim) % 64 == 0 ? 2 * (head_dim) : ((head_dim) / 8 | 1) * 16)
#define KV8_PREFILL_MMA_NEXT(head_dim, keys, k_wide, v_wide)                         \
    ((k_wide) && (v_wide) ? 2 * (keys)*KV8_PREFILL_MMA_PITCH(head_dim)               \
                          : (((keys) * (head_dim) * ((k_wide) + 1) + 2047) / 2048 +  \
                             ((keys) * (head_dim) * ((v_wide) + 1) + 2047) / 2048) * \
                                2048)
/* All of a block's shared memory: Q, a tile of K and V, the next, a record a row, a scale a key, an
 * item, a word. */
#define KV8_PREFILL_MMA_SHARED(head_dim, rows, keys, k_wide, v_wide)                       \
    (((rows) + 2 * (keys)) * KV8_PREFILL_MMA_PITCH(head_dim) +                             \
     KV8_PREFILL_MMA_NEXT(head_dim, keys, k_wide, v_wide) + (rows)*KV8_PREFILL_ROW_BYTES + \
     (keys)*2 + KV8_PREFILL_ITEM_BYTES + 16)

/* Of a kernel that multiplies codes: Q, the stages of K and of V (turned, with eight columns for
 * the sums), V's codes of a tile, sums of both levels, barriers, items, two records
 * a row, a word. */
#define KV8_PREFILL_FP8_SHARED(head_dim, num_math, k_stages, v_stages)                    \
    ((num_math)*64 * (head_dim) + (k_stages)*128 * (head_dim) +                           \
     (v_stages)*128 * ((head_dim) + 8) + 128 * (head_dim) + (num_math)*256 * (head_dim) + \
     8 * (2 * ((k_stages) + (v_stages)) + 2 + 2 * KV8_PREFILL_ITEM_SLOTS) +               \
     KV8_PREFILL_ITEM_SLOTS * KV8_PREFILL_ITEM_SLOT_BYTES +                               \
     2 * (num_math)*64 * KV8_PREFILL_ROW_BYTES + 16)

#endif
