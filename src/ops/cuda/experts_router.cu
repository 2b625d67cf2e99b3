// experts_router.cu - of few rows all that lies between the residual stream and the experts: the
// norm, the router's product, each row's best experts, and the places in their order.
//
// Grid: one cluster of 8 blocks; a block has an eighth of the experts. Block: 1024 threads. Every
// block norms all rows, four warps a row, and stores one of them. Logits go to the first block,
// which chooses and sorts. The router's weights come to shared memory before the kernel's turn.
// Shared memory: 16 rows of weights, 8 normed rows, the warps' sums. Bound by: latency.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_router.cuh"
#include "ptx_sm90.cuh"

namespace kv8 {

constexpr int ROUTER_THREADS = KV8_EXPERTS_SORT_THREADS, ROUTER_WARPS = ROUTER_THREADS / 32;
constexpr int ROUTER_ROWS = KV8_ROUTER_ROWS, ROW_WARPS = ROUTER_WARPS / ROUTER_ROWS;
constexpr int ROUTER_HELD = KV8_ROUTER_MAX_HIDDEN / (8 * 32 * ROW_WARPS);  // a lane's eights
constexpr int SUM_PITCH = 20;  // of a row's sums: rows two apart lie in other banks
constexpr int SUM_STEP = ROUTER_ROWS * SUM_PITCH;
static_assert(ROUTER_WARPS * SUM_STEP * 4 == KV8_ROUTER_SUM_BYTES, "what the host asks for");

static __device__ __forceinline__ uint4 word_at(const uint8_t *at) {
    return *reinterpret_cast<const uint4 *>(at);
}

// This block's experts of all.
struct Part {
    int first, count;
    __device__ __forceinline__ Part(int num_experts) {
        const int each = (num_experts + KV8_ROUTER_BLOCKS - 1) / KV8_ROUTER_BLOCKS;
        first = min(static_cast<int>(cluster_rank()) * each, num_experts);
        count = min(each, num_experts - first);
    }
};

// The part's rows of w, towards shared memory.
static __device__ __forceinline__ void copy_weights(const kv8_experts_router_args &a,
                                                    const Part &part, uint8_t *to, int pitch) {
    const int eights = a.hidden / 8;
    const auto *const from = static_cast<const uint16_t *>(a.w) + int64_t{part.first} * a.hidden;
    for (int i = threadIdx.x; i < part.count * eights; i += ROUTER_THREADS)
        copy16_or_zero(smem_address(to) + i / eights * pitch + i % eights * 16, from + 8 * i, true);
}

// The normed rows to shared memory: a row stays in registers while its squares meet.
static __device__ __forceinline__ void norm_rows(const kv8_experts_router_args &a, uint8_t *rows,
                                                 int pitch) {
    __shared__ float parts[ROUTER_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / ROW_WARPS;
    const bool inside = row < a.route.n;
    const float *const from = a.x + int64_t{row} * a.hidden;
    float x[ROUTER_HELD][8], squares = 0;
    const auto for_held = [&](auto &&use) {
#pragma unroll
        for (int i = 0; i < ROUTER_HELD; i++) {
            const int at = 8 * (lane + 32 * (warp % ROW_WARPS + i * ROW_WARPS));
            if (inside && at < a.hidden) use(i, at);
        }
    };
    for_held([&](int i, int at) { read8(from + at, x[i]); });
    for_held([&](int i, int) {
#pragma unroll
        for (int j = 0; j < 8; j++) squares += x[i][j] * x[i][j];
    });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(ALL, squares, step);
    if (lane == 0) parts[warp] = squares;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < ROW_WARPS; i++) sum += parts[row * ROW_WARPS + i];
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(a.hidden) + a.eps);
    for_held([&](int i, int at) {
        float gain[8];
        widen8(load8(static_cast<const kv8_bf16 *>(a.gain) + at), gain);
#pragma unroll
        for (int j = 0; j < 8; j++) x[i][j] *= scale * gain[j];
        *reinterpret_cast<uint4 *>(rows + row * pitch + 2 * at) = {
            pack_f16(x[i][0], x[i][1]), pack_f16(x[i][2], x[i][3]), pack_f16(x[i][4], x[i][5]),
            pack_f16(x[i][6], x[i][7])};
    });
}

