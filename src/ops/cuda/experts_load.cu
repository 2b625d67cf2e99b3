// experts_load.cu - a checkpoint's blocks, scales and biases into strips (experts_args.h).
//
// Grid: x = strips of an expert, y = experts. Block: 256 threads, one for each row's block of 32
// inputs at a time. Bytes: all read once, written once, in pieces of 4. Bound by: memory, and by
// the copy from the host that it follows.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_args.h"
#include "mxfp4_strip.cuh"

namespace kv8 {

// The checkpoint's row of row `r` of the block's strip.
__device__ __forceinline__ int64_t source_row(const kv8_experts_load_args &a, int r) {
    const int64_t strip = blockIdx.x;
    const int64_t row = a.paired ? strip * 16 + r % 8 * 2 + r / 8 : strip * 16 + r;
    return blockIdx.y * static_cast<int64_t>(a.rows) + row;
}

// Words c = 0 to 3 of one row's block: input 2i of a block is in the lower half of its byte i.
__device__ __forceinline__ uint32_t word_of(const uint4 &block, int c) {
    const uint32_t bytes[4] = {block.x >> 8 * c, block.y >> 8 * c, block.z >> 8 * c,
                               block.w >> 8 * c};
    const uint32_t high = code_half(bytes[0] >> 4 & 15, bytes[1] >> 4 & 15, bytes[2] >> 4 & 15,
                                    bytes[3] >> 4 & 15, 0);
    const uint32_t low =
        code_half(bytes[0] & 15, bytes[1] & 15, bytes[2] & 15, bytes[3] & 15, high >> 2 & 1);
    return low | high << 16;
}

__device__ __forceinline__ void largest_scales(const kv8_experts_load_args &a, int *largest) {
    if (threadIdx.x < KV8_STRIP_ROWS) largest[threadIdx.x] = 0;
    __syncthreads();
    const int blocks = a.cols / 32;
    for (int i = threadIdx.x; i < KV8_STRIP_ROWS * blocks; i += blockDim.x) {
        const int r = i / blocks;
        atomicMax(&largest[r], a.scales[source_row(a, r) * blocks + i % blocks]);
    }
    __syncthreads();
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(KV8_EXPERTS_LOAD_THREADS)
    kv8_experts_load__sm80(const __grid_constant__ kv8_experts_load_args a) {
    __shared__ int largest[KV8_STRIP_ROWS];
    kv8::largest_scales(a, largest);
    const int64_t strip = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    uint8_t *const to = a.strips + strip * a.strip_bytes;
    uint8_t *const scales = to + a.num_tiles * KV8_TILE_CODE_BYTES;
    const int blocks = a.cols / 32, padded = 2 * a.num_tiles;
    for (int i = threadIdx.x; i < KV8_STRIP_ROWS * padded; i += blockDim.x) {
        const int r = i / padded, b = i % padded, g = r % 8, word = r / 8 * 2 + b % 2;
        const int64_t from = kv8::source_row(a, r) * blocks + b;
        uint4 block = {};
        int scale = 0;
        if (b < blocks) {
            block = reinterpret_cast<const uint4 *>(a.blocks)[from];
            scale = max(0, a.scales[from] + KV8_TOP_SCALE - largest[r]);
        }
        uint8_t *const tile = to + b / 2 * KV8_TILE_CODE_BYTES;
        for (int c = 0; c < 4; c++)
            *reinterpret_cast<uint32_t *>(tile + (g * 4 + c) * 16 + word * 4) =
                kv8::word_of(block, c);
        scales[b / 2 * KV8_TILE_SCALE_BYTES + g * 4 + word] = static_cast<uint8_t>(scale);
    }
    if (threadIdx.x < KV8_STRIP_ROWS) {
        const int r = threadIdx.x;
        uint8_t *const end = scales + a.num_tiles * KV8_TILE_SCALE_BYTES;
        reinterpret_cast<float *>(end)[r] = ldexpf(1.0f, largest[r] - KV8_TOP_SCALE);
        const uint16_t bias = largest[r] == 255 ? 0x7fc0 : a.bias[kv8::source_row(a, r)];
        reinterpret_cast<uint16_t *>(end + KV8_STRIP_ROWS * 4)[r] = bias;
    }
}
