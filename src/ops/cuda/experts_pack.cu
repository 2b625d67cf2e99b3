// experts_pack.cu - the rows that chose each expert, packed for the kernels on wgmma.
//
// Grid: a few blocks a multiprocessor, each of which takes every gridDim-th quarter of 16 rows
// of an item.
// Bytes: a row is read once for each of its experts (from L2) and written as often. Bound by: L2.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_items.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int ROUND_ROWS = 16, ROW_CHUNKS = 8;  // chunks of 16 bytes in a tile's row
constexpr int SPLITS = 4;                       // of a row's tiles: all of one are on their way
constexpr int TILES_AT_ONCE = KV8_EXPERTS_PACK_THREADS / (ROUND_ROWS * ROW_CHUNKS);

// Where a tile of an item's rows begins.
__device__ __forceinline__ uint4 *packed_tile(uint16_t *packed, const Item &item, int cols,
                                              int tile) {
    const int num_tiles = (cols + KV8_TILE_COLS - 1) / KV8_TILE_COLS;
    const int rows = (item.count + ROUND_ROWS - 1) / ROUND_ROWS * ROUND_ROWS;
    return reinterpret_cast<uint4 *>(packed) +
           (static_cast<int64_t>(item.packed) * num_tiles + static_cast<int64_t>(tile) * rows) *
               ROW_CHUNKS;
}

// Thread (row, chunk) of each tile of a split: 16 rows of an item, from the first-th on.
__device__ __forceinline__ void pack_rows(const kv8_experts_pack_args &a, const Item &item,
                                          int first, int split) {
    const int row = first + threadIdx.x / ROW_CHUNKS % ROUND_ROWS, chunk = threadIdx.x % ROW_CHUNKS;
    const int to = row * ROW_CHUNKS + (chunk ^ row % ROW_CHUNKS);
    const int place = a.routing.sorted[item.first + min(row, item.count - 1)];
    const uint4 *const from =
        reinterpret_cast<const uint4 *>(a.x + static_cast<int64_t>(place / a.top_k) * a.cols);
    const int num_chunks = a.cols / 8, num_tiles = (num_chunks + ROW_CHUNKS - 1) / ROW_CHUNKS;
    const int end = num_tiles * (split + 1) / SPLITS;
#pragma unroll 8
    for (int tile = num_tiles * split / SPLITS + threadIdx.x / (ROUND_ROWS * ROW_CHUNKS);
         tile < end; tile += TILES_AT_ONCE) {
        const int at = tile * ROW_CHUNKS + chunk;
        packed_tile(a.packed, item, a.cols, tile)[to] =
            at < num_chunks ? __ldg(from + at) : make_uint4(0, 0, 0, 0);
    }
    const int last = a.gated_cols / KV8_TILE_COLS;  // of the gated rows, where it is not whole
    if (split == SPLITS - 1 && threadIdx.x / (ROUND_ROWS * ROW_CHUNKS) == 0 &&
        last * ROW_CHUNKS + chunk >= a.gated_cols / 8 && a.gated_cols % KV8_TILE_COLS != 0)
        packed_tile(a.gated, item, a.gated_cols, last)[to] = make_uint4(0, 0, 0, 0);
}

template <int ROWS>
__device__ __forceinline__ void pack(const kv8_experts_pack_args &a) {
    __shared__ ItemList list;
    take_turn();
    count_items(a, list, ROWS);
    constexpr int PARTS = ROWS / ROUND_ROWS;
    const int num_parts = list.first_item[a.num_experts] * (PARTS * SPLITS);
    for (int i = blockIdx.x; i < num_parts; i += gridDim.x) {
        const int part = i / SPLITS, first = part % PARTS * ROUND_ROWS;
        const Item item = item_of<KV8_EXPERTS_WORK_STEP(ROWS)>(a, list, part / PARTS);
        if (first < item.count) pack_rows(a, item, first, i % SPLITS);
    }
}

}  // namespace kv8

#define KV8_EXPERTS_PACK(NAME, ROWS)                                          \
    extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_PACK_THREADS, 4) \
        NAME(const __grid_constant__ kv8_experts_pack_args a) {               \
        kv8::pack<ROWS>(a);                                                   \
    }
KV8_EXPERTS_PACK(kv8_experts_pack_x48__sm90a, 48)
KV8_EXPERTS_PACK(kv8_experts_pack_x96__sm90a, 96)
KV8_EXPERTS_PACK(kv8_experts_pack_x192__sm90a, 192)
