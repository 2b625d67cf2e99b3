// quantize_q.cu - e4m3 of Q, with a scale for each request and KV head: its absmax first, the codes
// in a second kernel.
//
// A block has 32 neighbouring rows of one KV head's group. It finds each row's request, then its
// threads go over the rows' elements, eight at a time (x8) or one by one (x1: any head_dim, any
// alignment). Maxima meet in shared memory, and of rows of one request one atomic leaves the block.
//
// Grid: x = ceil(max_rows / 32), y = num_kv_heads. Block: 256 threads. Bytes: absmax reads Q,
// quantize reads it again and writes a byte an element. Bound by: memory. Bits: kv8_quantize_q's.
//
// SPDX-License-Identifier: Apache-2.0
#include "codec.cuh"
#include "quantize_q/quantize_q_args.h"

namespace kv8 {
namespace {

constexpr uint32_t ALL_LANES = 0xffffffffu, INF_BITS = 0x7f800000u;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// The block's rows.
struct Rows {
    int32_t first, num;
};
__device__ __forceinline__ Rows rows_of_block(const kv8_quantize_q_kernel_args &a) {
    const int32_t first = blockIdx.x * KV8_QUANTIZE_Q_ROWS;
    const int32_t end = min(a.max_rows, a.qo_indptr[a.batch]);
    return {first, min(KV8_QUANTIZE_Q_ROWS, end - first)};
}

// The last request whose rows begin at or before `row`.
__device__ __forceinline__ int32_t find_request(const kv8_quantize_q_kernel_args &a, int32_t row) {
    int32_t low = 0, high = a.batch;  // qo_indptr[low] <= row < qo_indptr[high]
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (a.qo_indptr[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}
__device__ __forceinline__ int64_t cell_of(const kv8_quantize_q_kernel_args &a, int32_t row) {
    return int64_t{find_request(a, row)} * a.num_kv_heads + blockIdx.y;
}

// Calls visit(row of the block, query head, element) for this thread's share of the rows.
template <int WIDTH, typename VISIT>
__device__ __forceinline__ void for_each_share(const kv8_quantize_q_kernel_args &a,
                                               const Rows &rows, VISIT visit) {
    const int32_t per_head = a.head_dim / WIDTH, per_row = per_head * a.group_size;
    const int32_t first_head = blockIdx.y * a.group_size;
    // Whole passes: every lane of a warp takes part in what the warp does together.
    for (int32_t begin = 0; begin < rows.num * per_row; begin += KV8_QUANTIZE_Q_THREADS) {
        const int32_t i = begin + threadIdx.x, row = i / per_row, in_row = i - row * per_row;
        const int32_t head = in_row / per_head;
        visit(row, first_head + head, (in_row - head * per_head) * WIDTH);
    }
}

template <int WIDTH, typename SOURCE>
__device__ __forceinline__ void load(const kv8_quantize_q_kernel_args &a, int32_t row, int32_t head,
                                     int32_t d, float out[WIDTH]) {
    const SOURCE *const from =
        static_cast<const SOURCE *>(a.q) + row * a.q_stride_row + head * a.q_stride_head + d;
    if constexpr (WIDTH == 8)
        widen8(load8(from), out);
    else
        out[0] = widen(from[0]);
}

// --- absmax ---

template <int WIDTH, typename SOURCE>
__device__ __forceinline__ void find_absmax(const kv8_quantize_q_kernel_args &a) {
    __shared__ uint32_t most_of_row[KV8_QUANTIZE_Q_ROWS];
    const Rows rows = rows_of_block(a);
    if (rows.num <= 0) return;
    if (threadIdx.x < KV8_QUANTIZE_Q_ROWS) most_of_row[threadIdx.x] = 0;
    __syncthreads();
    for_each_share<WIDTH>(a, rows, [&](int32_t row, int32_t head, int32_t d) {
        uint32_t most = 0;
        if (row < rows.num) {
            float x[WIDTH];
            load<WIDTH, SOURCE>(a, rows.first + row, head, d, x);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                const uint32_t bits = __float_as_uint(x[i]) & 0x7fffffffu;
                most = bits < INF_BITS ? max(most, bits) : most;
            }
        }
        const int32_t first_row = __shfl_sync(ALL_LANES, row, 0);
        if (__all_sync(ALL_LANES, row == first_row)) {
            most = __reduce_max_sync(ALL_LANES, most);
            if (threadIdx.x % 32 == 0 && row < rows.num) atomicMax(&most_of_row[row], most);
        } else if (row < rows.num) {
            atomicMax(&most_of_row[row], most);
        }
    });
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // One warp has all rows; most are of one request.
    const bool there = static_cast<int32_t>(threadIdx.x) < rows.num;
    const int64_t cell = there ? cell_of(a, rows.first + threadIdx.x) : -1;
    const uint32_t own = most_of_row[threadIdx.x];
    const int64_t first_cell = __shfl_sync(ALL_LANES, cell, 0);
    if (__all_sync(ALL_LANES, !there || cell == first_cell)) {
        const uint32_t most = __reduce_max_sync(ALL_LANES, own);
        if (threadIdx.x == 0) atomicMax(&a.amax[cell], most);
    } else if (there) {
        atomicMax(&a.amax[cell], own);
    }
}

// --- codes ---

__device__ __forceinline__ float scale_of(uint32_t amax_bits) {
    const float scale = __fdiv_rn(__uint_as_float(amax_bits), format<KV8_E4M3>::max);
    return scale >= SMALLEST_NORMAL ? scale : 1.0f;
}

// As the processors divide: a NaN keeps its sign and payload and becomes quiet.
__device__ __forceinline__ float divide_one(float x, float scale) {
    return isnan(x) ? __uint_as_float(__float_as_uint(x) | KV8_F32_QUIET) : __fdiv_rn(x, scale);
}

template <int WIDTH>
__device__ __forceinline__ void store(float x[WIDTH], float scale, kv8_e4m3 *to) {
    if constexpr (WIDTH == 8) {
        float q[8];
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = x[i];
        const bool right = divide8<false>(q, make_divisor(scale));
        if (right && max_magnitude8(q) <= format<KV8_E4M3>::fast_max)
            return format<KV8_E4M3>::store8(q, to);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) to[i] = format<KV8_E4M3>::encode(divide_one(x[i], scale));
}

// The scales of every request, by the blocks of the first rows: some may have none.
__device__ __forceinline__ void tell_scales(const kv8_quantize_q_kernel_args &a) {
    if (a.q_scale == nullptr || blockIdx.x != 0) return;
    for (int32_t b = threadIdx.x; b < a.batch; b += KV8_QUANTIZE_Q_THREADS) {
        const int64_t cell = int64_t{b} * a.num_kv_heads + blockIdx.y;
        a.q_scale[cell] = scale_of(a.amax[cell]);
    }
}

template <int WIDTH, typename SOURCE>
__device__ __forceinline__ void quantize(const kv8_quantize_q_kernel_args &a) {
    __shared__ float scale_of_row[KV8_QUANTIZE_Q_ROWS];
    const Rows rows = rows_of_block(a);
    tell_scales(a);
    if (rows.num <= 0) return;
    if (a.head_scale == nullptr && static_cast<int32_t>(threadIdx.x) < rows.num)
        scale_of_row[threadIdx.x] = scale_of(a.amax[cell_of(a, rows.first + threadIdx.x)]);
    __syncthreads();
    for_each_share<WIDTH>(a, rows, [&](int32_t row, int32_t head, int32_t d) {
        if (row >= rows.num) return;
        float x[WIDTH];
        load<WIDTH, SOURCE>(a, rows.first + row, head, d, x);
        const float scale = a.head_scale != nullptr ? a.head_scale[head] : scale_of_row[row];
        store<WIDTH>(x, scale,
                     static_cast<kv8_e4m3 *>(a.codes) + (rows.first + row) * a.codes_stride_row +
                         head * a.codes_stride_head + d);
    });
}

}  // namespace
}  // namespace kv8

#define KV8_QUANTIZE_Q_KERNELS(name, SOURCE, WIDTH)                                           \
    extern "C" __global__ void __launch_bounds__(KV8_QUANTIZE_Q_THREADS)                      \
        kv8_q_absmax_##name##__sm80(const __grid_constant__ kv8_quantize_q_kernel_args a) {   \
        kv8::find_absmax<WIDTH, SOURCE>(a);                                                   \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(KV8_QUANTIZE_Q_THREADS)                      \
        kv8_q_quantize_##name##__sm80(const __grid_constant__ kv8_quantize_q_kernel_args a) { \
        kv8::quantize<WIDTH, SOURCE>(a);                                                      \
    }
KV8_QUANTIZE_Q_KERNELS(f32_x8, float, 8)
KV8_QUANTIZE_Q_KERNELS(f32_x1, float, 1)
KV8_QUANTIZE_Q_KERNELS(bf16_x8, kv8_bf16, 8)
KV8_QUANTIZE_Q_KERNELS(bf16_x1, kv8_bf16, 1)
KV8_QUANTIZE_Q_KERNELS(f16_x8, kv8_f16, 8)
KV8_QUANTIZE_Q_KERNELS(f16_x1, kv8_f16, 1)
