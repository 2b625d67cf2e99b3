// prefill_fp8_shape.cuh - the measures of a prefill kernel that multiplies codes: its stages,
// registers and shared memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_shape.cuh"
#include "ptx_matrices_sm90.cuh"

namespace kv8 {

// One row of prefill_fp8_kernels.inc.
template <bool OPTIONS_, Format CODE_, int HEAD_DIM_, int NUM_CONSUMERS_, int K_STAGES_,
          int V_STAGES_, int CONSUMER_REGISTERS_, int PRODUCER_REGISTERS_>
struct Fp8Shape {
    static constexpr bool FP8 = true, OPTIONS = OPTIONS_;
    static constexpr Format CODE = CODE_, FK = CODE_, FV = CODE_;  // of K and V alike
    static constexpr int HEAD_DIM = HEAD_DIM_, NUM_CONSUMERS = NUM_CONSUMERS_;
    static constexpr int K_STAGES = K_STAGES_, V_STAGES = V_STAGES_;
    static constexpr int CONSUMER_REGISTERS = CONSUMER_REGISTERS_,
                         PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
    // Columns of O += P V: head_dim, one of ones, whose sums are the rows', seven of zeros.
    static constexpr int COLUMNS = HEAD_DIM + 8;
    // Chunk of 16 bytes of a row of HEAD_DIM bytes under its swizzle.
    static __device__ __forceinline__ int swizzled(int chunk, int row) {
        return HEAD_DIM == 128 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
    }
    static constexpr int Q_AT = 0;
    static constexpr int Q_BYTES = 64 * HEAD_DIM;  // of one warpgroup
    static constexpr int K_AT = Q_AT + NUM_CONSUMERS * Q_BYTES;
    static constexpr int K_BYTES = TILE_KEYS * HEAD_DIM;
    static constexpr int V_AT = K_AT + K_STAGES * K_BYTES;  // turned: a row of keys a column of O
    static constexpr int V_BYTES = COLUMNS * TILE_KEYS;
    static constexpr int RAW_AT =
        V_AT + V_STAGES * V_BYTES;  // a tile of V as it lies in pages; per warp
    static constexpr int RAW_BYTES = 32 * HEAD_DIM;
    // Second level of O's sums, f32: each thread's own, in places of 16 bytes 128 threads apart.
    static constexpr int SUMS_AT = RAW_AT + 4 * RAW_BYTES;
    static constexpr int SUMS_BYTES = 64 * HEAD_DIM * 4;
    // Barriers: of the stages; rows' records full; Q empty; of the items.
    static constexpr int K_BARRIERS_AT = SUMS_AT + NUM_CONSUMERS * SUMS_BYTES;
    static constexpr int V_BARRIERS_AT = K_BARRIERS_AT + 8 * 2 * K_STAGES;
    static __device__ __forceinline__ uint32_t barrier(uint32_t shared, StageBarrier kind,
                                                       uint32_t stage) {
        return kind < V_FULL ? shared + K_BARRIERS_AT + 8 * (kind * K_STAGES + stage)
                             : shared + V_BARRIERS_AT + 8 * ((kind - V_FULL) * V_STAGES + stage);
    }
    static constexpr int ROWS_BARRIER_AT = V_BARRIERS_AT + 8 * 2 * V_STAGES;
    static constexpr int Q_BARRIER_AT = ROWS_BARRIER_AT + 8;
    static constexpr int ITEM_BARRIERS_AT = Q_BARRIER_AT + 8;
    static constexpr int ITEMS_AT = ITEM_BARRIERS_AT + 8 * 2 * KV8_PREFILL_ITEM_SLOTS;
    static constexpr int ROWS_AT = ITEMS_AT + KV8_PREFILL_ITEM_SLOTS * KV8_PREFILL_ITEM_SLOT_BYTES;
    // Where the list of items with broken rows begins.
    static constexpr int BROKEN_AT = ROWS_AT + 2 * NUM_CONSUMERS * 64 * KV8_PREFILL_ROW_BYTES;
    static constexpr int SHARED_BYTES = BROKEN_AT + 16;
    static_assert(K_BYTES % 1024 == 0 && V_BYTES % 1024 == 0 && Q_BYTES % 1024 == 0, "swizzles");
    static_assert(ITEMS_AT % 16 == 0, "items are stored by 16 bytes");
    static_assert(SHARED_BYTES ==
                      KV8_PREFILL_FP8_SHARED(HEAD_DIM, NUM_CONSUMERS, K_STAGES, V_STAGES),
                  "what the host asks for");
};

// Four matrices of 8 x 8 pairs of bytes, turned; a lane's address is that of row lane % 8 of matrix
// lane / 8.
__device__ __forceinline__ void load_turned(uint32_t address, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// A ring's place: stage and the parity of its round.
template <int N>
struct StageRing {
    uint32_t stage, parity;
    __device__ StageRing() : stage(0), parity(0) {}
    __device__ __forceinline__ void next() {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace kv8
