// prefill_shape.cuh - the measures of a prefill kernel: its warpgroups, stages, registers and
// shared memory, the rings its roles walk, the slots its items pass through.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_widen.cuh"

namespace kv8 {

enum {
    TILE_KEYS = KV8_PREFILL_TILE_KEYS,
    TILE_BYTES = TILE_KEYS * 128,  // of 64 columns
    Q_BYTES = 64 * 128             // one warpgroup's rows of 64 columns
};

// Barriers in shared memory: a stage's K or V has come, or has been read by every consumer; an
// item's slot likewise.
enum StageBarrier : int { K_FULL, K_EMPTY, V_FULL, V_EMPTY };
enum ItemBarrier : int { ITEM_FULL, ITEM_EMPTY };

// One row of prefill_kernels.inc.
template <bool OPTIONS_, Format FK_, Format FV_, int HEAD_DIM_, int NUM_CONSUMERS_, int NUM_STAGES_,
          int NUM_AHEAD_, int CONSUMER_REGISTERS_, int PRODUCER_REGISTERS_>
struct Sm90Shape {
    static constexpr bool OPTIONS = OPTIONS_;    // what few runs ask for: prefill_kernels.inc
    static constexpr Format FK = FK_, FV = FV_;  // of K and of V
    static constexpr int HEAD_DIM = HEAD_DIM_, NUM_CONSUMERS = NUM_CONSUMERS_;
    static constexpr bool FP8 = false;  // products of 8-bit codes: prefill_fp8_shape.cuh
    static constexpr int KEYS = TILE_KEYS, TILE_STEP = TILE_KEYS;  // of a tile, and to the next
    static constexpr int TILE_BYTES = kv8::TILE_BYTES;
    static constexpr int SMALL_BYTES = 4;  // of a stage at SMALL_AT
    static constexpr int NUM_STAGES = NUM_STAGES_;
    static constexpr int NUM_AHEAD = NUM_AHEAD_;  // tiles whose codes are under way
    static constexpr int CONSUMER_REGISTERS = CONSUMER_REGISTERS_,
                         PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
    static constexpr int LOADS =
        PRODUCER_REGISTERS < 64 ? 2 : 4;  // 16 bytes of codes that a thread holds while widening
    // Of a warp at K's barriers: with int8 every lane hands over, its key's scale or its reads.
    static constexpr int K_ARRIVALS = FK == INT8 ? 32 : 1;
    static constexpr int COLUMNS = HEAD_DIM / 64;  // tiles of 64 columns in a row
    static constexpr int THREADS = 128 * (NUM_CONSUMERS + 1);
    static constexpr int Q_AT = 0;
    static constexpr int K_AT = Q_AT + NUM_CONSUMERS * COLUMNS * Q_BYTES;
    static constexpr int V_AT = K_AT + NUM_STAGES * COLUMNS * TILE_BYTES;
    // 8-bit codes as they lie in pages: per producer warp, NUM_AHEAD + 1 tiles of K then V.
    static constexpr int RAW_AT = V_AT + NUM_STAGES * COLUMNS * TILE_BYTES;
    static constexpr int RAW_TILE_BYTES = (!is_wide(FK) + !is_wide(FV)) * COLUMNS * RAW_CHUNK_BYTES;
    // int8: K's scales of a stage's keys, f16.
    static constexpr int K_SCALES_AT = RAW_AT + 4 * (NUM_AHEAD + 1) * RAW_TILE_BYTES;
    static constexpr int BARRIERS_AT = K_SCALES_AT + (FK == INT8 ? NUM_STAGES * TILE_KEYS * 2 : 0);
    static __device__ __forceinline__ uint32_t barrier(uint32_t shared, StageBarrier kind,
                                                       int stage) {
        return shared + BARRIERS_AT + 8 * (kind * NUM_STAGES + stage);
    }
    static constexpr int ITEM_BARRIERS_AT = BARRIERS_AT + 8 * 4 * NUM_STAGES;
    static constexpr int ITEMS_AT = ITEM_BARRIERS_AT + 8 * 2 * KV8_PREFILL_ITEM_SLOTS;
    static constexpr int ROWS_AT = ITEMS_AT + KV8_PREFILL_ITEM_SLOTS * KV8_PREFILL_ITEM_SLOT_BYTES;
    // Where the list of items with broken rows begins.
    static constexpr int BROKEN_AT = ROWS_AT + NUM_CONSUMERS * 64 * KV8_PREFILL_ROW_BYTES;
    // int8: a byte for each stage and producer warp: whether its 32 keys of V are 2^-7 as large.
    static constexpr int SMALL_AT = BROKEN_AT + 16;
    static constexpr int SHARED_BYTES = SMALL_AT + (FV == INT8 ? NUM_STAGES * 4 : 0);
    static_assert(SHARED_BYTES == KV8_PREFILL_SM90_SHARED(FK, FV, HEAD_DIM, NUM_CONSUMERS,
                                                          NUM_STAGES, NUM_AHEAD),
                  "what the host asks for");
};

// Named barriers; of a warpgroup: its index more.
enum { WARPGROUP_BARRIER = 1, CONSUMERS_BARRIER = 4, TURN_BARRIER = 8 };

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ __forceinline__ void or_shared(uint32_t address, uint32_t bits) {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
// A ring's place after n steps: stage and the parity of its round.
template <int N>
struct Ring {
    static_assert((N & (N - 1)) == 0, "a power of two");
    uint32_t steps;
    __device__ Ring() : steps(0) {}
    __device__ __forceinline__ uint32_t stage() const { return steps % N; }
    __device__ __forceinline__ uint32_t parity() const { return steps / N % 2; }
    __device__ __forceinline__ void next() { steps++; }
};

// An item under way.
struct ItemSlot {
    kv8_prefill_item item;
    uint32_t cleared;  // whether a producer cleared something of its V
    uint32_t number;   // its place in the queue
    uint32_t listed;   // whether it is in the list of items with broken rows
    uint32_t missing;  // whether pages of keys that it sees are not there
};
static_assert(sizeof(kv8_prefill_item) == KV8_PREFILL_ITEM_BYTES &&
                  sizeof(ItemSlot) == KV8_PREFILL_ITEM_SLOT_BYTES,
              "what the host asks for");
template <class SHAPE>
__device__ __forceinline__ const kv8_prefill_item *item_slot(int slot) {
    extern __shared__ __align__(1024) uint8_t memory[];
    return (const kv8_prefill_item *)(memory + SHAPE::ITEMS_AT +
                                      KV8_PREFILL_ITEM_SLOT_BYTES * slot);
}

}  // namespace kv8
