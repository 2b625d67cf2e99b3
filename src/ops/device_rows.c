/* device_rows.c - what happens to each token's row between the products, the host's part: checks
 * and launches. What the kernels compute is in cuda/rowwise.cu.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_ops.h"
#include "device_ops_state.h"
#include "rowwise_args.h"

kv8_status kv8_device_check_rows(const char *what, int32_t n, const char *cols_name, int32_t cols,
                                 int32_t multiple) {
    if (n < 0 || n > KV8_DEVICE_MAX_ROWS)
        return kv8_fail(KV8_ERR_INVALID, "%s: %d rows, must be 0 to %d", what, n,
                        KV8_DEVICE_MAX_ROWS);
    if (cols < 1) return kv8_fail(KV8_ERR_INVALID, "%s: %s is %d", what, cols_name, cols);
    if (cols % multiple != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s: %s is %d, on a GPU it must be a multiple of %d",
                        what, cols_name, cols, multiple);
    return KV8_OK;
}

/* One block a row. */
static kv8_status launch_rows(const kv8_kernel *kernel, kv8_stream *stream, int64_t num_blocks,
                              const void *args) {
    if (num_blocks == 0) return KV8_OK;
    KV8_RANGE("activations and norms");
    const kv8_launch launch = {.grid = {(uint32_t)num_blocks},
                               .block = {KV8_ROWWISE_THREADS},
                               .overlaps_previous = kv8_stream_overlaps(stream, num_blocks)};
    return kv8_kernel_launch(kernel, stream, &launch, args);
}

kv8_status kv8_device_embed(const kv8_device_ops *ops, kv8_stream *stream, const void *table,
                            const int32_t *ids, int32_t n, int32_t hidden, float *residual) {
    KV8_REQUIRE(ops, stream, table, ids, residual);
    KV8_TRY(kv8_device_check_rows("embedding", n, "hidden", hidden, KV8_DEVICE_COLS_MULTIPLE));
    const kv8_embed_args args = {
        .table = table, .ids = ids, .residual = residual, .hidden = hidden};
    return launch_rows(&ops->embed, stream, n, &args);
}

kv8_status kv8_device_gather(const kv8_device_ops *ops, kv8_stream *stream, const void *x,
                             const int32_t *row_ids, int32_t n, int32_t row_bytes, void *out) {
    enum { WORD_BYTES = 16 };
    KV8_REQUIRE(ops, stream, x, row_ids, out);
    KV8_TRY(kv8_device_check_rows("gather", n, "row_bytes", row_bytes, WORD_BYTES));
    const kv8_gather_args args = {
        .x = x, .row_ids = row_ids, .out = out, .row_words = row_bytes / WORD_BYTES};
    return launch_rows(&ops->gather, stream, n, &args);
}

kv8_status kv8_device_rmsnorm(const kv8_device_ops *ops, kv8_stream *stream, const float *x,
                              const void *gain, float eps, int32_t n, int32_t hidden,
                              const int32_t *row_ids, void *out) {
    KV8_REQUIRE(ops, stream, x, gain, out);
    KV8_TRY(kv8_device_check_rows("norm", n, "hidden", hidden, KV8_DEVICE_COLS_MULTIPLE));
    const kv8_rmsnorm_args args = {
        .x = x, .gain = gain, .row_ids = row_ids, .out = out, .hidden = hidden, .eps = eps};
    return launch_rows(&ops->rmsnorm, stream, n, &args);
}

kv8_status kv8_device_rope_angles(const kv8_device_ops *ops, kv8_stream *stream,
                                  const int32_t *positions, int32_t n, const float *inv_freq,
                                  float factor, int32_t head_dim, float *cos_sin) {
    KV8_REQUIRE(ops, stream, positions, inv_freq, cos_sin);
    KV8_TRY(kv8_device_check_rows("rope", n, "head_dim", head_dim, 2));
    const kv8_rope_angles_args args = {.positions = positions,
                                       .inv_freq = inv_freq,
                                       .cos_sin = cos_sin,
                                       .factor = factor,
                                       .n = n,
                                       .half_dim = head_dim / 2};
    const int64_t threads = (int64_t)n * args.half_dim;
    return launch_rows(&ops->rope_angles, stream, kv8_ceil_div(threads, KV8_ROWWISE_THREADS),
                       &args);
}

kv8_status kv8_device_rope(const kv8_device_ops *ops, kv8_stream *stream, const float *cos_sin,
                           int32_t n, int32_t num_heads, int32_t head_dim, const void *x,
                           kv8_dtype x_dtype, int64_t x_stride_row, void *y, kv8_dtype y_dtype,
                           int64_t y_stride_row) {
    KV8_REQUIRE(ops, stream, cos_sin, x, y);
    KV8_TRY(kv8_device_check_rows("rope", n, "head_dim", head_dim, 2));
    if (x_dtype != KV8_BF16 && x_dtype != KV8_F32)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "rope: heads of %s, on a GPU they are bf16 or f32",
                        kv8_dtype_name(x_dtype));
    if (y_dtype != KV8_BF16 && y_dtype != KV8_F16)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "rope: rotated heads of %s, on a GPU they are bf16 or f16",
                        kv8_dtype_name(y_dtype));
    const kv8_rope_args args = {.cos_sin = cos_sin,
                                .x = x,
                                .y = y,
                                .x_stride_row = x_stride_row,
                                .y_stride_row = y_stride_row,
                                .num_heads = num_heads,
                                .half_dim = head_dim / 2,
                                .y_is_f16 = y_dtype == KV8_F16};
    return launch_rows(x_dtype == KV8_F32 ? &ops->rope_f32 : &ops->rope_bf16, stream, n, &args);
}

kv8_status kv8_device_to_f16(const kv8_device_ops *ops, kv8_stream *stream, void *codes, int64_t n,
                             int32_t tensor, uint64_t *first_bad) {
    enum { MOST_BLOCKS = 4096 };
    KV8_REQUIRE(ops, stream, codes, first_bad);
    if (n % KV8_DEVICE_COLS_MULTIPLE != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "%lld weights to narrow, on a GPU it must be a multiple of %d",
                        (long long)n, (int)KV8_DEVICE_COLS_MULTIPLE);
    const kv8_to_f16_args args = {.codes = codes, .n = n, .tensor = tensor, .first_bad = first_bad};
    const int64_t blocks = kv8_ceil_div(n, KV8_DEVICE_COLS_MULTIPLE * KV8_ROWWISE_THREADS);
    const kv8_launch launch = {.grid = {(uint32_t)kv8_min_i64(blocks, MOST_BLOCKS)},
                               .block = {KV8_ROWWISE_THREADS}};
    return n == 0 ? KV8_OK : kv8_kernel_launch(&ops->to_f16, stream, &launch, &args);
}

kv8_bad_weight kv8_device_bad_weight(uint64_t first_bad) {
    if (first_bad == UINT64_MAX) return (kv8_bad_weight){.tensor = -1};
    return (kv8_bad_weight){
        .tensor = (int32_t)(first_bad >> KV8_TO_F16_ELEMENT_BITS),
        .element = (int64_t)(first_bad & ((UINT64_C(1) << KV8_TO_F16_ELEMENT_BITS) - 1))};
}
