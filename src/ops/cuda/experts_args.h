/* experts_args.h - MXFP4 experts in device memory: the layout of their weights, and the arguments
 * of the kernels, for C and CUDA. Every pointer is the device's.
 *
 * A strip is 16 output rows of one expert, contiguous: for every 64 inputs a tile of 512 bytes of
 * codes, then for every tile 32 bytes of scales, then 16 factors f32, then 16 biases bf16. At 2880
 * inputs that is 24576 bytes: one bulk copy. In a tile, lane (g = lane / 4, c = lane % 4) of a warp
 * owns 16 bytes: words {row g block 0, row g block 1, row g + 8 block 0, row g + 8 block 1}, a
 * block being 32 inputs, of which a word holds 2c, 2c + 1, then those 8, 16 and 24 further: the A
 * operand of two m16n8k16 products, or of wgmma's. How a word holds eight codes: mxfp4_strip.cuh. A
 * tile's scales: for every g four bytes in the order of the words.
 *
 * Strips of gate and up have gates in rows 0 to 7 and their ups in rows 8 to 15. A row's factor is
 * a power of two, and its scale bytes are those of the checkpoint plus what brings the largest to
 * 127: a weight is code * 2^(scale - 127) * factor. A row with a scale of 255 is NaN: its bias is.
 * Inputs that fill the last tile are 0. An expert has an even number of strips.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_EXPERTS_ARGS_H
#define KV8_EXPERTS_ARGS_H

#include <stdint.h>

enum {
    KV8_STRIP_ROWS = 16,
    KV8_TILE_COLS = 64,
    KV8_TILE_CODE_BYTES = 512,
    KV8_TILE_SCALE_BYTES = 32,
    KV8_STRIP_END_BYTES = 96, /* factors and biases */
    KV8_TOP_SCALE = 127,      /* the largest scale byte of every row */

    KV8_EXPERTS_MAX = 255, /* the byte 255 means: none */
    KV8_EXPERTS_MAX_TOP_K = 8,

    KV8_EXPERTS_LOAD_THREADS = 256,
    KV8_EXPERTS_CHOOSE_THREADS = 256, /* a warp a row */
    KV8_EXPERTS_SORT_THREADS = 1024,  /* of a block, one for every expert */
    KV8_EXPERTS_FEW_PLACES = 256,     /* rows * top_k, at most, of route_few */
    KV8_EXPERTS_COMBINE_THREADS = 256,

    /* The streaming kernels: a block has teams of four warps. */
    KV8_EXPERTS_TEAM_WARPS = 4,
    KV8_EXPERTS_TEAM_THREADS = 32 * KV8_EXPERTS_TEAM_WARPS,
    KV8_EXPERTS_MAX_TEAMS = 4,
    KV8_EXPERTS_ITEM_TILES = 2, /* of 8 rows, that an item has at most */
    /* In proportion, the time of a strip, and what each tile of its item adds. */
    KV8_EXPERTS_STRIP_COST = 5,
    KV8_EXPERTS_TILE_COST = 2,
    KV8_EXPERTS_CHUNK_TILES = 3,                            /* copied and multiplied at once */
    KV8_EXPERTS_STAGES = 3,                                 /* chunks of a warp's ring */
    KV8_EXPERTS_STAGE_BYTES = KV8_TILE_CODE_BYTES + 32 * 4, /* codes, and every lane's scales */
    /* Shared memory of a team: rings, and the sums of its warps. */
    KV8_EXPERTS_TEAM_BYTES = KV8_EXPERTS_TEAM_WARPS * KV8_EXPERTS_STAGES * KV8_EXPERTS_CHUNK_TILES *
                             KV8_EXPERTS_STAGE_BYTES,
    /* Where the copy engine brings a warp its quarter of a strip: tiles of a chunk, its barrier,
     * and what lies between two chunks, which begin at multiples of 128 bytes. */
    KV8_EXPERTS_BULK_TILES = 6,
    KV8_EXPERTS_BULK_BARRIER_AT =
        KV8_EXPERTS_BULK_TILES * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES),
    KV8_EXPERTS_BULK_CHUNK_BYTES = (KV8_EXPERTS_BULK_BARRIER_AT + 8 + 127) / 128 * 128,
    /* Where it brings a warp whole strips: warps; chunks of a warp's ring; tiles of a chunk of one
     * strip, and of each of two, behind which a barrier stands: gpt-oss' 45 are whole chunks. */
    KV8_EXPERTS_WHOLE_WARPS = 12,
    KV8_EXPERTS_WHOLE_CHUNKS = 2,
    KV8_EXPERTS_SINGLE_TILES = 9,
    KV8_EXPERTS_PAIR_TILES = 5,
    KV8_EXPERTS_WHOLE_CHUNK_BYTES =
        2 * ((KV8_EXPERTS_PAIR_TILES * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES) + 8 + 127) /
             128 * 128),
    KV8_EXPERTS_WHOLE_BYTES =
        KV8_EXPERTS_WHOLE_WARPS * KV8_EXPERTS_WHOLE_CHUNKS * KV8_EXPERTS_WHOLE_CHUNK_BYTES,
    KV8_EXPERTS_SUM_BYTES = KV8_EXPERTS_ITEM_TILES * KV8_EXPERTS_TEAM_WARPS * 16 * 8 * 4,
    /* The kernels on wgmma. */
    KV8_EXPERTS_PACK_THREADS = 256,
    KV8_EXPERTS_TILES_BLOCKS = 2, /* of a cluster, which share rows */
    KV8_EXPERTS_W_STAGES = 4,     /* chunks of a work's strips */
    KV8_EXPERTS_W_CODE_BYTES = KV8_EXPERTS_CHUNK_TILES * KV8_TILE_CODE_BYTES,   /* of a strip */
    KV8_EXPERTS_W_SCALE_BYTES = KV8_EXPERTS_CHUNK_TILES * KV8_TILE_SCALE_BYTES, /* of a strip */
    KV8_EXPERTS_STATIC_BYTES = 4096 /* at most, of the kernels' own */
};

