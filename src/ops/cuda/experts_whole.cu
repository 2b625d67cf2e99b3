// experts_whole.cu - gate and up with their gate, and down, of few rows an expert and many strips,
// by the copy engine. `scaled`: with the sums of experts_tiles.cu, for a fixed order.
//
// Grid: as many blocks as the GPU holds. Block: 384 threads. Shared memory: two chunks of one or
// two strips for each warp, and the rows of one or two items. Bytes: the strips of every chosen
// expert once. Bound by: memory; of items of two tiles the issue of instructions too.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_whole.cuh"

#define KV8_EXPERTS_WHOLE(name, MOST, DOWN, SCALED)                                     \
    extern "C" __global__ void __launch_bounds__(32 * KV8_EXPERTS_WHOLE_WARPS, 1)       \
        kv8_experts_##name##__sm90(const __grid_constant__ kv8_experts_matmul_args a) { \
        kv8::stream_whole<MOST, DOWN, SCALED>(a);                                       \
    }
KV8_EXPERTS_WHOLE(gate_up_x8_whole, 1, false, false)
KV8_EXPERTS_WHOLE(gate_up_x16_whole, 2, false, false)
KV8_EXPERTS_WHOLE(down_x8_whole, 1, true, false)
KV8_EXPERTS_WHOLE(down_x16_whole, 2, true, false)
KV8_EXPERTS_WHOLE(gate_up_x8_scaled, 1, false, true)
KV8_EXPERTS_WHOLE(gate_up_x16_scaled, 2, false, true)
KV8_EXPERTS_WHOLE(down_x8_scaled, 1, true, true)
KV8_EXPERTS_WHOLE(down_x16_scaled, 2, true, true)
