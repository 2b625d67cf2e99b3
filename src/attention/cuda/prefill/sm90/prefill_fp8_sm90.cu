// prefill_fp8_sm90.cu - the prefill kernels for Hopper that multiply codes, Q in e4m3: one per row
// of prefill_fp8_kernels.inc.
//
// Grid and block as prefill_sm90.cuh's. Bound by exp2 (16 a cycle) as much as by the tensor cores
// at head_dim 128, twice as much at 64: per 64 rows and tile of 128 keys 512 cycles against 512 or
// 256.
//
// SPDX-License-Identifier: Apache-2.0
#include "prefill_fp8_consumer.cuh"
#include "prefill_fp8_producer.cuh"
#include "prefill_sm90.cuh"

namespace kv8 {

// The column of ones behind every stage of V, and the columns of zeros behind that.
template <class SHAPE>
__device__ __forceinline__ void store_ones(uint32_t shared) {
    const uint32_t one = SHAPE::CODE == E5M2 ? 0x3C3C3C3C : 0x38383838;
    for (int i = threadIdx.x; i < SHAPE::V_STAGES * 64; i += 128 * (SHAPE::NUM_CONSUMERS + 1)) {
        const uint32_t word = i % 64 < TILE_KEYS / 16 ? one : 0;
        store_shared(shared + SHAPE::V_AT + i / 64 * SHAPE::V_BYTES + SHAPE::HEAD_DIM * TILE_KEYS +
                         16 * (i % 64),
                     word, word, word, word);
    }
    fence_stores_before_wgmma();
}

template <class SHAPE>
__device__ __forceinline__ void init_fp8_barriers(uint32_t shared) {
    const int warps = 4 * SHAPE::NUM_CONSUMERS;
    for (int i = 0; i < SHAPE::K_STAGES; i++) {
        barrier_init(SHAPE::barrier(shared, K_FULL, i), 4);
        barrier_init(SHAPE::barrier(shared, K_EMPTY, i), warps);
    }
    for (int i = 0; i < SHAPE::V_STAGES; i++) {
        barrier_init(SHAPE::barrier(shared, V_FULL, i), 4);
        barrier_init(SHAPE::barrier(shared, V_EMPTY, i), warps);
    }
    // Once an item, every lane hands over what it stored, or has read, itself.
    barrier_init(shared + SHAPE::ROWS_BARRIER_AT, 128);
    barrier_init(shared + SHAPE::Q_BARRIER_AT, 32 * warps);
}

template <class SHAPE>
__device__ __forceinline__ void produce_fp8_items(const kv8_kernel_args &a, uint32_t shared) {
    registers_give<SHAPE::PRODUCER_REGISTERS>();
    Fp8Producer<SHAPE> p(a, shared);
    ItemRing &items = p.walk.items;
    if (p.warp == 0) p.walk.start(a, shared);
    for (;;) {
        const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
        if (item == nullptr) break;
        p.open_item(*item, item_address<SHAPE>(shared, items.stage()));
        p.walk.open(p);
        p.run();
        leave_item<SHAPE>(shared, items);
    }
}

template <class SHAPE>
__device__ __forceinline__ void prefill_fp8_block(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = smem_address(memory);
    store_ones<SHAPE>(shared);
    if (threadIdx.x == 0) {
        init_fp8_barriers<SHAPE>(shared);
        init_items<SHAPE>(shared);
        barrier_init_fence();
    }
    if (!a.is_beside) take_turn();
    __syncthreads();
    if (threadIdx.x / 128 == SHAPE::NUM_CONSUMERS)
        produce_fp8_items<SHAPE>(a, shared);
    else
        compute_items<SHAPE, Fp8Consumer<SHAPE>>(a, shared);
    if (a.is_beside) wait_for_previous();  // both are done when this is
}

}  // namespace kv8

#define KERNEL(OPTIONS, WAY, CODE, NAME, HEAD_DIM, NUM_CONSUMERS, ...)                             \
    extern "C" __global__ void __launch_bounds__(128 * (NUM_CONSUMERS + 1), 1)                     \
        kv8_prefill_##NAME##_d##HEAD_DIM##WAY##__sm90(const __grid_constant__ kv8_kernel_args a) { \
        kv8::prefill_fp8_block<                                                                    \
            kv8::Fp8Shape<OPTIONS, kv8::CODE, HEAD_DIM, NUM_CONSUMERS, __VA_ARGS__>>(a);           \
    }
#define KV8_PREFILL_FP8(...) KERNEL(false, , __VA_ARGS__)
#include "prefill_fp8_kernels.inc"
#undef KV8_PREFILL_FP8
#define KV8_PREFILL_FP8(...) KERNEL(true, _options, __VA_ARGS__)
#include "prefill_fp8_kernels.inc"
