/* device_variants.c - the table of attention's CUDA kernels, what each takes, and the choice.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_variants.h"

#include <fnmatch.h>

#include "prefill_args.h"

#define BIT(dtype) (1u << (dtype))
#define WIDE       (BIT(KV8_BF16) | BIT(KV8_F16))
#define FLOATS     (BIT(KV8_F32) | WIDE)
#define CODES      (BIT(KV8_E4M3) | BIT(KV8_E4M3FNUZ) | BIT(KV8_E5M2) | BIT(KV8_INT8))
/* O of the tensor core kernels. */
#define RESULTS (FLOATS | BIT(KV8_E4M3) | BIT(KV8_E5M2))
/* What the generic kernel takes: all of float8.h. */
#define FLOAT8_BIT(words, rule, name, dtype, mantissa, bias, max) | BIT(dtype)
#define FLOAT8S                                                   (0 KV8_FLOAT8_FORMATS(FLOAT8_BIT))
/* f16 holds 8-bit codes, and bf16 Q as f16 times a power of two; bf16 pages want bf16 Q. */
#define QUERIES(code) ((code) == KV8_BF16 ? BIT(KV8_BF16) : WIDE)

/* Packed rows of a request on average. Many share each widened tile of keys in a prefill kernel, a
 * warpgroup's at least on mma.sync; of fewer, kernels of decode take so many over the keys that
 * they read once, or of one request with few keys as many as a warpgroup. */
enum { WARPGROUP_ROWS = 64 };
enum {
    BULK_LEAST_BATCH = 16,       /* of fewer requests, combining their many splits takes longer */
    BULK_MANY_LEAST_BATCH = 129, /* a producer's lanes keep the lengths of four requests each */
    PAGES_OF_ANY_SIZE = 1,
    DECODE_TAKES = KV8_NEEDS_MASK | KV8_NEEDS_WINDOW_RIGHT | KV8_NEEDS_RAGGED | KV8_NEEDS_SOFT_CAP |
                   KV8_NEEDS_QO_LENS | KV8_NEEDS_NUM_PAGES | KV8_NEEDS_LSE_LAYOUT |
                   KV8_NEEDS_INVARIANT,
    CLUSTER_TAKES = DECODE_TAKES & ~(KV8_NEEDS_MASK | KV8_NEEDS_SOFT_CAP | KV8_NEEDS_INVARIANT),
    WIDE_TAKES = CLUSTER_TAKES & ~KV8_NEEDS_NUM_PAGES,
    WARPGROUP_TAKES = DECODE_TAKES & ~(KV8_NEEDS_MASK | KV8_NEEDS_INVARIANT),
    WGMMA_TAKES = KV8_NEEDS_INVARIANT | KV8_NEEDS_SOFT_CAP | KV8_NEEDS_WINDOW_RIGHT |
                  KV8_NEEDS_RAGGED | KV8_NEEDS_QO_LENS | KV8_NEEDS_LSE_LAYOUT,
    OPTIONS_TAKE = WGMMA_TAKES | KV8_NEEDS_MASK | KV8_NEEDS_KEY_RANGE | KV8_NEEDS_NUM_PAGES,
    MMA_TAKES = OPTIONS_TAKE | KV8_NEEDS_TWO_DIMS,
};

#define DECODE(k_, v_, way_, kernel, dim, rows, pages, kv_heads, least, most, takes_, warps, \
               heads, bytes)                                                                 \
    {.name = #kernel,                                                                        \
     .way = way_,                                                                            \
     .q = QUERIES(k_),                                                                       \
     .k = BIT(k_),                                                                           \
     .v = BIT(v_),                                                                           \
     .o = RESULTS,                                                                           \
     .takes = takes_,                                                                        \
     .head_dim = dim,                                                                        \
     .page_step = pages,                                                                     \
     .num_kv_heads = kv_heads,                                                               \
     .min_batch = least,                                                                     \
     .max_batch = most,                                                                      \
     .num_warps = warps,                                                                     \
     .warp_heads = heads,                                                                    \
     .block_rows = rows,                                                                     \
     .shared_bytes = bytes},
#define ROWS(k, v, kernel, dim, warps, whole, heads, bytes)                                     \
    DECODE(k, v, KV8_WAY_ROWS, kernel, dim, KV8_DECODE_ROWS,                                    \
           whole ? KV8_DECODE_TOKENS : PAGES_OF_ANY_SIZE, 0, 1, INT32_MAX, DECODE_TAKES, warps, \
           heads, bytes)
