/* ops_kernels.h - the kernels behind the room's functions: one constant table per rung. Private to
 * ops.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_OPS_KERNELS_H
#define KV8_OPS_KERNELS_H

#include "ops_impl.h"

/* A rectangle of a job's output: weight rows [row_begin, row_end), activations
 * [x_begin, x_end). Any cut gives the same bits. */
typedef struct kv8_matmul_tile {
    int64_t row_begin, row_end;
    int64_t x_begin, x_end;
} kv8_matmul_tile;

/* Sizes that every rung shares. */
enum {
    KV8_MATMUL_ROWS = 8,     /* weight rows a dot kernel takes at once: 8, or a divisor */
    KV8_MATMUL_X = 3,        /* activation rows it takes at once, at most */
    KV8_MATMUL_CHUNK = 1024, /* columns summed in vector lanes before the lanes are added up */
};

typedef void (*kv8_matmul_kernel)(const kv8_matmul_job *job, const kv8_matmul_tile *tile);
typedef void (*kv8_rmsnorm_kernel)(const float *x, size_t dim, const void *gain,
                                   kv8_dtype gain_dtype, float eps, float *y);
typedef void (*kv8_swiglu_kernel)(const float *u, size_t n, float alpha, float limit, float *y);
typedef void (*kv8_axpy_kernel)(float a, const float *x, size_t n, float *y);

typedef struct kv8_ops_kernels {
    kv8_matmul_kernel matmul;
    kv8_rmsnorm_kernel rmsnorm; /* one row */
    kv8_swiglu_kernel swiglu;
    kv8_axpy_kernel axpy;
} kv8_ops_kernels;

#define KV8_OPS_KERNELS(isa, rung) extern const kv8_ops_kernels kv8_ops_kernels_##rung;
#include "ops_kernels.inc"
#undef KV8_OPS_KERNELS

/* The table of a resolved rung; a rung without its own uses the one below. */
const kv8_ops_kernels *kv8_ops_kernels_get(kv8_isa isa);

#endif
