/* ceiling_products.cu - products of f16 with sums of f32 out of shared memory alone: what no kernel
 * that multiplies as much can beat.
 *
 * Grid: a block a multiprocessor. Block: two warpgroups, of 64 rows by 256 columns each. Shared
 * memory: 48 KiB, written once, by near-random numbers: a GPU's clock falls with the bits that
 * change. Bytes: none. Bound by: the tensor cores.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_args.h"
#include "ptx_sm90.cuh"

namespace {

constexpr int ROW_BYTES = 128, ROWS = 64, COLS = 256;  // a row: the 64 of k of a step
constexpr int A_BYTES = ROWS * ROW_BYTES, B_BYTES = COLS * ROW_BYTES;

// A finite f16 of either sign, of magnitude 0.5 to 2.
__device__ uint16_t near_random(uint32_t i) {
    uint32_t x = i * 0x9e3779b1u;
    x ^= x >> 15, x *= 0x85ebca77u, x ^= x >> 13;
    return static_cast<uint16_t>((x & 0x87ffu) | 0x3800u);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(KV8_PRODUCT_CEILING_THREADS, 1)
    kv8_product_ceiling__sm90(const __grid_constant__ kv8_product_ceiling_args a) {
    __shared__ __align__(1024) uint16_t values[(2 * A_BYTES + B_BYTES) / 2];
    for (uint32_t i = threadIdx.x; i < sizeof values / 2; i += blockDim.x)
        values[i] = near_random(i);
    kv8::fence_stores_before_wgmma();
    __syncthreads();
    const uint32_t at = kv8::smem_address(values), own = threadIdx.x / 128 * A_BYTES;
    const uint32_t rows = kv8::matrix_descriptor(at + own, 0);
    const uint32_t columns = kv8::matrix_descriptor(at + 2 * A_BYTES, 0);
    float d[COLS / 2] = {};
#pragma unroll 1
    for (int step = 0; step < a.num_steps; step++) {
        kv8::wgmma_fence();
#pragma unroll
        for (int k = 0; k < ROW_BYTES; k += 32)
            kv8::wgmma_shared<false>(d, kv8::descriptor_at(rows, k), kv8::descriptor_at(columns, k),
                                     1);
        kv8::wgmma_commit();
        kv8::wgmma_wait<1>();
    }
    kv8::wgmma_wait<0>();
    kv8::registers_pin(d);
    float all = 0;
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) all += d[i];
    if (all == a.unlikely) *a.result_out = all;
}
