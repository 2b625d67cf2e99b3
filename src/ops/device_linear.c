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

/* A shape of cuda/linear_wgmma_kernels.inc. */
typedef struct wgmma_shape {
    const char *name;
    int32_t groups, tokens;
    int32_t blocks; /* that a multiprocessor holds */
    size_t bytes;
} wgmma_shape;
static const wgmma_shape wgmma_shapes[KV8_NUM_LINEAR_WGMMA] = {
#define KV8_LINEAR_WGMMA(name, groups, tokens, stages, blocks) \
    {#name, groups, tokens, blocks, KV8_LINEAR_WGMMA_BYTES(groups, tokens, stages)},
#include "linear_wgmma_kernels.inc"
};

/* A shape of cuda/linear_pairs_kernels.inc. */
typedef struct pairs_shape {
    const char *name;
    int32_t rows;
    bool is_tall, leaves_maxima;
} pairs_shape;
static const pairs_shape pairs_shapes[KV8_NUM_LINEAR_PAIRS] = {
#define KV8_LINEAR_PAIRS(name, rows, is_tall, maxima) {#name, rows, is_tall, maxima},
#include "linear_pairs_kernels.inc"
};
static kv8_launch launch_of_pairs(const pairs_shape *shape, int32_t num_pairs) {
    return (kv8_launch){.grid = {2 * (uint32_t)num_pairs},
                        .block = {KV8_LINEAR_PAIRS_THREADS},
                        .cluster = {2},
                        .dynamic_bytes = (size_t)KV8_LINEAR_PAIRS_BYTES(shape->rows),
                        .overlaps_previous = true};
}

/* A multiprocessor holds one block of the largest shape and of the others: num_pairs is of all. */
static kv8_status get_pairs(kv8_linear_kernels *kernels_out, kv8_device *device) {
    for (int i = 0; i < KV8_NUM_LINEAR_PAIRS; i++)
        KV8_TRY(kv8_kernel_get(&kernels_out->pairs[i], device, pairs_shapes[i].name,
                               sizeof(kv8_linear_pairs_args),
                               (size_t)KV8_LINEAR_PAIRS_BYTES(pairs_shapes[i].rows)));
    const kv8_launch one = launch_of_pairs(&pairs_shapes[0], 1);
    return kv8_kernel_max_clusters(&kernels_out->pairs[0], &one, &kernels_out->num_pairs);
}

kv8_status kv8_linear_kernels_get(kv8_linear_kernels *kernels_out, kv8_device *device) {
    const size_t bytes = sizeof(kv8_linear_args);
    KV8_TRY(kv8_kernel_get(&kernels_out->n8, device, "kv8_linear_f16_n8__sm80", bytes, 0));
    KV8_TRY(kv8_kernel_get(&kernels_out->n16, device, "kv8_linear_f16_n16__sm80", bytes, 0));
    for (int i = 0; i < KV8_NUM_LINEAR_TILES; i++)
        KV8_TRY(
            kv8_kernel_get(&kernels_out->tiles[i], device, shapes[i].name, bytes, shapes[i].bytes));
    kernels_out->has_wgmma = kv8_kernel_exists(device, wgmma_shapes[0].name);
    for (int i = 0; i < KV8_NUM_LINEAR_WGMMA && kernels_out->has_wgmma; i++)
        KV8_TRY(kv8_kernel_get(&kernels_out->wgmma[i], device, wgmma_shapes[i].name,
                               sizeof(kv8_linear_mapped_args), wgmma_shapes[i].bytes));
    return kernels_out->has_wgmma ? get_pairs(kernels_out, device) : KV8_OK;
}

static int64_t num_tiles(const kv8_linear_args *args, int32_t rows, int32_t tokens) {
    return kv8_ceil_div(args->rows, rows) * kv8_ceil_div(args->n, tokens);
}

/* The largest tiles that still give every multiprocessor one. n32 and n64 share out the columns
 * among the same warps: in one order. */
static int choose_tile(const kv8_device_ops *ops, const kv8_linear_args *args) {
    const int32_t num_sms = kv8_device_get_info(ops->device)->num_sms;
    if (args->n <= 32) return LINEAR_kv8_linear_f16_n32__sm80;
    if (args->n <= 64 || ops->has_fixed_order) return LINEAR_kv8_linear_f16_n64__sm80;
    const int large = LINEAR_kv8_linear_f16_t128__sm80;
    return num_tiles(args, shapes[large].rows, shapes[large].tokens) >= num_sms
               ? large
               : LINEAR_kv8_linear_f16_t64__sm80;
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

_Static_assert((int)KV8_DEVICE_MAXIMA_ROWS == (int)KV8_LINEAR_HEAD, "maxima are of heads");

static kv8_linear_args product_of(const kv8_device_linear *w, const void *x, int32_t n, void *y,
                                  kv8_dtype y_dtype) {
    return (kv8_linear_args){.w = w->w,
                             .bias = w->bias,
                             .x = x,
                             .y = y,
                             .rows = w->rows,
                             .cols = w->cols,
                             .n = n,
                             .is_f32 = y_dtype == KV8_F32};
}

/* --- launches --- */

static kv8_status run_stream(const kv8_device_ops *ops, kv8_stream *stream,
                             const kv8_linear_args *args) {
    const kv8_launch launch = {.grid = {(uint32_t)kv8_ceil_div(args->rows, KV8_LINEAR_STREAM_ROWS)},
                               .block = {KV8_LINEAR_STREAM_THREADS},
                               .overlaps_previous = kv8_stream_overlaps(stream, args->n)};
    const kv8_kernel *const kernel = args->n <= 8 ? &ops->linear.n8 : &ops->linear.n16;
    return kv8_kernel_launch(kernel, stream, &launch, args);
}

static kv8_status run_tiles(const kv8_device_ops *ops, kv8_stream *stream,
                            const kv8_linear_args *args) {
    const int tile = choose_tile(ops, args);
    const tile_shape *const shape = &shapes[tile];
    const kv8_launch launch = {.grid = {(uint32_t)num_tiles(args, shape->rows, shape->tokens)},
                               .block = {KV8_LINEAR_TILE_THREADS},
                               .dynamic_bytes = shape->bytes,
                               .overlaps_previous = kv8_stream_overlaps(stream, args->n)};
    return kv8_kernel_launch(&ops->linear.tiles[tile], stream, &launch, args);
}

/* Blocks that share the columns of a tile: as many as shorten the longest queue of a place, each of
 * them for the cost of its meeting with the others. Powers of two: the GPU seats other clusters
 * badly. */
static int32_t choose_splits(int64_t tiles, int32_t cols, int64_t places) {
    enum { LEAST_COLS = 256 };
    int32_t best = 1;
    double least = (double)kv8_ceil_div(tiles, places);
    for (int32_t splits = 2; splits <= KV8_LINEAR_MAX_SPLITS; splits *= 2) {
        if ((int64_t)splits * LEAST_COLS > cols) break;
        const double waves = (double)kv8_ceil_div(tiles * splits, places) / splits;
        const double cost = waves * (1 + 0.12 * (splits - 1));
        if (cost < least) {
            least = cost;
            best = splits;
        }
    }
    return best;
}

static int64_t num_wgmma_tiles(const kv8_linear_args *args, int idx) {
    const wgmma_shape *const shape = &wgmma_shapes[idx];
    return num_tiles(args, shape->groups * KV8_LINEAR_WGMMA_ROWS, shape->tokens);
}

/* One tile of tokens while there are few; of up to 128 by 128 rows where those are rounds of tiles,
 * which ask less of the L2. */
static int choose_wgmma(const kv8_linear_args *args, int32_t num_sms) {
    const int wide = LINEAR_kv8_linear_f16_wgmma_n128__sm90a;
    const int usual = LINEAR_kv8_linear_f16_wgmma_t128__sm90a;
    for (int idx = 0; idx < wide; idx++)
        if (args->n <= wgmma_shapes[idx].tokens) return idx;
    const bool is_long =
        num_wgmma_tiles(args, usual) > (int64_t)num_sms * wgmma_shapes[usual].blocks;
    return args->n <= wgmma_shapes[wide].tokens && !is_long ? wide : usual;
}

/* What a product of one row is split into, and under a fixed order of any number: the splits are
 * all in which the shapes' orders differ. Pairs split nothing. */
static int32_t splits_of_one_row(const kv8_linear_args *args, int32_t num_sms) {
    const wgmma_shape *const shape = &wgmma_shapes[0];
    const int64_t tiles = kv8_ceil_div(args->rows, shape->groups * KV8_LINEAR_WGMMA_ROWS);
    return choose_splits(tiles, args->cols, (int64_t)num_sms * shape->blocks);
}

static kv8_status run_wgmma(const kv8_device_ops *ops, kv8_stream *stream,
                            const kv8_linear_args *args) {
    const int32_t num_sms = kv8_device_get_info(ops->device)->num_sms;
    const int idx = choose_wgmma(args, num_sms);
    const wgmma_shape *const shape = &wgmma_shapes[idx];
    const int32_t rows = shape->groups * KV8_LINEAR_WGMMA_ROWS;
    const int64_t tiles = num_wgmma_tiles(args, idx), stages = kv8_ceil_div(args->cols, 64);
    const int32_t splits = ops->has_fixed_order
                               ? splits_of_one_row(args, num_sms)
                               : choose_splits(tiles, args->cols, (int64_t)num_sms * shape->blocks);
    kv8_linear_mapped_args mapped = {.product = *args,
                                     .split_stages = (int32_t)kv8_ceil_div(stages, splits)};
    KV8_TRY(kv8_tensor_map_make(mapped.w_map, ops->device, args->w, false, args->rows, args->cols,
                                rows));
    KV8_TRY(kv8_tensor_map_make(mapped.x_map, ops->device, args->x, false, args->n, args->cols,
                                KV8_LINEAR_WGMMA_BOX(args->n, shape->tokens)));
    const kv8_launch launch = {.grid = {(uint32_t)(tiles * splits)},
                               .block = {(uint32_t)KV8_LINEAR_WGMMA_THREADS(shape->groups)},
                               .cluster = {(uint32_t)splits},
                               .dynamic_bytes = shape->bytes,
                               .overlaps_previous = kv8_stream_overlaps(stream, args->n)};
    return kv8_kernel_launch(&ops->linear.wgmma[idx], stream, &launch, &mapped);
}

/* A product by pairs of blocks: its shape, its tiles and how many of them are whole. `queue`: rows
 * of w that a block multiplies one after another, by 128 tokens. */
typedef struct pairs_plan {
    int32_t idx, num_tiles, num_whole;
    int64_t queue;
} pairs_plan;

/* The tiles past the last whole round are cut in two where a pair takes one half at most: half a
 * round. Halves of heads are cut for f32 that is not rotated alone. */
static pairs_plan share_out(const kv8_linear_args *args, int idx, int32_t num_pairs,
                            bool may_halve_heads) {
    const int32_t rows = pairs_shapes[idx].rows;
    const int32_t tiles = (int32_t)num_tiles(args, rows, 2 * KV8_LINEAR_PAIRS_TOKENS);
    const int32_t rest = tiles % num_pairs;
    const bool may_cut = may_halve_heads || rows / 2 % KV8_LINEAR_HEAD == 0;
    const bool cuts = may_cut && 2 * rest <= num_pairs;
    const int64_t halves = 2 * (tiles / num_pairs) + (rest == 0 ? 0 : cuts ? 1 : 2);
    return (pairs_plan){.idx = idx,
                        .num_tiles = tiles,
                        .num_whole = cuts ? tiles - rest : tiles,
                        .queue = halves * rows / 2};
}

/* One tile of tokens, more than half of it: tall tiles, where they keep the pairs busy. */
static bool takes_tall_pairs(const kv8_linear_args *args, int32_t num_pairs, pairs_plan *plan_out) {
    const int idx = args->maxima == NULL ? LINEAR_kv8_linear_f16_pairs_tall__sm90a
                                         : LINEAR_kv8_linear_f16_pairs_tall_maxima__sm90a;
    if (args->n <= KV8_LINEAR_PAIRS_TOKENS / 2) return false;
    const int64_t tiles = kv8_ceil_div(args->rows, 2 * pairs_shapes[idx].rows);
    *plan_out = (pairs_plan){.idx = idx, .num_tiles = (int32_t)tiles};
    return 8 * tiles > 7 * kv8_ceil_div(tiles, num_pairs) * num_pairs;
}

/* Many tokens, and rows of y that the copy engine takes: pairs, where their queue is no longer than
 * that of linear_wgmma.cu's tiles. */
static bool takes_pairs(const kv8_device_ops *ops, const kv8_linear_args *args,
                        pairs_plan *plan_out) {
    const bool may_halve_heads = args->is_f32 && args->rotated_rows == 0;
    const int32_t num_pairs = ops->linear.num_pairs;
    const int32_t num_sms = kv8_device_get_info(ops->device)->num_sms;
    if (num_pairs == 0 || args->rows % 8 != 0) return false;
    if (ops->has_fixed_order && splits_of_one_row(args, num_sms) > 1) return false;
    if (args->n <= KV8_LINEAR_PAIRS_TOKENS) return takes_tall_pairs(args, num_pairs, plan_out);
    plan_out->queue = INT64_MAX;
    for (int idx = 0; idx < KV8_NUM_LINEAR_PAIRS; idx++) {
        const pairs_shape *const shape = &pairs_shapes[idx];
        if (shape->is_tall || shape->leaves_maxima != (args->maxima != NULL)) continue;
        const pairs_plan plan = share_out(args, idx, num_pairs, may_halve_heads);
        if (plan.queue < plan_out->queue) *plan_out = plan;
    }
    const int usual = LINEAR_kv8_linear_f16_wgmma_t128__sm90a;
    const int64_t tiles = num_wgmma_tiles(args, usual);
    const int32_t splits =
        tiles < num_sms
            ? choose_splits(tiles, args->cols, (int64_t)num_sms * wgmma_shapes[usual].blocks)
            : 1;
    const int64_t rows = wgmma_shapes[usual].groups * KV8_LINEAR_WGMMA_ROWS;
    return plan_out->queue * splits <= kv8_ceil_div(tiles * splits, num_sms) * rows;
}

static kv8_status run_pairs(const kv8_device_ops *ops, kv8_stream *stream,
                            const kv8_linear_args *args, const pairs_plan *plan) {
    const pairs_shape *const shape = &pairs_shapes[plan->idx];
    kv8_linear_pairs_args a = {
        .product = *args, .num_tiles = plan->num_tiles, .num_whole = plan->num_whole};
    KV8_TRY(kv8_tensor_map_make(a.w_map, ops->device, args->w, false, args->rows, args->cols,
                                shape->rows / 2));
    KV8_TRY(kv8_tensor_map_make(a.x_map, ops->device, args->x, false, args->n, args->cols,
                                KV8_LINEAR_PAIRS_BOX));
    KV8_TRY(kv8_tensor_map_make(a.y_map, ops->device, args->y, args->is_f32, args->n, args->rows,
                                KV8_LINEAR_PAIRS_BOX));
    if (args->rotated_rows > 0)
        KV8_TRY(kv8_tensor_map_make(a.rotated_map, ops->device, args->rotated, false, args->n,
                                    args->rotated_rows, KV8_LINEAR_PAIRS_BOX));
    const kv8_launch launch = launch_of_pairs(shape, ops->linear.num_pairs);
    return kv8_kernel_launch(&ops->linear.pairs[plan->idx], stream, &launch, &a);
}

/* *has_maxima_out, if not NULL: as of kv8_device_linear_maxima. */
static kv8_status run_product(const kv8_device_ops *ops, kv8_stream *stream,
                              const kv8_linear_args *args, bool *has_maxima_out) {
    KV8_RANGE("dense");
    if (has_maxima_out != NULL) *has_maxima_out = false;
    if (args->n <= KV8_LINEAR_STREAM_MAX_N && !ops->has_fixed_order)
        return run_stream(ops, stream, args);
    pairs_plan plan;
    if (takes_pairs(ops, args, &plan)) {
        if (has_maxima_out != NULL) *has_maxima_out = args->maxima != NULL;
        return run_pairs(ops, stream, args, &plan);
    }
    return ops->linear.has_wgmma ? run_wgmma(ops, stream, args) : run_tiles(ops, stream, args);
}

kv8_status kv8_device_linear_run(const kv8_device_ops *ops, kv8_stream *stream,
                                 const kv8_device_linear *w, const void *x, int32_t n, void *y,
                                 kv8_dtype y_dtype, bool accumulate) {
    KV8_REQUIRE(ops, stream, w, x, y);
    KV8_TRY(check(w, x, n, y_dtype, accumulate));
    if (n == 0) return KV8_OK;
    kv8_linear_args args = product_of(w, x, n, y, y_dtype);
    args.accumulate = accumulate;
    return run_product(ops, stream, &args, NULL);
}

kv8_status kv8_device_linear_maxima(const kv8_device_ops *ops, kv8_stream *stream,
                                    const kv8_device_linear *w, const void *x, int32_t n, float *y,
                                    float *maxima, bool *has_maxima_out) {
    KV8_REQUIRE(ops, stream, w, x, y, maxima, has_maxima_out);
    *has_maxima_out = false;
    KV8_TRY(check(w, x, n, KV8_F32, false));
    if (n == 0) return KV8_OK;
    kv8_linear_args args = product_of(w, x, n, y, KV8_F32);
    args.maxima = w->rows % KV8_DEVICE_MAXIMA_ROWS == 0 ? maxima : NULL;
    return run_product(ops, stream, &args, has_maxima_out);
}

/* --- with the norm before it and the rotation behind --- */

static kv8_status check_rotation(const kv8_device_norm_linear *args) {
    if (args->num_rotated == 0) return KV8_OK;
    KV8_REQUIRE(args->cos_sin, args->rotated);
    if (args->rotated_dtype != KV8_BF16 && args->rotated_dtype != KV8_F16)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "product: rotated heads of %s, on a GPU they are bf16 or f16",
                        kv8_dtype_name(args->rotated_dtype));
    if (args->head_dim < 16 || args->head_dim % 16 != 0)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "product: heads of %d to rotate, on a GPU it must be a multiple of 16",
                        args->head_dim);
    if (args->num_rotated < 0 || args->num_rotated > args->w.rows / args->head_dim)
        return kv8_fail(KV8_ERR_INVALID, "product: %d heads of %d to rotate in %d rows",
                        args->num_rotated, args->head_dim, args->w.rows);
    return KV8_OK;
}

