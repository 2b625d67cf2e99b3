/* tile.h - the piece of work a kernel gets, and where the bytes of a tile of keys lie.
 *
 * Between run.c (who cuts the work and finishes the rows) and cpu/attention_tmpl.h (who computes).
 * Portable inline code about addresses and visibility; no vectors, no softmax.
 *
 * Query rows are *packed*: row q of a request and head g of a kv head's group is packed row
 * q * group_size + g, so that one widened tile of K and V serves the whole group.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_TILE_H
#define KV8_ATTENTION_TILE_H

#include <stdatomic.h>
#include <string.h>

#include "problem.h"
#include "simd/unroll.h"

/* Keys widened at a time. K and V of 64 keys at head_dim 64 are 32 KiB as f32: with the rows of a
 * decode step they stay in a 48 KiB L1; longer heads stay in L2. Tiles begin at multiples of this
 * (after the first), whatever the rows. */
enum { KV8_TILE_KEYS = 64 };
/* Padding of every scratch row, in floats: the widest vector, and two of them for bf16 V. */
enum { KV8_TILE_PAD = 32 };
/* Most rows whose scores exist at a time: two of the widest vectors. */
enum { KV8_TILE_ROWS = 32 };
/* Most heads of one item, and the lanes that their rows waste at most. */
enum { KV8_ITEM_HEADS = 16, KV8_ITEM_SPARE_LANES = KV8_ITEM_HEADS * 16 };
/* Most rows of O that a kernel keeps twice: of up to two of a head. */
enum { KV8_KEPT_ROWS = 2 * KV8_ITEM_HEADS };

/* One (request, range of kv heads, block of packed rows, range of keys). Rows of several heads
 * stand head by head: row `row` of the item's head `head` is at head * num_rows + row. Or keys that
 * several requests share: then `request` is one of them and the rows are those of the cascade from
 * `shared` on, which see all of the keys. */
typedef struct kv8_attention_item {
    int32_t request, kv_head, num_heads;
    int32_t row_begin, num_rows; /* of each head */
    int32_t key_begin, key_end;
    int32_t shared;  /* -1 = rows of one request */
    int32_t join;    /* where its keys were split: the number of the join, else -1 */
    int64_t partial; /* the offset in floats of its partial result; -1 = it is the whole result */
} kv8_attention_item;

/* A thread's way through the items of a run. At the last tile of an item it takes the next one,
 * whose first tile is then asked for like any other; before that it belongs to whoever comes first.
 */
typedef struct kv8_attention_cursor {
    const kv8_attention_item *items;
    int64_t num_items;
    _Atomic int64_t *num_taken;     /* of all threads */
    const kv8_attention_item *next; /* NULL: not taken yet, or none is left */
    bool taken;
    bool asked; /* the first tile of the item that begins next was asked for */
} kv8_attention_cursor;

/* The thread's next item: the same one at every call until cursor->taken is cleared; NULL when none
 * is left. */
static inline const kv8_attention_item *kv8_attention_take_item(kv8_attention_cursor *cursor) {
    if (cursor->taken) return cursor->next;
    int64_t at = atomic_load_explicit(cursor->num_taken, memory_order_relaxed);
    if (at < cursor->num_items)
        at = atomic_fetch_add_explicit(cursor->num_taken, 1, memory_order_relaxed);
    cursor->next = at < cursor->num_items ? &cursor->items[at] : NULL;
    cursor->taken = true;
    return cursor->next;
}

/* An item with everything a kernel needs. Scratch is 64-byte aligned; "unit" is 4 bytes: one f32
 * or a pair of bf16. A lane array holds one float per lane of the vectors in which the rows of
 * the heads lie. */
typedef struct kv8_attention_job {
    const kv8_attention_spec *spec; /* resolved: no defaults left */
    const kv8_attention_args *args;
    const kv8_attention_item *item;
    kv8_attention_cursor *cursor;
    const int32_t *pages;
    int32_t group_size, kv_len;
    /* Rows by which a head's rows fold: the item's, under batch_invariant those of a query row. */
    int32_t fold_rows;
    /* Under batch_invariant: keys are cut at its multiples, tiles begin at theirs; else 0. */
    int32_t piece_keys;
    kv8_key_range common;       /* keys that every row sees */
    bool has_holes;             /* nobody may see a key between others: a mask, or key ranges */
    int32_t k_size, v_size;     /* bytes per element */
    int64_t k_head, v_head;     /* bytes from one kv head to the next */
    int32_t depth;              /* units of one row of Q and K */
    int32_t q_row;              /* units from one row of q and k to the next */
    int32_t v_row;              /* units from one row of v, floats of one row of o, to the next */
    const float *q;             /* [num_heads * num_rows, q_row] units, zero after depth */
    float *q_lanes;             /* [q_row] lane arrays of units */
    float *lane_scale;          /* a lane array */
    float *lane_max, *lane_sum; /* the same: running maximum (log2) and sum */
    float *k;                   /* [KV8_TILE_KEYS, q_row] units: the K tile */
    float *v;     /* [KV8_TILE_KEYS, v_row] f32 or [KV8_TILE_KEYS/2, v_row] pairs of keys */
    float *s;     /* [KV8_TILE_KEYS * KV8_TILE_ROWS]: scores, then weights */
    float *p;     /* [KV8_TILE_KEYS/2 * KV8_TILE_ROWS]: weights row by row, where a rung wants it */
    float *keep;  /* [KV8_TILE_ROWS]: what the last tile left of the rows' older sums */
    float *value; /* [v_row]: one V row as f32 */
    float *kept;  /* [KV8_KEPT_ROWS, v_row] of O */
    const float *scale;                 /* [num_heads * num_rows]: sm_scale * k_scale * q_scale */
    const int32_t *seen_from, *seen_to; /* [num_rows]: the keys of each row, masks apart */
    float *o, *max, *sum; /* out, not normalised: [num_heads * num_rows, v_row], and one per row */
    float *pieces;        /* [num_heads * num_rows, v_row + 2]: of the pieces before, o, max, sum */
} kv8_attention_job;

