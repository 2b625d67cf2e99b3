/* device_linear.c - dense products on a GPU, the host's part: which kernel takes a product, and its
 * launch.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_ops.h"
#include "device_ops_state.h"

/* A shape of cuda/linear_kernels.inc. */
typedef struct tile_shape {
    const char *name;
    int32_t rows, tokens;
    size_t bytes; /* of shared memory */
} tile_shape;
static const tile_shape shapes[KV8_NUM_LINEAR_TILES] = {
#define KV8_LINEAR_TILE(name, rows, tokens, ...) \
    {#name, rows, tokens, KV8_LINEAR_TILE_BYTES(rows, tokens, __VA_ARGS__)},
#include "linear_kernels.inc"
};

kv8_status kv8_linear_kernels_get(kv8_linear_kernels *kernels_out, kv8_device *device) {
    const size_t bytes = sizeof(kv8_linear_args);
    KV8_TRY(kv8_kernel_get(&kernels_out->n8, device, "kv8_linear_bf16_n8__sm80", bytes, 0));
    KV8_TRY(kv8_kernel_get(&kernels_out->n16, device, "kv8_linear_bf16_n16__sm80", bytes, 0));
    for (int i = 0; i < KV8_NUM_LINEAR_TILES; i++)
        KV8_TRY(
            kv8_kernel_get(&kernels_out->tiles[i], device, shapes[i].name, bytes, shapes[i].bytes));
    return KV8_OK;
}

static int64_t num_tiles(const tile_shape *shape, const kv8_device_linear *w, int32_t n) {
    return kv8_ceil_div(w->rows, shape->rows) * kv8_ceil_div(n, shape->tokens);
}

/* The largest tiles that still give every multiprocessor one. */
static int choose_tile(const kv8_device_linear *w, int32_t n, int32_t num_sms) {
    if (n <= 32) return LINEAR_kv8_linear_bf16_n32__sm80;
    if (n <= 64) return LINEAR_kv8_linear_bf16_n64__sm80;
    const int large = LINEAR_kv8_linear_bf16_t128__sm80;
    return num_tiles(&shapes[large], w, n) >= num_sms ? large : LINEAR_kv8_linear_bf16_t64__sm80;
}

static kv8_status check(const kv8_device_linear *w, const void *x, int32_t n, kv8_dtype y_dtype,
                        bool accumulate) {
    KV8_TRY(kv8_device_check_rows("product", n, "cols", w->cols, KV8_DEVICE_COLS_MULTIPLE));
    if (w->rows < 1) return kv8_fail(KV8_ERR_INVALID, "product: rows is %d", w->rows);
    if (y_dtype != KV8_F32 && (y_dtype != KV8_BF16 || accumulate))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "product: %s %s, on a GPU %s", kv8_dtype_name(y_dtype),
                        accumulate ? "accumulates" : "comes out",
                        accumulate ? "f32 does" : "bf16 or f32 does");
    if ((uintptr_t)w->w % 16 != 0 || (uintptr_t)x % 16 != 0)
        return kv8_fail(KV8_ERR_INVALID, "product: %s is not aligned to 16 bytes",
                        (uintptr_t)x % 16 != 0 ? "x" : "w");
    return KV8_OK;
}

kv8_status kv8_device_linear_run(const kv8_device_ops *ops, kv8_stream *stream,
                                 const kv8_device_linear *w, const void *x, int32_t n, void *y,
                                 kv8_dtype y_dtype, bool accumulate) {
    KV8_REQUIRE(ops, stream, w, x, y);
    KV8_TRY(check(w, x, n, y_dtype, accumulate));
    if (n == 0) return KV8_OK;
    const kv8_linear_args args = {.w = w->w,
                                  .bias = w->bias,
                                  .x = x,
                                  .y = y,
                                  .rows = w->rows,
                                  .cols = w->cols,
                                  .n = n,
                                  .is_f32 = y_dtype == KV8_F32,
                                  .accumulate = accumulate};
    if (n <= KV8_LINEAR_STREAM_MAX_N) {
        const int64_t blocks = kv8_ceil_div(w->rows, KV8_LINEAR_STREAM_ROWS);
        const kv8_launch launch = {.grid = {(uint32_t)blocks},
                                   .block = {KV8_LINEAR_STREAM_THREADS}};
        return kv8_kernel_launch(n <= 8 ? &ops->linear.n8 : &ops->linear.n16, stream, &launch,
                                 &args);
    }
    const int tile = choose_tile(w, n, kv8_device_get_info(ops->device)->num_sms);
    const kv8_launch launch = {.grid = {(uint32_t)num_tiles(&shapes[tile], w, n)},
                               .block = {KV8_LINEAR_TILE_THREADS},
                               .dynamic_bytes = shapes[tile].bytes};
    return kv8_kernel_launch(&ops->linear.tiles[tile], stream, &launch, &args);
}
