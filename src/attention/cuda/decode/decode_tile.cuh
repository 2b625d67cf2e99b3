// decode_tile.cuh - 16 tokens of one KV head in shared memory, and their MMA fragments.
//
// K is the first MMA's A operand as it lies: lane (g = lane / 4, c = lane % 4) owns the same 16
// bytes of rows g and g + 8, and Q takes its dims in that order. V is A of the second, dims on
// rows: lane (g, c) owns a run of dims of tokens 2c, 2c + 1, 2c + 8, 2c + 9 and interleaves token
// pairs. Rows are swizzled (or padded to an odd number of 16-byte chunks) so that both are free of
// bank conflicts at the head dims that matter.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm80.cuh"
#include "widen.cuh"

namespace kv8 {

enum { TOKENS = 16 };  // of a granule: one M of the first MMA, one K of the second

// A row of DIM codes.
template <Format F, int DIM>
struct Row {
    static constexpr int BYTES = DIM * size_of(F);
    static constexpr int CHUNKS = BYTES / 16;
    static constexpr bool HALF_LINE = BYTES == 64, LINES = BYTES % 128 == 0;
    static constexpr int PITCH = HALF_LINE || LINES ? BYTES : (CHUNKS | 1) * 16;
    static constexpr int TILE_BYTES = TOKENS * PITCH;
    static_assert(BYTES % 16 == 0 && DIM % 16 == 0);

    // Byte offset of 16-byte chunk `chunk` of token `token`.
    __device__ static int at(int token, int chunk) {
        const int spread = 2 * ((token >> 1) & 3);
        if constexpr (HALF_LINE)
            return (token >> 1) * 128 + ((((token & 1) * 4 + chunk) ^ spread) * 16);
        else if constexpr (LINES)
            return token * PITCH + ((chunk ^ spread ^ (4 * (token & 1))) * 16);
        else
            return token * PITCH + chunk * 16;
    }
    __device__ static int at_byte(int token, int byte) { return at(token, byte / 16) + byte % 16; }
};

// A row as a page holds it, of all KV heads of a token.
template <int BYTES_>
struct PlainRow {
    static constexpr int BYTES = BYTES_, PITCH = BYTES_, TILE_BYTES = TOKENS * PITCH;

    __device__ static int at_byte(int token, int byte) { return token * PITCH + byte; }
};

// First MMA, of one of the heads that range a row R; `at` is where the head's bytes begin in it.
// Segment i of a head is 64 bytes wide (the last one maybe 32 or 16): lane c owns a quarter of it.
// MMA k-step s of a lane's elements takes 4s..4s+3.
template <Format F, int DIM, class R>
struct KeyTile {
    static constexpr int BYTES = DIM * size_of(F);
    static constexpr int SEGMENTS = (BYTES + 63) / 64;
    static constexpr int STEPS = DIM / 16;
    __host__ __device__ static constexpr int lane_bytes(int segment) {
        const int left = BYTES - segment * 64;
        return left >= 64 ? 16 : left / 4;
    }
    // The dim of element e (0..lane's) of segment i for lane c.
    __device__ static int dim(int segment, int c, int e) {
        return (segment * 64 + c * lane_bytes(segment)) / size_of(F) + e;
    }
    // scores[nt] += K (tokens x DIM) . Q^T. IN_HALVES: two sums, neither of which waits for the
    // other.
    template <int NT, int PARTS, bool IN_HALVES = false>
    __device__ static void multiply(uint32_t tile, int at, int g, int c,
                                    const uint32_t (&q)[PARTS][NT][STEPS][2],
                                    float (&scores)[NT][4]) {
        constexpr int HALF = IN_HALVES ? SEGMENTS / 2 : 0;
        segments<HALF, SEGMENTS, NT, PARTS>(tile, at, g, c, q, scores);
        if constexpr (HALF > 0) {
            float others[NT][4] = {};
            segments<0, HALF, NT, PARTS>(tile, at, g, c, q, others);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[nt][i] += others[nt][i];
        }
    }

