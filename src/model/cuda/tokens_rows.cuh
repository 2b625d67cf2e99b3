// tokens_rows.cuh - rows of tokens that blocks hand to each other: the residual stream, of which
// each block has some columns, and how the warps of a block share what they take.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "tokens_shared.cuh"

namespace kv8 {

// A thread's row of the block's rows of O: a warp has a token's.
struct Own {
    int token, row, at;
    bool lives;
    __device__ explicit Own(const kv8_tokens_args &a) {
        const Share rows = rows_of_o();
        token = threadIdx.x / 32, row = threadIdx.x % 32, at = rows.begin + row;
        lives = token < a.num_tokens && row < rows.count();
    }
};

// Hands on the block's rows of a residual stream, and what squares they have.
__device__ __forceinline__ void hand_rows(const kv8_tokens_args &a, const Own &own, float x,
                                          float *rows, float *squares, uint32_t turn) {
    if (own.lives) hand(rows + own.token * HIDDEN + own.at, x, turn);
    const float sum = warp_sum(own.lives ? x * x : 0);
    if (own.row == 0 && own.token < a.num_tokens)
        hand(squares + own.token * KV8_TOKEN_MAX_BLOCKS + blockIdx.x, sum, turn);
}

// How the computing warps share some rows: this one's row, and which of `parts` parts of it.
struct WarpRow {
    int row, part, parts;
    __device__ explicit WarpRow(int num_rows) {
        const int warp = threadIdx.x / 32;
        parts = num_rows > 4 ? 1 : num_rows > 2 ? 2 : num_rows > 1 ? 4 : 8;
        row = warp / parts, part = warp % parts;
    }
};

// Without the bit of its turn.
__device__ __forceinline__ uint4 words_of(const Handed<4> &h) {
    return make_uint4(h.w[0] & ~1u, h.w[1] & ~1u, h.w[2] & ~1u, h.w[3] & ~1u);
}

// A warp's part of a row of `pieces` pieces of 16 bytes that blocks handed on, N at a time:
// asked() once, then put(piece, its words).
template <int N, class ASKED, class PUT>
__device__ __forceinline__ void take_row(const void *row, int pieces, const WarpRow &mine,
                                         uint32_t turn, ASKED &&asked, PUT &&put) {
    const int stride = 32 * mine.parts;
    const auto *const from = static_cast<const uint8_t *>(row);
#pragma unroll 1
    for (int first = mine.part * 32 + threadIdx.x % 32, n = 0; n < pieces;
         n += N * stride, first += N * stride) {
        Handed<4> h[N];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < N; i++) h[i].load(from + 16 * min(first + i * stride, pieces - 1));
#pragma unroll
            for (int i = 0; i < N; i++) all &= h[i].came(turn);
        } while (!all);
        if (n == 0) asked();
#pragma unroll
        for (int i = 0; i < N; i++)
            if (first + i * stride < pieces) put(first + i * stride, h[i]);
    }
}

// What is normed, and the meeting that it is ready after.
struct NormSource {
    const uint16_t *gain;
    const float *rows, *squares;
    Meeting before;
    bool is_fenced;
};

// All tokens' normed rows, f16, to shared.x.
template <int X>
__device__ __forceinline__ void norm_tokens(const kv8_tokens_args &a, const NormSource &from,
                                            uint32_t turn, Shared<X> &shared) {
    for (int i = threadIdx.x; i < HIDDEN / 8; i += COMPUTE_THREADS)
        reinterpret_cast<uint4 *>(shared.gain)[i] =
            __ldg(reinterpret_cast<const uint4 *>(from.gain) + i);
    from.is_fenced ? from.before.wait() : from.before.hear();
    const WarpRow mine(a.num_tokens);
    if (mine.row < a.num_tokens) {
        float scale = 0;
        const auto square_at = [&](int i) {
            return squares_at(from.squares + mine.row * KV8_TOKEN_MAX_BLOCKS, i);
        };
        Squares sums;
        ask(sums, turn, square_at);
        uint8_t *const to = shared.x + mine.row * X_ROW_BYTES;
        take_row<12>(
            from.rows + mine.row * HIDDEN, HIDDEN / 4, mine, turn,
            [&] {
                get(sums, turn, square_at);
                scale = norm_scale(a.eps, sums);
            },
            [&](int n, const Handed<4> &x) {
                const uint2 g = reinterpret_cast<const uint2 *>(shared.gain)[n];
                const float y[4] = {
                    x.value(0) * scale * low_bf16(g.x), x.value(1) * scale * high_bf16(g.x),
                    x.value(2) * scale * low_bf16(g.y), x.value(3) * scale * high_bf16(g.y)};
                reinterpret_cast<uint2 *>(to)[n] =
                    make_uint2(pack_f16(y[0], y[1]), pack_f16(y[2], y[3]));
            });
    }
    meet_warps();
}

}  // namespace kv8