/* Takes what o, max and sum have of a piece of the item's keys into `pieces`; and, behind the last,
 * back from there. */
void kv8_attention_add_piece(const kv8_attention_job *job, bool is_first);
void kv8_attention_take_pieces(const kv8_attention_job *job);

typedef void (*kv8_attention_kernel)(const kv8_attention_job *job);

/* Where the rows of a tile's keys lie, for the item's first head. */
typedef struct kv8_tile {
    int32_t begin, end; /* keys */
    bool mixed;         /* some row sees a key of the tile that another does not */
    bool has_holes;     /* no row sees some of its keys */
    /* NULL for a key that no row of the item sees: its bytes are never read. */
    const uint8_t *k[KV8_TILE_KEYS], *v[KV8_TILE_KEYS];
    /* k_scale, v_scale of int8 K and V: where the first head's row scales lie; row_scale: the
     * scales themselves, of K and of V, which the kernel fills in. */
    const kv8_f16 *k_scale[KV8_TILE_KEYS], *v_scale[KV8_TILE_KEYS];
    kv8_f16 row_scale[2][KV8_ITEM_HEADS][KV8_TILE_KEYS];
} kv8_tile;

static inline bool kv8_job_sees(const kv8_attention_job *job, int32_t row, int32_t key) {
    if (key < job->seen_from[row] || key >= job->seen_to[row]) return false;
    if (!job->spec->has_mask) return true;
    const int32_t q_row = (job->item->row_begin + row) / job->group_size;
    return kv8_mask_bit(job->args, job->item->request, job->kv_len, q_row, key);
}

/* Of the keys [begin, end), at most 64, bits of those that a row sees. */
static inline uint64_t kv8_job_seen_keys(const kv8_attention_job *job, int32_t row, int32_t begin,
                                         int32_t end) {
    const int32_t from = job->seen_from[row] > begin ? job->seen_from[row] : begin;
    const int32_t to = job->seen_to[row] < end ? job->seen_to[row] : end;
    if (from >= to) return 0;
    if (!job->spec->has_mask) return kv8_first_bits(to - from) << (from - begin);
    const int32_t q_row = (job->item->row_begin + row) / job->group_size;
    return kv8_mask_word(job->args, job->item->request, job->kv_len, q_row, from, to)
           << (from - begin);
}

static inline const kv8_f16 *kv8_row_scale_at(const kv8_paged *paged, int32_t page, int64_t slot,
                                              int32_t kv_head) {
    return paged->row_scale +
           (page * paged->row_scale_stride_page + slot * paged->row_scale_stride_slot +
            kv_head * paged->row_scale_stride_head);
}

/* rows[i] = first + i * step: a loop for vectors. */
static inline void kv8_tile_rows(const uint8_t *first, int64_t step, int32_t n,
                                 const uint8_t **restrict rows) {
    for (int32_t i = 0; i < n; i++) rows[i] = first + i * step;
}

static inline void kv8_tile_scales(const kv8_paged *paged, const kv8_f16 *first, int32_t n,
                                   const kv8_f16 **restrict scales) {
    const int64_t step = paged->row_scale_stride_slot;
    for (int32_t i = 0; i < n; i++) scales[i] = first + i * step;
}

