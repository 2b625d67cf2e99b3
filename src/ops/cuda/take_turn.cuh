// take_turn.cuh - kernels that are launched before their turn, where the GPU knows that: each waits
// itself for what it reads, and then lets the next one be made ready. A kernel that has waited so
// may be taken to have waited for all before it: before its own wait, the next one may read what
// those wrote, past L1. Below sm_90 kernels are launched in their turn.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm90.cuh"

namespace kv8 {

// What the kernel before wrote is seen from here on.
__device__ __forceinline__ void take_turn() {
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
    launch_dependents();
#endif
}

}  // namespace kv8
