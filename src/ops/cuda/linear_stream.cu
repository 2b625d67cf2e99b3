// linear_stream.cu - a dense product for up to 16 tokens: weights go from memory to the registers
// that mma.sync reads, once, and nothing else of size moves.
//
// A warp multiplies 16 rows of w by all tokens over its share of the columns. A lane loads 16 bytes
// of rows g and g + 8 and of token g: eight consecutive columns, of which the four words are the k
// indices 2c, 2c + 1, 2c + 8, 2c + 9 of two products. Which column bears which index does not
// matter, as long as both operands agree; so no byte is shuffled.
//
// Grid: 16 rows of w a block. Block: 8 warps, which take the columns in turns of 64; their sums
// meet in shared memory, in the order of the warps. Shared memory: 5 or 10 KB. Bytes: w once, x
// once a block from the caches. Bound by: memory.
//
// SPDX-License-Identifier: Apache-2.0
#include "linear_store.cuh"
#include "ptx_sm80.cuh"

namespace kv8 {

constexpr int STREAM_WARPS = KV8_LINEAR_STREAM_THREADS / 32;
constexpr int STREAM_UNIT = 64;  // columns of a warp's turn: one line of a row

// What is read once.
static __device__ __forceinline__ uint4 load_weights(const uint16_t *from) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}

// c += rows (g: low, g + 8: high) * token, over 32 columns.
static __device__ __forceinline__ void multiply32(float (&c)[4], const uint4 &low,
                                                  const uint4 &high, const uint4 &token) {
    mma<true>(c, {low.x, high.x, low.y, high.y}, {token.x, token.y});
    mma<true>(c, {low.z, high.z, low.w, high.w}, {token.z, token.w});
}

// TILES: of 8 tokens. UNITS: turns whose loads are in flight together.
template <int TILES, int UNITS>
static __device__ __forceinline__ void stream(const kv8_linear_args &a) {
    constexpr int ROWS = KV8_LINEAR_STREAM_ROWS, PITCH = 20;  // 4 tokens apart: other banks
    __shared__ float part[STREAM_WARPS][TILES * 8 * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int32_t first_row = blockIdx.x * ROWS;
    const int32_t low_row = min(first_row + g, a.rows - 1);
    const int32_t high_row = min(first_row + g + 8, a.rows - 1);
    const auto *const low = static_cast<const uint16_t *>(a.w) + int64_t{low_row} * a.cols;
    const auto *const high = static_cast<const uint16_t *>(a.w) + int64_t{high_row} * a.cols;
    const auto *const tokens = static_cast<const uint16_t *>(a.x);
    const uint4 zero = {0, 0, 0, 0};
    float sum[TILES][4] = {};
    for (int32_t begin = STREAM_UNIT * warp; begin < a.cols;
         begin += STREAM_UNIT * STREAM_WARPS * UNITS) {
        uint4 w[2 * UNITS][2];
#pragma unroll
        for (int i = 0; i < 2 * UNITS; i++) {
            const int32_t at = begin + i / 2 * STREAM_UNIT * STREAM_WARPS + i % 2 * 32 + 8 * c;
            w[i][0] = at < a.cols ? load_weights(low + at) : zero;
            w[i][1] = at < a.cols ? load_weights(high + at) : zero;
        }
#pragma unroll
        for (int i = 0; i < 2 * UNITS; i++) {
            const int32_t at = begin + i / 2 * STREAM_UNIT * STREAM_WARPS + i % 2 * 32 + 8 * c;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int32_t token = 8 * tile + g;
                const bool inside = token < a.n && at < a.cols;
                const auto *const x = tokens + int64_t{token} * a.cols + at;
                multiply32(sum[tile], w[i][0], w[i][1],
                           inside ? __ldg(reinterpret_cast<const uint4 *>(x)) : zero);
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[warp][(8 * tile + 2 * c + i % 2) * PITCH + g + i / 2 * 8] = sum[tile][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.n * ROWS; i += KV8_LINEAR_STREAM_THREADS) {
        const int token = i / ROWS, row = i % ROWS;
        float y = 0;
#pragma unroll
        for (int from = 0; from < STREAM_WARPS; from++) y += part[from][token * PITCH + row];
        if (first_row + row < a.rows) store_one(a, token, first_row + row, y);
    }
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_LINEAR_STREAM_THREADS, 3)
    kv8_linear_bf16_n8__sm80(const __grid_constant__ kv8_linear_args a) {
    kv8::stream<1, 3>(a);
}
extern "C" __global__ void __launch_bounds__(KV8_LINEAR_STREAM_THREADS, 3)
    kv8_linear_bf16_n16__sm80(const __grid_constant__ kv8_linear_args a) {
    kv8::stream<2, 3>(a);
}