/* The kernels on wgmma by the rows of a work, 48, 96 or 192: warps that multiply, beside four that
 * bring what they read; steps in which the rows of a work are counted; strips of a warp, of a
 * warpgroup, which are copied at once, and of a work; tiles of rows that a stage has, and stages;
 * shared memory of rows, of a chunk of weights, and all of it, aligned to 1024. */
#define KV8_EXPERTS_TILES_WARPS(rows)   ((rows) == 96 ? 8 : 12)
#define KV8_EXPERTS_TILES_THREADS(rows) (32 * (KV8_EXPERTS_TILES_WARPS(rows) + 4))
#define KV8_EXPERTS_WORK_STEP(rows)     ((rows) <= 96 ? 16 : 32)
#define KV8_EXPERTS_WARP_STRIPS(rows)   ((rows) <= 96 ? 2 : 1)
#define KV8_EXPERTS_GROUP_STRIPS(rows)  (4 * KV8_EXPERTS_WARP_STRIPS(rows))
#define KV8_EXPERTS_WORK_STRIPS(rows) \
    (KV8_EXPERTS_WARP_STRIPS(rows) * KV8_EXPERTS_TILES_WARPS(rows))
#define KV8_EXPERTS_X_TILES(rows)  ((rows) <= 96 ? KV8_EXPERTS_CHUNK_TILES : 1)
#define KV8_EXPERTS_X_STAGES(rows) ((rows) <= 96 ? 3 : 6)
#define KV8_EXPERTS_X_BYTES(rows) \
    (KV8_EXPERTS_X_STAGES(rows) * KV8_EXPERTS_X_TILES(rows) * (rows)*KV8_TILE_COLS * 2)
#define KV8_EXPERTS_W_STAGE_BYTES(rows) \
    (KV8_EXPERTS_WORK_STRIPS(rows) * (KV8_EXPERTS_W_CODE_BYTES + KV8_EXPERTS_W_SCALE_BYTES))
