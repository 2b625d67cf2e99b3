// experts_router_columns.cu - of some dozens to hundreds of rows what lies between the residual
// stream and their experts: the norm, the router's product, each row's best experts and their
// weights. The sort is the next kernel's.
//
// Grid: a cluster of 8 blocks for 16 rows. Block: 12 warps. A warp has 32 columns of all rows and
// of all experts, in the layout of mma's operands, each value once: the weights before its turn.
// The squares of the blocks' columns meet in all of them, their parts of the logits in the block
// that chooses for two of the rows. Shared memory: the warps' sums. Bound by: latency.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_router.cuh"
#include "ptx_sm90.cuh"

namespace kv8 {

constexpr int BLOCKS = KV8_ROUTER_BLOCKS, WARPS = KV8_ROUTER_COLUMNS_WARPS;
constexpr int THREADS = 32 * WARPS, ROWS = KV8_ROUTER_ROWS_EACH, OWN_ROWS = ROWS / BLOCKS;
static_assert(32 * WARPS * BLOCKS == KV8_ROUTER_COLUMNS_MAX_HIDDEN, "a warp has 32 columns");

template <int EXPERTS>
__device__ __forceinline__ void route_by_columns(const kv8_experts_router_args &a) {
    constexpr int TILES = EXPERTS / 8, PITCH = KV8_ROUTER_PITCH_OF(EXPERTS);
    extern __shared__ __align__(16) float sums[];  // [WARPS][ROWS][PITCH]
    __shared__ float squares[WARPS][ROWS], all_squares[BLOCKS][ROWS];
    __shared__ float logits[BLOCKS][OWN_ROWS][EXPERTS];  // the blocks' parts
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int rank = cluster_rank(), first = blockIdx.x / BLOCKS * ROWS;
    const int column = 32 * (warp * BLOCKS + rank) + 8 * c;
    const bool inside = column < a.hidden;
    const int at = inside ? column : 0;
    cluster_arrive_first();
    uint4 w[TILES];
    float gain[8];
#pragma unroll
    for (int t = 0; t < TILES; t++) w[t] = router_weights(a, 8 * t + g, at);
    widen8(load8(static_cast<const kv8_bf16 *>(a.gain) + at), gain);
    take_turn();
    const int last = a.route.n - 1;
    const int64_t low = int64_t{min(first + g, last)} * a.hidden + at;
    const int64_t high = int64_t{min(first + g + 8, last)} * a.hidden + at;
    float x[8] = {}, y[8] = {};
    if (inside) {
        read8(a.x + low, x);
        read8(a.x + high, y);
    }
    float square[2] = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        square[0] += x[j] * x[j];
        square[1] += y[j] * y[j];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        square[i] += __shfl_xor_sync(ALL, square[i], 1);
        square[i] += __shfl_xor_sync(ALL, square[i], 2);
        if (c == 0) squares[warp][g + 8 * i] = square[i];
    }
    __syncthreads();
    cluster_wait();  // all blocks run
    if (threadIdx.x < BLOCKS * ROWS) {
        const int row = threadIdx.x % ROWS;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += squares[i][row];
        store_cluster(cluster_address(smem_address(&all_squares[rank][row]), threadIdx.x / ROWS),
                      sum);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) sum += all_squares[block][g + 8 * i];
        scale[i] = 1.0f / sqrtf(sum / static_cast<float>(a.hidden) + a.eps);
    }
    auto *const normed = static_cast<uint16_t *>(a.normed);
    const uint4 p = norm8(x, gain, scale[0], normed + low, inside && first + g <= last);
    const uint4 q = norm8(y, gain, scale[1], normed + high, inside && first + g + 8 <= last);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float sum[4] = {};
        multiply_32(sum, p, q, w[t]);
        float *const to = sums + (warp * ROWS + g) * PITCH + 8 * t + 2 * c;
        *reinterpret_cast<float2 *>(to) = {sum[0], sum[1]};
        *reinterpret_cast<float2 *>(to + 8 * PITCH) = {sum[2], sum[3]};
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * EXPERTS; i += THREADS) {
        const int row = i / EXPERTS, expert = i % EXPERTS;
        float sum = 0;
#pragma unroll
        for (int from = 0; from < WARPS; from++) sum += sums[(from * ROWS + row) * PITCH + expert];
        store_cluster(
            cluster_address(smem_address(&logits[rank][row % OWN_ROWS][expert]), row / OWN_ROWS),
            sum);
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    const int row = first + rank * OWN_ROWS + warp;
    if (warp >= OWN_ROWS || row > last) return;
    choose_by_parts<EXPERTS, BLOCKS>(a, &logits[0][warp][0], OWN_ROWS * EXPERTS, row);
}

}  // namespace kv8

#define KV8_ROUTE_COLUMNS(EXPERTS)                                \
    extern "C" __global__ void __launch_bounds__(kv8::THREADS, 1) \
        kv8_experts_router_columns_x##EXPERTS##__sm90(            \
            const __grid_constant__ kv8_experts_router_args a) {  \
        kv8::route_by_columns<EXPERTS>(a);                        \
    }
KV8_ROUTE_COLUMNS(32)
KV8_ROUTE_COLUMNS(128)
