// experts_strip.cuh - what the streaming kernels do with a strip of an expert beside its products:
// their rows in shared memory, and a strip's end.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_gate.cuh"
#include "experts_products.cuh"
#include "experts_stream_items.cuh"

namespace kv8 {

// One item's rows, and zeros behind them up to whole tiles, for what lay there before would switch
// the tensor cores and take power. Not waited for.
template <bool DOWN>
__device__ __forceinline__ void copy_rows(const kv8_experts_matmul_args &a, const Item &item,
                                          uint32_t to) {
    const int pieces = a.w.cols / 8, padded = a.w.num_tiles * (KV8_TILE_COLS / 8);
    const int rows = tiles_of(item.count) * TILE_ROWS;
    for (int row = threadIdx.x / 32; row < rows; row += blockDim.x / 32) {
        const int place = item.first + row;
        const bool is_row = row < item.count;
        const int64_t x_row = !is_row ? 0 : DOWN ? place : a.routing.sorted[place] / a.top_k;
        for (int piece = threadIdx.x % 32; piece < padded; piece += 32) {
            const bool inside = is_row && piece < pieces;
            copy16_or_zero(to + row * a.x_row_bytes + piece * 16,
                           a.x + x_row * a.w.cols + (inside ? piece * 8 : 0), inside);
        }
    }
}

// --- a strip's end ---

// Where a strip's factors and biases for this lane begin, of rows g.
struct EndsAt {
    int factor, bias;
    __device__ __forceinline__ explicit EndsAt(const kv8_experts_matmul_args &a) {
        const int end = a.w.num_tiles * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES);
        factor = end + threadIdx.x % 32 / 4 * 4;
        bias = end + 64 + threadIdx.x % 32 / 4 * 2;
    }
};

// What ends a lane's rows g and g + 8, of gate_up a gate and its up: loaded as the strip begins.
struct Ends {
    float factor[2], bias[2];
    Ends() = default;
    __device__ __forceinline__ Ends(const EndsAt &at, const uint8_t *strip) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[i] = __ldg(reinterpret_cast<const float *>(strip + at.factor) + 8 * i);
            const uint32_t bits =
                __ldg(reinterpret_cast<const uint16_t *>(strip + at.bias) + 8 * i);
            bias[i] = __uint_as_float(bits << 16);
        }
    }
    // SCALED: a sum of add_scaled_tile().
    template <bool SCALED>
    __device__ __forceinline__ float value(float sum, int i) const {
        return SCALED ? __fmaf_rn(sum, factor[i] * TILE_FACTOR, bias[i])
                      : sum * CODE_FACTOR * factor[i] + bias[i];
    }
};

// Where this lane's outputs of an item's strips go, those of strip 0; NULL: it ends none.
template <bool DOWN>
__device__ __forceinline__ uint8_t *outputs_at(const kv8_experts_matmul_args &a, const Item &item,
                                               int quarter) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int column = quarter / 2 * 8 + lane % 4 * 2 + quarter % 2;
    if (column >= item.count) return nullptr;
    const int place = item.first + column;
    const int64_t row = DOWN ? a.routing.sorted[place] : place;
    return static_cast<uint8_t *>(a.y) +
           (DOWN ? (row * a.w.num_strips * 16 + g) * 4 : (row * a.w.num_strips * 8 + g) * 2);
}

// Ends a column, its sums of rows g and g + 8, that goes to `outputs`; NULL: nowhere.
template <bool DOWN, bool SCALED = false>
__device__ __forceinline__ void end_column(const kv8_experts_matmul_args &a, const Ends &ends,
                                           float low, float high, uint8_t *outputs, int strip) {
    if (outputs == nullptr) return;
    if constexpr (DOWN) {
        float *const to = reinterpret_cast<float *>(outputs) + strip * 16;
        to[0] = ends.template value<SCALED>(low, 0);
        to[8] = ends.template value<SCALED>(high, 1);
    } else {
        const float y = gate_soon(ends.template value<SCALED>(low, 0),
                                  ends.template value<SCALED>(high, 1), a.alpha, a.limit);
        reinterpret_cast<__half *>(outputs)[strip * 8] = __float2half_rn(y);
    }
}

template <int TILES_N, bool DOWN>
__device__ __forceinline__ void end_strip(const kv8_experts_matmul_args &a, const Ends &ends,
                                          const float2 *exchange, int quarter, uint8_t *outputs,
                                          int strip) {
    if (outputs == nullptr) return;
    const float2 *const from = exchange + quarter * 32 + threadIdx.x % 32;
    float sum[2] = {0, 0};
#pragma unroll
    for (int w = 0; w < TEAM_WARPS; w++) {
        const float2 part = from[w * (2 * TILES_N * 32)];
        sum[0] += part.x;
        sum[1] += part.y;
    }
    end_column<DOWN>(a, ends, sum[0], sum[1], outputs, strip);
}

}  // namespace kv8
