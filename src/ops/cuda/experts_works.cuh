// experts_works.cuh - the works of the kernels on wgmma, who takes which, and the threads that have
// the copy engine bring what the works read.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_items.cuh"
#include "ptx_pairs_sm90.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int ROW_BYTES = KV8_TILE_COLS * 2;  // of a row in a tile
constexpr int MAX_X_STAGES = 6;
constexpr int W_STAGES = KV8_EXPERTS_W_STAGES;
constexpr int W_CODE_BYTES = KV8_EXPERTS_W_CODE_BYTES, W_SCALE_BYTES = KV8_EXPERTS_W_SCALE_BYTES;
constexpr int CHUNK = KV8_EXPERTS_CHUNK_TILES;
constexpr int ROUND_ROWS = 16;  // of packed rows
constexpr int BLOCKS = KV8_EXPERTS_TILES_BLOCKS;
static_assert(BLOCKS == 2, "as copy_rows() has it");

// Works of up to ROWS rows: more rows share a widened weight, fewer leave room for more strips and
// leave less undone where experts have few. STRIPS of a consumer warp: up to 96 rows two.
template <bool DOWN_, int ROWS_>
struct WorkShape {
    static constexpr bool DOWN = DOWN_;
    static constexpr int ROWS = ROWS_, X_TILE_BYTES = ROWS * ROW_BYTES;
    // Tiles that come and go at once: fewer questions where a tile does not take long.
    static constexpr int X_TILES = KV8_EXPERTS_X_TILES(ROWS);
    static constexpr int X_STAGE_BYTES = X_TILES * X_TILE_BYTES;
    static constexpr int X_STAGES = KV8_EXPERTS_X_STAGES(ROWS);
    static constexpr int CONSUMERS = 32 * KV8_EXPERTS_TILES_WARPS(ROWS);
    static constexpr int WORK_STRIPS = KV8_EXPERTS_WORK_STRIPS(ROWS);
    static constexpr int STRIPS = KV8_EXPERTS_WARP_STRIPS(ROWS);
    static constexpr int GROUP_STRIPS = KV8_EXPERTS_GROUP_STRIPS(ROWS);
    static constexpr int STEP = KV8_EXPERTS_WORK_STEP(ROWS);
    static constexpr int W_STAGE_BYTES = KV8_EXPERTS_W_STAGE_BYTES(ROWS);
    // Products of 16 inputs that start at once, a group, and groups of N columns whose operands are
    // in registers: the next is widened while that before is multiplied, or where registers are
    // few, those of other warpgroups.
    static constexpr int GROUP = STRIPS;
    __device__ static constexpr int buffers(int n) { return STRIPS == 2 || n >= 160 ? 2 : 1; }
    static constexpr bool HOLDS_ENDS = CONSUMERS == 256;  // of works, through them
    static_assert(CHUNK % X_TILES == 0 && X_STAGES >= 2 && X_STAGES <= MAX_X_STAGES);
};

struct Work {
    Item item;
    int strips, end;  // the first, and that behind the last

    // The last pair of an item's works may have strips for one block alone.
    __device__ __forceinline__ bool is_empty() const { return strips >= end; }
    // Of an item whose rows are packed, the last 16 filled up.
    __device__ __forceinline__ int packed_rows() const {
        return (item.count + ROUND_ROWS - 1) / ROUND_ROWS * ROUND_ROWS;
    }
};

// Barriers of tiles of rows and of chunks of weights; and the works, which whoever copies their
// rows leaves for those that multiply: as many as have rows in a stage, and the one before.
struct Rings {
    uint64_t full[MAX_X_STAGES], empty[MAX_X_STAGES];
    uint64_t copied[W_STAGES], read[W_STAGES];
    Work works[MAX_X_STAGES + 1];
};

// Who takes which works: pairs of blocks, a work of neighbouring strips each.
template <class SHAPE>
struct Works {
    ItemList list;                    // of the experts by rank
    int ranked[KV8_EXPERTS_MAX + 1];  // experts, those with the largest items first

