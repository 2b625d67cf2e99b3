// prefill_window_sm90.cu - prefill over short windows for Hopper: one kernel per row of
// prefill_window_kernels.inc.
//
// Grid: as many blocks as fit the machine, each taking items from the queue until it is empty.
// Block: three warpgroups of 64 packed query rows each, and one of producers. Shared memory: Q,
// four stages of an item's keys of K and of V in 16 bits, codes under way, barriers. Bound by the
// instructions of the softmax and of the results beside two products.
//
// SPDX-License-Identifier: Apache-2.0
#include "prefill_window_consumer.cuh"
#include "prefill_window_producer.cuh"

namespace kv8 {

template <class SHAPE>
__device__ __forceinline__ void prefill_window(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = smem_address(memory);
    if (threadIdx.x == 0) {
        const int warps = 4 * SHAPE::NUM_CONSUMERS;
        for (int i = 0; i < SHAPE::NUM_STAGES; i++) {
            barrier_init(SHAPE::barrier(shared, K_FULL, i), SHAPE::PARTS * SHAPE::K_ARRIVALS);
            barrier_init(SHAPE::barrier(shared, K_EMPTY, i), warps * SHAPE::K_ARRIVALS);
            barrier_init(SHAPE::barrier(shared, V_FULL, i), SHAPE::PARTS);
            barrier_init(SHAPE::barrier(shared, V_EMPTY, i), warps);
        }
        init_items<SHAPE>(shared);
        barrier_init_fence();
    }
    if (!a.is_beside) take_turn();
    __syncthreads();
    if (threadIdx.x / 128 == SHAPE::NUM_CONSUMERS) {
        registers_give<SHAPE::PRODUCER_REGISTERS>();
        WindowProducer<SHAPE>(a, shared).run();
    } else {
        registers_take<SHAPE::CONSUMER_REGISTERS>();
        WindowConsumer<SHAPE>(a, shared).run();
    }
    if (a.is_beside) wait_for_previous();  // both are done when this is
}

}  // namespace kv8

#define KV8_PREFILL_WINDOW(K, V, NAME, ...)                                     \
    extern "C" __global__ void __launch_bounds__(                               \
        kv8::WindowShape<kv8::K, kv8::V, __VA_ARGS__>::THREADS, 1)              \
        kv8_prefill_##NAME##__sm90(const __grid_constant__ kv8_kernel_args a) { \
        kv8::prefill_window<kv8::WindowShape<kv8::K, kv8::V, __VA_ARGS__>>(a);  \
    }
#include "prefill_window_kernels.inc"
