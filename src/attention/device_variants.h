/* device_variants.h - every CUDA kernel of attention as the host needs to know it, and the one
 * choice among them.
 *
 * Private to attention. A kernel_inc list names each kernel once, for the .cu that makes it and for
 * the table behind this header; a row of the table declares what its kernel takes. Knows no pointer
 * and launches nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_VARIANTS_H
#define KV8_DEVICE_VARIANTS_H

#include "cuda/common/attention_args.h"
#include "device_impl.h"
#include "problem.h"

/* How a kernel works, in the order of preference among those for a few rows. */
typedef enum kv8_way {
    KV8_WAY_WIDE = 0,  /* several rows of one request on wgmma, a cluster of blocks a KV head */
    KV8_WAY_CLUSTER,   /* one request, a cluster of blocks a KV head */
    KV8_WAY_WINDOW,    /* decode over few keys, a block for heads of a request */
    KV8_WAY_BULK_MANY, /* of more requests than a warp keeps the lengths of, the next way */
    KV8_WAY_BULK,      /* decode where the tokens of a page lie one after another */
    KV8_WAY_ROWS,      /* decode over pages of any strides */
    KV8_WAY_PREFILL,   /* many rows share a tile of keys: wgmma or mma.sync */
    KV8_WAY_GENERIC,   /* a block a query row: takes everything */
    KV8_NUM_WAYS
} kv8_way;
enum { KV8_MAX_CHOICES = KV8_NUM_WAYS + 1 }; /* of a plan */

static inline bool kv8_way_is_bulk(kv8_way way) {
    return way == KV8_WAY_BULK_MANY || way == KV8_WAY_BULK;
}

/* What a spec or the args of a run may ask for beside the plain case. */
typedef enum kv8_need {
    KV8_NEEDS_TWO_DIMS = 1 << 0, /* K and V of two head_dims */
    KV8_NEEDS_MASK = 1 << 1,
    KV8_NEEDS_KEY_RANGE = 1 << 2,
    KV8_NEEDS_INVARIANT = 1 << 3,
    KV8_NEEDS_WINDOW_RIGHT = 1 << 4, /* beside causal */
    KV8_NEEDS_RAGGED = 1 << 5,
    KV8_NEEDS_SOFT_CAP = 1 << 6,
    KV8_NEEDS_QO_LENS = 1 << 7,
    KV8_NEEDS_NUM_PAGES = 1 << 8,
    KV8_NEEDS_LSE_LAYOUT = 1 << 9, /* strides or base */
    KV8_NEEDS_ALL = (1 << 10) - 1
} kv8_need;

typedef struct kv8_variant {
    const char *name;
    kv8_way way;
    uint32_t q, k, v, o;         /* dtypes: 1 << kv8_dtype each */
    uint32_t takes;              /* kv8_need */
    int32_t head_dim;            /* this one; with dim_step its multiples up to this one */
    int32_t dim_step, page_step; /* page_size is a multiple of page_step */
    int32_t num_kv_heads;        /* 0 = any */
    int32_t min_batch, max_batch;
    /* As it is built. */
    int32_t num_warps;   /* decode: those that compute; else of a block */
    int32_t warp_heads;  /* decode: KV heads of a warp */
    int32_t block_rows;  /* packed rows of a tile of decode, of an item of prefill */
    int32_t tile_keys;   /* mma.sync: keys of a tile */
    int32_t mask_bytes;  /* of one request: room for mask bits of a block's keys */
    int32_t window_keys; /* of short windows: keys that an item's rows see at most; 0 = any */
    size_t shared_bytes; /* dynamic; kv8_variant_shared_bytes() has the rest */
} kv8_variant;

uint32_t kv8_needs_of_spec(const kv8_attention_spec *spec);
uint32_t kv8_needs_of_args(const kv8_attention_args *args);

/* The kernels that a plan of a resolved spec holds, in order of preference: a run takes the first
 * that takes its args too. One for each way at most, two of prefill; the last is the generic
 * kernel, unless its name is not like `pattern` (of fnmatch; NULL: all are). Returns how many; 0:
 * this GPU has none.
 */
int kv8_choose_variants(const kv8_attention_spec *spec, const kv8_device *device,
                        const char *pattern, const kv8_variant *out[KV8_MAX_CHOICES]);

/* Whether requests of few rows go to decode kernels beside prefill's in one run, for which the plan
 * has both. Not where a group has more heads than a tile of decode takes over the keys at once. */
bool kv8_may_mix(const kv8_attention_spec *spec);

/* Of a run, whose K and V lie in these pages. */
bool kv8_variant_takes_run(const kv8_variant *variant, const kv8_attention_spec *spec,
                           uint32_t needs, int32_t batch, const kv8_kernel_pages *k,
                           const kv8_kernel_pages *v);

/* Of prefill's kernels those that, launched so, start as the blocks of the kernel ahead end, and
 * end after it; the others are on mma.sync. */
bool kv8_variant_is_on_wgmma(const kv8_variant *prefill);
/* KV heads that one block of a decode kernel computes at once. */
int32_t kv8_variant_heads_per_block(const kv8_variant *variant, const kv8_attention_spec *spec);
/* Granules that its warps compute at once. */
int32_t kv8_variant_slices(const kv8_variant *variant, const kv8_attention_spec *spec);
/* Under batch_invariant: granules of a piece, at whose multiples keys are cut. */
int32_t kv8_variant_piece_units(const kv8_variant *variant, const kv8_attention_spec *spec);
/* Dynamic shared memory of a block. */
size_t kv8_variant_shared_bytes(const kv8_variant *variant, const kv8_attention_spec *spec);
/* Row tiles of a decode kernel that any run within the bounds has: a tile is of one request. */
int64_t kv8_decode_max_row_tiles(const kv8_attention_spec *spec);
/* A request's tiles of a kernel, on average. */
int32_t kv8_variant_row_tiles(const kv8_variant *variant, const kv8_attention_spec *spec);

/* Of one head of a token. */
static inline int32_t kv8_head_bytes(kv8_dtype dtype, int32_t head_dim) {
    return head_dim * (int32_t)kv8_dtype_size(dtype);
}

enum {
    KV8_DECODE_MOST_ROWS = 16, /* packed rows of a tile that one warp computes */
    KV8_DECODE_MAX_SPLIT_UNITS = 24,
    KV8_DECODE_MAX_BLOCKS = 1024,
};

#endif
