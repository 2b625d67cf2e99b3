// linear_stream.cu - a dense product for up to 16 tokens: weights go from memory to the registers
// that mma.sync reads, once, and nothing else of size moves.
//
// A warp multiplies 16 rows of w by all tokens over its share of the columns. A lane loads 16 bytes
// of rows g and g + 8 and of token g: eight consecutive columns, of which the four words are the k
// indices 2c, 2c + 1, 2c + 8, 2c + 9 of two products. Which column bears which index does not
// matter, as long as both operands agree; so no byte is shuffled.
//
// A block of rotated heads has eight pairs of rows, which its last threads turn.
//
// Grid: 16 rows of w a block. Block: 8 warps, which take the columns in turns of 64; their sums
// meet in shared memory, in the order of the warps. From sm_90 on the first weights are on their
// way before the kernel ahead has ended. Shared memory: 5 or 10 KB. Bytes: w once, x once a block
// from the caches. Bound by: memory.
//
// SPDX-License-Identifier: Apache-2.0
#include "linear_store.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int STREAM_WARPS = KV8_LINEAR_STREAM_THREADS / 32;
constexpr int STREAM_UNIT = 64;  // columns of a warp's turn: one line of a row
constexpr int STREAM_TURN = STREAM_UNIT * STREAM_WARPS;
constexpr int STREAM_PITCH = 20;  // of a token's sums: tokens two apart lie in other banks

// The first rows of a block's two eights.
struct Eights {
    int32_t low, high;
};

// What is read once.
static __device__ __forceinline__ uint4 load_weights(const uint16_t *from) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
    return r;
}

// The sum of a value over the warps, in their order; `step` floats apart.
static __device__ __forceinline__ float sum_warps(const float *from, int step) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < STREAM_WARPS; warp++) sum += from[warp * step];
    return sum;
}

static __device__ __forceinline__ bool rotates(const kv8_linear_args &a, int32_t row) {
    return row < a.rotated_rows;
}
// Of the rows from `first` on, of a head those that it turns together.
static __device__ __forceinline__ Eights rows_of(const kv8_linear_args &a, int32_t first) {
    if (!rotates(a, first)) return {first, first + 8};
    const int32_t within = first % (2 * a.half_dim), low = first - within + within / 2;
    return {low, low + a.half_dim};
}
// Row `row`, which is `idx` of the block's 16, is y, the other of its pair is `other`.
static __device__ __forceinline__ void store_row(const kv8_linear_args &a, int32_t token,
                                                 const Eights &rows, int idx, int32_t row, float y,
                                                 float other) {
    if (!rotates(a, rows.low)) return store_value(a, token, row, y);
    const int32_t pair = rows.low % (2 * a.half_dim) + idx % 8;
    const float *const cosines = a.cos_sin + int64_t{token} * 2 * a.half_dim;
    float low = idx < 8 ? y : other, high = idx < 8 ? other : y;
    turn(low, high, cosines[pair], cosines[a.half_dim + pair]);
    static_cast<uint16_t *>(a.rotated)[int64_t{token} * a.rotated_rows + row] =
        static_cast<uint16_t>(pack_rotated(a, idx < 8 ? low : high, 0));
}

// Token g of a tile of 8, f16.
struct Token {
    const uint16_t *x;
    bool inside;
    __device__ __forceinline__ void open(const kv8_linear_args &a, int32_t token, int32_t column) {
        x = static_cast<const uint16_t *>(a.x) + int64_t{token} * a.cols + column;
        inside = token < a.n;
    }
    __device__ __forceinline__ uint4 load8(int32_t at) const {
        return inside ? *reinterpret_cast<const uint4 *>(x + at) : uint4{};
    }
};

// COUNT turns' weights of 64 columns, in flight together.
template <int COUNT>
struct Weights {
    uint4 low[2 * COUNT], high[2 * COUNT];
    __device__ __forceinline__ void load(const uint16_t *from_low, const uint16_t *from_high) {
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) {
            low[i] = load_weights(from_low + i / 2 * STREAM_TURN + i % 2 * 32);
            high[i] = load_weights(from_high + i / 2 * STREAM_TURN + i % 2 * 32);
        }
    }
};

// c += rows (g: low, g + 8: high) * token, over 32 columns.
static __device__ __forceinline__ void multiply32(float (&c)[4], const uint4 &low,
                                                  const uint4 &high, const uint4 &token) {
    mma<false>(c, {low.x, high.x, low.y, high.y}, {token.x, token.y});
    mma<false>(c, {low.z, high.z, low.w, high.w}, {token.z, token.w});
}
template <int TILES, int COUNT>
static __device__ __forceinline__ void multiply(float (&sums)[TILES][4], const Weights<COUNT> &w,
                                                Token (&tokens)[TILES], int32_t at) {
    constexpr int TOGETHER = TILES == 1 ? 2 : 1;  // loads in flight
#pragma unroll
    for (int i = 0; i < 2 * COUNT; i += TOGETHER) {
        uint4 x[TILES][TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                x[tile][j] = tokens[tile].load8(at + (i + j) / 2 * STREAM_TURN + (i + j) % 2 * 32);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                multiply32(sums[tile], w.low[i + j], w.high[i + j], x[tile][j]);
        }
    }
}

