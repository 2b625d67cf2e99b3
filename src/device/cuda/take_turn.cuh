// take_turn.cuh - kernels that are launched before their turn, where the GPU knows that: each waits
// itself for what the others wrote. One that lets the next be made ready after its own wait has
// waited for all before it: before its own wait, the next one may read what those wrote, past L1.
// One that lets it earlier has not: then the next one may read what no kernel writes. Below sm_90
// kernels are launched in their turn.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm90.cuh"

namespace kv8 {

// The next kernel may be made ready.
__device__ __forceinline__ void let_next() {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
#endif
}
// What the kernel before wrote is seen from here on.
__device__ __forceinline__ void await_turn() {
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
#endif
}
__device__ __forceinline__ void take_turn() {
    await_turn();
    let_next();
}

// Before one's turn: what no kernel writes, on its way to L2.
__device__ __forceinline__ void fetch_line(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

}  // namespace kv8
