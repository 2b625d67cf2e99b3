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

#include <string.h>

#include "problem.h"

/* Keys widened at a time. K and V of 64 keys at head_dim 64 are 32 KiB as f32: with the rows of a
 * decode step they stay in a 48 KiB L1; longer heads stay in L2. Tiles begin at multiples of this
 * (after the first), whatever the rows. */
enum { KV8_TILE_KEYS = 64 };
/* Padding of every scratch row, in floats: the widest vector, and two of them for bf16 V. */
enum { KV8_TILE_PAD = 32 };

/* What the two products multiply. */
typedef enum kv8_attention_math {
    KV8_MATH_F32 = 0, /* f32 x f32, fused multiply-add */
    KV8_MATH_BF16     /* pairs of bf16, products summed in f32; P is rounded to bf16 */
} kv8_attention_math;

/* One (request, kv head, block of packed rows, range of keys). */
typedef struct kv8_attention_item {
    int32_t request, kv_head;
    int32_t row_begin, num_rows;
    int32_t key_begin, key_end;
    int64_t
        partial; /* offset in floats of its partial result, -1 = the rows are finished at once */
} kv8_attention_item;

/* An item with everything a kernel needs. Scratch is 64-byte aligned; "unit" is 4 bytes: one f32
 * or a pair of bf16. */
typedef struct kv8_attention_job {
    const kv8_attention_spec *spec; /* resolved: no defaults left */
    const kv8_attention_args *args;
    const kv8_attention_item *item;
    const int32_t *pages;
    int32_t group_size, qo_len, kv_len;
    int32_t k_size, v_size; /* bytes per element */
    int32_t depth;          /* units of one row of Q and K */
    int32_t q_row;          /* units from one row of q to the next */
    int32_t v_row;          /* units from one row of v, floats of one row of o, to the next */
    const float *q;         /* [num_rows, q_row] units, zero after depth */
    float *k;               /* [q_row, KV8_TILE_KEYS] units: the K tile, transposed */
    float *v;     /* [KV8_TILE_KEYS, v_row] f32 or [KV8_TILE_KEYS/2, v_row] pairs of keys */
    float *s;     /* [num_rows, KV8_TILE_KEYS]: scores, then weights (pairs in the first half) */
    float *keep;  /* [num_rows]: what the last tile left of the rows' older sums */
    float *value; /* [v_row]: one V row as f32 */
    const float *scale;                 /* [num_rows]: sm_scale * k_scale * q_scale */
    const int32_t *seen_from, *seen_to; /* [num_rows]: the keys of each row, causal and window */
    float *o, *max, *sum; /* out: [num_rows, v_row], [num_rows], [num_rows], not normalised */
} kv8_attention_job;

typedef void (*kv8_attention_kernel)(const kv8_attention_job *job);

/* Where the rows of a tile's keys lie. */
typedef struct kv8_tile {
    int32_t begin, end; /* keys */
    bool mixed;         /* some row sees a key of the tile that another does not */
    /* NULL for a key that no row of the item sees: its bytes are never read. */
    const uint8_t *k[KV8_TILE_KEYS], *v[KV8_TILE_KEYS];
    uint16_t k_scale[KV8_TILE_KEYS], v_scale[KV8_TILE_KEYS]; /* f16 bits, int8 only */
} kv8_tile;

static inline bool kv8_job_sees(const kv8_attention_job *job, int32_t row, int32_t key) {
    if (key < job->seen_from[row] || key >= job->seen_to[row]) return false;
    if (!job->spec->has_mask) return true;
    const int32_t q_row = (job->item->row_begin + row) / job->group_size;
    return kv8_mask_bit(job->args, job->item->request, job->kv_len, q_row, key);
}

static inline bool kv8_job_any_sees(const kv8_attention_job *job, int32_t key) {
    /* All heads of a query row see the same: one packed row of each is asked. */
    for (int32_t row = 0; row < job->item->num_rows;) {
        if (kv8_job_sees(job, row, key)) return true;
        const int32_t packed = job->item->row_begin + row;
        row += job->group_size - packed % job->group_size;
    }
    return false;
}

static inline uint16_t kv8_row_scale_bits(const kv8_paged *paged, int32_t page, int32_t slot,
                                          int32_t kv_head) {
    return paged
        ->row_scale[page * paged->row_scale_stride_page + slot * paged->row_scale_stride_slot +
                    kv_head * paged->row_scale_stride_head]
        .bits;
}

/* Addresses of keys [begin, end), at most KV8_TILE_KEYS, page by page; false when a mask hides all
 * of them. */
static inline bool kv8_tile_gather(const kv8_attention_job *job, int32_t begin, int32_t end,
                                   kv8_tile *tile) {
    const kv8_attention_spec *const spec = job->spec;
    const kv8_paged *const k = &job->args->k, *const v = &job->args->v;
    const int32_t kv_head = job->item->kv_head, last_row = job->item->num_rows - 1;
    bool any = false;
    tile->begin = begin;
    tile->end = end;
    memset(tile->k_scale, 0, sizeof tile->k_scale);
    memset(tile->v_scale, 0, sizeof tile->v_scale);
    tile->mixed = spec->has_mask || job->seen_from[last_row] > begin || job->seen_to[0] < end;
    int32_t page_idx = begin / spec->page_size, slot = begin % spec->page_size;
    for (int32_t i = 0; i < end - begin; i++) {
        const int32_t page = job->pages[page_idx];
        const bool seen = !spec->has_mask || kv8_job_any_sees(job, begin + i);
        tile->k[i] = tile->v[i] = NULL;
        if (seen) {
            any = true;
            tile->k[i] = (const uint8_t *)k->data + (page * k->stride_page + slot * k->stride_slot +
                                                     kv_head * k->stride_head) *
                                                        job->k_size;
            tile->v[i] = (const uint8_t *)v->data + (page * v->stride_page + slot * v->stride_slot +
                                                     kv_head * v->stride_head) *
                                                        job->v_size;
            if (spec->k_dtype == KV8_INT8)
                tile->k_scale[i] = kv8_row_scale_bits(k, page, slot, kv_head);
            if (spec->v_dtype == KV8_INT8)
                tile->v_scale[i] = kv8_row_scale_bits(v, page, slot, kv_head);
        }
        if (++slot == spec->page_size) {
            slot = 0;
            page_idx++;
        }
    }
    return any;
}

/* Every kernel: void name(const kv8_attention_job *job). */
#define X(name, isa, math) void name(const kv8_attention_job *job);
#include "attention_kernels.inc"
#undef X

#endif
