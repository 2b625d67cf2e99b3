/* device_experts_kernels.h - the experts' kernels of a GPU and the form of each: threads, grid,
 * shared memory, by the shape and by what the GPU has. Private to ops.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_EXPERTS_KERNELS_H
#define KV8_DEVICE_EXPERTS_KERNELS_H

#include "device_experts.h"
#include "device_impl.h"
#include "experts_args.h"

enum { GATE_UP = KV8_EXPERTS_GATE_UP, DOWN = KV8_EXPERTS_DOWN, NUM_PARTS };
/* Streaming kernels by the most rows of an item: 8, or 16. */
enum { X8, X16, NUM_STREAMS };
/* Kernels on wgmma by the rows of a work. */
enum { X48, X96, X192, NUM_TILES };
/* Routers by columns by the rows of a cluster. */
enum { R16, R32, NUM_COLUMNS };

/* A kernel of one part and how it is launched. */
typedef struct kv8_experts_form {
    kv8_kernel kernel;
    kv8_launch launch; /* grid 0: this GPU has it not */
    int32_t x_tiles;   /* of a streaming kernel */
    int32_t rows;      /* of a kernel on wgmma, which takes kv8_experts_tiles_args; of a router */
} kv8_experts_form;

typedef struct kv8_experts_kernels {
    kv8_kernel load, choose, sort, route_few, combine, combine_norm;
    kv8_experts_form router; /* from the residual stream to the routing of few rows */
    kv8_experts_form router_columns[NUM_COLUMNS],
        router_rows;         /* the same of more, but for the sort */
    int32_t router_clusters; /* of router_columns[R16], that the GPU holds at once */
    kv8_experts_form streams[NUM_PARTS][NUM_STREAMS];
    kv8_experts_form whole[NUM_PARTS][NUM_STREAMS];  /* streams in which a warp has whole strips */
    kv8_experts_form scaled[NUM_PARTS][NUM_STREAMS]; /* those, with the sums of tiles */
    kv8_experts_form tiles[NUM_PARTS][NUM_TILES], packs[NUM_TILES];
} kv8_experts_kernels;

/* KV8_ERR_UNSUPPORTED names a size that the GPU's shared memory does not hold. */
kv8_status kv8_experts_kernels_get(kv8_experts_kernels *out, kv8_device *device,
                                   const kv8_experts_shape *shape);

/* Rows and columns of a part's weights; the strips of them at `data`. */
int32_t kv8_experts_part_rows(const kv8_experts_shape *shape, int part);
int32_t kv8_experts_part_cols(const kv8_experts_shape *shape, int part);
kv8_expert_strips kv8_experts_strips_of(const kv8_experts_shape *shape, int part, const void *data);
/* Of the rows that a streaming kernel has in shared memory. */
int32_t kv8_experts_x_row_bytes(const kv8_experts_shape *shape, int part);

#endif