/* Addresses of the tile's keys [at, at + n): rows of one page, or of no page, from `slot` on. */
static inline void kv8_tile_run(const kv8_attention_job *job, int32_t page, int64_t slot,
                                int32_t at, int32_t n, kv8_tile *tile) {
    const kv8_attention_spec *const spec = job->spec;
    const kv8_paged *const k = job->args->k, *const v = job->args->v;
    const int32_t kv_head = job->item->kv_head;
    const int64_t k_at = page * k->stride_page + slot * k->stride_slot + kv_head * k->stride_head;
    const int64_t v_at = page * v->stride_page + slot * v->stride_slot + kv_head * v->stride_head;
    kv8_tile_rows((const uint8_t *)k->data + k_at * job->k_size, k->stride_slot * job->k_size, n,
                  tile->k + at);
    kv8_tile_rows((const uint8_t *)v->data + v_at * job->v_size, v->stride_slot * job->v_size, n,
                  tile->v + at);
    if (spec->k_dtype == KV8_INT8)
        kv8_tile_scales(k, kv8_row_scale_at(k, page, slot, kv_head), n, tile->k_scale + at);
    if (spec->v_dtype == KV8_INT8)
        kv8_tile_scales(v, kv8_row_scale_at(v, page, slot, kv_head), n, tile->v_scale + at);
}

/* Addresses of keys [begin, end), at most KV8_TILE_KEYS, page by page; of those before the item's
 * none. */
static inline void kv8_tile_addresses(const kv8_attention_job *job, int32_t begin, int32_t end,
                                      kv8_tile *tile) {
    const int32_t page_size = job->spec->page_size;
    const int32_t from = begin > job->item->key_begin ? begin : job->item->key_begin;
    tile->begin = begin;
    tile->end = end;
    tile->has_holes = from > begin;
    for (int32_t i = 0; i < from - begin; i++) tile->k[i] = tile->v[i] = NULL;
    if (page_size == 0) { /* ragged */
        const int64_t first = job->args->pages->kv_indptr[job->item->request];
        kv8_tile_run(job, 0, first + from, from - begin, end - from, tile);
        return;
    }
    int32_t slot = from % page_size;
    for (int32_t key = from; key < end; slot = 0) {
        const int32_t left = page_size - slot, n = left < end - key ? left : end - key;
        kv8_tile_run(job, job->pages[key / page_size], slot, key - begin, n, tile);
        key += n;
    }
}

/* Where the tile that begins at `key` ends, in an item that ends at key_end. */
static inline int32_t kv8_tile_end(int32_t key, int32_t key_end) {
    const int64_t edge = ((int64_t)key / KV8_TILE_KEYS + 1) * KV8_TILE_KEYS;
    return (int32_t)kv8_min_i64(edge, key_end);
}

/* Addresses of keys [begin, end) and who sees them; false when nobody sees any. */
static inline bool kv8_tile_gather(const kv8_attention_job *job, int32_t begin, int32_t end,
                                   kv8_tile *tile) {
    kv8_tile_addresses(job, begin, end, tile);
    tile->mixed = job->common.begin > begin || job->common.end < end;
    if (!job->has_holes || !(tile->mixed || job->spec->has_mask)) return true;
    const uint64_t full = kv8_first_bits(end - begin);
    uint64_t any = 0, all = full;
    /* All heads of a query row see the same: one packed row of each is asked. */
    for (int32_t row = 0; row < job->item->num_rows;) {
        const uint64_t seen = kv8_job_seen_keys(job, row, begin, end);
        any |= seen, all &= seen;
        row += job->group_size - (job->item->row_begin + row) % job->group_size;
    }
    tile->mixed = all != full;
    tile->has_holes = any != full;
    for (int32_t i = 0; tile->has_holes && i < end - begin; i++)
        if ((any >> i & 1) == 0) tile->k[i] = tile->v[i] = NULL;
    return any != 0;
}

/* The next tile of the item with a visible key, from *begin on, which moves behind it. */
static inline bool kv8_tile_next(const kv8_attention_job *job, int32_t *begin, kv8_tile *tile) {
    while (*begin < job->item->key_end) {
        const int32_t from = *begin;
        *begin = kv8_tile_end(from, job->item->key_end);
        if (kv8_tile_gather(job, from, *begin, tile)) return true;
    }
    return false;
}

/* The first tile of the thread's next item, to be asked for beside the last of this one, in equal
 * parts beside each head; NULL where there is none or it has another number of heads. */
static inline const kv8_tile *kv8_tile_of_next_item(const kv8_attention_job *job, kv8_tile *tile) {
    const kv8_attention_item *const item = kv8_attention_take_item(job->cursor);
    if (item == NULL || item->num_heads != job->item->num_heads || job->has_holes) return NULL;
    kv8_attention_job next = *job;
    next.item = item;
    next.pages = kv8_request_pages(job->args->pages, item->request);
    kv8_tile_addresses(&next, item->key_begin, kv8_tile_end(item->key_begin, item->key_end), tile);
    job->cursor->asked = true;
    return tile;
}

/* Asks memory for the lines of a row. */
V_INLINE void kv8_ask_row(const uint8_t *row, int32_t bytes) {
    V_PREFETCH_L2(row);
    for (int32_t byte = 64; byte < bytes; byte += 64) V_PREFETCH_L2(row + byte);
}

/* Every kernel: void name(const kv8_attention_job *job). */
#define X(name, isa, math, codes, spare) void name(const kv8_attention_job *job);
#include "attention_kernels.inc"
#undef X

#endif
