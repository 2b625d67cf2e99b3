/* device_experts.h - a mixture of MXFP4 experts on a GPU: the weights' layout in device memory,
 * routing, the two products around the gate, the weighted sum into the residual. Knows one layer's
 * weights at a time, never a layer's number or a tensor's name.
 *
 * Activations are f16, sums f32. Every sum has an order of its own that other rows, experts and
 * padding do not change: a row's bits depend on its own values, and on which of the room's kernels
 * the number of rows asks for. Work is put on the stream and nothing is waited for, so that all of
 * it may be recorded in a graph; which experts are read is decided on the device.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_EXPERTS_H
#define KV8_DEVICE_EXPERTS_H

#include "device_impl.h"

typedef struct kv8_experts_shape {
    int32_t num_experts; /* 1 to 255 */
    int32_t top_k;       /* 1 to 8 */
    int32_t hidden;      /* a multiple of 32, as is intermediate */
    int32_t intermediate;
    float alpha, limit; /* of the gate: kv8_swiglu_clamped */
} kv8_experts_shape;

/* --- weights --- */

/* gate_up: [2 * intermediate, hidden], gate and up interleaved; down: [hidden, intermediate]. */
typedef enum kv8_experts_part { KV8_EXPERTS_GATE_UP, KV8_EXPERTS_DOWN } kv8_experts_part;

/* Bytes of one expert's part of a layer in device memory, a multiple of 32; an expert follows the
 * one before. The shape has been taken by kv8_device_experts_create. */
size_t kv8_experts_part_bytes(const kv8_experts_shape *shape, kv8_experts_part part);

/* A checkpoint's tensors of consecutive experts, in device memory; blocks aligned to 16 bytes. */
typedef struct kv8_experts_source {
    const void *blocks; /* [count, rows, cols / 32, 16] e2m1, the first of two in the low bits */
    const void *scales; /* [count, rows, cols / 32] e8m0 */
    const void *bias;   /* [count, rows] bf16 */
    int32_t count;
} kv8_experts_source;

/* --- the kernels, for one shape and up to max_rows rows, on one device --- */

typedef struct kv8_device_experts kv8_device_experts;

/* KV8_ERR_INVALID names a size of the shape that the layout cannot hold, KV8_ERR_UNSUPPORTED one
 * that the GPU's shared memory cannot. */
kv8_status kv8_device_experts_create(kv8_device_experts **out, kv8_device *device,
                                     const kv8_experts_shape *shape, int32_t max_rows);
void kv8_device_experts_destroy(kv8_device_experts *experts);
/* From here on a row's bits depend on its own values alone, whatever the number of rows. */
void kv8_device_experts_fix_order(kv8_device_experts *experts);
/* Device memory that create takes. */
size_t kv8_device_experts_workspace_bytes(const kv8_experts_shape *shape, int32_t max_rows);

/* Writes the layout of from->count experts to `to`, aligned to 32 bytes. */
kv8_status kv8_device_experts_load(const kv8_device_experts *experts, kv8_stream *stream,
                                   kv8_experts_part part, const kv8_experts_source *from, void *to);

/* What the rows' norm and the router's product need. */
typedef struct kv8_experts_router {
    const void *w;           /* f16 [num_experts, hidden], aligned to 16 bytes */
    const void *bias, *gain; /* bf16 [num_experts], [hidden] */
    float eps;
    void *normed; /* f16 [n, hidden]: the normed rows */
} kv8_experts_router;

/* One layer. */
typedef struct kv8_experts_args {
    const void *gate_up, *down;       /* what load wrote, all experts */
    const kv8_experts_router *router; /* NULL: logits and x are there */
    const float *logits;              /* [n, num_experts] of the router */
    const void *x;                    /* f16 [n, hidden], aligned to 16 bytes */
    float *residual;                  /* [n, hidden], aligned to 16 bytes */
    const int32_t *live_rows; /* in device memory: rows from there on are padding; NULL: none */
    int32_t n;                /* 1 to max_rows; 0: nothing is done */
    int32_t seq_rows;         /* of the sequence that has most: rows of one choose alike */
    /* The norm of what comes out, of padding too, as kv8_device_rmsnorm's. */
    void *normed;          /* f16 [n, hidden], may be x; NULL: not wanted */
    const void *next_gain; /* bf16 [hidden] */
    float eps;
} kv8_experts_args;

/* residual += sum over the top_k best experts of weight * (down(gate(gate_up(x))) + bias). Padding
 * is read and written by nobody. */
kv8_status kv8_device_experts_run(kv8_device_experts *experts, kv8_stream *stream,
                                  const kv8_experts_args *args);

/* [num_experts + 1] in device memory: the first row of each expert in the last run. */
const int32_t *kv8_device_experts_get_offsets(const kv8_device_experts *experts);
/* Where the last run's routing lies: experts_args.h. */
struct kv8_experts_routing;
const struct kv8_experts_routing *kv8_device_experts_get_routing(const kv8_device_experts *experts);

#endif
