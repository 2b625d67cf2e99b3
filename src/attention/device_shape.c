/* device_shape.c - what a block of a CUDA kernel of attention computes at once, and its memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_variants.h"

#include "prefill_args.h"

/* Of warpgroups: heads that are a line of a token, one where keys are few, two lines where they are
 * very many; and more where streams would be more than an H200's multiprocessors, so that they are
 * not split. */
static int32_t warpgroup_heads_per_block(const kv8_attention_spec *spec) {
    enum { FEW_KEYS = 1 << 16, MANY_KEYS = 1 << 19, LINE = 128, BLOCKS = 132, MOST = 4 };
    const int64_t keys = (int64_t)spec->max_batch * spec->max_kv_len;
    const int64_t heads = (int64_t)spec->max_batch * spec->num_kv_heads;
    const int32_t lines = keys > MANY_KEYS ? 2 : 1;
    int32_t of_block = 1;
    if (keys > FEW_KEYS) of_block = lines * LINE / kv8_head_bytes(spec->k_dtype, spec->head_dim);
    while (of_block < MOST && heads > (int64_t)of_block * BLOCKS) of_block *= 2;
    return of_block;
}
/* heads_per_block: four, so that rows of a token are 256 bytes or more in NHD, which DRAM serves at
 * once; fewer where a small batch would leave too few streams to combine their splits in parallel,
 * if a warp copies whole lines by itself. */
static int32_t most_heads_per_block(const kv8_variant *variant, const kv8_attention_spec *spec) {
    enum { LINE = 128, LARGE_BATCH = 32, LONG = 32768 };
    int32_t most = 4;
    if (spec->batch_invariant) return most;
    if (variant->way == KV8_WAY_ROWS && variant->block_rows > KV8_DECODE_MOST_ROWS)
        return warpgroup_heads_per_block(spec);
    const int32_t k_bytes = kv8_head_bytes(spec->k_dtype, spec->head_dim) * variant->warp_heads;
    const int32_t v_bytes = kv8_head_bytes(spec->v_dtype, spec->head_dim) * variant->warp_heads;
    if (spec->max_batch <= LARGE_BATCH && k_bytes % LINE == 0 && v_bytes % LINE == 0) most = 2;
    if (spec->max_batch <= 4 && spec->max_kv_len <= LONG) most = 2;
    if (spec->max_batch == 1 && spec->max_kv_len <= LONG / 2) most = 1;
    return most;
}
/* Of few keys: the fewer heads, the more warps share the granules of each. One while there is
 * room for blocks of the next launch beside them, then as few as there is room for. */
static int32_t window_heads_per_block(const kv8_attention_spec *spec) {
    enum { BLOCKS = 128, ROOM = 256 };
    const int64_t heads = (int64_t)spec->max_batch * spec->num_kv_heads;
    return heads <= BLOCKS ? 1 : heads <= 2 * ROOM ? 2 : heads <= 4 * ROOM ? 4 : 8;
}
int32_t kv8_variant_heads_per_block(const kv8_variant *variant, const kv8_attention_spec *spec) {
    if (variant->num_kv_heads > 0) return variant->num_kv_heads;
    const int32_t most = variant->way == KV8_WAY_WINDOW ? window_heads_per_block(spec)
                                                        : most_heads_per_block(variant, spec);
    int32_t heads = 1;
    while (heads * 2 <= most && spec->num_kv_heads % (heads * 2) == 0 &&
           variant->num_warps * variant->warp_heads % (heads * 2) == 0)
        heads *= 2;
    return heads;
}

int32_t kv8_variant_slices(const kv8_variant *variant, const kv8_attention_spec *spec) {
    return variant->num_warps * variant->warp_heads / kv8_variant_heads_per_block(variant, spec);
}

/* Of 1 MiB, as many for each slice: by formats and heads, not by the batch. */
int32_t kv8_variant_piece_units(const kv8_variant *variant, const kv8_attention_spec *spec) {
    enum { PIECE_BYTES = 1 << 20, MAX_UNITS = 128 };
    const int64_t token_bytes = kv8_head_bytes(spec->k_dtype, spec->head_dim) +
                                kv8_head_bytes(spec->v_dtype, spec->v_head_dim);
    const int64_t units = PIECE_BYTES / (KV8_DECODE_TOKENS * token_bytes *
                                         kv8_variant_heads_per_block(variant, spec));
    const int32_t slices = kv8_variant_slices(variant, spec);
    return (int32_t)kv8_max_i64(kv8_min_i64(units, MAX_UNITS) / slices, 1) * slices;
}

size_t kv8_variant_shared_bytes(const kv8_variant *variant, const kv8_attention_spec *spec) {
    if (variant->way == KV8_WAY_ROWS || kv8_way_is_bulk(variant->way))
        return variant->shared_bytes + ((size_t)spec->max_batch + 1) * KV8_DECODE_START_BYTES;
    if (variant->tile_keys == 0) return variant->shared_bytes;
    const bool k_wide = kv8_dtype_size(spec->k_dtype) == 2,
               v_wide = kv8_dtype_size(spec->v_dtype) == 2;
    return (size_t)KV8_PREFILL_MMA_SHARED(variant->head_dim, variant->block_rows,
                                          variant->tile_keys, k_wide, v_wide);
}

int64_t kv8_decode_max_row_tiles(const kv8_attention_spec *spec) {
    const int64_t group = spec->num_qo_heads / spec->num_kv_heads;
    return spec->max_total_q * group / KV8_DECODE_ROWS + spec->max_batch + 1;
}
int32_t kv8_variant_row_tiles(const kv8_variant *variant, const kv8_attention_spec *spec) {
    const int64_t group = spec->num_qo_heads / spec->num_kv_heads;
    return (int32_t)kv8_ceil_div(spec->max_total_q * group,
                                 (int64_t)spec->max_batch * variant->block_rows);
}