static void rotate_heads(kv8_linear_args *product, const kv8_device_norm_linear *args) {
    product->half_dim = args->head_dim / 2;
    product->rotated_rows = args->num_rotated * args->head_dim;
    product->rotated_is_f16 = args->rotated_dtype == KV8_F16;
    product->rotated = args->rotated;
    product->cos_sin = args->cos_sin;
}

/* Does the product's kernel rotate these heads as their sums leave? */
static bool product_rotates(const kv8_device_ops *ops, const kv8_device_norm_linear *args,
                            int32_t n) {
    if (n <= KV8_LINEAR_STREAM_MAX_N && !ops->has_fixed_order) return true;
    return ops->linear.has_wgmma && args->head_dim == KV8_LINEAR_HEAD;
}

kv8_status kv8_device_norm_linear_run(const kv8_device_ops *ops, kv8_stream *stream,
                                      const kv8_device_norm_linear *args, int32_t n) {
    KV8_REQUIRE(ops, stream, args);
    KV8_REQUIRE(args->w.w, args->x, args->gain, args->normed, args->y);
    KV8_TRY(check(&args->w, args->x, n, args->y_dtype, false));
    KV8_TRY(check_rotation(args));
    if (n == 0) return KV8_OK;
    if (!args->is_normed)
        KV8_TRY(kv8_device_rmsnorm(ops, stream, args->x, args->gain, args->eps, n, args->w.cols,
                                   NULL, args->normed));
    kv8_linear_args product = product_of(&args->w, args->normed, n, args->y, args->y_dtype);
    const bool rotates = args->num_rotated > 0 && product_rotates(ops, args, n);
    if (rotates) rotate_heads(&product, args);
    KV8_TRY(run_product(ops, stream, &product, NULL));
    if (args->num_rotated == 0 || rotates) return KV8_OK;
    return kv8_device_rope(ops, stream, args->cos_sin, n, args->num_rotated, args->head_dim,
                           args->y, args->y_dtype, args->w.rows, args->rotated, args->rotated_dtype,
                           (int64_t)args->num_rotated * args->head_dim);
}
