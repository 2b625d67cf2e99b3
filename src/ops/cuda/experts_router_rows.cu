// experts_router_rows.cu - of any number of rows what lies between the residual stream and their
// experts: the norm, the router's product, each row's best experts and their weights.
//
// Grid: a block for 16 rows. Block: 16 warps. A warp sums a row's squares; then each norms some
// columns of all rows, 32 at a time in the layout of mma's A operand, and multiplies them by a part
// of the experts; then it adds up its row's logits and chooses. Columns are summed in one order
// whatever the number of rows. Shared memory: the warps' sums. Bytes: rows twice (from L1), and the
// router's weights once a block from L2. Bound by: latency; of many rows by what L2 gives a
// multiprocessor.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_router.cuh"

namespace kv8 {

constexpr int THREADS = KV8_ROUTER_ROWS_THREADS, WARPS = THREADS / 32, ROWS = KV8_ROUTER_ROWS_EACH;
static_assert(WARPS == ROWS, "a warp has a row");

// How warps share the work: each has TILES times 8 experts, of every SLICES-th 32 columns.
template <int EXPERTS>
struct RouterShape {
    static constexpr int GROUPS = KV8_ROUTER_ROWS_GROUPS(EXPERTS), SLICES = WARPS / GROUPS;
    static constexpr int TILES = EXPERTS / GROUPS / 8;
    static constexpr int AT_ONCE = TILES <= 4 ? 3 : 1;  // times 32 columns on their way
    static constexpr int PITCH = KV8_ROUTER_PITCH_OF(EXPERTS);
    static_assert(SLICES * ROWS * PITCH * 4 == KV8_ROUTER_ROWS_BYTES(EXPERTS),
                  "as the host has it");
};

// What 1 / root of the mean square of a row is, in every lane.
__device__ __forceinline__ float scale_of(const float *row, int hidden, float eps) {
    constexpr int AT_ONCE = 12, STEP = 32 * 4;
    float squares = 0;
    for (int begin = threadIdx.x % 32 * 4; begin < hidden; begin += AT_ONCE * STEP) {
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            x[i] = begin + i * STEP < hidden
                       ? *reinterpret_cast<const float4 *>(row + begin + i * STEP)
                       : float4{};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            squares += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(ALL, squares, step);
    return 1.0f / sqrtf(squares / static_cast<float>(hidden) + eps);
}

// A warp's columns of all rows times its experts; to `sums`.
template <class S>
__device__ __forceinline__ void multiply_columns(const kv8_experts_router_args &a, int first,
                                                 const float *scales, float *sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int slice = warp % S::SLICES, group = warp / S::SLICES;
    const int low = min(first + g, a.route.n - 1), high = min(first + g + 8, a.route.n - 1);
    const float low_scale = scales[g], high_scale = scales[g + 8];
    auto *const normed = static_cast<uint16_t *>(a.normed);
    const bool has_low = group == 0 && first + g < a.route.n;
    const bool has_high = group == 0 && first + g + 8 < a.route.n;
    constexpr int STEP = 32 * S::SLICES;
    float sum[S::TILES][4] = {};
    for (int begin = 32 * slice + 8 * c; begin < a.hidden; begin += S::AT_ONCE * STEP) {
        uint4 part[S::AT_ONCE][S::TILES];
        float x[S::AT_ONCE][8], y[S::AT_ONCE][8];
#pragma unroll
        for (int i = 0; i < S::AT_ONCE; i++) {
            const int at = min(begin + i * STEP, a.hidden - 8);
            read8(a.x + int64_t{low} * a.hidden + at, x[i]);
            read8(a.x + int64_t{high} * a.hidden + at, y[i]);
#pragma unroll
            for (int t = 0; t < S::TILES; t++)
                part[i][t] = router_weights(a, (group * S::TILES + t) * 8 + g, at);
        }
#pragma unroll
        for (int i = 0; i < S::AT_ONCE; i++) {
            const bool inside = begin + i * STEP < a.hidden;
            const int at = min(begin + i * STEP, a.hidden - 8);
            float gain[8];
            widen8(load8(static_cast<const kv8_bf16 *>(a.gain) + at), gain);
            const uint4 p = norm8(x[i], gain, inside ? low_scale : 0.0f,
                                  normed + int64_t{low} * a.hidden + at, has_low && inside);
            const uint4 q = norm8(y[i], gain, inside ? high_scale : 0.0f,
                                  normed + int64_t{high} * a.hidden + at, has_high && inside);
#pragma unroll
            for (int t = 0; t < S::TILES; t++) multiply_32(sum[t], p, q, part[i][t]);
        }
    }
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
        float *const to = sums + (slice * ROWS + g) * S::PITCH + (group * S::TILES + t) * 8 + 2 * c;
        *reinterpret_cast<float2 *>(to) = {sum[t][0], sum[t][1]};
        *reinterpret_cast<float2 *>(to + 8 * S::PITCH) = {sum[t][2], sum[t][3]};
    }
}

template <int EXPERTS>
__device__ __forceinline__ void route_rows(const kv8_experts_router_args &a) {
    using S = RouterShape<EXPERTS>;
    extern __shared__ __align__(16) float sums[];
    __shared__ float scales[ROWS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = blockIdx.x * ROWS, row = first + warp;
    const int lines = a.route.num_experts * a.hidden / 64;  // of 128 bytes
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < lines; i += gridDim.x * THREADS)
        fetch_line(static_cast<const uint16_t *>(a.w) + 64 * i);
    take_turn();
    const float scale =
        scale_of(a.x + int64_t{min(row, a.route.n - 1)} * a.hidden, a.hidden, a.eps);
    if (lane == 0) scales[warp] = scale;
    __syncthreads();
    multiply_columns<S>(a, first, scales, sums);
    __syncthreads();
    if (row >= a.route.n) return;
    choose_by_parts<EXPERTS, S::SLICES>(a, sums + warp * S::PITCH, ROWS * S::PITCH, row);
}

}  // namespace kv8

#define KV8_ROUTE_ROWS(EXPERTS)                                              \
    extern "C" __global__ void __launch_bounds__(KV8_ROUTER_ROWS_THREADS, 1) \
        kv8_experts_router_rows_x##EXPERTS##__sm80(                          \
            const __grid_constant__ kv8_experts_router_args a) {             \
        kv8::route_rows<EXPERTS>(a);                                         \
    }
KV8_ROUTE_ROWS(32)
KV8_ROUTE_ROWS(128)
KV8_ROUTE_ROWS(256)
