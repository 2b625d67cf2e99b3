/* prefill_mma.c - which of the prefill kernels on mma.sync does what a spec asks: the host's list
 * of cuda/prefill/sm80/prefill_mma_kernels.inc.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_device.h"

/* One row of prefill_mma_kernels.inc. */
typedef struct kv8_prefill_mma_row {
    const char *name;
    bool bf16; /* arithmetic of the products */
    int32_t head_dim, row_tiles, keys, num_warps;
} kv8_prefill_mma_row;

static const kv8_prefill_mma_row rows[] = {
#define KV8_PREFILL_MMA_F16(name, head_dim, row_tiles, keys, warps, blocks) \
    {#name, false, head_dim, row_tiles, keys, warps},
#define KV8_PREFILL_MMA_BF16(name, head_dim, row_tiles, keys, warps, blocks) \
    {#name, true, head_dim, row_tiles, keys, warps},
#include "prefill/sm80/prefill_mma_kernels.inc"
};
enum { NUM_ROWS = sizeof rows / sizeof rows[0], DIM_STEP = 16 };

static bool is_wide(kv8_dtype dtype) {
    return dtype == KV8_BF16 || dtype == KV8_F16;
}

/* Both products in one arithmetic, which must hold Q, K and V as they are. */
static kv8_status check_dtypes(const kv8_attention_spec *spec, bool *bf16_out) {
    const kv8_dtype q = spec->q_dtype, k = spec->k_dtype, v = spec->v_dtype;
    if (q != KV8_BF16 && q != KV8_F16)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "prefill: q_dtype is %s; supported: bf16, f16",
                        kv8_dtype_name(q));
    if (k == KV8_F32 || v == KV8_F32)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "prefill: k_dtype is %s, v_dtype %s; supported: all but f32",
                        kv8_dtype_name(k), kv8_dtype_name(v));
    *bf16_out = k == KV8_BF16 || v == KV8_BF16;
    if (*bf16_out && (q == KV8_F16 || k == KV8_F16 || v == KV8_F16))
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "prefill: q_dtype is %s, k_dtype %s, v_dtype %s; supported: f16 or bf16 "
                        "among them, not both, but for bf16 Q",
                        kv8_dtype_name(q), kv8_dtype_name(k), kv8_dtype_name(v));
    return KV8_OK;
}

kv8_status kv8_prefill_mma_choose(const kv8_attention_spec *spec, kv8_prefill_kernel *kernel_out) {
    const int32_t head_dim = spec->head_dim, v_head_dim = kv8_spec_v_head_dim(spec);
    bool bf16 = false;
    KV8_TRY(check_dtypes(spec, &bf16));
    for (int i = 0; i < NUM_ROWS && head_dim % DIM_STEP == 0 && v_head_dim % DIM_STEP == 0; i++) {
        const kv8_prefill_mma_row *const r = &rows[i];
        if (r->bf16 != bf16 || r->head_dim < head_dim || r->head_dim < v_head_dim) continue;
        const int32_t block_rows = 16 * r->row_tiles * r->num_warps;
        const bool k_wide = is_wide(spec->k_dtype), v_wide = is_wide(spec->v_dtype);
        *kernel_out = (kv8_prefill_kernel){.name = r->name,
                                           .head_dim = r->head_dim,
                                           .block_rows = block_rows,
                                           .num_threads = 32 * r->num_warps,
                                           .shared_bytes = (size_t)KV8_PREFILL_MMA_SHARED(
                                               r->head_dim, block_rows, r->keys, k_wide, v_wide)};
        return KV8_OK;
    }
    return kv8_fail(KV8_ERR_UNSUPPORTED,
                    "prefill: head_dim is %d, v_head_dim %d; supported: multiples of %d up to 256",
                    head_dim, v_head_dim, (int)DIM_STEP);
}