#define KV8_EXPERTS_TILES_BYTES(rows) \
    (KV8_EXPERTS_X_BYTES(rows) + KV8_EXPERTS_W_STAGES * KV8_EXPERTS_W_STAGE_BYTES(rows) + 1024)

/* Rows of f16 packed for the kernels on wgmma, item by item: the row that an expert's begin at. An
 * item of n rows, its last 16 filled up, has n rows of 128 bytes for every 64 inputs, one tile
 * after another, under the 128-byte swizzle: a tile is one bulk copy. Rows of an item begin at a
 * multiple of 16 of its expert's, so all experts' take at most KV8_EXPERTS_PACKED_ROWS. */
#define KV8_EXPERTS_PACKED_ROW(first_row, expert) (((first_row) + 15) / 16 * 16 + 16 * (expert))
#define KV8_EXPERTS_PACKED_ROWS(places, experts)  KV8_EXPERTS_PACKED_ROW(places, experts)

/* A warp's ring of chunks of a quarter of a strip's tiles. */
#define KV8_EXPERTS_BULK_RING_BYTES(num_tiles)                              \
    ((((num_tiles) + KV8_EXPERTS_TEAM_WARPS - 1) / KV8_EXPERTS_TEAM_WARPS + \
      KV8_EXPERTS_BULK_TILES - 1) /                                         \
     KV8_EXPERTS_BULK_TILES * KV8_EXPERTS_BULK_CHUNK_BYTES)

/* Strips of every expert of one layer, expert by expert. */
typedef struct kv8_expert_strips {
    const uint8_t *data;
    int64_t expert_bytes;
    int32_t strip_bytes;
    int32_t num_strips; /* of an expert */
    int32_t num_tiles;  /* of a strip */
    int32_t cols;
} kv8_expert_strips;

typedef struct kv8_experts_load_args {
    const uint8_t *blocks; /* [experts, rows, cols / 32, 16] */
    const uint8_t *scales; /* [experts, rows, cols / 32] */
    const uint16_t *bias;  /* bf16 [experts, rows] */
    uint8_t *strips;
    int32_t rows, cols;
    int32_t strip_bytes, num_tiles;
    int32_t paired; /* rows are gate, up, gate, up, ... */
    int32_t padding;
} kv8_experts_load_args;

/* Which rows go to which expert. */
typedef struct kv8_experts_routing {
    uint8_t *ids;     /* [n, top_k] experts, best first; 255: the row is not live */
    float *weights;   /* [n, top_k] softmax of the best logits */
    int32_t *offsets; /* [experts + 1] into sorted */
    int32_t *sorted;  /* [n * top_k] places in ids, by expert, then by place */
} kv8_experts_routing;

typedef struct kv8_experts_route_args {
    kv8_experts_routing routing;
    const float *logits;      /* [n, experts] */
    const int32_t *live_rows; /* rows from here on are not routed; NULL: n */
    int32_t n, num_experts, top_k, padding;
} kv8_experts_route_args;

/* The same of few rows from the residual stream on: their norm, the router's product. */
typedef struct kv8_experts_router_args {
    kv8_experts_route_args route; /* its logits stay in the kernel */
    const float *x;               /* [n, hidden] */
    const void *w;                /* f16 [experts, hidden] */
    const void *bias, *gain;      /* bf16 [experts], [hidden] */
    void *normed;                 /* f16 [n, hidden] */
    int32_t hidden;
    float eps;
} kv8_experts_router_args;
enum {
    KV8_ROUTER_BLOCKS = 8,
    KV8_ROUTER_ROWS = 8, /* at most */
    KV8_ROUTER_EXPERTS = 16 * KV8_ROUTER_BLOCKS,
    KV8_ROUTER_MAX_HIDDEN = 4096,
    KV8_ROUTER_STATIC_BYTES = 8192, /* at most, of the kernel's own */
    KV8_ROUTER_SUM_BYTES = KV8_EXPERTS_SORT_THREADS / 32 * KV8_ROUTER_ROWS * 20 * 4
};
/* The same of any number, but for the sort: a block for 16 rows. Of up to 32, 128 or 256 experts,
 * by one, two or four groups of warps. */
