// prefill_window_shape.cuh - the measures of a prefill kernel for short windows: an item's keys are
// one tile, which begins at the first key that some row sees, and a warpgroup multiplies the part
// of it that its rows see.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_shape.cuh"

namespace kv8 {

// One row of prefill_window_kernels.inc, at head_dim 64.
template <Format FK_, Format FV_, int CONSUMER_REGISTERS_, int PRODUCER_REGISTERS_>
struct WindowShape {
    static constexpr bool OPTIONS = false, FP8 = false;
    static constexpr Format FK = FK_, FV = FV_;
    static constexpr int HEAD_DIM = 64, COLUMNS = 1;
    static constexpr int NUM_CONSUMERS = KV8_PREFILL_WINDOW_CONSUMERS;
    static constexpr int NUM_STAGES = KV8_PREFILL_WINDOW_STAGES(FK, FV), NUM_AHEAD = 1;
    static constexpr int CONSUMER_REGISTERS = CONSUMER_REGISTERS_,
                         PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
    static constexpr int LOADS = 4;
    static constexpr int KEYS = KV8_PREFILL_WINDOW_KEYS, TILE_STEP = 1;
    static constexpr int PARTS = KEYS / 32;  // of a tile: what a producer warp brings at a time
    static constexpr int SEEN = KV8_PREFILL_WINDOW_SEEN;  // keys of a tile for a warpgroup
    static constexpr int K_ARRIVALS = FK == INT8 ? 32 : 1;
    static constexpr int THREADS = 128 * (NUM_CONSUMERS + 1);
    static constexpr int TILE_BYTES = KEYS * 128;
    static constexpr int Q_AT = 0;
    static constexpr int O_AT = Q_AT + NUM_CONSUMERS * Q_BYTES;
    static constexpr int K_AT = O_AT + NUM_CONSUMERS * Q_BYTES;
    static constexpr int V_AT = K_AT + NUM_STAGES * TILE_BYTES;
    // 8-bit codes of the part that is widened and of the next, a producer warp's own.
    static constexpr int RAW_AT = V_AT + NUM_STAGES * TILE_BYTES;
    static constexpr int RAW_TILE_BYTES = (!is_wide(FK) + !is_wide(FV)) * RAW_CHUNK_BYTES;
    static constexpr int K_SCALES_AT = RAW_AT + 4 * (NUM_AHEAD + 1) * RAW_TILE_BYTES;
    static constexpr int BARRIERS_AT = K_SCALES_AT + (FK == INT8 ? NUM_STAGES * KEYS * 2 : 0);
    static __device__ __forceinline__ uint32_t barrier(uint32_t shared, StageBarrier kind,
                                                       int stage) {
        return shared + BARRIERS_AT + 8 * (kind * NUM_STAGES + stage);
    }
    static constexpr int ITEM_BARRIERS_AT = BARRIERS_AT + 8 * 4 * NUM_STAGES;
    static constexpr int ITEMS_AT = ITEM_BARRIERS_AT + 8 * 2 * KV8_PREFILL_ITEM_SLOTS;
    static constexpr int ROWS_AT = ITEMS_AT + KV8_PREFILL_ITEM_SLOTS * KV8_PREFILL_ITEM_SLOT_BYTES;
    static constexpr int BROKEN_AT = ROWS_AT + NUM_CONSUMERS * 64 * KV8_PREFILL_ROW_BYTES;
    // int8: a byte for each part of a stage: whether its keys of V are 2^-7 as large.
    static constexpr int SMALL_AT = BROKEN_AT + 16, SMALL_BYTES = 8;
    static constexpr int SHARED_BYTES = SMALL_AT + (FV == INT8 ? NUM_STAGES * SMALL_BYTES : 0);
    static_assert(SHARED_BYTES == KV8_PREFILL_WINDOW_SHARED(FK, FV), "what the host asks for");
    static_assert(PARTS <= SMALL_BYTES && KEYS % 32 == 0 && SEEN % 16 == 0,
                  "whole parts and steps");
};

}  // namespace kv8
