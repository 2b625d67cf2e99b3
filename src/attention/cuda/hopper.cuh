/* hopper.cuh - the sm_90a instructions that the prefill kernels use, one function each.
 *
 * Barriers in shared memory, the order between ordinary stores and the tensor cores, matrix
 * descriptors and wgmma. Knows nothing of attention.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_HOPPER_CUH
#define KV8_HOPPER_CUH

#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* --- barriers --- */

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
/* One look, without waiting. */
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
/* Named barrier of num_threads, a multiple of 32. */
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
/* This thread's ordinary stores to shared memory come before what the tensor cores read next. */
__device__ __forceinline__ void fence_stores_before_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Multiples of 16 bytes into the L2. */
__device__ __forceinline__ void prefetch_bulk(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* --- wgmma --- */

/* Descriptor of a matrix in shared memory in rows of 128 bytes under the 128-byte swizzle (16-byte
 * chunk c of row r stands at chunk c ^ (r % 8)), eight rows 1024 bytes apart from the next eight.
 * group_bytes: distance of column groups of 64 where columns are the M or N index; else unused.
 * This is its lower half, which moves with the address (below 256 KiB) by bytes / 16. The value is
 * made uniform for the warp here, once, or the compiler does it for each use. */
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address, uint32_t group_bytes) {
    return __shfl_sync(~0u, address >> 4 | (group_bytes >> 4) << 16, 0);
}
__device__ __forceinline__ uint64_t descriptor_at(uint32_t lower, uint32_t bytes) {
    const uint32_t upper = (1024 >> 4) | 1u << 30;
    return (uint64_t)upper << 32 | (lower + (bytes >> 4));
}
/* The same for rows of ROW_BYTES: 128, or 64 under the 64-byte swizzle (chunk c of row r stands at
 * c ^ (r / 2 % 4)), eight rows 512 bytes apart from the next. */
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t row_descriptor_at(uint32_t lower, uint32_t bytes) {
    static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "swizzles");
    const uint32_t upper = (8 * ROW_BYTES >> 4) | (ROW_BYTES == 128 ? 1u : 2u) << 30;
    return (uint64_t)upper << 32 | (lower + (bytes >> 4));
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/* The compiler may not move uses of these registers across this point. */
template <int N>
__device__ __forceinline__ void registers_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
template <int N>
__device__ __forceinline__ void registers_pin(uint32_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i]));
}

#define KV8_D8(d, i)                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define KV8_D32(d) KV8_D8(d, 0), KV8_D8(d, 8), KV8_D8(d, 16), KV8_D8(d, 24)
#define KV8_D64(d)                                                                          \
    KV8_D8(d, 0), KV8_D8(d, 8), KV8_D8(d, 16), KV8_D8(d, 24), KV8_D8(d, 32), KV8_D8(d, 40), \
        KV8_D8(d, 48), KV8_D8(d, 56)
#define KV8_REGS_32                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define KV8_REGS_64                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
    "%56, %57, %58, %59, %60, %61, %62, %63}"

#define KV8_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KV8_REGS_36                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}"
#define KV8_REGS_68                                                                               \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
    "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
    "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67}"

/* d (64 x 128) = or += A (64 x 16, shared) * B (16 x 128, shared, rows are columns of d). */
template <bool BF16>
__device__ __forceinline__ void wgmma_shared_n128(float (&d)[64], uint64_t a, uint64_t b,
                                                  int accumulate) {
#define KV8_WGMMA(TYPE)                                                              \
    asm volatile(                                                                    \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                 \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " KV8_REGS_64 \
        ", %64, %65, p, 1, 1, 0, 0;\n}\n"                                            \
        : KV8_D64(d)                                                                 \
        : "l"(a), "l"(b), "r"(accumulate))
    if (BF16)
        KV8_WGMMA("bf16");
    else
        KV8_WGMMA("f16");
#undef KV8_WGMMA
}

/* d (64 x 64 or 64 x 128) += A (64 x 16, registers) * B (16 x N, shared, rows are k). */
template <bool BF16>
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const uint32_t *a, uint64_t b) {
#define KV8_WGMMA(TYPE)                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " KV8_REGS_32 \
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                \
                 : KV8_D32(d)                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    if (BF16)
        KV8_WGMMA("bf16");
    else
        KV8_WGMMA("f16");
#undef KV8_WGMMA
}
template <bool BF16>
__device__ __forceinline__ void wgmma_registers(float (&d)[64], const uint32_t *a, uint64_t b) {
#define KV8_WGMMA(TYPE)                                                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " KV8_REGS_64 \
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"                                 \
                 : KV8_D64(d)                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    if (BF16)
        KV8_WGMMA("bf16");
    else
        KV8_WGMMA("f16");
#undef KV8_WGMMA
}

/* --- wgmma of e4m3 by e4m3 or e5m2; both operands' rows run along k --- */

/* d (64 x 64) = or += A (64 x 32, shared) * B (32 x 64, shared). */
template <bool E5M2>
__device__ __forceinline__ void wgmma8_shared(float (&d)[32], uint64_t a, uint64_t b,
                                              int accumulate) {
#define KV8_WGMMA(TYPE)                                                         \
    asm volatile(                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                            \
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3." TYPE " " KV8_REGS_32 \
        ", %32, %33, p, 1, 1;\n}\n"                                             \
        : KV8_D32(d)                                                            \
        : "l"(a), "l"(b), "r"(accumulate))
    if (E5M2)
        KV8_WGMMA("e5m2");
    else
        KV8_WGMMA("e4m3");
#undef KV8_WGMMA
}

/* d, e (64 x 64 and 64 x 8, or 64 x 128 and 64 x 8) = or += A (64 x 32, registers) * B (32 x N,
 * shared), N = 72 or 136. */
template <bool E5M2>
__device__ __forceinline__ void wgmma8_registers(float (&d)[32], float (&e)[4], const uint32_t *a,
                                                 uint64_t b, int accumulate) {
#define KV8_WGMMA(TYPE)                                                         \
    asm volatile(                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %41, 0;\n"                            \
        "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3." TYPE " " KV8_REGS_36 \
        ", {%36, %37, %38, %39}, %40, p, 1, 1;\n}\n"                            \
        : KV8_D32(d), KV8_D4(e, 0)                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
    if (E5M2)
        KV8_WGMMA("e5m2");
    else
        KV8_WGMMA("e4m3");
#undef KV8_WGMMA
}
template <bool E5M2>
__device__ __forceinline__ void wgmma8_registers(float (&d)[64], float (&e)[4], const uint32_t *a,
                                                 uint64_t b, int accumulate) {
#define KV8_WGMMA(TYPE)                                                          \
    asm volatile(                                                                \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %73, 0;\n"                             \
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3." TYPE " " KV8_REGS_68 \
        ", {%68, %69, %70, %71}, %72, p, 1, 1;\n}\n"                             \
        : KV8_D64(d), KV8_D4(e, 0)                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
    if (E5M2)
        KV8_WGMMA("e5m2");
    else
        KV8_WGMMA("e4m3");
#undef KV8_WGMMA
}

#endif