// Each block stores one normed row.
static __device__ __forceinline__ void store_row(const kv8_experts_router_args &a,
                                                 const uint8_t *rows, int pitch) {
    const int row = cluster_rank();
    if (row >= a.route.n) return;
    auto *const to = static_cast<uint4 *>(a.normed) + int64_t{row} * (a.hidden / 8);
    for (int i = threadIdx.x; i < a.hidden / 8; i += ROUTER_THREADS)
        to[i] = word_at(rows + row * pitch + 16 * i);
}

// Of 16 experts and 8 rows, over a warp's columns; to `sums`.
static __device__ __forceinline__ void multiply_rows(const uint8_t *weights, const uint8_t *rows,
                                                     int pitch, int hidden, bool has_high,
                                                     float *sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    float sum[4] = {};
    for (int at = 64 * warp + 16 * c; at < 2 * hidden; at += 64 * ROUTER_WARPS) {
        const uint4 low = word_at(weights + g * pitch + at), x = word_at(rows + g * pitch + at);
        const uint4 high = has_high ? word_at(weights + (g + 8) * pitch + at) : uint4{};
        mma<false>(sum, {low.x, high.x, low.y, high.y}, {x.x, x.y});
        mma<false>(sum, {low.z, high.z, low.w, high.w}, {x.z, x.w});
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[warp * SUM_STEP + (2 * c + i % 2) * SUM_PITCH + g + i / 2 * 8] = sum[i];
}

// Eight threads a logit, to the cluster's first block.
static __device__ __forceinline__ void send_logits(const kv8_experts_router_args &a,
                                                   const Part &part, const float *sums,
                                                   uint32_t logits) {
    const int idx = threadIdx.x / 8;
    const bool inside = idx < a.route.n * part.count;
    const int row = inside ? idx / part.count : 0, expert = inside ? idx % part.count : 0;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ROUTER_WARPS / 8; i++)
        sum +=
            sums[(threadIdx.x % 8 * (ROUTER_WARPS / 8) + i) * SUM_STEP + row * SUM_PITCH + expert];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (!inside || threadIdx.x % 8 != 0) return;
    const int id = part.first + expert;
    const uint32_t bias = static_cast<const uint16_t *>(a.bias)[id];
    store_cluster(cluster_address(logits + (row * a.route.num_experts + id) * 4, 0),
                  sum + __uint_as_float(bias << 16));
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_SORT_THREADS, 1)
    kv8_experts_router__sm90(const __grid_constant__ kv8_experts_router_args a) {
    using namespace kv8;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ FewPlaces few;
    __shared__ float logits[ROUTER_ROWS * KV8_ROUTER_EXPERTS];
    const Part part(a.route.num_experts);
    const int pitch = KV8_ROUTER_PITCH(a.hidden), lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32;
    uint8_t *const rows = shared + 16 * pitch;
    float *const sums = reinterpret_cast<float *>(rows + ROUTER_ROWS * pitch);
    let_next();
    cluster_arrive_first();
    copy_weights(a, part, shared, pitch);
    if (threadIdx.x * 64 < a.hidden)
        fetch_line(static_cast<const uint16_t *>(a.gain) + 64 * threadIdx.x);
    few.clear();
    await_turn();
    norm_rows(a, rows, pitch);
    copy_wait_all();
    __syncthreads();
    multiply_rows(shared, rows, pitch, a.hidden, part.count > 8, sums);
    __syncthreads();
    cluster_wait();  // the first block runs
    send_logits(a, part, sums, smem_address(logits));
    __syncwarp();
    cluster_arrive();
    store_row(a, rows, pitch);
    __syncwarp();
    cluster_wait();
    if (cluster_rank() != 0) return;
    const kv8_experts_route_args &route = a.route;
    if (row < route.n) {
        const int id = choose_row(route, logits + row * route.num_experts, row,
                                  live_rows(route.live_rows, route.n));
        if (lane < route.top_k) few.ids[row * route.top_k + lane] = static_cast<uint8_t>(id);
    }
    sort_few(route, few);
}