#define PREFILL(kernel, q_, k_, v_, o_, takes_, dim, step, warps, rows, keys, bytes) \
    {.name = #kernel,                                                                \
     .way = KV8_WAY_PREFILL,                                                         \
     .q = q_,                                                                        \
     .k = k_,                                                                        \
     .v = v_,                                                                        \
     .o = o_,                                                                        \
     .takes = takes_,                                                                \
     .head_dim = dim,                                                                \
     .dim_step = step,                                                               \
     .page_step = PAGES_OF_ANY_SIZE,                                                 \
     .min_batch = 1,                                                                 \
     .max_batch = INT32_MAX,                                                         \
     .num_warps = warps,                                                             \
     .block_rows = rows,                                                             \
     .tile_keys = keys,                                                              \
     .shared_bytes = bytes},

/* Tiles of 16 rows beside those of 8 that have as many warps a KV head: one arithmetic. */
#define WIDE_ROWS_TAKE(format, dim) \
    ((format) == KV8_INT8 && (dim) == 64 ? DECODE_TAKES & ~KV8_NEEDS_INVARIANT : DECODE_TAKES)

/* Of several that take a spec and work one way, the first is taken: the faster stand first. */
static const kv8_variant variants[] = {
#define KV8_DECODE_WARPGROUP(k, v, name, dim, rows, stages, has_mask, bytes)                    \
    DECODE(KV8_##k, KV8_##v, KV8_WAY_ROWS, name, dim, rows, KV8_DECODE_TOKENS, 0, 1, INT32_MAX, \
           WARPGROUP_TAKES | ((has_mask) ? KV8_NEEDS_MASK : 0), 16, 1, bytes)
#include "cuda/decode/decode_warpgroup_kernels.inc"
#define KV8_DECODE_WIDE(format, kernel, dim, rows, keys, mask, bytes)   \
    {.name = #kernel,                                                   \
     .way = KV8_WAY_WIDE,                                               \
     .q = QUERIES(KV8_##format),                                        \
     .k = BIT(KV8_##format),                                            \
     .v = BIT(KV8_##format),                                            \
     .o = RESULTS,                                                      \
     .takes = WIDE_TAKES | ((mask) > 0 ? (uint32_t)KV8_NEEDS_MASK : 0), \
     .head_dim = dim,                                                   \
     .page_step = PAGES_OF_ANY_SIZE,                                    \
     .min_batch = 1,                                                    \
     .max_batch = 1,                                                    \
     .num_warps = 8,                                                    \
     .warp_heads = 1,                                                   \
     .block_rows = rows,                                                \
     .mask_bytes = mask,                                                \
     .shared_bytes = bytes},
#include "cuda/decode/decode_wide_kernels.inc"
#define KV8_DECODE_CLUSTER(format, name, dim, rows, warps, stages, bytes)                         \
    DECODE(KV8_##format, KV8_##format, KV8_WAY_CLUSTER, name, dim, rows, KV8_DECODE_TOKENS, 0, 1, \
           1, CLUSTER_TAKES, warps, 1, bytes)
#define KV8_DECODE_BULK(format, name, dim, rows, kv_heads, warps, stages, many, bytes)           \
    DECODE(KV8_##format, KV8_##format, many ? KV8_WAY_BULK_MANY : KV8_WAY_BULK, name, dim, rows, \
           KV8_DECODE_TOKENS, kv_heads, many ? BULK_MANY_LEAST_BATCH : BULK_LEAST_BATCH,         \
           INT32_MAX, DECODE_TAKES & ~(many ? KV8_NEEDS_INVARIANT : 0), warps, 1, bytes)
#define KV8_DECODE_ROWS16(format, name, dim, warps, stages, bytes)                           \
    DECODE(KV8_##format, KV8_##format, KV8_WAY_ROWS, name, dim, 16, KV8_DECODE_TOKENS, 0, 1, \
           INT32_MAX, WIDE_ROWS_TAKE(KV8_##format, dim), warps, 1, bytes)
#define KV8_DECODE_MIXED(k, v, name, dim, warps, stages, whole, heads, bytes) \
    ROWS(KV8_##k, KV8_##v, name, dim, warps, whole, heads, bytes)
#define KV8_DECODE_E4M3(name, dim, warps, stages, whole, heads, bytes) \
    ROWS(KV8_E4M3, KV8_E4M3, name, dim, warps, whole, heads, bytes)
#define KV8_DECODE_E5M2(name, dim, warps, stages, whole, heads, bytes) \
    ROWS(KV8_E5M2, KV8_E5M2, name, dim, warps, whole, heads, bytes)
#define KV8_DECODE_INT8(name, dim, warps, stages, whole, heads, bytes) \
    ROWS(KV8_INT8, KV8_INT8, name, dim, warps, whole, heads, bytes)
#define KV8_DECODE_BF16(name, dim, warps, stages, whole, heads, bytes) \
    ROWS(KV8_BF16, KV8_BF16, name, dim, warps, whole, heads, bytes)
#define KV8_DECODE_F16(name, dim, warps, stages, whole, heads, bytes) \
    ROWS(KV8_F16, KV8_F16, name, dim, warps, whole, heads, bytes)
#include "cuda/decode/decode_kernels.inc"
#define KV8_DECODE_WINDOW(format, name, dim, warps, stages, bytes)                 \
    DECODE(KV8_##format, KV8_##format, KV8_WAY_WINDOW, name, dim, KV8_DECODE_ROWS, \
           KV8_DECODE_TOKENS, 0, 1, INT32_MAX, CLUSTER_TAKES, warps, 1, bytes)
#include "cuda/decode/decode_window_kernels.inc"

/* Windows so short that the keys of an item are one tile. */
#define KV8_PREFILL_WINDOW(k_, v_, NAME, ...)                     \
    {.name = "kv8_prefill_" #NAME "__sm90",                       \
     .way = KV8_WAY_PREFILL,                                      \
     .q = QUERIES(KV8_##k_),                                      \
     .k = BIT(KV8_##k_),                                          \
     .v = BIT(KV8_##v_),                                          \
     .o = FLOATS,                                                 \
     .takes = WGMMA_TAKES & ~KV8_NEEDS_INVARIANT,                 \
     .head_dim = 64,                                              \
     .page_step = PAGES_OF_ANY_SIZE,                              \
     .min_batch = 1,                                              \
     .max_batch = INT32_MAX,                                      \
     .num_warps = 4 * (KV8_PREFILL_WINDOW_CONSUMERS + 1),         \
     .block_rows = WARPGROUP_ROWS * KV8_PREFILL_WINDOW_CONSUMERS, \
     .window_keys = KV8_PREFILL_WINDOW_KEYS,                      \
     .shared_bytes = KV8_PREFILL_WINDOW_SHARED(KV8_##k_, KV8_##v_)},
#include "cuda/prefill/sm90/prefill_window_kernels.inc"

/* On wgmma, for sm_90a: warpgroups of 64 rows, and one of producers. A narrow one is wide where
 * other bounds ask for it. */
#define FP8(way_, o_, takes_, code, name, dim, math, k_stages, v_stages)               \
    PREFILL(kv8_prefill_##name##_d##dim##way_##__sm90, BIT(KV8_E4M3), BIT(KV8_##code), \
            BIT(KV8_##code), o_, takes_, dim, 0, 4 * ((math) + 1), 64 * (math), 0,     \
            KV8_PREFILL_FP8_SHARED(dim, math, k_stages, v_stages))
#define WGMMA(way_, o_, takes_, k, v, name, dim, math, stages, ahead)                           \
    PREFILL(kv8_prefill_##name##way_##__sm90, QUERIES(KV8_##k), BIT(KV8_##k), BIT(KV8_##v), o_, \
            (takes_) & ~((math) == 1 ? KV8_NEEDS_INVARIANT : 0), dim, 0, 4 * ((math) + 1),      \
            64 * (math), 0, KV8_PREFILL_SM90_SHARED(KV8_##k, KV8_##v, dim, math, stages, ahead))
#define KV8_PREFILL_FP8(code, name, dim, math, k_stages, v_stages, math_registers, registers) \
    FP8(, FLOATS, WGMMA_TAKES, code, name, dim, math, k_stages, v_stages)
#include "cuda/prefill/sm90/prefill_fp8_kernels.inc"
#define KV8_PREFILL(k, v, name, dim, math, stages, ahead, math_registers, registers) \
    WGMMA(, FLOATS, WGMMA_TAKES, k, v, name, dim, math, stages, ahead)
#include "cuda/prefill/sm90/prefill_kernels.inc"
#undef KV8_PREFILL_FP8
#undef KV8_PREFILL
#define KV8_PREFILL_FP8(code, name, dim, math, k_stages, v_stages, math_registers, registers) \
    FP8(_options, RESULTS, OPTIONS_TAKE, code, name, dim, math, k_stages, v_stages)
#include "cuda/prefill/sm90/prefill_fp8_kernels.inc"
#define KV8_PREFILL(k, v, name, dim, math, stages, ahead, math_registers, registers) \
    WGMMA(_options, RESULTS, OPTIONS_TAKE, k, v, name, dim, math, stages, ahead)
#include "cuda/prefill/sm90/prefill_kernels.inc"
#undef KV8_PREFILL_FP8
#undef KV8_PREFILL

/* On mma.sync: K and V of any two formats that the arithmetic of the products holds exactly. */
#define KV8_PREFILL_MMA_F16(name, dim, row_tiles, keys, warps, blocks)                           \
    PREFILL(name, WIDE, BIT(KV8_F16) | CODES, BIT(KV8_F16) | CODES, RESULTS, MMA_TAKES, dim, 16, \
            warps, 16 * (row_tiles) * (warps), keys, 0)
#define KV8_PREFILL_MMA_BF16(name, dim, row_tiles, keys, warps, blocks)                            \
    PREFILL(name, BIT(KV8_BF16), BIT(KV8_BF16) | CODES, BIT(KV8_BF16) | CODES, RESULTS, MMA_TAKES, \
            dim, 16, warps, 16 * (row_tiles) * (warps), keys, 0)
#include "cuda/prefill/sm80/prefill_mma_kernels.inc"

    {.name = "kv8_attention_any_any_dany_generic__sm80",
     .way = KV8_WAY_GENERIC,
     .q = FLOATS | BIT(KV8_E4M3),
     .k = FLOATS | FLOAT8S | BIT(KV8_INT8),
     .v = FLOATS | FLOAT8S | BIT(KV8_INT8),
     .o = FLOATS | FLOAT8S,
     .takes = KV8_NEEDS_ALL,
     .head_dim = KV8_MAX_HEAD_DIM,
     .dim_step = 1,
     .page_step = PAGES_OF_ANY_SIZE,
     .min_batch = 1,
     .max_batch = INT32_MAX,
     .num_warps = 4},
};
enum { NUM_VARIANTS = sizeof variants / sizeof variants[0] };

/* --- what is asked for --- */

static uint32_t need(bool is_asked, kv8_need bit) {
    return is_asked ? (uint32_t)bit : 0;
}
uint32_t kv8_needs_of_spec(const kv8_attention_spec *spec) {
    return need(spec->head_dim != spec->v_head_dim, KV8_NEEDS_TWO_DIMS) |
           need(spec->has_mask, KV8_NEEDS_MASK) | need(spec->has_key_range, KV8_NEEDS_KEY_RANGE) |
           need(spec->batch_invariant, KV8_NEEDS_INVARIANT) |
           need(!spec->causal && spec->window_right >= 0, KV8_NEEDS_WINDOW_RIGHT) |
           need(spec->page_size == 0, KV8_NEEDS_RAGGED);
}
uint32_t kv8_needs_of_args(const kv8_attention_args *args) {
    return need(args->logits_soft_cap != 0, KV8_NEEDS_SOFT_CAP) |
           need(args->qo_lens != NULL, KV8_NEEDS_QO_LENS) |
           need(args->k->num_pages > 0 || args->v->num_pages > 0, KV8_NEEDS_NUM_PAGES) |
           need(args->lse != NULL &&
                    (args->lse_base2 || args->lse_stride_row != 0 || args->lse_stride_head != 0),
                KV8_NEEDS_LSE_LAYOUT);
}

/* --- what fits a kernel --- */

/* The bounds fit what a decode kernel counts in 32 bits, and its shared memory. */
static bool fits_decode(const kv8_variant *variant, const kv8_attention_spec *spec,
                        const kv8_device_info *info) {
    enum { STATIC_BYTES = 4096, OF_WARPGROUPS = 12288 }; /* at least what kernels declare beside */
    const size_t declared =
        variant->block_rows > KV8_DECODE_MOST_ROWS ? OF_WARPGROUPS : STATIC_BYTES;
    const int64_t of_unit = spec->batch_invariant ? kv8_variant_piece_units(variant, spec) : 1;
    const int64_t granules = spec->max_kv_len / KV8_DECODE_TOKENS + 2 + KV8_DECODE_MAX_SPLIT_UNITS;
    const int64_t streams = kv8_decode_max_row_tiles(spec) * spec->num_kv_heads;
    return kv8_variant_heads_per_block(variant, spec) % variant->warp_heads == 0 &&
           kv8_variant_shared_bytes(variant, spec) + declared <= info->shared_bytes_per_block &&
           streams <= (INT32_MAX >> 1) / kv8_ceil_div(granules, of_unit) &&
           granules <= INT32_MAX / KV8_DECODE_MAX_BLOCKS;
}
/* Packed rows of a request on average, by the bounds, are more than so many. */
static bool has_more_rows_than(const kv8_attention_spec *spec, int32_t rows) {
    const int64_t packed = (int64_t)spec->max_total_q * (spec->num_qo_heads / spec->num_kv_heads);
    return packed > (int64_t)rows * spec->max_batch;
}
static bool has_short_window(const kv8_attention_spec *spec) {
    enum { SHORT = 512 };
    return spec->window_left >= 0 && spec->window_left < SHORT;
}
/* Under batch_invariant a kernel is for every batch or for none. */
static int32_t least_batch(const kv8_variant *variant, const kv8_attention_spec *spec) {
    return spec->batch_invariant ? 1 : variant->min_batch;
}
/* Whether streams of one length, no more than blocks, leave few blocks without a part of one. */
static bool are_even(int64_t streams, int32_t blocks) {
    return blocks / streams * streams * 8 >= blocks * 7;
}
/* A tile of 17 to 32 rows is for many keys: in all where streams are even, and else of each; of a
 * request where heads are few or streams more than blocks. With a mask it is for so many heads that
 * a block has more than a line of a token. */
static bool has_keys_for_warpgroups(const kv8_variant *variant, const kv8_attention_spec *spec,
                                    const kv8_device_info *info) {
    enum { FEW_HEADS = 8, KEYS_OF_FEW = 8192, WIDE_KEYS_OF_FEW = 65536 };
    enum { LINE = 128, ALL_BYTES = 64 << 20, STREAM_BYTES = 2 << 20, STREAM_KEYS = 4096 };
    const int32_t of_block = kv8_variant_heads_per_block(variant, spec);
    const int32_t head_bytes = kv8_head_bytes(spec->k_dtype, spec->head_dim);
    const int64_t heads = (int64_t)spec->max_batch * spec->num_kv_heads, keys = spec->max_kv_len;
    const int64_t streams = heads / of_block;
    if (spec->has_mask && heads * head_bytes <= (int64_t)LINE * info->num_sms) return false;
    if (heads < FEW_HEADS) return keys >= (head_bytes < LINE ? KEYS_OF_FEW : WIDE_KEYS_OF_FEW);
    if (streams > info->num_sms) return keys >= STREAM_KEYS;
    return 2 * head_bytes * heads * keys >= ALL_BYTES &&
           (are_even(streams, info->num_sms) ||
            (keys >= STREAM_KEYS && 2 * head_bytes * of_block * keys >= STREAM_BYTES));
}
/* A wide tile of decode is for rows that one of half as many would take two of; one of more than 16
 * neither for short windows nor for single rows among chunks. */
static bool fits_rows(const kv8_variant *variant, const kv8_attention_spec *spec,
                      const kv8_device_info *info) {
    const int32_t rows = variant->block_rows;
    if (rows == KV8_DECODE_ROWS) return true;
    if (!has_more_rows_than(spec, rows / 2)) return false;
    return rows <= KV8_DECODE_MOST_ROWS ||
           (!has_more_rows_than(spec, rows) && !has_short_window(spec) &&
            has_keys_for_warpgroups(variant, spec, info));
}
/* Tiles of 16 rows are more than the registers of a block with a producer hold: rows take them, but
 * where batch_invariant wants one arithmetic. */
static bool fits_whole_pages(const kv8_attention_spec *spec) {
    const bool has_wide_rows = spec->k_dtype == KV8_E4M3 && spec->head_dim == 64;
    return spec->batch_invariant || kv8_may_mix(spec) || !has_wide_rows ||
           !has_more_rows_than(spec, KV8_DECODE_ROWS);
}
/* Few keys, of a window or in all. */
static bool sees_few_keys(const kv8_attention_spec *spec) {
    enum { FEW = 1024 };
    return (has_short_window(spec) || spec->max_kv_len <= FEW) && !spec->batch_invariant;
}
/* Requests that the kernel of windows is faster for: one for each multiprocessor, and any number of
 * single rows. */
static bool takes_requests(const kv8_variant *window, const kv8_attention_spec *spec,
                           const kv8_device_info *info) {
    return spec->max_batch <= info->num_sms || !has_more_rows_than(spec, window->block_rows);
}
/* Keys of a head, read once for each tile of rows, not so many that reading them takes longer than
 * combining what clusters leave. */
static bool fits_cluster(const kv8_variant *variant, const kv8_attention_spec *spec) {
    enum { MAX_HEAD_BYTES = 2 << 20 };
    return spec->max_kv_len <= MAX_HEAD_BYTES / kv8_head_bytes(spec->k_dtype, spec->head_dim) /
                                   kv8_variant_row_tiles(variant, spec);
}

/* There is room for the mask bits of a block's keys, which are most where a cluster has the fewest
 * blocks. */
static bool fits_mask(const kv8_variant *wide, const kv8_attention_spec *spec) {
    enum { LEAST_BLOCKS = 8, MORE_KEYS = 128 }; /* steps are whole */
    const int64_t keys = spec->max_kv_len / LEAST_BLOCKS + MORE_KEYS;
    return !spec->has_mask || spec->max_total_q * (keys / 8) <= wide->mask_bytes;
}

/* So few keys that clusters, of which a GPU holds few at once, are done before prefill's blocks
 * have joined their splits, a quarter as many for two tiles. One tile: where narrow tiles have more
 * clusters than there is room for at once, 14 of 16 blocks on 132 multiprocessors, and more keys
 * than two of a head are done with sooner. Two, and one with a mask, which narrow tiles' clusters
 * do not take: where a cluster for each KV head has a block for nearly each multiprocessor. */
static bool fits_wide(const kv8_variant *variant, const kv8_attention_spec *spec,
                      const kv8_device_info *info) {
    enum { MAX_KEYS = 8192, FEW_KEYS = 512, BLOCKS = 16 };
    const int32_t rows = variant->block_rows, blocks = BLOCKS * spec->num_kv_heads;
    const int64_t packed = (int64_t)spec->max_total_q * (spec->num_qo_heads / spec->num_kv_heads);
    const int64_t narrow = kv8_ceil_div(packed, KV8_DECODE_MOST_ROWS);
    const bool fills_machine = 8 * blocks > 7 * info->num_sms;
    int64_t keys = spec->max_kv_len;
    if (spec->max_batch > 1 || packed > rows) return false;
    if (rows > WARPGROUP_ROWS)
        return packed > WARPGROUP_ROWS && keys < MAX_KEYS / 4 && fills_machine &&
               !has_short_window(spec);
    if (spec->has_mask && fills_machine)
        return keys <= (packed > KV8_DECODE_ROWS ? MAX_KEYS : MAX_KEYS / 2);
    if (keys > MAX_KEYS || narrow < 2 || 4 * narrow * blocks <= 7 * info->num_sms) return false;
    if (spec->window_left >= 0 && (spec->causal || spec->window_right >= 0))
        keys = kv8_min_i64(keys, (int64_t)spec->window_left + spec->max_total_q +
                                     (spec->causal ? 0 : spec->window_right));
    return narrow > 2 || keys > FEW_KEYS;
}

/* Keys that so many packed rows, one behind the other, see in the spec's window. */
static int64_t keys_in_window(const kv8_attention_spec *spec, int32_t rows) {
    const int32_t group = spec->num_qo_heads / spec->num_kv_heads;
    const int64_t queries = rows % group == 0 ? rows / group : (rows - 2) / group + 2;
    return (int64_t)spec->window_left + (spec->causal ? 0 : spec->window_right) + queries;
}
/* Of the keys that an item's rows see a warpgroup takes a part, from a multiple of 8 on. */
static bool fits_window(const kv8_variant *variant, const kv8_attention_spec *spec) {
    if (variant->window_keys == 0) return true;
    return spec->window_left >= 0 && (spec->causal || spec->window_right >= 0) &&
           has_more_rows_than(spec, WARPGROUP_ROWS) &&
           keys_in_window(spec, variant->block_rows) <= variant->window_keys &&
           keys_in_window(spec, WARPGROUP_ROWS) <= KV8_PREFILL_WINDOW_SEEN - 7;
}

/* Blocks of one warpgroup, two a multiprocessor, are for rows that are one's. But for e4m3 several
 * warpgroups are sooner done with few heads of few keys, and 16 bits an element with a head for
 * each multiprocessor of few. */
static bool fits_one_warpgroup(const kv8_attention_spec *spec, const kv8_device_info *info) {
    enum { FEW_HEADS = 32, KEYS = 1 << 16, WIDE_KEYS = 1 << 17, WIDE_LEAST_KEYS = 4096 };
    if (has_more_rows_than(spec, WARPGROUP_ROWS)) return false;
    if (spec->k_dtype == KV8_E4M3 && spec->v_dtype == KV8_E4M3) return true;
    const bool is_wide = (WIDE >> spec->k_dtype & 1) != 0;
    const int64_t heads = (int64_t)spec->max_batch * spec->num_kv_heads;
    if (heads < FEW_HEADS) return heads * spec->max_kv_len > (is_wide ? WIDE_KEYS : KEYS);
    return !is_wide || heads > info->num_sms || spec->max_kv_len >= WIDE_LEAST_KEYS;
}

/* --- the choice --- */

static bool takes_dims(const kv8_variant *v, const kv8_attention_spec *spec) {
    if (v->dim_step == 0) return spec->head_dim == v->head_dim;
    return spec->head_dim <= v->head_dim && spec->v_head_dim <= v->head_dim &&
           spec->head_dim % v->dim_step == 0 && spec->v_head_dim % v->dim_step == 0;
}
bool kv8_variant_is_on_wgmma(const kv8_variant *prefill) {
    return prefill->tile_keys == 0;
}
static bool takes_spec(const kv8_variant *v, const kv8_attention_spec *spec, uint32_t needs,
                       const kv8_device_info *info) {
    if ((v->q >> spec->q_dtype & v->k >> spec->k_dtype & v->v >> spec->v_dtype &
         v->o >> spec->o_dtype & 1) == 0)
        return false;
    if (!takes_dims(v, spec) || (needs & ~v->takes) != 0 || spec->page_size % v->page_step != 0 ||
        spec->max_batch < least_batch(v, spec) ||
        (v->num_kv_heads != 0 && v->num_kv_heads != spec->num_kv_heads))
        return false;
    switch (v->way) {
        case KV8_WAY_WIDE: return fits_wide(v, spec, info) && fits_mask(v, spec);
        case KV8_WAY_CLUSTER: return fits_rows(v, spec, info) && fits_cluster(v, spec);
        case KV8_WAY_WINDOW:
            return sees_few_keys(spec) && takes_requests(v, spec, info) &&
                   fits_decode(v, spec, info) &&
                   (kv8_may_mix(spec) || !has_more_rows_than(spec, v->block_rows));
        case KV8_WAY_BULK_MANY:
        case KV8_WAY_BULK:
            /* Of few requests heads are better spread over blocks. */
            return (!sees_few_keys(spec) || spec->max_batch > info->num_sms / 4) &&
                   fits_whole_pages(spec) && fits_rows(v, spec, info) && fits_decode(v, spec, info);
        case KV8_WAY_ROWS: return fits_rows(v, spec, info) && fits_decode(v, spec, info);
        case KV8_WAY_PREFILL:
            return fits_window(v, spec) &&
                   (!kv8_variant_is_on_wgmma(v) || v->block_rows > WARPGROUP_ROWS ||
                    fits_one_warpgroup(spec, info));
        default: return true;
    }
}

/* Whom a plan is for. */
typedef struct choosing {
    const kv8_attention_spec *spec;
    const kv8_device *device;
    const char *pattern;
} choosing;

/* The first kernel for each way of [first, last] that takes what runs may need beside the spec,
 * appended to out. */
static int add_ways(const choosing *c, uint32_t needs, kv8_way first, kv8_way last,
                    const kv8_variant *out[KV8_MAX_CHOICES], int count) {
    const kv8_attention_spec *const spec = c->spec;
    const kv8_device_info *const info = kv8_device_get_info(c->device);
    needs |= kv8_needs_of_spec(spec);
    for (kv8_way way = first; way <= last; way++) {
        for (int i = 0; i < NUM_VARIANTS; i++) {
            const kv8_variant *const v = &variants[i];
            if (v->way != way || (c->pattern != NULL && fnmatch(c->pattern, v->name, 0) != 0))
                continue;
            if (!takes_spec(v, spec, needs, info) || !kv8_kernel_exists(c->device, v->name))
                continue;
            out[count++] = v;
            break;
        }
    }
    return count;
}

/* Whether a prefill kernel on wgmma, which takes all rows of a request over the keys once and as
 * long for few keys as for some thousands, is done before clusters: where these are more than two
 * rounds, or more than one and read wide rows or more than some for each head, or all together read
 * much. */
static bool is_prefill_sooner(const choosing *c) {
    enum { AT_ONCE = 24, MUCH = 1 << 24 };
    enum { NARROW_ROW = 64, OF_NARROW = 1 << 19 };
    const kv8_attention_spec *const spec = c->spec;
    const kv8_variant *cluster[KV8_MAX_CHOICES], *prefill[KV8_MAX_CHOICES];
    if (!has_more_rows_than(spec, KV8_DECODE_MOST_ROWS) || has_short_window(spec)) return false;
    if (add_ways(c, 0, KV8_WAY_CLUSTER, KV8_WAY_CLUSTER, cluster, 0) == 0 ||
        add_ways(c, 0, KV8_WAY_PREFILL, KV8_WAY_PREFILL, prefill, 0) == 0 ||
        !kv8_variant_is_on_wgmma(prefill[0]))
        return false;
    const int64_t rows = (int64_t)spec->max_total_q * (spec->num_qo_heads / spec->num_kv_heads);
    const int32_t head_bytes = kv8_head_bytes(spec->k_dtype, spec->head_dim);
    const int64_t bytes =
        kv8_ceil_div(rows, KV8_DECODE_ROWS) * spec->max_kv_len * head_bytes; /* of a head */
    if (spec->num_kv_heads * bytes > MUCH) return true;
    const int64_t clusters = (int64_t)spec->num_kv_heads * kv8_variant_row_tiles(cluster[0], spec);
    return clusters > 2 * AT_ONCE ||
           (clusters > AT_ONCE && (head_bytes > NARROW_ROW || bytes > OF_NARROW));
}

/* Whether decode takes more than KV8_DECODE_MOST_ROWS over the keys at once. */
static bool has_wide_rows(const choosing *c) {
    const kv8_device_info *const info = kv8_device_get_info(c->device);
    const uint32_t needs = kv8_needs_of_spec(c->spec);
    for (int i = 0; i < NUM_VARIANTS; i++) {
        const kv8_variant *const v = &variants[i];
        if (v->way == KV8_WAY_ROWS && v->block_rows > KV8_DECODE_MOST_ROWS &&
            takes_spec(v, c->spec, needs, info) && kv8_kernel_exists(c->device, v->name))
            return true;
    }
    return false;
}

bool kv8_may_mix(const kv8_attention_spec *spec) {
    return has_more_rows_than(spec, WARPGROUP_ROWS) && spec->max_batch >= BULK_LEAST_BATCH &&
           spec->num_qo_heads <= KV8_DECODE_MOST_ROWS * spec->num_kv_heads &&
           !spec->batch_invariant;
}

/* A prefill kernel, and another for runs that give num_pages, where that one takes none. */
static int add_prefill(const choosing *c, const kv8_variant *out[KV8_MAX_CHOICES], int count) {
    const int before = count;
    count = add_ways(c, 0, KV8_WAY_PREFILL, KV8_WAY_PREFILL, out, count);
    if (count == before || (out[before]->takes & KV8_NEEDS_NUM_PAGES) != 0) return count;
    return add_ways(c, KV8_NEEDS_NUM_PAGES, KV8_WAY_PREFILL, KV8_WAY_PREFILL, out, count);
}

int kv8_choose_variants(const kv8_attention_spec *spec, const kv8_device *device,
                        const char *pattern, const kv8_variant *out[KV8_MAX_CHOICES]) {
    const choosing c = {spec, device, pattern};
    const bool many = has_more_rows_than(spec, WARPGROUP_ROWS);
    int count = 0;
    if (spec->batch_invariant) { /* rows of decode and of prefill by one arithmetic */
        count = add_ways(&c, 0, KV8_WAY_BULK, KV8_WAY_ROWS, out, count);
        if (count == 0) count = add_prefill(&c, out, count);
        return add_ways(&c, 0, KV8_WAY_GENERIC, KV8_WAY_GENERIC, out, count);
    }
    const kv8_way last = many || is_prefill_sooner(&c) ? KV8_WAY_WIDE : KV8_WAY_CLUSTER;
    count = add_ways(&c, 0, KV8_WAY_WIDE, last, out, count);
    const int before = count;
    if (has_more_rows_than(spec, KV8_DECODE_MOST_ROWS) && !has_wide_rows(&c)) {
        count = add_prefill(&c, out, count);
        if (count > before && !kv8_variant_is_on_wgmma(out[before]) &&
            !has_more_rows_than(spec, WARPGROUP_ROWS - 1))
            count = before;
    }
    if (!many || count == before || kv8_may_mix(spec))
        count = add_ways(&c, 0, KV8_WAY_WINDOW, KV8_WAY_ROWS, out, count);
    if (count == 0) count = add_prefill(&c, out, count);
    return add_ways(&c, 0, KV8_WAY_GENERIC, KV8_WAY_GENERIC, out, count);
}

/* What copies of 16 bytes and strides of 32 bits ask. */
static bool fits_copies(const kv8_kernel_pages *p) {
    const int64_t strides = p->stride_page | p->stride_slot | p->stride_head;
    enum { MAX_SLOT = 1 << 27, MAX_HEAD = 1 << 30 };
    return (((uintptr_t)p->data | (uintptr_t)strides) & 15) == 0 && strides >= 0 &&
           p->stride_page <= UINT32_MAX && p->stride_slot < MAX_SLOT && p->stride_head < MAX_HEAD;
}
/* The same of rows' scales, where there are any. Decode copies them in words of two: all pages must
 * begin in the same half of a word. */
static bool fits_scales(const kv8_variant *variant, const kv8_kernel_pages *p) {
    const int64_t strides = p->scale_stride_page | p->scale_stride_slot | p->scale_stride_head;
    enum { MAX_SLOT = 1 << 27 };
    if (p->row_scale == NULL) return true;
    return strides >= 0 && p->scale_stride_page <= UINT32_MAX && p->scale_stride_slot < MAX_SLOT &&
           (variant->way == KV8_WAY_PREFILL || p->scale_stride_page % 2 == 0);
}
/* The tokens of a page one after another, each with its KV heads one after another. */
static bool has_whole_pages(const kv8_attention_spec *spec, const kv8_kernel_pages *p) {
    const int32_t bytes = kv8_head_bytes(spec->k_dtype, spec->head_dim); /* V's are as many */
    return p->stride_head == bytes && p->stride_slot == (int64_t)bytes * spec->num_kv_heads;
}

bool kv8_variant_takes_run(const kv8_variant *variant, const kv8_attention_spec *spec,
                           uint32_t needs, int32_t batch, const kv8_kernel_pages *k,
                           const kv8_kernel_pages *v) {
    if (variant->way == KV8_WAY_GENERIC) return true;
    if ((needs & ~variant->takes) != 0 || batch < least_batch(variant, spec) ||
        batch > variant->max_batch)
        return false;
    if (kv8_way_is_bulk(variant->way) && !(has_whole_pages(spec, k) && has_whole_pages(spec, v)))
        return false;
    return fits_copies(k) && fits_copies(v) && fits_scales(variant, k) && fits_scales(variant, v);
}
