// experts_router_columns.cu - of some dozens to hundreds of rows what lies between the residual
// stream and their experts: the norm, the router's product, each row's best experts and their
// weights. The sort is the next kernel's.
//
// Grid: a cluster of 8 blocks for one group of 16 rows, or two. Block: 12 warps. A warp has 32
// columns of all rows and of all experts, in the layout of mma's operands, each value once: the
// weights before its turn. The squares of the blocks' columns meet in all of them, their parts of
// the logits in the block that chooses for two rows of each group. Shared memory: the warps' sums
// of a group. Bound by: latency.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_router.cuh"
#include "ptx_sm90.cuh"

namespace kv8 {

constexpr int BLOCKS = KV8_ROUTER_BLOCKS, WARPS = KV8_ROUTER_COLUMNS_WARPS;
constexpr int THREADS = 32 * WARPS, GROUP_ROWS = KV8_ROUTER_ROWS_EACH;
static_assert(32 * WARPS * BLOCKS == KV8_ROUTER_COLUMNS_MAX_HIDDEN, "a warp has 32 columns");

template <int EXPERTS, int GROUPS>
__device__ __forceinline__ void route_by_columns(const kv8_experts_router_args &a) {
    constexpr int TILES = EXPERTS / 8, PITCH = KV8_ROUTER_PITCH_OF(EXPERTS);
    constexpr int ROWS = GROUPS * GROUP_ROWS, OWN_ROWS = ROWS / BLOCKS;
    static_assert(BLOCKS * ROWS <= THREADS && OWN_ROWS <= WARPS, "a thread, a warp each");
    extern __shared__ __align__(16) float sums[];  // [WARPS][GROUP_ROWS][PITCH]
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
    // Rows g + 8 i of the cluster's.
    const int last = a.route.n - 1;
    const auto place = [&](int i) { return int64_t{min(first + g + 8 * i, last)} * a.hidden + at; };
    float x[2 * GROUPS][8] = {};
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++)
        if (inside) read8(a.x + place(i), x[i]);
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++) {
        float square = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) square += x[i][j] * x[i][j];
        square += __shfl_xor_sync(ALL, square, 1);
        square += __shfl_xor_sync(ALL, square, 2);
        if (c == 0) squares[warp][g + 8 * i] = square;
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
    auto *const normed = static_cast<uint16_t *>(a.normed);
    uint4 rows[2 * GROUPS];
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; i++) {
        float sum = 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) sum += all_squares[block][g + 8 * i];
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(a.hidden) + a.eps);
        rows[i] = norm8(x[i], gain, scale, normed + place(i), inside && first + g + 8 * i <= last);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (group > 0) __syncthreads();  // the sums before are added up
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            float sum[4] = {};
            multiply_32(sum, rows[2 * group], rows[2 * group + 1], w[t]);
            float *const to = sums + (warp * GROUP_ROWS + g) * PITCH + 8 * t + 2 * c;
            *reinterpret_cast<float2 *>(to) = {sum[0], sum[1]};
            *reinterpret_cast<float2 *>(to + 8 * PITCH) = {sum[2], sum[3]};
        }
        __syncthreads();
        for (int i = threadIdx.x; i < GROUP_ROWS * EXPERTS; i += THREADS) {
            const int in_group = i / EXPERTS, expert = i % EXPERTS;
            const int row = group * GROUP_ROWS + in_group;
            float sum = 0;
#pragma unroll
            for (int from = 0; from < WARPS; from++)
                sum += sums[(from * GROUP_ROWS + in_group) * PITCH + expert];
            store_cluster(cluster_address(smem_address(&logits[rank][row % OWN_ROWS][expert]),
                                          row / OWN_ROWS),
                          sum);
        }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    const int row = first + rank * OWN_ROWS + warp;
    if (warp >= OWN_ROWS || row > last) return;
    choose_by_parts<EXPERTS, BLOCKS>(a, &logits[0][warp][0], OWN_ROWS * EXPERTS, row);
}

}  // namespace kv8

#define KV8_ROUTE_COLUMNS(EXPERTS, ROWS)                                \
    extern "C" __global__ void __launch_bounds__(kv8::THREADS, 1)       \
        kv8_experts_router_columns_x##EXPERTS##_r##ROWS##__sm90(        \
            const __grid_constant__ kv8_experts_router_args a) {        \
        kv8::route_by_columns<EXPERTS, ROWS / KV8_ROUTER_ROWS_EACH>(a); \
    }
KV8_ROUTE_COLUMNS(32, 16)
KV8_ROUTE_COLUMNS(32, 32)
KV8_ROUTE_COLUMNS(128, 16)
KV8_ROUTE_COLUMNS(128, 32)
