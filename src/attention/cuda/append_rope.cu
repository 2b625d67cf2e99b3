/* append_rope.cu - rotate K, quantise K and V, store them in their pages, in one pass.
 *
 * Grid, block, shared memory as append.cu; bytes: also the cosines and sines of every row. Bits:
 * those of kv8_attention_append_rope, but for the sign and payload of a NaN that comes out of the
 * rotation, which differ between processors too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_body.cuh"

namespace kv8 {

/* As kv8_rope_rotate: two products and one sum, each rounded to f32. */
struct rotated {
    static constexpr bool rotates = true;
    static __device__ __forceinline__ const float *angles(const kv8_append_kernel_args &a,
                                                          int32_t row) {
        return a.cos_sin + int64_t{row} * a.plane[0].head_dim;
    }
    static __device__ __forceinline__ void eights(const kv8_append_kernel_args &a, int32_t row,
                                                  int32_t d, float low[8], float high[8]) {
        float cosine[8], sine[8];
        widen8(load8(angles(a, row) + d), cosine);
        widen8(load8(angles(a, row) + a.plane[0].head_dim / 2 + d), sine);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = low[i], y = high[i];
            low[i] = __fsub_rn(__fmul_rn(x, cosine[i]), __fmul_rn(y, sine[i]));
            high[i] = __fadd_rn(__fmul_rn(y, cosine[i]), __fmul_rn(x, sine[i]));
        }
    }
    template <typename SOURCE>
    static __device__ __forceinline__ float one(const kv8_append_kernel_args &a, int32_t row_idx,
                                                int32_t head_dim, const SOURCE *row, int32_t d) {
        const int32_t half = head_dim / 2, i = d < half ? d : d - half;
        const float cosine = angles(a, row_idx)[i], sine = angles(a, row_idx)[half + i];
        const float x = widen(row[i]), y = widen(row[half + i]);
        return d < half ? __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine))
                        : __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
    }
};

}  // namespace kv8

/* Blocks of a multiprocessor, which bound the registers: f32 rows in flight take more of them, and
 * so do codes made by hand, before sm_89. */
#if __CUDA_ARCH__ < 890
#define KV8_APPEND_ROPE_BLOCKS(SOURCE) 3
#else
#define KV8_APPEND_ROPE_BLOCKS(SOURCE) (sizeof(SOURCE) == 4 ? 3 : 4)
#endif
#define KV8_APPEND_ROPE_KERNEL(name, SOURCE, EIGHTS)                                       \
    extern "C" __global__ void __launch_bounds__(KV8_APPEND_THREADS,                       \
                                                 KV8_APPEND_ROPE_BLOCKS(SOURCE))           \
        kv8_append_rope_##name##__sm80(const __grid_constant__ kv8_append_kernel_args a) { \
        kv8::append_rows<SOURCE, EIGHTS, kv8::rotated>(a);                                 \
    }
KV8_APPEND_ROPE_KERNEL(f32_x8, float, true)
KV8_APPEND_ROPE_KERNEL(f32_x1, float, false)
KV8_APPEND_ROPE_KERNEL(bf16_x8, kv8_bf16, true)
KV8_APPEND_ROPE_KERNEL(bf16_x1, kv8_bf16, false)
KV8_APPEND_ROPE_KERNEL(f16_x8, kv8_f16, true)
KV8_APPEND_ROPE_KERNEL(f16_x1, kv8_f16, false)
