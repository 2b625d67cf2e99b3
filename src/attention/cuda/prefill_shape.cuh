/* prefill_shape.cuh - the measures of a prefill kernel: its warpgroups, stages, registers and
 * shared memory, the rings its roles walk, the slots its items pass through.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_SHAPE_CUH
#define KV8_PREFILL_SHAPE_CUH

#include "prefill_widen.cuh"

enum {
    TILE_KEYS = KV8_PREFILL_TILE_KEYS,
    TILE_BYTES = TILE_KEYS * 128, /* of 64 columns */
    Q_BYTES = 64 * 128            /* one warpgroup's rows of 64 columns */
};

/* One row of prefill_kernels.inc. */
template <int CODE_, int HEAD_DIM_, int NUM_MATH_, int NUM_STAGES_, int NUM_AHEAD_,
          int MATH_REGISTERS_, int PRODUCER_REGISTERS_>
struct prefill_shape {
    static const int CODE = CODE_, HEAD_DIM = HEAD_DIM_, NUM_MATH = NUM_MATH_;
    static const bool FP8 = false; /* products of 8-bit codes: prefill_fp8_shape.cuh */
    static const int NUM_STAGES = NUM_STAGES_;
    static const int NUM_AHEAD = NUM_AHEAD_; /* tiles whose codes are under way */
    static const int MATH_REGISTERS = MATH_REGISTERS_, PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
    static const int LOADS =
        PRODUCER_REGISTERS < 64 ? 2 : 4; /* 16 bytes of codes that a thread holds while widening */
    /* Of a warp at K's barriers: with int8 every lane hands over, its key's scale or its reads. */
    static const int K_ARRIVALS = CODE == CODE_INT8 ? 32 : 1;
    static const int COLUMNS = HEAD_DIM / 64; /* tiles of 64 columns in a row */
    static const int THREADS = 128 * (NUM_MATH + 1);
    static const int Q_AT = 0;
    static const int K_AT = Q_AT + NUM_MATH * COLUMNS * Q_BYTES;
    static const int V_AT = K_AT + NUM_STAGES * COLUMNS * TILE_BYTES;
    /* Codes as they lie in pages: per producer warp, NUM_AHEAD + 1 tiles of K then V. */
    static const int RAW_AT = V_AT + NUM_STAGES * COLUMNS * TILE_BYTES;
    static const int RAW_TILE_BYTES = code_traits<CODE>::wide ? 0 : 2 * COLUMNS * RAW_PIECE_BYTES;
    /* int8: K's scales of a stage's keys, f16. */
    static const int K_SCALES_AT = RAW_AT + 4 * (NUM_AHEAD + 1) * RAW_TILE_BYTES;
    static const int BARRIERS_AT =
        K_SCALES_AT + (CODE == CODE_INT8 ? NUM_STAGES * TILE_KEYS * 2 : 0);
    /* Barriers: K full, K empty, V full, V empty per stage; item full, empty. */
    static const int ITEM_BARRIERS_AT = BARRIERS_AT + 8 * 4 * NUM_STAGES;
    static const int ITEMS_AT = ITEM_BARRIERS_AT + 8 * 2 * KV8_PREFILL_ITEM_SLOTS;
    static const int ROWS_AT = ITEMS_AT + KV8_PREFILL_ITEM_SLOTS * (int)sizeof(kv8_prefill_item);
    static const int SHARED_BYTES = ROWS_AT + NUM_MATH * 64 * 16;
    static_assert(SHARED_BYTES == KV8_PREFILL_SM90_SHARED(code_traits<CODE>::bytes,
                                                          CODE == CODE_INT8, HEAD_DIM, NUM_MATH,
                                                          NUM_STAGES, NUM_AHEAD),
                  "what the host asks for");
};

/* A ring's place after n steps: stage and the parity of its round. */
template <int N>
struct ring {
    static_assert((N & (N - 1)) == 0, "a power of two");
    uint32_t steps;
    __device__ ring() : steps(0) {}
    __device__ __forceinline__ uint32_t stage() const { return steps % N; }
    __device__ __forceinline__ uint32_t parity() const { return steps / N % 2; }
    __device__ __forceinline__ void next() { steps++; }
};

static_assert(sizeof(kv8_prefill_item) == KV8_PREFILL_ITEM_BYTES, "64 bytes");
/* The slots that items pass through. */
template <class SHAPE>
__device__ __forceinline__ const kv8_prefill_item *item_slot(int slot) {
    extern __shared__ __align__(1024) uint8_t memory[];
    return (const kv8_prefill_item *)(memory + SHAPE::ITEMS_AT) + slot;
}

#endif
