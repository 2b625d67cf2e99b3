// append_rope.cu - rotate K, quantise K and V, store them in their pages, in one pass.
//
// Grid, block, shared memory as append.cu; bytes: also the cosines and sines of every row. Bits:
// those of kv8_cache_append, but for the sign and payload of a NaN that comes out of the
// rotation, which differ between processors too.
//
// SPDX-License-Identifier: Apache-2.0
#include "append_body.cuh"

namespace kv8 {

static __device__ __forceinline__ const float *angles(const kv8_append_kernel_args &a,
                                                      int32_t row) {
    return a.cos_sin + int64_t{row} * a.plane[0].head_dim;
}

// As kv8_rope_rotate: two products and one sum, each rounded to f32.
static __device__ __forceinline__ float rotate_first(float x, float y, float cosine, float sine) {
    return __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
}
static __device__ __forceinline__ float rotate_second(float x, float y, float cosine, float sine) {
    return __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
}

// Pair i is elements i and i + head_dim / 2.
struct HalvesRotated {
    static constexpr bool rotates = true, pairs = false;
    static __device__ __forceinline__ void eights(const kv8_append_kernel_args &a, int32_t row,
                                                  int32_t d, float low[8], float high[8]) {
        float cosine[8], sine[8];
        widen8(load8(angles(a, row) + d), cosine);
        widen8(load8(angles(a, row) + a.plane[0].head_dim / 2 + d), sine);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = low[i], y = high[i];
            low[i] = rotate_first(x, y, cosine[i], sine[i]);
            high[i] = rotate_second(x, y, cosine[i], sine[i]);
        }
    }
    template <typename SOURCE>
    static __device__ __forceinline__ float one(const kv8_append_kernel_args &a, int32_t row_idx,
                                                int32_t head_dim, const SOURCE *row, int32_t d) {
        const int32_t half = head_dim / 2, i = d < half ? d : d - half;
        const float cosine = angles(a, row_idx)[i], sine = angles(a, row_idx)[half + i];
        const float x = widen(row[i]), y = widen(row[half + i]);
        return d < half ? rotate_first(x, y, cosine, sine) : rotate_second(x, y, cosine, sine);
    }
};

// Pair i is elements 2 i and 2 i + 1.
struct PairsRotated {
    static constexpr bool rotates = true, pairs = true;
    // Four pairs, the first of them `pair`.
    static __device__ __forceinline__ void eight(const float *cos_sin, int32_t half, int32_t pair,
                                                 float x[8]) {
        const float4 c = __ldg(reinterpret_cast<const float4 *>(cos_sin + pair));
        const float4 s = __ldg(reinterpret_cast<const float4 *>(cos_sin + half + pair));
        const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float first = x[2 * i], second = x[2 * i + 1];
            x[2 * i] = rotate_first(first, second, cosine[i], sine[i]);
            x[2 * i + 1] = rotate_second(first, second, cosine[i], sine[i]);
        }
    }
    static __device__ __forceinline__ void eights(const kv8_append_kernel_args &a, int32_t row,
                                                  int32_t d, float low[8], float high[8]) {
        const int32_t half = a.plane[0].head_dim / 2;
        eight(angles(a, row), half, d / 2, low);
        eight(angles(a, row), half, (half + d) / 2, high);
    }
    template <typename SOURCE>
    static __device__ __forceinline__ float one(const kv8_append_kernel_args &a, int32_t row_idx,
                                                int32_t head_dim, const SOURCE *row, int32_t d) {
        const int32_t i = d / 2;
        const float cosine = angles(a, row_idx)[i], sine = angles(a, row_idx)[head_dim / 2 + i];
        const float x = widen(row[2 * i]), y = widen(row[2 * i + 1]);
        return d % 2 == 0 ? rotate_first(x, y, cosine, sine) : rotate_second(x, y, cosine, sine);
    }
};

}  // namespace kv8

// Blocks of a multiprocessor, which bound the registers: f32 rows in flight take more of them, and
// so do rotated neighbours, and codes made by hand, before sm_89.
#if __CUDA_ARCH__ < 890
#define KV8_APPEND_ROPE_BLOCKS(SOURCE, ROTATED) 3
#else
#define KV8_APPEND_ROPE_BLOCKS(SOURCE, ROTATED) (sizeof(SOURCE) == 4 || kv8::ROTATED::pairs ? 3 : 4)
#endif
#define KV8_APPEND_ROPE_KERNEL(name, SOURCE, EIGHTS, ROTATED)                             \
    extern "C" __global__ void __launch_bounds__(KV8_APPEND_THREADS,                      \
                                                 KV8_APPEND_ROPE_BLOCKS(SOURCE, ROTATED)) \
        kv8_append_##name##__sm80(const __grid_constant__ kv8_append_kernel_args a) {     \
        kv8::append_rows<SOURCE, EIGHTS, kv8::ROTATED>(a);                                \
    }
#define KV8_APPEND_ROPE_KERNELS(op, ROTATED)                       \
    KV8_APPEND_ROPE_KERNEL(op##_f32_x8, float, true, ROTATED)      \
    KV8_APPEND_ROPE_KERNEL(op##_f32_x1, float, false, ROTATED)     \
    KV8_APPEND_ROPE_KERNEL(op##_bf16_x8, kv8_bf16, true, ROTATED)  \
    KV8_APPEND_ROPE_KERNEL(op##_bf16_x1, kv8_bf16, false, ROTATED) \
    KV8_APPEND_ROPE_KERNEL(op##_f16_x8, kv8_f16, true, ROTATED)    \
    KV8_APPEND_ROPE_KERNEL(op##_f16_x1, kv8_f16, false, ROTATED)
KV8_APPEND_ROPE_KERNELS(rope, HalvesRotated)
KV8_APPEND_ROPE_KERNELS(rope_pairs, PairsRotated)
