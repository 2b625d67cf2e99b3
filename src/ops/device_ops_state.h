/* device_ops_state.h - the kernels of ops on one device, as its files share them. Private to the
 * room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_OPS_STATE_H
#define KV8_DEVICE_OPS_STATE_H

#include "device_impl.h"
#include "linear_args.h"

/* Shapes of cuda/linear_kernels.inc. */
enum {
#define KV8_LINEAR_TILE(name, ...) LINEAR_##name,
#include "linear_kernels.inc"
    KV8_NUM_LINEAR_TILES
};
enum {
#define KV8_LINEAR_WGMMA(name, ...) LINEAR_##name,
#include "linear_wgmma_kernels.inc"
    KV8_NUM_LINEAR_WGMMA
};
enum {
#define KV8_LINEAR_PAIRS(name, ...) LINEAR_##name,
#include "linear_pairs_kernels.inc"
    KV8_NUM_LINEAR_PAIRS
};

typedef struct kv8_linear_kernels {
    kv8_kernel n8, n16;
    kv8_kernel tiles[KV8_NUM_LINEAR_TILES];
    bool has_wgmma;
    kv8_kernel wgmma[KV8_NUM_LINEAR_WGMMA];
    kv8_kernel pairs[KV8_NUM_LINEAR_PAIRS];
    int32_t num_pairs; /* of blocks of those kernels that the GPU holds */
} kv8_linear_kernels;
kv8_status kv8_linear_kernels_get(kv8_linear_kernels *kernels_out, kv8_device *device);

struct kv8_device_ops {
    kv8_device *device;
    kv8_kernel embed, gather, rmsnorm, rope_angles, rope_bf16, rope_f32, to_f16;
    kv8_linear_kernels linear;
    bool has_fixed_order; /* kv8_device_ops_fix_order */
};

/* Refuses a number of rows or columns that no kernel takes. */
kv8_status kv8_device_check_rows(const char *what, int32_t n, const char *cols_name, int32_t cols,
                                 int32_t multiple);

#endif