    // By the whole block. Works that are large come first, so that all pairs end at about one time.
    __device__ __forceinline__ void count(const kv8_experts_matmul_args &a) {
        load_first_rows(a, list);
        int *const sizes = list.first_item;  // of the first item of each expert
        for (int e = threadIdx.x; e < a.num_experts; e += blockDim.x) {
            const int items = items_of(list, e, SHAPE::ROWS);
            sizes[e] = items == 0 ? 0 : cut_item<SHAPE::STEP>(list, e, 0, items).count;
        }
        __syncthreads();
        for (int e = threadIdx.x / 32; e < a.num_experts; e += blockDim.x / 32) {
            int larger = 0;
            for (int other = threadIdx.x % 32; other < a.num_experts; other += 32)
                larger += sizes[other] > sizes[e] || (sizes[other] == sizes[e] && other < e);
            ranked[__reduce_add_sync(~0u, larger)] = e;
        }
        __syncthreads();
        if (threadIdx.x < 32)
            sum_before(list.first_item, a.num_experts,
                       [&](int i) { return items_of(list, ranked[i], SHAPE::ROWS); });
        __syncthreads();
    }

    static constexpr int PAIR = BLOCKS * SHAPE::WORK_STRIPS;
    __device__ __forceinline__ int works_of_item(const kv8_experts_matmul_args &a) const {
        return (a.w.num_strips + PAIR - 1) / PAIR;
    }
    // How many works for_each() gives this block.
    __device__ __forceinline__ int own_works(const kv8_experts_matmul_args &a) const {
        const unsigned num_works = list.first_item[a.num_experts] * works_of_item(a);
        const unsigned pairs = gridDim.x / BLOCKS, pair = blockIdx.x / BLOCKS;
        const unsigned rounds = num_works / pairs, turn = rounds % 2 == 0 ? pair : pairs - 1 - pair;
        return rounds + (turn < num_works % pairs ? 1 : 0);
    }

    // This block's of each of its pair's, to use(work): pairs take them in serpentine order.
    template <class USE>
    __device__ __forceinline__ void for_each(const kv8_experts_matmul_args &a, USE &&use) const {
        constexpr int GROUP = SHAPE::GROUP_STRIPS;
        const int each = works_of_item(a);
        const int num_works = list.first_item[a.num_experts] * each;
        const int pairs = gridDim.x / BLOCKS;
        int pair = blockIdx.x / BLOCKS;
        for (int first = 0; first < num_works; first += pairs, pair = pairs - 1 - pair) {
            const int w = first + pair;
            if (w >= num_works) continue;
            const int rank = find_item(list, a.num_experts, w / each);
            const Item item =
                cut_item<SHAPE::STEP>(list, ranked[rank], w / each - list.first_item[rank],
                                      list.first_item[rank + 1] - list.first_item[rank]);
            // What is left for an item's last pair is cut among both in strips of a warpgroup.
            const int strips = w % each * PAIR, left = min(PAIR, a.w.num_strips - strips);
            const int half = (left + BLOCKS * GROUP - 1) / (BLOCKS * GROUP) * GROUP;
            const int rank_strips = static_cast<int>(blockIdx.x) % BLOCKS * half;
            use(Work{item, strips + rank_strips, strips + min(left, rank_strips + half)});
        }
    }
};

// Factors and biases of a strip.
__device__ __forceinline__ const uint8_t *strip_end(const kv8_experts_matmul_args &a, int expert,
                                                    int strip) {
    return a.w.data + expert * a.w.expert_bytes +
           static_cast<int64_t>(strip + 1) * a.w.strip_bytes - KV8_STRIP_END_BYTES;
}

__device__ __forceinline__ int chunks_of(const kv8_experts_matmul_args &a) {
    return (a.w.num_tiles + CHUNK - 1) / CHUNK;
}

// --- the producers: a thread for the weights, one for the rows, a warp for what ends need ---