enum { KV8_ROUTER_ROWS_EACH = 16, KV8_ROUTER_ROWS_THREADS = 32 * KV8_ROUTER_ROWS_EACH };
#define KV8_ROUTER_ROWS_GROUPS(experts) ((experts) <= 32 ? 1 : (experts) <= 128 ? 2 : 4)
/* Of a row's sums: four rows lie in other banks. */
#define KV8_ROUTER_PITCH_OF(experts) ((experts) + 8)
#define KV8_ROUTER_ROWS_BYTES(experts)                                               \
    (KV8_ROUTER_ROWS_EACH / KV8_ROUTER_ROWS_GROUPS(experts) * KV8_ROUTER_ROWS_EACH * \
     KV8_ROUTER_PITCH_OF(experts) * 4)
/* The same by the columns of a cluster's warps. */
enum {
    KV8_ROUTER_COLUMNS_WARPS = 12,
    KV8_ROUTER_COLUMNS_MAX_HIDDEN = 32 * KV8_ROUTER_COLUMNS_WARPS * KV8_ROUTER_BLOCKS,
    KV8_ROUTER_COLUMNS_ROWS = 512,          /* at most: more fill the GPU without */
    KV8_ROUTER_COLUMNS_STATIC_BYTES = 20480 /* at most, of the kernel's own */
};
#define KV8_ROUTER_COLUMNS_BYTES(experts) \
    (KV8_ROUTER_COLUMNS_WARPS * KV8_ROUTER_ROWS_EACH * KV8_ROUTER_PITCH_OF(experts) * 4)
/* Bytes from row to row in its shared memory, which neighbours' banks differ by; and all of it. */
#define KV8_ROUTER_PITCH(hidden) (((hidden)*2 + 127) / 128 * 128 + 64)
#define KV8_ROUTER_BYTES(hidden) \
    ((16 + KV8_ROUTER_ROWS) * KV8_ROUTER_PITCH(hidden) + KV8_ROUTER_SUM_BYTES)

/* gate_up: x [n, cols] by row; y [n * top_k, num_strips * 8] in sorted order, f16.
 * down: x [n * top_k, cols] in sorted order; y [n * top_k, num_strips * 16] by place in ids, f32.
 */
typedef struct kv8_experts_matmul_args {
    kv8_experts_routing routing;
    kv8_expert_strips w;
    const uint16_t *x; /* f16 */
    void *y;
    int32_t num_experts, top_k;
    int32_t x_row_bytes; /* of a row in shared memory */
    int32_t x_tiles;     /* of 8 rows, that lie in shared memory at once: 1 or 2 */
    float alpha, limit;  /* of the gate */
} kv8_experts_matmul_args;

/* Rows of x [n, cols] packed, those of an item in the order of sorted. Of gated rows, which gate
 * and up packs, the inputs that fill the last tile are set to 0. */
typedef struct kv8_experts_pack_args {
    kv8_experts_routing routing;
    const uint16_t *x; /* f16 */
    uint16_t *packed, *gated;
    int32_t num_experts, top_k;
    int32_t cols, gated_cols;
} kv8_experts_pack_args;

/* The same on wgmma: x is packed, and so is y of gate and up. Maps of kv8_words_map_make of all
 * experts' strips, a row of the matrix each. */
typedef struct kv8_experts_tiles_args {
    uint64_t codes_map[16], scales_map[16];
    kv8_experts_matmul_args product;
} __attribute__((aligned(64))) kv8_experts_tiles_args;

/* residual[row] += the sum of weights * y, best first; and its norm, where that is wanted. */
typedef struct kv8_experts_combine_args {
    const float *weights, *y;
    float *residual;
    const int32_t *live_rows;
    int32_t n, top_k, hidden;
    float eps;
    const void *gain; /* bf16 [hidden] */
    void *normed;     /* f16 [n, hidden] */
} kv8_experts_combine_args;

#endif
