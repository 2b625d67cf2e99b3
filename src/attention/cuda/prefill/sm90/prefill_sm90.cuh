// prefill_sm90.cuh - attention of many query rows over pages, on wgmma.
//
// Grid: as many blocks as fit the machine, each taking items from the queue until it is empty.
// Block: NUM_CONSUMERS warpgroups of 64 packed query rows each, and one warpgroup of producers. Of
// an item with fewer rows the first warpgroups compute, and its tiles go by at the others. Shared
// memory: Q, NUM_STAGES tiles of K and of V (128 keys, 16 bits a value), barriers. Bound by the
// tensor cores and, at head_dim 64, as much by exp2 (16 a cycle): per 64 rows and tile both take
// 512 cycles, so one warpgroup's softmax must cover another's products.
//
// A consumer warpgroup starts O += P(t) V and S(t + 1) = Q K^T together when its turn comes, where
// an item ends S of the next item's first tile: S, P and O are nearly all the registers it has.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_consumer.cuh"
#include "prefill_producer.cuh"

namespace kv8 {

template <class SHAPE, class PRODUCER>
__device__ __forceinline__ void produce_items(const kv8_kernel_args &a, uint32_t shared) {
    registers_give<SHAPE::PRODUCER_REGISTERS>();
    PRODUCER p(a, shared);
    ItemRing items, fetched;
    int asked = p.warp == 0 ? fetch_first<SHAPE, true>(a, shared, fetched) : 0;
    for (;;) {
        const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
        if (item == nullptr) break;
        fetched.next();
        if (p.warp == 0) fetch_item<SHAPE, true>(a, shared, fetched, asked);
        p.open_item(*item, item_address<SHAPE>(shared, items.stage()));
        p.run();
        leave_item<SHAPE>(shared, items);
    }
}
template <class SHAPE, class CONSUMER>
__device__ __forceinline__ void compute_items(const kv8_kernel_args &a, uint32_t shared) {
    registers_take<SHAPE::CONSUMER_REGISTERS>();
    CONSUMER m(a, shared);
    m.run();
}

template <class SHAPE>
__device__ __forceinline__ void prefill_block(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = smem_address(memory);
    if (threadIdx.x == 0) {
        const int warps = 4 * SHAPE::NUM_CONSUMERS;
        for (int i = 0; i < SHAPE::NUM_STAGES; i++) {
            barrier_init(SHAPE::barrier(shared, K_FULL, i), 4 * SHAPE::K_ARRIVALS);
            barrier_init(SHAPE::barrier(shared, K_EMPTY, i), warps * SHAPE::K_ARRIVALS);
            barrier_init(SHAPE::barrier(shared, V_FULL, i), 4);
            barrier_init(SHAPE::barrier(shared, V_EMPTY, i), warps);
        }
        init_items<SHAPE>(shared);
        barrier_init_fence();
    }
    if (!a.is_beside) take_turn();
    __syncthreads();
    if (threadIdx.x / 128 == SHAPE::NUM_CONSUMERS)
        produce_items<SHAPE, Producer<SHAPE>>(a, shared);
    else
        compute_items<SHAPE, Consumer<SHAPE>>(a, shared);
    if (a.is_beside) wait_for_previous();  // both are done when this is
}

}  // namespace kv8