// What the block's threads do once the warps' sums lie in shared memory: 16 rows for each token.
template <int TILES>
static __device__ __forceinline__ void store_block(const kv8_linear_args &a, const Eights &rows,
                                                   const float *part) {
    constexpr int ROWS = KV8_LINEAR_STREAM_ROWS, STEP = TILES * 8 * STREAM_PITCH;
    for (int i = threadIdx.x; i < a.n * ROWS; i += KV8_LINEAR_STREAM_THREADS) {
        const int token = i / ROWS, idx = i % ROWS, other = idx ^ 8;
        const int32_t row = idx < 8 ? rows.low + idx : rows.high + idx - 8;
        const int32_t other_row = idx < 8 ? rows.high + idx : rows.low + idx - 8;
        if (row >= a.rows) continue;
        const float *const sums = part + token * STREAM_PITCH;
        const float y = sum_warps(sums + idx, STEP) + bias_of(a, row);
        const float paired =
            rotates(a, rows.low) ? sum_warps(sums + other, STEP) + bias_of(a, other_row) : 0;
        store_row(a, token, rows, idx, row, y, paired);
    }
}

// TILES: of 8 tokens. COUNT: turns whose loads are in flight together.
template <int TILES, int COUNT>
static __device__ __forceinline__ void stream(const kv8_linear_args &a) {
    __shared__ float part[STREAM_WARPS][TILES * 8 * STREAM_PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const Eights rows = rows_of(a, blockIdx.x * KV8_LINEAR_STREAM_ROWS);
    const int32_t column = STREAM_UNIT * warp + 8 * c;
    const auto *const w = static_cast<const uint16_t *>(a.w) + column;
    const uint16_t *low = w + int64_t{min(rows.low + g, a.rows - 1)} * a.cols;
    const uint16_t *high = w + int64_t{min(rows.high + g, a.rows - 1)} * a.cols;
    // Turns of whole units, and the columns that are left, which one warp takes.
    const int32_t units = a.cols / STREAM_UNIT, left = a.cols % STREAM_UNIT;
    const int32_t turns = (units - warp + STREAM_WARPS - 1) / STREAM_WARPS;
    const bool takes_rest = left != 0 && warp == units % STREAM_WARPS;
    Weights<COUNT> first;
    let_next();
    if (turns >= COUNT) first.load(low, high);
    if (a.bias != nullptr && threadIdx.x < 2)
        fetch_line(static_cast<const uint16_t *>(a.bias) +
                   min(threadIdx.x == 0 ? rows.low : rows.high, a.rows - 1));
    await_turn();
    float sums[TILES][4] = {};
    Token tokens[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) tokens[tile].open(a, 8 * tile + g, column);
    if (turns >= COUNT) multiply(sums, first, tokens, 0);
    int32_t turn = turns >= COUNT ? COUNT : 0;
#pragma unroll 1
    for (; turn + COUNT <= turns; turn += COUNT) {
        Weights<COUNT> more;
        more.load(low + turn * STREAM_TURN, high + turn * STREAM_TURN);
        multiply(sums, more, tokens, turn * STREAM_TURN);
    }
#pragma unroll 1
    for (; turn < turns; turn++) {
        Weights<1> more;
        more.load(low + turn * STREAM_TURN, high + turn * STREAM_TURN);
        multiply(sums, more, tokens, turn * STREAM_TURN);
    }
#pragma unroll 1
    for (int half = 0; half < 2 && takes_rest; half++) {
        const int32_t at = turns * STREAM_TURN + 32 * half;
        const bool inside = 32 * half + 8 * c < left;
        const uint4 low8 = inside ? load_weights(low + at) : uint4{};
        const uint4 high8 = inside ? load_weights(high + at) : uint4{};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply32(sums[tile], low8, high8, inside ? tokens[tile].load8(at) : uint4{});
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            part[warp][(8 * tile + 2 * c + i % 2) * STREAM_PITCH + g + i / 2 * 8] = sums[tile][i];
    }
    __syncthreads();
    store_block<TILES>(a, rows, part[0]);
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_LINEAR_STREAM_THREADS, 3)
    kv8_linear_f16_n8__sm80(const __grid_constant__ kv8_linear_args a) {
    kv8::stream<1, 2>(a);
}
extern "C" __global__ void __launch_bounds__(KV8_LINEAR_STREAM_THREADS, 3)
    kv8_linear_f16_n16__sm80(const __grid_constant__ kv8_linear_args a) {
    kv8::stream<2, 1>(a);
}
