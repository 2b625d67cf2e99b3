// prefill_mma_bf16.cu - prefill on mma.sync in bf16 arithmetic. Grid: as many blocks as fit; block,
// shared memory and what bounds them: prefill_mma.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#include "prefill_mma.cuh"

#define KV8_PREFILL_MMA_BF16(name, head_dim, row_tiles, keys, warps, blocks)        \
    extern "C" __global__ void __launch_bounds__(32 * (warps), blocks)              \
        name(const __grid_constant__ kv8_kernel_args a) {                           \
        kv8::prefill_mma<kv8::MmaShape<head_dim, true, row_tiles, keys, warps>>(a); \
    }
#include "prefill_mma_kernels.inc"