// The ends of the works' strips, which no chunk has, to L2. By a warp.
template <class SHAPE>
__device__ __forceinline__ void fetch_ends(const kv8_experts_matmul_args &a,
                                           const Works<SHAPE> &works) {
    works.for_each(a, [&](const Work &work) {
        const int strip = work.strips + static_cast<int>(threadIdx.x) % 32;
        static_assert(SHAPE::WORK_STRIPS <= 32);
        if (strip < work.end) fetch_line(strip_end(a, work.item.expert, strip));
    });
}

// Chunks of the works' strips, one after another and work after work.
template <class SHAPE>
__device__ __forceinline__ void copy_weights(const kv8_experts_tiles_args &args,
                                             const Works<SHAPE> &works, Rings &rings,
                                             uint32_t ring) {
    constexpr int GROUP = SHAPE::GROUP_STRIPS;
    const kv8_experts_matmul_args &a = args.product;
    int stage = 0, phase = 0;
    works.for_each(a, [&](const Work &work) {
        if (work.is_empty()) return;
        const int row = work.item.expert * a.w.num_strips + work.strips;  // of the maps
        const int groups = (work.end - work.strips + GROUP - 1) / GROUP;
        for (int tile = 0; tile < a.w.num_tiles; tile += CHUNK) {
            const uint32_t copied = smem_address(&rings.copied[stage]);
            const uint32_t codes = ring + stage * SHAPE::W_STAGE_BYTES;
            const uint32_t scales = codes + SHAPE::WORK_STRIPS * W_CODE_BYTES;
            barrier_wait(smem_address(&rings.read[stage]), phase ^ 1);
            expect_bytes(copied, groups * GROUP * (W_CODE_BYTES + W_SCALE_BYTES));
            for (int g = 0; g < groups; g++) {
                copy_tile_once(codes + g * GROUP * W_CODE_BYTES, args.codes_map,
                               tile * (KV8_TILE_CODE_BYTES / 8), row + g * GROUP, copied,
                               leave_first_policy());
                copy_tile_once(scales + g * GROUP * W_SCALE_BYTES, args.scales_map,
                               tile * (KV8_TILE_SCALE_BYTES / 8), row + g * GROUP, copied,
                               leave_first_policy());
            }
            if (++stage == W_STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    });
}

// Tiles of the works' rows, the last again where a chunk is not whole: its weights are zeros there,
// as the maps fill it. Each block of the pair copies half of a tile to both, once both have
// read what was there.
template <class SHAPE>
__device__ __forceinline__ void copy_rows(const kv8_experts_matmul_args &a,
                                          const Works<SHAPE> &works, Rings &rings,
                                          uint32_t stages) {
    constexpr int STAGES = SHAPE::X_STAGES;
    const int rank = cluster_rank();
    uint32_t issued = 0, num_works = 0;
    const auto await_empty = [&] {
        if (issued >= STAGES)
            wait_for_bytes(smem_address(&rings.empty[issued % STAGES]), (issued / STAGES - 1) & 1);
    };
    works.for_each(a, [&](const Work &work) {
        const uint32_t tile_bytes = work.packed_rows() * ROW_BYTES, half = tile_bytes / BLOCKS;
        const uint8_t *const from =
            reinterpret_cast<const uint8_t *>(a.x) +
            static_cast<int64_t>(work.item.packed) * a.w.num_tiles * ROW_BYTES + rank * half;
        for (int tile = 0; tile < chunks_of(a) * CHUNK; issued++) {
            const uint32_t stage = issued % STAGES, full = smem_address(&rings.full[stage]);
            uint32_t to = stages + stage * SHAPE::X_STAGE_BYTES + rank * half;
            await_empty();
            if (tile == 0) rings.works[num_works++ % (MAX_X_STAGES + 1)] = work;
            expect_bytes(full, SHAPE::X_TILES * tile_bytes);
            for (int i = 0; i < SHAPE::X_TILES; i++, tile++, to += SHAPE::X_TILE_BYTES)
                copy_bulk_to(to, from + min(tile, a.w.num_tiles - 1) * int64_t{tile_bytes}, half,
                             full, (1 << BLOCKS) - 1);
        }
    });
    // Nothing of the other block is on its way when this one's shared memory goes.
    for (int i = 0; i < STAGES; i++, issued++) await_empty();
}

}  // namespace kv8