   private:
    template <int I, int END, int NT, int PARTS>
    __device__ static void segments(uint32_t tile, int at, int g, int c,
                                    const uint32_t (&q)[PARTS][NT][STEPS][2],
                                    float (&scores)[NT][4]) {
        if constexpr (I < END) {
            constexpr int OWN = lane_bytes(I);
            const uint32_t from = tile + R::at_byte(g, at + I * 64 + c * OWN);
            const auto top = load_shared<OWN>(from);
            const auto low = load_shared<OWN>(from + 8 * R::PITCH);  // same swizzle
            constexpr int LOCAL = OWN / size_of(F) / 4;              // steps of this segment
#pragma unroll
            for (int s = 0; s < LOCAL; s++) {
                uint32_t a[4];
                if constexpr (size_of(F) == 2) {
                    a[0] = top.w[2 * s], a[2] = top.w[2 * s + 1];
                    a[1] = low.w[2 * s], a[3] = low.w[2 * s + 1];
                } else {
                    widen4_key<F>(top.w[s], a[0], a[2]);
                    widen4_key<F>(low.w[s], a[1], a[3]);
                }
                constexpr int FIRST = I * 64 / size_of(F) / 16;
#pragma unroll
                for (int part = 0; part < PARTS; part++)
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
                        mma<F == BF16>(scores[nt], a, q[part][nt][FIRST + s]);
            }
            segments<I + 1, END, NT, PARTS>(tile, at, g, c, q, scores);
        }
    }
};

// Second MMA. Block i of a row is the widest of 16, 8, 4, 2 bytes per lane that still fits.
template <Format F, int DIM, class R>
struct ValueTile {
    static constexpr int BYTES = DIM * size_of(F);
    static constexpr int TILES = DIM / 16;  // m-tiles
    // Bytes per lane of the block that starts at byte `at`.
    __host__ __device__ static constexpr int lane_bytes(int at) {
        const int left = BYTES - at;
        return left >= 128 ? 16 : left >= 64 ? 8 : left >= 32 ? 4 : 2;
    }
    // The dim of row g of m-tile t; row g + 8 is the next one.
    __device__ static int dim(int t, int g) { return dim_from<0, 0>(t, g); }
    // Calls use(t, a) with the A fragment of every m-tile in turn.
    template <class USE>
    __device__ static void each(uint32_t tile, int at, int g, int c, USE &&use) {
        block<0, 0>(tile, at, g, c, use);
    }

   private:
    template <int AT, int FIRST>
    __device__ static int dim_from(int t, int g) {
        constexpr int OWN = lane_bytes(AT), TILES_HERE = OWN / size_of(F) / 2;
        if constexpr (AT + OWN * 8 < BYTES)
            if (t >= FIRST + TILES_HERE) return dim_from<AT + OWN * 8, FIRST + TILES_HERE>(t, g);
        return (AT + g * OWN) / size_of(F) + 2 * (t - FIRST);
    }
    template <int AT, int FIRST, class USE>
    __device__ static void block(uint32_t tile, int at, int g, int c, USE &use) {
        if constexpr (AT < BYTES) {
            constexpr int OWN = lane_bytes(AT);
            const int byte = at + AT + g * OWN;
            const uint32_t even = tile + R::at_byte(2 * c, byte);
            const uint32_t odd = tile + R::at_byte(2 * c + 1, byte);
            const auto w0 = load_shared<OWN>(even), w8 = load_shared<OWN>(even + 8 * R::PITCH);
            const auto w1 = load_shared<OWN>(odd), w9 = load_shared<OWN>(odd + 8 * R::PITCH);
            constexpr int LOCAL = OWN / size_of(F) / 2;  // m-tiles of this block
#pragma unroll
            for (int t = 0; t < LOCAL; t++) {
                uint32_t a[4];
                if constexpr (size_of(F) == 2) {
                    a[0] = __byte_perm(w0.w[t], w1.w[t], 0x5410);
                    a[1] = __byte_perm(w0.w[t], w1.w[t], 0x7632);
                    a[2] = __byte_perm(w8.w[t], w9.w[t], 0x5410);
                    a[3] = __byte_perm(w8.w[t], w9.w[t], 0x7632);
                } else {
                    const uint32_t select = t % 2 == 0 ? 0x5140 : 0x7362;
                    widen4<F>(__byte_perm(w0.w[t / 2], w1.w[t / 2], select), a[0], a[1]);
                    widen4<F>(__byte_perm(w8.w[t / 2], w9.w[t / 2], select), a[2], a[3]);
                }
                use(FIRST + t, a);
            }
            block<AT + OWN * 8, FIRST + LOCAL>(tile, at, g, c, use);
        }
    }
};

}  // namespace kv8
