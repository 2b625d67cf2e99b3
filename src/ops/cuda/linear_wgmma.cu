// linear_wgmma.cu - a dense product for more than 16 tokens on sm_90a: the copy engine brings tiles
// of weights and tokens, wgmma multiplies them from shared memory.
//
// A tile is GROUPS * 64 rows of w times TOKENS tokens, a stage 64 columns of both; a warpgroup
// multiplies 64 rows by all tokens. Where tiles are fewer than the GPU holds, the blocks of a
// cluster share the columns of one, each adds up its part of the results over all of them, in the
// order of the blocks, and stores it.
//
// Grid: the tiles, as linear_tiles.cu has them, times the blocks of a cluster. Block: the
// warpgroups, and a warp that copies. Shared memory: the ring. Bytes: w once a tile of tokens, x
// once a tile of rows, mostly from the L2. Bound by: memory for up to about 200 tokens, products
// for more.
//
// Tried: clusters of two tiles one above the other, each block fetching half of their tokens for
// both (a quarter slower on an H200: each stage waits for the slower of two).
//
// SPDX-License-Identifier: Apache-2.0
#include "linear_store.cuh"
#include "ptx_sm90.cuh"
#include "take_turn.cuh"

namespace kv8 {

template <int GROUPS_, int TOKENS_, int STAGES_>
struct WgmmaShape {
    static constexpr int GROUPS = GROUPS_, TOKENS = TOKENS_, STAGES = STAGES_;
    static constexpr int ROWS = GROUPS * KV8_LINEAR_WGMMA_ROWS, CONSUMERS = GROUPS * 128;
    static constexpr int W_BYTES = ROWS * 128, STAGE_BYTES = W_BYTES + TOKENS * 128;
    static constexpr int PITCH = ROWS + 4;  // of sums: tokens two apart lie in other banks
    static_assert(TOKENS * PITCH * 4 <= STAGES * STAGE_BYTES, "sums take the ring's place");
};

// Barriers of the ring: full, then empty.
template <class SHAPE>
struct TileRing {
    uint32_t at, barriers;
    __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(int stage) const {
        return barriers + 8 * (SHAPE::STAGES + stage);
    }
};

template <class SHAPE>
static __device__ __forceinline__ void produce(const kv8_linear_mapped_args &a, const Tile &tile,
                                               const TileRing<SHAPE> &ring, int32_t begin,
                                               int32_t count) {
    const uint64_t policy = leave_first_policy();
    const bool once = a.product.n <= SHAPE::TOKENS;  // else other tiles read these rows too
    const int32_t tokens = min(SHAPE::TOKENS, a.product.n - tile.first_token);
    const int32_t in_box = KV8_LINEAR_WGMMA_BOX(a.product.n, SHAPE::TOKENS);
    const uint32_t bytes = SHAPE::W_BYTES + (tokens + in_box - 1) / in_box * in_box * 128;
    const auto copy_weights = [&](int32_t i) {
        const int stage = i % SHAPE::STAGES;
        const uint32_t to = ring.at + stage * SHAPE::STAGE_BYTES;
        expect_bytes(ring.full(stage), bytes);
        if (once)
            copy_tile_once(to, a.w_map, 64 * (begin + i), tile.first_row, ring.full(stage), policy);
        else
            copy_tile(to, a.w_map, 64 * (begin + i), tile.first_row, ring.full(stage));
    };
    const int32_t ahead = min(count, SHAPE::STAGES);
    for (int32_t i = 0; i < ahead; i++) copy_weights(i);
    await_turn();
    for (int32_t i = 0; i < count; i++) {
        const int stage = i % SHAPE::STAGES;
        const uint32_t to = ring.at + stage * SHAPE::STAGE_BYTES;
        if (i >= ahead) {
            barrier_wait(ring.empty(stage), (i / SHAPE::STAGES - 1) & 1);
            copy_weights(i);
        }
        for (int32_t first = 0; first < tokens; first += in_box)
            copy_tile(to + SHAPE::W_BYTES + first * 128, a.x_map, 64 * (begin + i),
                      tile.first_token + first, ring.full(stage));
    }
}

template <class SHAPE>
static __device__ __forceinline__ void consume(float (&sums)[SHAPE::TOKENS / 2], int group,
                                               const TileRing<SHAPE> &ring, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        const int stage = i % SHAPE::STAGES;
        const uint32_t at = ring.at + stage * SHAPE::STAGE_BYTES;
        const uint32_t w = matrix_descriptor(at + group * KV8_LINEAR_WGMMA_ROWS * 128, 0);
        const uint32_t x = matrix_descriptor(at + SHAPE::W_BYTES, 0);
        barrier_wait(ring.full(stage), (i / SHAPE::STAGES) & 1);
        registers_pin(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_shared<false>(sums, descriptor_at(w, 32 * k), descriptor_at(x, 32 * k), 1);
        wgmma_commit();
        registers_pin(sums);
        wgmma_wait<1>();
        if (i > 0 && threadIdx.x % 128 == 0) barrier_arrive(ring.empty((i - 1) % SHAPE::STAGES));
    }
    wgmma_wait<0>();
    registers_pin(sums);
}

// Sums to shared memory, [TOKENS][PITCH].
template <class SHAPE>
static __device__ __forceinline__ void gather(float *part, const float (&sums)[SHAPE::TOKENS / 2]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    named_barrier_sync(1, SHAPE::CONSUMERS);  // all have read the ring's last stages
#pragma unroll
    for (int j = 0; j < SHAPE::TOKENS / 8; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            part[(8 * j + lane % 4 * 2 + k % 2) * SHAPE::PITCH + row + k / 2 * 8] = sums[4 * j + k];
    }
}

// Rows `row` to row + 3 of a head, and those half a head further.
static __device__ __forceinline__ void store_turned(const kv8_linear_args &a, int32_t token,
                                                    int32_t row, float4 low, float4 high) {
    constexpr int HALF = KV8_LINEAR_HEAD / 2;
    const float *const cosines =
        a.cos_sin + int64_t{token} * KV8_LINEAR_HEAD + row % KV8_LINEAR_HEAD;
    const float4 cosine = *reinterpret_cast<const float4 *>(cosines);
    const float4 sine = *reinterpret_cast<const float4 *>(cosines + HALF);
    const auto turn_one = [&](float &x, float &y, int i, float c, float s) {
        x += bias_of(a, row + i);
        y += bias_of(a, row + HALF + i);
        turn(x, y, c, s);
    };
    turn_one(low.x, high.x, 0, cosine.x, sine.x);
    turn_one(low.y, high.y, 1, cosine.y, sine.y);
    turn_one(low.z, high.z, 2, cosine.z, sine.z);
    turn_one(low.w, high.w, 3, cosine.w, sine.w);
    auto *const to = static_cast<uint16_t *>(a.rotated) + int64_t{token} * a.rotated_rows + row;
    *reinterpret_cast<uint2 *>(to) = {pack_rotated(a, low.x, low.y), pack_rotated(a, low.z, low.w)};
    *reinterpret_cast<uint2 *>(to + HALF) = {pack_rotated(a, high.x, high.y),
                                             pack_rotated(a, high.z, high.w)};
}

// Four rows' sums over all blocks of the cluster, in their order.
static __device__ __forceinline__ float4 sum_blocks(uint32_t at, uint32_t num_blocks) {
    float4 y = {0, 0, 0, 0};
    for (uint32_t rank = 0; rank < num_blocks; rank++) {
        const float4 more = load_cluster(cluster_address(at, rank));
        y = {y.x + more.x, y.y + more.y, y.z + more.z, y.w + more.w};
    }
    return y;
}

// This block's part of the tile, over all blocks of the cluster: four rows, and the four half a
// head further.
template <class SHAPE>
static __device__ __forceinline__ void store_part(const kv8_linear_args &a, const Tile &tile,
                                                  uint32_t part) {
    constexpr int HALF = KV8_LINEAR_HEAD / 2, EIGHTS = SHAPE::ROWS / 8;
    const uint32_t num_blocks = cluster_size();
    for (int idx = cluster_rank() * SHAPE::CONSUMERS + threadIdx.x; idx < SHAPE::TOKENS * EIGHTS;
         idx += num_blocks * SHAPE::CONSUMERS) {
        const int within = idx / EIGHTS, eight = idx % EIGHTS;
        const int idx_row = eight / (HALF / 4) * KV8_LINEAR_HEAD + eight % (HALF / 4) * 4;
        const int32_t token = tile.first_token + within, row = tile.first_row + idx_row;
        if (token >= a.n) break;
        const uint32_t at = part + (within * SHAPE::PITCH + idx_row) * 4;
        const float4 low = sum_blocks(at, num_blocks), high = sum_blocks(at + HALF * 4, num_blocks);
        if (row < a.rotated_rows) {
            store_turned(a, token, row, low, high);
        } else {
            store_four(a, token, row, low);
            store_four(a, token, row + HALF, high);
        }
    }
}

template <class SHAPE>
static __device__ __forceinline__ void multiply_mapped(const kv8_linear_mapped_args &a) {
    extern __shared__ uint8_t unaligned[];
    __shared__ __align__(8) uint64_t barriers[2 * SHAPE::STAGES];
    const uint32_t start = smem_address(unaligned), aligned = (start + 1023) & ~1023u;
    const TileRing<SHAPE> ring = {aligned, smem_address(barriers)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), SHAPE::GROUPS);
        }
        barrier_init_fence();
    }
    let_next();
    __syncthreads();
    const Tile tile = find_tile(a.product, SHAPE::ROWS, SHAPE::TOKENS, blockIdx.x / cluster_size());
    const int32_t num_stages = (a.product.cols + 63) / 64;
    const int32_t begin = min(static_cast<int32_t>(cluster_rank()) * a.split_stages, num_stages);
    const int32_t count = min(a.split_stages, num_stages - begin);
    const bool consumes = threadIdx.x < SHAPE::CONSUMERS;
    if (consumes) {
        float sums[SHAPE::TOKENS / 2] = {};
        await_turn();
        consume<SHAPE>(sums, threadIdx.x / 128, ring, count);
        gather<SHAPE>(reinterpret_cast<float *>(unaligned + (aligned - start)), sums);
    } else if (threadIdx.x == SHAPE::CONSUMERS) {
        produce(a, tile, ring, begin, count);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    if (consumes) store_part<SHAPE>(a.product, tile, aligned);
    __syncwarp();
    cluster_arrive_first();  // others read this block's sums
    cluster_wait();
}

}  // namespace kv8

#define KV8_LINEAR_WGMMA(NAME, GROUPS, TOKENS, STAGES, BLOCKS)                                    \
    extern "C" __global__ void __launch_bounds__(KV8_LINEAR_WGMMA_THREADS(GROUPS), BLOCKS)        \
        NAME(const __grid_constant__ kv8_linear_mapped_args a) {                                  \
        using shape = kv8::WgmmaShape<GROUPS, TOKENS, STAGES>;                                    \
        static_assert(                                                                            \
            1024 + STAGES * shape::STAGE_BYTES == KV8_LINEAR_WGMMA_BYTES(GROUPS, TOKENS, STAGES), \
            "what the host asks for");                                                            \
        kv8::multiply_mapped<shape>(a);                                                           \
    }
#include "linear_wgmma_kernels.inc"
