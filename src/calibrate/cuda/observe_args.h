/* observe_args.h - the cells that an observer counts in, and the argument of the kernels that count
 * on a GPU, for C and CUDA. Every pointer of an argument is the device's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_OBSERVE_ARGS_H
#define KV8_OBSERVE_ARGS_H

#include <stdint.h>

#include <kv8/calibrate.h>

/* A head's sums: the histogram, what fits none of its bins, rows, then NaN and infinities by
 * channel. Its maxima: absmax by channel. */
enum {
    KV8_SUM_ZEROS = KV8_OBSERVE_BINS,
    KV8_SUM_NANS,
    KV8_SUM_INFS,
    KV8_SUM_ROWS,
    KV8_NUM_FIXED_SUMS
};
/* A bin is an f32's exponent and first three mantissa bits. */
enum {
    KV8_OBSERVE_BIN_SHIFT = 20,
    KV8_OBSERVE_FIRST_BIN = (KV8_OBSERVE_MIN_EXPONENT + 127) * KV8_OBSERVE_BINS_PER_OCTAVE,
    KV8_OBSERVE_MAX_HEAD_DIM = 576
};

/* K, V or Q of one layer. Strides count elements. */
typedef struct kv8_observe_plane {
    const void *source; /* [rows, heads, head_dim] */
    int64_t stride_row, stride_head;
    uint64_t *sums;           /* of head 0 */
    uint32_t *maxima;         /* f32 that are not negative, which order as their bits do */
    int32_t first, num_heads; /* those that are counted; 0: nothing is */
    int32_t head_dim;
    int32_t padding;
} kv8_observe_plane;

typedef struct kv8_observe_kernel_args {
    kv8_observe_plane plane[KV8_OBSERVED_COUNT];
    const float *cos_sin;       /* [rows, k head_dim]; NULL = K comes rotated */
    const uint32_t *is_on;      /* 0: nothing is counted */
    const int32_t *rows_in_use; /* NULL = max_rows */
    int32_t max_rows, rows_per_block;
    int32_t interleaved; /* cos_sin rotates neighbours */
    int32_t padding;
} kv8_observe_kernel_args;

enum { KV8_OBSERVE_THREADS = 256, KV8_OBSERVE_VECTOR = 8 };

#ifdef __cplusplus
static_assert(sizeof(kv8_observe_plane) == 56 && sizeof(kv8_observe_kernel_args) == 208, "layout");
#else
_Static_assert(sizeof(kv8_observe_plane) == 56 && sizeof(kv8_observe_kernel_args) == 208, "layout");
#endif

#endif
